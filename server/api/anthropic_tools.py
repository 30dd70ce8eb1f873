"""What a request of the Anthropic API says about tools and the form of its answer, in the terms that all APIs share."""

from __future__ import annotations

import re

from server.api.anthropic_types import CountTokensRequest, ToolParam
from server.api.errors import invalid
from server.api.structure import JsonForm
from server.api.tool_use import AUTO, REQUIRED, Tool, ToolUse, read_tools

_name = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
# Of each field of a tool that is refused, the values that mean "off", beside null.
_OFF = {"defer_loading": (False,), "input_examples": ([],), "allowed_callers": (["direct"],)}


def tool_use(request: CountTokensRequest) -> ToolUse | None:
    """How the answer may call tools; None when it can't. Raises ApiError."""
    choice = request.tool_choice
    if not request.tools and choice is None:
        return None
    tools = read_tools(request.tools or [], _tool, inside="", kind="tools")
    names = [tool.name for tool in tools]
    kind = choice.type if choice else "auto"
    if choice and (choice.name is not None) != (kind == "tool"):
        raise invalid("tool_choice.name", "a name goes with the type 'tool', and only with that")
    if choice and kind == "tool" and choice.name not in names:
        raise invalid("tool_choice.name", f"there is no tool named {choice.name!r}")
    if kind == "any" and not tools:
        raise invalid("tool_choice", "tool_choice is 'any', and there are no tools")
    if kind == "none" or not tools:
        return None
    several = kind != "tool" and not (choice and choice.disable_parallel_tool_use)
    chosen = tuple(tool for tool in tools if kind != "tool" or (choice and tool.name == choice.name))
    return ToolUse(chosen, REQUIRED if kind in ("any", "tool") else AUTO, parallel=several)


def json_form(request: CountTokensRequest) -> JsonForm | None:
    """The JSON that the answer must be, if any. Raises ApiError."""
    config = request.output_config
    given = [("output_config.format", config and config.format), ("output_format", request.output_format)]
    forms = [JsonForm(form.schema, f"{path}.schema") for path, form in given if form]
    if len(forms) > 1:
        raise invalid("output_format", "output_format is the older name of output_config.format; give one of them")
    return forms[0] if forms else None


def _tool(tool: ToolParam, path: str) -> Tool:
    if not _name.fullmatch(tool.name):
        raise invalid(f"{path}.name", "a tool's name has 1 to 128 letters, digits, underscores, dots or dashes")
    for name, off in _OFF.items():
        value = getattr(tool, name)
        if value is not None and value not in off:
            raise invalid(f"{path}.{name}", f"{name} is not supported")
    return Tool(tool.name, tool.description, tool.input_schema, bool(tool.strict), f"{path}.input_schema")
