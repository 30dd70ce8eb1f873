"""What one HTTP/1.1 connection sends, with h11 as the reference for every byte."""

from __future__ import annotations

from http import HTTPStatus

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.http1 import Request
from tests.support.http1_requests import GET, HEADERS, HOST, answer, connect


def test_a07_empty_writes_emit_nothing() -> None:
    """Case A07: one empty chunk, at the end; the next response on the connection parses."""
    http = connect(GET + GET)
    data = http.head(200, HEADERS, length=None)
    data += http.body(b"") + http.body(b"a") + http.body(b"") + http.end()
    assert data.endswith(b"\r\n\r\n1\r\na\r\n0\r\n\r\n")
    http.next_request()
    assert answer(http).startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize(("method", "status"), [(b"HEAD", 200), (b"GET", 204), (b"GET", 304)])
@pytest.mark.parametrize("length", [None, 2])
def test_responses_without_a_body(method: bytes, status: int, length: int | None) -> None:
    """RFC 9110 6.4.1, 8.6; RFC 9112 6.3."""
    http = connect(method + b" / HTTP/1.1\r\n" + HOST + b"\r\n" + GET)
    head = http.head(status, HEADERS, length=length)
    assert http.body(b"ok") + http.end() == b""
    assert (b"Content-Length: 2\r\n" in head) is (length is not None and status != 204)
    assert (b"Transfer-Encoding" in head) is (length is None and method == b"HEAD")
    assert not http.must_close
    assert isinstance(http.next_request()[0], Request)


@pytest.mark.parametrize("value", [b"a\r\nb", b"a\nb", b"a\rb", b"a\x00b", b"\x7f", b"\x1b[0m", b" a", b"a "])
def test_header_injection(value: bytes) -> None:
    http = connect(GET)
    with pytest.raises(ValueError):
        http.head(200, [(b"X", value)], length=0)
    assert answer(http)  # the response can still be made


@pytest.mark.parametrize("name", [b"", b"a b", b"a:", b"a\r\nb", b"Content-Length", b"transfer-encoding"])
def test_header_names(name: bytes) -> None:
    with pytest.raises(ValueError):
        connect(GET).head(200, [(name, b"1")], length=0)


@pytest.mark.parametrize("status", [99, 100, 101, 1000])
def test_status_out_of_range(status: int) -> None:
    with pytest.raises(ValueError):
        connect(GET).head(status, [], length=0)


def test_unknown_status_has_no_phrase() -> None:
    assert connect(GET).head(599, [], length=0).startswith(b"HTTP/1.1 599 \r\n")


def test_length_is_kept() -> None:
    http = connect(GET)
    http.head(200, HEADERS, length=2)
    with pytest.raises(ValueError):
        http.body(b"too much")
    assert http.must_close
    http = connect(GET)
    http.head(200, HEADERS, length=2)
    with pytest.raises(ValueError):
        http.end()
    assert http.must_close


def test_calls_out_of_turn() -> None:
    http = connect(GET)
    for call in (lambda: http.body(b"x"), http.end, http.next_request):
        with pytest.raises(RuntimeError):
            call()
    http.head(200, HEADERS, length=None)
    for call in (lambda: http.head(200, HEADERS, length=0), http.next_request):
        with pytest.raises(RuntimeError):
            call()
    http.end()
    for call in (lambda: http.body(b"x"), http.end):
        with pytest.raises(RuntimeError):
            call()


NAMES = (
    st.sampled_from([b"Date", b"X-Stream-Id", b"host", b"Connections", b"a:", b"a b", b"X: 1\r\nY", b""])
    | st.binary(min_size=1, max_size=3)
).filter(lambda name: name.lower() not in (b"content-length", b"transfer-encoding", b"connection"))
VALUES = st.sampled_from([b"", b"a", b"a\t b", b"\xff", b" a", b"a ", b"a\r\nb: c", b"\x01"]) | st.binary(max_size=4)


@given(
    st.sampled_from([GET, b"GET / HTTP/1.0\r\n\r\n", b"HEAD / HTTP/1.1\r\n" + HOST + b"\r\n"]),
    st.lists(st.tuples(NAMES, VALUES), max_size=4),
    st.sampled_from([None, 0, 7]),
    st.booleans(),
    st.sampled_from([200, 404, 304, 204, 599, 99]),
)
def test_every_head_is_h11s(
    request: bytes, fields: list[tuple[bytes, bytes]], length: int | None, close: bool, status: int
) -> None:
    """The fields that are written by hand stand as h11 would have written them, and what it refuses is refused."""
    http, reference = connect(request), h11.Connection(h11.SERVER)
    reference.receive_data(request)
    while reference.their_state in (h11.IDLE, h11.SEND_BODY):
        reference.next_event()
    told = [*fields]
    told += [(b"Content-Length", b"%d" % length)] if length is not None and status != 204 else []
    told += [(b"Connection", b"close")] if close else []
    try:
        reason = HTTPStatus(status).phrase.encode() if status in (200, 404, 304, 204) else b""
        response = h11.Response(status_code=status, headers=told, reason=reason)
        refused = any((byte < 32 and byte != 9) or byte == 127 for _, value in fields for byte in value)
    except h11.LocalProtocolError:
        refused = True
    if refused:
        with pytest.raises(ValueError):
            http.head(status, fields, length=length, close=close)
        assert http.head(200, HEADERS, length=None)  # the response can still be made
    else:
        assert http.head(status, fields, length=length, close=close) == reference.send(response)


@given(
    st.sampled_from([GET, b"GET / HTTP/1.0\r\n\r\n", b"HEAD / HTTP/1.1\r\n" + HOST + b"\r\n"]),
    st.lists(st.binary(max_size=20) | st.binary(min_size=250, max_size=260), max_size=6),
    st.booleans(),
    st.booleans(),
    st.sampled_from([200, 404, 304, 204]),
)
def test_every_byte_is_h11s(request: bytes, parts: list[bytes], with_length: bool, close: bool, status: int) -> None:
    """The hand-written framing is what h11 would have written, and its state ends where h11's would."""
    length = sum(map(len, parts)) if with_length else None
    http = connect(request)
    ours = http.head(status, HEADERS, length=length, close=close)
    body = b"".join(http.body(part) for part in parts)
    if length is None and not request.startswith(b"HEAD") and status not in (204, 304):
        assert b"".join(map(http.framer(), filter(None, parts))) == body
    else:
        with pytest.raises(RuntimeError):
            http.framer()
    ours += body + http.end()

    reference = h11.Connection(h11.SERVER)
    reference.receive_data(request)
    while reference.their_state in (h11.IDLE, h11.SEND_BODY):
        reference.next_event()
    headers = list(HEADERS)
    headers += [(b"Content-Length", b"%d" % length)] if length is not None and status != 204 else []
    headers += [(b"Connection", b"close")] if close else []
    reason = ours.split(b" ", 2)[2].partition(b"\r\n")[0]
    theirs = reference.send(h11.Response(status_code=status, headers=headers, reason=reason))
    if not request.startswith(b"HEAD") and status not in (204, 304):
        theirs += b"".join(reference.send(h11.Data(data=part)) for part in parts)
    theirs += reference.send(h11.EndOfMessage())
    assert ours == theirs
    assert http.must_close is (reference.our_state is not h11.DONE)
