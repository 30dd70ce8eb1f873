"""GET /v1/generate?prompt=…: a generation that EventSource and a bare curl can start.

`prompt` is one chat turn, or with raw=1 a prompt as it is; the answer has the chunks of chat. With
`Accept: application/json` the answer is 202 and the stream's id, to be polled; 400 where `--resume-ttl` is 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from urllib.parse import parse_qsl

import msgspec

from server.api.errors import ApiError, invalid
from server.api.generation import PLAIN, SSE, Generation, check_one_choice, framing_named, streaming
from server.api.openai_chat import ChatGrammar
from server.api.polling import poller_of
from server.api.types import GenerationFields, convert
from server.http import Call, Response, Streaming, json_response
from server.table import Part

# More parameters than there are fields are a slip, or work for nothing.
QUERY_FIELDS_MAX = 64


class GenerateRequest(GenerationFields, kw_only=True):
    """The query's fields; those of chat completions that fit in a query mean the same."""

    prompt: str
    raw: bool | None = None


async def generate(generation: Generation, call: Call) -> Response | Streaming:
    """GET /v1/generate. Raises ApiError."""
    accept = call.header(b"accept")
    kind = framing_named(accept)
    polls = kind is None and "application/json" in accept
    if polls and generation.table.limits.resume_ttl_s <= 0:
        raise _no_polls()
    request, grammar, parts = await plan_generate(generation, query_fields(call.query), "generate")
    if kind == PLAIN:
        check_one_choice(parts)
    stream = generation.start(call, request, grammar, parts, collect=False)
    if polls:
        stream.framing = SSE
        poller_of(generation.table, stream).renew_lease()
        return json_response({"stream": stream.id}, 202, ((b"X-Stream-Id", stream.id.encode()),))
    return streaming(stream, kind or SSE)


async def plan_generate(
    generation: Generation, fields: dict[str, str], api: str
) -> tuple[GenerateRequest, ChatGrammar, list[Part]]:
    """The grammar and the sequences of a request whose fields stand in a query. Raises ApiError."""
    request = _parse(fields)
    generation.check_model(request.model)
    if request.raw:
        tokenizer = generation.model.tokenizer
        try:
            text = request.prompt
            prompt = await generation.encode_sized(len(text), lambda: tokenizer.encode(text), "prompt")
        except ValueError as error:
            raise invalid("prompt", str(error)) from None
    else:
        prompt = await generation.encode_turns([{"role": "user", "content": request.prompt}], "prompt")
    parts = generation.parts(request, [prompt], max_tokens=request.max_tokens)
    options = request.stream_options
    grammar = ChatGrammar(
        api,
        generation.model.name,
        generation.model.tokenizer,
        choices=len(parts),
        include_usage=bool(options and options.include_usage),
    )
    return request, grammar, parts


def query_fields(query: str, *, lists: Collection[str] = ()) -> dict[str, str]:
    """The parameters of a query but those in `lists`. Raises ApiError, also for one that is given twice."""
    pairs = [(name, value) for name, value in query_pairs(query) if name not in lists]
    fields = dict(pairs)
    if len(fields) < len(pairs):
        name = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise invalid(name, f"{name} is given more than once")
    return fields


def query_pairs(query: str) -> list[tuple[str, str]]:
    """The parameters of a query, in their order. Raises ApiError."""
    try:
        return parse_qsl(query, keep_blank_values=True, max_num_fields=QUERY_FIELDS_MAX, errors="strict")
    except UnicodeDecodeError:
        raise invalid(None, "the query is not valid UTF-8") from None
    except ValueError:
        raise invalid(None, f"the query has more than {QUERY_FIELDS_MAX} parameters") from None


def _no_polls() -> ApiError:
    """Between two polls nobody is connected, and without `--resume-ttl` a stream ends at once then."""
    message = "this server keeps no stream between two polls (--resume-ttl 0); text/event-stream is streamed"
    return invalid("Accept", message, "polling_off")


def _parse(fields: dict[str, str]) -> GenerateRequest:
    fields.pop("token", None)  # access tokens of browsers; never a field of the request
    values: dict[str, object] = dict(fields)
    if "stop_token_ids" in fields:
        values["stop_token_ids"] = fields["stop_token_ids"].split(",")
    for name in ("stream_options", "metadata", "logit_bias"):
        if name in fields:
            values[name] = _json(name, fields[name])
    values["stream"] = True  # it always does
    return convert(values, GenerateRequest, strict=False)


def _json(name: str, text: str) -> object:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid(name, f"{name} is not valid JSON: {error}") from None
