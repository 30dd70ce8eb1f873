"""What a request says about tools, in terms that no API owns: which there are, whether they may or must be called, and
what of that the prompt, the text's parser and the engine need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from server.api.errors import invalid
from server.api.generation import Model
from server.tools.formats import CallFormat, markers

# Each is some lines of the prompt; OpenAI allows as many.
TOOLS_MAX = 128
AUTO, REQUIRED = "auto", "required"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None  # JSON Schema; None: takes nothing
    strict: bool = False  # its arguments must follow the schema
    param: str = "tools"  # where the schema came from

    @property
    def shown(self) -> dict[str, Any]:
        """As chat templates take it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How the answers to one request may call tools."""

    tools: tuple[Tool, ...]
    mode: str = AUTO  # or REQUIRED: at least one call and nothing else
    parallel: bool = True  # more than one call in an answer

    @property
    def shown(self) -> list[dict[str, Any]]:
        """The tools as chat templates take them."""
        return [tool.shown for tool in self.tools]


def read_tools(given: Sequence[T], read: Callable[[T, str], Tool], *, inside: str, kind: str) -> list[Tool]:
    """The tools that a request gives, each by `read(tool, path)`. `inside`: where in each one its name stands; `kind`:
    what its API calls them. Raises ApiError."""
    if len(given) > TOOLS_MAX:
        raise invalid("tools", f"tools holds {len(given)}; at most {TOOLS_MAX} are allowed")
    tools = [read(tool, f"tools.{index}{inside}") for index, tool in enumerate(given)]
    names = [tool.name for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise invalid(f"tools.{index}{inside}.name", f"there are two {kind} named {name!r}")
    return tools


def call_format(model: Model, use: ToolUse | None) -> CallFormat | None:
    """How the answers' text is read. Raises ApiError where the model's calls can't be."""
    if use is None:
        return None
    if model.syntax is None:
        message = "this model writes tool calls in a format that is not known here; --tool-parser names one that is"
        raise invalid("tools", message, "unsupported_parameter")
    known = frozenset(tool.name for tool in use.tools)
    marker_ids = frozenset(markers(model.syntax, model.tokenizer).values())
    return CallFormat(model.syntax, known, None if use.parallel else 1, marker_ids, use.mode == REQUIRED)
