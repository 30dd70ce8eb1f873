"""The Responses API's request body, and the objects that it answers with, as msgspec types.

Every field of a request works or is refused by name. A field that only says how OpenAI's own service should treat a
request (tiers, cache keys, identifiers) changes no answer, and is taken as it is.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from server.api.errors import invalid
from server.api.types import MESSAGES_MAX, GenerationFields, parse

LOGPROBS = "message.output_text.logprobs"  # the one thing that `include` can add here


class TextFormat(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """How the text must look."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, forbid_unknown_fields=True):
    """The answer's text."""

    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Nothing here reasons apart from its answer."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None


class ResponseRequest(GenerationFields, kw_only=True):
    """POST /v1/responses; the sampling fields that vLLM's users add included."""

    input: str | list[Any]
    instructions: str | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    include: list[str] | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None  # bounds OpenAI's built-in tools, of which there are none
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    # Refused unless they say nothing.
    truncation: str | None = None
    context_management: list[Any] | None = None
    prompt_cache_retention: str | None = None
    access_programs: Any = None
    background_options: Any = None
    conversation: Any = None
    image: Any = None
    moderation: Any = None
    moderation_policy: Any = None
    prompt: Any = None
    prompt_cache_options: Any = None

    @classmethod
    def off(cls) -> dict[str, tuple[Any, ...]]:
        """See GenerationFields."""
        return _OFF


_OFF: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "max_tokens": (),
    "truncation": ("disabled",),
    "context_management": ([],),
    "prompt_cache_retention": ("in_memory",),
    "access_programs": (),
    "background_options": (),
    "conversation": (),
    "image": (),
    "moderation": (),
    "moderation_policy": (),
    "prompt": (),
    "prompt_cache_options": (),
}


def parse_response(body: bytes) -> ResponseRequest:
    """The body of POST /v1/responses. Raises ApiError 400 that names the field and says what is right."""
    request = parse(body, ResponseRequest)
    for index, name in enumerate(request.include or ()):
        if name != LOGPROBS:
            raise invalid(f"include.{index}", f"only {LOGPROBS!r} can be included", "unsupported_parameter")
    if isinstance(request.input, list) and len(request.input) > MESSAGES_MAX:
        raise invalid("input", f"input holds {len(request.input)} items; at most {MESSAGES_MAX} are allowed")
    if request.background and request.store is False:
        raise invalid("store", "a background response is found by its id, and so must be stored")
    _check_text(request.text)
    reasoning = request.reasoning
    if reasoning is not None and reasoning.effort not in (None, "none"):
        raise invalid("reasoning.effort", "this model does not reason apart from its answer", "unsupported_parameter")
    for name in ("summary", "generate_summary", "context"):
        if getattr(reasoning, name, None) is not None:
            raise invalid(f"reasoning.{name}", f"reasoning.{name} is not supported", "unsupported_parameter")
    return request


def _check_text(text: TextConfig | None) -> None:
    if text is None:
        return
    if text.verbosity not in (None, "medium"):
        raise invalid("text.verbosity", "text.verbosity can only be 'medium'", "unsupported_parameter")


# What is answered


class TopLogprob(msgspec.Struct, forbid_unknown_fields=True):
    """One of the most likely tokens."""

    token: str
    bytes: list[int]
    logprob: float


class TokenLogprob(msgspec.Struct, forbid_unknown_fields=True):
    """A token of the answer, with the most likely ones in its place."""

    token: str
    bytes: list[int]
    logprob: float
    top_logprobs: list[TopLogprob]


class OutputText(msgspec.Struct, tag_field="type", tag="output_text", forbid_unknown_fields=True):
    """A part of a message."""

    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputMessage(msgspec.Struct, tag_field="type", tag="message", forbid_unknown_fields=True):
    """What the model said."""

    id: str
    status: ItemStatus
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class FunctionCall(msgspec.Struct, tag_field="type", tag="function_call", forbid_unknown_fields=True):
    """A call of one of the request's tools; `arguments` is JSON."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


OutputItem = OutputMessage | FunctionCall


class InputTokensDetails(msgspec.Struct, forbid_unknown_fields=True):
    """Nobody pays for what is written to the prefix cache, so that isn't counted."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, forbid_unknown_fields=True):
    """Nothing here reasons apart from its answer."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, forbid_unknown_fields=True):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(msgspec.Struct, forbid_unknown_fields=True):
    """Why a response failed. `type`: more exactly than OpenAI's codes say it."""

    message: str
    type: str
    code: Literal["server_error"] = "server_error"
    param: str | None = None


class IncompleteDetails(msgspec.Struct, forbid_unknown_fields=True):
    """Why a response isn't whole."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseObject(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A response, at any time of its life."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: ResponseStatus
    completed_at: int | None = None
    background: bool
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: Reasoning
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: TextConfig
    tool_choice: Any
    tools: list[Any]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]


# The events of a stream, each with its position


class ResponseEvent(msgspec.Struct, tag_field="type", forbid_unknown_fields=True, kw_only=True):
    """The position is the event's `sequence_number`."""

    sequence_number: int


class ResponseCreated(ResponseEvent, tag="response.created"):
    """The first."""

    response: ResponseObject


class ResponseInProgress(ResponseEvent, tag="response.in_progress"):
    """It has begun."""

    response: ResponseObject


class OutputItemAdded(ResponseEvent, tag="response.output_item.added"):
    """An item begins."""

    output_index: int
    item: OutputItem


class ContentPartAdded(ResponseEvent, tag="response.content_part.added"):
    """A part of a message begins."""

    item_id: str
    output_index: int
    content_index: int
    part: OutputText


class OutputTextDelta(ResponseEvent, tag="response.output_text.delta"):
    """More text."""

    item_id: str
    output_index: int
    content_index: int
    logprobs: list[TokenLogprob]
    delta: str


class OutputTextDone(ResponseEvent, tag="response.output_text.done"):
    """The text, whole."""

    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: list[TokenLogprob]


class ContentPartDone(ResponseEvent, tag="response.content_part.done"):
    """The part, whole."""

    item_id: str
    output_index: int
    content_index: int
    part: OutputText


class OutputItemDone(ResponseEvent, tag="response.output_item.done"):
    """The item, whole."""

    output_index: int
    item: OutputItem


class FunctionArgumentsDelta(ResponseEvent, tag="response.function_call_arguments.delta"):
    """More of a call's arguments."""

    item_id: str
    output_index: int
    delta: str


class FunctionArgumentsDone(ResponseEvent, tag="response.function_call_arguments.done"):
    """A call's arguments, whole."""

    item_id: str
    output_index: int
    arguments: str


class ResponseCompleted(ResponseEvent, tag="response.completed"):
    """The last, of a whole answer."""

    response: ResponseObject


class ResponseIncomplete(ResponseEvent, tag="response.incomplete"):
    """The last, of an answer that max_output_tokens cut."""

    response: ResponseObject


class ResponseFailed(ResponseEvent, tag="response.failed"):
    """The last, of an answer that failed."""

    response: ResponseObject


class ResponseCancelled(ResponseEvent, tag="response.cancelled"):
    """The last, of an answer that was cancelled."""

    response: ResponseObject


AnyResponseEvent = (
    ResponseCreated
    | ResponseInProgress
    | OutputItemAdded
    | ContentPartAdded
    | OutputTextDelta
    | OutputTextDone
    | ContentPartDone
    | OutputItemDone
    | FunctionArgumentsDelta
    | FunctionArgumentsDone
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | ResponseCancelled
)


def begun(request: ResponseRequest, *, id: str, created_at: int, model: str) -> ResponseObject:
    """The response as it begins."""
    return ResponseObject(
        id=id,
        created_at=created_at,
        status="in_progress",
        background=bool(request.background),
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        model=model,
        output=[],
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        reasoning=Reasoning(),
        safety_identifier=request.safety_identifier,
        store=request.store is not False,
        temperature=1.0 if request.temperature is None else request.temperature,
        text=TextConfig((request.text and request.text.format) or TextFormat("text"), "medium"),
        tool_choice="auto" if request.tool_choice is None else request.tool_choice,
        tools=request.tools or [],
        top_logprobs=request.top_logprobs or 0,
        top_p=1.0 if request.top_p is None else request.top_p,
        user=request.user,
        metadata=request.metadata or {},
    )
