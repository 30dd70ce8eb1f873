"""Messages and their typed events: order, names and keys, and that a stream says what the answer in one piece says."""

# ruff: noqa: E501 (a row of a table is one line)

from __future__ import annotations

import json
from typing import Any

import pytest
from conformance_kit.events import blocks, parse
from conformance_kit.rules import not_offered, row, rule
from conformance_kit.target import PROMPT, Target
from conformance_kit.wire import Answer

API = "Anthropic API reference, Messages"
EVENTS = "Anthropic API documentation, streaming messages"
MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
STOP_REASONS = {"end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal", "model_context_window_exceeded"}
DELTAS = {"text": "text_delta", "tool_use": "input_json_delta", "thinking": "thinking_delta"}


def body_of(target: Target, content: Any = PROMPT, **fields: Any) -> dict[str, Any]:
    body = {"model": target.model, "max_tokens": 12, "messages": [{"role": "user", "content": content}]}
    return {**body, "temperature": 0, **fields}


def whole(target: Target, content: Any = PROMPT, **fields: Any) -> dict[str, Any]:
    answer = target.ask("POST", MESSAGES, body_of(target, content, **fields))
    assert (answer.status, answer.end) == (200, "whole"), answer
    return dict(answer.json())


def asked(target: Target, content: Any = PROMPT, **fields: Any) -> Answer:
    answer = target.ask("POST", MESSAGES, body_of(target, content, stream=True, **fields))
    assert (answer.status, answer.end) == (200, "whole"), answer
    return answer


def events(target: Target, content: Any = PROMPT, **fields: Any) -> list[dict[str, Any]]:
    """The data of a stream's events, without pings."""
    found = [json.loads(event.data) for event in parse(bytes(asked(target, content, **fields).body))]
    return [data for data in found if data["type"] != "ping"]


def count(target: Target, **fields: Any) -> int:
    answer = target.ask(
        "POST", COUNT_TOKENS, {"model": target.model, "messages": [{"role": "user", "content": PROMPT}], **fields}
    )
    if answer.status in (404, 405, 501):
        not_offered("count_tokens is not there")
    assert answer.status == 200, answer
    return int(answer.json()["input_tokens"])


def text_of(message: dict[str, Any]) -> str:
    return "".join(block["text"] for block in message["content"] if block["type"] == "text")


def streamed_text(found: list[dict[str, Any]]) -> str:
    return "".join(e["delta"].get("text", "") for e in found if e["type"] == "content_block_delta")


def prompt_tokens(usage: dict[str, Any]) -> int:
    """All of the prompt, those from a cache included, as the reference defines it."""
    return sum(
        usage.get(name) or 0 for name in ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    )


# One piece


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        row(key, key, kind, text="a message has its keys, each of its type", source=API)
        for key, kind in (("id", str), ("model", str), ("content", list), ("stop_reason", str), ("usage", dict))
    ],
)
def test_keys(target: Target, key: str, kind: type) -> None:
    assert isinstance(whole(target)[key], kind)


@rule("type is message, role is assistant, stop_sequence is there and null", API)
def test_constants(target: Target) -> None:
    found = whole(target)
    assert (found["type"], found["role"]) == ("message", "assistant")
    assert found["stop_sequence"] is None and found["stop_reason"] in STOP_REASONS


@rule("the answer is blocks of text", API)
def test_blocks(target: Target) -> None:
    found = whole(target)
    assert found["content"] and all(
        block["type"] == "text" and isinstance(block["text"], str) for block in found["content"]
    )


@rule("max_tokens ends an answer, with its reason and no more tokens", API)
@pytest.mark.parametrize("tokens", [1, 3])
def test_max_tokens(target: Target, tokens: int) -> None:
    found = whole(target, max_tokens=tokens)
    assert (found["stop_reason"], found["usage"]["output_tokens"]) == ("max_tokens", tokens)


@rule("a stop sequence ends an answer, is named and is not shown", API + ", D05")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_stop_sequence(target: Target, stream: bool) -> None:
    text = text_of(whole(target))
    assert len(text) > 4, f"an answer of {text!r} can't be stopped in the middle"
    stop = text[2:4]
    if stream:
        found = events(target, stop_sequences=["\0never", stop])
        delta = next(event["delta"] for event in found if event["type"] == "message_delta")
        shown = streamed_text(found)
    else:
        delta = whole(target, stop_sequences=["\0never", stop])
        shown = text_of(delta)
    assert (delta["stop_reason"], delta["stop_sequence"]) == ("stop_sequence", stop)
    assert shown == text[: text.index(stop)]


@rule("content as a string and as one block of text are the same", API + ", D15")
def test_content_forms(target: Target) -> None:
    assert text_of(whole(target, [{"type": "text", "text": PROMPT}])) == text_of(whole(target))


@rule("system as a string and as one block of text are the same", API + ", D15")
def test_system_forms(target: Target) -> None:
    forms: list[Any] = ["Be brief.", [{"type": "text", "text": "Be brief."}]]
    assert text_of(whole(target, system=forms[0])) == text_of(whole(target, system=forms[1]))


@rule("a system prompt is part of the prompt", API)
def test_system_counts(target: Target) -> None:
    assert prompt_tokens(whole(target, system="Be very brief, please.")["usage"]) != prompt_tokens(
        whole(target)["usage"]
    )


@rule("turns of one role that follow each other are taken", API)
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_turns_of_one_role(target: Target, role: str) -> None:
    turns = [
        {"role": "user", "content": "one"},
        *[{"role": role, "content": text} for text in ("two", "three")],
        {"role": "user", "content": "four"},
    ]
    assert whole(target, messages=turns)["role"] == "assistant"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        row(name, name, value, text="a field that changes no answer is taken", source=API)
        for name, value in (
            ("metadata", {"user_id": "someone"}), ("service_tier", "auto"), ("stop_sequences", []), ("top_p", 0.9), ("top_k", 5),
            ("thinking", {"type": "disabled"}), ("tools", []), ("stream", False), ("system", [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]),
        )
    ],
)  # fmt: skip
def test_fields(target: Target, name: str, value: Any) -> None:
    assert whole(target, **{name: value})["type"] == "message"


@pytest.mark.parametrize(
    "headers",
    [
        row(name, headers, text="headers that the clients send are taken", source=API)
        for name, headers in (
            ("version", [("anthropic-version", "2023-06-01")]),
            ("beta", [("anthropic-version", "2023-06-01"), ("anthropic-beta", "one-2025-01-01,two-2025-01-01")]),
            ("accept", [("Accept", "application/json")]),
        )
    ],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_headers(target: Target, headers: list[tuple[str, str]], stream: bool) -> None:
    answer = target.ask("POST", MESSAGES, body_of(target, stream=stream), headers)
    assert answer.status == 200, answer
    assert (answer.header("content-type") or "").startswith("text/event-stream" if stream else "application/json")


# Usage


@rule("count_tokens is what a message's prompt is counted as", API + ", D22")
@pytest.mark.parametrize("fields", [{}, {"system": "Be brief."}], ids=["plain", "system"])
def test_count(target: Target, fields: dict[str, Any]) -> None:
    assert count(target, **fields) == prompt_tokens(whole(target, **fields)["usage"]) > 0


@rule("message_start tells the prompt's tokens, not 0", EVENTS + ", D22")
def test_true_input_tokens(target: Target) -> None:
    usage = events(target)[0]["message"]["usage"]
    assert prompt_tokens(usage) == prompt_tokens(whole(target)["usage"]) > 0


@rule("message_delta tells the output's tokens, as many as the answer in one piece has", EVENTS + ", D22")
@pytest.mark.parametrize("tokens", [1, 12])
def test_output_tokens(target: Target, tokens: int) -> None:
    (delta,) = [event for event in events(target, max_tokens=tokens) if event["type"] == "message_delta"]
    assert delta["usage"]["output_tokens"] == whole(target, max_tokens=tokens)["usage"]["output_tokens"]


@rule("cached tokens are part of the prompt, never more", API + ", G04")
def test_cached(target: Target) -> None:
    content = "the same words again and again, so that a cache may have them " * 4
    first, second = (whole(target, content)["usage"] for _ in range(2))
    assert prompt_tokens(first) == prompt_tokens(second)
    assert 0 <= (second.get("cache_read_input_tokens") or 0) <= prompt_tokens(second)


# Events


@rule("each event's name is its data's type", EVENTS + ", D22")
def test_names(target: Target) -> None:
    found = parse(bytes(asked(target).body))
    assert found and all(event.type == json.loads(event.data)["type"] for event in found)


@rule("an event's name stands before its data, as the SDKs' readers expect", EVENTS, "should")
def test_name_comes_first(target: Target) -> None:
    for block in blocks(bytes(asked(target).body)):
        names = [line.partition(":")[0] for line in block.lines]
        assert names.index("event") < names.index("data")


@rule("message_start first, message_stop last, and nothing behind it", EVENTS + ", B07")
@pytest.mark.parametrize("tokens", [1, 12])
def test_ends(target: Target, tokens: int) -> None:
    answer = asked(target, max_tokens=tokens)
    kinds = [event.type for event in parse(bytes(answer.body)) if event.type != "ping"]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert kinds.count("message_start") == kinds.count("message_stop") == kinds.count("message_delta") == 1
    assert b"[DONE]" not in answer.body


@rule("each content block is started, has its deltas and is stopped, in order of index", EVENTS + ", D22")
def test_blocks_balance(target: Target) -> None:
    open_index, seen, kind = None, 0, ""
    for event in events(target):
        if event["type"] == "content_block_start":
            assert open_index is None and event["index"] == seen
            open_index, seen, kind = seen, seen + 1, event["content_block"]["type"]
        elif event["type"] == "content_block_delta":
            assert event["index"] == open_index
            assert event["delta"]["type"] == DELTAS[kind]
        elif event["type"] == "content_block_stop":
            assert event["index"] == open_index
            open_index = None
    assert open_index is None and seen


@rule("message_start holds a message without content or reason", EVENTS)
def test_start(target: Target) -> None:
    message = events(target)[0]["message"]
    assert (message["type"], message["role"], message["content"], message["stop_reason"]) == (
        "message",
        "assistant",
        [],
        None,
    )
    assert isinstance(message["id"], str) and message["id"]


@rule("message_delta holds the reason, the stop sequence and the usage, just before message_stop", EVENTS)
def test_delta(target: Target) -> None:
    *_, delta, stop = events(target)
    assert (delta["type"], stop["type"]) == ("message_delta", "message_stop")
    assert delta["delta"]["stop_reason"] in STOP_REASONS and delta["delta"]["stop_sequence"] is None


@rule("the joined deltas are the answer in one piece", EVENTS + ", D01")
@pytest.mark.parametrize("tokens", [1, 12, 40])
def test_same_text(target: Target, tokens: int) -> None:
    assert streamed_text(events(target, max_tokens=tokens)) == text_of(whole(target, max_tokens=tokens))


@rule("id and model are the same in head and answer; two answers have two ids", API)
def test_ids(target: Target) -> None:
    first, second = (events(target)[0]["message"] for _ in range(2))
    assert first["id"] != second["id"] and first["model"] == whole(target)["model"]


@rule("a stream says that it isn't to be cached", "RFC 9111 section 5.2.2", "should")
def test_not_cached(target: Target) -> None:
    assert "no-cache" in (asked(target).header("cache-control") or "")


@rule("a text separator in an answer is no line end to naive readers", "B02", "should")
@pytest.mark.synthetic
def test_separators(target: Target) -> None:
    answer = asked(target, "say line separators")
    lines = [line for line in bytes(answer.body).decode().splitlines() if line.startswith("data: ")]
    assert [json.loads(line.removeprefix("data: ")) for line in lines]


@rule("a quiet stream shows that it lives: a ping event", EVENTS + ", B08")
@pytest.mark.synthetic
def test_ping(target: Target) -> None:
    found = parse(bytes(asked(target, "say something late").body))
    pings = [event for event in found if event.type == "ping"]
    assert pings and {event.data for event in pings} == {'{"type":"ping"}'}


@rule("a fault in the middle is an error event, and no message_stop follows", EVENTS + ", B05")
@pytest.mark.synthetic
def test_error_event(target: Target) -> None:
    found = events(target, "fail in the middle")
    assert found[-1]["type"] == "error" and {"type", "message"} <= found[-1]["error"].keys()
    assert not {"message_delta", "message_stop"} & {event["type"] for event in found}


@rule("no token at all is an empty answer, not an error", "B07")
@pytest.mark.synthetic
def test_no_token(target: Target) -> None:
    assert text_of(whole(target, "say no word")) == streamed_text(events(target, "say no word")) == ""


@rule("a stream goes on behind the position in Last-Event-ID, once each", "WHATWG HTML section 9.2.4, B11")
@pytest.mark.parametrize("place", [0, 1, 5, -2])
def test_resume(target: Target, place: int) -> None:
    found = [event for event in parse(bytes(asked(target).body)) if event.type != "ping"]
    if not found[place].id:
        not_offered("the stream names no ids, so nobody can come back to it")
    answer = target.ask("POST", MESSAGES, body_of(target, stream=True), [("Last-Event-ID", found[place].id)])
    assert [event for event in parse(bytes(answer.body)) if event.type != "ping"] == found[place % len(found) + 1 :]
