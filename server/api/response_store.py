"""The responses that clients may come back to: retrieve, stream again, cancel, go on from.

In memory, and bounded: a response is kept for `ttl_s` behind its end, and all together for so many bytes and at most
RESPONSES_MAX; over that the oldest that have ended go first. Responses that have not ended always stay; the server's
limit of streams bounds them. Whoever asks for one that is gone is told what is told of any that never was.

No I/O. What is over is dropped when the store is next asked or added to.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from server.stream import Stream

# Each costs about a kilobyte beside its bytes.
RESPONSES_MAX = 16_384


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """The flags of the same names set them."""

    ttl_s: float = 3600.0
    bytes_max: int = 64 * 1024 * 1024


@dataclass(slots=True, eq=False)
class Stored:
    """One response. Its conversation is kept whole, since an earlier response that it goes on from may be gone."""

    id: str
    key: str
    stream_id: str
    items: bytes  # JSON: what went in, the earlier turns included
    stream: Stream | None  # until it has ended
    final: bytes = b""  # JSON: the response as it ended
    expires_at: float = 0.0
    made: tuple[str, ...] = ()  # ids of the items that came out

    @property
    def size(self) -> int:
        """Bytes that count against the limit."""
        return len(self.items) + len(self.final)

    def output(self) -> list[dict[str, Any]]:
        """What came out, once it has ended."""
        return _output(self.final)


def conversation(items: bytes, final: bytes) -> list[dict[str, Any]]:
    """Every item of a response that has ended, its own output last."""
    given: list[dict[str, Any]] = msgspec.json.decode(items)
    return given + _output(final)


def _output(final: bytes) -> list[dict[str, Any]]:
    output: list[dict[str, Any]] = msgspec.json.decode(final)["output"]
    return output


class ResponseStore:
    """`clock` gives seconds that only grow."""

    def __init__(self, limits: StoreLimits | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits or StoreLimits()
        self._clock = clock
        self._stored: dict[str, Stored] = {}
        self._ended: dict[Stored, None] = {}  # oldest first
        self._makers: dict[str, Stored] = {}  # by the ids of what they made
        self.bytes = 0

    def keep(self, id: str, items: bytes, stream: Stream) -> None:
        """A response that has just begun."""
        stored = Stored(id, stream.key, stream.id, items, stream)
        self._stored[id] = stored
        self.bytes += stored.size
        stream.on_finish.append(lambda: self._end(stored, stream))
        self._trim()

    def find(self, id: str, key: str) -> Stored | None:
        """The response, if it is this key's and still held."""
        self._trim()
        stored = self._stored.get(id)
        return stored if stored is not None and stored.key == key else None

    def find_item(self, id: str, key: str) -> dict[str, Any] | None:
        """An item that came out of a response, likewise."""
        self._trim()
        maker = self._makers.get(id)
        if maker is None or maker.key != key:
            return None
        return next(item for item in maker.output() if item["id"] == id)

    def drop(self, stored: Stored) -> None:
        """Forget it. A response that has not ended is the caller's to end."""
        if self._stored.pop(stored.id, None) is not None:
            self.bytes -= stored.size
            self._ended.pop(stored, None)
            for id_ in stored.made:
                del self._makers[id_]

    def _end(self, stored: Stored, stream: Stream) -> None:
        if stored.id not in self._stored:
            return
        self.bytes -= stored.size
        stored.final = stream.grammar.whole(stream)
        stored.stream = None
        stored.made = tuple(item["id"] for item in stored.output())
        self._makers.update(dict.fromkeys(stored.made, stored))
        stored.expires_at = self._clock() + self._limits.ttl_s
        self.bytes += stored.size
        self._ended[stored] = None
        self._trim()

    def _trim(self) -> None:
        now = self._clock()
        while self._ended:
            oldest = next(iter(self._ended))
            over = self.bytes > self._limits.bytes_max or len(self._stored) > RESPONSES_MAX
            if not over and oldest.expires_at > now:
                return
            self.drop(oldest)
