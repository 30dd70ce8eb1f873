"""Every field that the official SDK can send works, or is refused by a 400 that names it (issue 7, item 1).

The tables below are checked against the SDK's own parameter types: a field that a new SDK brings fails the test until
somebody says here what becomes of it. Beside them stand the fields that users of vLLM send.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import pytest
from openai.types import chat as chat_types
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params
from openai.types.responses import response_input_item_param as response_item
from openai.types.responses import tool_param

from tests.support.serving import Answer, Server

pytestmark = pytest.mark.synthetic

SAMPLING: dict[str, tuple[list[Any], list[Any]]] = {
    "temperature": ([0, 1, 2, None], [-0.1, 2.1, "1"]),
    "top_p": ([0.1, 1, None], [0, 1.1]),
    "user": (["somebody", None], [7]),
    "stream": ([False, True, None], ["yes"]),
    "stream_options": ([None], [{"include_usage": True}, {"x": 1}]),  # not without stream; with it, below
    "model": (["synthetic", None], [7]),
}
SHARED = SAMPLING | {
    "frequency_penalty": ([-2, 2, None], [2.1]),
    "logit_bias": ([{"5": -100}, {}, None], [{"x": 1}, {"5": 101}]),
    "max_tokens": ([1, 10**9, None], [0, -1, 2.5, "5"]),
    "n": ([1, 2, None], [0, 17]),
    "presence_penalty": ([-2, 2, None], [-2.1]),
    "seed": ([0, -1, 2**63, None], ["x", 2**64]),
    "stop": (["x", ["x"] * 16, [], None], [["x"] * 17, [""], 7]),
}
HINTS: dict[str, tuple[list[Any], list[Any]]] = {  # they change no answer
    "metadata": ([{"a": "b"}, {}, None], [{"a": 1}]),
    "prompt_cache_key": (["x", None], [1]),
    "safety_identifier": (["x", None], [1]),
    "service_tier": (["auto", "default", None], [1]),
}
REFUSED_CACHING: dict[str, tuple[list[Any], list[Any]]] = {
    "prompt_cache_options": ([None], [{"ttl": "30m"}]),
    "prompt_cache_retention": (["in_memory", None], ["24h"]),
    "moderation": ([None], [{"model": "x"}]),
}
SCHEMA = {"name": "x", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}, "strict": True}
# For each field: values that work, and values that are refused.
CHAT = (
    SHARED
    | HINTS
    | REFUSED_CACHING
    | {
        "messages": ([[{"role": "user", "content": "x"}]], [[], "x", [{"role": "robot", "content": "x"}]]),
        "audio": ([None], [{"voice": "alloy", "format": "wav"}]),
        "function_call": (["none", "auto", None], [{"name": "f"}]),
        "functions": ([[], None], [[{"name": "f"}]]),
        "logprobs": ([True, False, None], [1]),
        "max_completion_tokens": ([1, None], [0]),
        "modalities": ([["text"], None], [["text", "audio"]]),
        "parallel_tool_calls": ([True, False, None], ["x"]),
        "prediction": ([None], [{"type": "content", "content": "x"}]),
        "reasoning_effort": ([None], ["high"]),
        "response_format": (
            [{"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema": SCHEMA}, None],
            [{"type": "video"}, "text", {"type": "json_schema"}, {"type": "text", "colour": "red"}],
        ),
        "store": ([False, None], [True]),
        "tool_choice": (["none", "auto", None], [7, "x", {"type": "function", "function": {"name": "f"}}]),
        "tools": (
            [[], None, [{"type": "function", "function": {"name": "f", "parameters": {}}}]],
            ["x", [{"type": "custom", "custom": {"name": "f"}}]],
        ),
        "top_logprobs": ([None], [21, -1]),  # none without logprobs
        "verbosity": ([None], ["low"]),
        "web_search_options": ([None], [{}]),
    }
)
COMPLETIONS = SHARED | {
    "prompt": (["x", ["x", "y"], [1, 2], [[1], [2, 3]]], [None, "", [], [[]], [["x"]], 7]),
    "best_of": ([1, None], [2]),
    "echo": ([True, False, None], ["x"]),
    "logprobs": ([0, 20, None], [21, -1]),
    "suffix": (["", None], ["x"]),
}
RESPONSES = (
    SAMPLING
    | HINTS
    | REFUSED_CACHING
    | {
        "input": (["x", [{"role": "user", "content": "x"}]], [[], None, 7]),
        "access_programs": ([None], [{"cyber": "standard"}]),
        "background": ([True, False, None], ["x"]),
        "background_options": ([None], [{}]),
        "context_management": ([[], None], [[{"type": "compaction"}]]),
        "conversation": ([None], ["conv_1", {"id": "conv_1"}]),
        "image": ([None], [{}]),
        "include": ([["message.output_text.logprobs"], [], None], [["reasoning.encrypted_content"]]),
        "instructions": (["x", "", None], [7]),
        "max_output_tokens": ([1, None], [0]),
        "max_tool_calls": ([1, None], [0]),
        "parallel_tool_calls": ([True, False, None], ["x"]),
        "previous_response_id": ([None], ["resp_x"]),
        "prompt": ([None], [{"id": "pmpt_1"}]),
        "reasoning": ([{}, {"effort": None}, {"effort": "none"}, None], [{"effort": "low"}, {"summary": "auto"}]),
        "store": ([True, False, None], ["x"]),
        "text": (
            [
                *[{"format": form} for form in ({"type": "text"}, {"type": "json_object"}, None)],
                {"format": {"type": "json_schema", **SCHEMA}},
                {"verbosity": "medium"},
                {},
                None,
            ],
            [{"format": {"type": "video"}}, {"format": {"type": "json_schema"}}, {"verbosity": "low"}],
        ),
        "tool_choice": (["none", "auto", None], [7, "required", {"type": "function", "name": "f"}]),  # without tools
        "tools": ([[], None, [{"type": "function", "name": "f", "parameters": {}}]], [[{"type": "web_search"}], "x"]),
        "top_logprobs": ([0, 20, None], [21]),
        "truncation": (["disabled", None], ["auto"]),
    }
)
# What vLLM's users add, on every route.
VLLM: dict[str, tuple[list[Any], list[Any]]] = {
    "top_k": ([1, 0, -1, None], [-2]),
    "min_p": ([0, 0.5, None], [1.1]),
    "repetition_penalty": ([1.1, None], [0]),
    "ignore_eos": ([True, None], ["x"]),
    "min_tokens": ([0, 2, None], [-1]),
    "stop_token_ids": ([[1], [], None], [[-1], ["x"]]),
    "skip_special_tokens": ([True, False, None], ["x"]),
    "priority": ([-(2**63), -1, 0, 2**63, None], [1.5, "1", 2**64, -(2**63) - 1]),
}
TABLES: dict[str, tuple[Any, dict[str, Any], dict[str, tuple[list[Any], list[Any]]]]] = {
    "/v1/chat/completions": (
        chat_params.CompletionCreateParamsStreaming,
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
        CHAT,
    ),
    "/v1/completions": (
        completion_params.CompletionCreateParamsStreaming,
        {"prompt": "hi", "max_tokens": 2},
        COMPLETIONS,
    ),
    "/v1/responses": (
        response_params.ResponseCreateParamsStreaming,
        {"input": "hi", "max_output_tokens": 2},
        RESPONSES,
    ),
}
CELLS = [(path, name) for path, (_, _, table) in TABLES.items() for name in table | VLLM]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(scripts=[{"match": "", "tokens": ["{", "}"]}]) as running:  # an end, where no field sets one
        yield running


@pytest.mark.parametrize("path", TABLES)
def test_the_tables_name_every_field_of_the_sdk_and_no_other(path: str) -> None:
    sdk, _, table = TABLES[path]
    assert table.keys() == sdk.__required_keys__ | sdk.__optional_keys__


def ask(server: Server, path: str, name: str, value: Any) -> Answer:
    _, body, _ = TABLES[path]
    return server.ask("POST", path, {**body, name: value})


@pytest.mark.parametrize(("path", "name"), CELLS)
def test_a_field_works_or_is_refused_by_name(server: Server, path: str, name: str) -> None:
    working, refused = (TABLES[path][2] | VLLM)[name]
    for value in working:
        answer = ask(server, path, name, value)
        assert answer.status == 200, (value, bytes(answer.body))
    for value in refused:
        error = ask(server, path, name, value).error(400)
        assert error["param"] == name or error["param"].startswith(f"{name}."), (value, error)


CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TEXT = {"type": "text", "text": "x"}
# Of every kind of message, and of every part of its content: all fields that work together, and what is refused.
MESSAGES: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    (chat_types.ChatCompletionDeveloperMessageParam, {"role": "developer", "content": [TEXT], "name": "x"}, {}),
    (chat_types.ChatCompletionSystemMessageParam, {"role": "system", "content": "x", "name": "x"}, {}),
    (chat_types.ChatCompletionUserMessageParam, {"role": "user", "content": "x", "name": "x"}, {}),
    (
        chat_types.ChatCompletionAssistantMessageParam,
        {"role": "assistant", "content": None, "name": "x", "refusal": "no", "tool_calls": [CALL]},
        {"audio": {"id": "audio_1"}, "function_call": {"name": "f", "arguments": "{}"}},
    ),
    (chat_types.ChatCompletionToolMessageParam, {"role": "tool", "content": "x", "tool_call_id": "call_1"}, {}),
    (chat_types.ChatCompletionFunctionMessageParam, {}, {"role": "function", "content": "x", "name": "f"}),
]
PARTS: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    (chat_types.ChatCompletionContentPartTextParam, {**TEXT, "prompt_cache_breakpoint": {"mode": "explicit"}}, {}),
    (chat_types.ChatCompletionContentPartRefusalParam, {"type": "refusal", "refusal": "x"}, {}),
    (
        chat_types.ChatCompletionContentPartImageParam,
        {},
        {"type": "image_url", "image_url": {"url": "x"}, "prompt_cache_breakpoint": {}},
    ),
    (
        chat_types.ChatCompletionContentPartInputAudioParam,
        {},
        {"type": "input_audio", "input_audio": {"data": "x"}, "prompt_cache_breakpoint": {}},
    ),
]


@pytest.mark.parametrize(("kind", "working", "refused"), MESSAGES + PARTS)
def test_every_field_of_a_message_works_or_is_refused_by_name(
    server: Server, kind: Any, working: dict[str, Any], refused: dict[str, Any]
) -> None:
    """A message and a part that are refused whole are refused by their role, or their type."""
    assert working.keys() | refused.keys() == kind.__required_keys__ | kind.__optional_keys__
    is_part = (kind, working, refused) in PARTS
    at = "messages.0.content.0" if is_part else "messages.0"

    def send(value: dict[str, Any]) -> Answer:
        message = {"role": "user", "content": [value]} if is_part else value
        return server.ask("POST", "/v1/chat/completions", {"messages": [message], "max_tokens": 1})

    if working:
        assert send(working).status == 200
        assert send({**working, "colour": "red"}).error(400)["param"] == f"{at}.colour"
        for name, value in refused.items():
            assert send({**working, name: value}).error(400)["param"] == f"{at}.{name}"
    else:
        assert send(refused).error(400)["param"] in (f"{at}.type", f"{at}.role")


# Likewise of the items of a Responses conversation, and of its function tools.
FUNCTION_CALL = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"}
SAID = {"type": "message", "role": "assistant", "status": "completed", "id": "msg_1", "phase": "final_answer"}
ITEMS: dict[Any, tuple[dict[str, Any], dict[str, Any]]] = {
    response_item.EasyInputMessageParam: ({"role": "user", "content": "x", "type": "message", "phase": None}, {}),
    response_item.Message: (
        {"role": "user", "type": "message", "status": "completed", "content": [{"type": "input_text", "text": "x"}]},
        {},
    ),
    response_item.ResponseOutputMessageParam: (
        {**SAID, "content": [{"type": "output_text", "text": "x", "annotations": [], "logprobs": []}]},
        {},
    ),
    response_item.ResponseFunctionToolCallParam: (
        {**FUNCTION_CALL, "id": "fc_1", "status": "completed", "async": False},
        {"caller": {"type": "direct"}, "namespace": "x"},
    ),
    response_item.FunctionCallOutput: (
        {"type": "function_call_output", "call_id": "c", "output": "x", "id": "f", "name": "f", "status": "completed"},
        {"caller": {"type": "direct"}, "namespace": "x"},
    ),
}


def test_every_item_of_a_conversation_works_or_is_refused_by_name(server: Server) -> None:
    def send(item: dict[str, Any]) -> Answer:
        return server.ask("POST", "/v1/responses", {"input": [item], "max_output_tokens": 1})

    for kind in get_args(response_item.ResponseInputItemParam):
        if kind is response_item.ItemReference:
            continue  # tests/test_responses.py has it
        if kind not in ITEMS:
            (name,) = get_args(get_type_hints(kind)["type"])
            assert send({"type": name}).error(400)["param"] == "input.0.type"
            continue
        working, refused = ITEMS[kind]
        assert working.keys() | refused.keys() == kind.__required_keys__ | kind.__optional_keys__
        nothing = dict.fromkeys(refused)
        assert send({**working, **nothing}).status == 200, working
        for field, value in refused.items():
            assert send({**working, field: value}).error(400)["param"] == f"input.0.{field}"


def test_every_field_of_a_function_tool_works_or_is_refused_by_name(server: Server) -> None:
    working = {"type": "function", "name": "f", "description": "x", "parameters": {"type": "object"}, "strict": False}
    refused = {"allowed_callers": ["direct"], "async": True, "defer_loading": True, "output_schema": {}}

    def fault(tool: dict[str, Any]) -> Any:
        return server.ask("POST", "/v1/responses", {"input": "x", "tools": [tool]}).error(400)["param"]

    kinds = {name for kind in get_args(tool_param.ToolParam) for name in get_args(get_type_hints(kind)["type"])}
    for name in kinds - {"function"}:
        assert fault({"type": name}) == "tools.0.type"
    for name, value in refused.items():
        assert fault({**working, name: value}) == f"tools.0.{name}"
    sdk = tool_param.FunctionToolParam
    assert working.keys() | refused.keys() == sdk.__required_keys__ | sdk.__optional_keys__
    tool = {**dict.fromkeys(refused), **working}
    assert server.ask("POST", "/v1/responses", {"input": "x", "tools": [tool]}).status == 200


@pytest.mark.parametrize("path", TABLES)
def test_stream_options_go_with_a_stream(server: Server, path: str) -> None:
    _, body, _ = TABLES[path]
    for options in ({"include_usage": True}, {"include_usage": False, "include_obfuscation": False}, {}):
        answer = server.ask("POST", path, {**body, "stream": True, "stream_options": options})
        assert answer.status == 200
