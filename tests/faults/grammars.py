"""What an event or a whole answer says, in the grammar of whichever API it is of: text, reasons, tokens, how it ended.

Imports the standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

DONE = b"[DONE]"

_LAST_TYPES = {
    "message_stop", "error", "response.completed", "response.incomplete", "response.cancelled", "response.failed",
}  # fmt: skip
_REASONS = {
    "stop": "stop", "length": "length",
    "end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length",
    "completed": "stop", "incomplete": "length",
}  # fmt: skip
_OUTCOMES = {"cancelled", "expired", "error"}
# Where an error has no such code, its type tells; Anthropic's API has one for what was cancelled and for what failed.
_FAILURES = {"timeout_error": "expired", "server_error": "error", "overloaded_error": "error"}


def is_last(data: bytes) -> bool:
    """Whether nothing comes behind this event."""
    return data == DONE or _parsed(data).get("type") in _LAST_TYPES


def texts(data: bytes) -> Iterator[tuple[int, str]]:
    """Choices and what each says."""
    event = _parsed(data)
    for choice in event.get("choices", ()):
        if text := choice["text"] if "text" in choice else choice["delta"].get("content"):
            yield choice["index"], text
    if event.get("type") == "response.output_text.delta":
        yield 0, event["delta"]
    if event.get("type") == "content_block_delta":
        yield 0, event["delta"]["text"]


def reasons(data: bytes) -> Iterator[tuple[int, str]]:
    """Choices that end, and why: stop or length."""
    event = _parsed(data)
    for choice in event.get("choices", ()):
        if reason := choice.get("finish_reason"):
            yield choice["index"], _REASONS[reason]
    if event.get("type") == "message_delta":
        yield 0, _REASONS[event["delta"]["stop_reason"]]
    if event.get("type") in ("response.completed", "response.incomplete"):
        yield 0, _REASONS[event["response"]["status"]]


def usage(data: bytes) -> int | None:
    """The completion tokens, where an event says them."""
    event = _parsed(data)
    if event.get("type") == "message_start":
        return None  # none yet
    return _completion_tokens(event.get("response", event))


def failure(data: bytes) -> str | None:
    """The outcome that is no success, where an event says it."""
    return _failure(_parsed(data))


@dataclass(frozen=True)
class Whole:
    """An answer in one piece: each choice's text and reason, and the completion tokens; or how it failed."""

    texts: list[str]
    reasons: list[str]
    tokens: int | None
    failure: str | None


def whole(body: bytes) -> Whole:
    """Read it."""
    answer = json.loads(body)
    if "choices" in answer:
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        said = [choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices]
        why = [choice["finish_reason"] for choice in choices]
    elif answer.get("type") == "message":
        said, why = ["".join(block["text"] for block in answer["content"])], [answer["stop_reason"]]
    elif answer.get("status") in ("completed", "incomplete"):
        parts = [part["text"] for item in answer["output"] for part in item["content"]]
        said, why = ["".join(parts)], [answer["status"]]
    else:
        return Whole([], [], None, _failure(answer))
    return Whole(said, [_REASONS[reason] for reason in why], _completion_tokens(answer), None)


def _parsed(data: bytes) -> dict[str, Any]:
    return {} if data == DONE else json.loads(data)


def _completion_tokens(answer: dict[str, Any]) -> int | None:
    told = answer.get("usage") or {}
    tokens: int | None = told.get("completion_tokens", told.get("output_tokens"))
    return tokens


def _failure(answer: dict[str, Any]) -> str | None:
    answer = answer.get("response", answer)
    if answer.get("status") == "cancelled":
        return "cancelled"
    error = answer.get("error") or {}
    return error["code"] if error.get("code") in _OUTCOMES else _FAILURES.get(error.get("type", ""))
