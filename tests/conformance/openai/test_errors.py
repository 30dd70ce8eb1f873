"""Requests that can't be served: always a 4xx with JSON in OpenAI's shape that names the field, and the server goes on."""

# ruff: noqa: E501 (a row of a table is one line)

from __future__ import annotations

import json
from typing import Any

import pytest
from conformance_kit.rules import not_offered, row, rule
from conformance_kit.target import Target
from conformance_kit.wire import Answer

API = "OpenAI API reference, errors"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SHAPE = "an error is {error: {message, type, param, code}} as JSON, with its status"


def check_error(answer: Answer, *statuses: int, param: str | None = None) -> dict[str, Any]:
    """The error object. `param`: the field that it must name, by itself or in its message."""
    assert answer.status in statuses and answer.end == "whole", answer
    assert (answer.header("content-type") or "").startswith("application/json"), answer
    error: dict[str, Any] = answer.json()["error"]
    assert isinstance(error["message"], str) and error["message"], error
    assert isinstance(error["type"], str), error
    if param is not None:
        assert param in f"{error.get('param')} {error['message']}", f"{param} isn't named: {error}"
    return error


ABSENT = object()
FIELDS = [
    ("messages absent", "messages", ABSENT), ("messages null", "messages", None), ("messages empty", "messages", []),
    ("messages a string", "messages", "hello"), ("messages of numbers", "messages", [1]), ("message without a role", "messages", [{"content": "x"}]),
    ("message with an unknown role", "messages", [{"role": "wizard", "content": "x"}]), ("role of a number", "messages", [{"role": 1, "content": "x"}]),
    ("user without content", "messages", [{"role": "user"}]), ("content of a number", "messages", [{"role": "user", "content": 5}]),
    ("content null", "messages", [{"role": "user", "content": None}]), ("part without a type", "messages", [{"role": "user", "content": [{"text": "x"}]}]),
    ("part of an unknown type", "messages", [{"role": "user", "content": [{"type": "smell", "text": "x"}]}]),
    ("text part without text", "messages", [{"role": "user", "content": [{"type": "text"}]}]),
    ("max_tokens 0", "max_tokens", 0), ("max_tokens -1", "max_tokens", -1), ("max_tokens a string", "max_tokens", "5"), ("max_tokens 2.5", "max_tokens", 2.5),
    ("temperature -1", "temperature", -1), ("temperature 3", "temperature", 3), ("temperature a string", "temperature", "hot"), ("temperature a list", "temperature", [1]),
    ("top_p 2", "top_p", 2), ("top_p -0.1", "top_p", -0.1), ("top_p a string", "top_p", "x"),
    ("n 0", "n", 0), ("n -1", "n", -1), ("n a string", "n", "two"), ("n 100000", "n", 100_000), ("n 1.5", "n", 1.5),
    ("stop a number", "stop", 5), ("stop of numbers", "stop", [5]), ("stop an object", "stop", {"a": 1}),
    ("seed a string", "seed", "x"), ("seed 1.5", "seed", 1.5), ("stream a string", "stream", "maybe"), ("stream_options a list", "stream_options", [1]),
    ("logprobs a string", "logprobs", "x"), ("top_logprobs 100", "top_logprobs", 100), ("top_logprobs -1", "top_logprobs", -1),
    ("model a number", "model", 5), ("response_format a string", "response_format", "json"), ("tools a string", "tools", "x"),
]  # fmt: skip
LENIENT = {
    "max_tokens 0",
    "model a number",
    "content null",
    "user without content",
    "n 100000",
    "temperature 3",
    "response_format a string",
    "top_logprobs 100",
}


@pytest.mark.parametrize(
    ("name", "value"),
    [row(label, name, value, text="a field with a wrong type or value gets 400, and is named", source=API + ", D12, D15, D18", level="should" if label in LENIENT else "must") for label, name, value in FIELDS],
)  # fmt: skip
def test_field(target: Target, name: str, value: Any) -> None:
    body = target.chat()
    body.pop("logprobs", None)
    if name == "top_logprobs":
        body["logprobs"] = True
    if value is ABSENT:
        del body[name]
    else:
        body[name] = value
    if name == "stream_options":
        body["stream"] = True
    check_error(target.ask("POST", CHAT, body), 400, 404, 422, param=name)


LIMITS = [("null", None), ("1", 1), ("1e9", 1_000_000_000), ("2^63", 2**63 - 1)]


@pytest.mark.parametrize(
    "value",
    [
        row(
            label,
            value,
            text="null is up to the context; a big limit is clamped, or refused with 400; never a crash",
            source="D12",
        )
        for label, value in LIMITS
    ],
)
def test_max_tokens(target: Target, value: int | None) -> None:
    """With a stop string that comes soon, so that the context isn't filled."""
    first = target.ask("POST", CHAT, target.chat(max_tokens=2)).json()["choices"][0]["message"]["content"]
    answer = target.ask("POST", CHAT, target.chat(max_tokens=value, stop=[first[-1:] or "e"]))
    assert answer.status == 200 or (value is not None and value > 1000 and answer.status == 400), answer


UNSERVED = [
    row("unknown model", CHAT, {"model": "no-such-model"}, (404, 400), text="an unknown model is 404, named", source=API + ", D18", level="should"),
    row("unknown model, completions", COMPLETIONS, {"model": "no-such-model"}, (404, 400), text="an unknown model is 404, named", source=API + ", D18", level="should"),
    row("empty prompt", COMPLETIONS, {"prompt": []}, (400,), text="no prompt at all is 400", source="D11"),
    row("empty prompt of ids", COMPLETIONS, {"prompt": [[]]}, (400,), text="no prompt at all is 400", source="D11"),
    row("prompt a number", COMPLETIONS, {"prompt": 5}, (400,), text="a prompt is a string, ids, or a list of them", source=API),
    row("prompt an object", COMPLETIONS, {"prompt": {"a": 1}}, (400,), text="a prompt is a string, ids, or a list of them", source=API),
    row("prompt of mixed types", COMPLETIONS, {"prompt": ["a", 1]}, (400,), text="a prompt is a string, ids, or a list of them", source=API),
    row("id out of the vocabulary", COMPLETIONS, {"prompt": [2_000_000_000]}, (400,), text="ids are checked against the vocabulary", source=API),
    row("negative id", COMPLETIONS, {"prompt": [-1]}, (400,), text="ids are checked against the vocabulary", source=API),
    row("prompt absent", COMPLETIONS, {"prompt": ABSENT}, (400,), text="a prompt is needed", source=API),
]  # fmt: skip


@pytest.mark.parametrize(("path", "change", "statuses"), UNSERVED)
def test_unserved(target: Target, path: str, change: dict[str, Any], statuses: tuple[int, ...]) -> None:
    if path == COMPLETIONS and target.ask("POST", path, target.completion()).status in (404, 405):
        not_offered("text completions are not there")
    body = {**(target.chat() if path == CHAT else target.completion()), **change}
    body = {name: value for name, value in body.items() if value is not ABSENT}
    check_error(target.ask("POST", path, body), *statuses, 422, param=next(iter(change)))


BODIES = [
    ("empty", b""), ("no JSON", b"hello"), ("cut", b'{"messages": [{"role": "user"'), ("trailing comma", b'{"messages": [],}'),
    ("two values", b'{"messages": []} {}'), ("array", b"[1, 2]"), ("string", b'"hello"'), ("number", b"5"), ("null", b"null"), ("true", b"true"),
    ("single quotes", b"{'messages': []}"), ("NaN", b'{"messages": [], "temperature": NaN}'), ("Infinity", b'{"messages": [], "temperature": Infinity}'),
    ("control character", b'{"messages": "a\x01b"}'), ("raw invalid UTF-8", b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}'),
    ("raw surrogate", b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}'), ("UTF-16", '{"messages": []}'.encode("utf-16")),
    ("10,000 arrays deep", b'{"messages": ' + b"[" * 10_000 + b"]" * 10_000 + b"}"), ("10,000 objects deep", b'{"a":' * 10_000 + b"1" + b"}" * 10_000),
    ("gzip", b"\x1f\x8b\x08\x00\x00"), ("NUL bytes", b"\0" * 100), ("BOM only", b"\xef\xbb\xbf"),
    ("number beyond all", b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1e999}'), ("integer of 5000 digits", b'{"messages": [{"role": "user", "content": "x"}], "seed": ' + b"9" * 5000 + b"}"),
]  # fmt: skip


@pytest.mark.parametrize(
    "body",
    [
        row(name, body, text="what is no JSON object of this API gets 400, in JSON", source="RFC 8259, D17, D18")
        for name, body in BODIES
    ],
)
def test_bodies(target: Target, body: bytes) -> None:
    check_error(target.ask("POST", CHAT, body), 400, 422)


DUPLICATES = [
    row("max_tokens", b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "max_tokens": 2, "model": MODEL}', text="parsers differ on which of two same names counts, so neither does", source="RFC 8259 section 4, D17", level="should"),
    row("content", b'{"messages": [{"role": "user", "content": "x", "content": "y"}], "max_tokens": 1, "model": MODEL}', text="parsers differ on which of two same names counts, so neither does", source="RFC 8259 section 4, D17", level="should"),
]  # fmt: skip


@pytest.mark.parametrize("body", DUPLICATES)
def test_duplicate_names(target: Target, body: bytes) -> None:
    check_error(target.ask("POST", CHAT, body.replace(b"MODEL", json.dumps(target.model).encode())), 400, 422)


SURROGATES = [
    ("content", {"messages": [{"role": "user", "content": "\ud83d"}]}), ("part", {"messages": [{"role": "user", "content": [{"type": "text", "text": "\udc00x"}]}]}),
    ("stop", {"stop": ["\ud83d"]}), ("model", {"model": "\ud83d"}), ("user", {"user": "\ud83d"}), ("name of a field", {"\ud83d": 1}),
]  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        row(name, change, text="a lone surrogate is 400, or replaced by U+FFFD; never a 5xx", source="D17")
        for name, change in SURROGATES
    ],
)
def test_surrogates(target: Target, change: dict[str, Any]) -> None:
    answer = target.ask("POST", CHAT, json.dumps(target.chat(**change)).encode())
    assert answer.status == 200 or check_error(answer, 400, 404, 422)


@rule("NUL in a prompt is a character like others, or refused; never a 5xx", "D17")
@pytest.mark.parametrize("content", ["a\0b", "\0"], ids=["inside", "alone"])
def test_nul(target: Target, content: str) -> None:
    answer = target.ask("POST", CHAT, target.chat(content))
    assert answer.status == 200 or check_error(answer, 400, 422)


@rule("an empty or blank prompt is served or refused with 400, and others go on", "D11")
@pytest.mark.parametrize("content", ["", " ", "\n\t", []], ids=["empty", "space", "blank", "no parts"])
def test_blank_content(target: Target, content: Any) -> None:
    answer = target.ask("POST", CHAT, target.chat(content))
    assert answer.status == 200 or check_error(answer, 400, 422)


@rule("an unknown field is refused by name, or ignored; never a 5xx", "D18")
def test_unknown_field(target: Target) -> None:
    answer = target.ask("POST", CHAT, target.chat(no_such_field=1))
    assert answer.status == 200 or check_error(answer, 400, 422, param="no_such_field")


TYPES = [
    ("text/plain", (400, 415)),
    ("application/x-www-form-urlencoded", (400, 415)),
    ("multipart/form-data; boundary=x", (400, 415)),
]


@pytest.mark.parametrize(
    ("kind", "statuses"),
    [
        row(
            kind,
            kind,
            statuses,
            text="a body that doesn't say that it is JSON gets 415, or 400",
            source="RFC 9110 section 15.5.16, D18",
            level="should",
        )
        for kind, statuses in TYPES
    ],
)
def test_wrong_type(target: Target, kind: str, statuses: tuple[int, ...]) -> None:
    answer = target.ask("POST", CHAT, json.dumps(target.chat()).encode(), [("Content-Type", kind)])
    check_error(answer, *statuses, 422)


@pytest.mark.parametrize(
    "kind",
    [
        row(
            kind,
            kind,
            text="parameters and case of the media type have no meaning here",
            source="RFC 9110 section 8.3.1",
        )
        for kind in ("application/json; charset=utf-8", "Application/JSON", "application/json;charset=UTF-8")
    ],
)
def test_right_type(target: Target, kind: str) -> None:
    answer = target.ask("POST", CHAT, json.dumps(target.chat()).encode(), [("Content-Type", kind)])
    assert answer.status == 200, answer


@rule("an unknown route is 404, in JSON", API + ", D18")
@pytest.mark.parametrize("path", ["/v1/no/such/route", "/v1/chat", "/v1/chat/completions/x", "/v1"])
def test_unknown_route(target: Target, path: str) -> None:
    check_error(target.ask("POST", path, {}), 404, 405)


@rule("a known route with another method is 405 with Allow, in JSON", "RFC 9110 section 15.5.6, D18")
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", CHAT),
        ("PUT", CHAT),
        ("DELETE", CHAT),
        ("PATCH", CHAT),
        ("GET", COMPLETIONS),
        ("POST", "/v1/models"),
        ("DELETE", "/v1/models"),
    ],
)
def test_wrong_method(target: Target, method: str, path: str) -> None:
    answer = target.ask(method, path, {} if method != "GET" else None)
    if answer.status == 404 and path == COMPLETIONS:
        not_offered("text completions are not there")
    check_error(answer, 405)
    assert answer.header("allow"), answer


@rule("an unknown model is 404 when it is looked up", API + ", models")
@pytest.mark.parametrize("name", ["no-such-model", "%00", "..%2f..", "a%20b"])
def test_unknown_model(target: Target, name: str) -> None:
    check_error(target.ask("GET", f"/v1/models/{name}"), 404, 400)


@rule("an error has the keys message, type, param and code, param a string or null", API + ", D18", "should")
def test_error_keys(target: Target) -> None:
    error = check_error(target.ask("POST", CHAT, target.chat(temperature=-1)), 400, 422)
    assert set(error) == {"message", "type", "param", "code"} and error["param"] == "temperature", error


@rule("an error carries a request id", API + ", D18", "should")
@pytest.mark.parametrize("path", [CHAT, "/v1/no/such/route"])
def test_error_has_request_id(target: Target, path: str) -> None:
    assert target.ask("POST", path, {}).header("x-request-id")


@rule("an error shows no traceback and no HTML", "D18")
@pytest.mark.parametrize("body", [b"{", b"[]", b'{"messages": 1}', b"\xff"])
def test_no_traceback(target: Target, body: bytes) -> None:
    shown = bytes(target.ask("POST", CHAT, body).body)
    assert b"Traceback" not in shown and b'File "' not in shown and not shown.lstrip().startswith(b"<"), shown


@rule("a prompt beyond the context is 400 context_length_exceeded, before any byte of a stream", API + ", D19")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_prompt_too_long(target: Target, stream: bool) -> None:
    limit = target.ask("GET", "/v1/models").json()["data"][0].get("max_model_len")
    if not limit:
        not_offered("/v1/models doesn't tell max_model_len")
    answer = target.ask("POST", CHAT, target.chat("word " * limit, stream=stream))
    error = check_error(answer, 400)
    assert (error["code"] == "context_length_exceeded" and str(limit - 1) in error["message"]) or str(limit) in error[
        "message"
    ], error


@rule("faults of one client don't change what others get", "D11, D17")
def test_others_go_on(target: Target) -> None:
    before = target.ask("POST", CHAT, target.chat()).json()["choices"][0]["message"]
    for _, body in BODIES:
        target.ask("POST", CHAT, body)
    assert target.ask("POST", CHAT, target.chat()).json()["choices"][0]["message"] == before


KEYS = [
    row("none", [], text="without a key: 401", source=API + ", D18"),
    row("wrong", [("Authorization", "Bearer wrong")], text="a wrong key: 401", source=API + ", D18"),
    row("empty", [("Authorization", "Bearer ")], text="an empty key: 401", source=API + ", D18"),
    row("basic", [("Authorization", "Basic dXNlcjpwYXNz")], text="another scheme: 401", source="RFC 9110 section 11.4"),
    row("in capitals", [("Authorization", "Bearer CONFORMANCE-KEY")], text="keys are compared with case", source=API),
]  # fmt: skip


@pytest.mark.parametrize("headers", KEYS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_keys(target: Target, headers: list[tuple[str, str]], stream: bool) -> None:
    if not target.settings.api_key:
        not_offered("no key was given (--api-key)")
    answer = target.ask("POST", CHAT, target.chat(stream=stream), headers, auth=False)
    error = check_error(answer, 401)
    assert target.settings.api_key not in error["message"]


@rule("the scheme of a key is compared without case", "RFC 9110 section 11.1")
def test_scheme_in_capitals(target: Target) -> None:
    if not target.settings.api_key:
        not_offered("no key was given (--api-key)")
    headers = [("Authorization", f"BEARER {target.settings.api_key}")]
    assert target.ask("POST", CHAT, target.chat(), headers, auth=False).status == 200


@rule("401 names the scheme", "RFC 9110 section 11.6.1")
def test_challenge(target: Target) -> None:
    if not target.settings.api_key:
        not_offered("no key was given (--api-key)")
    answer = target.ask("GET", "/v1/models", auth=False)
    assert answer.status == 401 and (answer.header("www-authenticate") or "").lower().startswith("bearer"), answer
