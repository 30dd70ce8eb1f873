"""Calls that must come, and answers that must be JSON: a server that takes such a request keeps to it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from conformance_kit.events import parse
from conformance_kit.rules import not_offered, row, rule
from conformance_kit.target import Target

API = "OpenAI API reference, function calling"
FORMS = "OpenAI API reference, structured outputs"
CHAT = "/v1/chat/completions"
TOKENS = 400  # enough for a small object
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "The weather of some days", "parameters": CITY},
    },
    {
        "type": "function",
        "function": {
            "name": "get_time",
            "description": "The time",
            "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
        },
    },
]
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def is_city(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"city", "days"}
        and value["city"] in ("Paris", "Rome")
        and value["days"] in range(1, 10)
    )


def ask(target: Target, **fields: Any) -> dict[str, Any]:
    """The first choice of an answer in one piece."""
    answer = target.ask("POST", CHAT, target.chat("How is the weather in Paris?", max_tokens=TOKENS, **fields))
    if answer.status == 400:
        not_offered(f"{', '.join(fields)} is refused")
    assert answer.status == 200, answer
    return dict(answer.json()["choices"][0])


def stream(target: Target, **fields: Any) -> list[dict[str, Any]]:
    """The first choice of each chunk."""
    body = target.chat("How is the weather in Paris?", max_tokens=TOKENS, stream=True, **fields)
    answer = target.ask("POST", CHAT, body)
    if answer.status == 400:
        not_offered(f"{', '.join(fields)} is refused")
    assert (answer.status, answer.end) == (200, "whole"), answer
    found = [json.loads(event.data) for event in parse(bytes(answer.body)) if event.data != "[DONE]"]
    return [choice for chunk in found for choice in chunk["choices"]]


def joined(choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls of a stream, put together by their index."""
    calls: dict[int, dict[str, Any]] = {}
    for part in [part for choice in choices for part in choice["delta"].get("tool_calls") or ()]:
        call = calls.setdefault(part["index"], {"id": [], "type": [], "name": [], "arguments": ""})
        for name in ("id", "type"):
            if part.get(name) is not None:
                call[name].append(part[name])
        function = part.get("function") or {}
        if function.get("name") is not None:
            call["name"].append(function["name"])
        call["arguments"] += function.get("arguments") or ""
    return [calls[index] for index in sorted(calls)]


CHOICES = [
    row("required", "required", None, text="a call comes where one is required", source=API),
    row("named", NAMED, "get_weather", text="the named function is called", source=API),
]


@pytest.mark.parametrize(("choice", "name"), CHOICES)
def test_a_call_that_must_come(target: Target, choice: Any, name: str | None) -> None:
    found = ask(target, tools=TOOLS, tool_choice=choice)
    calls = found["message"]["tool_calls"]
    assert calls and found["finish_reason"] in ("tool_calls", "stop")
    assert all(call["id"] and call["type"] == "function" for call in calls)
    assert name is None or {call["function"]["name"] for call in calls} == {name}


@rule("arguments are the JSON of an object, and follow the function's schema", API)
def test_arguments(target: Target) -> None:
    found = ask(target, tools=TOOLS, tool_choice=NAMED)
    for call in found["message"]["tool_calls"]:
        assert is_city(json.loads(call["function"]["arguments"])), call


@rule("a call without text has content null", API, "should")
def test_content_null(target: Target) -> None:
    assert ask(target, tools=TOOLS, tool_choice="required")["message"]["content"] is None


@rule("id, type and name come once for each call, at its first delta; the joined arguments are JSON", "D09")
def test_deltas(target: Target) -> None:
    calls = joined(stream(target, tools=TOOLS, tool_choice="required"))
    assert calls
    for call in calls:
        assert [len(call[name]) for name in ("id", "type", "name")] == [1, 1, 1], call
        assert isinstance(json.loads(call["arguments"]), dict)


@rule("indices count the calls from 0 without gaps", "D09")
def test_indices(target: Target) -> None:
    parts = [
        part for c in stream(target, tools=TOOLS, tool_choice="required") for part in c["delta"].get("tool_calls") or ()
    ]
    indices = [part["index"] for part in parts]
    assert sorted(set(indices)) == list(range(max(indices) + 1)) and indices == sorted(indices)


@rule("a stream of calls has one reason, in its last chunk", API + ", B07")
def test_reason(target: Target) -> None:
    choices = stream(target, tools=TOOLS, tool_choice="required")
    reasons = [choice["finish_reason"] for choice in choices]
    assert reasons[-1] in ("tool_calls", "stop") and not any(reasons[:-1])


@rule("the streamed call is the one of the answer in one piece", API)
def test_streamed_and_whole(target: Target) -> None:
    (whole, *_) = ask(target, tools=TOOLS, tool_choice=NAMED, seed=1)["message"]["tool_calls"]
    (streamed, *_) = joined(stream(target, tools=TOOLS, tool_choice=NAMED, seed=1))
    assert json.loads(streamed["arguments"]) == json.loads(whole["function"]["arguments"])


@rule("tool_choice none makes no call", API)
def test_none(target: Target) -> None:
    found = ask(target, tools=TOOLS, tool_choice="none")
    assert not found["message"].get("tool_calls") and found["finish_reason"] in ("stop", "length")


@rule("one call at most where parallel_tool_calls is false", API)
def test_one_call(target: Target) -> None:
    assert (
        len(ask(target, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)["message"]["tool_calls"]) == 1
    )


@rule("an answer's message and a tool's go back into the conversation", API)
@pytest.mark.parametrize("content", ["21 degrees", [{"type": "text", "text": "21 degrees"}]], ids=["text", "parts"])
def test_round_trip(target: Target, content: Any) -> None:
    message = ask(target, tools=TOOLS, tool_choice=NAMED)["message"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": content} for call in message["tool_calls"]]
    messages = [{"role": "user", "content": "How is the weather?"}, message, *results]
    answer = target.ask("POST", CHAT, {"model": target.model, "messages": messages, "tools": TOOLS, "max_tokens": 8})
    assert answer.status == 200, answer


@rule("max_tokens cuts a call: the reason is length", API)
def test_cut(target: Target) -> None:
    answer = target.ask("POST", CHAT, target.chat("x", tools=TOOLS, tool_choice=NAMED, max_tokens=3))
    if answer.status == 400:
        not_offered("tool_choice is refused")
    assert answer.json()["choices"][0]["finish_reason"] == "length", answer


BAD = [
    row(
        "unknown function",
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "sing"}}},
        text="a function that is none of the tools is refused",
        source=API,
    ),
    row(
        "required without tools",
        {"tool_choice": "required"},
        text="a call can't be required where there are no tools",
        source=API,
        level="should",
    ),
    row(
        "unknown tool_choice",
        {"tools": TOOLS, "tool_choice": "sometimes"},
        text="an unknown tool_choice is refused",
        source=API,
    ),
    row("a tool without a function", {"tools": [{"type": "function"}]}, text="a tool has a function", source=API),
    row(
        "a tool without a name",
        {"tools": [{"type": "function", "function": {}}]},
        text="a function has a name",
        source=API,
    ),
    row(
        "parameters of a list",
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
        text="parameters are an object",
        source=API,
    ),
    row(
        "unknown format",
        {"response_format": {"type": "yaml"}},
        text="an unknown response format is refused",
        source=FORMS,
    ),
    row(
        "no schema",
        {"response_format": {"type": "json_schema"}},
        text="the type json_schema has a json_schema",
        source=FORMS,
    ),
    row(
        "no such type",
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "strict": True, "schema": {"type": "strin"}},
            }
        },
        text="a schema that is none is refused",
        source=FORMS,
    ),
]


@pytest.mark.parametrize("fields", BAD)
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
def test_refused(target: Target, fields: dict[str, Any], streamed: bool) -> None:
    answer = target.ask("POST", CHAT, target.chat("x", stream=streamed, **fields))
    assert answer.status == 400 and (answer.header("content-type") or "").startswith("application/json"), answer
    assert answer.json()["error"]["message"]


@rule("json_object is the JSON of an object", FORMS)
@pytest.mark.parametrize("seed", range(3))
def test_json_object(target: Target, seed: int) -> None:
    found = ask(target, response_format={"type": "json_object"}, temperature=1, seed=seed)
    if found["finish_reason"] == "stop":
        assert isinstance(json.loads(found["message"]["content"]), dict), found


@rule("json_schema is followed", FORMS)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])
def test_json_schema(target: Target, seed: int, streamed: bool) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    fields: dict[str, Any] = {"response_format": form, "temperature": 1, "seed": seed}
    if streamed:
        text = "".join(choice["delta"].get("content") or "" for choice in stream(target, **fields))
    else:
        text = ask(target, **fields)["message"]["content"]
    assert is_city(json.loads(text)), text


@rule("max_tokens cuts an answer that must be JSON: the reason is length", FORMS)
def test_json_cut(target: Target) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    answer = target.ask("POST", CHAT, target.chat("x", response_format=form, max_tokens=2))
    if answer.status == 400:
        not_offered("response_format is refused")
    assert answer.json()["choices"][0]["finish_reason"] == "length", answer
