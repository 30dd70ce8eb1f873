"""Heads like those that were read before: what is remembered says what reading anew would, and nothing else is
remembered."""

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


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """An entry for each time that h11 is asked."""
    asked: list[object] = []
    make = h11.Connection
    monkeypatch.setattr(h11, "Connection", lambda *a, **k: asked.append(a) or make(*a, **k))
    return asked


def test_h11_is_asked_twice(asked: list[object]) -> None:
    """Also where the bodies differ in length, and on other connections."""
    for body in (b"hello", b"longer than that", b"hello", b"!"):
        request, got, end = read(post(length(len(body)), b"X-One: 1", body=body))
        assert isinstance(request, Request)
        assert request.content_length == len(body)
        assert request.headers == ((b"host", b"a"), (b"content-length", b"%d" % len(body)), (b"x-one", b"1"))
        assert (got, end) == (Body(body), BodyEnd())
    assert len(asked) == 2


PLAIN = (b"1", b"00-0af7651916cd43dd-b7ad-01", b"Mon, 30 Nov 2026 20:15:00 GMT", b'a: "b"  c\\', b"~" * 300)


@pytest.mark.parametrize("name", [b"Traceparent", b"X-Request-ID", b"idempotency-key", b"Date", b"Authorization"])
def test_h11_is_asked_twice_where_values_are_new(name: bytes, asked: list[object]) -> None:
    """Also where the length and the target are, and where it is the first or the last of the fields."""
    for number, value in enumerate(PLAIN):
        body = b"x" * 10**number
        field = name + b": " + value
        for fields in ((field, length(len(body))), (length(len(body)), b"X: 1", field)):
            data = post(*fields, body=body).replace(b"/x", b"/x?%d" % number)
            request, got, end = read(data, max_header=10**4)
            assert isinstance(request, Request)
            assert (request.target, request.header(name.lower())) == (f"/x?{number}", value)
            assert request.content_length == len(body)
            assert (got, end) == (Body(body), BodyEnd())
    assert len(asked) == 4


def test_h11_is_asked_twice_where_targets_are_new(asked: list[object]) -> None:
    """A prompt in the target, or a poll's stream and position."""
    for path in (b"/v1/generate?prompt=%20What?", b"/v1/streams/s_1?after=1", b"/", b"/!$&'()*+,;=:@[]{}|\\^`<>\"~"):
        request = read(b"GET %b HTTP/1.1\r\nHost: a\r\n\r\n" % path)[0]
        assert isinstance(request, Request)
        assert request.path == path.decode()
    assert len(asked) == 2


@pytest.mark.parametrize(
    "other",
    [
        post(length(5), b"Y: 1"),
        post(length(5), b"x: 1"),
        post(b"X: 1", length(5)),
        post(length(5), b"X: 1", b"X: 1"),
        post(length(5), b"X:1"),
        post(length(5), b"X: 1 "),
        post(length(5), b"X:  1"),
        post(length(5), b"X: \xe9"),
        post(length(5), b"X: "),
        post(b"Content-Length: 05", b"X: 1"),
        post(length(5), b"X: 1").replace(b"Host: a", b"Host: b"),
        post(length(5), b"X: 1").replace(b"POST", b"PUT"),
        post(length(5), b"X: 1").replace(b"HTTP/1.1", b"HTTP/1.0"),
        post(length(5), b"X: 1").replace(b"/x", b"http://a/x"),
    ],
)
def test_another_shape_is_read(other: bytes, asked: list[object]) -> None:
    for number in range(3):
        read(post(length(5), b"X: %d" % number))
    assert len(asked) == 2
    assert isinstance(read(other)[0], Request)
    assert len(asked) == 3


def test_what_tells_how_to_read_is_part_of_a_shape() -> None:
    """A connection that closes, an expectation, an upgrade, another host: in a head like others but for the value."""
    for value in (b"keep-alive", b"x", b"keep-alive", b"close", b"x, Close"):
        request = read(post(length(5), b"Connection: " + value))[0]
        assert isinstance(request, Request)
        assert request.keep_alive == (b"lose" not in value)
    for value in (b"x", b"x", b"100-continue"):
        request = read(post(length(5), b"Expect: " + value))[0]
        assert isinstance(request, Request)
        assert request.expect_continue == (value != b"x")
    for value in (b"x", b"x", b"websocket"):
        request = read(post(b"Connection: upgrade", b"Upgrade: " + value, body=b"").replace(b"POST", b"GET"))[0]
        assert isinstance(request, Request)
        assert request.upgrade == (value != b"x")
    assert isinstance(read(post(length(5)).replace(b"Host: a", b"Host: a b"))[0], Refusal)


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
        assert not isinstance(http1_heads.find(head), Request)


def test_each_connection_has_its_own_limit() -> None:
    data = post(length(5), b"X: " + b"a" * 1000)
    for _ in range(3):
        assert isinstance(read(data)[0], Request)
    assert [event.status for event in read(data, max_header=500) if isinstance(event, Refusal)] == [431]


def test_they_are_bounded() -> None:
    """Heads and their shapes."""
    for number in range(http1_heads.HEADS_MAX + 1):
        for _ in range(2):
            read(post(b"X-%d: 1" % number, body=b""))
        assert http1_heads.count()[0] <= http1_heads.HEADS_MAX
    assert isinstance(http1_heads.find(post(b"X-%d: 1" % number, body=b"")), Request)
    assert isinstance(http1_heads.find(post(b"X-%d: 2" % number, body=b"")), Request)
    assert not isinstance(http1_heads.find(post(b"X-0: 1", body=b"")), Request)


@pytest.mark.parametrize("field", [b"X: %d", b"X-%d: 1"])
def test_heads_that_come_once_push_none_out(field: bytes) -> None:
    """Be they of one shape or of many."""
    for _ in range(2):
        read(post(b"X: again", body=b""))
    for number in range(http1_heads.HASHES_MAX + 1):
        read(post(field % number, body=b""))
        assert http1_heads.count()[1] <= http1_heads.HASHES_MAX
    assert isinstance(http1_heads.find(post(b"X: again", body=b"")), Request)
    assert http1_heads.count()[0] == 2


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


def check_that_remembering_changes_nothing(known: list[bytes], others: list[bytes], cuts: list[int]) -> None:
    """Whatever was read before, and however the bytes are cut."""
    anew = []
    for data in known + others:
        http1_heads.forget()
        anew.append(read(data))
    http1_heads.forget()
    for _ in range(2):
        assert [read(data) for data in known] == anew[: len(known)]
    for _ in range(3):
        assert [read(data) for data in known + others] == anew
    assert [read(data, cuts) for data in known + others] == anew


@given(st.lists(HEADS, min_size=1, max_size=4), st.integers(0, 10**18), st.lists(st.integers(0, 200)))
def test_remembering_changes_nothing(heads: list[bytes], number: int, cuts: list[int]) -> None:
    heads += [head.replace(b"5\r\n", b"%d\r\n" % number) for head in heads]
    check_that_remembering_changes_nothing([head + BODY for head in heads], [], cuts)


BODY = b"5\r\nhello\r\n0\r\n\r\n"
TOKENS = st.text("!#$%&'*+-.^_`|~09AZaz", min_size=1, max_size=4)
NAMES = TOKENS | st.sampled_from(
    (
        *("Connection", "Content-Length", "EXPECT", "host", "Transfer-encoding", "Upgrade"),
        *("Connectio", "Content-Length-", "Hosts", "Keep-Alive", "Proxy-Connection", "TE", "Trailer", "HTTP2-Settings"),
        *("Sec-WebSocket-Key", "Sec-WebSocket-Version", "Date", "Traceparent", "Cookie", "Authorization", "X Y", ""),
    )
)
PLAIN_VALUES = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=8).map(str.encode)
VALUES = (
    PLAIN_VALUES
    | st.binary(max_size=3)
    | st.sampled_from((b"5", b"0", b"100-continue", b"close", b"chunked", b"upgrade", b"websocket", b"b:80", b"a, b"))
)
TARGETS = st.sampled_from((b"/", b"/a?b=%20", b"*", b"http://b/", b"/a#b", b"/a b", b"", b"a")) | st.builds(
    lambda rest: b"/" + rest, PLAIN_VALUES | st.binary(max_size=3)
)


@st.composite
def alike(draw: st.DrawFn) -> list[bytes]:
    """Heads with the same names of fields, and other targets and values."""
    method = draw(st.sampled_from((b"POST", b"GET", b"OPTIONS", b"CONNECT")))
    version = draw(st.sampled_from((b"1.1", b"1.1", b"1.0")))
    names = [b"Host", *(name.encode() for name in draw(st.lists(NAMES, max_size=4)))]
    between = draw(st.lists(st.sampled_from((b": ", b": ", b": ", b":", b" : ")), min_size=5, max_size=5))
    heads = []
    for _ in range(draw(st.integers(2, 6))):
        values = [draw(st.sampled_from((b"a", b"a", b"b"))), *(draw(VALUES) for _ in names[1:])]
        fields = [b"".join(parts) for parts in zip(names, between, values, strict=False)]
        heads.append(b"\r\n".join((b"%b %b HTTP/%b" % (method, draw(TARGETS), version), *fields, b"", b"")))
    return heads


@given(alike(), st.integers(0, 4), st.lists(st.integers(0, 200)))
def test_remembering_shapes_changes_nothing(heads: list[bytes], known: int, cuts: list[int]) -> None:
    datas = [head + BODY for head in heads]
    check_that_remembering_changes_nothing(datas[:known], datas[known:], cuts)


KNOWN = [
    b"GET /a?b=%d HTTP/1.1\r\nHost: a\r\nAccept: text/x\r\nConnection: x\r\nTraceparent: %d %d\r\n\r\n" % (n, n, n)
    for n in range(3)
]


def test_any_other_byte_anywhere() -> None:
    """In the place of each byte of a head whose shape is known, before it, and none in its place."""
    head = KNOWN[-1]
    others = []
    for at in range(len(head)):
        others.append(head[:at] + head[at + 1 :])
        for byte in (*b"\x00\t\n\x0b\r #,:Aa5\x7f\x80\xff", head[at] ^ 0x20):
            others += [head[:at] + bytes([byte]) + head[at + skipped :] for skipped in (0, 1)]
    check_that_remembering_changes_nothing(KNOWN, others, [])


@pytest.mark.parametrize("place", [b"/a?", b"b=2", b"text/x", b"ext/", b"/x\r\n", b"Accept", b"a\r\nAcc", b" 2\r"])
def test_each_byte_in_places_that_matter(place: bytes) -> None:
    """First, last and inside: of the target, of a value, of a name."""
    at = KNOWN[-1].index(place)
    others = [KNOWN[-1][:at] + bytes([byte]) + KNOWN[-1][at + 1 :] for byte in range(256)]
    check_that_remembering_changes_nothing(KNOWN, others, [])
