"""Heads that were read before: what is remembered says what reading anew would, and nothing else is remembered."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols import http1_heads
from protocols.http1 import Body, BodyEnd, Event, Http1, Refusal, Request

MAX_HEADER = 4096


@pytest.fixture(autouse=True)
def _nothing_known() -> Iterator[None]:
    http1_heads.forget()
    yield
    http1_heads.forget()


def read(data: bytes, cuts: list[int] | None = None, *, max_header: int = MAX_HEADER) -> list[Event]:
    """The events of one connection's first request, the body in one."""
    http = Http1(max_header=max_header)
    edges = sorted({min(cut, len(data)) for cut in cuts or ()} | {0, len(data)})
    events = [event for pair in itertools.pairwise(edges) for event in http.receive(data[slice(*pair)])]
    body = b"".join(event.data for event in events if isinstance(event, Body))
    others: list[Event] = [event for event in events if not isinstance(event, Body)]
    return [*others[:1], Body(body), *others[1:]]


def post(*fields: bytes, body: bytes = b"hello") -> bytes:
    return b"POST /x HTTP/1.1\r\nHost: a\r\n" + b"".join(field + b"\r\n" for field in fields) + b"\r\n" + body


def length(number: int | bytes) -> bytes:
    return b"Content-Length: %b" % (number if isinstance(number, bytes) else b"%d" % number)


def test_h11_is_asked_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the bodies differ in length, and on other connections."""
    asked: list[object] = []
    make = h11.Connection
    monkeypatch.setattr(h11, "Connection", lambda *a, **k: asked.append(a) or make(*a, **k))
    for body in (b"hello", b"longer than that", b"hello", b"!"):
        request, got, end = read(post(length(len(body)), b"X-One: 1", body=body))
        assert isinstance(request, Request)
        assert request.content_length == len(body)
        assert request.headers == ((b"host", b"a"), (b"content-length", b"%d" % len(body)), (b"x-one", b"1"))
        assert (got, end) == (Body(body), BodyEnd())
    assert len(asked) == 2


@pytest.mark.parametrize(
    "fields",
    [
        (b"Content-Length:",),
        (b"Content-Length: ",),
        (b"Content-Length: 5, 5",),
        (b"Content-Length: +5",),
        (b"Content-Length: 5 5",),
        (b"Content-Length: 0x5",),
        (b"Content-Length : 5",),
        (b"Content-Length: 5", b"Content-Length: 5"),
        (b"Content-Length: 5", b"content-length: "),
        (b"Content-Length: ", b"content-length: 5"),
        (b"Content-Length: 5", b"Transfer-Encoding: chunked"),
        (b"Content-Length: 5\n",),
        (b" Content-Length: 5",),
        (b"Content-Length: " + b"9" * 19,),
    ],
)
def test_a09_nothing_smuggles_past_a_head_that_is_known(fields: tuple[bytes, ...]) -> None:
    """Case A09, behind a head that differs in its length only."""
    for _ in range(4):
        assert isinstance(read(post(length(5)))[0], Request)
        assert isinstance(read(post(*fields))[0], Refusal)


@pytest.mark.parametrize("number", [b"0", b"05", b"7", b"5 ", b"9" * 18])
def test_other_lengths_say_what_they_say(number: bytes) -> None:
    for _ in range(3):
        read(post(length(5)))
    for _ in range(3):
        request = read(post(length(number)))[0]
        assert isinstance(request, Request)
        assert request.content_length == int(number)
        assert request.header(b"content-length") == number.strip()


@pytest.mark.parametrize(
    "fields",
    [
        (b"Transfer-Encoding: chunked",),
        (length(5), b"Expect: 100-continue"),
        (b"Connection: upgrade", b"Upgrade: websocket"),
        (length(5), b"X: " + b"a" * http1_heads.HEAD_BYTES_MAX),
        (length(5), *[b"X: a"] * http1_heads.FIELDS_MAX),
    ],
)
def test_what_is_always_read(fields: tuple[bytes, ...]) -> None:
    method = b"GET" if b"Upgrade: websocket" in fields else b"POST"
    body = b"" if method == b"GET" else b"5\r\nhello\r\n0\r\n\r\n" if b"chunked" in fields[0] else b"hello"
    head = post(*fields, body=b"").replace(b"POST", method)
    first = read(head + body)
    assert isinstance(first[0], Request)
    assert isinstance(first[-1], BodyEnd)
    for _ in range(3):
        assert read(head + body) == first
        assert http1_heads.find(head) is None


def test_each_connection_has_its_own_limit() -> None:
    data = post(length(5), b"X: " + b"a" * 1000)
    for _ in range(3):
        assert isinstance(read(data)[0], Request)
    assert [event.status for event in read(data, max_header=500) if isinstance(event, Refusal)] == [431]


def test_they_are_bounded() -> None:
    for number in range(http1_heads.HEADS_MAX * 2 + 1):
        for _ in range(2):
            read(post(b"X: %d" % number, body=b""))
        assert http1_heads.count()[0] <= http1_heads.HEADS_MAX
    assert http1_heads.find(post(b"X: %d" % number, body=b"")) is not None
    assert http1_heads.find(post(b"X: 0", body=b"")) is None


def test_heads_that_come_once_push_none_out() -> None:
    for _ in range(2):
        read(post(b"X: again", body=b""))
    for number in range(http1_heads.HASHES_MAX * 2):
        read(post(b"X: %d" % number, body=b""))
        assert http1_heads.count()[1] <= http1_heads.HASHES_MAX
    assert http1_heads.find(post(b"X: again", body=b"")) is not None
    assert http1_heads.count()[0] == 1


LINES = st.sampled_from(
    (
        *(b"Content-Length: 5\r\n", b"content-length: 12\r\n", b"Content-Length:5\r\n", b"Content-Length: 05\r\n"),
        *(b"Content-Length: \r\n", b"CONTENT-LENGTH: 5 \r\n", b"X: Content-Length: 5\r\n", b"Content-Length: 0\r\n"),
        *(b"Host: a\r\n", b"Host: a\r\n", b"X: 1\r\n", b"Expect: 100-continue\r\n", b"Connection: close\r\n"),
        *(b"Transfer-Encoding: chunked\r\n", b"Connection: upgrade\r\nUpgrade: websocket\r\n", b" X: 1\r\n", b"\n"),
    )
)
HEADS = st.builds(
    lambda line, lines: line + b"".join(lines) + b"\r\n",
    st.sampled_from((b"POST / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\n", b"POST / HTTP/1.0\r\n", b"\r\nGET / HTTP/1.1\r\n")),
    st.lists(LINES, max_size=5),
)


@given(st.lists(HEADS, min_size=1, max_size=4), st.integers(0, 10**18), st.lists(st.integers(0, 200)))
def test_remembering_changes_nothing(heads: list[bytes], number: int, cuts: list[int]) -> None:
    """Whatever was read before, and however the bytes are cut."""
    heads += [head.replace(b"5\r\n", b"%d\r\n" % number) for head in heads]
    bodies = [head + b"5\r\nhello\r\n0\r\n\r\n" for head in heads]
    anew = []
    for data in bodies:
        http1_heads.forget()
        anew.append(read(data))
    http1_heads.forget()
    for _ in range(3):
        assert [read(data) for data in bodies] == anew
    assert [read(data, cuts) for data in bodies] == anew
