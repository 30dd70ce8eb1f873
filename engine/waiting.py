"""Who waits for a place in the batch, and whose turn it is.

Three lines. Sequences that were preempted go first, the one that lost its place last before the others: they had been
running, and no more of them come than run. Then new ones, in the order in which they came, and ones that have credit
again, in the order in which they got it, by turns: slow readers, however many, keep no new request out, and a crowd of
new requests keeps no reader that came back waiting for longer than one of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from engine.sequence import Sequence


class Waiting:
    """Joining, leaving and finding the first take O(log n) at most."""

    def __init__(self) -> None:
        self._preempted: dict[Sequence, None] = {}  # the last one is the first
        self._returned: dict[Sequence, None] = {}
        self._new: dict[int, Sequence] = {}  # by arrival
        self._arrivals: list[int] = []  # heap of those in `_new`, and of some that left; each once
        self._listed: set[int] = set()  # the same
        self._arrived = 0
        self._new_is_next = True

    def __len__(self) -> int:
        return len(self._preempted) + len(self._returned) + len(self._new)

    def __iter__(self) -> Iterator[Sequence]:
        """All of them, in no order that means anything."""
        yield from self._preempted
        yield from self._returned
        yield from self._new.values()

    def join(self, sequence: Sequence) -> None:
        """Wait for the first time; or again, in its old place, for one that left before its turn came. One that had its
        turn waits among those that have credit again."""
        if sequence.cached_tokens >= 0:
            self._returned[sequence] = None
            return
        if not sequence.arrival:
            self._arrived += 1
            sequence.arrival = self._arrived
        self._new[sequence.arrival] = sequence
        if sequence.arrival not in self._listed:
            self._listed.add(sequence.arrival)
            heapq.heappush(self._arrivals, sequence.arrival)

    def join_first(self, sequence: Sequence) -> None:
        """It ran, and its blocks were needed."""
        self._preempted[sequence] = None

    @property
    def first(self) -> Sequence:
        """Whose turn it is. Raises IndexError when nobody waits."""
        if self._preempted:
            return next(reversed(self._preempted))
        if self._new and (self._new_is_next or not self._returned):
            while self._arrivals[0] not in self._new:
                self._listed.remove(heapq.heappop(self._arrivals))
            return self._new[self._arrivals[0]]
        if not self._returned:
            raise IndexError("nobody waits")
        return next(iter(self._returned))

    def admit(self, sequence: Sequence) -> None:
        """It leaves for the batch, which uses up its line's turn."""
        if sequence not in self._preempted:
            self._new_is_next = sequence in self._returned
        self.leave(sequence)

    def leave(self, sequence: Sequence) -> None:
        """It waits no more, for whatever reason. Raises KeyError when it did not."""
        for line in (self._preempted, self._returned):
            if sequence in line:
                del line[sequence]
                return
        del self._new[sequence.arrival]
