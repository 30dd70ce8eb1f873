"""Cursors on a stream's log: one that writes to a client, one that polls, one that waits for the end, one that needs no
client.

A client's reader has no queue: when its channel takes no more, it does nothing, and the log waits. When it has read all
there is, the engine gets credit for the next tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from server.framing import Framing, render
from server.log import Log
from server.outcome import Outcome
from server.outlet import Outlet
from server.stream import Reader, Stream

# Events that a reader who comes late gets in one write: enough to be fast, and a small multiple of the send buffer.
BURST_EVENTS = 64


class Source(Protocol):
    """What a client reads: a stream, or another process's."""

    id: str
    log: Log
    outcome: Outcome | None
    hungry: bool  # `renew` would do something

    def attach(self, reader: Reader) -> None: ...  # noqa: D102
    def detach(self, reader: Reader) -> None: ...  # noqa: D102
    def renew(self) -> None: ...  # noqa: D102
    def finish(self, end: Outcome) -> None: ...  # noqa: D102
    def leaves_by(self, outlet: Outlet, reader: Reader, gate: object) -> None: ...  # noqa: D102


class Gate(Protocol):
    """What says whether a channel takes more."""

    @property
    def writable(self) -> bool:
        """False while the socket's buffer is over the high-water mark."""
        ...


class Channel(Protocol):
    """Where a reader writes."""

    @property
    def gate(self) -> Gate:
        """Its own, or its socket's: each token asks it twice."""
        ...

    def write(self, data: bytes) -> None:
        """Frame `data` and hand it to the transport."""
        ...

    def write_each(self, pieces: list[bytes]) -> None:
        """As one write, each framed by itself where a client can see that."""
        ...

    def finish(self) -> None:
        """The body is whole."""
        ...

    def cut(self) -> None:
        """The body ends here and is not whole: whoever reads it must see that."""
        ...


class ClientReader:
    """Writes a stream's events to a channel from position `cursor` on. `outlet`: the channel's shorter way for tokens,
    if it has one."""

    __slots__ = ("burst_events", "channel", "cursor", "framing", "gate", "outlet", "stream")

    def __init__(
        self, stream: Source, framing: Framing, channel: Channel, cursor: int = 0, *, burst_events: int = BURST_EVENTS
    ) -> None:
        self.stream = stream
        self.framing = framing
        self.channel = channel
        self.gate = channel.gate
        self.cursor = cursor
        self.burst_events = burst_events
        self.outlet: Outlet | None = None

    def send_by(self, outlet: Outlet | None) -> None:
        """Take the channel's shorter way for tokens from now on, if it has one."""
        self.outlet = outlet
        if outlet is not None:
            self.stream.leaves_by(outlet, self, self.gate)

    def pump(self) -> None:
        """Write what is new, as far as the channel takes it."""
        gate, stream = self.gate, self.stream
        log, cursor = stream.log, self.cursor
        end, outcome = log.end, stream.outcome
        if end - cursor == 1:  # a token's, on its way, as nearly always
            if not gate.writable:
                return
            self.cursor = end
            event, outlet = log.last, self.outlet
            sent = outlet is not None and outcome is None and event.data is None and outlet.send(event.text, cursor)
            if not sent and (data := self.framing.one(event, cursor)):
                self.channel.write(data)
        elif cursor < end and not self._catch_up(end):
            return
        if outcome is None:
            if stream.hungry and gate.writable:
                stream.renew()
        else:
            self.leave()
            if self.framing.lies_at_the_end and not outcome.success:
                self.channel.cut()
            else:
                self.channel.finish()

    def _catch_up(self, end: int) -> bool:
        """Write several events, up to position `end`. Whether all were taken."""
        channel = self.channel
        while self.cursor < end:
            if not self.gate.writable:
                return False
            start = self.cursor
            stop = min(end, start + self.burst_events)
            try:
                events = self.stream.log.slice(start, stop)
            except LookupError:  # it was so slow, beside a faster reader, that its events are gone
                self.leave()
                channel.cut()
                return False
            self.cursor = stop
            if pieces := render(self.framing, events, start):
                channel.write_each(pieces)
        return True

    def fail(self) -> None:
        """See Reader."""
        self.leave()
        self.channel.cut()

    def leave(self) -> None:
        """The client is gone, or has all there is."""
        self.outlet = None  # the socket may be closed from now on, and its number another client's
        self.stream.detach(self)


class Collector:
    """Consumes a stream as it grows, for an answer that is sent in one piece."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def pump(self) -> None:
        """Earn the next credit, or see the end."""
        if self._stream.outcome is None:
            self._stream.renew()
        elif not self._ended.done():
            self._ended.set_result(None)

    def fail(self) -> None:
        """See Reader."""
        if not self._ended.done():
            self._ended.set_exception(RuntimeError("the stream's collector failed"))

    async def wait(self) -> None:
        """Until the stream has its outcome."""
        self._stream.attach(self)
        self.pump()
        try:
            await self._ended
        finally:
            self._stream.detach(self)


class Background:
    """Consumes a stream that runs on whether or not a client reads it: its log drops what is over the log's bound."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def begin(self) -> None:
        """Be a reader until the stream ends."""
        self._stream.attach(self)
        self.pump()

    def pump(self) -> None:
        """Earn the next credit."""
        if self._stream.outcome is None:
            self._stream.renew()
        else:
            self._stream.detach(self)

    def fail(self) -> None:
        """See Reader."""
        self._stream.detach(self)


class Poller:
    """The reader of a client that polls: it is there while a poll waits and for `lease_s` after each, and earns credit
    when it is asked."""

    def __init__(self, stream: Stream, lease_s: float, call_later: Callable[..., Callable[[], None]]) -> None:
        self._stream = stream
        self._lease_s = lease_s
        self._call_later = call_later
        self._end_lease: Callable[[], None] | None = None
        self._polls = 0  # that are being answered
        self._changed: asyncio.Event = asyncio.Event()

    def pump(self) -> None:
        """Wake the poll that waits, if one does. What has ended needs no reader between two polls."""
        self._changed.set()
        if self._stream.outcome is not None and not self._polls:
            self._leave()

    def fail(self) -> None:
        """See Reader."""
        self._changed.set()

    async def events_after(self, position: int, wait_s: float) -> None:
        """Wait until there is an event behind `position`, or the stream ended, or the time is over."""
        self._attend()
        self._polls += 1
        try:
            await self._wait_behind(position, wait_s)
        finally:
            self._polls -= 1
            self.renew_lease()

    async def _wait_behind(self, position: int, wait_s: float) -> None:
        stream = self._stream
        if position + 1 >= stream.log.end and stream.outcome is None:
            stream.renew()
            self._changed.clear()
            await asyncio.sleep(0)  # in a task from here on, see server/begun
            try:
                async with asyncio.timeout(wait_s):
                    while position + 1 >= stream.log.end and stream.outcome is None:
                        await self._changed.wait()
                        self._changed.clear()
                        stream.renew()
            except TimeoutError:
                pass
        if stream.outcome is None:
            stream.renew()

    def renew_lease(self) -> None:
        """Stay for another lease; while a poll waits, for as long as it does."""
        self._attend()
        if self._polls:
            return
        if self._stream.outcome is not None:
            self._leave()
        else:
            self._end_lease = self._call_later(self._lease_s, self._leave)

    def _attend(self) -> None:
        """Be a reader, with no end in sight."""
        if self._end_lease is not None:
            self._end_lease()
            self._end_lease = None
        if self._stream.outcome is None and self not in self._stream.readers:
            self._stream.attach(self)

    def _leave(self) -> None:
        if self._end_lease is not None:
            self._end_lease()
            self._end_lease = None
        self._stream.detach(self)
