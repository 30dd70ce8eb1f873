"""What a request's `priority` decides: which of a client's own sequences goes first. The lower number does.

Whose turn it is among clients (those who share cached blocks: one salt), and which of them gives up a place, is never a
matter of priorities, or a client could starve the others by its own. And none of a client's own starves: of every few
that it is given a place for, one is whoever came first (`FAIR_EVERY`), and one that lost its place a few times is
outranked no more (`LOSSES_MAX`).
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

from engine.sequence import Sequence

# Of so many places in the batch that a client gets, the last is for the one that came first. Fewer would make less of
# priorities, more would let the others wait longer.
FAIR_EVERY = 4
LOSSES_MAX = 3
_PRIORITY = attrgetter("priority")  # in C: each step asks each sequence
_FIRST = -(2**64)  # before every priority that the wire can carry


def rank(sequence: Sequence) -> int:
    """Lower is better."""
    return _FIRST if sequence.losses >= LOSSES_MAX else sequence.priority


def by_rank(running: Iterable[Sequence]) -> list[Sequence]:
    """The batch, who gives up a place first at the end. Places belong to clients, in the order of admission; a client's
    own sequences have them by rank, equals in the order of admission."""
    everyone = list(running)
    if not any(map(_PRIORITY, everyone)):
        return everyone
    of_client: dict[str, list[Sequence]] = {}
    for each in everyone:
        of_client.setdefault(each.salt, []).append(each)
    ranked = {salt: iter(sorted(theirs, key=rank)) for salt, theirs in of_client.items()}
    return [next(ranked[each.salt]) for each in everyone]
