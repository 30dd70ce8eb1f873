"""A Responses conversation: what a request says, in the one form that is kept, and as a chat's turns."""

from __future__ import annotations

from typing import Any

import pytest

from server.api.errors import ApiError
from server.api.response_items import read_items, turns_of

CALLS = [{"type": "function_call", "call_id": f"call_{n}", "name": "f", "arguments": f'{{"n": {n}}}'} for n in (1, 2)]
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "done", "name": "f"}


def nothing(id: str) -> None:
    """No item is stored."""


def shown(call: dict[str, Any]) -> dict[str, Any]:
    number = int(call["call_id"][-1])
    return {"id": call["call_id"], "type": "function", "function": {"name": "f", "arguments": {"n": number}}}


def test_a_string_is_a_users_message_with_an_id_of_its_own() -> None:
    (item,) = read_items("hi", nothing)
    (other,) = read_items("hi", nothing)
    assert item["id"].startswith("msg_") and item["id"] != other["id"]
    assert (item["role"], item["content"]) == ("user", [{"type": "input_text", "text": "hi"}])


def test_what_is_kept_reads_as_what_it_was() -> None:
    given = [{"role": "assistant", "content": "a"}, *CALLS, OUTPUT, {"role": "developer", "content": "b"}]
    kept = read_items(given, nothing)
    assert read_items(kept, nothing) == kept
    assert turns_of(read_items(kept, nothing), None) == turns_of(kept, None)


def test_a_reference_is_the_item_that_it_names() -> None:
    item = {"id": "msg_1", "type": "message"}
    for reference in ({"type": "item_reference", "id": "msg_1"}, {"id": "msg_1"}, {"type": None, "id": "msg_1"}):
        assert read_items([reference], {"msg_1": item}.get) == [item]


def test_calls_belong_to_the_assistants_turn_before_them() -> None:
    items = read_items([{"role": "user", "content": "go"}, {"role": "assistant", "content": "well"}, *CALLS], nothing)
    assert turns_of(items, None) == [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "well", "tool_calls": [shown(call) for call in CALLS]},
    ]


def test_calls_after_an_output_are_a_turn_of_their_own() -> None:
    items = read_items([CALLS[0], OUTPUT, CALLS[1]], nothing)
    assert turns_of(items, "be brief") == [
        {"role": "system", "content": "be brief"},
        {"role": "assistant", "content": "", "tool_calls": [shown(CALLS[0])]},
        {"role": "tool", "content": "done", "tool_call_id": "call_1", "name": "f"},
        {"role": "assistant", "content": "", "tool_calls": [shown(CALLS[1])]},
    ]


def test_parts_are_joined_by_line_ends_and_developers_speak_for_the_system() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    items = read_items([{"role": "developer", "content": parts}], nothing)
    assert turns_of(items, None) == [{"role": "system", "content": "a\nb"}]


@pytest.mark.parametrize("arguments", ["[]", "{", "7", "\ud83d", '{"a": 1}x', "[" * 100_000])
def test_arguments_that_are_no_object_are_refused(arguments: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_items([{**CALLS[0], "arguments": arguments}], nothing)
    assert caught.value.param == "input.0.arguments"
