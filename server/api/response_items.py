"""The items of a Responses conversation: read from a request, kept in one form, and turned into a chat's messages."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from server.api.errors import invalid
from server.api.json_checks import refuse_crowded_arguments
from server.api.types import convert_at
from server.places import placed

ITEM_ID_BYTES = 18  # as long as a stream's


class MessageItem(msgspec.Struct, forbid_unknown_fields=True):
    """A message, as a client writes it or as it got it from us."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Any]
    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class FunctionCallItem(msgspec.Struct, forbid_unknown_fields=True):
    """A call that an earlier answer made."""

    call_id: str
    name: str
    arguments: str
    type: Literal["function_call"] = "function_call"
    id: str | None = None
    status: str | None = None
    async_: Literal[False] | None = msgspec.field(default=None, name="async")
    caller: None = None
    namespace: None = None


class FunctionOutputItem(msgspec.Struct, forbid_unknown_fields=True):
    """What came of a call."""

    call_id: str
    output: str | list[Any]
    type: Literal["function_call_output"] = "function_call_output"
    id: str | None = None
    status: str | None = None
    name: str | None = None
    caller: None = None
    namespace: None = None


class ItemReference(msgspec.Struct, forbid_unknown_fields=True):
    """An item of an earlier response that is stored."""

    id: str
    type: Literal["item_reference"] = "item_reference"


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a message's content: input_text or output_text."""

    type: str
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    prompt_cache_breakpoint: Any = None  # a prompt's whole is always cached


class RefusalPart(msgspec.Struct, forbid_unknown_fields=True):
    """What an assistant said in place of an answer."""

    type: str
    refusal: str


_PARTS: dict[Any, type[TextPart | RefusalPart]] = {
    "input_text": TextPart,
    "output_text": TextPart,
    "text": TextPart,
    "refusal": RefusalPart,
}

Item = dict[str, Any]


def new_item_id(prefix: str) -> str:
    """`prefix` is msg, fc, …"""
    return placed(f"{prefix}_{secrets.token_urlsafe(ITEM_ID_BYTES)}")


def read_items(given: str | list[Any], stored: Callable[[str], Item | None]) -> list[Item]:
    """A request's `input` as items with ids and content in parts, as they are kept and shown. `stored` finds an item by
    its id. Raises ApiError 400."""
    if isinstance(given, str):
        return [_read_message(MessageItem("user", given), "input.0")]
    if not given:
        raise invalid("input", "input is empty; it needs at least one item")
    calls = [item.get("arguments") for item in given if isinstance(item, dict)]
    refuse_crowded_arguments([arguments for arguments in calls if isinstance(arguments, str)], "input")
    return [_read_item(item, f"input.{index}", stored) for index, item in enumerate(given)]


def _read_item(item: Any, path: str, stored: Callable[[str], Item | None]) -> Item:
    if not isinstance(item, dict):
        raise invalid(path, f"{path} must be an object")
    kind = item.get("type") or ("item_reference" if item.keys() <= {"id", "type"} else "message")
    if kind == "message":
        return _read_message(convert_at(item, MessageItem, path), path)
    if kind == "item_reference":
        reference = convert_at({**item, "type": kind}, ItemReference, path)
        if (found := stored(reference.id)) is None:
            raise invalid(f"{path}.id", f"there is no item {reference.id[:100]!r} here, or no longer")
        return found
    if kind == "function_call":
        return _read_call(convert_at(item, FunctionCallItem, path), path)
    if kind == "function_call_output":
        return _read_output(convert_at(item, FunctionOutputItem, path), path)
    raise invalid(f"{path}.type", f"{str(kind)[:40]!r} items are not supported", "unsupported_parameter")


def _read_message(message: MessageItem, path: str) -> Item:
    kind = "output_text" if message.role == "assistant" else "input_text"
    if isinstance(message.content, str):
        parts = [_part(kind, message.content)]
    else:
        parts = [_part(kind, _text(part, f"{path}.content.{i}")) for i, part in enumerate(message.content)]
    item: Item = {
        "id": message.id or new_item_id("msg"),
        "type": "message",
        "status": "completed",
        "role": message.role,
        "content": parts,
    }
    return item


def _read_call(call: FunctionCallItem, path: str) -> Item:
    try:
        arguments = msgspec.json.decode(call.arguments or "{}")
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        arguments = None
    if not isinstance(arguments, dict):
        raise invalid(f"{path}.arguments", "the arguments of a call are a JSON object, as a string")
    return {
        "id": call.id or new_item_id("fc"),
        "type": "function_call",
        "status": "completed",
        "call_id": call.call_id,
        "name": call.name,
        "arguments": call.arguments,
    }


def _read_output(item: FunctionOutputItem, path: str) -> Item:
    output = item.output
    if not isinstance(output, str):
        output = "\n".join(_text(part, f"{path}.output.{i}") for i, part in enumerate(output))
    return {
        "id": item.id or new_item_id("fc"),
        "type": "function_call_output",
        "status": "completed",
        "call_id": item.call_id,
        "output": output,
        **({"name": item.name} if item.name else {}),
    }


def _part(kind: str, text: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": kind, "text": text}
    return part if kind == "input_text" else {**part, "annotations": [], "logprobs": []}


def _text(part: Any, path: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    form = _PARTS.get(kind) if isinstance(kind, str) else None
    if form is None:
        message = f"{str(kind)[:40]!r} parts are not supported; only text is"
        raise invalid(f"{path}.type", message, "unsupported_parameter")
    read = convert_at(part, form, path)
    return read.text if isinstance(read, TextPart) else read.refusal


def turns_of(items: list[Item], instructions: str | None) -> list[dict[str, Any]]:
    """A conversation's turns, as chat templates take them; `instructions` come first, as the system's. Calls belong to
    the assistant's turn before them."""
    turns: list[dict[str, Any]] = [] if instructions is None else [{"role": "system", "content": instructions}]
    for item in items:
        if item["type"] == "function_call":
            if not turns or turns[-1]["role"] != "assistant":
                turns.append({"role": "assistant", "content": ""})
            turns[-1].setdefault("tool_calls", []).append(_call(item))
        elif item["type"] == "function_call_output":
            turn = {"role": "tool", "content": item["output"], "tool_call_id": item["call_id"]}
            turns.append({**turn, "name": item["name"]} if "name" in item else turn)
        else:
            role = "system" if item["role"] == "developer" else item["role"]
            turns.append({"role": role, "content": "\n".join(part["text"] for part in item["content"])})
    return turns


def _call(item: Item) -> dict[str, Any]:
    """Templates write the arguments as JSON themselves."""
    arguments = msgspec.json.decode(item["arguments"] or "{}")
    return {"id": item["call_id"], "type": "function", "function": {"name": item["name"], "arguments": arguments}}
