"""From a validated request to a started stream, the same for every API: prompt ids, fit check, sampling, answer."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.tokenizer import Tokenizer
from engine.wire import Hello, Sampling
from server.api import errors
from server.api.errors import ApiError
from server.api.json_checks import BODY_IDS_MAX
from server.api.response_store import ResponseStore
from server.api.types import CHOICES_MAX, PROMPT_LOGPROBS_MAX, GenerationFields, stop_strings
from server.chat import ChatError, ChatTemplate, GuardUnbuilt, encode_chat
from server.elsewhere import Alone, Elsewhere
from server.framing import Framing, Ndjson, Plain, Sse
from server.http import Call, Headers, Response, Streaming
from server.outcome import CANCELLED, EXPIRED, Outcome
from server.readers import Collector
from server.stream import Choice, Grammar, Stream
from server.table import Busy, Part, StreamTable, TextOptions
from server.tools.formats import CallFormat, Turn, written
from server.tools.parser import HERMES, Syntax
from server.tracing import Tracer

# Longer prompts are tokenised in a thread: some milliseconds of the loop's time would delay every stream.
ENCODE_INLINE_CHARS_MAX = 8192
# So many long prompts are tokenised at once; others wait. Each takes memory of many times its own size meanwhile.
ENCODERS_MAX = 2
# Of all prompts of a request, each as often as it has choices: each sequence's is sent to the engine, which names its
# blocks. Where it is more, as many as there are in CHOICES_MAX prompts that fill the context.
SUBMITTED_IDS_MAX = 1_048_576
SSE, NDJSON, PLAIN = "sse", "ndjson", "plain"
FRAMINGS: dict[str, type[Sse | Ndjson | Plain]] = {SSE: Sse, NDJSON: Ndjson, PLAIN: Plain}
_BY_MEDIA_TYPE = {"text/event-stream": SSE, "application/x-ndjson": NDJSON, "text/plain": PLAIN}


_encoders = ThreadPoolExecutor(ENCODERS_MAX, thread_name_prefix="encode")


@dataclass(frozen=True, slots=True)
class Model:
    """What is served."""

    name: str
    hello: Hello
    tokenizer: Tokenizer
    template: ChatTemplate
    created: int  # Unix seconds, for /v1/models
    syntax: Syntax | None = HERMES  # of its tool calls; None: not known


@dataclass(frozen=True, slots=True)
class Generation:
    """Starts streams, and keeps the responses that their clients may come back to."""

    table: StreamTable
    model: Model
    responses: ResponseStore = field(default_factory=ResponseStore)
    tracer: Tracer | None = None
    elsewhere: Elsewhere = field(default_factory=Alone)

    async def encode_sized(
        self, chars: int, encode: Callable[[], list[int]], param: str, *, beside: int = 0
    ) -> list[int]:
        """`encode()`, off the loop when the text has many characters, or together with so many `beside` it: its
        request's other texts, or what a template may leave out. Raises ApiError 400, and does no work, for a text that
        can't fit even if all its tokens were the longest one."""
        if beside + chars <= ENCODE_INLINE_CHARS_MAX:
            return encode()
        least = chars // self.model.tokenizer.piece_bytes_max
        limit = self.model.hello.context_tokens_max
        if least >= limit:
            raise _too_long(f"at least {least}", limit, param)
        return await asyncio.get_running_loop().run_in_executor(_encoders, encode)

    async def encode_turns(
        self, turns: list[dict[str, Any]], param: str, *, tools: list[dict[str, Any]] | None = None, **options: Any
    ) -> list[int]:
        """Ids of a chat's turns, by the model's template, with the options of `encode_chat`. Turns and tools are as
        templates for `transformers` take them. `param`: what they came from. Raises ApiError 400."""
        tokenizer, template = self.model.tokenizer, self.model.template
        options["tools"] = tools
        try:
            shown: Sequence[Turn] = turns if template.takes_tools else written(turns, tools)
            size = sum(map(_chars, turns)) + (len(msgspec.json.encode(tools)) if tools else 0)
            beside = sum([_chars_beside(turn) for turn in turns if len(turn) > 2])  # a few, if any

            def encode() -> list[int]:
                return encode_chat(tokenizer, template, shown, build_guard=False, **options)

            try:
                return await self.encode_sized(size, encode, param, beside=beside)
            except GuardUnbuilt:
                await asyncio.get_running_loop().run_in_executor(_encoders, tokenizer.build_guard)
                return await self.encode_sized(size, encode, param, beside=beside)
        except ChatError as error:
            raise errors.invalid(error.field or param, str(error)) from None
        except RecursionError:  # what could just be decoded, on a stack that was lower by some frames
            raise errors.invalid("tools" if tools else param, "tools or their calls are nested too deeply") from None

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 for a model that isn't served."""
        if name is not None and name != self.model.name:
            message = f"the model {name!r} is not served here; {self.model.name!r} is"
            raise ApiError(404, message, param="model", code="model_not_found")

    @property
    def ids_max(self) -> int:
        """How many token ids a request's body may hold."""
        return max(BODY_IDS_MAX, self.model.hello.context_tokens_max)

    def check_fits(self, ids: int, param: str) -> None:
        """Raises ApiError 400 for a prompt of so many ids that leaves no room for one more token."""
        limit = self.model.hello.context_tokens_max
        if ids >= limit:
            raise _too_long(str(ids), limit, param)

    def check_ids(self, ids: list[int], path: str) -> None:
        """Raises ApiError 400 for an id beyond the vocabulary."""
        size = self.model.hello.vocab_size
        if ids and not 0 <= min(ids) <= max(ids) < size:
            index, id_ = next((index, id_) for index, id_ in enumerate(ids) if not 0 <= id_ < size)
            raise errors.invalid(f"{path}.{index}", f"{id_} is not in the vocabulary of {size} tokens")

    def parts(
        self,
        request: GenerationFields,
        prompts: list[list[int]],
        *,
        max_tokens: int | None,
        logprobs: int = -1,
        prompt_logprobs: int = -1,
        param: str = "prompt",
        calls: CallFormat | None = None,
        grammar: str = "",
    ) -> list[Part]:
        """A sequence for each prompt and choice, all of which fit; `param` names what they came from. Raises ApiError.

        A prompt must leave room for one token; max_tokens beyond the room is cut to it."""
        limit = self.model.hello.context_tokens_max
        sequences = len(prompts) * (request.n or 1)
        if sequences > self.table.limits.queue_max:
            message = f"with n={request.n or 1} for each prompt ({len(prompts)}) the request has {sequences} sequences"
            raise errors.invalid("n", f"{message}; it may have {self.table.limits.queue_max}", "out_of_range")
        if sequences > CHOICES_MAX:
            self._check_together(prompts, request.n or 1, param)
        seed = int.from_bytes(os.urandom(8)) if request.seed is None else request.seed % 2**64
        stop_ids = self._stop_ids(request.stop_token_ids) if request.stop_token_ids else ()
        bias = self._bias(request.logit_bias) if request.logit_bias else ()
        parts: list[Part] = []
        for prompt_index, prompt in enumerate(prompts):
            if not prompt:
                raise errors.invalid(param, "the prompt is empty: it must hold at least one token")
            self.check_fits(len(prompt), param)
            if prompt_logprobs >= 0:
                _check_prompt_logprobs(prompt, prompt_logprobs, param)
            room = limit - len(prompt)
            for choice_index in range(request.n or 1):
                sampling = Sampling(
                    max_tokens=room if max_tokens is None else min(max_tokens, room),
                    temperature=1.0 if request.temperature is None else request.temperature,
                    top_k=max(request.top_k or 0, 0),
                    top_p=1.0 if request.top_p is None else request.top_p,
                    min_p=request.min_p or 0.0,
                    seed=seed,
                    prompt_index=prompt_index,
                    choice_index=choice_index,
                    min_tokens=request.min_tokens or 0,
                    ignore_eos=bool(request.ignore_eos),
                    stop_ids=stop_ids,
                    logprobs=logprobs,
                    frequency_penalty=request.frequency_penalty or 0.0,
                    presence_penalty=request.presence_penalty or 0.0,
                    repetition_penalty=request.repetition_penalty or 1.0,
                    logit_bias=bias,
                    prompt_logprobs=prompt_logprobs,
                    grammar=grammar,
                )
                parts.append(Part(prompt, sampling, calls))
        return parts

    def _check_together(self, prompts: list[list[int]], choices: int, param: str) -> None:
        """Of prompts that fit, more than CHOICES_MAX sequences may be too much. Raises ApiError 400."""
        most = max(SUBMITTED_IDS_MAX, CHOICES_MAX * self.model.hello.context_tokens_max)
        submitted = choices * sum(map(len, prompts))
        if submitted > most:
            message = f"with n={choices} for each prompt the prompts have {submitted:,} tokens; {most:,} are allowed"
            raise errors.invalid(param, message)

    def _stop_ids(self, ids: list[int]) -> tuple[int, ...]:
        self.check_ids(ids, "stop_token_ids")
        return tuple(ids)

    def _bias(self, given: dict[str, float]) -> tuple[tuple[int, float], ...]:
        bias = tuple((int(id_), value) for id_, value in given.items())
        size = self.model.hello.vocab_size
        for id_, _ in bias:
            if id_ >= size:
                raise errors.invalid(f"logit_bias.{id_}", f"{id_} is not in the vocabulary of {size} tokens")
        return bias

    def start(
        self, call: Call, request: GenerationFields, grammar: Grammar, parts: list[Part], *, collect: bool
    ) -> Stream:
        """Start the stream. Raises ApiError 429 or 503 when there is no room."""
        text = TextOptions(stops=stop_strings(request), skip_special=request.skip_special_tokens is not False)
        try:
            stream = self.table.start(
                grammar,
                parts,
                key=call.key,
                request_id=call.request_id,
                client=call.client,
                priority=request.priority or 0,
                text=text,
                collect=collect,
            )
        except Busy as busy:
            raise errors.from_busy(busy) from None
        if self.tracer is not None:
            stream.trace = self.tracer.begin(call, parts, seeded=request.seed is not None)
        call.stream_id = stream.id
        call.began = True
        call.on_stream(stream)
        return stream

    async def answer(
        self, call: Call, request: GenerationFields, grammar: Grammar, parts: list[Part]
    ) -> Response | Streaming:
        """Start a stream and answer with it, piece by piece or whole. Raises ApiError."""
        if request.stream:
            kind = framing_asked(call, parts)
            stream = self.start(call, request, grammar, parts, collect=False)
            return streaming(stream, kind)
        return await collected(call, self.start(call, request, grammar, parts, collect=True))


async def collected(call: Call, stream: Stream) -> Response:
    """The answer in one piece, once there is one. A client that leaves has nothing to come back to, unless it named an
    Idempotency-Key: then its stream waits for it like any other."""
    call.on_whole_answer()
    try:
        await Collector(stream).wait()
    except asyncio.CancelledError:
        if stream.idempotency is None:
            stream.finish(Outcome(CANCELLED, "the client left"))
        raise
    if any(choice.prompt_logprobs for choice in stream.choices):  # megabytes of numbers, for which all would wait
        return await asyncio.get_running_loop().run_in_executor(_encoders, whole, stream)
    return whole(stream)


def framing_asked(call: Call, parts: list[Part]) -> str:
    """The framing of a new stream. Raises ApiError for one that can't show it."""
    kind = framing_named(call.header(b"accept")) or SSE
    if kind == PLAIN:
        check_one_choice(parts)
        if parts[0].calls is not None:
            raise errors.invalid("tools", "text/plain shows text only; take SSE or NDJSON to see calls")
    return kind


def check_one_choice(
    choices: Sized, message: str = "text/plain shows one choice only; take SSE or NDJSON for more", *, param: str = "n"
) -> None:
    """Raises ApiError where the text of several choices could not be told apart."""
    if len(choices) > 1:
        raise errors.invalid(param, message)


def new_created() -> int:
    """Unix seconds, as OpenAI's `created` has them."""
    return int(time.time())


def streaming(stream: Stream, kind: str, cursor: int = 0, *, framing: Framing | None = None) -> Streaming:
    """The answer that shows `stream` from position `cursor` on."""
    headers: list[tuple[bytes, bytes]] = [(b"X-Stream-Id", stream.id.encode())]
    if kind == NDJSON:
        headers.append((b"X-Stream-From", b"%d" % cursor))
    stream.framing = stream.framing or kind
    return Streaming(stream, framing or FRAMINGS[kind](stream), cursor, tuple(headers))


def whole(stream: Stream) -> Response:
    """The answer in one piece, of a stream that has ended."""
    headers: Headers = ((b"X-Stream-Id", stream.id.encode()),)
    end = stream.outcome
    assert end is not None
    if end.success:
        return Response(200, stream.grammar.whole(stream), headers=headers)
    status = 409 if end.kind == CANCELLED else 503 if end.retriable else 504 if end.kind == EXPIRED else 500
    if status == 503:
        headers += ((b"Retry-After", b"2"),)
    return Response(status, stream.grammar.failure(stream, end), headers=headers)


def framing_named(accept: str) -> str | None:
    """The framing that an Accept header wants most of those that it names (RFC 9110 12.5.1); the first of equals."""
    if "," not in accept and ";" not in accept:  # as nearly always
        return _BY_MEDIA_TYPE.get(accept.strip().lower())
    best, most = None, 0.0
    for part in accept.lower().split(","):
        name, *parameters = [each.strip() for each in part.split(";")]
        quality = _quality(parameters)
        if name in _BY_MEDIA_TYPE and quality > most:
            best, most = _BY_MEDIA_TYPE[name], quality
    return best


def _quality(parameters: list[str]) -> float:
    """How much a media range is wanted, by its parameters: from 0 to 1; 1 where they say nothing that can be read."""
    for each in parameters:
        if each.startswith("q="):
            try:
                return min(max(float(each[2:]), 0.0), 1.0)
            except ValueError:
                return 1.0
    return 1.0


def _chars(turn: dict[str, Any]) -> int:
    """About as many as a template writes, or fewer."""
    calls = turn.get("tool_calls")
    return len(turn["content"]) + (len(msgspec.json.encode(calls)) if calls else 0)


def _chars_beside(turn: dict[str, Any]) -> int:
    """Of what a template may write or not: a name, say, or reasoning."""
    return sum([len(value) for name, value in turn.items() if name != "content" and isinstance(value, str)])


def _too_long(tokens: str, limit: int, param: str) -> ApiError:
    message = (
        f"the prompt has {tokens} tokens; with room for one new token at most {limit - 1} fit"
        f" in this model's context of {limit}"
    )
    return errors.invalid(param, message, "context_length_exceeded")


def _check_prompt_logprobs(prompt: list[int], count: int, param: str) -> None:
    numbers = len(prompt) * (count + 1)
    if numbers > PROMPT_LOGPROBS_MAX:
        message = f"log probabilities of this prompt are {numbers} numbers; at most {PROMPT_LOGPROBS_MAX} are told"
        raise errors.invalid(param, message)


def refuse_streamed_prompt_logprobs(request: GenerationFields, count: int | None, api: str) -> None:
    """prompt_logprobs has a place in the whole answer only. Raises ApiError."""
    if count is not None and (request.stream or api == "websocket"):
        message = "prompt_logprobs is not available in a stream; a text completion with echo and logprobs is"
        raise errors.invalid("prompt_logprobs", message)


def shown_prompt_logprobs(tokenizer: Tokenizer, choice: Choice, count: int) -> list[dict[str, Any] | None]:
    """vLLM's form: for each id of the prompt a map from ids, its own and the `count` most likely, to what is known;
    null for the first. A rank is known of the most likely ones only."""
    shown: list[dict[str, Any] | None] = [None]
    for told in choice.prompt_logprobs or ():
        known: dict[int, tuple[float, int | None]] = {choice.prompt[told.index]: (told.logprob, None)}
        for rank, (id_, logprob) in enumerate(zip(told.top_ids[:count], told.top_logprobs, strict=False), 1):
            known[id_] = (logprob, rank)
        shown.append(
            {
                str(id_): {"logprob": logprob, "rank": rank, "decoded_token": tokenizer.text_of(id_)}
                for id_, (logprob, rank) in known.items()
            }
        )
    return shown
