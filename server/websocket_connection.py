"""A connection after its upgrade: frames to the program's session and back, pings with a deadline, an orderly close."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from protocols.websocket import Closed, WebSocket
from server.flow import Alarm, Farewell
from server.http import Call, Headers, Response, Session
from server.outlet import FRAME, Outlet, Pieces

if TYPE_CHECKING:
    from server.host import Host
    from server.readers import Gate

# A peer that got our close frame has so long to answer it (RFC 6455 7.1.1 leaves the time to us).
CLOSE_HANDSHAKE_S = 5.0
# So many bytes are read in one turn: a hundred messages that ask for an answer, or a part of one.
TURN_BYTES = 8 * 1024


class Transport(Protocol):
    """What a WebSocket needs of a transport: of asyncio's, or of one stream of HTTP/2."""

    def write(self, data: bytes) -> None: ...  # noqa: D102
    def close(self) -> None: ...  # noqa: D102
    def abort(self) -> None: ...  # noqa: D102
    def can_write_eof(self) -> bool: ...  # noqa: D102
    def write_eof(self) -> None: ...  # noqa: D102
    def is_closing(self) -> bool: ...  # noqa: D102
    def get_write_buffer_size(self) -> int: ...  # noqa: D102


class WebSocketConnection:
    """Owned by what passes on what the transport says. `gate`: whether that takes more tokens. `accept`: makes the
    answer to the handshake, to be written. `frame(payload)` is the frame of one text message of UTF-8, for
    `write(frames)`; both are there for each token, and go straight to where they are made and sent."""

    def __init__(
        self,
        host: Host,
        transport: Transport,
        call: Call,
        *,
        gate: Gate,
        outlet: Callable[[int, Pieces | None], Outlet | None] | None = None,
        accept: Callable[[WebSocket], bytes] = WebSocket.accept,
    ) -> None:
        self._host = host
        self._transport = transport
        self._call = call
        self._websocket = WebSocket(call.request, max_message=host.max_ws_message)
        self._session: Session | None = None
        self._heard = True  # a frame came since the last ping
        self._closing = False
        unsent, stall_s = transport.get_write_buffer_size, host.deadlines.write_stall_s
        self._farewell = Farewell(unsent, grace_s=CLOSE_HANDSHAKE_S, stall_s=stall_s)
        self._alarm = Alarm(host.loop, self._on_alarm)
        self.gate = gate
        self.take_turn = host.turns.add
        self.frame = self._websocket.text
        self.write = transport.write
        self._accept = accept
        self._outlet = outlet

    def open(self) -> tuple[Response, Headers] | None:
        """Answer the handshake. What refuses it, if anything does, for the caller to send."""
        program = self._host.program
        if fault := self._websocket.check():
            return program.malformed(self._call, fault.status, fault.message), fault.headers
        answer = program.upgrade(self._call)
        if isinstance(answer, Response):
            return answer, ()
        self._transport.write(self._accept(self._websocket))
        self._session = answer(self)
        self._alarm.set(self._host.deadlines.keepalive_s)
        return None

    def begin(self, data: bytes) -> None:
        """Frames that came right behind the handshake."""
        if data:
            self.receive(data)

    def receive_some(self, data: bytes) -> bytes:
        """Bytes came: so much of them as belongs into one turn. Returns the others."""
        self.receive(data[:TURN_BYTES])
        return data[TURN_BYTES:]

    def receive(self, data: bytes) -> None:
        """Bytes came. What the session says to a message leaves before what the protocol says to a later frame."""
        self._heard = True
        over = False
        for event in self._websocket.receive(data):
            if isinstance(event, Closed):
                self._end_session()
                over = True
            elif self._session is not None:
                self._session.receive(event)
        if reply := self._websocket.take_outgoing():
            self._transport.write(reply)
        if over:
            self._finish()

    @property
    def writable(self) -> bool:
        """Whether the transport takes more tokens."""
        return self.gate.writable

    def outlet(self, pieces: Pieces | None) -> Outlet | None:
        """A shorter way for tokens than `frame` and `write`, if the transport has one."""
        return self._outlet(FRAME, pieces) if self._outlet is not None and self._websocket.direct else None

    def frame_binary(self, payload: bytes) -> bytes:
        """The frame of one binary message."""
        return self._websocket.binary(payload)

    def close(self, code: int, reason: str = "") -> None:
        """Begin the closing handshake; its end has a deadline. The session is over: nothing more can be sent for it."""
        if not self._closing:
            self._transport.write(self._websocket.close(code, reason))
            self._await_end()
            self._end_session()

    def _finish(self) -> None:
        """Both close frames were sent; or only ours, since the peer broke a rule. What that one is still sending must
        be read and dropped: closing at once would reset the connection, and the code would be lost."""
        linger = self._websocket.faulted and self._transport.can_write_eof() and not self._transport.is_closing()
        if linger:
            self._transport.write_eof()
        else:
            self._transport.close()
        self._await_end()

    def _await_end(self) -> None:
        if not self._closing:
            self._closing = True
            self._alarm.set(self._farewell.wait_s())

    def pump(self) -> None:
        """The transport takes more."""
        if self._session is not None:
            self._session.pump()

    def drain(self) -> None:
        """The server will stop."""
        if self._session is not None and not self._closing:
            self._session.drain()

    def lost(self) -> None:
        """The connection is gone."""
        self._alarm.close()
        self._end_session()

    def _end_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.lost()

    def _on_alarm(self) -> None:
        if self._closing:
            if wait_s := self._farewell.wait_s():
                self._alarm.set(wait_s)
            else:
                self._transport.abort()
            return
        if not self.writable:
            pass  # the stall watch judges a peer that can't be written to
        elif self._heard:
            self._heard = False
            self._transport.write(self._websocket.ping())
        else:
            self.close(1011, "no pong in time")
            return
        self._alarm.set(self._host.deadlines.keepalive_s)
