"""One TCP connection: the only code that touches a transport.

Bytes go to the sans-I/O protocol (`protocols/`), its events to the program, and the program's answer back the same way.
The connection owns what neither of them may: the transport's high-water mark, the deadlines for silence in each
phase, and the judgement of whether a client is gone.
"""

from __future__ import annotations

import asyncio
import socket
from typing import cast

from protocols.http1 import Body, BodyEnd, Event, Http1, Refusal, Request, chunk
from protocols.http2_guard import PREFACE
from server.begun import begin
from server.exchange import new_call, refusal_of, streaming_fields, too_large, whole_fields
from server.flow import LINGER_BYTES_MAX, LINGER_NOT_AT_ALL, LINGER_S, Alarm, Farewell, StallWatch
from server.host import Host
from server.http import Call, Headers, Response, Streaming
from server.http1_channel import HttpChannel
from server.http2_connection import Http2Connection
from server.outlet import BARE, CHUNK, Outlet, Pieces, outlet
from server.readers import ClientReader
from server.websocket_connection import WebSocketConnection

# Bytes in a transport's buffer above which readers stop. The socket below has a buffer of its own; a token's write that
# waits above it takes three times its bytes, and a client that doesn't read would cost that for each. So the first one
# or two wait there, and all others in the log, to leave in one write when the client reads again.
HIGH_WATER_BYTES = 256
# Pipelined bytes that wait behind a request; above it the socket is not read, and TCP holds the client back.
PIPELINE_BYTES_MAX = 64 * 1024
# A client that sends pings, or messages to an echo, and does not read the replies is not read any more above this.
UNREAD_REPLIES_BYTES_MAX = 64 * 1024


class Connection(asyncio.Protocol):
    """Speaks HTTP/1.1, and hands itself over to `WebSocketConnection` after an upgrade, or to `Http2Connection` when
    the client begins with HTTP/2's preface, or chose h2 in the TLS handshake."""

    __slots__ = (
        "_alarm", "_alarm_is_for_head", "_body", "_call", "_channel", "_eof", "_farewell", "_http", "_http2",
        "_lingering", "_opened", "_opening", "_refusal", "_request_read", "_stall", "_task", "_tls", "_unread",
        "_until_close", "_websocket", "_whole_answer", "client", "host", "transport", "writable",
    )  # fmt: skip

    transport: asyncio.Transport

    def __init__(self, host: Host) -> None:
        self.host = host
        self.client = ""
        self._http = Http1(max_header=host.max_header)
        self._websocket: WebSocketConnection | None = None
        self._http2: Http2Connection | None = None
        self._opening = b""  # the first bytes, as long as they may be HTTP/2's preface
        self._opened = False
        self._unread = b""  # came, and waits for its turn
        self._tls = False
        self._call: Call | None = None
        self._request_read = False  # the current request is here to its end
        self._refusal: Response | None = None  # earned by its head
        self._body = bytearray()
        self._task: asyncio.Task[None] | None = None
        self._channel: HttpChannel | None = None
        self.writable = True  # the transport is below its high-water mark
        self._eof = False
        self._until_close = False  # the close delimits the answer's body: it goes to HTTP/1.0
        self._whole_answer = False  # a generation is being collected for an answer in one piece
        self._lingering = 0  # bytes still accepted and dropped; 0: not lingering
        self._farewell: Farewell | None = None  # made when it lingers
        self._alarm = Alarm(host.loop, self._on_silence)
        self._alarm_is_for_head = False  # which is not put off by its bytes
        self._stall: StallWatch | None = None  # made when the transport is first above its mark

    @property
    def protocol(self) -> str:
        """A metric label."""
        if self._http2 is not None:
            return "http2"
        return "http1" if self._websocket is None else "websocket"

    # The transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client connected."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by name
        self.transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        peer = self.transport.get_extra_info("peername")
        self.client = peer[0] if isinstance(peer, tuple) else ""
        tls = self.transport.get_extra_info("ssl_object")
        self._tls = tls is not None
        self.host.connections.add(self)
        self._alarm.set(self.host.first_wait_s)
        if len(self.host.connections) > self.host.connections_max:
            self._refuse(Refusal(503, "the server has as many connections as it can", ((b"Retry-After", b"2"),)))
        elif tls is not None and tls.selected_alpn_protocol() == "h2":
            self._begin_http2(b"")

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone, or we closed."""
        self.host.connections.discard(self)
        self._alarm.close()
        self._unread = b""
        if self._stall is not None:
            self._stall.close()
        self._drop_answer()
        if self._websocket is not None:
            self._websocket.lost()
        if self._http2 is not None:
            self._http2.lost()

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        if not self._opened:
            self._open_with(data)
            return
        if self._stall is not None and (self._websocket is not None or self._http2 is not None):
            self._stall.progress()
        if self._lingering:
            self._lingering -= len(data)
            if self._lingering <= 0:
                self.abort()
        elif self._http2 is not None:
            self._http2.receive(data)
        elif self._unread:
            self._unread += data
            if len(self._unread) > PIPELINE_BYTES_MAX:
                self.transport.pause_reading()
        else:
            self._unread = data
            self.host.turns.add(self._read_on)

    def _read_on(self) -> None:
        data, self._unread = self._unread, b""
        if not data or self._lingering or self.transport.is_closing():
            return
        if self._websocket is None:
            self._take(self._http.receive(data))
            return
        self._unread = self._websocket.receive_some(data)
        if self._unread:
            self.host.turns.add(self._read_on)
        if self.unsent() > UNREAD_REPLIES_BYTES_MAX:
            self.transport.pause_reading()
        elif not self.transport.is_closing() and len(self._unread) <= PIPELINE_BYTES_MAX:
            self.transport.resume_reading()

    def _open_with(self, data: bytes) -> None:
        """The first bytes tell HTTP/2 from HTTP/1.1 (RFC 9113 3.3): no method begins like its preface."""
        self._opening += data
        if not self._lingering and PREFACE.startswith(self._opening[: len(PREFACE)]):
            if len(self._opening) >= len(PREFACE):
                self._begin_http2(self._opening)
            elif not self._alarm_is_for_head:
                self._alarm_is_for_head = True
                self._alarm.set(self.host.deadlines.header_s)
        else:
            self._begin_http1()

    def _begin_http1(self) -> None:
        self._opened = True
        data, self._opening = self._opening, b""
        if data:
            self.data_received(data)

    def _begin_http2(self, data: bytes) -> None:
        self._opened, self._opening = True, b""
        self._alarm.clear()
        self._http2 = Http2Connection(self.host, self)
        if data:
            self._http2.receive(data)

    def eof_received(self) -> bool:
        """The client sends no more. It may still read: True keeps the connection open (see DESIGN, reading)."""
        if not self._opened:
            self._begin_http1()
        while self._unread:
            self._read_on()
        self._eof = True
        if self._http2 is not None:
            self._http2.lost()  # without a way to open windows nothing can be read to its end
        if self._tls:
            self._drop_answer()  # TLS has no half-close that clients use
        if self._websocket is not None or self._http2 is not None or self._lingering or self._tls:
            self._close()
            return not self._tls
        self._take(self._http.receive_eof())
        if self._channel is not None:
            self._channel.probe()
        elif self._task is None and not self._http.buffered:
            self._close()
        elif self._whole_answer:
            self._judge_half_close()
        return True  # what closes is our decision, not the transport's

    def pause_writing(self) -> None:
        """The transport is above its high-water mark: readers stop."""
        self.writable = False
        if self._channel is not None:
            self._channel.writable = False
        if self._http2 is not None:
            self._http2.writable = False
        if self._stall is None:
            self._stall = StallWatch(self.host.loop, self.unsent, self.host.deadlines.write_stall_s, self.abort)
        self._stall.begin()

    def resume_writing(self) -> None:
        """The client drained it: readers go on. Or an abort threw it away, which uvloop tells alike."""
        if self._stall is not None:
            self._stall.end()
        if self.transport.is_closing():
            return
        self.writable = True
        if self._channel is not None:
            self._channel.writable = True
            self._channel.reader.pump()
        if self._http2 is not None:
            self._http2.resume()
        elif self._websocket is not None:
            self.transport.resume_reading()
            self._websocket.pump()
        elif self._call is None and self._request_read:
            self._next()

    def unsent(self) -> int:
        """Bytes that the socket has not taken."""
        return self.transport.get_write_buffer_size()

    # What the server decides

    def abort(self) -> None:
        """Close now, whatever is unsent. A body that only the close delimits must not look whole by that."""
        self._abandon(reset=self._until_close and (self._channel is not None or self.unsent() > 0))

    def drain(self) -> None:
        """The server will stop: close once nothing is in flight. A first request is waited for."""
        if self._websocket is not None:
            self._websocket.drain()
        elif self._http2 is not None:
            self._http2.drain()
        elif not self._opened:
            self._alarm.set(self.host.first_wait_s)
        elif self._call is None and not self._unread and self._http.awaiting_request:
            self._close()

    def _abandon(self, *, reset: bool) -> None:
        """Close, and readers stop at once: the transport drops what it is given from here on, and an outlet's token
        must not leave behind such. `reset`: so that the client sees an error; towards HTTP/1.0 an orderly close says
        that the body is whole."""
        if reset:
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NOT_AT_ALL)
        self.writable = False
        if self._channel is not None:
            self._channel.writable = False
        self.transport.abort()

    def _close(self) -> None:
        """Close once what is written has been sent; a client that doesn't take it can't keep the connection open."""
        self.transport.close()
        if self.unsent():
            self._alarm.set(self.host.deadlines.write_stall_s)

    @property
    def busy(self) -> bool:
        """Whether an answer is in flight."""
        if self._http2 is not None:
            return self._http2.busy
        return self._websocket is not None or self._call is not None or bool(self._unread)

    # Requests

    def _take(self, events: list[Event]) -> None:
        """Act on what the client sent; more may follow from pipelined bytes, so this loops rather than recurses."""
        for event in events:
            if isinstance(event, Request):
                self._begin(event)
            elif isinstance(event, Body):
                self._collect(event.data)
            elif isinstance(event, BodyEnd):
                self._dispatch()
            else:
                self._refuse(event)
        if self._refusal is not None and self._call is not None:
            self._send(self._call, self._refusal)  # its body is still coming
        self._set_alarm()
        if self._http.buffered > PIPELINE_BYTES_MAX:
            self.transport.pause_reading()
        elif not self.transport.is_closing():
            self.transport.resume_reading()  # what waited is taken, and may be the head of a body that goes on

    def _set_alarm(self) -> None:
        """The deadline of the phase that the connection is in; none while an answer is being made. One that is streamed
        has the next ping's."""
        deadlines = self.host.deadlines
        if self._channel is not None or self._lingering or self.transport.is_closing():
            return
        head_started = self._call is None and self._http.head_started
        if self._request_read or self._websocket is not None:
            self._alarm.clear()  # until the answer is made, and taken so far that the next request may begin
        elif self._call is not None:
            self._alarm.set(deadlines.body_s)
        elif not head_started:
            self._alarm.set(deadlines.idle_s)
        elif not self._alarm_is_for_head:
            self._alarm.set(deadlines.header_s)
        self._alarm_is_for_head = head_started

    def _begin(self, request: Request) -> None:
        call = self._call = new_call(self.host, request, self.client, self._on_whole_answer)
        self._request_read = self._whole_answer = self._alarm_is_for_head = False
        # Answered when all that has come is read: a request that is here whole need not cost its connection.
        self._refusal = refusal_of(self.host, call)
        if self._refusal is None and request.expect_continue:
            self.transport.write(self._http.continue_100())

    def _collect(self, data: bytes) -> None:
        if self._call is None or self._refusal is not None:
            return
        self._body += data
        if len(self._body) > self.host.max_body:
            self._refusal = too_large(self.host, self._call)

    def _dispatch(self) -> None:
        call = self._call
        if call is None or self._lingering:
            return
        self._request_read = True
        if self._refusal is not None:
            self._send(call, self._refusal)
            return
        call.body = bytes(self._body)
        self._body.clear()
        if call.request.upgrade:
            self._upgrade(call)
            return
        self._task = begin(self.host.loop, self._answer(call))

    async def _answer(self, call: Call) -> None:
        answer = await self.host.program.answer(call)
        self._task = None
        if isinstance(answer, Response):
            self._send(call, answer)
        else:
            self._open(call, answer)

    def _refuse(self, refusal: Refusal) -> None:
        """Bytes that are no proper request: one answer, then close."""
        if self._lingering:
            return
        self._request_read = False
        answer = self.host.program.malformed(self._call, refusal.status, refusal.message)
        self._send(self._call, answer, refusal.headers)

    def _on_whole_answer(self) -> None:
        self._whole_answer = True
        if self._eof:
            self._judge_half_close()

    def _judge_half_close(self) -> None:
        """The client of an answer in one piece sends no more: whether it still reads can't be told, so a flag does."""
        if self.host.abort_on_half_close:
            self._drop_answer()
            self.abort()

    # Answers

    def _send(self, call: Call | None, answer: Response, extra: Headers = ()) -> None:
        """Write a whole answer. Closes after it when the request isn't fully read, or either side wants it."""
        http = self._http
        fields = whole_fields(answer, extra)
        head = http.head(answer.status, fields, length=len(answer.body), close=self.host.draining)
        self.transport.write(head + http.body(answer.body) + http.end())
        if call is not None:
            self.host.program.sent(call, answer.status)
        self._end_answer()

    def _open(self, call: Call, answer: Streaming) -> None:
        """Write the head of a streamed answer, and let its reader write the rest."""
        channel = HttpChannel(self, writable=self.writable)
        reader = channel.reader = ClientReader(answer.stream, answer.framing, channel, answer.cursor)
        answer.stream.attach(reader)
        if self.transport.is_closing():
            reader.leave()
            return
        self._channel = channel
        self._until_close = call.request.http_version == "1.0"
        fields = streaming_fields(answer)
        head = self._http.head(answer.status, fields, length=None, close=self.host.draining)
        frame = self._http.framer()
        channel.begin(head, frame)
        self.host.program.sent(call, answer.status)
        if call.request.method == "HEAD":
            reader.leave()
            channel.finish()
            return
        call.shed()
        self._alarm.set(self.host.deadlines.keepalive_s)
        if self._eof:
            channel.probe()
        reader.pump()
        channel.flush()
        reader.send_by(self._outlet(CHUNK if frame is chunk else BARE, answer.framing.pieces()))

    def _outlet(self, envelope: int, pieces: Pieces | None) -> Outlet | None:
        """A token's shortest way to the socket, if there is one."""
        return None if self._tls else outlet(self.transport, envelope, pieces)

    def shows(self, channel: HttpChannel) -> bool:
        """Whether its answer goes on."""
        return self._channel is channel

    def channel_ended(self, *, whole: bool) -> None:
        """The reader is done. A body that is not whole ends with the connection, which the client can tell."""
        if self._channel is not None:
            self._channel.part()
            self._channel = None
        self._alarm.clear()
        if whole:
            self.transport.write(self._http.end())
            self._end_answer()
        elif self._until_close:
            self._abandon(reset=True)
        else:
            self._close()

    def _end_answer(self) -> None:
        self._call = self._refusal = None
        self._body.clear()
        if self._request_read and not self._http.must_close and not self.host.draining:
            # In a turn of its own: a client that pipelines a thousand requests gets no deeper stack, and no monopoly.
            self.host.turns.add(self._next)
        elif self._eof or (self._request_read and self.host.draining):
            self._close()  # nothing more can come; or nothing is expected, and a drain doesn't wait to see
        else:
            self.linger()

    def _next(self) -> None:
        """Begin the next request; a client that does not read the answers to earlier ones waits."""
        over = self._lingering or self.transport.is_closing()
        if not self.writable or over or self._call is not None or not self._request_read:
            return
        if self._http.must_close:  # the client's EOF came meanwhile, with nothing but empty lines before it
            self._close()
        else:
            self._request_read = False
            self._take(self._http.next_request())

    def linger(self) -> None:
        """Close once the client has had the time to read the last bytes; what it still sends is dropped."""
        self._lingering = LINGER_BYTES_MAX
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()  # TLS says goodbye, and reads until it is answered
        if not self.transport.is_closing():
            self.transport.resume_reading()  # pipelined bytes may have paused it
        self._farewell = Farewell(self.unsent, grace_s=LINGER_S, stall_s=self.host.deadlines.write_stall_s)
        self._alarm.set(self._farewell.wait_s())

    def _drop_answer(self) -> None:
        """The client is gone: whatever was being made for it knows."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
            if self._call is not None:
                self.host.program.left(self._call)
        if self._channel is not None:
            self._channel.leave()
            self._channel = None

    # Silence

    def _on_silence(self) -> None:
        if self._channel is not None:
            self._alarm.set(self._channel.keep_alive())
        elif self._farewell is not None and (wait_s := self._farewell.wait_s()):
            self._alarm.set(wait_s)
        elif self._lingering or self.transport.is_closing():
            self.abort()
        elif self._call is not None or self._http.head_started:
            self._request_read = False
            what = "head" if self._call is None else "body"
            answer = self.host.program.malformed(self._call, 408, f"the request's {what} did not come in time")
            self._send(self._call, answer)
        else:
            self._close()

    # WebSocket

    def _upgrade(self, call: Call) -> None:
        """Hand the connection over, or answer why not."""
        websocket = WebSocketConnection(self.host, self.transport, call, gate=self, outlet=self._outlet)
        refusal = websocket.open()
        if refusal is not None:
            self._send(call, *refusal)
            return
        self._websocket = websocket
        self._alarm.clear()
        self.host.program.sent(call, 101)
        websocket.begin(self._http.take_upgrade_bytes())
