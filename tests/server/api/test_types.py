"""Request bodies: every field works or is refused by name (cases D12, D15, D17, and the parts of D11 that are types).

tests/cases/test_d_refusals.py shows the same through the server.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.api.errors import ApiError
from server.api.generate import GenerateRequest
from server.api.types import (
    BIASED_IDS_MAX,
    CHOICES_MAX,
    IDENTIFIER_CHARS_MAX,
    MESSAGES_MAX,
    REPETITION_PENALTY_MAX,
    STOP_CHARS_MAX,
    STOP_IDS_MAX,
    STOPS_MAX,
    TOP_LOGPROBS_MAX,
    ChatRequest,
    CompletionRequest,
    GenerationFields,
    convert,
    parse,
    stop_strings,
)

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> ChatRequest:
    return parse(json.dumps({"messages": MESSAGES, **fields}).encode(), ChatRequest)


def completion(**fields: Any) -> CompletionRequest:
    return parse(json.dumps({"prompt": "hi", **fields}).encode(), CompletionRequest)


def refusal(body: bytes | dict[str, Any], kind: type[GenerationFields] = ChatRequest) -> ApiError:
    if isinstance(body, dict):
        required = {"messages": MESSAGES} if kind is ChatRequest else {"prompt": "hi"}
        body = json.dumps({**required, **body}).encode()
    with pytest.raises(ApiError) as error:
        parse(body, kind)
    assert error.value.status == 400
    assert error.value.message
    return error.value


def test_a_field_that_is_not_there_is_none() -> None:
    request = chat()
    unset = [name for name in request.__struct_fields__ if getattr(request, name) is not None]
    assert unset == ["messages"]


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_null_means_absent_for_every_field(kind: type[GenerationFields]) -> None:
    optional = set(kind.__struct_fields__) - {"messages", "prompt"}
    body = {"messages": MESSAGES} if kind is ChatRequest else {"prompt": "hi"}
    assert parse(json.dumps({**body, **dict.fromkeys(optional)}).encode(), kind) == parse(
        json.dumps(body).encode(), kind
    )


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("max_tokens", [1, 10**9, 2**63], [0, -1, "5", 2.5, True, [], {}, -(2**70), 10**400]),
        ("max_completion_tokens", [1, 10**9], [0, -1, "5", 2.5, True]),
        ("temperature", [0, 0.0, 1, 2], [-0.1, 2.1, "1", True]),
        ("top_p", [0.001, 1], [0, -1, 1.1, "1"]),
        ("min_p", [0, 1], [-0.1, 1.1]),
        ("top_k", [-1, 0, 5, 10**6], [-2, 1.5, "5"]),
        ("frequency_penalty", [-2, 0, 0.5, 2], [-2.01, 2.01, "1", True, []]),
        ("presence_penalty", [-2, 0, 0.5, 2], [-2.01, 2.01, "1", True, []]),
        ("repetition_penalty", [0.01, 1, 1.1, REPETITION_PENALTY_MAX], [0, -1, REPETITION_PENALTY_MAX + 1, "1", True]),
        (
            "logit_bias",
            [{}, {"0": 100, "5": -100, "50256": 0.5}, {str(id_): 1 for id_ in range(BIASED_IDS_MAX)}],
            [
                {"5": 100.5},
                {"5": -101},
                {"5": "1"},
                {"5": True},
                {"05": 1},
                {"": 1},
                {"-1": 1},
                {"+1": 1},
                {" 1": 1},
                {"٣": 1},
                {"1.0": 1},
                {"9" * 5000: 1},
                {str(id_): 1 for id_ in range(BIASED_IDS_MAX + 1)},
                [],
                "5",
            ],
        ),
        ("n", [1, CHOICES_MAX], [0, -1, CHOICES_MAX + 1, "2"]),
        ("min_tokens", [0, 5], [-1, 1.5, 2**64]),
        ("top_logprobs", [0, TOP_LOGPROBS_MAX], [-1, TOP_LOGPROBS_MAX + 1]),
        ("seed", [0, -1, 2**63, 2**64 - 1, -(2**63)], [2**64, -(2**63) - 1, 1.5, "1"]),
        (
            "stop",
            ["a", ["a", "b"], [], ["x"] * STOPS_MAX, "x" * STOP_CHARS_MAX],
            ["", [""], ["x"] * (STOPS_MAX + 1), 5, [5], {}, ["a", "x" * (STOP_CHARS_MAX + 1)]],
        ),
        ("stop_token_ids", [[], [5], [1] * STOP_IDS_MAX], [["5"], 5, [1] * (STOP_IDS_MAX + 1)]),
        ("stream", [True, False], ["true", 1]),
        ("logprobs", [True, False], [1, "true"]),
        ("user", ["x", "x" * IDENTIFIER_CHARS_MAX], [5, {}, "x" * (IDENTIFIER_CHARS_MAX + 1)]),
        ("safety_identifier", ["x"], ["x" * (IDENTIFIER_CHARS_MAX + 1)]),
        ("prompt_cache_key", ["x"], ["x" * (IDENTIFIER_CHARS_MAX + 1)]),
        (
            "metadata",
            [{}, {"a": "b"}, {f"{n:064}": "x" * 512 for n in range(16)}],
            [{"a": 5}, [], "x", {str(n): "" for n in range(17)}, {"x" * 65: ""}, {"a": "x" * 513}],
        ),
    ],
)
def test_each_field_takes_its_values_and_refuses_others_by_name(field: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        assert getattr(chat(**{field: value}), field) == value
    for value in bad:
        assert (refusal({field: value}).param or "").split(".")[0] == field


@pytest.mark.parametrize("value", [0, TOP_LOGPROBS_MAX])
def test_completions_logprobs_is_a_count(value: int) -> None:
    assert completion(logprobs=value).logprobs == value
    for bad in (-1, TOP_LOGPROBS_MAX + 1, True):
        assert refusal({"logprobs": bad}, CompletionRequest).param == "logprobs"


@pytest.mark.parametrize(
    ("field", "off", "on"),
    [
        ("functions", [], [{}]),
        ("function_call", "none", {"name": "f"}),
        ("modalities", ["text"], ["text", "audio"]),
        ("store", False, True),
        ("reasoning_effort", None, "low"),
        ("prediction", None, {"type": "content"}),
    ],
)
def test_what_is_not_supported_is_refused_unless_it_says_nothing(field: str, off: Any, on: Any) -> None:
    chat(**{field: off})
    if on is not None:
        error = refusal({field: on})
        assert (error.param, error.code) == (field, "unsupported_parameter")


@pytest.mark.parametrize(("field", "off", "on"), [("suffix", "", "x"), ("best_of", 1, 2)])
def test_the_same_for_completions(field: str, off: Any, on: Any) -> None:
    completion(**{field: off})
    assert refusal({field: on}, CompletionRequest).code == "unsupported_parameter"


@pytest.mark.parametrize("field", ["max_token", "best_of", "prompt", "\n", "a" * 1000])
def test_an_unknown_field_is_refused_by_name(field: str) -> None:
    error = refusal({field: 1})
    assert (error.param, error.code) == (field, "unknown_parameter")


def test_stream_options_need_a_stream() -> None:
    """D03."""
    assert chat(stream=True, stream_options={"include_usage": True}).stream_options is not None
    assert chat(stream=True, stream_options={}).stream_options is not None
    assert refusal({"stream_options": {"include_usage": True}}).param == "stream_options"
    assert refusal({"stream": False, "stream_options": {}}).param == "stream_options"
    assert refusal({"stream": True, "stream_options": {"x": 1}}).param == "stream_options.x"


def test_messages_are_bounded() -> None:
    chat(messages=MESSAGES * MESSAGES_MAX)
    assert refusal({"messages": MESSAGES * (MESSAGES_MAX + 1)}).param == "messages"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({}, "messages.0.role"),
        ({"role": "robot", "content": "x"}, "messages.0.role"),
        ({"role": "user", "content": 5}, "messages.0.content"),
        ({"role": "user", "content": [5]}, "messages.0.content.0"),
        ({"role": "user", "content": [{"text": "x"}]}, "messages.0.content.0.type"),
        ({"role": "user", "content": "x", "colour": 1}, "messages.0.colour"),
    ],
)
def test_a_bad_message_is_refused_with_its_path(message: dict[str, Any], param: str) -> None:
    """D15."""
    assert refusal({"messages": [message]}).param == param


@pytest.mark.parametrize(
    "content", ["x", [], [{"type": "text", "text": "x"}], [{"type": "image_url", "image_url": {}}]]
)
def test_content_may_be_text_or_parts(content: Any) -> None:
    """D15: which parts work is for the chat module to say."""
    assert chat(messages=[{"role": "user", "content": content}]).messages


@pytest.mark.parametrize("prompt", ["x", ["x", "y"], [1, 2], [[1], [2]], "", [], [[]]])
def test_a_prompt_has_four_forms(prompt: Any) -> None:
    assert completion(prompt=prompt).prompt == prompt


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'"x"',
        b"{",
        b'{"messages":',
        b"\xff",
        b'{"messages":[{"role":"user","content":"\xff"}]}',
        b'{"messages":[{"role":"user","content":"\\ud83d"}]}',
        b'{"messages":[{"role":"user","content":"x"}],"user":"\\udc00"}',
        b'{"messages":[{"role":"user","content":"x"}],"temperature":NaN}',
        b'{"messages":[{"role":"user","content":"x"}],"temperature":1e999}',
        b'{"messages":[{"role":"user","content":"x"}]}x',
        b"[" * 10_000,
        b'{"tools":' + b"[" * 10_000 + b"]" * 10_000 + b',"messages":[]}',
        b'{"messages":[],"messages":[]}',
        b'{"messages":[{"role":"user","role":"user","content":"x"}]}',
    ],
)
def test_a_body_that_is_no_request_is_400(body: bytes) -> None:
    """D17."""
    refusal(body)


@pytest.mark.parametrize("unread", ["1e999", "1" * 5000, "[" * 400 + "]" * 400])
def test_a_field_that_is_not_read_may_hold_any_json(unread: str) -> None:
    call = '{"id":"a","function":{"name":"f","arguments":"{}","x":%s%s}}'
    message = '{"messages":[{"role":"assistant","tool_calls":[%s]}]}'
    parse((message % call % (unread, "")).encode(), ChatRequest)
    assert refusal((message % call % (unread, ',"x":1')).encode()).param == "x"


def test_nul_and_controls_are_text() -> None:
    assert chat(messages=[{"role": "user", "content": "a\x00b\x1f"}]).messages[0].content == "a\x00b\x1f"


def taken_or_refused(body: bytes, kind: type[GenerationFields]) -> bool:
    try:
        parse(body, kind)
    except ApiError as error:
        return error.status == 400
    return True


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
@given(data=st.data())
@settings(deadline=None, max_examples=200)
def test_any_value_in_any_field_is_taken_or_refused(kind: type[GenerationFields], data: st.DataObject) -> None:
    names = st.sampled_from(sorted(kind.__struct_fields__))
    body = data.draw(st.dictionaries(names | st.text(max_size=5), JSON, max_size=4))
    assert taken_or_refused(json.dumps(body).encode(), kind)


@given(st.binary(max_size=40))
@settings(deadline=None)
def test_any_bytes_are_taken_or_refused(body: bytes) -> None:
    assert taken_or_refused(body, ChatRequest)


def test_stop_has_one_form() -> None:
    assert stop_strings(chat()) == ()
    assert stop_strings(chat(stop="a")) == ("a",)
    assert stop_strings(chat(stop=["a", "b"])) == ("a", "b")


def test_a_querys_values_are_strings() -> None:
    request = convert(
        {"prompt": "hi", "max_tokens": "5", "temperature": "0.5", "raw": "1"}, GenerateRequest, strict=False
    )
    assert (request.max_tokens, request.temperature, request.raw) == (5, 0.5, True)


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_tokens", "x"), ("max_tokens", "0"), ("temperature", "nan"), ("top_p", "inf"), ("raw", "maybe"), ("n", "99")],
)
def test_a_bad_value_of_a_query_is_refused_by_name(field: str, value: str) -> None:
    with pytest.raises(ApiError) as error:
        convert({"prompt": "hi", field: value}, GenerateRequest, strict=False)
    assert (error.value.status, error.value.param) == (400, field)
