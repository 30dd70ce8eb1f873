"""What ends by itself after a while, when all of a kind wait equally long: one timer for all of them.

A timer of the loop for each takes some 800 bytes for as long as it waits, and most are cancelled long before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

# A timer may ring so much early, by the loop's rounding: what is due within it is due.
EARLY_S = 0.001

K = TypeVar("K")


class Expiry(Generic[K]):
    """Calls `end(key)` once `after_s` have passed since `add(key)`, unless it is discarded before. `end` discards it.

    `clock` gives seconds that only grow; `call_later(seconds, f)` returns what cancels the call."""

    def __init__(
        self,
        after_s: float,
        end: Callable[[K], None],
        *,
        clock: Callable[[], float],
        call_later: Callable[[float, Callable[[], None]], Callable[[], None]],
    ) -> None:
        self._after_s = after_s
        self._end = end
        self._clock = clock
        self._call_later = call_later
        self._due: dict[K, float] = {}  # the oldest first
        self._cancel: Callable[[], None] | None = None  # the timer; it may be for one that was discarded

    def __len__(self) -> int:
        return len(self._due)

    @property
    def oldest(self) -> K:
        """The one that waits for the longest."""
        return next(iter(self._due))

    def add(self, key: K) -> None:
        """It ends `after_s` from now. It must not wait already."""
        self._due[key] = self._clock() + self._after_s
        if self._cancel is None:
            self._cancel = self._call_later(self._after_s, self._look)

    def discard(self, key: K) -> None:
        """Let it be; nothing happens if it doesn't wait."""
        self._due.pop(key, None)
        if not self._due and self._cancel is not None:
            self._cancel()
            self._cancel = None

    def _look(self) -> None:
        self._cancel = None
        now = self._clock() + EARLY_S
        while self._due and self._due[key := self.oldest] <= now:
            del self._due[key]
            self._end(key)
        if self._due and self._cancel is None:
            self._cancel = self._call_later(self._due[self.oldest] - now + EARLY_S, self._look)
