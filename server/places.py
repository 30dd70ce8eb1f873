"""Which of several server processes a name belongs to: its last character says so (see server/frontends).

A process has one place for its whole life, so this is set once, before anything is named. A single server has none.
"""

from __future__ import annotations

from hashlib import sha256

PLACES = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
FRONTENDS_MAX = len(PLACES)

_mark = ""


def take_place(index: int) -> None:
    """From now on what is named here is known to be of process `index`."""
    global _mark
    _mark = PLACES[index]


def placed(name: str) -> str:
    """`name`, which must be unguessable by itself, with the mark of this process."""
    return name + _mark


def place_of(name: str) -> int:
    """The process that a name made by `placed` comes from, if there are several; -1: of none."""
    return PLACES.find(name[-1]) if name else -1


def place_for(*parts: str, count: int) -> int:
    """The process out of `count` that answers for something that a client has named."""
    return int.from_bytes(sha256("\0".join(parts).encode("utf-8", "surrogateescape")).digest()[:8], "big") % count
