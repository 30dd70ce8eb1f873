"""What a Responses request says about tools: the same as a chat's, one level flatter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import msgspec

from server.api.errors import ApiError, invalid
from server.api.openai_turns import tool_use
from server.api.response_types import ResponseRequest
from server.api.structure import JsonForm
from server.api.tool_use import ToolUse
from server.api.types import ChatRequest, FunctionDefinition, ToolDefinition, convert_at
from server.tools.grammars import ANY_OBJECT


class FunctionTool(msgspec.Struct, forbid_unknown_fields=True):
    """A function that the model may call; `parameters` is a JSON Schema."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    # Refused unless they say nothing.
    allowed_callers: None = None
    async_: Literal[False] | None = msgspec.field(default=None, name="async")
    defer_loading: Literal[False] | None = None
    output_schema: None = None


class NamedTool(msgspec.Struct, forbid_unknown_fields=True):
    """One of the tools."""

    type: Literal["function"]
    name: str


class AllowedTools(msgspec.Struct, forbid_unknown_fields=True):
    """Some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


_CHOICES: dict[str, type[NamedTool] | type[AllowedTools]] = {"function": NamedTool, "allowed_tools": AllowedTools}


def response_tool_use(request: ResponseRequest) -> ToolUse | None:
    """How the answer may call tools; None when it can't. Raises ApiError."""
    if not request.tools and request.tool_choice is None:
        return None
    tools = [_tool(tool, f"tools.{i}") for i, tool in enumerate(request.tools or ())]
    chat = ChatRequest(
        messages=[],
        tools=tools,
        tool_choice=_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
    )
    try:
        use = tool_use(chat)
    except ApiError as error:
        raise invalid(_flat(error.param or ""), error.message, error.code) from None
    if use is None:
        return None
    return replace(use, tools=tuple(replace(tool, param=_flat(tool.param)) for tool in use.tools))


def json_form(request: ResponseRequest) -> JsonForm | None:
    """The JSON that the answer must be, if any. Raises ApiError."""
    given = request.text.format if request.text else None
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return JsonForm(ANY_OBJECT, "text.format")
    for name in ("name", "schema"):
        if getattr(given, name) is None:
            raise invalid(f"text.format.{name}", f"the type json_schema needs a {name}", "missing_parameter")
    return JsonForm(given.schema or {}, "text.format.schema")


def _flat(param: str) -> str:
    """A chat's path as it is here."""
    return param.replace(".function", "").replace(".allowed_tools", "")


def _tool(tool: Any, path: str) -> ToolDefinition:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind != "function":
        message = f"{str(kind)[:40]!r} tools are not supported; only functions are"
        raise invalid(f"{path}.type", message, "unsupported_parameter")
    read = convert_at(tool, FunctionTool, path)
    return ToolDefinition("function", FunctionDefinition(read.name, read.description, read.parameters, read.strict))


def _choice(choice: Any) -> Any:
    """tool_choice as a chat has it."""
    if choice is None or choice in ("none", "auto", "required"):
        return choice
    form = _CHOICES.get(str(choice.get("type"))) if isinstance(choice, dict) else None
    if form is None:
        message = "tool_choice is 'none', 'auto', 'required', a function or allowed_tools"
        raise invalid("tool_choice", message, "unsupported_parameter")
    read = convert_at(choice, form, "tool_choice")
    if isinstance(read, NamedTool):
        return {"type": "function", "function": {"name": read.name}}
    named = [{"type": "function", "function": {"name": tool.name}} for tool in read.tools]
    return {"type": "allowed_tools", "allowed_tools": {"mode": read.mode, "tools": named}}
