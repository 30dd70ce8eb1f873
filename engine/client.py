"""The server's end of the wire: an asyncio protocol that speaks to one engine.

What the server tells the engine while it handles a step or a client's bytes leaves together at the end of the loop's
turn: one write, and one Credit message for all the streams that earned some. Only a turn's first new sequence leaves at
once: the engine begins it while its answer is still being opened here.

An engine may be faster than its server. What it sent waits here then, in its socket, and at last for credit: between
two long steps the loop has a turn for everything else, so that whoever connects or cancels is heard.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import cast

from engine.wire import WIRE_VERSION, Cancel, Credit, FrameReader, Hello, Stats, Step, Submit, WireError, encode

# Steps are handled for so long at a stretch: many small ones, or a single one of a thousand streams.
STRETCH_S = 0.005
# Steps that are here together are told as such, so that a stream's tokens of all of them can leave in one write. No
# stream waits for that longer than it takes to look at so many tokens, some milliseconds.
TOGETHER_TOKENS_MAX = 4096


class EngineClient(asyncio.Protocol):
    """`on_hello` once, `on_step` for each step, and whether the next one is told at once behind it; `on_lost` once with
    the reason ("" when we closed)."""

    def __init__(
        self,
        *,
        on_hello: Callable[[Hello], None],
        on_step: Callable[[Step, bool], None],
        on_lost: Callable[[str], None],
        secret: bytes = b"",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_hello = on_hello
        self._on_step = on_step
        self._on_lost = on_lost
        self._secret = secret
        self._reader = FrameReader(engine_side=False)
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._totals: dict[int, int] = {}  # credit to be sent
        self._outgoing: list[bytes] = []
        self._flushing = False
        self._clock = clock
        self._waiting: deque[Hello | Step] = deque()  # at most what one read brought: no more is read meanwhile
        self._paused = False
        self._fault = ""

    def submit(self, message: Submit) -> None:
        """Start a sequence."""
        first = not self._flushing
        self._send(encode(message))
        if first:
            self._write()

    def credit(self, sequence_id: int, total: int) -> None:
        """Let a sequence reach `total` generated tokens."""
        self._totals[sequence_id] = total
        self._schedule_flush()

    def cancel(self, sequence_ids: list[int]) -> None:
        """Forget sequences."""
        for sequence_id in sequence_ids:
            self._totals.pop(sequence_id, None)
        self._send(encode(Cancel(sequence_ids)))

    def ask_gauges(self) -> None:
        """Have a step sent now, though nothing happens."""
        self._send(encode(Stats()))

    def close(self) -> None:
        """End the connection; a child engine ends with it."""
        self._waiting.clear()
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is connected."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by name
        self._transport.set_write_buffer_limits(high=0)  # or uvloop writes at the end of the turn only
        if self._secret:
            self._transport.write(self._secret)

    def data_received(self, data: bytes) -> None:
        """Messages came."""
        try:
            for message in self._reader.feed(data):
                if isinstance(message, Step | Hello):
                    self._waiting.append(message)
        except WireError as error:
            self._handle_all()
            self._fail(error)
        else:
            self._handle_some()

    def _handle_some(self) -> None:
        """One stretch; the rest of what waits has its own, in later turns."""
        end = self._clock() + STRETCH_S
        while self._waiting:
            self._handle_together()
            if self._waiting and self._clock() >= end:
                self._pause()
                self._loop.call_soon(self._handle_some)
                return
        if self._paused and self._transport is not None and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()

    def _pause(self) -> None:
        if not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def _handle_all(self) -> None:
        while self._waiting:
            self._handle_together()

    def _handle_together(self) -> None:
        """The next message, and the steps behind it that are told with it."""
        tokens, more = 0, True
        while more:
            message = self._waiting.popleft()
            if isinstance(message, Hello):
                self._take_hello(message)
                return
            tokens += len(message.ids)
            more = bool(self._waiting) and isinstance(self._waiting[0], Step) and tokens < TOGETHER_TOKENS_MAX
            self._on_step(message, more)

    def _take_hello(self, message: Hello) -> None:
        self._schedule_flush()  # what has waited for an engine reaches it together, so that priorities count
        try:
            self._greet(message)
        except WireError as error:
            self._fail(error)

    def _fail(self, error: WireError) -> None:
        self._fault = str(error)
        self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """The engine is gone."""
        self._transport = None
        self._handle_all()  # it had said that before
        self._on_lost(self._fault or (str(exc) if exc else "the engine closed the connection"))

    def _greet(self, hello: Hello) -> None:
        if hello.wire_version != WIRE_VERSION:
            raise WireError(f"the engine speaks wire version {hello.wire_version}, this server {WIRE_VERSION}")
        self._on_hello(hello)

    def _send(self, frame: bytes) -> None:
        self._outgoing.append(frame)
        self._schedule_flush()

    def _schedule_flush(self) -> None:
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        if self._totals:
            self._outgoing.append(encode(Credit(list(self._totals.items()))))
            self._totals = {}
        self._write()

    def _write(self) -> None:
        if self._outgoing and self._transport is not None:
            self._transport.write(b"".join(self._outgoing))
        self._outgoing.clear()
