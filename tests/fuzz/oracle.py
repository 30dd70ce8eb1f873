"""What the client of a fuzzed connection must have been able to read: whole, well-formed answers, one for each of its
requests in their order, up to where the connection ended. h11 and wsproto read it, as clients.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import h11
import wsproto.events as ws
from wsproto.connection import Connection as WsConnection
from wsproto.connection import ConnectionState, ConnectionType
from wsproto.extensions import Extension, PerMessageDeflate

from protocols import sse
from tests.fuzz import oracle_http2

if TYPE_CHECKING:
    from tests.fuzz.scene import Asked, Scene

MARK = b"X-Mark"  # the number of the request that an answer belongs to; "none" for bytes that were no request
_OFFER = [(b"Connection", b"upgrade"), (b"Upgrade", b"websocket")]


class _Answer:
    """One response, as far as it came."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.body = bytearray()
        self.whole = False
        self.rest = b""

    def last(self) -> bool:
        """Nothing may follow on this connection."""
        return self.headers.get(b"connection") == b"close"


def check(scene: Scene, *, whole: bool) -> None:
    """`whole`: the client has read everything, so every answer that was owed must be here."""
    rest = bytes(scene.transport.received)
    if scene.connection.protocol == "http2":
        oracle_http2.check(rest)
        return
    # A reset is how an HTTP/1.0 client is told that a body was cut; what was on its way may be lost by it.
    complete = whole and not scene.may_be_cut and scene.transport.end != "reset"
    asked = scene.program.asked
    answered = 0
    over = False
    while rest:
        assert not over, f"bytes behind the last answer: {rest[:200]!r}"
        request = asked[answered] if answered < len(asked) else None
        answer = _read(rest, request, eof=scene.transport.seen_eof)
        if not answer.status:
            assert not complete, "half a head"
            return
        _check_head(answer, request, answered)
        answered += request is not None
        if answer.status == 101:
            _check_frames(answer)
            return
        _check_body(answer, mid_character=request is not None and "after_bytes" in request.query)
        if not answer.whole:
            return
        rest = answer.rest
        over = answer.last() or request is None
    if complete and not over:
        assert answered == len(asked), f"{len(asked)} requests, {answered} answers"


def _read(data: bytes, request: Asked | None, *, eof: bool) -> _Answer:
    client = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
    method = request.request.method if request else "GET"
    upgrade = request is not None and request.request.upgrade
    client.send(h11.Request(method=method, target="/", headers=[(b"Host", b"x"), *(_OFFER if upgrade else [])]))
    client.send(h11.EndOfMessage())
    client.receive_data(data)
    if eof:
        client.receive_data(b"")
    answer = _Answer()
    while True:
        try:
            event = client.next_event()
        except h11.RemoteProtocolError as fault:
            # The only fault that a connection may show is its end before an answer's.
            if eof and ("closed connection" in str(fault) or not answer.status):
                return answer
            raise AssertionError(f"no response: {data[:500]!r}") from fault
        if event in (h11.NEED_DATA, h11.PAUSED) or isinstance(event, h11.ConnectionClosed):
            return answer
        if isinstance(event, h11.InformationalResponse) and event.status_code == 100:
            continue
        if isinstance(event, h11.Response | h11.InformationalResponse):
            answer.status = event.status_code
            assert len({name for name, _ in event.headers}) == len(list(event.headers)), "a header twice"
            answer.headers = dict(event.headers)
            if event.status_code == 101:
                answer.rest = client.trailing_data[0]
                return answer
        elif isinstance(event, h11.Data):
            answer.body += event.data
        elif isinstance(event, h11.EndOfMessage):
            answer.whole = True
            answer.rest = client.trailing_data[0]
            return answer


def _check_head(answer: _Answer, request: Asked | None, number: int) -> None:
    headers = answer.headers
    if answer.status == 101:
        return
    mark = headers[MARK.lower()]
    assert mark == (b"none" if request is None else b"%d" % number), "an answer out of turn"
    assert headers[b"date"].endswith(b" GMT")
    if request is not None and request.request.http_version == "1.0":
        assert b"transfer-encoding" not in headers
        assert answer.last()
    if request is None:
        assert answer.last() and 400 <= answer.status < 600


def _check_body(answer: _Answer, *, mid_character: bool) -> None:
    kind = answer.headers.get(b"content-type", b"").partition(b";")[0]
    body = bytes(answer.body)
    if kind == b"application/json" and answer.whole and body:
        json.loads(body)
    elif kind == b"text/event-stream":
        _check_events(body, whole=answer.whole)
    elif kind == b"application/x-ndjson":
        lines = body.split(b"\n")
        values = [json.loads(line) for line in lines[:-1] if line]
        assert not answer.whole or not body or (lines[-1] == b"" and values[-1] == {"done": True})
    elif kind == b"text/plain" and answer.whole and not mid_character:
        body.decode()


def _check_events(body: bytes, *, whole: bool) -> None:
    parser = sse.Parser()
    events = parser.feed(body)
    places = [int(event.id.rpartition(":")[2]) for event in events]
    assert places == list(range(places[0], places[0] + len(places))) if places else True
    for event in events[:-1]:
        json.loads(event.data)
    if whole and body:
        assert events[-1].data == "[DONE]" and body.endswith(b"\n\n"), body[-100:]


def _check_frames(answer: _Answer) -> None:
    """Frames to the end, which may cut the last one; nothing behind a close frame."""
    extensions: list[Extension] = []
    accepted = answer.headers.get(b"sec-websocket-extensions")
    if accepted:
        deflate = PerMessageDeflate()
        deflate.finalize(accepted.decode())
        extensions.append(deflate)
    frames = WsConnection(ConnectionType.CLIENT, extensions)
    frames.receive_data(answer.rest)
    closed = False
    parts: list[str] = []
    for event in frames.events():
        assert not closed, "a frame behind the close frame"
        if isinstance(event, ws.CloseConnection):
            assert frames.state is ConnectionState.REMOTE_CLOSING, f"a malformed frame: {event.reason}"
            closed = True
        elif isinstance(event, ws.TextMessage):
            parts.append(event.data)
            if event.message_finished:
                parts.clear()
