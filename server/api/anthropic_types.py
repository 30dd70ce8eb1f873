"""The request bodies of the Anthropic Messages API, as msgspec types.

Every field works, is harmless by the API's own definition, or is refused by name; the last are here to carry the
values that mean "off".
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec

from server.api.errors import invalid
from server.api.types import MESSAGES_MAX, STOP_CHARS_MAX, STOPS_MAX, GenerationFields, checked, decode


class CacheControl(msgspec.Struct, forbid_unknown_fields=True):
    """Where a prompt might be cached. Ours always is, and that changes no answer."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Block(msgspec.Struct, tag_field="type", forbid_unknown_fields=True, kw_only=True):
    """One piece of a turn's content."""

    cache_control: CacheControl | None = None


class TextBlock(Block, tag="text", kw_only=True):
    """Text. Citations come with earlier answers, and are no part of the prompt."""

    text: str
    citations: list[Any] | None = None


class ToolUseBlock(Block, tag="tool_use", kw_only=True):
    """A call of the assistant's."""

    id: str
    name: str
    input: dict[str, Any]
    caller: Any = None  # who called; other providers' answers say so
    toolset_name: None = None  # of the provider's own tools, which are not there


class UnreadBlock(msgspec.Struct, tag_field="type"):
    """What no model here can read."""


class ImageBlock(UnreadBlock, tag="image"):
    """A picture."""


class DocumentBlock(UnreadBlock, tag="document"):
    """A file."""


class ThinkingBlock(UnreadBlock, tag="thinking"):
    """The thoughts of another model."""


class RedactedThinkingBlock(UnreadBlock, tag="redacted_thinking"):
    """The same, encrypted."""


UnreadBlocks = ImageBlock | DocumentBlock | ThinkingBlock | RedactedThinkingBlock


class ToolResultBlock(Block, tag="tool_result", kw_only=True):
    """The answer to a call."""

    tool_use_id: str
    content: str | list[TextBlock | ImageBlock | DocumentBlock] | None = None
    is_error: bool | None = None
    toolset_name: None = None


AnyBlock = TextBlock | ToolUseBlock | ToolResultBlock | UnreadBlocks


class Turn(msgspec.Struct, forbid_unknown_fields=True):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: str | list[AnyBlock]


class ToolParam(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool of the client's. `strict`: its input must follow the schema. The last fields are refused unless they say
    nothing."""

    name: str
    input_schema: dict[str, Any]  # JSON Schema
    description: str | None = None
    type: Literal["custom"] | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None  # ours always streams
    strict: bool | None = None
    defer_loading: bool | None = None
    input_examples: list[Any] | None = None
    allowed_callers: list[str] | None = None


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Whether calls may come (auto), must (any, or the one that is named) or must not (none)."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Metadata(msgspec.Struct, forbid_unknown_fields=True):
    """Who asks, for the provider's own use."""

    user_id: str | None = None


class Thinking(msgspec.Struct):
    """Only "disabled" is there."""

    type: str


class OutputFormat(msgspec.Struct, forbid_unknown_fields=True):
    """A schema that the answer's text must follow."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    """`effort` is refused."""

    effort: str | None = None
    format: OutputFormat | None = None


class CountTokensRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/messages/count_tokens: what makes a prompt."""

    model: str
    messages: list[Turn]
    system: str | list[TextBlock] | None = None
    cache_control: CacheControl | None = None
    speed: Literal["standard"] | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # its older name
    # Refused unless they say nothing.
    thinking: Thinking | None = None
    mcp_servers: list[Any] | None = None
    context_management: Any = None

    @classmethod
    def off(cls) -> dict[str, tuple[Any, ...]]:
        """Fields that are refused unless they hold one of these values, or null."""
        return _OFF


class MessagesRequest(CountTokensRequest, kw_only=True):
    """POST /v1/messages."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    # Refused unless they say nothing.
    container: Any = None
    inference_geo: str | None = None
    diagnostics: Any = None


# Of each field that is refused, the values that mean "off", beside null.
_OFF: dict[str, tuple[Any, ...]] = {
    "mcp_servers": ([],),
    "context_management": (),
    "container": (),
    "inference_geo": (),
    "diagnostics": (),
}

R = TypeVar("R", bound=CountTokensRequest)


def parse_messages(body: bytes) -> tuple[MessagesRequest, GenerationFields]:
    """The request, and how it generates in the terms that all APIs share. Raises ApiError 400."""
    request = _checked(decode(body, MessagesRequest))
    if request.temperature is not None and not 0 <= request.temperature <= 1:
        raise invalid("temperature", f"temperature is {request.temperature:g}; it must be at least 0 and at most 1")
    fields = GenerationFields(
        stream=request.stream,
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        stop=_stops(request.stop_sequences or []),
    )
    return request, checked(fields)


def parse_count(body: bytes) -> CountTokensRequest:
    """Raises ApiError 400."""
    return _checked(decode(body, CountTokensRequest))


def _stops(stops: list[str]) -> list[str]:
    if len(stops) > STOPS_MAX:
        raise invalid("stop_sequences", f"stop_sequences holds {len(stops)}; at most {STOPS_MAX} are allowed")
    if "" in stops:
        raise invalid(f"stop_sequences.{stops.index('')}", "a stop sequence can't be empty")
    for index, text in enumerate(stops):
        if len(text) > STOP_CHARS_MAX:
            message = f"a stop sequence has at most {STOP_CHARS_MAX} characters"
            raise invalid(f"stop_sequences.{index}", message)
    return stops


def _checked(request: R) -> R:
    for name in request.__struct_fields__:
        value = getattr(request, name)
        if name in _OFF and value is not None and value not in _OFF[name]:
            raise invalid(name, f"{name} is not supported")
    if request.thinking is not None and request.thinking.type != "disabled":
        raise invalid("thinking.type", f"{request.thinking.type!r} is not supported; only 'disabled' is")
    if request.output_config is not None and request.output_config.effort is not None:
        raise invalid("output_config.effort", "output_config.effort is not supported")
    if not 1 <= len(request.messages) <= MESSAGES_MAX:
        raise invalid("messages", f"messages holds {len(request.messages)}; it must hold 1 to {MESSAGES_MAX}")
    return request
