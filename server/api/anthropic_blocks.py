"""The content blocks of an answer, as they come: each is begun, has its deltas and is stopped, then the next begins.

A text is one block until a call interrupts it. Where calls may come, no block is begun before it is known which kind it
is.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import msgspec

from protocols.escape import json_value
from server.log import Event
from server.stream import Frame, escaped
from server.tools.pieces import Piece, TextPiece, ToolArguments, ToolCallBegin

DELTA = "content_block_delta"
# The first block's text, where no calls may come.
TEXT_FRAME = Frame(b'{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"', b'"}}', DELTA)

# Positions of blocks whose begin and end are rendered once, for all answers: few have more.
BLOCKS_KEPT = 16

_read = json.JSONDecoder(parse_int=str, parse_float=str).decode  # a number may be larger than any type


def event(name: str, **fields: Any) -> Event:
    """A typed event."""
    return Event(-1, b"", json_value({"type": name, **fields}), name)


@lru_cache(maxsize=BLOCKS_KEPT)
def _text_begun(index: int) -> Event:
    return event("content_block_start", index=index, content_block={"type": "text", "text": ""})


@lru_cache(maxsize=BLOCKS_KEPT)
def _stopped(index: int) -> Event:
    return event("content_block_stop", index=index)


class Blocks:
    """One answer's. `keep`: its content is wanted in one piece, too."""

    def __init__(self, *, keep: bool) -> None:
        self._keep = keep
        self._kept: list[tuple[dict[str, Any], list[str]]] = []  # with the parts of its text, or of its input's JSON
        self._begun = 0
        self._open = ""  # the type of the last block, until it is stopped

    def begin_text(self) -> list[Event]:
        """A block of text, empty so far."""
        ended = self._begin({"type": "text", "text": ""})
        return [*ended, _text_begun(self._begun - 1)]

    def take(self, piece: Piece) -> list[Event]:
        """The events of a piece of an answer that may call tools."""
        if isinstance(piece, TextPiece):
            begun = [] if self._open == "text" else self.begin_text()
            self._hold(piece.text)
            text = escaped(piece.text)
            delta = b'{"type":"content_block_delta","index":%d,"delta":{"type":"text_delta","text":"%b"}}'
            return [*begun, Event(0, text, delta % (self._begun - 1, text), DELTA)]
        if isinstance(piece, ToolCallBegin):
            block: dict[str, Any] = {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}}
            ended = self._begin(block)
            return [*ended, event("content_block_start", index=self._begun - 1, content_block=block)]
        if isinstance(piece, ToolArguments):
            self._hold(piece.text)
            part = {"type": "input_json_delta", "partial_json": piece.text}
            return [event(DELTA, index=self._begun - 1, delta=part)]
        return self.end()

    def end(self) -> list[Event]:
        """Stop the block that is begun, if one is."""
        if not self._open:
            return []
        self._open = ""
        return [_stopped(self._begun - 1)]

    @property
    def content(self) -> list[dict[str, Any]]:
        """The blocks of a message in one piece."""
        return [_whole(block, parts) for block, parts in self._kept]

    def _begin(self, block: dict[str, Any]) -> list[Event]:
        """Count a block; the events that end the one before it."""
        ended = self.end()
        self._open = block["type"]
        self._begun += 1
        if self._keep:
            self._kept.append((block, []))
        return ended

    def _hold(self, text: str) -> None:
        if self._keep:
            self._kept[-1][1].append(text)


def _whole(block: dict[str, Any], parts: list[str]) -> dict[str, Any]:
    joined = "".join(parts)
    if block["type"] == "text":
        return {**block, "text": joined}
    try:
        _read(joined)
    except ValueError:  # max_tokens cut it: the reason says so, and a half of it has no place in JSON
        return block
    return {**block, "input": msgspec.Raw(joined.encode())}
