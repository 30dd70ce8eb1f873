"""Requests of the Anthropic Messages API and what their answers hold, checked for what every stream must keep to."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

from protocols.sse import ServerEvent
from tests.support.http_client import Answer

MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
MODEL = "synthetic"


def message(content: Any, **fields: Any) -> dict[str, Any]:
    """A request with one turn of the user."""
    return {"model": MODEL, "max_tokens": 64, "messages": [{"role": "user", "content": content}], **fields}


def prompt(content: Any, **fields: Any) -> dict[str, Any]:
    """The same for count_tokens."""
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}


def error_of(answer: Answer, status: int) -> dict[str, str]:
    """Check that this is a whole refusal in Anthropic's shape with a request id; its error object."""
    assert (answer.status, answer.end) == (status, "whole"), (answer.status, answer.end, bytes(answer.body))
    assert answer.header("content-type") == "application/json"
    return error_object(answer.json(), answer)


def error_object(document: Any, answer: Answer) -> dict[str, str]:
    """Likewise for a document, which names the request that the headers of `answer` name."""
    assert document.keys() == {"type", "error", "request_id"}
    assert document["type"] == "error"
    assert document["request_id"] == answer.header("request-id") == answer.header("x-request-id")
    error: dict[str, str] = document["error"]
    assert error.keys() == {"type", "message"} and error["message"]
    return error


def typed(events: list[ServerEvent]) -> list[dict[str, Any]]:
    """The data of a stream's events, pings left out: each is named as its data says."""
    found = [(event.event, json.loads(event.data)) for event in events]
    assert all(name == data["type"] for name, data in found)
    return [data for _, data in found if data["type"] != "ping"]


def assembled(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a whole stream's events make, as the SDKs put it together. Checks their order."""
    first, *middle, last = deepcopy(events)
    assert (first["type"], last["type"]) == ("message_start", "message_stop")
    whole: dict[str, Any] = first["message"]
    assert (whole["content"], whole["stop_reason"], whole["stop_sequence"]) == ([], None, None)
    content: list[dict[str, Any]] = whole["content"]
    open_index = None  # of the block that was started and not stopped
    for event in middle:
        kind = event["type"]
        if kind == "content_block_start":
            assert open_index is None and event["index"] == len(content)
            open_index = len(content)
            content.append(dict(event["content_block"]))
        elif kind == "content_block_delta":
            assert event["index"] == open_index is not None
            _add(content[open_index], event["delta"])
        elif kind == "content_block_stop":
            assert event["index"] == open_index
            open_index = None
        else:
            assert kind == "message_delta" and event is middle[-1] and open_index is None
            whole |= event["delta"]
            whole["usage"] = event["usage"]
    assert whole["stop_reason"]
    for block in content:
        if "json" in block:
            block["input"] = json.loads(block.pop("json")) if whole["stop_reason"] != "max_tokens" else {}
    return whole


def _add(block: dict[str, Any], delta: dict[str, Any]) -> None:
    if delta["type"] == "text_delta":
        block["text"] += delta["text"]
    else:
        assert (delta["type"], block["type"]) == ("input_json_delta", "tool_use")
        block["json"] = block.get("json", "") + delta["partial_json"]


def text_of(whole: dict[str, Any]) -> str:
    """The text of a message's blocks."""
    return "".join(block["text"] for block in whole["content"] if block["type"] == "text")
