"""One stream of HTTP/2: a request, and the channel by which its answer is written.

A reader, a whole answer and a WebSocket all write here. What the client's windows don't take stays here as `rest`, one
write of it at most where a reader writes: `writable` is false then, and the reader leaves the rest in the stream's log.
"""

from __future__ import annotations

import asyncio
import enum
from typing import TYPE_CHECKING

from protocols.http2_guard import Code
from server.begun import begin
from server.exchange import streaming_fields, whole_fields
from server.flow import Alarm
from server.http import Call, Headers, Response, Streaming
from server.readers import ClientReader

if TYPE_CHECKING:
    from protocols.http2 import Http2
    from server.http2_connection import Http2Connection
    from server.websocket_connection import WebSocketConnection

# What a stream sends before it is the next one's turn: one frame of the largest size.
TURN_BYTES = 16 * 1024
# Events that a reader renders for one turn; a token's frame is some 200 bytes.
EVENTS_PER_TURN = 64
# A deadline is looked at so long behind its time: what comes exactly then has come, whatever the clock rounds.
ALARM_SLACK_S = 0.001
# Behind an answer that came before its request's end: curl 7.88 takes a reset for a failure of the answer, and most
# clients are about to end the stream themselves. What they send meanwhile is dropped, a window's worth at most.
STREAM_LINGER_S = 2.0


class Ending(enum.Enum):
    """How the answer ends once all of it was sent."""

    NOT_YET = enum.auto()
    WHOLE = enum.auto()
    CUT = enum.auto()


class Http2Stream:
    """Owned by an `Http2Connection`. `call` is None for a request that was not understood."""

    __slots__ = (
        "_alarm", "_connection", "_due", "_ending", "_http2", "_left", "_over", "_progress_at", "_reader", "_rest",
        "_sending", "answered", "body", "call", "id", "refusal", "task", "websocket",
    )  # fmt: skip

    def __init__(self, connection: Http2Connection, http2: Http2, stream: int, call: Call | None) -> None:
        self.id = stream
        self.call = call
        self.body = bytearray()
        self.refusal: tuple[Response, Headers] | None = None  # earned by its head, or by its body's size
        self.task: asyncio.Task[None] | None = None
        self.websocket: WebSocketConnection | None = None
        self.answered = False  # all of the answer was sent; the request's end is still to come
        self._connection = connection
        self._http2 = http2
        self._reader: ClientReader | None = None
        self._rest: bytes | memoryview = b""
        self._ending = Ending.NOT_YET
        self._sending = self._over = False
        self._due = False  # its answer waits for its turn to be begun
        self._left = TURN_BYTES  # of this turn
        self._progress_at = 0.0
        self._alarm = Alarm(connection.loop, self._on_alarm)

    # The request

    def await_body(self) -> None:
        """A piece of the request came; the next one has a deadline."""
        self._alarm.set(self._connection.deadlines.body_s)

    def dispatch(self, call: Call) -> None:
        """The request is here to its end: have it answered."""
        self._alarm.clear()
        call.body = bytes(self.body)
        self.body.clear()
        self._due = True
        self._connection.turns.add(lambda: self._begin_answer(call))

    def _begin_answer(self, call: Call) -> None:
        self._due = False
        if not self._over:
            self.task = begin(self._connection.loop, self._answer(call))

    async def _answer(self, call: Call) -> None:
        answer = await self._connection.program.answer(call)
        self.task = None
        if isinstance(answer, Response):
            self.send(answer)
        else:
            self._open(call, answer)

    # Answers

    def send(self, answer: Response, extra: Headers = ()) -> None:
        """A whole answer."""
        if self._over:
            return
        fields = whole_fields(answer, extra)
        if answer.status != 204:
            fields.append((b"Content-Length", b"%d" % len(answer.body)))
        is_head = self.call is not None and self.call.request.method == "HEAD"
        empty = not answer.body or is_head or answer.status in (204, 304)
        self._send_head(answer.status, fields, end=empty)
        if not empty:
            self.write(answer.body)
            self.finish()

    def _open(self, call: Call, answer: Streaming) -> None:
        """The head of a streamed answer; its reader writes the rest."""
        reader = ClientReader(answer.stream, answer.framing, self, answer.cursor, burst_events=EVENTS_PER_TURN)
        answer.stream.attach(reader)
        self._reader = reader
        is_head = call.request.method == "HEAD"
        self._send_head(answer.status, streaming_fields(answer), end=is_head)
        if not is_head:
            call.shed()
            reader.pump()

    def accept_websocket(self, fields: list[tuple[bytes, bytes]]) -> None:
        """Open the tunnel (RFC 8441 5)."""
        self._send_head(200, fields, end=False)

    def _send_head(self, status: int, fields: list[tuple[bytes, bytes]], *, end: bool) -> None:
        self._http2.head(self.id, status, fields, end=end)
        self._connection.flush()
        if self.call is not None:
            self._connection.program.sent(self.call, status)
        if end:
            self._settle()
            return
        self._sending = True
        self._progress_at = self._connection.loop.time()
        self._watch(0.0)

    # The channel

    @property
    def gate(self) -> Http2Stream:
        """See Channel."""
        return self

    @property
    def writable(self) -> bool:
        """Whether both windows are open, the transport takes more, and it is still this stream's turn."""
        return (
            not self._rest and self._left > 0 and self._connection.writable and self._http2.room(self.id) > 0
        )  # the last one is False for a stream that is over

    @property
    def unsent(self) -> int:
        """Bytes that the client's windows, or the turns of others, hold back."""
        return len(self._rest)

    def write_each(self, pieces: list[bytes]) -> None:
        """See Channel. Frames of DATA tell nothing apart."""
        self.write(b"".join(pieces))

    def write(self, data: bytes) -> None:
        """Send data; what the windows don't take waits."""
        if self._over or self.answered or not data:
            return
        if self._rest:  # frames of a WebSocket, which answers what its client sent; a reader would have waited
            self._rest = bytes(self._rest) + data
        elif frame := self._http2.fit(self.id, data):
            self._connection.write(frame)
            self._sent(len(data))
        else:
            self._rest = memoryview(data)
            self._send_rest()

    def _send_rest(self) -> None:
        while self._rest and self._left > 0 and self._connection.writable and (room := self._http2.room(self.id)):
            piece, self._rest = self._rest[:room], self._rest[room:]
            self._connection.write(self._http2.data(self.id, piece))
            self._sent(len(piece))
        if self._rest:
            return
        self._rest = b""
        if self.websocket is not None:
            self._connection.take_more(self)
        if self._ending is not Ending.NOT_YET:
            self._end()

    def _sent(self, size: int) -> None:
        self._progress_at = self._connection.loop.time()
        self._left -= size
        if self._left <= 0:
            self._connection.want_turns()

    def turn(self) -> None:
        """It is this stream's turn: send what waits, then what its reader or its session has."""
        self._left = TURN_BYTES
        if self._rest:
            self._send_rest()
        if self._reader is not None:
            self._reader.pump()
        elif self.websocket is not None:
            self.websocket.pump()

    def window_opened(self) -> None:
        """The client takes more, after it took nothing."""
        self._progress_at = self._connection.loop.time()
        self.turn()

    def finish(self) -> None:
        """The answer is whole."""
        self._reader = None
        self._ending = Ending.WHOLE
        if not self._rest:
            self._end()

    def cut(self) -> None:
        """It isn't, and won't be: whoever reads it must see that."""
        self._reader = None
        self._ending = Ending.CUT
        if not self._rest:
            self._end()

    def _end(self) -> None:
        if self._over or self.answered:
            return
        if self._ending is Ending.WHOLE:
            self._http2.end(self.id)
        else:
            self._http2.reset(self.id, Code.INTERNAL_ERROR)
        self._connection.flush()
        self._settle()

    def _settle(self) -> None:
        """Our side of the stream is done. A client that is still sending gets the time to end its own."""
        if not self._http2.open(self.id):
            self._connection.forget(self)
            return
        self.answered = True
        self._alarm.set(STREAM_LINGER_S)
        if self.websocket is not None:
            self.websocket.lost()
        self._connection.stream_answered()

    # The part of a transport that a WebSocket needs

    def close(self) -> None:
        """End the stream behind what is unsent."""
        self.finish()

    def abort(self) -> None:
        """End it now."""
        if not self._over:
            self._http2.reset(self.id, Code.NO_ERROR if self.answered else Code.CANCEL)
            self._connection.flush()
            self._connection.forget(self)

    def can_write_eof(self) -> bool:
        """A stream is closed instead: nothing that the client still sends keeps it from reading our last frames."""
        return False

    def write_eof(self) -> None:
        """See can_write_eof."""
        raise RuntimeError("a stream of HTTP/2 is closed as a whole")

    def is_closing(self) -> bool:
        """Whether the end was decided."""
        return self._over or self._ending is not Ending.NOT_YET

    def get_write_buffer_size(self) -> int:
        """See `unsent`."""
        return len(self._rest)

    # Time, and the end

    def lost(self) -> None:
        """The stream is over, or its connection: whatever was being made for it knows."""
        if self._over:
            return
        self._over = True
        self._rest = b""
        self._alarm.close()
        if self.task is not None:
            self.task.cancel()
        if self.call is not None and (self._due or self.task is not None):
            self._connection.program.left(self.call)
        if self._reader is not None:
            self._reader.leave()
            self._reader = None
        if self.websocket is not None:
            self.websocket.lost()

    def _on_alarm(self) -> None:
        if self.answered:
            self.abort()
        elif self._sending:
            self._look_for_progress()
        elif self._connection.holds_back(self):
            self.await_body()
        else:
            self._connection.refuse_late_body(self)

    def _look_for_progress(self) -> None:
        """A stream that is quiet gets a ping; one whose window stays closed is left by its client."""
        now = self._connection.loop.time()
        quiet_s = now - self._progress_at
        if not self._connection.writable:
            self._progress_at, quiet_s = now, 0.0  # the connection's stall watch judges this one
        elif not self._http2.room(self.id):
            if quiet_s >= self._connection.deadlines.write_stall_s:
                self.abort()
                return
        elif self._reader is not None and quiet_s >= self._connection.deadlines.keepalive_s:
            quiet_s = 0.0
            self.write(self._reader.framing.ping)
        self._watch(quiet_s)

    def _watch(self, quiet_s: float) -> None:
        """Look again when a deadline may have come."""
        keepalive_s, stall_s = self._connection.deadlines.keepalive_s, self._connection.deadlines.write_stall_s
        closed = not self._http2.room(self.id)
        self._alarm.set(max(0.0, stall_s - quiet_s if closed else min(keepalive_s - quiet_s, stall_s)) + ALARM_SLACK_S)
