"""`/openapi.json` (issue 7, item 5): it names every route, its schemas are sound, and what the server takes and answers
is what it says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from server.api.openapi import ROUTES
from tests.support.readings import EVENT_STREAM, NDJSON
from tests.support.serving import Answer, Server, chat
from tests.test_request_fields import TABLES, VLLM

pytestmark = pytest.mark.synthetic

JSON = "application/json"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    scripts: list[dict[str, Any]] = [
        {"match": "fails", "tokens": ["a", "b", {"error": "on purpose"}]},
        {"match": "call", "tokens": ["a", '<tool_call>{"name": "f", "arguments": {"b": ', "1}}</tool_call>"]},
        {"match": "", "tokens": ["a", "b", "c"]},
    ]
    with Server(scripts=scripts) as running:
        yield running


@pytest.fixture(scope="module")
def document(server: Server) -> Any:
    return server.ask("GET", "/openapi.json").json()


def described(document: Any, method: str, path: str) -> Any:
    return document["paths"][path][method.lower()]


def faults(document: Any, schema: Any, value: Any) -> list[str]:
    """What is wrong with a value."""
    schema = {**schema, "components": document["components"]}
    return [error.message for error in Draft202012Validator(schema).iter_errors(value)]


def check(document: Any, method: str, path: str, answer: Answer) -> None:
    """An answer is of the form that the document has for its route, status and media type."""
    response = described(document, method, path)["responses"][str(answer.status)]
    kind = (answer.header("content-type") or "").partition(";")[0]
    content = response["content"][kind]
    assert answer.end == "whole"
    if "x-event" in content:
        values = answer.chunks() if kind == EVENT_STREAM[1] else answer.lines()[:-1]
        assert values
    else:
        values = [answer.json() if kind == JSON else answer.body.decode()]
    for value in values:
        assert not faults(document, content.get("x-event") or content["schema"], value), value


def test_every_route_is_described_and_no_other(server: Server, document: Any) -> None:
    """OPTIONS tells the methods that a route has."""
    assert document["openapi"].startswith("3.1.")
    told = {path: {method.upper() for method in methods} for path, methods in document["paths"].items()}
    assert told == {path.replace("*", "{id}"): set(methods) for path, methods in ROUTES.items()}
    for path, methods in told.items():
        allowed = server.ask("OPTIONS", path.replace("{id}", "x")).header("allow") or ""
        assert {*allowed.split(", ")} == {*methods, "OPTIONS"}


def test_its_schemas_are_sound(document: Any) -> None:
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    references = [text.split('"')[0] for text in str(document).replace("'", '"').split("#/components/schemas/")[1:]]
    assert references and set(references) <= set(schemas)
    names = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values()]
    assert len(names) == len(set(names))


CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = "/v1/messages"


def bodies(text: str) -> dict[str, dict[str, Any]]:
    """For each route, the request with one turn."""
    message = {**chat(text), "model": "synthetic", "max_tokens": 8}
    return {CHAT: chat(text), COMPLETIONS: {"prompt": text}, RESPONSES: {"input": text}, MESSAGES: message}


HI, FAILS = bodies("hi"), bodies("fails")
LOGPROBS: dict[str, dict[str, Any]] = {
    CHAT: {"logprobs": True, "top_logprobs": 2},
    COMPLETIONS: {"logprobs": 2, "echo": True},
    RESPONSES: {"top_logprobs": 2},
    MESSAGES: {"stop_sequences": ["c"]},
}


@pytest.mark.parametrize("path", HI)
@pytest.mark.parametrize("stream", [False, True])
def test_generations_are_answered_as_it_says(server: Server, document: Any, path: str, stream: bool) -> None:
    usage = {"stream_options": {"include_usage": True}} if stream and path != MESSAGES else {}
    for body in (HI[path], HI[path] | LOGPROBS[path], HI[path] | usage, FAILS[path], HI[path] | {"model": 7}):
        for accept in (EVENT_STREAM, NDJSON):
            check(document, "POST", path, server.ask("POST", path, {**body, "stream": stream}, [accept]))
    if not stream and path in (CHAT, COMPLETIONS):
        check(document, "POST", path, server.ask("POST", path, {**HI[path], "prompt_logprobs": 2, "n": 2}))
    if not stream and path == RESPONSES:
        check(document, "POST", path, server.ask("POST", path, {**HI[path], "background": True}))


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_answered_as_it_says(server: Server, document: Any, path: str, stream: bool) -> None:
    function: dict[str, Any] = {"name": "f", "parameters": {"type": "object"}}
    tools: dict[str, Any] = {
        CHAT: {"type": "function", "function": function},
        RESPONSES: {"type": "function", **function},
        MESSAGES: {"name": "f", "input_schema": {"type": "object"}},
    }
    answer = server.ask("POST", path, {**bodies("call")[path], "tools": [tools[path]], "stream": stream})
    assert b"arguments" in answer.body or b"tool_use" in answer.body
    check(document, "POST", path, answer)


def test_other_routes_answer_as_it_says(server: Server, document: Any) -> None:
    begun = server.ask("POST", RESPONSES, HI[RESPONSES])
    name, stream = begun.json()["id"], begun.header("x-stream-id")
    poll = [("Accept", JSON)]
    for method, path, target, headers in (
        ("GET", "/v1/generate", "/v1/generate?prompt=hi", []),
        ("GET", "/v1/generate", "/v1/generate?prompt=hi", poll),
        ("GET", "/v1/generate", "/v1/generate?prompt=hi&n=x", poll),
        ("GET", "/v1/streams/{id}", f"/v1/streams/{stream}", []),
        ("GET", "/v1/streams/{id}", f"/v1/streams/{stream}", poll),
        ("GET", "/v1/streams/{id}", "/v1/streams/nobody", []),
        ("DELETE", "/v1/streams/{id}", f"/v1/streams/{stream}", []),
        ("GET", "/v1/models", "/v1/models", []),
        ("GET", "/v1/models/{id}", "/v1/models/synthetic", []),
        ("GET", "/v1/models/{id}", "/v1/models/other", []),
        ("POST", "/v1/access-tokens", "/v1/access-tokens", []),
        ("GET", "/health", "/health", []),
        ("GET", "/ready", "/ready", []),
        ("GET", "/metrics", "/metrics", []),
        ("GET", "/status", "/status", []),
        ("GET", "/openapi.json", "/openapi.json", []),
        ("GET", "/v1/responses/{id}", f"/v1/responses/{name}", []),
        ("GET", "/v1/responses/{id}", f"/v1/responses/{name}?stream=true&starting_after=2", []),
        ("GET", "/v1/responses/{id}/input_items", f"/v1/responses/{name}/input_items", []),
        ("POST", "/v1/responses/{id}/cancel", f"/v1/responses/{name}/cancel", []),
        ("DELETE", "/v1/responses/{id}", f"/v1/responses/{name}", []),
        ("DELETE", "/v1/responses/{id}", f"/v1/responses/{name}", []),
    ):
        check(document, method, path, server.ask(method, target, None, headers))
    for path, body in (
        ("/v1/messages/count_tokens", {**chat("hi"), "model": "synthetic"}),
        ("/v1/messages/count_tokens", {}),
        ("/tokenize", {"prompt": "hi", "return_token_strs": True}),
        ("/tokenize", {}),
        ("/v1/responses/input_tokens", {"input": "hi"}),
        ("/detokenize", {"tokens": [104, 105]}),
    ):
        check(document, "POST", path, server.ask("POST", path, body))


@pytest.mark.parametrize("path", TABLES)
def test_what_works_is_what_it_allows(document: Any, path: str) -> None:
    """And a number that is out of its range is not."""
    schema = described(document, "POST", path)["requestBody"]["content"][JSON]["schema"]
    _, body, table = TABLES[path]
    for name, (working, refused) in (table | VLLM).items():
        for value in working:
            if value is not None or name not in body:
                assert not faults(document, schema, {**body, name: value}), (name, value)
        for value in refused:
            if type(value) in (int, float) and name != "seed":
                assert faults(document, schema, {**body, name: value}), (name, value)
    assert faults(document, schema, {**body, "colour": "red"})
