"""Who waits for a place in the batch, and whose turn it is.

Three lines. Sequences that were preempted go first, the one that lost its place last before the others: they had been
running, and no more of them come than run. Then new ones, in the order in which they came, and ones that have credit
again, in the order in which they got it, by turns: slow readers, however many, keep no new request out, and a crowd of
new requests keeps no reader that came back waiting for longer than one of them.

Within each of these two lines the clients (those who share cached blocks: one salt) take turns by tokens, so that one
with a thousand sequences keeps no other waiting: deficit round robin (Shreedhar and Varghese, 1995). A sequence costs
what it must compute to join, and what it generated when it ends, which nobody knows before. In a client's turn its own
sequences go by their priorities (engine/priority.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from engine.priority import FAIR_EVERY
from engine.sequence import Sequence

# What a client may have in its turn. Less would be more turns for a long prompt, more a longer wait for the others.
TURN_TOKENS = 256
# A client that generated more is not held back for longer: what it had may lie in a time when nobody else waited.
DEBT_TOKENS_MAX = 64 * TURN_TOKENS
# Places of those who left stay in a client's heap until they come up, or until they are more than the others and this.
STALE_PLACES_MAX = 64


class _Client:
    """Sequences of one client, by their places."""

    __slots__ = ("_arrivals", "_ranks", "admitted", "deficit", "sequences")

    def __init__(self) -> None:
        self.deficit = TURN_TOKENS  # tokens that it may still have in its turn
        self.admitted = 0
        self.sequences: dict[int, Sequence] = {}
        # Heaps of (priority, arrival), the one as if all priorities were alike; with some that left `sequences`
        self._ranks: list[tuple[int, int]] = []
        self._arrivals: list[tuple[int, int]] = []

    def join(self, sequence: Sequence) -> None:
        arrival = sequence.arrival
        self.sequences[arrival] = sequence
        heapq.heappush(self._ranks, (sequence.priority, arrival))
        heapq.heappush(self._arrivals, (0, arrival))
        for heap in (self._ranks, self._arrivals):
            if len(heap) > 2 * len(self.sequences) + STALE_PLACES_MAX:
                heap[:] = sorted({place for place in heap if place[1] in self.sequences})

    @property
    def first(self) -> Sequence:
        fair = self.admitted % FAIR_EVERY == FAIR_EVERY - 1
        heap = self._arrivals if fair else self._ranks
        while heap[0][1] not in self.sequences:
            heapq.heappop(heap)
        return self.sequences[heap[0][1]]


class _Line:
    """Clients that have somebody waiting; the first one has its turn."""

    __slots__ = ("_clients",)

    def __init__(self) -> None:
        self._clients: dict[str, _Client] = {}

    def __bool__(self) -> bool:
        return bool(self._clients)

    def __len__(self) -> int:
        return sum(len(client.sequences) for client in self._clients.values())

    def __iter__(self) -> Iterator[Sequence]:
        for client in self._clients.values():
            yield from client.sequences.values()

    def __contains__(self, sequence: Sequence) -> bool:
        client = self._clients.get(sequence.salt)
        return client is not None and sequence.arrival in client.sequences

    def join(self, sequence: Sequence) -> None:
        self._clients.setdefault(sequence.salt, _Client()).join(sequence)

    def leave(self, sequence: Sequence) -> None:
        client = self._clients[sequence.salt]
        del client.sequences[sequence.arrival]
        if not client.sequences:
            del self._clients[sequence.salt]

    @property
    def first(self) -> Sequence:
        """Clients whose deficit is too small for their first sequence go to the end, with more for their next turn."""
        clients = self._clients
        while True:
            salt, client = next(iter(clients.items()))
            sequence = client.first
            if len(clients) == 1 or client.deficit >= _cost(sequence):
                return sequence
            client.deficit += TURN_TOKENS
            del clients[salt]
            clients[salt] = client

    def admit(self, sequence: Sequence) -> None:
        """It leaves for the batch, and its client pays for what it must compute."""
        self._clients[sequence.salt].admitted += 1
        self.charge(sequence, _cost(sequence))
        self.leave(sequence)

    def charge(self, sequence: Sequence, tokens: int) -> None:
        """Its client had so many tokens. One that is alone owes nobody."""
        client = self._clients.get(sequence.salt)
        if client is not None and len(self._clients) > 1:
            client.deficit = max(client.deficit - tokens, -DEBT_TOKENS_MAX)


class Waiting:
    """Joining and leaving take O(log n), and so does finding the first, but for a turn for each TURN_TOKENS."""

    def __init__(self) -> None:
        self._preempted: dict[Sequence, None] = {}  # the last one is the first
        self._returned = _Line()
        self._new = _Line()
        self._arrived = 0
        self._new_is_next = True

    def __bool__(self) -> bool:
        return bool(self._preempted or self._returned or self._new)

    def __len__(self) -> int:
        return len(self._preempted) + len(self._returned) + len(self._new)

    def __iter__(self) -> Iterator[Sequence]:
        """All of them, in no order that means anything."""
        yield from self._preempted
        yield from self._returned
        yield from self._new

    def join(self, sequence: Sequence) -> None:
        """Wait for the first time; or again, in its old place, for one that left before its turn came. One that had its
        turn waits among those that have credit again."""
        returns = sequence.cached_tokens >= 0
        if returns or not sequence.arrival:
            self._arrived += 1
            sequence.arrival = self._arrived
        (self._returned if returns else self._new).join(sequence)

    def join_first(self, sequence: Sequence) -> None:
        """It ran, and its blocks were needed."""
        self._preempted[sequence] = None

    @property
    def first(self) -> Sequence:
        """Whose turn it is. Raises IndexError when nobody waits."""
        if self._preempted:
            return next(reversed(self._preempted))
        if self._new and (self._new_is_next or not self._returned):
            return self._new.first
        if not self._returned:
            raise IndexError("nobody waits")
        return self._returned.first

    def admit(self, sequence: Sequence) -> None:
        """It leaves for the batch, which uses up its line's turn."""
        if sequence in self._preempted:
            del self._preempted[sequence]
            return
        line = self._returned if sequence in self._returned else self._new
        self._new_is_next = line is self._returned
        line.admit(sequence)

    def ended(self, sequence: Sequence) -> None:
        """It takes no place any more: its client's others pay for what it generated."""
        self._new.charge(sequence, sequence.generated)

    def leave(self, sequence: Sequence) -> None:
        """It waits no more, for whatever reason. Raises KeyError when it did not."""
        if sequence in self._preempted:
            del self._preempted[sequence]
        elif sequence in self._returned:
            self._returned.leave(sequence)
        else:
            self._new.leave(sequence)


def _cost(sequence: Sequence) -> int:
    return len(sequence.tokens) - sequence.computed
