"""Time on a connection: an alarm that may be put off for nothing, the watch over a write that stalls, and the end."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable

# A stalled write is looked at so many times within its deadline: a client that takes a few bytes in between lives.
STALL_LOOKS = 4
# An alarm's timer rings no later than so, to be set again: a nearer time that is set meanwhile finds one that is early
# enough. A connection waits for its first request for longer than for a stream's next ping.
LOOK_S = 15.0
# Behind the last answer the client may still be sending; closing at once would reset the connection and lose the
# answer on its way (RFC 9112 9.6). It gets so long to read it, and so many bytes to send: most clients write a body to
# its end before they read, and one that is too large is often many times the limit. The bytes are dropped as they come.
LINGER_S = 2.0
LINGER_BYTES_MAX = 64 * 1024 * 1024
LINGER_NOT_AT_ALL = struct.pack("ii", 1, 0)  # struct linger: closing sends a reset


class Alarm:
    """Calls `ring` once the time set has come. Setting it anew to a later time, for each read say, costs one addition:
    the loop's timer is left where it is and moved on when it fires early."""

    __slots__ = ("_at", "_handle", "_looks_at", "_loop", "_ring")

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop = loop
        self._ring = ring
        self._at: float | None = None
        self._handle: asyncio.Handle | None = None  # uvloop's is no TimerHandle where it is to be called at once
        self._looks_at = 0.0  # when that is called

    def set(self, seconds: float) -> None:
        """Ring in so many seconds from now, and not before."""
        now = self._loop.time()
        self._at = at = now + seconds
        if self._handle is not None and self._looks_at > at:
            self._handle.cancel()
            self._handle = None
        if self._handle is None:
            self._look(at, now)

    def clear(self) -> None:
        """Don't ring."""
        self._at = None

    def close(self) -> None:
        """Don't ring, and let the loop forget this."""
        self._at = None
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self) -> None:
        self._handle = None
        if self._at is None:
            return
        now = self._loop.time()
        if now < self._at:
            self._look(self._at, now)
        else:
            self._at = None
            self._ring()

    def _look(self, at: float, now: float) -> None:
        self._looks_at = min(at, now + LOOK_S)
        self._handle = self._loop.call_at(self._looks_at, self._fire)


class StallWatch:
    """Watches a transport above its high-water mark. No byte drained for `timeout_s`: `on_stall` is called."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, unsent: Callable[[], int], timeout_s: float, on_stall: Callable[[], None]
    ) -> None:
        self._alarm = Alarm(loop, self._look)
        self._unsent = unsent
        self._interval_s = timeout_s / STALL_LOOKS
        self._on_stall = on_stall
        self._last = 0
        self._looks_without_progress = 0

    def begin(self) -> None:
        """The transport is above high water."""
        self._last = self._unsent()
        self._looks_without_progress = 0
        self._alarm.set(self._interval_s)

    def progress(self) -> None:
        """The client showed that it lives."""
        self._looks_without_progress = 0

    def end(self) -> None:
        """The transport is below low water again, or closed."""
        self._alarm.clear()

    def close(self) -> None:
        """Stop for good."""
        self._alarm.close()

    def _look(self) -> None:
        unsent = self._unsent()
        self._looks_without_progress = 0 if unsent < self._last else self._looks_without_progress + 1
        self._last = unsent
        if self._looks_without_progress >= STALL_LOOKS:
            self._on_stall()
        else:
            self._alarm.set(self._interval_s)


class Farewell:
    """How long a closing connection waits for its client: `grace_s` once nothing is unsent, and before that for as
    long as it takes something within each `stall_s`."""

    def __init__(self, unsent: Callable[[], int], *, grace_s: float, stall_s: float) -> None:
        self._unsent = unsent
        self._grace_s = grace_s
        self._stall_s = stall_s
        self._before: int | None = None  # unsent bytes at the last look; None: not begun

    def wait_s(self) -> float:
        """The next wait, in seconds, to be followed by another call; 0 when the client has had its time."""
        before, self._before = self._before, self._unsent()
        if before is None:
            self._before = 0  # what was written last may not have had its first chance to leave
            return self._grace_s
        if self._before and (not before or self._before < before):
            return self._stall_s
        return self._grace_s if before and not self._before else 0.0
