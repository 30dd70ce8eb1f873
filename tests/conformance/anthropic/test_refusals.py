"""Requests that can't be served: a 4xx with JSON in Anthropic's shape that says which field is wrong."""

# ruff: noqa: E501 (a row of a table is one line)

from __future__ import annotations

from typing import Any

import pytest
from conformance_kit.rules import not_offered, row, rule
from conformance_kit.target import PROMPT, Target
from conformance_kit.wire import Answer

API = "Anthropic API documentation, errors"
MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
ABSENT = object()


def body_of(target: Target, **fields: Any) -> dict[str, Any]:
    body = {"model": target.model, "max_tokens": 4, "messages": [{"role": "user", "content": PROMPT}], **fields}
    return {name: value for name, value in body.items() if value is not ABSENT}


def check_error(answer: Answer, kind: str | None, *statuses: int, names: str | None = None) -> dict[str, Any]:
    """The error object. `names`: the field that its message must name."""
    assert answer.status in statuses and answer.end == "whole", answer
    assert (answer.header("content-type") or "").startswith("application/json"), answer
    document = answer.json()
    assert document["type"] == "error", document
    error: dict[str, Any] = document["error"]
    assert isinstance(error["message"], str) and error["message"], error
    assert kind is None or error["type"] == kind, error
    assert names is None or names in error["message"], f"{names} isn't named: {error}"
    return error


def said(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


FIELDS = [
    ("max_tokens absent", "max_tokens", ABSENT), ("max_tokens null", "max_tokens", None), ("max_tokens -1", "max_tokens", -1), ("max_tokens a string", "max_tokens", "5"), ("max_tokens 2.5", "max_tokens", 2.5),
    ("messages absent", "messages", ABSENT), ("messages empty", "messages", []), ("messages a string", "messages", "hello"), ("messages of numbers", "messages", [1]),
    ("no role", "messages", [{"content": "x"}]), ("unknown role", "messages", [{"role": "wizard", "content": "x"}]), ("no content", "messages", [{"role": "user"}]), ("content a number", "messages", said(5)),
    ("block without a type", "messages", said([{"text": "x"}])), ("block of an unknown type", "messages", said([{"type": "smell"}])), ("text block without text", "messages", said([{"type": "text"}])),
    ("temperature -1", "temperature", -1), ("temperature 5", "temperature", 5), ("temperature a string", "temperature", "hot"), ("top_p 2", "top_p", 2), ("top_p a string", "top_p", "x"), ("top_k a string", "top_k", "x"),
    ("stop_sequences a string", "stop_sequences", "x"), ("stop_sequences of numbers", "stop_sequences", [5]), ("stream a string", "stream", "maybe"),
    ("system a number", "system", 5), ("system of images", "system", [{"type": "image"}]), ("metadata a string", "metadata", "x"), ("tools a string", "tools", "x"), ("model a number", "model", 5),
]  # fmt: skip
LENIENT = {"model a number", "temperature 5", "metadata a string", "max_tokens null"}


@pytest.mark.parametrize(
    ("name", "value"),
    [row(label, name, value, text="a field with a wrong type or value gets 400, and is named", source=API + ", D12, D15, D18", level="should" if label in LENIENT else "must") for label, name, value in FIELDS],
)  # fmt: skip
@STREAM
def test_fields(target: Target, name: str, value: Any, stream: bool) -> None:
    body = body_of(target, **{"stream": stream, name: value})
    check_error(target.ask("POST", MESSAGES, body), "invalid_request_error", 400, 422, names=name)


BODIES = [
    ("empty", b""), ("an open brace", b"{"), ("a list", b"[]"), ("null", b"null"), ("a string", b'"x"'), ("no UTF-8", b'{"model":"\xff"}'),
    ("deep", b'{"messages":' + b"[" * 10_000 + b"]" * 10_000 + b"}"),
]  # fmt: skip


@pytest.mark.parametrize(
    "body",
    [
        row(name, body, text="what is no JSON object of this API gets 400", source="RFC 8259, D17, D18")
        for name, body in BODIES
    ],
)
def test_bodies(target: Target, body: bytes) -> None:
    check_error(target.ask("POST", MESSAGES, body), "invalid_request_error", 400, 422)


@rule("an unknown field is refused by name, or ignored; never a 5xx", "D18")
def test_unknown_field(target: Target) -> None:
    answer = target.ask("POST", MESSAGES, body_of(target, no_such_field=1))
    if answer.status != 200:
        check_error(answer, "invalid_request_error", 400, 422, names="no_such_field")


@rule("a block that the model can't read is refused, and its place named", API + ", D15", "should")
@pytest.mark.parametrize("kind", ["image", "document"])
def test_unread_blocks(target: Target, kind: str) -> None:
    source = {"type": "base64", "media_type": "image/png" if kind == "image" else "application/pdf", "data": "AAAA"}
    answer = target.ask(
        "POST",
        MESSAGES,
        body_of(target, messages=said([{"type": "text", "text": "?"}, {"type": kind, "source": source}])),
    )
    if answer.status == 200:
        not_offered(f"the model reads {kind} blocks, or passes over them")
    check_error(answer, "invalid_request_error", 400, 422, names="messages.0.content.1")


@rule("an unknown model is not_found_error", API + ", D18", "should")
@STREAM
def test_unknown_model(target: Target, stream: bool) -> None:
    check_error(
        target.ask("POST", MESSAGES, body_of(target, model="no-such-model", stream=stream)),
        "not_found_error",
        404,
        names="model",
    )


@rule("another method is 405 with Allow, in this API's shape", "RFC 9110 section 15.5.6, D18")
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_methods(target: Target, method: str) -> None:
    answer = target.ask(method, MESSAGES, {} if method == "PUT" else None)
    check_error(answer, None, 405)
    assert answer.header("allow"), answer


@rule("an unknown route below is 404, in this API's shape", API + ", D18", "should")
def test_unknown_route(target: Target) -> None:
    check_error(target.ask("POST", MESSAGES + "/no-such-route", {}), "not_found_error", 404)


@rule("an error names its request, in the body and in the request-id header that the SDKs read", API, "should")
def test_request_id(target: Target) -> None:
    answer = target.ask("POST", MESSAGES, {})
    assert answer.header("request-id") and answer.json()["request_id"] == answer.header("request-id")


@rule("an answer has the request-id header that the SDKs read", API, "should")
@STREAM
def test_request_id_of_an_answer(target: Target, stream: bool) -> None:
    assert target.ask("POST", MESSAGES, body_of(target, stream=stream)).header("request-id")


KEYS = [
    row("none", [], text="without a key: 401 authentication_error", source=API + ", D18"),
    row("wrong x-api-key", [("x-api-key", "wrong")], text="a wrong key: 401 authentication_error", source=API + ", D18"),
    row("empty x-api-key", [("x-api-key", "")], text="an empty key: 401 authentication_error", source=API + ", D18"),
    row("wrong bearer", [("Authorization", "Bearer wrong")], text="a wrong token: 401 authentication_error", source=API + ", D18"),
]  # fmt: skip


@pytest.mark.parametrize("headers", KEYS)
@pytest.mark.parametrize("path", [MESSAGES, COUNT_TOKENS], ids=["messages", "count_tokens"])
def test_keys(target: Target, headers: list[tuple[str, str]], path: str) -> None:
    if not target.settings.api_key:
        not_offered("no key was given (--api-key)")
    check_error(target.ask("POST", path, body_of(target), headers, auth=False), "authentication_error", 401)


@rule("the key may come as x-api-key", API)
def test_x_api_key(target: Target) -> None:
    if not target.settings.api_key:
        not_offered("no key was given (--api-key)")
    headers = [("x-api-key", target.settings.api_key)]
    assert target.ask("POST", MESSAGES, body_of(target), headers, auth=False).status == 200


@rule("a prompt beyond the context is a 400, before any byte of a stream", API + ", D19")
@STREAM
def test_too_long(target: Target, stream: bool) -> None:
    limit = target.ask("GET", "/v1/models").json()["data"][0].get("max_model_len")
    if not limit:
        not_offered("/v1/models doesn't tell max_model_len")
    body = body_of(target, messages=said("word " * limit), stream=stream)
    check_error(target.ask("POST", MESSAGES, body), "invalid_request_error", 400)
