"""What the Anthropic Messages API answers, as msgspec types: see `answers`, whose rules hold here too."""

from __future__ import annotations

from typing import Any, Literal

from server.api.answers import Answer

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class Tagged(Answer, tag_field="type"):
    """Its `type` tells it from others in the same place."""


class AnthropicErrorDetail(Answer):
    """The message begins with the path of the field that is wrong."""

    type: str
    message: str


class AnthropicError(Tagged, tag="error"):
    """A refusal, or the last event of a stream that did not end well."""

    error: AnthropicErrorDetail
    request_id: str


class TextContent(Tagged, tag="text"):
    """A block of text."""

    text: str


class ToolUseContent(Tagged, tag="tool_use"):
    """A call of one of the request's tools."""

    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(Answer):
    """`input_tokens` and `cache_read_input_tokens` together are the prompt."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageObject(Tagged, tag="message"):
    """A message, whole or as it begins."""

    id: str
    role: Literal["assistant"]
    model: str
    content: list[TextContent | ToolUseContent]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TextDelta(Tagged, tag="text_delta"):
    """More text."""

    text: str


class InputJsonDelta(Tagged, tag="input_json_delta"):
    """More of a tool's input, a piece of JSON."""

    partial_json: str


class MessageStart(Tagged, tag="message_start"):
    """The first event."""

    message: MessageObject


class ContentBlockStart(Tagged, tag="content_block_start"):
    """A block begins."""

    index: int
    content_block: TextContent | ToolUseContent


class ContentBlockDelta(Tagged, tag="content_block_delta"):
    """A block goes on."""

    index: int
    delta: TextDelta | InputJsonDelta


class ContentBlockStop(Tagged, tag="content_block_stop"):
    """A block is whole."""

    index: int


class MessageEnd(Answer):
    """Why a message ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Tagged, tag="message_delta"):
    """The message ended."""

    delta: MessageEnd
    usage: MessageUsage


class MessageStop(Tagged, tag="message_stop"):
    """The last event."""


class Ping(Tagged, tag="ping"):
    """Nothing new."""


AnyMessageEvent = (
    MessageStart
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
    | Ping
    | AnthropicError
)


class TokenCount(Answer):
    """Of a prompt."""

    input_tokens: int
