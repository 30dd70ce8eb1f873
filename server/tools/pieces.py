"""What an answer that may call tools is made of, in order. Every API renders these in its own grammar.

A call is one `ToolCallBegin`, any number of `ToolArguments` and one `ToolCallEnd`; text and calls never interleave.
`index` numbers the calls of a choice from 0. A call whose text was cut (max_tokens, a stop string) has its end too: the
choice's reason says that it isn't whole.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text that is no tool syntax."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    """The model calls the function `name`; `id` is ours, for the tool's answer to name."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """A part of the arguments' JSON text, as the model wrote it; the joined parts are one object unless it was cut."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """Nothing more comes of this call."""

    index: int


Piece = TextPiece | ToolCallBegin | ToolArguments | ToolCallEnd


def add_text(pieces: list[Piece], text: str) -> None:
    """Append `text` as the end of the last piece of text, or as a piece of its own."""
    if not text:
        return
    last = pieces[-1] if pieces else None
    if isinstance(last, TextPiece):
        pieces[-1] = TextPiece(last.text + text)
    else:
        pieces.append(TextPiece(text))
