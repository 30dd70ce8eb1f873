"""Whose turn it is: what clients ask is read and answered one after another, for a few milliseconds at a stretch, in
whichever protocol it comes.

Between two stretches the loop writes to those who stream, hears whoever leaves, and tells the engine what was begun. So
of a crowd that asks in one instant the first have tokens while the last still wait, and nobody's stream stands still
for as long as the whole crowd takes.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

# A dozen or two of requests. Between two stretches is one turn of the loop, which costs as much as a part of one.
STRETCH_S = 0.005


class Turns:
    """Calls what was added, in that order, in later turns of the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = time.monotonic) -> None:
        self._loop = loop
        self._clock = clock
        self._waiting: deque[Callable[[], None]] = deque()  # of each connection one at a time
        self._scheduled = False

    def add(self, act: Callable[[], None]) -> None:
        """Call `act` when it is its turn."""
        self._waiting.append(act)
        if not self._scheduled:
            self._schedule()

    def _schedule(self) -> None:
        self._scheduled = True
        self._loop.call_soon(self._act)

    def _act(self) -> None:
        waiting, clock = self._waiting, self._clock
        end = clock() + STRETCH_S
        self._scheduled = False
        try:
            while waiting:
                waiting.popleft()()
                if clock() >= end:
                    break
        finally:  # what one of them raises is told by the loop, and the others' turn comes all the same
            if waiting and not self._scheduled:
                self._schedule()
