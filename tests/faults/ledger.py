"""What all readers of one stream saw, whatever framing they had: each position once and for all, each byte of text.

A reader that sees something else at a position than another one did fails at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.faults import grammars


@dataclass(frozen=True)
class Cut:
    """A reading that ended without its end: who read, and what it was told."""

    door: str
    end: str
    stalled: bool
    half_closed: bool


@dataclass
class Ledger:
    """Of one stream. `events`: the data at each position; `tokens`: choice and text of WebSocket messages by their `n`;
    `slices`: bytes of bare text and where they began."""

    stream: str
    asked_at: float  # the server began it then at the earliest
    events: dict[int, bytes] = field(default_factory=dict)
    tokens: dict[int, tuple[int, str]] = field(default_factory=dict)
    slices: list[tuple[int, bytes]] = field(default_factory=list)
    outcomes: set[str] = field(default_factory=set)  # as readers, polls and cancels were told
    usages: set[int] = field(default_factory=set)  # completion tokens, likewise
    whole_texts: list[list[str]] = field(default_factory=list)  # of answers in one piece
    plain_whole: bool = False  # a reader of bare text saw its orderly end
    cuts: list[Cut] = field(default_factory=list)
    cancelled: bool = False  # somebody asked for it
    began_at: float = field(default_factory=time.monotonic)  # … and at the latest: its first reader was told
    attended: list[tuple[float, float]] = field(default_factory=list)  # when it surely had a reader
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @contextmanager
    def attend(self) -> Iterator[Attendance]:
        """A reader is attached, until the block ends, or until it said that from then on it can't be sure."""
        attendance = Attendance()
        try:
            yield attendance
        finally:
            with self._lock:
                self.attended.append((attendance.began_at, attendance.sure_until or time.monotonic()))

    def see(self, position: int, data: bytes) -> None:
        """An event."""
        with self._lock:
            known = self.events.setdefault(position, data)
            assert known == data, f"position {position} of {self.stream} is {data!r} now, and was {known!r}"
            if failure := grammars.failure(data):
                self.outcomes.add(failure)
            if (tokens := grammars.usage(data)) is not None:
                self.usages.add(tokens)

    def see_token(self, n: int, choice: int, text: str) -> None:
        """A token of a WebSocket."""
        with self._lock:
            known = self.tokens.setdefault(n, (choice, text))
            assert known == (choice, text), f"token {n} of {self.stream} is {(choice, text)} now, and was {known}"

    def see_slice(self, offset: int, data: bytes) -> None:
        """Bare text."""
        with self._lock:
            self.slices.append((offset, data))

    def told(self, outcome: str, completion_tokens: int | None = None) -> None:
        """How it ended."""
        with self._lock:
            self.outcomes.add(outcome)
            if completion_tokens is not None:
                self.usages.add(completion_tokens)

    @property
    def position(self) -> int:
        """The last one up to which every event was seen by somebody; -1: none."""
        with self._lock:
            position = -1
            while position + 1 in self.events:
                position += 1
            return position

    @property
    def text_bytes(self) -> int:
        """How many bytes of the first choice's text are known without a gap."""
        events = len(self.pieces().get(0, "").encode())
        with self._lock:
            return max([events, *(offset + len(data) for offset, data in self.slices)])

    def pieces(self) -> dict[int, str]:
        """The text of each choice, joined from events and tokens, whose places must agree."""
        with self._lock:
            merged: dict[int, tuple[int, str]] = dict(self.tokens)
            for position, data in self.events.items():
                for choice, text in grammars.texts(data):
                    known = merged.setdefault(position, (choice, text))
                    assert known == (choice, text), f"position {position} of {self.stream}: {known} and {text!r}"
            texts: dict[int, str] = {}
            for position in sorted(merged):
                choice, text = merged[position]
                texts[choice] = texts.get(choice, "") + text
            return texts

    def reasons(self) -> dict[int, str]:
        """The reason that each choice was given in the events."""
        found: dict[int, str] = {}
        for data in self.events.values():
            for choice, reason in grammars.reasons(data):
                assert choice not in found, f"{self.stream} gives choice {choice} two reasons"
                found[choice] = reason
        return found

    @property
    def ended(self) -> bool:
        """Whether its last event was seen."""
        return any(map(grammars.is_last, self.events.values()))

    def absent_for(self, seconds: float, lived_s: float) -> bool:
        """Whether there was a time of that length, within so long from its begin, in which nobody surely read."""
        covered = self.began_at
        for begin, end in sorted(self.attended):
            if begin - covered >= seconds:
                return True
            covered = max(covered, end)
        return self.began_at + lived_s - covered >= seconds


class Attendance:
    """One reader's time."""

    def __init__(self) -> None:
        self.began_at = time.monotonic()
        self.sure_until: float | None = None

    def unsure(self) -> None:
        """From here on the server may take it for gone."""
        if self.sure_until is None:
            self.sure_until = time.monotonic()
