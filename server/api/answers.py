"""What the routes answer, as msgspec types: `/openapi.json` shows them, and tests hold the answers to them.

Most of these objects are rendered as bytes elsewhere, since their JSON is made once for each stream and not for each
token. No answer has a field that isn't here.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from server.outlet import Sender

FinishReason = Literal["stop", "length", "tool_calls"]


class Answer(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """No field but those named."""


class ErrorDetail(Answer):
    """`param` is the path of the field that is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Answer):
    """A refusal, or the end of a stream that did not end well."""

    error: ErrorDetail


# OpenAI: chat completions and text completions


class CachedTokens(Answer):
    """Prompt tokens that were found in the prefix cache."""

    cached_tokens: int


class Usage(Answer):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class ChatTopLogprob(Answer):
    """One of the most likely tokens."""

    token: str
    bytes: list[int]
    logprob: float


class ChatLogprob(ChatTopLogprob):
    """A token, with the most likely ones in its place."""

    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(Answer):
    """Of the text's tokens."""

    content: list[ChatLogprob]
    refusal: None


class PromptLogprob(Answer):
    """In vLLM's form; a rank is known of the most likely tokens only."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CalledFunction(Answer):
    """`arguments` is JSON."""

    name: str
    arguments: str


class ToolCall(Answer):
    """A call of one of the request's tools."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Answer):
    """What the model said."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(Answer):
    """One of `n`."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(Answer):
    """The answer in one piece."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class FunctionDelta(Answer):
    """The name once, then pieces of the arguments."""

    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str | msgspec.UnsetType = msgspec.UNSET


class ToolCallDelta(Answer):
    """Its id, type and name come once."""

    index: int
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: Literal["function"] | msgspec.UnsetType = msgspec.UNSET
    function: FunctionDelta | msgspec.UnsetType = msgspec.UNSET


class ChatDelta(Answer):
    """What is new."""

    role: Literal["assistant"] | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType | None = msgspec.UNSET
    tool_calls: list[ToolCallDelta] | msgspec.UnsetType = msgspec.UNSET


class ChatChunkChoice(Answer):
    """One of `n`."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatChunk(Answer):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class TextLogprobs(Answer):
    """Of the text's tokens."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class TextChoice(Answer):
    """One of the prompts' choices."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class TextCompletion(Answer):
    """The answer in one piece, or one event of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class ModelCard(Answer):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(Answer):
    """What is served."""

    object: Literal["list"]
    data: list[ModelCard]


# Responses


class DeletedResponse(Answer):
    """It is gone."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputTokens(Answer):
    """Of a prompt."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class ItemList(Answer):
    """A page of the items that went into a response."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool


# Streams


class StartedStream(Answer):
    """A stream to be polled."""

    stream: str


class EndedStream(Answer):
    """A stream that was cancelled, or had ended already."""

    stream: str
    status: Literal["finished"]
    outcome: str


class PolledEvent(Answer):
    """One event, as the stream's own API shows it; `data` is "[DONE]" for the terminator."""

    n: int
    event: str
    data: Any


class PolledStream(Answer):
    """What is new. `next`: the position of the first event that isn't here."""

    stream: str
    status: Literal["queued", "running", "parked", "detached", "finished"]
    events: list[PolledEvent]
    next: int
    outcome: str | None


# Tokens


class Tokens(Answer):
    """Of a prompt or a chat."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Prompt(Answer):
    """The text of tokens."""

    prompt: str


class AccessToken(Answer):
    """For `?token=`, until then (Unix seconds)."""

    object: Literal["access_token"]
    token: str
    expires_at: int


class Status(Answer):
    """Of the process, or of its engine."""

    status: str


# What `/status` shows: everything is of this moment, but for counters, which say so.


class EngineNow(Answer):
    """The engine, or all of them together, and its sequences. `restarts` and `preemptions` count from the start."""

    up: bool
    restarts: int
    preemptions: int
    waiting: int
    running: int
    parked: int
    running_max: int  # sequences in one step


class StreamsNow(Answer):
    """Streams that have not ended, by state."""

    queued: int
    running: int
    parked: int
    detached: int


class TokensNow(Answer):
    """`waiting` are to be computed, `running` hold blocks, `capacity` is what the pool holds; `generated` counts."""

    waiting: int
    running: int
    capacity: int
    generated: int


class ConnectionsNow(Answer):
    """Open connections by protocol."""

    http1: int
    http2: int
    websocket: int


class BlocksNow(Answer):
    """The KV pool's blocks, of `tokens_each`."""

    used: int
    cached: int
    free: int
    tokens_each: int


class StreamNow(Answer):
    """A stream that has not ended: the beginning of its id, and what the access log will say of it. `key` is empty
    without keys, and where anyone may read this."""

    stream: str
    request_id: str
    api: str
    key: str
    state: str  # as in StreamsNow
    readers: int
    prompt_tokens: int
    completion_tokens: int
    age_s: float
    ttft_s: float | None


class ServerNow(Answer):
    """`shown` has the streams that have run longest, 256 at most. `token_sender` sends tokens over HTTP/1.1 and its
    WebSockets without TLS; elsewhere Python always does."""

    model: str
    token_sender: Sender
    engine: EngineNow
    streams: StreamsNow
    tokens: TokensNow
    kv_blocks: BlocksNow
    connections: ConnectionsNow
    shown: list[StreamNow]
