"""POST /v1/messages and /v1/messages/count_tokens, and the grammar of typed events.

Stream: message_start, then for each content block its start, deltas and stop, message_delta with the reason and the
usage, message_stop. A stream that ends badly has an `error` event in place of what was left.

The prompt's tokens are counted before the engine looks into its cache, so message_start has all of them in
`input_tokens`; message_delta and the answer in one piece tell those from the cache apart, as this API defines it:
`input_tokens` + `cache_read_input_tokens` is the prompt.
"""

from __future__ import annotations

from typing import Any

import msgspec

from engine.wire import Logprob
from protocols.escape import json_value
from server import outcome as outcomes
from server.api import anthropic_errors
from server.api.anthropic_prompt import encode_prompt
from server.api.anthropic_types import parse_count, parse_messages
from server.api.generation import Generation
from server.http import Call, Response, Streaming, json_response
from server.log import Event
from server.outcome import Outcome
from server.stream import Choice, Frame, Stream
from server.table import new_stream_id
from server.tools.pieces import Piece

STOP_REASONS = {outcomes.STOP: "end_turn", outcomes.LENGTH: "max_tokens", outcomes.TOOL_CALLS: "tool_use"}
TEXT_DELTA = b'{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"'


class MessagesGrammar:
    """Messages and their events. They have one choice, and a text is one block."""

    api = "messages"
    ping = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, model: str, prompt_tokens: int) -> None:
        self.stream_id = new_stream_id()
        self.frames = [Frame(TEXT_DELTA, b'"}}', "content_block_delta")]
        self._model = model
        self._prompt_tokens = prompt_tokens

    def opening(self) -> list[Event]:
        """The message without content, and its block of text."""
        usage = _usage(self._prompt_tokens, 0, 0)
        message = self._message([], None, None, usage)
        block = {"type": "text", "text": ""}
        return [
            _event("message_start", message=message),
            _event("content_block_start", index=0, content_block=block),
        ]

    def with_logprobs(self, choice: Choice, text: bytes, logprob: Logprob) -> bytes:
        """This API shows none, so none are asked for."""
        raise NotImplementedError

    def pieces(self, choice: Choice, piece: Piece) -> list[Event]:
        """Its requests have no tools yet."""
        raise NotImplementedError

    def prompt_told(self, choice: Choice) -> list[Event]:
        """Likewise."""
        return []

    def choice_end(self, choice: Choice) -> list[Event]:
        """The end of the block of text, and of the message."""
        reason, sequence = _stop(choice)
        usage = _usage_of(choice.stream)
        return [
            _event("content_block_stop", index=0),
            _event("message_delta", delta={"stop_reason": reason, "stop_sequence": sequence}, usage=usage),
        ]

    def closing(self, stream: Stream, end: Outcome) -> list[Event]:
        """The terminator, or the error."""
        if end.success:
            return [_event("message_stop")]
        return [Event(-1, b"", self.failure(stream, end), "error")]

    def whole(self, stream: Stream) -> bytes:
        """One message object."""
        (choice,) = stream.choices
        text = "".join(choice.shown or ())
        content = [{"type": "text", "text": text}]
        return msgspec.json.encode(self._message(content, *_stop(choice), _usage_of(stream)))

    def failure(self, stream: Stream, end: Outcome) -> bytes:
        """Anthropic's error object."""
        return anthropic_errors.outcome_body(end, stream.request_id)

    def _message(
        self, content: list[dict[str, Any]], reason: str | None, sequence: str | None, usage: dict[str, int]
    ) -> dict[str, Any]:
        return {
            "id": f"msg_{self.stream_id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": usage,
        }


def _event(name: str, **fields: Any) -> Event:
    return Event(-1, b"", json_value({"type": name, **fields}), name)


def _stop(choice: Choice) -> tuple[str, str | None]:
    """The reason, and the stop sequence that was met."""
    if choice.reason == outcomes.STOP and choice.matched_stop is not None:
        return "stop_sequence", choice.matched_stop
    return STOP_REASONS[choice.reason], None


def _usage_of(stream: Stream) -> dict[str, int]:
    return _usage(stream.prompt_tokens, stream.cached_tokens, stream.completion_tokens)


def _usage(prompt: int, cached: int, output: int) -> dict[str, int]:
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
    }


async def messages(generation: Generation, call: Call) -> Response | Streaming:
    """POST /v1/messages. Raises ApiError."""
    request, fields = parse_messages(call.body)
    generation.check_model(request.model)
    prompt = await encode_prompt(generation, request)
    parts = generation.parts(fields, [prompt], max_tokens=request.max_tokens, param="messages")
    return await generation.answer(call, fields, MessagesGrammar(generation.model.name, len(prompt)), parts)


async def count_tokens(generation: Generation, call: Call) -> Response:
    """POST /v1/messages/count_tokens. Raises ApiError."""
    request = parse_count(call.body)
    generation.check_model(request.model)
    return json_response({"input_tokens": len(await encode_prompt(generation, request))})
