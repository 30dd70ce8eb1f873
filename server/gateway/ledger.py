"""What clients have taken, in memory that several server processes share, so that their limits hold to the exact count.

A row for each client: its two buckets, and its streams in each process. Whoever reads or writes holds the lock, one of
the kernel's record locks, which a process that dies lets go of; the slots that it had are given back by `forget`.
A bucket is kept as what was taken of it, so that a row of zeros is a client who has taken nothing, and a limit that
changes leaves the row as it is, but for a lower one, under which what is lacking fills in the same time.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import blake2b

from server.gateway.limits import Bucket, Slots

# Rows are never taken back: so many clients may be known in a server's life. The memory of those that never come is
# never touched.
ROWS_MAX = 16_384
WORD_BYTES = 8
NAME_WORDS = 2  # of a row, its client's name as a hash
BUCKET_WORDS = 3  # what was taken, when that was true, and the rate by which it was counted
REQUESTS, TOKENS, STREAMS = NAME_WORDS, NAME_WORDS + BUCKET_WORDS, NAME_WORDS + 2 * BUCKET_WORDS  # words of a row
RESTARTS = 0  # word of the head
HEAD_WORDS = 1


class LedgerFull(Exception):
    """More clients than there are rows."""


class Ledger:
    """Made before the processes are forked; each `take`s its column. `count`: of processes."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._column = 0
        self._row_words = STREAMS + count
        size = (HEAD_WORDS + ROWS_MAX * self._row_words) * WORD_BYTES
        self._file = os.memfd_create("sluice-ledger")
        weakref.finalize(self, os.close, self._file)
        os.truncate(self._file, size)
        memory = memoryview(mmap.mmap(self._file, size))
        self._numbers = memory.cast("d")
        self._integers = memory.cast("Q")
        self._rows: dict[str, int] = {}  # first words of rows, by client

    def take(self, column: int) -> None:
        """This process's streams are counted in this column."""
        self._column = column

    @property
    def engine_restarts(self) -> int:
        """Engines that were started anew."""
        return self._integers[RESTARTS]

    def count_restart(self) -> None:
        """One more. The supervisor alone counts."""
        self._integers[RESTARTS] += 1

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else reads or writes meanwhile."""
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def reserve(self, names: Iterable[str]) -> None:
        """A row for each client. Raises LedgerFull."""
        with self.locked():
            for name in names:
                self._row(name)

    def slots(self, name: str) -> Slots:
        """See Book. Raises LedgerFull."""
        return SharedSlots(self._integers, self._row(name) + STREAMS, self._count, self._column)

    def bucket(self, name: str, per_minute: int, now: float, before: Bucket | None, *, of_tokens: bool) -> Bucket:
        """See Book. What is lacking stands in the row. Raises LedgerFull."""
        return SharedBucket(per_minute, self._numbers, self._row(name) + (TOKENS if of_tokens else REQUESTS))

    def forget(self, column: int) -> None:
        """A process died: its streams are none."""
        with self.locked():
            for index in range(ROWS_MAX):
                row = HEAD_WORDS + index * self._row_words
                if self._integers[row]:
                    self._integers[row + STREAMS + column] = 0

    def _row(self, name: str) -> int:
        """Where a client's row begins: found by its name's hash, or at the next free row behind."""
        known = self._rows.get(name)
        if known is not None:
            return known
        digest = blake2b(name.encode("utf-8", "surrogateescape"), digest_size=NAME_WORDS * WORD_BYTES).digest()
        high, low = int.from_bytes(digest[:8], "big") | 1, int.from_bytes(digest[8:], "big")  # a row in use isn't 0
        for step in range(ROWS_MAX):
            row = HEAD_WORDS + (low + step) % ROWS_MAX * self._row_words
            if not self._integers[row]:
                self._integers[row], self._integers[row + 1] = high, low
            if (self._integers[row], self._integers[row + 1]) == (high, low):
                self._rows[name] = row
                return row
        raise LedgerFull(f"there is room for {ROWS_MAX} clients")


class SharedSlots(Slots):
    """A number for each process."""

    __slots__ = ("_column", "_numbers")

    def __init__(self, integers: memoryview[int], first: int, count: int, column: int) -> None:
        self._numbers = integers[first : first + count]
        self._column = column

    @property
    def taken(self) -> int:
        """Of all processes together."""
        return sum(self._numbers)

    def add(self, more: int) -> None:
        """See Slots; in this process."""
        self._numbers[self._column] += more


class SharedBucket(Bucket):
    """Three numbers of a row. The first process that knows of a new rate carries over what is lacking."""

    __slots__ = ("_numbers", "_word")

    def __init__(self, per_minute: int, numbers: memoryview[float], word: int) -> None:
        self.per_minute = per_minute
        self._numbers = numbers
        self._word = word
        before, numbers[word + 2] = numbers[word + 2], float(per_minute)
        if before > per_minute:
            numbers[word] *= per_minute / before

    @property
    def level(self) -> float:
        """What is there."""
        return self.per_minute - self._numbers[self._word]

    @level.setter
    def level(self, value: float) -> None:
        self._numbers[self._word] = self.per_minute - value

    @property
    def _at(self) -> float:
        return self._numbers[self._word + 1]

    @_at.setter
    def _at(self, value: float) -> None:
        self._numbers[self._word + 1] = value
