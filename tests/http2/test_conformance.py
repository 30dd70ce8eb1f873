"""RFC 9113 and RFC 7541 section by section, over both ports. The cases have the numbers and the sense of h2spec's, the
public suite for HTTP/2 servers; each is held to the one code that the RFC names, where h2spec takes any end.

`connection` cases: what is sent ends the connection with this code. `stream` cases: it ends stream 1 with this code,
and the connection goes on. `fine` cases: stream 1 is answered, and the connection goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from protocols.http2_guard import ACK, END_HEADERS, END_STREAM, PADDED, PREFACE, PRIORITY, Code, Kind
from tests.http2.conftest import Endpoint
from tests.support.http2 import GET, POST, Closed, Fields, Wire, data, frame, reset, settings, window_update

Send = Callable[[Wire], bytes | list[bytes]]
OPEN = 0  # HEADERS without END_STREAM, and with END_HEADERS, has these flags beside
PUSH = GET[:3]


def priority(stream: int, depends_on: int, weight: int = 15, *, exclusive: bool = False) -> bytes:
    return frame(Kind.PRIORITY, 0, stream, _dependency(depends_on, weight, exclusive))


def _dependency(depends_on: int, weight: int = 15, exclusive: bool = False) -> bytes:
    return (depends_on | (1 << 31 if exclusive else 0)).to_bytes(4, "big") + bytes([weight])


def whole(wire: Wire, *, flags: int = 0, before: bytes = b"", behind: bytes = b"") -> bytes:
    """HEADERS of a GET with bytes around the block."""
    return frame(Kind.HEADERS, END_HEADERS | END_STREAM | flags, 1, before + wire.block(GET) + behind)


def split(wire: Wire, *cuts: int, fields: Fields = GET) -> list[bytes]:
    """A block in pieces: HEADERS, then CONTINUATIONs."""
    block = wire.block([*fields, ("x-long", "y" * 100)])
    pieces = [block[a:b] for a, b in zip((0, *cuts), (*cuts, len(block)), strict=True)]
    first = frame(Kind.HEADERS, END_STREAM, 1, pieces[0])
    rest = [frame(Kind.CONTINUATION, 0, 1, piece) for piece in pieces[1:-1]]
    return [first, *rest, frame(Kind.CONTINUATION, END_HEADERS, 1, pieces[-1])]


def block(*parts: bytes) -> Send:
    """A GET whose block has more parts behind it."""
    return lambda w: whole(w, behind=b"".join(parts))


def request(*fields: tuple[str, str], drop: str = "") -> Send:
    """A GET with more fields, and without one."""
    return lambda w: w.headers(1, [*[f for f in GET if f[0] != drop], *fields])


def replaced(name: str, value: str) -> Send:
    return lambda w: w.headers(1, [(k, value if k == name else v) for k, v in GET])


def opened(then: Callable[[Wire], bytes]) -> Send:
    """An open stream 1, and something behind it."""
    return lambda w: [w.headers(1, POST, end=False), then(w)]


def ended(then: Callable[[Wire], bytes]) -> Send:
    """Stream 1 is closed: its answer was read to the end."""

    def send(wire: Wire) -> bytes:
        wire.send(wire.headers(1))
        wire.answer(1)
        return then(wire)

    return send


def was_reset(then: Callable[[Wire], bytes]) -> Send:
    return lambda w: [w.headers(1, POST, end=False), reset(1), then(w)]


CONNECTION: list[tuple[str, int, Send]] = [
    (
        "http2/4.2/2 DATA beyond SETTINGS_MAX_FRAME_SIZE",
        Code.FRAME_SIZE_ERROR,
        opened(lambda w: data(1, bytes(16_385))),
    ),
    ("http2/4.2/3 HEADERS beyond it", Code.FRAME_SIZE_ERROR, lambda w: frame(Kind.HEADERS, 5, 1, bytes(16_385))),
    ("http2/4.3/1 an invalid header block", Code.COMPRESSION_ERROR, lambda w: frame(Kind.HEADERS, 5, 1, b"\x00")),
    (
        "http2/4.3/2 PRIORITY within a header block",
        Code.PROTOCOL_ERROR,
        lambda w: [split(w, 9)[0], priority(1, 0)],
    ),
    (
        "http2/4.3/3 HEADERS of another stream within one",
        Code.PROTOCOL_ERROR,
        lambda w: [split(w, 9)[0], w.headers(3)],
    ),
    ("http2/5.1/1 idle: DATA", Code.PROTOCOL_ERROR, lambda w: data(1, b"x", end=True)),
    ("http2/5.1/2 idle: RST_STREAM", Code.PROTOCOL_ERROR, lambda w: reset(1)),
    ("http2/5.1/3 idle: WINDOW_UPDATE", Code.PROTOCOL_ERROR, lambda w: window_update(1, 100)),
    ("http2/5.1/4 idle: CONTINUATION", Code.PROTOCOL_ERROR, lambda w: frame(Kind.CONTINUATION, 4, 1, w.block(GET))),
    (
        "http2/5.1/7 half-closed (remote): CONTINUATION",
        Code.PROTOCOL_ERROR,
        lambda w: [w.headers(1), frame(Kind.CONTINUATION, 4, 1, w.block(GET))],
    ),
    (
        "http2/5.1/10 reset: CONTINUATION",
        Code.PROTOCOL_ERROR,
        was_reset(lambda w: frame(Kind.CONTINUATION, 4, 1, w.block(GET))),
    ),
    ("http2/5.1/12 closed: HEADERS", Code.STREAM_CLOSED, ended(lambda w: w.headers(1))),
    (
        "http2/5.1/13 closed: CONTINUATION",
        Code.PROTOCOL_ERROR,
        ended(lambda w: frame(Kind.CONTINUATION, 4, 1, w.block(GET))),
    ),
    ("http2/5.1.1/1 an even stream number", Code.PROTOCOL_ERROR, lambda w: w.headers(2)),
    ("http2/5.1.1/2 a lower stream number", Code.PROTOCOL_ERROR, lambda w: [w.headers(5), w.headers(3)]),
    (
        "http2/5.3.1/1 HEADERS that depend on themselves",
        Code.PROTOCOL_ERROR,
        lambda w: whole(w, flags=PRIORITY, before=_dependency(1)),
    ),
    ("http2/5.3.1/2 PRIORITY that depends on itself", Code.PROTOCOL_ERROR, lambda w: priority(1, 1)),
    (
        "http2/5.4.1/1 an invalid PING, and the close",
        Code.FRAME_SIZE_ERROR,
        lambda w: frame(Kind.PING, 0, 0, b"1234567"),
    ),
    ("http2/5.4.1/2 an invalid PING, and GOAWAY", Code.PROTOCOL_ERROR, lambda w: frame(Kind.PING, 0, 3, b"12345678")),
    (
        "http2/5.5/2 an unknown frame within a header block",
        Code.PROTOCOL_ERROR,
        lambda w: [split(w, 9)[0], frame(0x16, 0, 0, b"12345678")],
    ),
    ("http2/6.1/1 DATA on stream 0", Code.PROTOCOL_ERROR, opened(lambda w: data(0, b"x"))),
    (
        "http2/6.1/3 DATA with too much padding",
        Code.PROTOCOL_ERROR,
        opened(lambda w: frame(Kind.DATA, END_STREAM | PADDED, 1, b"\x06test")),
    ),
    (
        "http2/6.2/1 HEADERS without END_HEADERS, then PRIORITY",
        Code.PROTOCOL_ERROR,
        lambda w: [split(w, 5)[0], priority(1, 0)],
    ),
    ("http2/6.2/3 HEADERS on stream 0", Code.PROTOCOL_ERROR, lambda w: w.headers(0)),
    (
        "http2/6.2/4 HEADERS with too much padding",
        Code.PROTOCOL_ERROR,
        lambda w: frame(Kind.HEADERS, END_HEADERS | END_STREAM | PADDED, 1, b"\xff" + w.block(GET)),
    ),
    ("http2/6.3/1 PRIORITY on stream 0", Code.PROTOCOL_ERROR, lambda w: priority(0, 1)),
    ("http2/6.3/2 PRIORITY that is not 5 bytes", Code.FRAME_SIZE_ERROR, lambda w: frame(Kind.PRIORITY, 0, 1, b"1234")),
    ("http2/6.4/1 RST_STREAM on stream 0", Code.PROTOCOL_ERROR, lambda w: reset(0)),
    (
        "http2/6.4/3 RST_STREAM that is not 4 bytes",
        Code.FRAME_SIZE_ERROR,
        opened(lambda w: frame(Kind.RST_STREAM, 0, 1, b"123")),
    ),
    ("http2/6.5/1 an acknowledgement with a payload", Code.FRAME_SIZE_ERROR, lambda w: settings((1, 4096), flags=ACK)),
    (
        "http2/6.5/2 SETTINGS on a stream",
        Code.PROTOCOL_ERROR,
        lambda w: frame(Kind.SETTINGS, 0, 1, bytes([0, 3, 0, 0, 0, 100])),
    ),
    (
        "http2/6.5/3 SETTINGS that are no multiple of 6 bytes",
        Code.FRAME_SIZE_ERROR,
        lambda w: frame(Kind.SETTINGS, 0, 0, b"\x00\x03\x00"),
    ),
    ("http2/6.5.2/1 ENABLE_PUSH that is not 0 or 1", Code.PROTOCOL_ERROR, lambda w: settings((2, 2))),
    ("http2/6.5.2/2 INITIAL_WINDOW_SIZE above the maximum", Code.FLOW_CONTROL_ERROR, lambda w: settings((4, 1 << 31))),
    ("http2/6.5.2/3 MAX_FRAME_SIZE below the minimum", Code.PROTOCOL_ERROR, lambda w: settings((5, 16_383))),
    ("http2/6.5.2/4 MAX_FRAME_SIZE above the maximum", Code.PROTOCOL_ERROR, lambda w: settings((5, 1 << 24))),
    ("http2/6.7/3 PING on a stream", Code.PROTOCOL_ERROR, lambda w: frame(Kind.PING, 0, 1, b"12345678")),
    ("http2/6.7/4 PING that is not 8 bytes", Code.FRAME_SIZE_ERROR, lambda w: frame(Kind.PING, 0, 0, b"123456")),
    ("http2/6.8/1 GOAWAY on a stream", Code.PROTOCOL_ERROR, lambda w: frame(Kind.GOAWAY, 0, 1, bytes(8))),
    ("http2/6.9/1 an increment of 0 on the connection", Code.PROTOCOL_ERROR, lambda w: window_update(0, 0)),
    (
        "http2/6.9/3 WINDOW_UPDATE that is not 4 bytes",
        Code.FRAME_SIZE_ERROR,
        lambda w: frame(Kind.WINDOW_UPDATE, 0, 0, b"\0\0\1"),
    ),
    (
        "http2/6.9.1/2 the connection's window above 2^31-1",
        Code.FLOW_CONTROL_ERROR,
        lambda w: [window_update(0, (1 << 31) - 1)] * 2,
    ),
    (
        "http2/6.9.2/3 INITIAL_WINDOW_SIZE that overflows a window",
        Code.FLOW_CONTROL_ERROR,
        lambda w: [w.headers(1, POST, end=False), window_update(1, (1 << 31) - 1 - 65_535), settings((4, 1 << 20))],
    ),
    (
        "http2/6.10/2 CONTINUATION followed by DATA",
        Code.PROTOCOL_ERROR,
        lambda w: [*split(w, 9, 20)[:2], data(1, b"x")],
    ),
    (
        "http2/6.10/3 CONTINUATION on stream 0",
        Code.PROTOCOL_ERROR,
        lambda w: [split(w, 9)[0], frame(Kind.CONTINUATION, 4, 0, b"")],
    ),
    (
        "http2/6.10/4 CONTINUATION behind END_HEADERS",
        Code.PROTOCOL_ERROR,
        lambda w: [w.headers(1, end=False), frame(Kind.CONTINUATION, 4, 1, b"")],
    ),
    (
        "http2/6.10/5 CONTINUATION behind a CONTINUATION with END_HEADERS",
        Code.PROTOCOL_ERROR,
        lambda w: [*split(w, 9), frame(Kind.CONTINUATION, 4, 1, b"")],
    ),
    (
        "http2/6.10/6 CONTINUATION behind DATA",
        Code.PROTOCOL_ERROR,
        opened(lambda w: data(1, b"x") + frame(Kind.CONTINUATION, 4, 1, b"")),
    ),
    (
        "http2/8.1/1 a second HEADERS without END_STREAM",
        Code.PROTOCOL_ERROR,
        opened(lambda w: w.headers(1, [("x-t", "1")], end=False)),
    ),
    (
        "http2/8.2/1 PUSH_PROMISE",
        Code.PROTOCOL_ERROR,
        opened(lambda w: frame(Kind.PUSH_PROMISE, END_HEADERS, 1, bytes([0, 0, 0, 2]) + w.block(GET))),
    ),
    ("hpack/2.3.3/1 an index beyond the tables", Code.COMPRESSION_ERROR, block(b"\xc6")),
    ("hpack/4.2/1 a table size update behind a field", Code.COMPRESSION_ERROR, block(b"\x3f\x01")),
    (
        "hpack/5.2/1 Huffman padding of more than 7 bits",
        Code.COMPRESSION_ERROR,
        block(b"\x00\x85\xf2\xb2\x4a\x84\xff\x84\x49\x50\x9f\xff"),
    ),
    (
        "hpack/5.2/2 Huffman padding of zeros",
        Code.COMPRESSION_ERROR,
        block(b"\x00\x85\xf2\xb2\x4a\x84\xff\x83\x49\x50\x90"),
    ),
    (
        "hpack/5.2/3 Huffman with EOS",
        Code.COMPRESSION_ERROR,
        block(b"\x00\x85\xf2\xb2\x4a\x84\xff\x87\x49\x51\xff\xff\xff\xfa\x7f"),
    ),
    ("hpack/6.1/1 index 0", Code.COMPRESSION_ERROR, block(b"\x80")),
    (
        "hpack/6.3/1 a table larger than SETTINGS_HEADER_TABLE_SIZE",
        Code.COMPRESSION_ERROR,
        lambda w: whole(w, before=b"\x3f\xe1\xff\x03"),
    ),
    # Not in h2spec
    ("RFC 9113 3.4: the first frame is not SETTINGS", Code.PROTOCOL_ERROR, lambda w: b""),
    ("RFC 7541 4.2: three table size updates", Code.COMPRESSION_ERROR, lambda w: whole(w, before=b"\x20\x20\x20")),
    ("RFC 7541 5.1: an integer without an end", Code.COMPRESSION_ERROR, block(b"\xff" + b"\xff" * 100)),
]

STREAM: list[tuple[str, int, Send]] = [
    (
        "http2/5.1/5 half-closed (remote): DATA",
        Code.STREAM_CLOSED,
        lambda w: [settings((4, 0)), w.headers(1), data(1, b"x", end=True)],
    ),
    (
        "http2/5.1/6 half-closed (remote): HEADERS",
        Code.STREAM_CLOSED,
        lambda w: [settings((4, 0)), w.headers(1), w.headers(1)],
    ),
    ("http2/5.1/8 reset: DATA", Code.STREAM_CLOSED, was_reset(lambda w: data(1, b"x", end=True))),
    ("http2/5.1/9 reset: HEADERS", Code.STREAM_CLOSED, was_reset(lambda w: w.headers(1))),
    ("http2/5.1/11 closed: DATA", Code.STREAM_CLOSED, ended(lambda w: data(1, b"x", end=True))),
    ("http2/6.1/2 DATA on a stream that is closed", Code.STREAM_CLOSED, ended(lambda w: data(1, b"x"))),
    ("http2/6.9/2 an increment of 0 on a stream", Code.PROTOCOL_ERROR, opened(lambda w: window_update(1, 0))),
    (
        "http2/6.9.1/3 a stream's window above 2^31-1",
        Code.FLOW_CONTROL_ERROR,
        opened(lambda w: window_update(1, (1 << 31) - 1)),
    ),
    ("http2/8.1.2/1 an upper-case field name", Code.PROTOCOL_ERROR, request(("X-TEST", "ok"))),
    ("http2/8.1.2.1/1 an unknown pseudo-header field", Code.PROTOCOL_ERROR, request((":test", "ok"))),
    ("http2/8.1.2.1/2 one of responses", Code.PROTOCOL_ERROR, request((":status", "200"))),
    ("http2/8.1.2.1/3 one in trailers", Code.PROTOCOL_ERROR, opened(lambda w: w.headers(1, [(":method", "GET")]))),
    (
        "http2/8.1.2.1/4 one behind a regular field",
        Code.PROTOCOL_ERROR,
        lambda w: w.headers(1, [*GET[:3], ("x-test", "ok"), GET[3]]),
    ),
    ("http2/8.1.2.2/1 Connection", Code.PROTOCOL_ERROR, request(("connection", "keep-alive"))),
    ("http2/8.1.2.2/1 Proxy-Connection", Code.PROTOCOL_ERROR, request(("proxy-connection", "keep-alive"))),
    ("http2/8.1.2.2/1 Keep-Alive", Code.PROTOCOL_ERROR, request(("keep-alive", "timeout=5"))),
    ("http2/8.1.2.2/1 Transfer-Encoding", Code.PROTOCOL_ERROR, request(("transfer-encoding", "chunked"))),
    ("http2/8.1.2.2/1 Upgrade", Code.PROTOCOL_ERROR, request(("upgrade", "websocket"))),
    ("http2/8.1.2.2/2 TE other than trailers", Code.PROTOCOL_ERROR, request(("te", "trailers, deflate"))),
    ("http2/8.1.2.3/1 an empty :path", Code.PROTOCOL_ERROR, replaced(":path", "")),
    ("http2/8.1.2.3/2 no :method", Code.PROTOCOL_ERROR, request(drop=":method")),
    ("http2/8.1.2.3/3 no :scheme", Code.PROTOCOL_ERROR, request(drop=":scheme")),
    ("http2/8.1.2.3/4 no :path", Code.PROTOCOL_ERROR, request(drop=":path")),
    ("http2/8.1.2.3/5 :method twice", Code.PROTOCOL_ERROR, request((":method", "GET"))),
    ("http2/8.1.2.3/6 :scheme twice", Code.PROTOCOL_ERROR, request((":scheme", "http"))),
    ("http2/8.1.2.3/7 :path twice", Code.PROTOCOL_ERROR, request((":path", "/"))),
    (
        "http2/8.1.2.6/1 a content-length that one DATA frame misses",
        Code.PROTOCOL_ERROR,
        lambda w: [w.headers(1, [*POST, ("content-length", "1")], end=False), data(1, b"test", end=True)],
    ),
    (
        "http2/8.1.2.6/2 or several",
        Code.PROTOCOL_ERROR,
        lambda w: [
            w.headers(1, [*POST, ("content-length", "5")], end=False),
            data(1, b"test"),
            data(1, b"test", end=True),
        ],
    ),
    # Not in h2spec
    (
        "RFC 9113 8.1.1: a body that is too short",
        Code.PROTOCOL_ERROR,
        lambda w: [w.headers(1, [*POST, ("content-length", "9")], end=False), data(1, b"test", end=True)],
    ),
    (
        "RFC 9113 8.1.1: a content-length and no body",
        Code.PROTOCOL_ERROR,
        lambda w: w.headers(1, [*POST, ("content-length", "9")]),
    ),
    (
        "RFC 9113 8.1.1: a body that trailers cut short",
        Code.PROTOCOL_ERROR,
        lambda w: [
            w.headers(1, [*POST, ("content-length", "9")], end=False),
            data(1, b"test"),
            w.headers(1, [("x-t", "1")]),
        ],
    ),
    ("RFC 9113 8.2.1: a space before a value", Code.PROTOCOL_ERROR, request(("x-test", " ok"))),
    ("RFC 9113 8.2.1: a line feed in a value", Code.PROTOCOL_ERROR, request(("x-test", "a\nb"))),
    ("RFC 9113 8.2.1: a colon in a name", Code.PROTOCOL_ERROR, request(("x:test", "ok"))),
    ("RFC 9113 8.3.1: :authority and host differ", Code.PROTOCOL_ERROR, request(("host", "other"))),
    ("RFC 9113 8.3.1: neither of them", Code.PROTOCOL_ERROR, request(drop=":authority")),
    ("RFC 9113 8.5: CONNECT with a :path", Code.PROTOCOL_ERROR, replaced(":method", "CONNECT")),
    ("RFC 8441 4: :protocol without CONNECT", Code.PROTOCOL_ERROR, request((":protocol", "websocket"))),
]

FINE: list[tuple[str, Send]] = [
    ("generic/1/1 the connection's opening", lambda w: w.headers(1)),
    ("generic/2/1 PRIORITY on an idle stream", lambda w: [priority(1, 0), w.headers(1)]),
    ("generic/2/2 WINDOW_UPDATE on a half-closed one", lambda w: [w.headers(1), window_update(1, 9)]),
    ("generic/2/3 PRIORITY on a half-closed one", lambda w: [w.headers(1), priority(1, 0)]),
    ("generic/3.1/1 DATA", opened(lambda w: data(1, b"test", end=True))),
    ("generic/3.1/2 several DATA frames", opened(lambda w: data(1, b"te") + data(1, b"st", end=True))),
    ("generic/3.1/3 DATA with padding", opened(lambda w: frame(Kind.DATA, END_STREAM | PADDED, 1, b"\x03test\0\0\0"))),
    ("generic/3.2/2 HEADERS with padding", lambda w: whole(w, flags=PADDED, before=b"\x03", behind=b"\0\0\0")),
    ("generic/3.2/3 HEADERS with a priority", lambda w: whole(w, flags=PRIORITY, before=_dependency(0, 255))),
    ("generic/3.3/1 PRIORITY of weight 1", lambda w: [w.headers(1), priority(1, 0, 0)]),
    ("generic/3.3/2 PRIORITY of weight 256", lambda w: [w.headers(1), priority(1, 0, 255)]),
    ("generic/3.3/3 PRIORITY with a dependency", lambda w: [w.headers(1), priority(1, 3)]),
    ("generic/3.3/4 an exclusive one", lambda w: [w.headers(1), priority(1, 3, exclusive=True)]),
    ("generic/3.3/5 PRIORITY on a higher idle stream", lambda w: [priority(5, 0), w.headers(1)]),
    ("generic/3.5/1 SETTINGS", lambda w: [settings((3, 100)), w.headers(1)]),
    ("generic/3.7/1 PING", lambda w: [frame(Kind.PING, 0, 0, b"12345678"), w.headers(1)]),
    ("generic/3.9/1 WINDOW_UPDATE on the connection", lambda w: [window_update(0, 1), w.headers(1)]),
    ("generic/3.10/1 CONTINUATION", lambda w: split(w, 9)),
    ("generic/3.10/2 several", lambda w: split(w, 9, 20, 30)),
    ("generic/4/1 GET", lambda w: w.headers(1)),
    ("generic/4/2 HEAD", replaced(":method", "HEAD")),
    ("generic/4/3 POST", opened(lambda w: data(1, b"test", end=True))),
    ("generic/4/4 POST with trailers", opened(lambda w: data(1, b"test") + w.headers(1, [("x-trailer", "ok")]))),
    ("generic/5/1 an indexed field", block(b"\x90")),
    ("generic/5/2 a literal with indexing, indexed name", block(b"\x50\x02ok")),
    ("generic/5/3 new name", block(b"\x40\x01a\x02ok")),
    ("generic/5/4 without indexing, indexed name", block(b"\x0f\x01\x02ok")),
    ("generic/5/5 new name", block(b"\x00\x01a\x02ok")),
    ("generic/5/6 never indexed, indexed name", block(b"\x1f\x01\x02ok")),
    ("generic/5/7 new name", block(b"\x10\x01a\x02ok")),
    ("generic/5/8 a table size update", lambda w: whole(w, before=b"\x3f\xe1\x1f")),
    ("generic/5/9 two of them", lambda w: whole(w, before=b"\x20\x3f\xe1\x1f")),
    ("generic/5/10 Huffman", block(b"\x40\x85\xf2\xb2\x4a\x84\xff\x83\x49\x50\x9f")),
    ("http2/4.1/1 a frame of an unknown type", lambda w: [frame(0x16, 0, 0, bytes(8)), w.headers(1)]),
    ("http2/4.1/2 an undefined flag", lambda w: [frame(Kind.PING, 0x16 & ~1, 0, bytes(8)), w.headers(1)]),
    ("http2/4.1/3 the reserved bit", lambda w: [frame(Kind.PING, 0, 1 << 31, bytes(8)), w.headers(1)]),
    ("http2/4.2/1 DATA of 2^14 bytes", opened(lambda w: data(1, bytes(16_384), end=True))),
    ("http2/5.5/1 an unknown extension frame", lambda w: [frame(0x16, 0, 0, bytes(8)), w.headers(1)]),
    ("http2/6.5.2/5 an unknown setting", lambda w: [settings((0xFF, 1)), w.headers(1)]),
    ("http2/6.5.3/1 a setting twice: the last one holds", lambda w: [settings((4, 0), (4, 65_535)), w.headers(1)]),
    ("http2/6.7/2 PING with ACK is not answered", lambda w: [frame(Kind.PING, ACK, 0, bytes(8)), w.headers(1)]),
    ("http2/6.10/1 several CONTINUATIONs", lambda w: split(w, 1, 2, 3, 50)),
    ("RFC 9113 8.2.3: cookies in pieces", request(("cookie", "a=1"), ("cookie", "b=2"))),
    ("RFC 9113 8.3.1: host in place of :authority", lambda w: w.headers(1, [*GET[:2], GET[3], ("host", "localhost")])),
    ("RFC 9113 8.3.1: * for OPTIONS", lambda w: w.headers(1, [(":method", "OPTIONS"), *GET[1:3], (":path", "*")])),
    ("RFC 9113 8.2.2: TE trailers", request(("te", "trailers"))),
    ("RFC 9218: PRIORITY_UPDATE", lambda w: [frame(0x10, 0, 0, b"\0\0\0\1u=3"), w.headers(1)]),
]


def _ids(cases: list[Any]) -> list[str]:
    return [case[0] for case in cases]


def _send(wire: Wire, send: Send) -> None:
    made = send(wire)
    wire.send(*([made] if isinstance(made, bytes) else made))


@pytest.mark.parametrize(("name", "code", "send"), CONNECTION, ids=_ids(CONNECTION))
def test_connection_errors(echo: Endpoint, name: str, code: int, send: Send) -> None:
    opening = PREFACE + frame(Kind.PING, 0, 0, bytes(8)) if "first frame" in name else None
    with echo.wire(opening=opening) as wire:
        _send(wire, send)
        wire.connection_error(code)


@pytest.mark.parametrize(("name", "code", "send"), STREAM, ids=_ids(STREAM))
def test_stream_errors(echo: Endpoint, name: str, code: int, send: Send) -> None:
    with echo.wire() as wire:
        _send(wire, send)
        wire.stream_error(1, code)


@pytest.mark.parametrize(("name", "send"), FINE, ids=_ids(FINE))
def test_what_is_fine(echo: Endpoint, name: str, send: Send) -> None:
    with echo.wire() as wire:
        _send(wire, send)
        fields, _ = wire.answer(1)
        assert fields[":status"] == "200"
        wire.alive()


def test_generic_2_5_priority_on_a_closed_stream(echo: Endpoint) -> None:
    with echo.wire() as wire:
        wire.send(wire.headers(1))
        wire.answer(1)
        wire.send(priority(1, 0))
        wire.alive()


def test_generic_2_4_and_3_4_reset(echo: Endpoint) -> None:
    with echo.wire() as wire:
        wire.send(wire.headers(1), reset(1))
        wire.alive()
        wire.send(wire.headers(3, POST, end=False), reset(3), wire.headers(5))
        assert wire.answer(5)[0][":status"] == "200"


def test_http2_3_5_2_an_invalid_preface(echo: Endpoint) -> None:
    """On the cleartext port it is HTTP/1.1 that refuses it."""
    with echo.wire(opening=b"INVALID CONNECTION PREFACE\r\n\r\n") as wire:
        if echo.certificate is None:
            assert wire.socket.recv(12) == b"HTTP/1.1 400"
        else:
            wire.connection_error(Code.PROTOCOL_ERROR)


def test_http2_5_1_2_more_streams_than_allowed(echo: Endpoint) -> None:
    with echo.wire() as wire:
        wire.send(settings((4, 0)), *[wire.headers(1 + 2 * n) for n in range(128)], wire.headers(257))
        wire.stream_error(257, Code.REFUSED_STREAM)


def test_http2_6_5_3_2_settings_are_acknowledged(echo: Endpoint) -> None:
    with echo.wire() as wire:
        wire.send(settings((3, 100)))
        assert wire.wait(lambda seen: seen.kind == Kind.SETTINGS and bool(seen.flags & ACK)).payload == b""


def test_http2_6_7_1_ping_is_answered_with_its_payload(echo: Endpoint) -> None:
    with echo.wire() as wire:
        wire.send(frame(Kind.PING, 0, 0, b"h2spec!!"))
        seen = wire.wait(lambda seen: seen.kind == Kind.PING)
        assert (seen.flags, seen.payload) == (ACK, b"h2spec!!")


@pytest.mark.parametrize("code", [Code.NO_ERROR, Code.INTERNAL_ERROR, 0xFF], ids=["none", "an error", "an unknown one"])
def test_generic_3_8_and_http2_7_1_goaway(echo: Endpoint, code: int) -> None:
    """The client is leaving: the connection is closed once nothing is in flight."""
    with echo.wire() as wire:
        wire.send(frame(Kind.GOAWAY, 0, 0, bytes(4) + int(code).to_bytes(4, "big")))
        with pytest.raises(Closed):
            wire.wait(lambda seen: seen.kind == Kind.DATA)


def test_requests_before_a_goaway_are_answered(echo: Endpoint) -> None:
    with echo.wire() as wire:
        wire.send(
            wire.headers(1, POST, end=False), frame(Kind.GOAWAY, 0, 0, bytes(8)), data(1, b"still here", end=True)
        )
        assert wire.answer(1)[1] == b"still here"
        wire.connection_error(Code.NO_ERROR)


def test_http2_7_2_reset_with_an_unknown_code(echo: Endpoint) -> None:
    with echo.wire() as wire:
        wire.send(wire.headers(1, POST, end=False), reset(1, 0xFF))
        wire.alive()


def _body(wire: Wire, stream: int) -> bytes:
    """The next DATA frame's payload on a stream."""
    return wire.wait(lambda seen: seen.kind == Kind.DATA and seen.stream == stream).payload


def test_http2_6_9_1_1_a_window_of_one_byte(echo: Endpoint) -> None:
    with echo.wire() as wire:
        wire.send(settings((4, 1)), wire.headers(1))
        assert _body(wire, 1) == b"o"


def test_http2_6_9_2_1_a_window_that_grows_under_a_stream(echo: Endpoint) -> None:
    with echo.wire() as wire:
        wire.send(settings((4, 0)), wire.headers(1))
        wire.alive()
        wire.send(settings((4, 1)))
        assert _body(wire, 1) == b"o"


def test_http2_6_9_2_2_a_window_below_zero(echo: Endpoint) -> None:
    with echo.wire() as wire:
        wire.send(settings((4, 3)), wire.headers(1, POST, end=False), data(1, b"abcdefgh", end=True))
        assert _body(wire, 1) == b"abc"
        wire.send(settings((4, 2)), window_update(1, 1))
        wire.alive()
        wire.send(window_update(1, 1))
        assert _body(wire, 1) == b"d"
