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
from server import outcome as outcomes
from server.api import anthropic_errors
from server.api.anthropic_blocks import TEXT_FRAME, Blocks, event
from server.api.anthropic_prompt import encode_prompt
from server.api.anthropic_tools import json_form, tool_use
from server.api.anthropic_types import parse_count, parse_messages
from server.api.errors import invalid
from server.api.generation import Generation
from server.api.structure import answer_grammar
from server.api.tool_use import call_format
from server.http import Call, Response, Streaming, json_response
from server.log import Event
from server.outcome import Outcome
from server.stream import Choice, Stream, new_stream_id
from server.tools.pieces import Piece

STOP_REASONS = {outcomes.STOP: "end_turn", outcomes.LENGTH: "max_tokens", outcomes.TOOL_CALLS: "tool_use"}
_MESSAGE_STOP = event("message_stop")


class MessagesGrammar:
    """Messages and their events; they have one choice. `may_call`: its text may call tools. `keep`: it is answered in
    one piece."""

    api = "messages"
    ping = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(self, model: str, prompt_tokens: int, *, may_call: bool = False, keep: bool = False) -> None:
        self.stream_id = new_stream_id()
        self.frames = [TEXT_FRAME]
        self._model = model
        self._prompt_tokens = prompt_tokens
        self._may_call = may_call
        self._blocks = Blocks(keep=keep and may_call)

    def opening(self) -> list[Event]:
        """The message without content, and its block of text, if it is sure to be one."""
        message = self._message([], None, None, _usage(self._prompt_tokens, 0, 0))
        return [event("message_start", message=message), *([] if self._may_call else self._blocks.begin_text())]

    def with_logprobs(self, choice: Choice, text: bytes, logprob: Logprob) -> bytes:
        """This API shows none, so none are asked for."""
        raise NotImplementedError

    def prompt_told(self, choice: Choice) -> list[Event]:
        """Likewise."""
        return []

    def pieces(self, choice: Choice, piece: Piece) -> list[Event]:
        """Blocks of text and of calls."""
        return self._blocks.take(piece)

    def choice_end(self, choice: Choice) -> list[Event]:
        """The end of the last block, and of the message."""
        reason, sequence = _stop(choice)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return [*self._blocks.end(), event("message_delta", delta=delta, usage=_usage_of(choice.stream))]

    def closing(self, stream: Stream, end: Outcome) -> list[Event]:
        """The terminator, or the error."""
        if end.success:
            return [_MESSAGE_STOP]
        return [Event(-1, b"", self.failure(stream, end), "error")]

    def whole(self, stream: Stream) -> bytes:
        """One message object."""
        (choice,) = stream.choices
        text = {"type": "text", "text": "".join(choice.shown or ())}
        content = self._blocks.content if self._may_call else [text]
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
    use = tool_use(request)
    calls = call_format(generation.model, use)
    rules = await answer_grammar(generation, use, json_form(request))
    if rules and request.messages[-1].role == "assistant":
        raise invalid("messages", "an answer whose form is required can't continue a text of the assistant's")
    prompt = await encode_prompt(generation, request, use)
    parts = generation.parts(
        fields, [prompt], max_tokens=request.max_tokens, param="messages", calls=calls, grammar=rules
    )
    grammar = MessagesGrammar(generation.model.name, len(prompt), may_call=calls is not None, keep=not request.stream)
    return await generation.answer(call, fields, grammar, parts)


async def count_tokens(generation: Generation, call: Call) -> Response:
    """POST /v1/messages/count_tokens. Raises ApiError."""
    request = parse_count(call.body)
    generation.check_model(request.model)
    return json_response({"input_tokens": len(await encode_prompt(generation, request, tool_use(request)))})
