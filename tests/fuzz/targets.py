"""What is fuzzed: for each parser, and for the connection as a whole, a function that takes any bytes and raises
AssertionError, or whatever a parser let escape, when something doesn't hold.

A parser's bytes are fed whole and byte by byte: the verdict must be the same, its own error type the only one, and
what it keeps bounded.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from wsproto.connection import Connection as WsConnection
from wsproto.connection import ConnectionType
from wsproto.extensions import PerMessageDeflate

from protocols.http1 import Body, BodyEnd, Http1, Refusal, Request
from protocols.http2 import Http2
from protocols.http2_guard import PREFACE
from protocols.sse import Parser, ServerEvent, SseError, event
from protocols.websocket import Closed, WebSocket
from protocols.websocket_deflate import MalformedExtensions, negotiate
from tests.fuzz import ops, scene

MAX_HEADER, MAX_EVENT, MAX_MESSAGE = 256, 256, 512
_UPGRADE = (
    (b"host", b"localhost"),
    (b"connection", b"upgrade"),
    (b"upgrade", b"websocket"),
    (b"sec-websocket-version", b"13"),
    (b"sec-websocket-key", base64.b64encode(bytes(16))),
)
_OFFERS = (None, b"permessage-deflate", b"permessage-deflate; client_no_context_takeover", b"permessage-deflate; x")


def _bytewise(data: bytes) -> list[bytes]:
    return [data[i : i + 1] for i in range(len(data))]


# HTTP/1.1


def http1(data: bytes) -> None:
    """Requests come out as events; each is answered, and the next one begun, as a connection does."""
    whole = _serve([data])
    assert _serve(_bytewise(data)) == whole


def _serve(pieces: Iterable[bytes]) -> list[Any]:
    http = Http1(max_header=MAX_HEADER)
    events: list[Any] = []
    for piece in pieces:
        new = http.receive(piece)
        while new:
            for each in new:
                assert isinstance(each, Request | Body | BodyEnd | Refusal)
                if isinstance(each, Body) and events and isinstance(events[-1], Body):
                    events[-1] = Body(events[-1].data + each.data)  # pieces depend on the cuts, their sum does not
                else:
                    events.append(each)
            new = _answer(http, events[-1])
    http.receive_eof()
    return events


def _answer(http: Http1, last: Any) -> list[Any]:
    if not isinstance(last, BodyEnd | Refusal):
        return []
    status = 200 if isinstance(last, BodyEnd) else last.status
    answer = http.head(status, [], length=2) + http.body(b"ok") + http.end()
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    return [] if http.must_close else http.next_request()


# SSE


def sse(data: bytes) -> None:
    """Events come out; written again they read back as they were."""
    whole = _parse([data])
    assert _parse(_bytewise(data)) == whole
    for each in whole:
        if isinstance(each, ServerEvent) and "\0" not in each.event:
            block = event(each.data, event=each.event, id=each.id, retry_ms=each.retry_ms)
            assert Parser(max_event=1 << 20).feed(block) == [each]


def _parse(pieces: Iterable[bytes]) -> list[ServerEvent | str]:
    parser = Parser(max_event=MAX_EVENT)
    events: list[ServerEvent | str] = []
    try:
        for piece in pieces:
            events += parser.feed(piece)
            assert len(parser._line) <= MAX_EVENT
    except SseError:
        # What came before the fault in the same piece is lost with the stream.
        return ["too large"]
    return events


# WebSocket


def websocket(data: bytes) -> None:
    """The first byte chooses what the client offers, and when the server closes."""
    setting = data[0] if data else 0
    whole = _converse(setting, [data[1:]])
    if not setting & 0x80:  # with a close of ours in between, the cuts decide what comes before it
        assert _converse(setting, _bytewise(data[1:])) == whole


def _converse(setting: int, pieces: Iterable[bytes]) -> list[Any]:
    offer = _OFFERS[setting % len(_OFFERS)]
    headers = _UPGRADE if offer is None else (*_UPGRADE, (b"sec-websocket-extensions", offer))
    request = Request("GET", "/", "1.1", headers, None, False, False, True, True)
    socket = WebSocket(request, max_message=MAX_MESSAGE)
    assert socket.check() is None
    handshake = socket.accept()
    events: list[Any] = []
    outgoing = bytearray()
    for piece in pieces:
        for each in socket.receive(piece):
            assert not (events and isinstance(events[-1], Closed)), "an event behind Closed"
            events.append(each)
            text = getattr(each, "data", b"")
            assert len(text.encode() if isinstance(text, str) else text) <= MAX_MESSAGE
            outgoing += socket.text(b"answer")
        outgoing += socket.take_outgoing()
        if setting & 0x80:
            outgoing += socket.close(1000)
    _check_frames(bytes(outgoing), compressed=b"permessage-deflate" in handshake)
    # The words for a protocol error tell how far it was read, which the cuts decide.
    return [replace(each, reason="") if isinstance(each, Closed) else each for each in events]


def _check_frames(data: bytes, *, compressed: bool) -> None:
    """A client reads them all, and finds nothing wrong."""
    deflate = PerMessageDeflate()
    if compressed:
        deflate.finalize("permessage-deflate")
    client = WsConnection(ConnectionType.CLIENT, [deflate] if compressed else [])
    client.receive_data(data)
    for each in client.events():
        code = getattr(each, "code", 1000)
        reason = getattr(each, "reason", None) or ""
        assert client.state.name != "OPEN" or not hasattr(each, "code"), (code, reason)


def websocket_extensions(data: bytes) -> None:
    """A header is declined, malformed, or answered with terms that are themselves of the grammar."""
    try:
        terms = negotiate(data.split(b"\n"))
    except MalformedExtensions:
        return
    if terms is not None:
        negotiate([terms.header()])


# HTTP/2


def http2(data: bytes) -> None:
    """Behind the preface; time stands still, so that every budget can run out."""
    data = PREFACE + data
    assert _exchange([data]) == _exchange(_bytewise(data))


def _exchange(pieces: Iterable[bytes]) -> tuple[list[Any], bytes]:
    http = Http2(max_header=MAX_HEADER)
    events: list[Any] = []
    outgoing = bytearray()
    for piece in pieces:
        http.feed(piece)
        while new := http.receive(0.0):
            events += new
        while http.behind:
            events += http.receive(0.0)
        outgoing += http.take_outgoing()
    assert b" at 0x" not in outgoing, "an address of ours"
    # Pieces of bodies depend on the cuts.
    return [each for each in events if not isinstance(getattr(each, "event", None), Body)], bytes(outgoing)


def connection(data: bytes) -> None:
    """See scene.py."""
    scene.play(data)


TARGETS: dict[str, Callable[[bytes], None]] = {
    "http1": http1,
    "http2": http2,
    "sse": sse,
    "websocket": websocket,
    "websocket_extensions": websocket_extensions,
    "connection": connection,
}


def seeds(target: str) -> list[bytes]:
    """Inputs that a fuzzer begins with, beside the corpus."""
    if target == "http1":
        return [request.replace(ops.STREAM, b"A" * 24) for request in ops.REQUESTS]
    if target == "websocket":
        return [bytes([n % 4]) + ops.frame(n, b"A" * 24) for n in range(len(ops.FRAMES))]
    if target == "sse":
        return [b"\xef\xbb\xbfid: 1\r\nevent: e\rdata: a\ndata:b\n\n", b": ping\nretry: 10\ndata\n\n"]
    if target == "websocket_extensions":
        return [
            b'permessage-deflate; client_max_window_bits="10", x; y=z',
            b"permessage-deflate; server_max_window_bits=8",
        ]
    if target == "http2":
        return list(ops.HTTP2)
    kinds = [ops.Op(ops.Kind.CANNED, n) for n in range(len(ops.REQUESTS))]
    steps = [ops.Op(ops.Kind.STEP, 9), ops.Op(ops.Kind.READ, 40), ops.Op(ops.Kind.END, 0)]
    return [bytes([n % 4]) + ops.encode([kind, *steps]) for n, kind in enumerate(kinds)]
