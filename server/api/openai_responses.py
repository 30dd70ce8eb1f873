"""/v1/responses: create (streamed, whole or in the background), retrieve, stream again, cancel, delete, input items."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from protocols.escape import json_value
from server.api import streams
from server.api.errors import ApiError, invalid
from server.api.generate import query_fields, query_pairs
from server.api.generation import SSE, Generation, collected, framing_asked, framing_named, streaming
from server.api.response_grammar import ResponseGrammar
from server.api.response_items import Item, read_items, turns_of
from server.api.response_store import Stored, conversation
from server.api.response_tools import json_form, response_tool_use
from server.api.response_types import LOGPROBS, ResponseRequest, parse_response
from server.api.structure import answer_grammar
from server.api.tool_use import call_format
from server.api.types import MESSAGES_MAX
from server.elsewhere import Told, Unreachable
from server.http import Call, Response, Streaming, json_response
from server.metrics import Metrics
from server.outcome import CANCELLED, Outcome
from server.readers import Background
from server.stream import Stream
from server.tools.formats import CallFormat

ITEMS_PAGE, ITEMS_PAGE_MAX = 20, 100  # OpenAI's own
INCLUDE = ("include", "include[]")  # a list in a query, as SDKs write it


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a request makes of a conversation."""

    items: list[Item]
    prompt: list[int]
    calls: CallFormat | None
    rules: str  # the grammar that the answer must follow


async def create(generation: Generation, call: Call) -> Response | Streaming:
    """POST /v1/responses. Raises ApiError."""
    request = parse_response(call.body)
    asked = await _read(generation, call, request)
    model, limit, calls = generation.model, request.max_output_tokens, asked.calls
    logprobs = _logprobs(request, calls)
    grammar = ResponseGrammar(request, model.name, model.tokenizer, may_call=calls is not None)
    parts = generation.parts(
        request,
        [asked.prompt],
        max_tokens=limit,
        logprobs=logprobs,
        param="input",
        calls=calls,
        grammar=asked.rules,
    )
    kind = framing_asked(call, parts) if request.stream else ""
    stream = generation.start(call, request, grammar, parts, collect=True)
    if grammar.response.store:
        generation.responses.keep(grammar.response_id, json_value(asked.items), stream)
    if request.background:
        Background(stream).begin()
    if request.stream:
        return streaming(stream, kind)
    return _as_it_is(stream) if request.background else await collected(call, stream)


async def count_input(generation: Generation, call: Call) -> Response:
    """POST /v1/responses/input_tokens: what the prompt of such a request would be. Raises ApiError."""
    asked = await _read(generation, call, parse_response(call.body))
    return json_response({"object": "response.input_tokens", "input_tokens": len(asked.prompt)})


async def _read(generation: Generation, call: Call, request: ResponseRequest) -> _Asked:
    generation.check_model(request.model)
    store = generation.responses
    visiting = await _visiting_items(generation, call, request.input)
    given = read_items(request.input, lambda id: visiting.get(id) or store.find_item(id, call.key))
    items = await _earlier(generation, call, request.previous_response_id) + given
    if len(items) > MESSAGES_MAX:
        raise invalid("input", f"the conversation holds {len(items)} items; at most {MESSAGES_MAX} are allowed")
    calls = call_format(generation.model, use := response_tool_use(request))
    rules = await answer_grammar(generation, use, json_form(request))
    turns = turns_of(items, request.instructions)
    prompt = await generation.encode_turns(turns, "input", tools=use.shown if use else None)
    return _Asked(items, prompt, calls, rules)


def again(call: Call, stream: Stream) -> Response | None:
    """The answer to a request that is sent again with its Idempotency-Key, where it isn't any API's."""
    request = parse_response(call.body)
    return _as_it_is(stream) if request.background and not request.stream else None


def _as_it_is(stream: Stream) -> Response:
    return Response(200, stream.grammar.whole(stream), headers=((b"X-Stream-Id", stream.id.encode()),))


def _logprobs(request: ResponseRequest, calls: CallFormat | None) -> int:
    count = request.top_logprobs or 0
    if not count and LOGPROBS not in (request.include or ()):
        return -1
    if calls is not None:
        param = "top_logprobs" if count else "include"
        raise invalid(
            param, "log probabilities are not shown of an answer that may call tools", "unsupported_parameter"
        )
    return count


async def _earlier(generation: Generation, call: Call, id: str | None) -> list[Item]:
    """The conversation that a response goes on from."""
    if id is None:
        return []
    param = "previous_response_id"
    stored: Stored | Told | None = generation.responses.find(id, call.key)
    if (home := generation.elsewhere.home_of(id)) is not None:
        with suppress(Unreachable):
            stored = await generation.elsewhere.stored(home, call.key, id)
    if stored is None:
        raise invalid(param, f"there is no response {id[:100]!r} here, or no longer", "previous_response_not_found")
    if not stored.final:
        raise invalid(param, "the previous response is still in progress", "previous_response_in_progress")
    status = msgspec.json.decode(stored.final)["status"]
    if status not in ("completed", "incomplete"):
        raise invalid(param, f"the previous response is {status}, and has no answer to go on from")
    return conversation(stored.items, stored.final)


async def _visiting_items(generation: Generation, call: Call, given: object) -> dict[str, Item]:
    """The items that a request's input refers to, and other processes have."""
    found: dict[str, Item] = {}
    for item in given if isinstance(given, list) else ():
        id = item.get("id") if isinstance(item, dict) and item.get("type") in (None, "item_reference") else None
        if isinstance(id, str) and (home := generation.elsewhere.home_of(id)) is not None:
            with suppress(Unreachable):
                if known := await generation.elsewhere.item(home, call.key, id):
                    found[id] = known
    return found


# What was begun


def retrieve(generation: Generation, metrics: Metrics, call: Call, id: str) -> Response | Streaming:
    """GET /v1/responses/{id}, as it is or as a stream from `starting_after` on. Raises ApiError."""
    included = [value for name, value in query_pairs(call.query) if name in INCLUDE]
    fields = query_fields(call.query, lists=INCLUDE)
    unknown = fields.keys() - {"stream", "starting_after", "include_obfuscation", "token"}
    if unknown:
        name = min(unknown)
        raise invalid(name, f"{name} is not a parameter; stream and starting_after are", "unknown_parameter")
    if any(value != LOGPROBS for value in included):
        raise invalid("include", f"only {LOGPROBS!r} can be included", "unsupported_parameter")
    stored = _find(generation, call, id)
    if not _flag(fields, "stream"):
        if "starting_after" in fields:
            raise invalid("starting_after", "starting_after is only allowed when stream is true")
        return _shown(stored)
    stream = streams.find(generation, metrics, call, stored.stream_id)
    after = streams.position(call, fields, stream.id, "starting_after")
    kind = framing_named(call.header(b"accept")) or SSE
    return streams.resume(generation, metrics, stream, kind, after, past_end=204)


def cancel(generation: Generation, call: Call, id: str) -> Response:
    """POST /v1/responses/{id}/cancel. Cancelling a response that has ended changes nothing. Raises ApiError."""
    stored = _find(generation, call, id)
    if stored.stream is not None:
        stored.stream.finish(Outcome(CANCELLED, "the response was cancelled by its client"))
    return _shown(stored)


def delete(generation: Generation, call: Call, id: str) -> Response:
    """DELETE /v1/responses/{id}; one that is still being made is cancelled. Raises ApiError."""
    stored = _find(generation, call, id)
    stream = generation.table.find(stored.stream_id, call.key)
    generation.responses.drop(stored)
    if stream is not None:
        stream.finish(Outcome(CANCELLED, "the response was deleted by its client"))
        generation.table.forget(stream)
    return json_response({"id": id, "object": "response", "deleted": True})


def input_items(generation: Generation, call: Call, id: str) -> Response:
    """GET /v1/responses/{id}/input_items: what went in, the newest first unless `order=asc`. Raises ApiError."""
    fields = query_fields(call.query, lists=INCLUDE)
    unknown = fields.keys() - {"after", "limit", "order", "token"}
    if unknown:
        name = min(unknown)
        raise invalid(name, f"{name} is not a parameter; after, limit and order are", "unknown_parameter")
    if (order := fields.get("order", "desc")) not in ("asc", "desc"):
        raise invalid("order", "order must be asc or desc")
    limit = int(streams.number(fields, "limit", 1, ITEMS_PAGE_MAX)) if "limit" in fields else ITEMS_PAGE
    items: list[dict[str, Any]] = msgspec.json.decode(_find(generation, call, id).items)
    items = items if order == "asc" else items[::-1]
    if after := fields.get("after"):
        ids = [item["id"] for item in items]
        if after not in ids:
            raise invalid("after", f"this response has no item {after[:100]!r}")
        items = items[ids.index(after) + 1 :]
    page = items[:limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else ("", "")
    body = {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": len(items) > limit}
    return Response(200, json_value(body))


def _find(generation: Generation, call: Call, id: str) -> Stored:
    stored = generation.responses.find(id, call.key)
    if stored is None:
        raise ApiError(404, f"there is no response {id[:100]!r} here, or no longer", code="response_not_found")
    call.stream_id = stored.stream_id
    return stored


def _shown(stored: Stored) -> Response:
    stream = stored.stream
    return Response(200, stored.final if stream is None else stream.grammar.whole(stream))


def _flag(fields: dict[str, str], name: str) -> bool:
    value = fields.get(name, "false").lower()
    if value not in ("true", "false"):
        raise invalid(name, f"{name} must be true or false")
    return value == "true"
