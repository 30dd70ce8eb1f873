"""POST /v1/chat/completions, and the grammar of its chunks (also that of GET /v1/generate).

Stream: one chunk with the role for each choice, text with finish_reason null, one chunk with the reason for each
choice, the usage if asked for, `[DONE]`. Every chunk has the same keys. A stream that ends badly has an `error` object
and `[DONE]` in their place.
"""

from __future__ import annotations

from typing import Any

import msgspec

from engine.tokenizer import Tokenizer
from engine.wire import Logprob
from protocols import sse
from protocols.escape import json_text, json_value
from server.api import errors
from server.api.errors import invalid
from server.api.generation import (
    Generation,
    new_created,
    refuse_streamed_prompt_logprobs,
    shown_prompt_logprobs,
)
from server.api.openai_turns import json_form, tool_use, turns_of
from server.api.structure import answer_grammar
from server.api.tool_use import call_format
from server.api.types import ChatRequest, parse
from server.framing import DONE
from server.http import Call, Response, Streaming
from server.log import Event
from server.outcome import Outcome
from server.stream import Choice, Frame, Stream, escaped, new_stream_id, text_event
from server.tools.pieces import Piece, TextPiece, ToolCallBegin, ToolCallEnd

_DONE = Event(-1, b"", DONE)


class OpenAIGrammar:
    """What all of OpenAI's grammars have in common."""

    ping = sse.PING

    def failure(self, stream: Stream, end: Outcome) -> bytes:
        """OpenAI's error object."""
        return errors.outcome_body(end)


class ChatGrammar(OpenAIGrammar):
    """chat.completion and chat.completion.chunk objects."""

    def __init__(
        self,
        api: str,
        model: str,
        tokenizer: Tokenizer,
        *,
        choices: int,
        include_usage: bool = False,
        prompt_logprobs: int | None = None,
        may_call: bool = False,
    ) -> None:
        self.api = api
        self.stream_id = new_stream_id()
        self._tokenizer = tokenizer
        self._choices = choices
        self._include_usage = include_usage
        self._prompt_logprobs = prompt_logprobs
        self._may_call = may_call
        self._id = f"chatcmpl-{self.stream_id}"
        self._created = new_created()
        self._model = model
        self._head = b'{"id":"%b","object":"chat.completion.chunk","created":%d,"model":"%b"' % (
            self._id.encode(),
            self._created,
            escaped(model),
        )
        self._tail = b',"usage":null}' if include_usage else b"}"
        self.frames = [
            Frame(
                self._head + b',"choices":[{"index":%d,"delta":{"content":"' % index,
                b'"},"logprobs":null,"finish_reason":null}]' + self._tail,
            )
            for index in range(choices)
        ]

    def _chunk(self, index: int, delta: bytes, logprobs: bytes, reason: bytes) -> bytes:
        choice = b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}' % (index, delta, logprobs, reason)
        return self._head + b',"choices":[' + choice + b"]" + self._tail

    def opening(self) -> list[Event]:
        """The role, once for each choice. Where there may be calls and no text, there is no content yet."""
        delta = b'{"role":"assistant","content":%b}' % (b"null" if self._may_call else b'""')
        return [Event(i, b"", self._chunk(i, delta, b"null", b"null")) for i in range(self._choices)]

    def with_logprobs(self, choice: Choice, text: bytes, logprob: Logprob) -> bytes:
        """A chunk of text with the log probability of the token that completed it."""
        shown = json_value({"content": [self._shown_logprob(choice.generated[-1], logprob)], "refusal": None})
        return self._chunk(choice.index, b'{"content":"%b"}' % text, shown, b"null")

    def pieces(self, choice: Choice, piece: Piece) -> list[Event]:
        """Text as ever; a call's id and name once, with its index, and then parts of its arguments."""
        if isinstance(piece, TextPiece):
            return [text_event(choice.index, piece.text)]
        if isinstance(piece, ToolCallEnd):
            return []
        if isinstance(piece, ToolCallBegin):
            call = b'{"index":%d,"id":"%b","type":"function","function":{"name":"%b","arguments":""}}' % (
                piece.index,
                json_text(piece.id),
                json_text(piece.name),
            )
        else:
            call = b'{"index":%d,"function":{"arguments":"%b"}}' % (piece.index, json_text(piece.text))
        return [Event(choice.index, b"", self._chunk(choice.index, b'{"tool_calls":[%b]}' % call, b"null", b"null"))]

    def prompt_told(self, choice: Choice) -> list[Event]:
        """Only the whole answer shows them."""
        return []

    def choice_end(self, choice: Choice) -> list[Event]:
        """An empty delta with the reason."""
        data = self._chunk(choice.index, b"{}", b"null", msgspec.json.encode(choice.reason))
        return [Event(choice.index, b"", data)]

    def closing(self, stream: Stream, end: Outcome) -> list[Event]:
        """See `closing_events`."""
        return closing_events(stream, end, self._head if self._include_usage else None)

    def whole(self, stream: Stream) -> bytes:
        """One chat.completion object."""
        answer: dict[str, Any] = {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._model,
            "choices": [self._whole_choice(choice) for choice in stream.choices],
            "usage": usage_of(stream),
        }
        if self._prompt_logprobs is not None:
            count = self._prompt_logprobs
            answer["prompt_logprobs"] = shown_prompt_logprobs(self._tokenizer, stream.choices[0], count)
        return msgspec.json.encode(answer)

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        logprobs = None
        if choice.logprobs and choice.sampling.logprobs >= 0:
            shown = [self._shown_logprob(token, logprob) for token, logprob in choice.logprobs]
            logprobs = {"content": shown, "refusal": None}
        content = "".join(choice.shown or ())
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if choice.calls:
            message["content"] = content or None
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in choice.calls
            ]
        return {
            "index": choice.index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": choice.reason,
        }

    def _shown_logprob(self, token: int, logprob: Logprob) -> dict[str, Any]:
        top = zip(logprob.top_ids, logprob.top_logprobs, strict=True)
        return {
            **self._token(token),
            "logprob": logprob.logprob,
            "top_logprobs": [{**self._token(id_), "logprob": value} for id_, value in top],
        }

    def _token(self, token: int) -> dict[str, Any]:
        piece = self._tokenizer.bytes_of(token)
        return {"token": piece.decode("utf-8", "replace"), "bytes": list(piece)}


def closing_events(stream: Stream, end: Outcome, usage_head: bytes | None) -> list[Event]:
    """How an OpenAI stream ends: the error, or the usage if it was asked for; then the terminator. `usage_head` is the
    JSON of a chunk up to its choices."""
    events: list[Event] = []
    if not end.success:
        events.append(Event(-1, b"", errors.outcome_body(end)))
    elif usage_head is not None:
        usage = msgspec.json.encode(usage_of(stream))
        events.append(Event(-1, b"", usage_head + b',"choices":[],"usage":' + usage + b"}"))
    events.append(_DONE)
    return events


def usage_of(stream: Stream) -> dict[str, Any]:
    """Token counts, the same in every form of the answer."""
    prompt, completion = stream.prompt_tokens, stream.completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": stream.cached_tokens},
    }


async def chat_completions(generation: Generation, call: Call) -> Response | Streaming:
    """POST /v1/chat/completions. Raises ApiError."""
    return await answer_chat(generation, call, parse(call.body, ChatRequest), "chat")


async def answer_chat(generation: Generation, call: Call, request: ChatRequest, api: str) -> Response | Streaming:
    """A chat request in one of its forms. Raises ApiError."""
    grammar, parts = await plan_chat(generation, request, api)
    return await generation.answer(call, request, grammar, parts)


async def plan_chat(generation: Generation, request: ChatRequest, api: str) -> tuple[ChatGrammar, list[Any]]:
    """The grammar and the sequences of a chat request. Raises ApiError."""
    generation.check_model(request.model)
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs to be true")
    refuse_streamed_prompt_logprobs(request, request.prompt_logprobs, api)
    use = tool_use(request)
    if use is not None and api == "websocket":
        raise invalid("tools", "a WebSocket shows text only; take SSE or NDJSON to see calls", "unsupported_parameter")
    calls = call_format(generation.model, use)
    rules = await answer_grammar(generation, use, json_form(request))
    turns = turns_of(request.messages)
    prompt = await generation.encode_turns(turns, "messages", tools=use.shown if use else None)
    options = request.stream_options
    grammar = ChatGrammar(
        api,
        generation.model.name,
        generation.model.tokenizer,
        choices=request.n or 1,
        include_usage=bool(options and options.include_usage),
        prompt_logprobs=request.prompt_logprobs,
        may_call=calls is not None,
    )
    max_tokens = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    logprobs = (request.top_logprobs or 0) if request.logprobs else -1
    told = -1 if request.prompt_logprobs is None else request.prompt_logprobs
    parts = generation.parts(
        request,
        [prompt],
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=told,
        param="messages",
        calls=calls,
        grammar=rules,
    )
    return grammar, parts
