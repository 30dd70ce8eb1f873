"""The content blocks of an answer: what each piece makes, streamed and kept."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.api.anthropic_blocks import Blocks
from server.tools.pieces import Piece, TextPiece, ToolArguments, ToolCallBegin, ToolCallEnd
from tests.support.messages import assembled

CALL = [ToolCallBegin(0, "id0", "f"), ToolArguments(0, '{"a"'), ToolArguments(0, ": 1}"), ToolCallEnd(0)]
TEXTS = st.lists(st.text(min_size=1, max_size=9), max_size=4)


def played(pieces: list[Piece], reason: str = "end_turn") -> tuple[dict[str, Any], list[dict[str, Any]], str]:
    """The message that the events make, the blocks that are kept, and the text that projections show."""
    blocks = Blocks(keep=True)
    events = [event for piece in pieces for event in blocks.take(piece)] + blocks.end()
    assert all(event.name == json.loads(event.data or b"")["type"] for event in events)
    message = {"type": "message_start", "message": {"content": [], "stop_reason": None, "stop_sequence": None}}
    delta = {"type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": None}, "usage": {}}
    whole = assembled([message, *[json.loads(event.data or b"") for event in events], delta, {"type": "message_stop"}])
    kept = json.loads(msgspec.json.encode(blocks.content))
    return whole, kept, json.loads(b'"%b"' % b"".join(event.text for event in events))


def test_a_call_between_texts_parts_them() -> None:
    whole, kept, _ = played([TextPiece("a"), TextPiece("b"), *CALL, TextPiece("c")])
    assert whole["content"] == kept == [
        {"type": "text", "text": "ab"},
        {"type": "tool_use", "id": "id0", "name": "f", "input": {"a": 1}},
        {"type": "text", "text": "c"},
    ]  # fmt: skip


def test_calls_alone_have_no_text_around_them() -> None:
    _, kept, _ = played([*CALL, *CALL])
    assert [block["type"] for block in kept] == ["tool_use", "tool_use"]


def test_nothing_makes_no_block() -> None:
    whole, kept, _ = played([])
    assert whole["content"] == kept == []


@pytest.mark.parametrize("arguments", ["", '{"a', '{"a": 1'])
def test_the_input_of_a_call_that_was_cut_is_empty(arguments: str) -> None:
    whole, kept, _ = played([CALL[0], ToolArguments(0, arguments), ToolCallEnd(0)], "max_tokens")
    assert whole["content"][0]["input"] == kept[0]["input"] == {}


@given(TEXTS, TEXTS)
def test_texts_of_any_kind(before: list[str], after: list[str]) -> None:
    pieces = [*map(TextPiece, before), *CALL, *map(TextPiece, after)]
    whole, kept, text = played(pieces)
    assert whole["content"] == kept
    assert text == "".join([*before, *after])
    assert [block.get("text") for block in kept if block["type"] == "text"] == [
        joined for joined in ("".join(before), "".join(after)) if joined
    ]
