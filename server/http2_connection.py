"""A connection that speaks HTTP/2: frames to streams, fair turns among them, and the end of it all.

Every stream is a reader like any other. What HTTP/2 adds is that they share a socket: a stream that the client doesn't
read holds back itself alone, and none sends a second frame while another one waits for its first.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from protocols.http1 import Body, BodyEnd, Refusal, Request
from protocols.http2 import ConnectionClosed, Event, GoAway, Http2, OnStream, PingAnswered, StreamReset, WindowOpened
from protocols.http2_guard import Code
from protocols.websocket import WebSocket
from server.exchange import new_call, refusal_of, too_large
from server.flow import Alarm
from server.http import Call, Program, Response
from server.http2_stream import Http2Stream
from server.websocket_connection import WebSocketConnection

if TYPE_CHECKING:
    from server.connection import Connection
    from server.host import Deadlines, Host
    from server.turns import Turns

# Control frames and a WebSocket's replies that the client doesn't read; above it, it isn't read either.
UNREAD_REPLIES_BYTES_MAX = 64 * 1024
# Bytes of frames that wait for their turn; above it, the client isn't read.
UNHANDLED_BYTES_MAX = 64 * 1024
# Data that waits for a turn of the loop to end: a copy of so much costs less than a write.
TOGETHER_BYTES_MAX = 16 * 1024


class Http2Connection:
    """Owned by a `Connection`, which passes on what the transport says."""

    def __init__(self, host: Host, owner: Connection) -> None:
        self.loop: asyncio.AbstractEventLoop = host.loop
        self.deadlines: Deadlines = host.deadlines
        self.program: Program = host.program
        self.transport: asyncio.Transport = owner.transport
        self.writable = True  # the transport is below its high-water mark
        self.turns: Turns = host.turns
        self._host = host
        self._owner = owner
        self._http2 = Http2(max_header=host.max_header)
        self._streams: dict[int, Http2Stream] = {}  # the one whose turn is next comes first
        self._collecting: dict[int, Http2Stream] = {}  # their bodies are coming, the oldest first
        self._body_bytes = 0  # of all of them
        self._refused: list[Http2Stream] = []  # to be answered once all that came is read
        self._outgoing: list[bytes] = []  # to leave in one write
        self._outgoing_bytes = 0
        self._turns_wanted = self._behind = self._lost = False
        self._unhandled_bytes = 0
        self._draining = False
        self._leaving = False  # close once the last stream has ended
        self._phase = ""
        self._alarm = Alarm(host.loop, self._on_silence)
        self.flush()
        self._set_alarm()

    # What the connection tells

    def receive(self, data: bytes) -> None:
        """Bytes came; they wait for their turn."""
        self._http2.feed(data)
        self._unhandled_bytes += len(data)
        if self._unhandled_bytes > UNHANDLED_BYTES_MAX:
            self.transport.pause_reading()
        if not self._behind:
            self._behind = True
            self.turns.add(self._go_on)

    def _go_on(self) -> None:
        """Handle what came, so much of it in one go that other connections don't notice."""
        if self._lost:
            return
        self._behind = False
        self._unhandled_bytes = 0
        for event in self._http2.receive(self.loop.time()):
            self._handle(event)
        refused, self._refused = self._refused, []
        for stream in refused:
            if stream.refusal is not None:
                stream.send(*stream.refusal)
        self.flush()
        if self._http2.behind:
            self._behind = True
            self.turns.add(self._go_on)
        self._regulate()
        self._set_alarm()
        self._close_if_done()

    def resume(self) -> None:
        """The transport takes more."""
        self.writable = True
        self._regulate()
        self._give_turns()

    def drain(self) -> None:
        """The server will stop: no new connection's worth of requests here, and close when nothing is in flight."""
        if self._http2.closed:
            return  # the last GOAWAY went out, and maybe our EOF behind it
        if self._draining:
            self._leaving = True
        else:
            self._draining = True
            self._http2.go_away()
            self._http2.ping()
        for stream in list(self._streams.values()):
            if stream.websocket is not None:
                stream.websocket.drain()
        self.flush()
        self._close_if_done()

    def lost(self) -> None:
        """The connection is gone, or can't be used any more."""
        self._lost = True
        self._alarm.close()
        self._outgoing.clear()
        self._outgoing_bytes = 0
        streams, self._streams = self._streams, {}
        self._collecting.clear()
        for stream in streams.values():
            stream.lost()

    @property
    def busy(self) -> bool:
        """Whether an answer is in flight."""
        return self._behind or any(not stream.answered for stream in self._streams.values())

    def _regulate(self) -> None:
        """A client is read as long as it reads the replies, and as its frames are handled."""
        if self._behind or self.transport.get_write_buffer_size() > UNREAD_REPLIES_BYTES_MAX:
            self.transport.pause_reading()
        elif not self.transport.is_closing():
            self.transport.resume_reading()

    # Events

    def _handle(self, event: Event) -> None:
        if isinstance(event, OnStream):
            self._on_stream(event.stream, event.event)
        elif isinstance(event, WindowOpened):
            self._on_window(event.stream)
        elif isinstance(event, StreamReset):
            if (stream := self._streams.get(event.stream)) is not None:
                self.forget(stream)
        elif isinstance(event, PingAnswered):
            self._leaving = self._leaving or self._draining
        elif isinstance(event, GoAway):
            self._leaving = True
        elif isinstance(event, ConnectionClosed):
            self.flush()
            self.lost()
            self._owner.linger()

    def _on_stream(self, number: int, event: Request | Body | BodyEnd | Refusal) -> None:
        if isinstance(event, Request):
            self._begin(number, event)
            return
        if isinstance(event, Refusal):
            stream = self._streams[number] = Http2Stream(self, self._http2, number, None)
            stream.refusal = (self.program.malformed(None, event.status, event.message), event.headers)
            self._refused.append(stream)
            return
        known = self._streams.get(number)
        if known is None:
            return
        if known.answered:
            if isinstance(event, BodyEnd):
                self.forget(known)
            return
        if known.refusal is not None:
            return
        if known.websocket is not None:
            self._pass_to_websocket(known, known.websocket, event)
        elif isinstance(event, Body):
            self._collect(known, event.data)
        elif known.call is not None:
            self._stop_collecting(known)
            known.dispatch(known.call)

    def _begin(self, number: int, request: Request) -> None:
        call = new_call(self._host, request, self._owner.client)
        stream = self._streams[number] = Http2Stream(self, self._http2, number, call)
        refusal = refusal_of(self._host, call)
        if refusal is not None:
            self._refuse(stream, refusal)
        elif request.upgrade:
            self._open_websocket(stream, call)
        else:
            self._collecting[number] = stream
            stream.await_body()
            if request.expect_continue:
                self._http2.head(number, 100, ())

    def _refuse(self, stream: Http2Stream, answer: Response) -> None:
        self._stop_collecting(stream)
        stream.refusal = (answer, ())
        self._refused.append(stream)

    # Bodies

    def _collect(self, stream: Http2Stream, data: bytes) -> None:
        stream.body += data
        self._body_bytes += len(data)
        if stream.call is not None and len(stream.body) > self._host.max_body:
            self._refuse(stream, too_large(self._host, stream.call))
            return
        stream.await_body()
        if not self.holds_back(stream):
            self._http2.acknowledge(stream.id)

    def holds_back(self, stream: Http2Stream) -> bool:
        """Whether the client may send no more of this body for now: all together are over the limit of one, and only
        the oldest goes on."""
        return self._body_bytes > self._host.max_body and next(iter(self._collecting), 0) != stream.id

    def _stop_collecting(self, stream: Http2Stream) -> None:
        """Its body is here, or isn't wanted; others that were held back may go on."""
        if self._collecting.pop(stream.id, None) is None:
            return
        self._body_bytes -= len(stream.body)
        for other in self._collecting.values():
            if not self.holds_back(other):
                self._http2.acknowledge(other.id)

    def refuse_late_body(self, stream: Http2Stream) -> None:
        """The next piece of its body did not come in time."""
        self._stop_collecting(stream)
        stream.send(self.program.malformed(stream.call, 408, "the request's body did not come in time"))

    # WebSockets

    def _open_websocket(self, stream: Http2Stream, call: Call) -> None:
        def accept(websocket: WebSocket) -> bytes:
            stream.accept_websocket(websocket.accept_fields())
            return b""

        websocket = WebSocketConnection(self._host, stream, call, gate=stream, accept=accept)
        refusal = websocket.open()
        if refusal is None:
            stream.websocket = websocket
        else:
            stream.refusal = refusal
            self._refused.append(stream)

    def _pass_to_websocket(self, stream: Http2Stream, websocket: WebSocketConnection, event: Body | BodyEnd) -> None:
        if isinstance(event, Body):
            websocket.receive(event.data)
            self.take_more(stream)
        else:
            websocket.lost()
            stream.close()

    def take_more(self, stream: Http2Stream) -> None:
        """Let the client of a WebSocket go on sending, if it reads the replies."""
        if stream.unsent <= UNREAD_REPLIES_BYTES_MAX:
            self._http2.acknowledge(stream.id)
            self.flush()

    # Writing

    def flush(self) -> None:
        """Write what the protocol has to say, behind what waits to be written."""
        if data := self._http2.take_outgoing():
            self._outgoing.append(data)
        self._write_out()

    def write(self, data: bytes) -> None:
        """Data of a stream. That of one turn of the loop leaves together: an engine's step has a token for each of many
        streams, and a write of its own would be most of what one costs."""
        if not self._outgoing:
            self.loop.call_soon(self._write_out)
        self._outgoing.append(data)
        self._outgoing_bytes += len(data)
        if self._outgoing_bytes >= TOGETHER_BYTES_MAX:
            self._write_out()

    def _write_out(self) -> None:
        if self._outgoing:
            data = b"".join(self._outgoing)
            self._outgoing.clear()
            self._outgoing_bytes = 0
            self.transport.write(data)

    def _on_window(self, number: int) -> None:
        if number == 0:
            self._give_turns()
        elif (stream := self._streams.get(number)) is not None:
            stream.window_opened()

    def want_turns(self) -> None:
        """A stream has used its turn up."""
        if not self._turns_wanted:
            self._turns_wanted = True
            self.loop.call_soon(self._give_turns)

    def _give_turns(self) -> None:
        """One turn for each stream, as far as the transport and the connection's window let through; who had its
        turn is the last in the next round."""
        self._turns_wanted = False
        for number, stream in list(self._streams.items()):
            if not self.writable or self._http2.window <= 0:
                return
            if number in self._streams:
                self._streams[number] = self._streams.pop(number)
                stream.turn()

    # Silence and the end

    def forget(self, stream: Http2Stream) -> None:
        """The stream is over."""
        self._stop_collecting(stream)
        if self._streams.pop(stream.id, None) is not None:
            stream.lost()
            if self._phase == "idle":
                self._phase = ""  # it began and ended in one go; idleness begins anew all the same
            self._set_alarm()
            self._close_if_done()

    def _set_alarm(self) -> None:
        """The deadline of the phase that the connection is in, from the phase's begin: pings don't put it off."""
        phase = "head" if self._http2.in_head else "" if self._streams else "idle"
        if phase == self._phase or self.transport.is_closing():
            return
        self._phase = phase
        if phase:
            self._alarm.set(self.deadlines.header_s if phase == "head" else self.deadlines.idle_s)
        else:
            self._alarm.clear()

    def _on_silence(self) -> None:
        if self.transport.is_closing():
            self.transport.abort()
        elif self._phase == "head":
            self._close(Code.ENHANCE_YOUR_CALM, "the request's head did not come in time")
        else:
            self._close(Code.NO_ERROR, "no request came for a while")

    def stream_answered(self) -> None:
        """A stream's answer is whole, though its request isn't."""
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._leaving and not self.busy:
            self._close(Code.NO_ERROR, "")

    def _close(self, code: Code, message: str) -> None:
        """Say goodbye and close; a client that doesn't take it can't keep the connection open."""
        if self.transport.is_closing():
            return
        self._http2.close(code, message)
        self.flush()
        for stream in list(self._streams.values()):
            stream.lost()
        self._streams.clear()
        self.transport.close()
        if self.transport.get_write_buffer_size():
            self._alarm.set(self.deadlines.write_stall_s)
