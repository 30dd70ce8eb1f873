"""The log of one stream: its events in order, numbered from 0, append-only and bounded.

An event is kept as small as it can be: a piece of text is its JSON-escaped bytes and its choice, and the JSON around it
is put on again by whoever reads; an event of any other kind is its whole JSON. Over the bound the oldest events
go, and `first` says which one is the oldest that is held. What is held never changes.
"""

from __future__ import annotations

import sys

import msgspec

# What Python keeps for an event beside its bytes: the struct, two bytes objects and a place in the list.
EVENT_OVERHEAD_BYTES = 160
# Dropped events are cut off the list's head in one go, once there are so many: cutting one each time is quadratic.
TRIM_EVENTS_MIN = 256


class Event(msgspec.Struct, frozen=True, gc=False):
    """Text of a choice (`data` None), or an event that is rendered already."""

    choice: int  # -1: of none
    text: bytes  # JSON-escaped; what the projections (plain text, WebSocket) show of it
    data: bytes | None = None  # the whole data, when the choice's template doesn't make it
    name: str = ""  # the event's type, in grammars that have types
    size: int = 0  # bytes that a log counts for it

    def __post_init__(self) -> None:
        size = EVENT_OVERHEAD_BYTES + len(self.text) + (0 if self.data is None else len(self.data))
        msgspec.structs.force_setattr(self, "size", size)


class Total:
    """Bytes of many logs together."""

    __slots__ = ("bytes",)

    def __init__(self) -> None:
        self.bytes = 0


class Log:
    """`bytes_max`: when the events outgrow it, the oldest go. The last one always stays, and so do those from
    `keep_from` on, which the furthest reader had not read when it last earned credit: that bounds them. `total` counts
    the bytes too. `last` is there once an event is."""

    __slots__ = ("_bytes_max", "_dropped", "_events", "_offset", "_total", "end", "keep_from", "last", "size")

    last: Event

    def __init__(self, bytes_max: int, total: Total | None = None) -> None:
        self._total = total or Total()
        self._events: list[Event] = []
        self._offset = 0  # position of _events[0]
        self._dropped = 0  # how many at the list's head are dropped already
        self._bytes_max = bytes_max
        self.keep_from = sys.maxsize
        self.end = 0  # position that the next event will have
        self.size = 0  # bytes held

    @property
    def first(self) -> int:
        """Position of the oldest event held."""
        return self._offset + self._dropped

    @property
    def touched(self) -> tuple[object, ...]:
        """What `append` touches."""
        return self, self._events

    def append(self, event: Event) -> None:
        """Add an event at `end`."""
        growth = event.size
        self._events.append(event)
        self.last = event
        self.end += 1
        self.size = size = self.size + growth
        self._total.bytes += growth
        if size > self._bytes_max:
            self._drop()

    def _drop(self) -> None:
        """Let the oldest events go, as far as there are too many bytes and they may."""
        before = self.size
        droppable = min(self.keep_from - self._offset, len(self._events) - 1)
        while self.size > self._bytes_max and self._dropped < droppable:
            self.size -= self._events[self._dropped].size
            self._dropped += 1
        if self._dropped >= TRIM_EVENTS_MIN:
            del self._events[: self._dropped]
            self._offset += self._dropped
            self._dropped = 0
        self._total.bytes -= before - self.size

    def slice(self, start: int, stop: int) -> list[Event]:
        """Events at positions start … stop-1. Raises LookupError when `start` was dropped."""
        offset = self._offset
        if start < offset + self._dropped:
            raise LookupError(f"position {start} is no longer held; the first one is {self.first}")
        return self._events[start - offset : stop - offset]
