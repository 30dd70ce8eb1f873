"""Answers in one piece: chat completions, text completions, models (OpenAI's API reference)."""

# ruff: noqa: E501 (a row of a table is one line)

from __future__ import annotations

from typing import Any

import pytest
from conformance_kit.rules import not_offered, row, rule
from conformance_kit.target import Target
from conformance_kit.wire import Answer

API = "OpenAI API reference, "
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def chat(target: Target, content: Any = "Say hello.", **fields: Any) -> dict[str, Any]:
    """A whole chat answer."""
    answer = target.ask("POST", CHAT, target.chat(content, **fields))
    assert (answer.status, answer.end) == (200, "whole"), answer
    return dict(answer.json())


def complete(target: Target, prompt: Any = "Once upon a time", **fields: Any) -> dict[str, Any]:
    """A whole text completion."""
    answer = target.ask("POST", COMPLETIONS, target.completion(prompt, **fields))
    if answer.status in (404, 405):
        not_offered("text completions are not there")
    assert (answer.status, answer.end) == (200, "whole"), answer
    return dict(answer.json())


@rule("an answer is application/json", API + "chat")
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/models"])
def test_content_type(target: Target, path: str) -> None:
    bodies = {CHAT: target.chat(), COMPLETIONS: target.completion(), "/v1/models": None}
    answer = target.ask("GET" if path == "/v1/models" else "POST", path, bodies[path])
    if answer.status in (404, 405):
        not_offered(f"{path} is not there")
    assert (answer.header("content-type") or "").partition(";")[0] == "application/json", answer


@rule("an answer carries a request id", API + "debugging requests", "should")
def test_request_id(target: Target) -> None:
    assert target.ask("POST", CHAT, target.chat()).header("x-request-id")


CHAT_KEYS = {"id": str, "object": str, "created": int, "model": str, "choices": list, "usage": dict}


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        row(key, key, kind, text="a chat completion has this key, of this type", source=API + "chat object")
        for key, kind in CHAT_KEYS.items()
    ],
)
def test_chat_keys(target: Target, key: str, kind: type) -> None:
    assert type(chat(target).get(key)) is kind


@rule("the object's name", API + "chat object")
def test_chat_object(target: Target) -> None:
    assert chat(target)["object"] == "chat.completion"


@rule("created is in seconds", API + "chat object")
def test_created(target: Target) -> None:
    assert 1_600_000_000 < chat(target)["created"] < 10_000_000_000


@rule("the model is the one that was asked for", API + "chat object", "should")
def test_model_is_named(target: Target) -> None:
    assert chat(target)["model"] == target.model


@rule("ids of answers differ", API + "chat object")
def test_ids_differ(target: Target) -> None:
    assert chat(target)["id"] != chat(target)["id"]


@rule("a choice has an index, a message of the assistant, and a reason", API + "chat object")
def test_chat_choice(target: Target) -> None:
    (choice,) = chat(target)["choices"]
    assert choice["index"] == 0
    assert choice["message"]["role"] == "assistant" and isinstance(choice["message"]["content"], str), choice
    assert choice["finish_reason"] in ("stop", "length"), choice


@rule("the key logprobs is there, null when not asked for", API + "chat object", "should")
def test_chat_choice_logprobs(target: Target) -> None:
    assert chat(target)["choices"][0].get("logprobs", "absent") is None


@rule("a choice's message has refusal, null when there was none", API + "chat object", "should")
def test_chat_refusal(target: Target) -> None:
    assert chat(target)["choices"][0]["message"].get("refusal", "absent") is None


def check_usage(usage: dict[str, Any]) -> None:
    counts = [usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")]
    assert all(type(count) is int for count in counts), usage
    assert counts[0] + counts[1] == counts[2] and counts[0] > 0, usage


@rule("usage counts prompt and completion, and their sum", API + "chat object")
def test_chat_usage(target: Target) -> None:
    check_usage(chat(target)["usage"])


LIMITS = (1, 2, 5)


@pytest.mark.parametrize(
    "limit",
    [
        row(
            str(n),
            n,
            text="max_tokens cuts with the reason length, and usage counts what was made",
            source=API + "max_tokens, D12",
        )
        for n in LIMITS
    ],
)
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_chat_length(target: Target, name: str, limit: int) -> None:
    body = target.chat("Tell a very long story.")
    del body["max_tokens"]
    found = target.ask("POST", CHAT, {**body, name: limit}).json()
    assert found["usage"]["completion_tokens"] <= limit
    assert (found["choices"][0]["finish_reason"] == "length") is (found["usage"]["completion_tokens"] == limit), found


@rule("temperature 0 gives one answer, however often it is asked", API + "temperature", "should")
def test_greedy_is_repeatable(target: Target) -> None:
    texts = {chat(target, max_tokens=12)["choices"][0]["message"]["content"] for _ in range(3)}
    assert len(texts) == 1


@rule("one seed gives one answer", API + "seed", "should")
def test_seed(target: Target) -> None:
    texts = {chat(target, temperature=1, seed=7, max_tokens=12)["choices"][0]["message"]["content"] for _ in range(3)}
    assert len(texts) == 1


@rule("n choices come with their indices", API + "n")
@pytest.mark.parametrize("count", [1, 2, 4])
def test_n(target: Target, count: int) -> None:
    found = chat(target, n=count, temperature=1)
    assert sorted(choice["index"] for choice in found["choices"]) == list(range(count))


@rule("a stop string ends the text before itself, with the reason stop", API + "stop, D05")
def test_stop(target: Target) -> None:
    whole = chat(target, "Count from one.", max_tokens=24)["choices"][0]["message"]["content"]
    assert len(whole) >= 4, "the model says too little to test with"
    stop = whole[len(whole) // 2 :][:3]
    choice = chat(target, "Count from one.", max_tokens=24, stop=[stop])["choices"][0]
    assert choice["message"]["content"] == whole[: whole.index(stop)], (whole, stop, choice)
    assert choice["finish_reason"] == "stop"


@rule("stop may be one string, or several, and the earliest match counts", API + "stop, D05")
@pytest.mark.parametrize("several", [False, True], ids=["string", "list"])
def test_stop_forms(target: Target, several: bool) -> None:
    whole = chat(target, "Count from one.", max_tokens=24)["choices"][0]["message"]["content"]
    stop = whole[2:4]
    stops = ["\0never\0", stop, whole[6:8] or "x"] if several else [stop]
    given: Any = stops if several else stop
    text = chat(target, "Count from one.", max_tokens=24, stop=given)["choices"][0]["message"]["content"]
    assert text == whole[: min(whole.find(one) for one in stops if one in whole)]


LOGPROB_KEYS = {"token", "logprob", "bytes", "top_logprobs"}


@rule("logprobs come for each token, with its bytes and the most likely others", API + "logprobs, D08", "should")
@pytest.mark.parametrize("count", [0, 2])
def test_logprobs(target: Target, count: int) -> None:
    found = chat(target, logprobs=True, top_logprobs=count, max_tokens=4)
    shown = found["choices"][0]["logprobs"]["content"]
    assert len(shown) in (found["usage"]["completion_tokens"], found["usage"]["completion_tokens"] - 1)
    for entry in shown:
        assert set(entry) >= LOGPROB_KEYS and entry["logprob"] <= 0 and len(entry["top_logprobs"]) == count, entry


CONTENTS = [
    row("string", "Say hello.", text="content may be a string", source=API + "messages"),
    row("one part", [{"type": "text", "text": "Say hello."}], text="content may be a list of parts; one part is like its string", source=API + "messages, D15"),
    row("two parts", [{"type": "text", "text": "Say"}, {"type": "text", "text": "hello."}], text="text parts are joined", source=API + "messages, D15"),
    row("non-ASCII", "Sag «grüß Gott» 世界 🙂", text="content is any Unicode text", source="RFC 8259 section 8.1"),
    row("long", "word " * 200, text="a prompt of some hundred tokens is no burden", source=API + "messages"),
    row("escapes", "line\nline\ttab \"quoted\" \\ \u2028", text="JSON's escapes are read", source="RFC 8259 section 7"),
]  # fmt: skip


@pytest.mark.parametrize("content", CONTENTS)
def test_contents(target: Target, content: Any) -> None:
    assert chat(target, content)["choices"]


@rule("a string and its one text part are the same prompt", API + "messages, D15")
def test_part_equals_string(target: Target) -> None:
    first, second = chat(target, "Say hello."), chat(target, [{"type": "text", "text": "Say hello."}])
    assert first["choices"][0]["message"] == second["choices"][0]["message"]
    assert first["usage"]["prompt_tokens"] == second["usage"]["prompt_tokens"]


TURNS = [
    row("system", [("system", "Be brief."), ("user", "Hi")], text="a system message may come first", source=API + "messages"),
    row("developer", [("developer", "Be brief."), ("user", "Hi")], text="developer is the newer name of system", source=API + "messages", level="should"),
    row("assistant between", [("user", "Hi"), ("assistant", "Hello!"), ("user", "Bye")], text="a dialogue goes on", source=API + "messages"),
    row("unicode roles' text", [("system", "Ü"), ("user", "🙂")], text="every message is any Unicode text", source=API + "messages"),
]  # fmt: skip


@pytest.mark.parametrize("turns", TURNS)
def test_turns(target: Target, turns: list[tuple[str, str]]) -> None:
    body = target.chat(messages=[{"role": role, "content": text} for role, text in turns])
    assert target.ask("POST", CHAT, body).status == 200


SILENT = [
    ("user", "someone"), ("n", 1), ("frequency_penalty", 0), ("presence_penalty", 0), ("stop", None), ("seed", None),
    ("logprobs", None), ("stream", None), ("stream_options", None), ("tools", None), ("tool_choice", None),
    ("response_format", {"type": "text"}), ("metadata", None), ("service_tier", None), ("parallel_tool_calls", None), ("store", None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        row(
            name,
            name,
            value,
            text="a field at its default, or null, changes nothing (SDKs send them)",
            source=API + "chat, D18",
        )
        for name, value in SILENT
    ],
)
def test_silent_fields(target: Target, name: str, value: Any) -> None:
    answer = target.ask("POST", CHAT, target.chat(**{name: value}))
    assert answer.status == 200, answer


COMPLETION_KEYS = {"id": str, "object": str, "created": int, "model": str, "choices": list, "usage": dict}


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        row(key, key, kind, text="a text completion has this key, of this type", source=API + "completions object")
        for key, kind in COMPLETION_KEYS.items()
    ],
)
def test_completion_keys(target: Target, key: str, kind: type) -> None:
    assert type(complete(target).get(key)) is kind


@rule("a completion's choice has text, index, logprobs and a reason", API + "completions object")
def test_completion_choice(target: Target) -> None:
    found = complete(target)
    (choice,) = found["choices"]
    assert found["object"] == "text_completion"
    assert isinstance(choice["text"], str) and choice["index"] == 0 and choice["finish_reason"] in ("stop", "length")
    assert choice.get("logprobs", "absent") is None
    check_usage(found["usage"])


@rule("a list of prompts gets a choice for each, in order", API + "completions prompt")
def test_completion_batch(target: Target) -> None:
    found = complete(target, ["Once upon", "There was", "In the"])
    assert sorted(choice["index"] for choice in found["choices"]) == [0, 1, 2]
    alone = complete(target, "There was")["choices"][0]["text"]
    assert found["choices"][1]["text"] == alone


@rule("a prompt may be token ids, or a list of such", API + "completions prompt", "should")
@pytest.mark.parametrize("prompt", [[72, 105], [[72, 105], [72]]], ids=["ids", "lists of ids"])
def test_completion_of_ids(target: Target, prompt: list[Any]) -> None:
    count = 1 if isinstance(prompt[0], int) else len(prompt)
    assert len(complete(target, prompt)["choices"]) == count


@rule("echo puts the prompt before the text", API + "completions echo", "should")
def test_echo(target: Target) -> None:
    text = complete(target, "Once upon a time", echo=True)["choices"][0]["text"]
    assert text == "Once upon a time" + complete(target, "Once upon a time")["choices"][0]["text"]


@rule("logprobs of a completion are parallel lists", API + "completions logprobs", "should")
def test_completion_logprobs(target: Target) -> None:
    shown = complete(target, logprobs=2, max_tokens=3)["choices"][0]["logprobs"]
    assert len({len(shown[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}) == 1, shown


def models(target: Target) -> Answer:
    return target.ask("GET", "/v1/models")


@rule("the list of models is a list object", API + "models")
def test_models(target: Target) -> None:
    found = models(target).json()
    assert found["object"] == "list" and found["data"]


@rule("a model has id, object, created and owned_by", API + "models object")
@pytest.mark.parametrize(("key", "kind"), [("id", str), ("object", str), ("created", int), ("owned_by", str)])
def test_model_keys(target: Target, key: str, kind: type) -> None:
    for card in models(target).json()["data"]:
        assert type(card.get(key)) is kind, card


@rule("a model can be looked up by its id", API + "models retrieve", "should")
def test_model_by_id(target: Target) -> None:
    name = models(target).json()["data"][0]["id"]
    answer = target.ask("GET", f"/v1/models/{name}")
    assert answer.status == 200 and answer.json()["id"] == name, answer


@pytest.mark.synthetic
@rule("characters over several tokens come whole; a cut one at the very end is one U+FFFD", "D08")
def test_emoji(target: Target) -> None:
    assert chat(target, "say an emoji in bytes")["choices"][0]["message"]["content"] == "🙂👩\u200d👧\ufffd"


@pytest.mark.synthetic
@rule("special tokens are no text unless asked for; text that looks like one stays", "D21")
@pytest.mark.parametrize("skip", [None, True, False])
def test_specials(target: Target, skip: bool | None) -> None:
    text = chat(target, "say a marker", skip_special_tokens=skip)["choices"][0]["message"]["content"]
    assert text == ("<|im_end|><|im_start|>x" if skip is False else "<|im_end|>x")


@pytest.mark.synthetic
@rule("an engine's fault is a 5xx, never a success", "B05")
def test_fault(target: Target) -> None:
    answer = target.ask("POST", CHAT, target.chat("fail in the middle"))
    assert answer.status >= 500 and answer.json()["error"]["message"], answer


@pytest.mark.synthetic
@rule("no token at all is an empty answer, not an error", "B07")
def test_no_token(target: Target) -> None:
    choice = chat(target, "say no word")["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")
