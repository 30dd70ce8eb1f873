"""Time for tests: a clock that moves when it is told to, with the timers of a stream table and of an event loop."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


class Handle:
    """A timer, as asyncio has them."""

    def __init__(self, when: float, call: Callable[[], object]) -> None:
        self._when = when
        self.call: Callable[[], object] | None = call

    def when(self) -> float:
        """The time that it was set to."""
        return self._when

    def cancel(self) -> None:
        """Don't call."""
        self.call = None


class Clock:
    """Seconds from `now` on. Itself the `clock` of a StreamTable; `time` and `call_at` make it the loop of an Alarm."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self.timers_made = 0
        self._heap: list[tuple[float, int, Handle]] = []
        self._numbers = count()

    def __call__(self) -> float:
        return self.now

    def time(self) -> float:
        """The loop's time."""
        return self.now

    def call_at(self, when: float, call: Callable[..., object], *args: object) -> Handle:
        """As the loop's."""
        handle = Handle(when, lambda: call(*args))
        self.timers_made += 1
        heapq.heappush(self._heap, (when, next(self._numbers), handle))
        return handle

    def call_later(self, seconds: float, call: Callable[..., object], *args: object) -> Callable[[], None]:
        """As a StreamTable wants it: returns what cancels."""
        return self.call_at(self.now + seconds, call, *args).cancel

    @property
    def pending(self) -> int:
        """Timers that were neither called nor cancelled."""
        return sum(handle.call is not None for _, _, handle in self._heap)

    def advance(self, seconds: float) -> None:
        """Let so much time pass, and call whatever falls due in it, each at its own time."""
        end = self.now + seconds
        while self._heap and self._heap[0][0] <= end:
            when, _, handle = heapq.heappop(self._heap)
            self.now = max(self.now, when)
            call, handle.call = handle.call, None
            if call is not None:
                call()
        self.now = end
