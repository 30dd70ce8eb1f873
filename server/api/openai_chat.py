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
from protocols.escape import json_value
from server.api import errors
from server.api.errors import invalid
from server.api.generation import (
    Generation,
    new_created,
    refuse_streamed_prompt_logprobs,
    shown_prompt_logprobs,
)
from server.api.types import ChatRequest, ContentPart, Message, parse
from server.framing import DONE
from server.http import Call, Response, Streaming
from server.log import Event
from server.outcome import Outcome
from server.stream import Choice, Frame, Stream
from server.table import new_stream_id


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
    ) -> None:
        self.api = api
        self.stream_id = new_stream_id()
        self._tokenizer = tokenizer
        self._choices = choices
        self._include_usage = include_usage
        self._prompt_logprobs = prompt_logprobs
        self._id = f"chatcmpl-{self.stream_id}"
        self._created = new_created()
        self._model = model
        head = {"id": self._id, "object": "chat.completion.chunk", "created": self._created, "model": model}
        self._head = json_value(head)[:-1]
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
        """The role, once for each choice."""
        delta = b'{"role":"assistant","content":""}'
        return [Event(i, b"", self._chunk(i, delta, b"null", b"null")) for i in range(self._choices)]

    def with_logprobs(self, choice: Choice, text: bytes, logprob: Logprob) -> bytes:
        """A chunk of text with the log probability of the token that completed it."""
        shown = json_value({"content": [self._shown_logprob(choice.generated[-1], logprob)], "refusal": None})
        return self._chunk(choice.index, b'{"content":"%b"}' % text, shown, b"null")

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
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": "".join(choice.shown or ()), "refusal": None},
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
    return [*events, Event(-1, b"", DONE)]


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
    if request.response_format is not None and request.response_format.type != "text":
        raise invalid("response_format.type", "only the response format 'text' is supported", "unsupported_parameter")
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs to be true")
    refuse_streamed_prompt_logprobs(request, request.prompt_logprobs, api)
    prompt = await encode_messages(generation, request.messages)
    options = request.stream_options
    grammar = ChatGrammar(
        api,
        generation.model.name,
        generation.model.tokenizer,
        choices=request.n or 1,
        include_usage=bool(options and options.include_usage),
        prompt_logprobs=request.prompt_logprobs,
    )
    max_tokens = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    logprobs = (request.top_logprobs or 0) if request.logprobs else -1
    told = -1 if request.prompt_logprobs is None else request.prompt_logprobs
    parts = generation.parts(
        request, [prompt], max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=told, param="messages"
    )
    return grammar, parts


async def encode_messages(
    generation: Generation, messages: list[Message], param: str = "messages", **options: Any
) -> list[int]:
    """The prompt's ids, by the model's chat template and with `encode_chat`'s options. `param`: what the messages came
    from. Raises ApiError."""
    turns = [{"role": _role(m.role), "content": _text(m, f"messages.{i}")} for i, m in enumerate(messages)]
    return await generation.encode_turns(turns, param, **options)


def _role(role: str) -> str:
    return "system" if role == "developer" else role  # the newer name of the same thing


def _text(message: Message, path: str) -> str:
    """A message's text: its parts are joined by line ends."""
    content = message.content
    if message.tool_calls:
        raise invalid(f"{path}.tool_calls", "tool calls are not supported", "unsupported_parameter")
    if isinstance(content, str):
        return content
    if content is None:
        if message.role == "assistant":
            return ""
        raise invalid(f"{path}.content", "a message needs content")
    return "\n".join(_part_text(part, f"{path}.content.{i}") for i, part in enumerate(content))


def _part_text(part: ContentPart, path: str) -> str:
    if part.type not in ("text", "input_text"):
        raise invalid(f"{path}.type", f"{part.type!r} parts are not supported; only text is", "unsupported_parameter")
    if part.text is None:
        raise invalid(f"{path}.text", "a text part needs its text")
    return part.text
