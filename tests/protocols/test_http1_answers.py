"""What is kept of h11's answers, with h11 as the reference; `test_http1_responses` has heads and bodies made of it."""

from __future__ import annotations

import itertools

import h11
import pytest

from protocols.http1_answers import frame_of, irregular_head, plain_lines

STATUSES = (200, 204, 304, 400, 404, 431, 503, 599)


def requested(version: bytes | None, *, is_head: bool) -> h11.Connection:
    """As unlike the request of `frame_of` as one may be that is answered alike."""
    connection = h11.Connection(h11.SERVER)
    if version is not None:
        method = b"HEAD" if is_head else b"POST"
        fields = b"Host: b.example\r\nX-One: 1\r\nUpgrade: h2c\r\nExpect: 100-continue\r\nContent-Length: 5\r\n"
        connection.receive_data(b"%b /a?b HTTP/%b\r\n%b\r\nhello" % (method, version, fields))
        while not isinstance(connection.next_event(), h11.EndOfMessage):
            pass
    return connection


@pytest.mark.parametrize("version", [None, b"1.0", b"1.1"])
@pytest.mark.parametrize("status", STATUSES)
def test_every_kind_is_h11s(version: bytes | None, status: int) -> None:
    """Its bytes, and whether the connection goes on."""
    methods = (False,) if version is None else (False, True)
    for is_head, close, length in itertools.product(methods, (False, True), (None, 0, 1, 12345)):
        frame = frame_of(status, version, length is not None, is_head=is_head, close=close)
        reference = requested(version, is_head=is_head)
        fields = [] if length is None else [("Content-Length", str(length))]
        fields += [("Connection", "close")] if close else []
        head = reference.send(h11.Response(status_code=status, headers=fields, reason=frame.status_line[13:-2]))
        digits = b"" if length is None else b"%d" % length
        assert frame.status_line + frame.framing + digits + frame.behind_length == head
        if length and reference.our_state is h11.SEND_BODY and not is_head and status not in (204, 304):
            reference.send(h11.Data(data=b"a" * length))
        assert frame.end == reference.send(h11.EndOfMessage())
        assert frame.keeps is (reference.our_state is h11.DONE and reference.their_state is h11.DONE)


def test_what_is_not_plain_is_left_to_h11() -> None:
    for name, values in {
        b"Connection": [b"x"],
        b"host": [b"a"],
        b"a b": [b"1"],
        b"X": [b" a", b"a\t", b"", b"\n"],
    }.items():
        for value in values:
            assert plain_lines(((b"X-One", b"1"), (name, value))) is None
    assert plain_lines(((b"X-One", b"1"), (b"X-Two", b"a b"))) == b"X-One: 1\r\nX-Two: a b\r\n"
    head = irregular_head(((b"Connection", b"x"),), 200, b"1.1", 0, is_head=False, close=True)
    assert head == b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: x, close\r\n\r\n"
