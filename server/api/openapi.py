"""GET /openapi.json: an OpenAPI 3.1 description of every route, from the types that validate requests.

The bounds of numbers and the fields that are refused come from the tables that refuse them. `ROUTES` has an entry for
each route and method of the program; a test compares the two.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.version import VERSION
from server.api import answers
from server.api.anthropic_answers import AnthropicError, AnyMessageEvent, MessageObject, TokenCount
from server.api.anthropic_types import CountTokensRequest, MessagesRequest
from server.api.generate import GenerateRequest
from server.api.response_items import FunctionCallItem, FunctionOutputItem, ItemReference, MessageItem
from server.api.response_tools import AllowedTools, FunctionTool, NamedTool
from server.api.response_types import AnyResponseEvent, ResponseObject, ResponseRequest
from server.api.tokens import DetokenizeRequest, TokenizeRequest
from server.api.types import RANGES, ChatRequest, CompletionRequest, GenerationFields

SSE, NDJSON, PLAIN, JSON = "text/event-stream", "application/x-ndjson", "text/plain", "application/json"
_REFERENCE = "#/components/schemas/{name}"
_REFUSALS = {
    "400": "The request is wrong; the error names the field.",
    "401": "The key is not known.",
    "403": "This client may not ask.",
    "404": "There is no such thing, or it is another client's.",
    "409": "The generation was cancelled.",
    "410": "It is no longer held.",
    "413": "The body is too large.",
    "415": "The body is not JSON.",
    "422": "The Idempotency-Key was used for another request.",
    "429": "Too many at once, or in a minute; Retry-After says when to come back.",
    "500": "The server failed.",
    "503": "The server has no room, or is going to stop; Retry-After says when to come back.",
}
_LAST_EVENT_ID = {
    "name": "Last-Event-ID",
    "in": "header",
    "description": "The last position that the client has: a stream's id, a colon and a number.",
    "schema": {"type": "string"},
}
_IDEMPOTENCY_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "description": "The same request under the same key finds the generation that it began.",
    "schema": {"type": "string", "maxLength": 255},
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of a route. `events`: the types of the events, where the answer may be a stream. `query`: a type whose
    fields are parameters, or the parameters' schemas by name."""

    summary: str
    body: Any = None
    answer: Any = None
    events: tuple[Any, ...] = ()
    query: Any = None
    starts: bool = False  # begins generations
    status: int = 200
    media_type: str = JSON  # of the answer in one piece
    error: Any = answers.ErrorAnswer
    others: dict[str, str] = field(default_factory=dict)  # other statuses without a body, and when they come


_WHOLE = {"type": "integer", "minimum": 0}
_AFTER = {"type": "integer", "minimum": -1, "description": "The last position that the client has."}
ROUTES: dict[str, dict[str, Operation]] = {
    "/v1/chat/completions": {
        "POST": Operation(
            "A chat completion.",
            ChatRequest,
            answers.ChatCompletion,
            (answers.ChatChunk, answers.ErrorAnswer),
            starts=True,
        )
    },
    "/v1/completions": {
        "POST": Operation(
            "A text completion.",
            CompletionRequest,
            answers.TextCompletion,
            (answers.TextCompletion, answers.ErrorAnswer),
            starts=True,
        )
    },
    "/v1/responses": {
        "POST": Operation("A response.", ResponseRequest, ResponseObject, (AnyResponseEvent,), starts=True)
    },
    "/v1/responses/input_tokens": {"POST": Operation("The tokens of a prompt.", ResponseRequest, answers.InputTokens)},
    "/v1/responses/*": {
        "GET": Operation(
            "A response as it is, or its stream.",
            answer=ResponseObject,
            events=(AnyResponseEvent,),
            query={
                "stream": {"type": "boolean"},
                "starting_after": _AFTER,
                "include": {"type": "array", "items": {"const": "message.output_text.logprobs"}},
                "include_obfuscation": {"type": "boolean"},
            },
            others={"204": "Nothing comes behind this position."},
        ),
        "DELETE": Operation("Delete a response, and cancel it if need be.", answer=answers.DeletedResponse),
    },
    "/v1/responses/*/cancel": {"POST": Operation("Cancel a response.", answer=ResponseObject)},
    "/v1/responses/*/input_items": {
        "GET": Operation(
            "What went into a response.",
            answer=answers.ItemList,
            query={
                "after": {"type": "string"},
                "limit": {"type": "integer", "minimum": 1, "maximum": 100},
                "order": {"enum": ["asc", "desc"]},
                "include": {"type": "array", "items": {"type": "string"}},
            },
        )
    },
    "/v1/messages": {
        "POST": Operation(
            "A message, as Anthropic's API has it.",
            MessagesRequest,
            MessageObject,
            (AnyMessageEvent,),
            starts=True,
            error=AnthropicError,
        )
    },
    "/v1/messages/count_tokens": {
        "POST": Operation("The tokens of a prompt.", CountTokensRequest, TokenCount, error=AnthropicError)
    },
    "/tokenize": {"POST": Operation("What a prompt or a chat becomes.", TokenizeRequest, answers.Tokens)},
    "/detokenize": {"POST": Operation("What token ids say.", DetokenizeRequest, answers.Prompt)},
    "/v1/generate": {
        "GET": Operation(
            "A streamed chat turn, for EventSource and curl. With Accept: application/json it is to be polled.",
            answer=answers.StartedStream,
            events=(answers.ChatChunk, answers.ErrorAnswer),
            query=GenerateRequest,
            starts=True,
            status=202,
        )
    },
    "/v1/streams/*": {
        "GET": Operation(
            "Come back to a stream; with Accept: application/json, poll it.",
            answer=answers.PolledStream,
            events=(answers.ChatChunk, answers.TextCompletion, AnyResponseEvent, AnyMessageEvent, answers.ErrorAnswer),
            query={
                "after": _AFTER,
                "after_bytes": {**_WHOLE, "description": "For text/plain: bytes of text that the client has."},
                "wait": {
                    "type": "number",
                    "minimum": 0,
                    "maximum": 30,
                    "description": "Seconds that a poll waits for news.",
                },
            },
            others={"204": "Nothing comes behind this position."},
        ),
        "DELETE": Operation("Cancel a stream.", answer=answers.EndedStream),
    },
    "/v1/ws": {
        "GET": Operation(
            "A WebSocket of many generations.",
            others={"101": "The WebSocket is open.", "426": "This route speaks WebSocket."},
        )
    },
    "/v1/models": {"GET": Operation("The models that are served.", answer=answers.ModelList)},
    "/v1/models/*": {"GET": Operation("One of them.", answer=answers.ModelCard)},
    "/v1/access-tokens": {
        "POST": Operation("A token for EventSource and WebSocket, to stand in an address.", answer=answers.AccessToken)
    },
    "/health": {"GET": Operation("Whether the process answers.", answer=answers.Status)},
    "/ready": {"GET": Operation("Whether new generations are taken.", answer=answers.Status)},
    "/metrics": {"GET": Operation("Prometheus metrics.", answer=str, media_type=PLAIN)},
    "/status": {"GET": Operation("Streams, engine and KV pool at this moment.", answer=answers.ServerNow)},
    "/openapi.json": {"GET": Operation("This document.", answer=dict[str, Any])},
}


# Of fields whose parts are read one by one, with errors of their own, the types that read them.
_ITEMS = (MessageItem, FunctionCallItem, FunctionOutputItem, ItemReference)
_READ_LATER = (*_ITEMS, FunctionTool, NamedTool, AllowedTools)


def document(paths: Iterable[tuple[str, Iterable[str]]]) -> bytes:
    """The description of the routes with these paths and methods."""
    found = [(path, method, ROUTES[path][method]) for path, methods in paths for method in methods]
    kinds = _Kinds(operation for _, _, operation in found)
    described: dict[str, dict[str, Any]] = {}
    for path, method, operation in found:
        place = described.setdefault(path.replace("*", "{id}"), {})
        place[method.lower()] = _described(path, method, operation, kinds)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "Sluice",
                "version": VERSION,
                "description": "Streams the tokens of a language model.",
                "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            },
            "paths": described,
            "components": {
                "schemas": kinds.components,
                "securitySchemes": {
                    "bearer": {"type": "http", "scheme": "bearer"},
                    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                },
            },
            "security": [{}, {"bearer": []}, {"key": []}],
        }
    )


class _Kinds:
    """The schemas of all types, narrowed by what is checked beside them."""

    def __init__(self, operations: Iterable[Operation]) -> None:
        kinds: dict[Any, None] = {}
        for operation in operations:
            parts = (operation.body, operation.answer, *operation.events, operation.query, operation.error)
            kinds.update(dict.fromkeys(kind for kind in parts if kind is not None and not isinstance(kind, dict)))
        kinds.update(dict.fromkeys(_READ_LATER))
        schemas, self.components = msgspec.json.schema_components(list(kinds), ref_template=_REFERENCE)
        self._schemas = dict(zip(kinds, schemas, strict=True))
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, GenerationFields):
                _bound(self.properties(kind)[0])
            if isinstance(kind, type) and issubclass(kind, GenerationFields | CountTokensRequest):
                _narrow(self.properties(kind)[0], kind.off())
        self._describe_response_request()

    def _describe_response_request(self) -> None:
        properties, _ = self.properties(ResponseRequest)
        items = {"type": "array", "minItems": 1, "items": {"anyOf": [self.of(kind) for kind in _ITEMS]}}
        properties["input"] = {"anyOf": [{"type": "string"}, items]}
        tools = {"type": "array", "items": self.of(FunctionTool)}
        properties["tools"] = {"anyOf": [tools, {"type": "null"}]}
        choices = [{"enum": _CHOICES}, self.of(NamedTool), self.of(AllowedTools)]
        properties["tool_choice"] = {"anyOf": choices}

    def of(self, kind: Any) -> dict[str, Any]:
        """A type's schema, mostly a reference."""
        schema: dict[str, Any] = self._schemas[kind]
        return schema

    def properties(self, kind: Any) -> tuple[dict[str, Any], list[str]]:
        """A struct's fields, and those that must be there."""
        schema = self.components[kind.__name__]
        return schema["properties"], schema.get("required", [])


_CHOICES = ["none", "auto", "required", None]


def _bound(properties: dict[str, Any]) -> None:
    for name, span in RANGES.items():
        if name in properties and "boolean" not in str(properties[name]):
            properties[name]["exclusiveMinimum" if span.open_below else "minimum"] = span.low
            if span.high is not None:
                properties[name]["maximum"] = span.high
    if "tool_choice" in properties:
        properties["tool_choice"] = {"anyOf": [{"enum": _CHOICES}, {"type": "object"}]}


def _narrow(properties: dict[str, Any], off: dict[str, tuple[Any, ...]]) -> None:
    for name, values in off.items():
        if name in properties:
            properties[name] = {"enum": [*values, None], "description": "Not supported but for these values."}


def _described(path: str, method: str, operation: Operation, kinds: _Kinds) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path.replace('*', 'id')}"),
        "parameters": _parameters(path, method, operation, kinds),
        "responses": _responses(operation, kinds),
    }
    if operation.body is not None:
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": kinds.of(operation.body)}}}
    return described


def _parameters(path: str, method: str, operation: Operation, kinds: _Kinds) -> list[dict[str, Any]]:
    parameters: list[dict[str, Any]] = []
    if "*" in path:
        parameters.append({"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}})
    if operation.query is None or isinstance(operation.query, dict):
        query, required = operation.query or {}, list[str]()
    else:
        query, required = kinds.properties(operation.query)
    for name, schema in query.items():
        parameters.append({"name": name, "in": "query", "required": name in required, **_in_query(schema)})
    if operation.events:
        parameters.append(_LAST_EVENT_ID)
    if operation.starts:
        parameters.append(_IDEMPOTENCY_KEY)
    return parameters


def _in_query(schema: dict[str, Any]) -> dict[str, Any]:
    """Objects stand in a query as JSON, lists with commas between."""
    shown = msgspec.json.encode(schema)
    if b'"object"' in shown or b"$ref" in shown:
        return {"content": {JSON: {"schema": schema}}}
    return {"schema": schema, **({"style": "form", "explode": False} if b'"array"' in shown else {})}


def _responses(operation: Operation, kinds: _Kinds) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if operation.answer is not None:
        content[operation.media_type] = {"schema": kinds.of(operation.answer)}
    responses: dict[str, Any] = {}
    if content:
        responses[str(operation.status)] = {"description": "The answer.", "content": content}
    if operation.events:
        kind = {"anyOf": [kinds.of(event) for event in operation.events]}
        of_events = {"x-event": kind}  # OpenAPI 3.1 has no word for the schema of one event of many
        streamed = responses.setdefault("200", {"description": "The answer.", "content": {}})
        streamed["content"].update({SSE: of_events, NDJSON: of_events, PLAIN: {"schema": {"type": "string"}}})
    for status, text in operation.others.items():
        responses[status] = {"description": text}
    error = {JSON: {"schema": kinds.of(operation.error)}}
    for status, text in _REFUSALS.items():
        responses.setdefault(status, {"description": text, "content": error})
    responses["default"] = {"description": "Any other refusal.", "content": error}
    return responses
