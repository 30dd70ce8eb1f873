"""Streamed answers: OpenAI's chunks, their order and keys, and that they say what the answer in one piece says."""

# ruff: noqa: E501 (a row of a table is one line)

from __future__ import annotations

import json
from typing import Any

import pytest
from conformance_kit.events import blocks, parse
from conformance_kit.rules import not_offered, row, rule
from conformance_kit.target import Target

API = "OpenAI API reference, chat streaming"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PATHS = pytest.mark.parametrize("path", [CHAT, COMPLETIONS], ids=["chat", "completions"])


def body_of(target: Target, path: str, **fields: Any) -> dict[str, Any]:
    return target.chat(**fields) if path == CHAT else target.completion(**fields)


def stream(target: Target, path: str = CHAT, **fields: Any) -> list[str]:
    """The data of each event of a whole stream."""
    answer = target.ask("POST", path, body_of(target, path, stream=True, **fields))
    if path == COMPLETIONS and answer.status in (404, 405):
        not_offered("text completions are not there")
    assert (answer.status, answer.end) == (200, "whole"), answer
    return [event.data for event in parse(bytes(answer.body))]


def chunks(target: Target, path: str = CHAT, **fields: Any) -> list[dict[str, Any]]:
    """The chunks before the terminator."""
    return [json.loads(data) for data in stream(target, path, **fields) if data != "[DONE]"]


def choices_of(found: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    return [choice for chunk in found for choice in chunk["choices"] if choice["index"] == index]


def text_of(found: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in choices_of(found, index))


def whole(target: Target, path: str, **fields: Any) -> dict[str, Any]:
    answer = target.ask("POST", path, body_of(target, path, **fields))
    assert answer.status == 200, answer
    return dict(answer.json())


def text_of_whole(found: dict[str, Any], index: int = 0) -> str:
    choice = next(choice for choice in found["choices"] if choice["index"] == index)
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


@PATHS
@rule("the last event is [DONE], once, and nothing follows", API + ", B07")
@pytest.mark.parametrize(
    "fields",
    [{}, {"n": 2}, {"stream_options": {"include_usage": True}}, {"max_tokens": 1}],
    ids=["plain", "n=2", "usage", "one token"],
)
def test_done(target: Target, path: str, fields: dict[str, Any]) -> None:
    found = stream(target, path, **fields)
    assert found[-1] == "[DONE]" and found.count("[DONE]") == 1


@rule("no event field: OpenAI's clients know none, and fail on ping", "official SDKs")
def test_no_event_names(target: Target) -> None:
    answer = target.ask("POST", CHAT, target.chat(stream=True))
    assert not [block for block in blocks(bytes(answer.body)) if block.values("event")]


@PATHS
@rule("each chunk has id, object, created, model and choices", API)
@pytest.mark.parametrize("key", ["id", "object", "created", "model", "choices"])
def test_keys(target: Target, path: str, key: str) -> None:
    assert all(key in chunk for chunk in chunks(target, path))


@PATHS
@rule("id, created, model and object stay the same through a stream", API + ", D02")
@pytest.mark.parametrize("key", ["id", "object", "created", "model"])
def test_constant_keys(target: Target, path: str, key: str) -> None:
    assert len({chunk[key] for chunk in chunks(target, path)}) == 1


@PATHS
@rule("the object's name", API)
def test_object(target: Target, path: str) -> None:
    expected = "chat.completion.chunk" if path == CHAT else "text_completion"
    assert {chunk["object"] for chunk in chunks(target, path)} == {expected}


@PATHS
@rule("every chunk of a stream has the same keys: optional ones don't come and go", API + ", D02", "should")
@pytest.mark.parametrize("usage", [False, True], ids=["plain", "usage"])
def test_same_keys(target: Target, path: str, usage: bool) -> None:
    found = chunks(target, path, **({"stream_options": {"include_usage": True}} if usage else {}))
    assert len({tuple(sorted(chunk)) for chunk in found}) == 1, [sorted(chunk) for chunk in found]


@PATHS
@rule("each choice has index, logprobs (null) and finish_reason", API + ", D02", "should")
@pytest.mark.parametrize("key", ["index", "logprobs", "finish_reason"])
def test_choice_keys(target: Target, path: str, key: str) -> None:
    assert all(key in choice for choice in choices_of(chunks(target, path)))


@rule("the first chunk brings the role and empty content", API + ", D02")
def test_role(target: Target) -> None:
    delta = chunks(target)[0]["choices"][0]["delta"]
    assert delta.get("role") == "assistant" and delta.get("content", "") == "", delta


@rule("the role comes once for each choice", API + ", B07", "should")
@pytest.mark.parametrize("count", [1, 2])
def test_role_once(target: Target, count: int) -> None:
    found = chunks(target, n=count)
    for index in range(count):
        assert sum("role" in choice["delta"] for choice in choices_of(found, index)) == 1


@PATHS
@rule("chunks with text have finish_reason null; then one chunk has the reason, and no text", API + ", D01", "should")
@pytest.mark.parametrize("count", [1, 2])
def test_finish_chunk(target: Target, path: str, count: int) -> None:
    found = chunks(target, path, n=count)
    for index in range(count):
        choices = choices_of(found, index)
        reasons = [choice["finish_reason"] for choice in choices]
        assert reasons[-1] in ("stop", "length") and set(reasons[:-1]) == {None}, reasons
        last = choices[-1]
        assert last.get("text", "") == "" and not (last.get("delta") or {}).get("content"), last


@PATHS
@rule("the joined text is the text of the answer in one piece", API + ", D01")
@pytest.mark.parametrize("limit", [1, 2, 3, 16, 64])
def test_same_text(target: Target, path: str, limit: int) -> None:
    assert text_of(chunks(target, path, max_tokens=limit)) == text_of_whole(whole(target, path, max_tokens=limit))


@PATHS
@rule("the reason is that of the answer in one piece", API + ", D01")
@pytest.mark.parametrize("limit", [1, 16])
def test_same_reason(target: Target, path: str, limit: int) -> None:
    streamed = choices_of(chunks(target, path, max_tokens=limit))[-1]["finish_reason"]
    assert streamed == whole(target, path, max_tokens=limit)["choices"][0]["finish_reason"]


@rule("with a seed, each of n choices says the same streamed or not", API + ", n", "should")
def test_same_text_of_choices(target: Target) -> None:
    fields = {"n": 3, "seed": 11, "temperature": 1, "max_tokens": 12}
    streamed, once = chunks(target, **fields), whole(target, CHAT, **fields)
    for index in range(3):
        assert text_of(streamed, index) == text_of_whole(once, index)


@PATHS
@rule("a stop string ends a stream where it ends the answer in one piece, and nothing of it leaks", API + ", D05")
def test_stop(target: Target, path: str) -> None:
    text = text_of_whole(whole(target, path, max_tokens=24))
    assert len(text) >= 8, "the model says too little to test with"
    stop = text[len(text) // 2 :][:4]
    found = chunks(target, path, max_tokens=24, stop=[stop])
    assert text_of(found) == text[: text.index(stop)]
    assert choices_of(found)[-1]["finish_reason"] == "stop"


USAGE = [
    ("absent", {}, False), ("null", {"stream_options": None}, False), ("empty", {"stream_options": {}}, False),
    ("false", {"stream_options": {"include_usage": False}}, False), ("true", {"stream_options": {"include_usage": True}}, True),
]  # fmt: skip


@PATHS
@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        row(
            name,
            fields,
            wanted,
            text="usage comes if asked for, in one last chunk without choices, and null before",
            source=API + " stream_options, D03",
        )
        for name, fields, wanted in USAGE
    ],
)
def test_usage(target: Target, path: str, fields: dict[str, Any], wanted: bool) -> None:
    found = chunks(target, path, **fields)
    shown = [chunk for chunk in found if chunk.get("usage")]
    if not wanted:
        assert not shown and all(chunk["choices"] for chunk in found)
        return
    assert shown == [found[-1]] and found[-1]["choices"] == [], found[-1]
    assert all("usage" in chunk for chunk in found), "usage is null on the chunks before"


@PATHS
@rule("a stream's usage is that of the answer in one piece", API + " stream_options, D03")
def test_same_usage(target: Target, path: str) -> None:
    found = chunks(target, path, stream_options={"include_usage": True}, max_tokens=7)[-1]["usage"]
    once = whole(target, path, max_tokens=7)["usage"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert found[name] == once[name], (found, once)


@rule("stream_options without stream is refused", API + " stream_options, D03", "should")
@pytest.mark.parametrize("fields", [{}, {"stream": False}], ids=["absent", "false"])
def test_stream_options_alone(target: Target, fields: dict[str, Any]) -> None:
    answer = target.ask("POST", CHAT, target.chat(stream_options={"include_usage": True}, **fields))
    assert answer.status == 400, answer


@rule("a refused request is refused with its status, even when a stream was asked for", API + ", D18")
@pytest.mark.parametrize(
    ("fields", "status"),
    [({"model": "no-such-model"}, 404), ({"temperature": -1}, 400), ({"messages": []}, 400), ({"n": 0}, 400)],
    ids=["model", "temperature", "messages", "n"],
)
def test_refusals(target: Target, fields: dict[str, Any], status: int) -> None:
    answer = target.ask("POST", CHAT, target.chat(stream=True, **fields))
    assert answer.status == status and answer.json()["error"]["message"], answer


@rule("logprobs of a stream are those of the answer in one piece", API + ", logprobs", "should")
def test_logprobs(target: Target) -> None:
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 1, "max_tokens": 4}
    streamed = [
        entry
        for choice in choices_of(chunks(target, **fields))
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    once = whole(target, CHAT, **fields)["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in once]


@rule("streams with text of four-byte characters, cut anywhere, hold no half characters", "D08")
def test_no_half_characters(target: Target) -> None:
    for limit in (1, 2, 3, 4, 5):
        found = chunks(target, messages=[{"role": "user", "content": "Repeat: 🙂👩‍👧世界"}], max_tokens=limit)
        pieces = [choice["delta"].get("content") or "" for choice in choices_of(found)]
        assert "\ufffd" not in "".join(pieces[:-2]), pieces


@pytest.mark.synthetic
@rule("a character over several tokens waits until it is whole", "D08")
def test_emoji(target: Target) -> None:
    found = chunks(target, messages=[{"role": "user", "content": "say an emoji in bytes"}])
    pieces = [choice["delta"].get("content") or "" for choice in choices_of(found)]
    assert [piece for piece in pieces if piece] == ["🙂", "👩\u200d", "👧", "\ufffd"]


STOPS = [
    ("over tokens", ["DEFGHIJ"], "ABC", "stop"), ("at the start", ["ABC"], "", "stop"), ("within a token", ["B"], "A", "stop"),
    ("two that overlap", ["CDE", "DEF"], "AB", "stop"), ("the earlier of two", ["HIJ", "EFG"], "ABCD", "stop"),
    ("never completed", ["KLMN"], "ABCDEFGHIJKLM", "stop"), ("a prefix of the text, held and let go", ["DEFX"], "ABCDEFGHIJKLM", "stop"),
]  # fmt: skip


@pytest.mark.synthetic
@pytest.mark.parametrize(
    ("stops", "text", "reason"),
    [
        row(
            name,
            *rest,
            text="only what stands before the earliest match is sent, and only what may begin a match is held",
            source="D05",
        )
        for name, *rest in STOPS
    ],
)
def test_stop_over_tokens(target: Target, stops: list[str], text: str, reason: str) -> None:
    messages = [{"role": "user", "content": "say the alphabet"}]
    found = chunks(target, messages=messages, stop=stops, max_tokens=32)
    assert (text_of(found), choices_of(found)[-1]["finish_reason"]) == (text, reason)
    assert text_of_whole(whole(target, CHAT, messages=messages, stop=stops, max_tokens=32)) == text


@pytest.mark.synthetic
@rule("a fault in mid-stream is told in-band, then [DONE]; no chunk says that all went well", "B05")
def test_fault(target: Target) -> None:
    found = stream(target, messages=[{"role": "user", "content": "fail in the middle"}])
    assert found[-1] == "[DONE]"
    error = json.loads(found[-2])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    reasons = [c["finish_reason"] for data in found[:-2] for c in json.loads(data)["choices"]]
    assert set(reasons) == {None}


@pytest.mark.synthetic
@rule("a stream without tokens has role, reason and [DONE] all the same", "B07")
def test_no_token(target: Target) -> None:
    found = chunks(target, messages=[{"role": "user", "content": "say no word"}])
    assert [choice["finish_reason"] for choice in choices_of(found)] == [None, "stop"]
