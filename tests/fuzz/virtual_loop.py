"""An event loop whose time is a number and whose only I/O is what a test does: it runs nothing by itself.

The callbacks, timers and tasks are asyncio's own. What asyncio would log (an exception that nobody caught, a task that
failed) is kept in `faults`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

# Turns of the loop that one event may cause. Only callbacks that call each other for ever meet it.
TURNS_MAX = 10_000


class _NoSelector:
    """Nothing is ever ready, and nobody waits for it."""

    def select(self, timeout: float | None = None) -> list[Any]:
        return []


class VirtualLoop(asyncio.BaseEventLoop):
    """Use `running()` around everything, and `rest` and `advance` to let it run."""

    # BaseEventLoop's own, which typeshed leaves out
    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]
    _run_once: Callable[[], None]

    def __init__(self) -> None:
        super().__init__()
        self._selector = _NoSelector()
        self.now = 0.0
        self.faults: list[dict[str, Any]] = []
        self.set_exception_handler(lambda _, context: self.faults.append(context))

    def time(self) -> float:
        """See BaseEventLoop."""
        return self.now

    def _process_events(self, events: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """This is the running loop."""
        asyncio._set_running_loop(self)
        try:
            yield
        finally:
            asyncio._set_running_loop(None)
            self.close()

    def rest(self) -> None:
        """Run what is ready, and what that makes ready, until nothing is."""
        for _ in range(TURNS_MAX):
            if not self._ready:
                return
            self._run_once()
        raise AssertionError(f"the loop does not rest within {TURNS_MAX} turns")

    def advance(self, seconds: float) -> None:
        """Let so much time pass, each timer at its own moment."""
        end = self.now + seconds
        self.rest()
        while (at := min((h.when() for h in self._scheduled if not h.cancelled()), default=end + 1)) <= end:
            self.now = max(self.now, at)
            self._run_once()
            self.rest()
        self.now = end

    @property
    def timers(self) -> int:
        """Timers that were neither run nor cancelled."""
        return sum(not handle.cancelled() for handle in self._scheduled)
