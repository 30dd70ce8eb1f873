"""Tool use: calls as blocks, their input in deltas, and results that go back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from conformance_kit.events import parse
from conformance_kit.rules import not_offered, row, rule
from conformance_kit.target import PROMPT, Target
from conformance_kit.wire import Answer

API = "Anthropic API documentation, tool use"
MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
TOOLS = [{"name": name, "description": f"Looks up the {name}.", "input_schema": SCHEMA} for name in ("weather", "time")]
ANY = {"tools": TOOLS, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
NAMED = {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "time"}}
STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
CALL = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Paris"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "21 degrees"}


def ask(target: Target, **fields: Any) -> Answer:
    body = {"model": target.model, "max_tokens": 400, "messages": [{"role": "user", "content": PROMPT}], **fields}
    return target.ask("POST", MESSAGES, {**body, "temperature": 0})


def offered(target: Target, **fields: Any) -> Answer:
    """The answer of a server that has tools."""
    answer = ask(target, **fields)
    if answer.status in (400, 422, 501) and "tool" in bytes(answer.body).decode().lower():
        not_offered("tools are not there, or can't be required")
    assert (answer.status, answer.end) == (200, "whole"), answer
    return answer


def called(target: Target, *, stream: bool, **fields: Any) -> dict[str, Any]:
    """The message that calls tools; of a stream, put together from its events."""
    answer = offered(target, stream=stream, **fields)
    if not stream:
        return dict(answer.json())
    events = [json.loads(event.data) for event in parse(bytes(answer.body)) if event.type != "ping"]
    blocks: list[dict[str, Any]] = []
    message: dict[str, Any] = {"content": blocks}
    parts: dict[int, str] = {}
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta" and event["delta"]["type"] == "input_json_delta":
            assert blocks[event["index"]]["type"] == "tool_use"
            parts[event["index"]] = parts.get(event["index"], "") + event["delta"]["partial_json"]
        elif event["type"] == "message_delta":
            message |= event["delta"]
    for index, text in parts.items():
        assert blocks[index]["input"] == {}, "a call begins with an empty input"
        blocks[index]["input"] = json.loads(text)
    return message


@rule("tool_choice any calls a tool: an id, a name of the tools, an object as input", API)
@STREAM
def test_any(target: Target, stream: bool) -> None:
    message = called(target, stream=stream, **ANY)
    calls = [block for block in message["content"] if block["type"] == "tool_use"]
    assert len(calls) == 1 and message["stop_reason"] == "tool_use", message
    assert calls[0]["name"] in ("weather", "time") and calls[0]["id"]
    assert isinstance(calls[0]["input"], dict)


@rule("tool_choice tool calls the one that is named, with what its schema requires", API)
@STREAM
def test_named(target: Target, stream: bool) -> None:
    message = called(target, stream=stream, **NAMED)
    calls = [block for block in message["content"] if block["type"] == "tool_use"]
    assert [call["name"] for call in calls] == ["time"]
    assert isinstance(calls[0]["input"]["city"], str)


@rule("a stream's calls are those of the answer in one piece", API + ", D09")
def test_same(target: Target) -> None:
    streamed, whole = (called(target, stream=stream, **NAMED)["content"] for stream in (True, False))
    assert [block.get("input") for block in streamed] == [block.get("input") for block in whole]


@rule("two calls have two ids", API)
def test_ids(target: Target) -> None:
    ids = [block["id"] for _ in range(2) for block in called(target, stream=False, **NAMED)["content"] if "id" in block]
    assert len(ids) == len(set(ids)) >= 2


@rule("tool_choice none calls nothing", API)
@STREAM
def test_none(target: Target, stream: bool) -> None:
    message = called(target, stream=stream, tools=TOOLS, tool_choice={"type": "none"}, max_tokens=8)
    assert all(block["type"] == "text" for block in message["content"])


@rule("tools may be there and not be called", API)
@STREAM
def test_auto(target: Target, stream: bool) -> None:
    assert called(target, stream=stream, tools=TOOLS, max_tokens=8)["stop_reason"] in (
        "max_tokens",
        "end_turn",
        "tool_use",
    )


@rule("a call and its result go back", API)
@pytest.mark.parametrize(
    "content",
    ["21 degrees", [{"type": "text", "text": "21 degrees"}], "", None],
    ids=["string", "blocks", "empty", "absent"],
)
def test_round_trip(target: Target, content: Any) -> None:
    result = {key: value for key, value in {**RESULT, "content": content}.items() if value is not None}
    turns = [
        {"role": "user", "content": PROMPT},
        {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}, CALL]},
        {"role": "user", "content": [result, {"type": "text", "text": "Well?"}]},
    ]
    assert offered(target, messages=turns, tools=TOOLS, max_tokens=8).json()["role"] == "assistant"


@rule("tools are counted as part of the prompt", API)
def test_count(target: Target) -> None:
    body = {"model": target.model, "messages": [{"role": "user", "content": PROMPT}]}
    bare, full = (target.ask("POST", COUNT_TOKENS, {**body, **more}) for more in ({}, {"tools": TOOLS}))
    if bare.status in (404, 405, 501) or full.status == 400:
        not_offered("count_tokens or tools are not there")
    assert bare.json()["input_tokens"] < full.json()["input_tokens"]


SAYS = {"role": "user", "content": "x"}
WRONG = [
    ("a name that isn't there", {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "nothing"}}, "must"),
    ("an unknown kind of choice", {"tools": TOOLS, "tool_choice": {"type": "perhaps"}}, "must"),
    ("a tool without a schema", {"tools": [{"name": "weather"}]}, "must"),
    ("a tool without a name", {"tools": [{"input_schema": SCHEMA}]}, "must"),
    ("a schema that is a string", {"tools": [{"name": "weather", "input_schema": "x"}]}, "must"),
    ("a result of no call", {"messages": [{"role": "user", "content": [RESULT]}]}, "should"),
    ("a call without its result", {"messages": [SAYS, {"role": "assistant", "content": [CALL]}, SAYS]}, "should"),
    ("a call by the user", {"messages": [{"role": "user", "content": [CALL]}]}, "should"),
]  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [
        row(name, fields, text="what makes no sense of tools is a 400", source=API + ", D18", level=level)  # type: ignore[arg-type]
        for name, fields, level in WRONG
    ],
)
def test_refusals(target: Target, fields: dict[str, Any]) -> None:
    answer = ask(target, **fields)
    assert answer.status in (400, 422) and answer.json()["type"] == "error", answer
    assert answer.json()["error"]["type"] == "invalid_request_error"
