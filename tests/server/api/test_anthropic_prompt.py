"""Anthropic's messages to the turns that a chat template takes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from server.api.anthropic_prompt import BLOCKS_MAX, encode_prompt, turns_of
from server.api.anthropic_types import parse_count
from server.api.errors import ApiError
from server.api.generation import Generation, Model
from server.chat import ChatTemplate
from tests.support.engines import hello
from tests.support.tables import Rig

TEMPLATE = ChatTemplate(
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{{ ':' if add_generation_prompt }}"
)
USER, ASSISTANT, SYSTEM = "user", "assistant", "system"


def request_of(*turns: tuple[str, Any], **fields: Any) -> Any:
    messages = [{"role": role, "content": content} for role, content in turns]
    return parse_count(json.dumps({"model": "model", "messages": messages, **fields}).encode())


def shown(*turns: tuple[str, Any], **fields: Any) -> list[tuple[str, str]]:
    return [(turn["role"], turn["content"]) for turn in turns_of(request_of(*turns, **fields))]


def prompt(*turns: tuple[str, Any], **fields: Any) -> str:
    rig = Rig()
    generation = Generation(rig.table, Model("model", hello(), rig.tokenizer, TEMPLATE, 0))
    return bytes(asyncio.run(encode_prompt(generation, request_of(*turns, **fields), None))).decode()


def text(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": each} for each in texts]


@pytest.mark.parametrize("content", ["hi", text("hi")])
@pytest.mark.parametrize("system", ["be brief", text("be brief")])
def test_strings_and_blocks_are_the_same(content: Any, system: Any) -> None:
    assert shown((USER, content), system=system) == [(SYSTEM, "be brief"), (USER, "hi")]


@pytest.mark.parametrize("system", [None, "", []])
def test_no_system_prompt(system: Any) -> None:
    assert shown((USER, "hi"), system=system) == [(USER, "hi")]


def test_turns_of_one_role_that_follow_each_other_are_one() -> None:
    turns = [(USER, "a"), (USER, text("b", "c")), (ASSISTANT, "d"), (ASSISTANT, "e"), (USER, "f")]
    assert shown(*turns) == [(USER, "a\nb\nc"), (ASSISTANT, "d\ne"), (USER, "f")]


def test_instructions_may_come_in_the_middle() -> None:
    assert shown((USER, "a"), (SYSTEM, "b"), (USER, "c")) == [(USER, "a"), (SYSTEM, "b"), (USER, "c")]


def test_an_assistants_last_turn_is_continued() -> None:
    assert prompt((USER, "q")) == "<user>q:"
    assert prompt((USER, "q"), (ASSISTANT, "so")) == "<user>q<assistant>so"
    assert prompt((USER, "q"), (ASSISTANT, "so"), (ASSISTANT, "it")) == "<user>q<assistant>so\nit"


@pytest.mark.parametrize("nothing", ["", [], text("")])
def test_an_answer_without_words_is_begun(nothing: Any) -> None:
    assert prompt((USER, "q"), (ASSISTANT, nothing)) == "<user>q:"
    assert prompt((USER, "q"), (ASSISTANT, nothing), (USER, "r")) == "<user>q<assistant><user>r:"


@pytest.mark.parametrize(
    ("turns", "path"),
    [
        ([(USER, "a"), (USER, "")], "messages.1.content"),
        ([(SYSTEM, [])], "messages.0.content"),
        ([(USER, "a"), (ASSISTANT, "so ")], "messages.1.content"),
        ([(USER, text("a")), (USER, [*text("b"), {"type": "image", "source": {}}])], "messages.1.content.1.type"),
        ([(USER, [{"type": "document"}])], "messages.0.content.0.type"),
        ([(ASSISTANT, "")], "messages"),
        ([(USER, "x"), (USER, text("x") * BLOCKS_MAX)], "messages.1.content"),
    ],
)
def test_what_can_not_be_a_prompt_is_refused_with_its_path(turns: list[tuple[str, Any]], path: str) -> None:
    with pytest.raises(ApiError) as refused:
        prompt(*turns)
    assert (refused.value.status, refused.value.param) == (400, path)


# Tools


def called(id_: str, name: str = "f", **input_: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id_, "name": name, "input": input_}


def answered(id_: str, content: Any = "x", **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id_, "content": content, **fields}


def test_calls_and_their_answers_are_what_templates_take() -> None:
    turns = turns_of(
        request_of(
            (USER, "q"),
            (ASSISTANT, [*text("so"), called("a", x=1), called("b", "g")]),
            (USER, [answered("b", text("one", "two")), answered("a", "no", is_error=True), *text("and?")]),
        )
    )
    assert turns == [
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": "so",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
                {"id": "b", "type": "function", "function": {"name": "g", "arguments": {}}},
            ],
        },
        {"role": "tool", "content": "one\ntwo", "tool_call_id": "b", "name": "g"},
        {"role": "tool", "content": "Error: no", "tool_call_id": "a", "name": "f"},
        {"role": "user", "content": "and?"},
    ]


def test_answers_may_come_in_several_turns() -> None:
    turns = turns_of(
        request_of(
            (USER, "q"), (ASSISTANT, [called("a"), called("b")]), (USER, [answered("a")]), (USER, [answered("b")])
        )
    )
    assert [turn["role"] for turn in turns] == ["user", "assistant", "tool", "tool"]


@pytest.mark.parametrize("nothing", [None, "", []])
def test_an_answer_may_be_empty(nothing: Any) -> None:
    turns = turns_of(request_of((USER, "q"), (ASSISTANT, [called("a")]), (USER, [answered("a", nothing)])))
    assert turns[-1]["content"] == ""
