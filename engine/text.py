"""Ids to text as they come, for one choice of one request: incremental UTF-8 and stop strings.

Loaded by the server's process; imports nothing but engine.tokenizer. It promises that the joined chunks are the
full decode up to the stop string, and that each chunk is the longest that could be sent: what is held is either an
incomplete character or a proper prefix of a stop string, and nothing more.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import lru_cache

from engine.tokenizer import Tokenizer

# Stop strings of the latest requests, each of which may have a thousand sequences: that many times the same table would
# take seconds.
_KNOWN_MAX = 64
_NONE: frozenset[str] = frozenset()  # an empty set is no smaller than one of four


class TextStream:
    """`push` each id, then `flush` once.

    `stopped` is set by the push that completes a stop string, and `matched` names it. The text before the match is
    all that is ever sent. If one push completes several stop strings, the one that starts first counts, and of those
    that start together the shortest.
    """

    __slots__ = (
        "_firsts",
        "_held",
        "_quiet",
        "_raw",
        "_stops",
        "_strip",
        "_tail",
        "_whole",
        "direct",
        "matched",
        "memo",
        "stopped",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special: bool = True,
        shown: frozenset[int] = frozenset(),
        stops: Sequence[str] = (),
    ) -> None:
        """`shown`: special ids that are not skipped."""
        pieces = tokenizer.pieces(skip_special=skip_special, shown=shown)
        self._raw = pieces.raw
        self._whole = pieces.whole
        self.memo = pieces.memo
        self._stops = [_Stop(text) for text in stops] if stops else []
        self._firsts = frozenset(text[0] for text in stops) if stops else _NONE
        self._strip = tokenizer.spec.strip_leading_space  # until the first byte came
        self._tail = b""  # an incomplete character, three bytes at most
        self._held = ""  # text that may turn out to be the start of a stop string
        self._quiet = not self._strip  # nothing is held, and nothing to strip
        self.direct = self._quiet and not stops  # a whole piece is sent as it is
        self.stopped = False
        self.matched: str | None = None

    def push(self, token_id: int) -> str:
        """The text that may be sent now. An id beyond the vocabulary is no text; after a stop nothing is."""
        try:
            text = self._whole[token_id]
        except IndexError:  # models pad their vocabulary, and may choose such an id
            return ""
        if text is not None and (self.direct or (self._quiet and self._firsts.isdisjoint(text))):
            return text
        return self._advance(self._decode(self._raw[token_id]))

    def whole(self, token_id: int) -> str:
        """What `push` returns for this id whenever `direct` is set, and changes nothing by; "" if there is no such
        text."""
        return (self._whole[token_id] if token_id < len(self._whole) else None) or ""

    def flush(self) -> str:
        """What was held, at the end of the ids; a truncated character becomes U+FFFD."""
        text = self._advance(self._tail.decode("utf-8", "replace"))
        if self.stopped:
            return text
        text += self._held
        self._tail, self._held = b"", ""
        return text

    def _decode(self, piece: bytes) -> str:
        if self._strip and piece:
            self._strip = False
            piece = piece.removeprefix(b" ")
        data = self._tail + piece
        text, used = codecs.utf_8_decode(data, "replace", False)
        tail = data[used:]
        if len(tail) == 2 and tail[0] == 0xED and tail[1] >= 0xA0:
            # A surrogate: nothing can complete it, but CPython waits for the third byte.
            text, tail = text + tail.decode("utf-8", "replace"), b""
        self._tail = tail
        return text

    def _advance(self, text: str) -> str:
        """What may be sent of the held text and `text`; keeps the rest."""
        if self.stopped:
            return ""
        window = self._held + text
        keep = len(window)
        if self._stops:
            found = [(at, len(stop.text), stop.text) for stop in self._stops if (at := stop.feed(text)) is not None]
            if found:
                start, _, self.matched = min(found)
                self.stopped, self._quiet = True, False
                return window[: len(self._held) + start]
            keep -= max(stop.state for stop in self._stops)
        self._held = window[keep:]
        self._quiet = not (self._held or self._tail or self._strip)
        self.direct = self._quiet and not self._stops
        return window[:keep]


class _Stop:
    """Knuth, Morris and Pratt's automaton for one stop string: `state` is the length of the longest suffix of the
    text so far that is a prefix of it."""

    __slots__ = ("_failure", "state", "text")

    def __init__(self, text: str) -> None:
        if not text:
            raise ValueError("a stop string can't be empty")
        self.text = text
        self.state = 0
        self._failure = _failure(text)

    def feed(self, text: str) -> int | None:
        """Where in `text` the first match starts (negative: in what came before), or None."""
        pattern, failure, state = self.text, self._failure, self.state
        at = 0
        if state == 0:  # the common case needs no loop
            at = text.find(pattern[0])
            if at < 0:
                return None
        for index in range(at, len(text)):
            char = text[index]
            while state and pattern[state] != char:
                state = failure[state - 1]
            if pattern[state] == char:
                state += 1
                if state == len(pattern):
                    return index + 1 - state
        self.state = state
        return None


@lru_cache(_KNOWN_MAX)
def _failure(pattern: str) -> list[int]:
    """For each prefix, the length of its longest proper suffix that is a prefix too."""
    table = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[length] != pattern[index]:
            length = table[length - 1]
        if pattern[length] == pattern[index]:
            length += 1
        table[index] = length
    return table
