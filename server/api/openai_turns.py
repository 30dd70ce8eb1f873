"""What a chat request's messages and tools say, in the terms of chat templates and of server.api.tool_use."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from server.api.errors import invalid
from server.api.json_checks import refuse_crowded_arguments
from server.api.structure import JsonForm
from server.api.tool_use import AUTO, REQUIRED, Tool, ToolUse, read_tools
from server.api.types import ChatRequest, ContentPart, Message, MessageToolCall, ToolDefinition
from server.tools.grammars import ANY_OBJECT

# OpenAI's rule, and the dots that others allow.
_name = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
# Types of content parts, and the field that each has its text in; and the fields that any may have.
_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_OF_ANY_PART = ("type", "prompt_cache_breakpoint", "cache_control")


class _Function(msgspec.Struct):
    name: str


class _Named(msgspec.Struct, forbid_unknown_fields=True):
    """A function that is there among the tools."""

    function: _Function
    type: str = "function"


class _Allowed(msgspec.Struct, forbid_unknown_fields=True):
    tools: list[_Named]
    mode: str = AUTO


class _Choice(msgspec.Struct, forbid_unknown_fields=True):
    """tool_choice, where it is an object."""

    type: str
    function: _Function | None = None
    allowed_tools: _Allowed | None = None


def tool_use(request: ChatRequest) -> ToolUse | None:
    """How the answer may call tools; None when it can't. Raises ApiError."""
    if not request.tools and request.tool_choice is None:
        return None
    tools = tools_of(request.tools or [])
    names = [tool.name for tool in tools]
    mode, allowed = _choice(request.tool_choice, names)
    one = isinstance(request.tool_choice, dict) and request.tool_choice["type"] == "function"
    if mode == "none" or not tools:
        return None
    chosen = tuple(tool for tool in tools if allowed is None or tool.name in allowed)
    return ToolUse(chosen, mode, parallel=not one and request.parallel_tool_calls is not False)


def tools_of(given: list[ToolDefinition]) -> list[Tool]:
    """The tools that there are. Raises ApiError."""
    return read_tools(given, _tool, inside=".function", kind="functions")


def json_form(request: ChatRequest) -> JsonForm | None:
    """The JSON that the answer must be, if any. Raises ApiError."""
    given = request.response_format
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return JsonForm(ANY_OBJECT, "response_format")
    if given.json_schema is None:
        raise invalid("response_format.json_schema", "the type json_schema needs a json_schema", "missing_parameter")
    schema = ANY_OBJECT if given.json_schema.schema is None else given.json_schema.schema
    return JsonForm(schema, "response_format.json_schema.schema")


def _tool(tool: ToolDefinition, path: str) -> Tool:
    function = tool.function
    if not _name.fullmatch(function.name):
        message = "a function's name has 1 to 64 letters, digits, underscores, dots or dashes"
        raise invalid(f"{path}.name", message)
    return Tool(function.name, function.description, function.parameters, bool(function.strict), f"{path}.parameters")


def _choice(choice: Any, names: list[str]) -> tuple[str, list[str] | None]:
    """Whether calls may, must or must not come, and of which functions (None: any). Raises ApiError."""
    if choice is None or choice in ("none", AUTO):
        return choice or AUTO, None
    if choice == REQUIRED:
        if not names:
            raise invalid("tool_choice", "tool_choice is 'required', and there are no tools")
        return REQUIRED, None
    try:
        said = msgspec.convert(choice, _Choice)
    except msgspec.ValidationError:
        said = _Choice("")
    if said.type == "function" and said.function:
        _check_known(said.function.name, names, "tool_choice.function.name")
        return REQUIRED, [said.function.name]
    if said.type == "allowed_tools" and said.allowed_tools and said.allowed_tools.mode in (AUTO, REQUIRED):
        allowed = [tool.function.name for tool in said.allowed_tools.tools]
        if not allowed:
            raise invalid("tool_choice.allowed_tools.tools", "allowed_tools names no tools")
        for i, name in enumerate(allowed):
            _check_known(name, names, f"tool_choice.allowed_tools.tools.{i}.function.name")
        return said.allowed_tools.mode, allowed
    message = (
        'tool_choice is \'none\', \'auto\', \'required\', {"type":"function","function":{"name":…}}'
        ' or {"type":"allowed_tools","allowed_tools":{"mode":…,"tools":[…]}}'
    )
    raise invalid("tool_choice", message)


def _check_known(name: str, names: list[str], path: str) -> None:
    if name not in names:
        raise invalid(path, f"there is no function named {name!r} among the tools")


def turns_of(messages: list[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates take them. Raises ApiError."""
    calls = [call.function.arguments for message in messages for call in message.tool_calls or ()]
    refuse_crowded_arguments(calls, "messages")
    return [_turn(message, f"messages.{i}") for i, message in enumerate(messages)]


def _turn(message: Message, path: str) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": _role(message.role), "content": _text(message, path)}
    for name in ("name", "reasoning_content"):  # for templates that show them
        if (value := getattr(message, name)) is not None:
            turn[name] = value
    if message.role == "tool":
        if message.tool_call_id is None:
            raise invalid(f"{path}.tool_call_id", "a tool's message needs the tool_call_id that it answers")
        turn["tool_call_id"] = message.tool_call_id
    elif message.tool_call_id is not None:
        raise invalid(f"{path}.tool_call_id", "only messages with the role tool have a tool_call_id")
    if message.tool_calls:
        if message.role != "assistant":
            raise invalid(f"{path}.tool_calls", "only an assistant's messages have tool_calls")
        turn["tool_calls"] = [
            _called(call, f"{path}.tool_calls.{i}.function") for i, call in enumerate(message.tool_calls)
        ]
    return turn


def _called(call: MessageToolCall, path: str) -> dict[str, Any]:
    """Templates write the arguments as JSON themselves."""
    try:
        arguments = msgspec.json.decode(call.function.arguments or "{}")
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        arguments = None
    if not isinstance(arguments, dict):
        raise invalid(f"{path}.arguments", "the arguments of a call are a JSON object, as a string")
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _role(role: str) -> str:
    return "system" if role == "developer" else role  # the newer name of the same thing


def _text(message: Message, path: str) -> str:
    """A message's text: its parts are joined by line ends."""
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        if message.role == "assistant":
            return message.refusal or ""
        raise invalid(f"{path}.content", "a message needs content")
    return "\n".join(_part_text(part, f"{path}.content.{i}") for i, part in enumerate(content))


def _part_text(part: ContentPart, path: str) -> str:
    field = _PARTS.get(part.type)
    if field is None:
        raise invalid(f"{path}.type", f"{part.type!r} parts are not supported; only text is", "unsupported_parameter")
    for name in part.__struct_fields__:
        if name not in (*_OF_ANY_PART, field) and getattr(part, name) is not None:
            raise invalid(f"{path}.{name}", f"a part of the type {part.type!r} has no {name}", "unknown_parameter")
    text: str | None = getattr(part, field)
    if text is None:
        raise invalid(f"{path}.{field}", f"a part of the type {part.type!r} needs its {field}")
    return text
