"""From a request to the sequences that it asks for, and what the OpenAI grammars make of them (server/api/generation,
openai_chat and openai_completions), without a server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from engine.wire import Logprob, PromptLogprobs
from server.api.generation import NDJSON, PLAIN, SSE, framing_named, whole
from server.api.openai_chat import plan_chat
from server.api.openai_completions import ECHO_TOKENS_MAX, plan_completion
from server.api.types import ChatRequest, CompletionRequest, parse
from server.outcome import Outcome
from server.stream import Stream
from server.table import TextOptions
from tests.support.engines import VOCAB, hello
from tests.support.planning import chat_parts, completion_parts, generation, refusal
from tests.support.tables import Rig


def called(arguments: str) -> dict[str, Any]:
    return {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}


CALL = called("{}")


def prompt_of(messages: list[dict[str, Any]]) -> str:
    return bytes(chat_parts(messages=messages)[0].prompt).decode()


# Messages to a prompt (D15)


@pytest.mark.parametrize(
    "content", ["hi", [{"type": "text", "text": "hi"}], [{"type": "input_text", "text": "hi", "cache_control": {}}]]
)
def test_one_part_is_the_same_as_a_string(content: Any) -> None:
    assert prompt_of([{"role": "user", "content": content}]) == "<user>hi:"


def test_parts_are_joined_by_line_ends() -> None:
    parts = [{"type": "text", "text": text} for text in ("a", "b")]
    assert prompt_of([{"role": "system", "content": parts}]) == "<system>a\nb:"


def test_developer_is_the_newer_name_of_system() -> None:
    assert prompt_of([{"role": "developer", "content": "x"}]) == "<system>x:"


def test_an_assistants_turn_may_have_no_content() -> None:
    assert prompt_of([{"role": "assistant", "content": None, "refusal": None, "annotations": []}]) == "<assistant>:"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user"}, "messages.1.content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages.1.content.0.text"),
        (
            {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]},
            "messages.1.content.1.type",
        ),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "messages.1.tool_calls.0.id"),
        ({"role": "assistant", "tool_calls": [CALL | {"type": "custom"}]}, "messages.1.tool_calls.0.type"),
        *[
            ({"role": "assistant", "tool_calls": [CALL, called(text)]}, "messages.1.tool_calls.1.function.arguments")
            for text in ("x", "[]", "1", "{", '{"a":1} x', "[" * 5000)
        ],
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "messages.1.tool_calls"),
        ({"role": "tool", "content": "x"}, "messages.1.tool_call_id"),
        ({"role": "tool", "tool_call_id": "a"}, "messages.1.content"),
        ({"role": "user", "content": "x", "tool_call_id": "a"}, "messages.1.tool_call_id"),
    ],
)
def test_what_can_not_be_shown_to_the_model_is_refused_with_its_path(message: dict[str, Any], param: str) -> None:
    assert refusal(prompt_of, [{"role": "user", "content": "x"}, message]).param == param


# The prompt's four forms, and D11


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("ab", [[97, 98]]),
        (["a", "b"], [[97], [98]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98]], [[97], [98]]),
        (["a", [98]], [[97], [98]]),
        (" ", [[32]]),
    ],
)
def test_each_form_of_a_prompt(prompt: Any, ids: list[list[int]]) -> None:
    parts = completion_parts(prompt)
    assert [part.prompt for part in parts] == ids
    assert [part.sampling.prompt_index for part in parts] == list(range(len(ids)))


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["a", ""], [[1], []], [1, "a"], [1.5], [True], [None], [[1.5]]])
def test_an_empty_or_mixed_prompt_is_refused(prompt: Any) -> None:
    error = refusal(completion_parts, prompt)
    assert error.status == 400
    assert (error.param or "").startswith("prompt")


@pytest.mark.parametrize("prompt", [[VOCAB], [-1], [[1], [2, VOCAB]]])
def test_an_id_beyond_the_vocabulary_is_refused_with_its_place(prompt: Any) -> None:
    error = refusal(completion_parts, prompt)
    assert "vocabulary" in error.message
    assert (error.param or "").startswith("prompt")


# Sampling


def test_defaults() -> None:
    (part,) = chat_parts()
    sampling = part.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
    assert (sampling.min_tokens, sampling.ignore_eos, sampling.stop_ids, sampling.logprobs) == (0, False, (), -1)
    assert sampling.max_tokens == hello().context_tokens_max - len(part.prompt)


def test_max_tokens_beyond_the_room_is_cut_to_it() -> None:
    """D19: one documented rule."""
    (part,) = chat_parts(max_tokens=10**9)
    assert part.sampling.max_tokens == hello().context_tokens_max - len(part.prompt)


def test_max_completion_tokens_wins() -> None:
    assert chat_parts(max_tokens=9, max_completion_tokens=2)[0].sampling.max_tokens == 2


@pytest.mark.parametrize("excess", [0, 1, 10_000])
def test_a_prompt_that_leaves_no_room_is_refused_with_the_counts(excess: int) -> None:
    limit = hello().context_tokens_max
    error = refusal(completion_parts, "x" * (limit + excess))
    assert error.code == "context_length_exceeded"
    assert str(limit + excess) in error.message
    assert str(limit) in error.message
    (part,) = completion_parts("x" * (limit - 1))
    assert part.sampling.max_tokens == 1


def test_choices_and_prompts_share_a_seed_and_differ_by_their_indices() -> None:
    parts = completion_parts(["a", "b"], n=2, seed=-1)
    assert [(p.sampling.prompt_index, p.sampling.choice_index) for p in parts] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {p.sampling.seed for p in parts} == {2**64 - 1}


def test_a_request_without_a_seed_is_given_a_drawn_one() -> None:
    seeds = {chat_parts()[0].sampling.seed for _ in range(20)}
    assert len(seeds) == 20
    assert max(seeds) < 2**64


def test_a_stop_id_beyond_the_vocabulary_is_refused() -> None:
    assert refusal(chat_parts, stop_token_ids=[5, VOCAB]).param == "stop_token_ids.1"


def test_penalties_and_bias_reach_the_engine() -> None:
    fields = {"frequency_penalty": -0.5, "presence_penalty": 2, "repetition_penalty": 1.2, "logit_bias": {"5": -100}}
    for part in (*chat_parts(**fields, n=2), *completion_parts("x", **fields)):
        sampling = part.sampling
        assert (sampling.frequency_penalty, sampling.presence_penalty) == (-0.5, 2.0)
        assert (sampling.repetition_penalty, sampling.logit_bias) == (1.2, ((5, -100.0),))
    assert chat_parts(logit_bias={}, frequency_penalty=0, seed=1) == chat_parts(seed=1)


def test_a_biased_id_beyond_the_vocabulary_is_refused() -> None:
    error = refusal(chat_parts, logit_bias={"5": 1, str(VOCAB): 1})
    assert error.param == f"logit_bias.{VOCAB}"
    assert "vocabulary" in error.message


def test_top_logprobs_needs_logprobs() -> None:
    assert refusal(chat_parts, top_logprobs=2).param == "top_logprobs"
    assert chat_parts(logprobs=True)[0].sampling.logprobs == 0
    assert chat_parts(logprobs=True, top_logprobs=2)[0].sampling.logprobs == 2
    assert chat_parts(logprobs=False)[0].sampling.logprobs == -1


def test_another_model_is_404() -> None:
    error = refusal(chat_parts, model="gpt-4")
    assert (error.status, error.param, error.code) == (404, "model", "model_not_found")
    chat_parts(model="model")


def test_a_form_of_the_answer_becomes_its_grammar() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    assert chat_parts(response_format={"type": "text"})[0].sampling.grammar == ""
    assert chat_parts(tools=[tool])[0].sampling.grammar == ""
    for fields in ({"response_format": {"type": "json_object"}}, {"tools": [tool], "tool_choice": "required"}):
        parts = chat_parts(n=2, **fields)
        assert parts[0].sampling.grammar.startswith("start: ")
        assert parts[0].sampling.grammar == parts[1].sampling.grammar
    assert refusal(chat_parts, response_format={"type": "yaml"}).param == "response_format.type"


# Accept


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("", None),
        ("*/*", None),
        ("application/json", None),
        ("text/event-stream", SSE),
        ("application/x-ndjson", NDJSON),
        ("text/plain", PLAIN),
        ("TEXT/PLAIN; charset=utf-8", PLAIN),
        ("application/json, application/x-ndjson;q=0.9", NDJSON),
        ("application/x-ndjson, text/plain", NDJSON),
        ("application/x-ndjson;q=0.2, text/plain;q=0.7", PLAIN),
        ("application/x-ndjson;q=0, text/event-stream", SSE),
        ("text/plain;q=0, */*", None),
        ("text/plain; q=much", PLAIN),
        ("text/*", None),
        ("text/plainer", None),
    ],
)
def test_a_framing_is_chosen_only_by_its_name(accept: str, kind: str | None) -> None:
    assert framing_named(accept) == kind


# The answer in one piece equals the stream


def started(rig: Rig, request: ChatRequest | CompletionRequest) -> Stream:
    made = generation(rig)
    if isinstance(request, ChatRequest):
        grammar, parts = asyncio.run(plan_chat(made, request, "chat"))
        return rig.table.start(grammar, parts, key="", request_id="r", text=TextOptions(), collect=True)
    other, parts = asyncio.run(plan_completion(made, request, "completions"))
    return rig.table.start(other, parts, key="", request_id="r", text=TextOptions(), collect=True)


def events(stream: Stream) -> list[dict[str, Any]]:
    frames = stream.grammar.frames
    datas = []
    for position, event in enumerate(stream.log.slice(0, stream.log.end)):
        choice, text, data = event.choice, event.text, event.data
        datas.append(data if data is not None else frames[choice].data(text, position))
    assert datas.pop() == b"[DONE]"
    return [json.loads(data) for data in datas]


@pytest.mark.parametrize("n", [1, 2])
def test_a_chats_chunks_and_its_whole_answer_say_the_same(n: int) -> None:
    """D02, D03, B07."""
    rig = Rig()
    body = {"messages": [{"role": "user", "content": "hi"}], "n": n}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    stream = started(rig, parse(json.dumps(body).encode(), ChatRequest))
    for choice in range(n):
        rig.play(stream, "aé😀"[: 3 - choice], choice)
        rig.end(stream, "length" if choice else "stop", choice)
    chunks, answer = events(stream), json.loads(whole(stream).body)
    assert {(c["id"], c["object"], c["created"], c["model"]) for c in chunks} == {
        (answer["id"], "chat.completion.chunk", answer["created"], "model")
    }
    assert {frozenset(c) for c in chunks} == {frozenset(("id", "object", "created", "model", "choices", "usage"))}
    assert chunks.pop() | {"choices": answer["choices"], "object": "chat.completion"} == answer
    assert all(chunk["usage"] is None for chunk in chunks)
    for index in range(n):
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert [c["delta"] for c in mine if "role" in c["delta"]] == [mine[0]["delta"]]
        assert (mine[-1]["delta"], mine[-1]["finish_reason"]) == ({}, answer["choices"][index]["finish_reason"])
        assert {c["finish_reason"] for c in mine[:-1]} == {None}
        assert all(c.keys() == {"index", "delta", "logprobs", "finish_reason"} for c in mine)
        text = "".join(c["delta"].get("content", "") for c in mine)
        assert answer["choices"][index]["message"] == {"role": "assistant", "content": text, "refusal": None}


@pytest.mark.parametrize("echo", [False, True])
def test_a_completions_chunks_and_its_whole_answer_say_the_same(echo: bool) -> None:
    rig = Rig()
    body = {"prompt": ["one", "two"], "echo": echo}
    stream = started(rig, parse(json.dumps(body).encode(), CompletionRequest))
    for choice in range(2):
        rig.play(stream, "aé😀", choice)
        rig.end(stream, "stop", choice)
    chunks, answer = events(stream), json.loads(whole(stream).body)
    assert {frozenset(c) for c in chunks} == {frozenset(("id", "object", "created", "model", "choices"))}
    for index, prompt in enumerate(body["prompt"]):  # type: ignore[arg-type]
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        text = "".join(c["text"] for c in mine)
        assert text == answer["choices"][index]["text"] == (prompt if echo else "") + "aé😀"
        assert (mine[-1]["text"], mine[-1]["finish_reason"]) == ("", "stop")
    assert answer["usage"]["total_tokens"] == 6 + 2 * 7


# Log probabilities of the prompt


def play_with_prompt(rig: Rig, stream: Stream, choice: int, text: str) -> None:
    """Steps of one byte each, with log probabilities; the first one tells of the prompt."""
    each = stream.choices[choice]
    width = max(each.sampling.prompt_logprobs, 0)
    told = [
        Logprob(i, -i / 10, [each.prompt[i], 90][:width], [-i / 10, -50.0][:width]) for i in range(1, len(each.prompt))
    ]
    for number, byte in enumerate(text.encode()):
        step = rig.engine.tokens([(each.sequence_id, byte)])
        logprobs = [Logprob(0, -0.5, [byte], [-0.5])] if each.sampling.logprobs >= 0 else []
        prompts = [PromptLogprobs(each.sequence_id, told)] if not number else []
        rig.table.on_step(msgspec.structs.replace(step, logprobs=logprobs, prompt_logprobs=prompts))
    rig.end(stream, "length", choice)


@pytest.mark.parametrize("prompt", ["x", "héy😀" * ECHO_TOKENS_MAX])
def test_an_echo_with_logprobs_shows_both_in_chunks_and_whole(prompt: str) -> None:
    rig = Rig()
    body = {"prompt": [prompt, "z"], "echo": True, "logprobs": 1}
    stream = started(rig, parse(json.dumps(body).encode(), CompletionRequest))
    assert stream.log.end == 1  # event 0 is there before any token
    play_with_prompt(rig, stream, 1, "b")
    play_with_prompt(rig, stream, 0, "aé")
    chunks, answer = events(stream), json.loads(whole(stream).body)
    for index, asked in enumerate((prompt, "z")):
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        shown = answer["choices"][index]["logprobs"]
        text = asked + ("b" if index else "aé")
        assert "".join(c["text"] for c in mine) == answer["choices"][index]["text"] == text
        for name, values in shown.items():
            assert [value for c in mine if c["logprobs"] for value in c["logprobs"][name]] == values
        size = len(asked.encode())
        assert len(shown["tokens"]) == len(text.encode())
        assert (shown["token_logprobs"][0], shown["top_logprobs"][0]) == (None, None)
        assert shown["token_logprobs"][1:size] == [-i / 10 for i in range(1, size)]
        assert shown["token_logprobs"][size:] == [-0.5] * (len(text.encode()) - size)
        assert shown["text_offset"][0] == 0
        assert shown["text_offset"][size] == len(asked)
        assert all(len(c["logprobs"]["tokens"]) <= ECHO_TOKENS_MAX for c in mine if c["logprobs"])


def test_prompt_logprobs_are_asked_of_the_engine_as_far_as_needed() -> None:
    def asked(**fields: Any) -> tuple[int, int]:
        sampling = completion_parts("ab", **fields)[0].sampling
        return sampling.logprobs, sampling.prompt_logprobs

    assert asked() == asked(echo=True) == (-1, -1)
    assert asked(logprobs=3) == (3, -1)
    assert asked(logprobs=3, echo=True) == (3, 3)
    assert asked(prompt_logprobs=2) == (-1, 2)
    assert asked(logprobs=0, echo=True, prompt_logprobs=2) == (0, 2)
    assert chat_parts(prompt_logprobs=2)[0].sampling.prompt_logprobs == 2


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_prompt_logprobs_in_vllms_form(kind: type[ChatRequest] | type[CompletionRequest]) -> None:
    rig = Rig()
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    body = {**(chat if kind is ChatRequest else {"prompt": "xyz"}), "prompt_logprobs": 2}
    stream = started(rig, parse(json.dumps(body).encode(), kind))
    play_with_prompt(rig, stream, 0, "a")
    answer = json.loads(whole(stream).body)
    shown = (answer if kind is ChatRequest else answer["choices"][0])["prompt_logprobs"]
    prompt = stream.choices[0].prompt
    assert len(shown) == len(prompt)
    assert shown[0] is None
    assert shown[2] == {
        str(prompt[2]): {"logprob": -0.2, "rank": 1, "decoded_token": chr(prompt[2])},
        "90": {"logprob": -50.0, "rank": 2, "decoded_token": "Z"},
    }


def test_an_id_that_is_not_among_the_likeliest_is_shown_all_the_same() -> None:
    rig = Rig()
    stream = started(rig, parse(b'{"prompt":"xy","prompt_logprobs":0}', CompletionRequest))
    play_with_prompt(rig, stream, 0, "a")
    shown = json.loads(whole(stream).body)["choices"][0]["prompt_logprobs"]
    assert shown == [None, {"121": {"logprob": -0.1, "rank": None, "decoded_token": "y"}}]


def test_prompt_logprobs_have_no_place_in_a_stream() -> None:
    error = refusal(completion_parts, "x", prompt_logprobs=1, stream=True)
    assert (error.param, error.status) == ("prompt_logprobs", 400)
    assert refusal(chat_parts, prompt_logprobs=1, stream=True).param == "prompt_logprobs"


def test_prompt_logprobs_of_a_long_prompt_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.api.generation.PROMPT_LOGPROBS_MAX", 100)
    completion_parts("x" * 50, logprobs=1, echo=True)
    assert "at most 100" in refusal(completion_parts, "x" * 51, logprobs=1, echo=True).message


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (Outcome("cancelled", "why"), 409),
        (Outcome("expired", "why", retriable=True), 503),
        (Outcome("error", "why", retriable=True), 503),
        (Outcome("error", "why"), 500),
    ],
)
def test_a_stream_that_ended_badly_is_no_success_in_one_piece_either(end: Outcome, status: int) -> None:
    rig = Rig()
    stream = started(rig, parse(b'{"prompt":"x"}', CompletionRequest))
    rig.play(stream, "abc")
    stream.finish(end)
    response = whole(stream)
    assert response.status == status
    assert json.loads(response.body)["error"]["code"] == end.kind
    assert (b"Retry-After", b"2") in response.headers or status != 503
    chunks = events(stream)
    assert chunks[-1] == json.loads(response.body)
    assert not any(choice["finish_reason"] for chunk in chunks[:-1] for choice in chunk["choices"])


def test_log_probabilities_are_the_same_in_chunks_and_in_one_piece() -> None:
    for kind, body in (
        (ChatRequest, {"messages": [{"role": "user", "content": "x"}], "logprobs": True}),
        (CompletionRequest, {"prompt": "x", "logprobs": 1}),
    ):
        rig = Rig()
        stream = started(rig, parse(json.dumps(body).encode(), kind))
        best = Logprob(0, -0.5, [97], [-0.5])
        for token in b"abc":
            step = rig.engine.tokens([(stream.choices[0].sequence_id, token)])
            step.logprobs.append(best)
            rig.table.on_step(step)
        rig.end(stream)
        shown = [c["logprobs"] for e in events(stream) for c in e["choices"] if c["logprobs"]]
        answer = json.loads(whole(stream).body)["choices"][0]["logprobs"]
        if kind is ChatRequest:
            assert [entry for part in shown for entry in part["content"]] == answer["content"]
            assert [entry["token"] for entry in answer["content"]] == ["a", "b", "c"]
        else:
            for name, values in answer.items():
                assert [value for part in shown for value in part[name]] == values
            assert answer["text_offset"] == [0, 1, 2]
