"""POST /v1/completions, and the grammar of its chunks."""

from __future__ import annotations

from collections.abc import Sequence as Many
from itertools import accumulate
from typing import Any

import msgspec

from engine.text import TextStream
from engine.tokenizer import Tokenizer
from engine.wire import Logprob
from protocols.escape import json_value
from server.api.errors import invalid
from server.api.generation import (
    Generation,
    new_created,
    refuse_streamed_prompt_logprobs,
    shown_prompt_logprobs,
)
from server.api.json_checks import ids_in_prompt
from server.api.openai_chat import OpenAIGrammar, closing_events, usage_of
from server.api.types import PROMPTS_MAX, CompletionRequest, parse
from server.framing import unescaped
from server.http import Call, Response, Streaming
from server.log import Event
from server.outcome import Outcome
from server.stream import Choice, Frame, Stream, escaped, new_stream_id
from server.table import Part
from server.tools.pieces import Piece

# Ids of an echoed prompt that one event shows with their log probabilities: some tens of kilobytes of JSON.
ECHO_TOKENS_MAX = 64


class CompletionGrammar(OpenAIGrammar):
    """text_completion objects. `echoes` holds for each choice the prompt's text that comes before its own. With
    `echo_logprobs` it comes with its log probabilities, once they are told, and so behind event 0."""

    def __init__(
        self,
        api: str,
        model: str,
        tokenizer: Tokenizer,
        echoes: list[str],
        *,
        include_usage: bool = False,
        echo_logprobs: bool = False,
        prompt_logprobs: int | None = None,
    ) -> None:
        self.api = api
        self.stream_id = new_stream_id()
        self._tokenizer = tokenizer
        self._echoes = echoes
        self._offsets = [len(echo) for echo in echoes]  # characters of text with log probabilities so far
        self._include_usage = include_usage
        self._echo_logprobs = echo_logprobs
        self._prompt_logprobs = prompt_logprobs
        head = {"id": f"cmpl-{self.stream_id}", "object": "text_completion", "created": new_created(), "model": model}
        self._head = json_value(head)[:-1]
        self._tail = b',"usage":null}' if include_usage else b"}"
        self.frames = [
            Frame(
                self._head + b',"choices":[{"index":%d,"text":"' % index,
                b'","logprobs":null,"finish_reason":null}]' + self._tail,
            )
            for index in range(len(echoes))
        ]

    def opening(self) -> list[Event]:
        """The echoed prompts; empty text where there is none, so that event 0 is there before any token."""
        if self._echo_logprobs:
            return [Event(0, b"")]
        texts = {echo: escaped(echo) for echo in set(self._echoes)}  # choices have the same
        return [Event(i, texts[echo]) for i, echo in enumerate(self._echoes) if echo] or [Event(0, b"")]

    def prompt_told(self, choice: Choice) -> list[Event]:
        """The echoed prompt with its log probabilities, some of its ids an event."""
        if not self._echo_logprobs:
            return []
        told, pieces = self._prompt_of(choice)
        offsets = _offsets(pieces, 0)
        events: list[Event] = []
        for start in range(0, len(told), ECHO_TOKENS_MAX):
            part = slice(start, start + ECHO_TOKENS_MAX)
            text = escaped("".join(pieces[part]))
            shown = json_value(self._shown(told[part], offsets[part]))
            events.append(Event(choice.index, text, self._chunk(choice, text, shown)))
        return events

    def pieces(self, choice: Choice, piece: Piece) -> list[Event]:
        """A text completion calls no tools."""
        raise NotImplementedError

    def _prompt_of(self, choice: Choice) -> tuple[list[tuple[int, Logprob | None]], list[str]]:
        """The prompt's ids with what was told of them, nothing of the first; and the text that each completes."""
        told: list[Logprob | None] = [None, *(choice.prompt_logprobs or ())]
        count = choice.sampling.logprobs
        cut = [best and Logprob(0, best.logprob, best.top_ids[:count], best.top_logprobs[:count]) for best in told]
        text = TextStream(self._tokenizer)
        pieces = [text.push(token) for token in choice.prompt]
        pieces[-1] += text.flush()
        return list(zip(choice.prompt, cut, strict=True)), pieces

    def with_logprobs(self, choice: Choice, text: bytes, logprob: Logprob) -> bytes:
        """A chunk of text with the log probability of the token that completed it."""
        offset = self._offsets[choice.index]
        self._offsets[choice.index] += len(unescaped(text).decode())
        shown = json_value(self._shown([(choice.generated[-1], logprob)], [offset]))
        return self._chunk(choice, text, shown)

    def _chunk(self, choice: Choice, text: bytes, logprobs: bytes) -> bytes:
        chunk = b',"choices":[{"index":%d,"text":"%b","logprobs":%b,"finish_reason":null}]' % (
            choice.index,
            text,
            logprobs,
        )
        return self._head + chunk + self._tail

    def choice_end(self, choice: Choice) -> list[Event]:
        """Empty text with the reason."""
        reason = msgspec.json.encode(choice.reason)
        shown = b',"choices":[{"index":%d,"text":"","logprobs":null,"finish_reason":%b}]' % (choice.index, reason)
        return [Event(choice.index, b"", self._head + shown + self._tail)]

    def closing(self, stream: Stream, end: Outcome) -> list[Event]:
        """See `closing_events`."""
        return closing_events(stream, end, self._head if self._include_usage else None)

    def whole(self, stream: Stream) -> bytes:
        """One text_completion object."""
        choices = [self._whole_choice(choice) for choice in stream.choices]
        rest = msgspec.json.encode({"choices": choices, "usage": usage_of(stream)})
        return self._head + b"," + rest[1:]

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "index": choice.index,
            "text": self._echoes[choice.index] + "".join(choice.shown or ()),
            "logprobs": self._whole_logprobs(choice),
            "finish_reason": choice.reason,
        }
        if self._prompt_logprobs is not None:
            shown["prompt_logprobs"] = shown_prompt_logprobs(self._tokenizer, choice, self._prompt_logprobs)
        return shown

    def _whole_logprobs(self, choice: Choice) -> dict[str, list[Any]] | None:
        if choice.sampling.logprobs < 0 or choice.logprobs is None:
            return None
        text = TextStream(self._tokenizer)
        generated = [text.push(token) for token, _ in choice.logprobs]
        if not self._echo_logprobs:
            return self._shown(choice.logprobs, _offsets(generated, len(self._echoes[choice.index])))
        told, pieces = self._prompt_of(choice)
        return self._shown([*told, *choice.logprobs], _offsets([*pieces, *generated], 0))

    def _shown(self, logprobs: Many[tuple[int, Logprob | None]], offsets: list[int]) -> dict[str, list[Any]]:
        """Parallel lists, one item for each token; offsets are characters from the text's start."""
        return {
            "tokens": [self._tokenizer.text_of(token) for token, _ in logprobs],
            "token_logprobs": [best and best.logprob for _, best in logprobs],
            "top_logprobs": [
                best and {self._tokenizer.text_of(i): x for i, x in zip(best.top_ids, best.top_logprobs, strict=True)}
                for _, best in logprobs
            ],
            "text_offset": offsets,
        }


def _offsets(pieces: list[str], first: int) -> list[int]:
    """Where each piece starts, in characters."""
    return list(accumulate(map(len, pieces), initial=first))[:-1]


async def completions(generation: Generation, call: Call) -> Response | Streaming:
    """POST /v1/completions. Raises ApiError."""
    body = call.body
    generation.check_fits(ids_in_prompt(body), "prompt")  # before anything is made of them
    request = parse(body, CompletionRequest, ids=generation.ids_max)
    grammar, parts = await plan_completion(generation, request, "completions")
    return await generation.answer(call, request, grammar, parts)


async def plan_completion(
    generation: Generation, request: CompletionRequest, api: str
) -> tuple[CompletionGrammar, list[Part]]:
    """The grammar and the sequences of a completion request. Raises ApiError."""
    generation.check_model(request.model)
    refuse_streamed_prompt_logprobs(request, request.prompt_logprobs, api)
    prompts = await _encode_prompts(generation, request.prompt)
    logprobs = -1 if request.logprobs is None else request.logprobs
    told = max(logprobs if request.echo else -1, -1 if request.prompt_logprobs is None else request.prompt_logprobs)
    parts = generation.parts(request, prompts, max_tokens=request.max_tokens, logprobs=logprobs, prompt_logprobs=told)
    texts = [generation.model.tokenizer.decode(prompt) if request.echo else "" for prompt in prompts]
    echoes = [texts[part.sampling.prompt_index] for part in parts]
    options = request.stream_options
    include_usage = bool(options and options.include_usage)
    grammar = CompletionGrammar(
        api,
        generation.model.name,
        generation.model.tokenizer,
        echoes,
        include_usage=include_usage,
        echo_logprobs=bool(request.echo) and logprobs >= 0,
        prompt_logprobs=request.prompt_logprobs,
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
    chars = 0  # so far
    for index, item in enumerate(given):
        path = "prompt" if len(given) == 1 else f"prompt.{index}"
        if isinstance(item, str):
            prompts.append(await _encode_text(generation, item, path, chars))
            chars += len(item)
        elif isinstance(item, list) and _are_ids(item):
            generation.check_ids(item, path)
            prompts.append(item)
        else:
            raise invalid(path, f"{path} must be a string, or a list of token ids")
    return prompts


async def _encode_text(generation: Generation, text: str, path: str, before: int) -> list[int]:
    if not text:
        raise invalid(path, f"{path} is empty")
    tokenizer = generation.model.tokenizer
    try:
        return await generation.encode_sized(len(text), lambda: tokenizer.encode(text), path, beside=before)
    except ValueError as error:
        raise invalid(path, str(error)) from None


def _are_ids(value: list[Any]) -> bool:
    return set(map(type, value)) == {int}
