"""POST /v1/completions, and the grammar of its chunks."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.text import TextStream
from engine.tokenizer import Tokenizer
from engine.wire import Logprob
from protocols.escape import json_value
from server.api import errors
from server.api.errors import invalid
from server.api.generation import Generation, new_created
from server.api.openai_chat import usage_of
from server.api.types import PROMPTS_MAX, CompletionRequest, parse
from server.framing import DONE, unescaped
from server.http import Call, Response, Streaming
from server.log import Event
from server.outcome import Outcome
from server.stream import Choice, Stream, escaped
from server.table import Part, new_stream_id


class CompletionGrammar:
    """text_completion objects. `echoes` holds for each choice the prompt's text that comes before its own."""

    def __init__(
        self, api: str, model: str, tokenizer: Tokenizer, echoes: list[str], *, include_usage: bool = False
    ) -> None:
        self.api = api
        self.stream_id = new_stream_id()
        self._tokenizer = tokenizer
        self._echoes = echoes
        self._offsets = [len(echo) for echo in echoes]  # characters of text with log probabilities so far
        self._include_usage = include_usage
        head = {"id": f"cmpl-{self.stream_id}", "object": "text_completion", "created": new_created(), "model": model}
        self._head = json_value(head)[:-1]
        self._tail = b',"usage":null}' if include_usage else b"}"
        self.frames = [
            (
                self._head + b',"choices":[{"index":%d,"text":"' % index,
                b'","logprobs":null,"finish_reason":null}]' + self._tail,
            )
            for index in range(len(echoes))
        ]

    def opening(self) -> list[Event]:
        """The echoed prompts; empty text where there is none, so that event 0 is there before any token."""
        return [Event(i, escaped(echo)) for i, echo in enumerate(self._echoes) if echo] or [Event(0, b"")]

    def with_logprobs(self, choice: Choice, text: bytes, logprob: Logprob) -> bytes:
        """A chunk of text with the log probability of the token that completed it."""
        offset = self._offsets[choice.index]
        self._offsets[choice.index] += len(unescaped(text).decode())
        shown = json_value(self._shown([(choice.generated[-1], logprob)], [offset]))
        chunk = b',"choices":[{"index":%d,"text":"%b","logprobs":%b,"finish_reason":null}]' % (
            choice.index,
            text,
            shown,
        )
        return self._head + chunk + self._tail

    def choice_end(self, choice: Choice) -> list[Event]:
        """Empty text with the reason."""
        reason = msgspec.json.encode(choice.reason)
        shown = b',"choices":[{"index":%d,"text":"","logprobs":null,"finish_reason":%b}]' % (choice.index, reason)
        return [Event(choice.index, b"", self._head + shown + self._tail)]

    def closing(self, stream: Stream, end: Outcome) -> list[Event]:
        """The usage if it was asked for, or the error; then the terminator."""
        events: list[Event] = []
        if not end.success:
            events.append(Event(-1, b"", errors.outcome_body(end)))
        elif self._include_usage:
            usage = msgspec.json.encode(usage_of(stream))
            events.append(Event(-1, b"", self._head + b',"choices":[],"usage":' + usage + b"}"))
        return [*events, Event(-1, b"", DONE)]

    def whole(self, stream: Stream) -> bytes:
        """One text_completion object."""
        choices = [
            {
                "index": choice.index,
                "text": self._echoes[choice.index] + "".join(choice.shown or ()),
                "logprobs": self._whole_logprobs(choice),
                "finish_reason": choice.reason,
            }
            for choice in stream.choices
        ]
        rest = msgspec.json.encode({"choices": choices, "usage": usage_of(stream)})
        return self._head + b"," + rest[1:]

    def _whole_logprobs(self, choice: Choice) -> dict[str, list[Any]] | None:
        if choice.sampling.logprobs < 0 or choice.logprobs is None:
            return None
        offset = len(self._echoes[choice.index])
        text = TextStream(self._tokenizer)
        offsets: list[int] = []
        for token, _ in choice.logprobs:
            offsets.append(offset)
            offset += len(text.push(token))
        return self._shown(choice.logprobs, offsets)

    def _shown(self, logprobs: list[tuple[int, Logprob]], offsets: list[int]) -> dict[str, list[Any]]:
        """Parallel lists, one item for each token; offsets are characters from the text's start."""
        return {
            "tokens": [self._tokenizer.text_of(token) for token, _ in logprobs],
            "token_logprobs": [best.logprob for _, best in logprobs],
            "top_logprobs": [
                {self._tokenizer.text_of(i): x for i, x in zip(best.top_ids, best.top_logprobs, strict=True)}
                for _, best in logprobs
            ],
            "text_offset": offsets,
        }


async def completions(generation: Generation, call: Call) -> Response | Streaming:
    """POST /v1/completions. Raises ApiError."""
    request = parse(call.body, CompletionRequest)
    grammar, parts = await plan_completion(generation, request, "completions")
    return await generation.answer(call, request, grammar, parts)


async def plan_completion(
    generation: Generation, request: CompletionRequest, api: str
) -> tuple[CompletionGrammar, list[Part]]:
    """The grammar and the sequences of a completion request. Raises ApiError."""
    generation.check_model(request.model)
    prompts = await _encode_prompts(generation, request.prompt)
    logprobs = -1 if request.logprobs is None else request.logprobs
    parts = generation.parts(request, prompts, max_tokens=request.max_tokens, logprobs=logprobs)
    echoes = [generation.model.tokenizer.decode(part.prompt) if request.echo else "" for part in parts]
    options = request.stream_options
    include_usage = bool(options and options.include_usage)
    grammar = CompletionGrammar(
        api, generation.model.name, generation.model.tokenizer, echoes, include_usage=include_usage
    )
    return grammar, parts


async def _encode_prompts(generation: Generation, prompt: str | list[Any]) -> list[list[int]]:
    """A prompt in any of its four forms, as lists of ids."""
    given = prompt if isinstance(prompt, list) and not _are_ids(prompt) else [prompt]
    if not given:
        raise invalid("prompt", "prompt is empty")
    if len(given) > PROMPTS_MAX:
        raise invalid("prompt", f"prompt holds {len(given)} prompts; at most {PROMPTS_MAX} are allowed")
    prompts: list[list[int]] = []
    for index, item in enumerate(given):
        path = "prompt" if len(given) == 1 else f"prompt.{index}"
        if isinstance(item, str):
            prompts.append(await _encode_text(generation, item, path))
        elif isinstance(item, list) and _are_ids(item):
            prompts.append(_checked_ids(item, generation.model.hello.vocab_size, path))
        else:
            raise invalid(path, f"{path} must be a string, or a list of token ids")
    return prompts


async def _encode_text(generation: Generation, text: str, path: str) -> list[int]:
    if not text:
        raise invalid(path, f"{path} is empty")
    tokenizer = generation.model.tokenizer
    try:
        return await generation.encode_sized(len(text), lambda: tokenizer.encode(text), path)
    except ValueError as error:
        raise invalid(path, str(error)) from None


def _are_ids(value: list[Any]) -> bool:
    return bool(value) and all(type(item) is int for item in value)


def _checked_ids(ids: list[int], size: int, path: str) -> list[int]:
    for index, id_ in enumerate(ids):
        if not 0 <= id_ < size:
            raise invalid(f"{path}.{index}", f"{id_} is not in the vocabulary of {size} tokens")
    return ids
