"""Tool calls in the Responses API from outside: items and their events, resumption, the round trip, refusals (D09)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from tests.support.readings import EVENT_STREAM, NDJSON, PLAIN
from tests.support.serving import Answer, Server, chat
from tests.test_tools import CALLED, F, G

pytestmark = pytest.mark.synthetic

RESPONSES = "/v1/responses"
TOOLS: list[Any] = [
    {"type": "function", "name": name, "description": "…", "parameters": {"type": "object"}, "strict": False}
    for name in ("get_weather", "add")
]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    scripts: list[dict[str, Any]] = [
        {"match": "<tool_response>\n21 degrees", "tokens": ["It is", " 21 degrees."]},
        {"match": "play two", "tokens": [*F, *G]},
        {"match": "play text and one", "tokens": ["Let me", " see.", *F]},
        {"match": "play one and text", "tokens": [*F, " So", ' "', " be it."]},
        {"match": "play cut", "tokens": F[:8], "finish": "length"},
        {"match": "play fault", "tokens": [*F[:8], {"error": "on purpose"}]},
        {"match": "play plain", "tokens": ["No", " tools < needed", "."]},
    ]
    with Server(scripts=scripts) as running:
        yield running


@pytest.fixture
def sdk(server: Server) -> Iterator[OpenAI]:
    """Every object that it makes must be of the SDK's own types exactly."""
    url = f"{server.url}/v1"
    with OpenAI(base_url=url, api_key="none", max_retries=0, _strict_response_validation=True) as made:
        yield made


def ask(server: Server, given: Any, accept: tuple[str, str] = EVENT_STREAM, **fields: Any) -> Answer:
    return server.ask("POST", RESPONSES, {"input": given, "tools": TOOLS, **fields}, [accept])


def shape(items: list[Any]) -> list[tuple[Any, ...]]:
    """Of each item what matters."""
    return [
        (item["status"], item["content"][0]["text"])
        if item["type"] == "message"
        else (item["status"], item["name"], item["arguments"])
        for item in items
    ]


SHAPES: dict[str, tuple[str, list[tuple[Any, ...]]]] = {
    "play two": ("completed", [("completed", *CALLED[0]), ("completed", *CALLED[1])]),
    "play text and one": ("completed", [("completed", "Let me see."), ("completed", *CALLED[0])]),
    "play one and text": ("completed", [("completed", *CALLED[0]), ("completed", ' So " be it.')]),
    "play plain": ("completed", [("completed", "No tools < needed.")]),
    "play cut": ("incomplete", [("incomplete", "get_weather", '{"city": "Par')]),
    "play fault": ("failed", [("incomplete", "get_weather", '{"city": "Par')]),
}


@pytest.mark.parametrize("given", SHAPES)
def test_items_begin_go_on_and_end_in_order(server: Server, given: str) -> None:
    """Every item's deltas join to what its end tells, and the last event holds them all."""
    answer = ask(server, given, stream=True)
    events = answer.chunks()
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event.event for event in answer.events()] == [event["type"] for event in events]
    response = events[-1]["response"]
    assert (response["status"], shape(response["output"])) == SHAPES[given]
    begun: list[Any] = []
    done: list[Any] = []
    joined = ""
    for event in events[2:-1]:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert len(begun) == len(done) == event["output_index"] and event["item"]["status"] == "in_progress"
            begun.append(event["item"])
            joined = ""
        elif kind == "response.output_item.done":
            assert event["item"]["id"] == begun[-1]["id"] and event["output_index"] == len(done)
            done.append(event["item"])
        else:
            assert (event["item_id"], event["output_index"]) == (begun[-1]["id"], len(done))
            joined += event.get("delta", "")
            assert event.get("text", joined) == event.get("arguments", joined) == joined
    assert response["output"][: len(done)] == done
    assert len(done) == len(begun) - (response["status"] == "failed")
    assert [item["id"] for item in response["output"]] == [item["id"] for item in begun]


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        ("play two", {}),
        ("play one and text", {}),
        ("play fault", {}),
        ("anything", {"tool_choice": "required", "max_output_tokens": 60}),
        ("anything", {"tool_choice": "none", "text": {"format": {"type": "json_object"}}, "max_output_tokens": 60}),
    ],
)
def test_every_position_resumes_byte_for_byte(server: Server, given: str, fields: dict[str, Any]) -> None:
    answer = ask(server, given, stream=True, **fields)
    assert answer.status == 200
    name = answer.header("x-stream-id")
    blocks = [block + b"\n\n" for block in bytes(answer.body).split(b"\n\n")[:-1]]
    lines = bytes(server.ask("GET", f"/v1/streams/{name}", None, [NDJSON]).body).splitlines(keepends=True)
    for after in range(len(blocks) - 1):
        of_response = f"{RESPONSES}/resp_{name}?stream=true&starting_after={after}"
        for target in (f"/v1/streams/{name}?after={after}", of_response):
            assert bytes(server.ask("GET", target).body) == b"".join(blocks[after + 1 :])
            assert bytes(server.ask("GET", target, None, [NDJSON]).body) == b"".join(lines[after + 1 :])


def test_calls_and_their_outputs_go_on_to_an_answer(server: Server, sdk: OpenAI) -> None:
    first = sdk.responses.create(model="synthetic", input="play two", tools=TOOLS)
    calls: list[Any] = [item for item in first.output if item.type == "function_call"]
    assert [(call.name, call.arguments) for call in calls] == CALLED
    outputs: list[Any] = [
        {"type": "function_call_output", "call_id": calls[0].call_id, "output": "21 degrees"},
        {
            "type": "function_call_output",
            "call_id": calls[1].call_id,
            "output": [{"type": "input_text", "text": "3"}],
        },
    ]
    chained = sdk.responses.create(model="synthetic", input=outputs, tools=TOOLS, previous_response_id=first.id)
    spelled: list[Any] = [{"role": "user", "content": "play two"}, *[call.to_dict() for call in calls], *outputs]
    whole = sdk.responses.create(model="synthetic", input=spelled, tools=TOOLS)
    assert chained.output_text == whole.output_text == "It is 21 degrees."
    messages: list[Any] = [
        {"role": "user", "content": "play two"},
        {
            "role": "assistant",
            "tool_calls": [
                {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ],
        },
        {"role": "tool", "tool_call_id": calls[0].call_id, "content": "21 degrees"},
        {"role": "tool", "tool_call_id": calls[1].call_id, "content": "3"},
    ]
    definitions = [{"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} for tool in TOOLS]
    spoken = server.ask("POST", "/v1/chat/completions", {"messages": messages, "tools": definitions}).json()
    assert whole.usage is not None and chained.usage is not None
    assert whole.usage.input_tokens == chained.usage.input_tokens == spoken["usage"]["prompt_tokens"]
    count = sdk.responses.input_tokens.count(
        model="synthetic", input=outputs, tools=TOOLS, previous_response_id=first.id
    )
    assert count.input_tokens == whole.usage.input_tokens


def test_the_sdk_streams_calls(sdk: OpenAI) -> None:
    with sdk.responses.stream(model="synthetic", input="play text and one", tools=TOOLS) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert "response.function_call_arguments.done" in kinds
    assert final.output_text == "Let me see." and final.output[1].type == "function_call"
    assert final.tools[0].type == "function" and final.tool_choice == "auto"


def test_tools_may_be_shown_and_not_called(server: Server) -> None:
    found = ask(server, "play two", tool_choice="none").json()
    assert [item["type"] for item in found["output"]] == ["message"]
    one = ask(server, "play two", parallel_tool_calls=False).json()
    assert [item["name"] for item in one["output"]] == ["get_weather"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [7]}, "tools.0.type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name"),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tools": [{"type": "function", "name": "f", "defer_loading": True}]}, "tools.0.defer_loading"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools.1.name"),
        ({"tool_choice": {"type": "function", "name": "nobody"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "x"}]}},
            "tool_choice.tools.0.name",
        ),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "[]"}]}, "input.0.arguments"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input.0.call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": 7}]}, "input.0.output"),
    ],
)
def test_what_does_not_work_is_refused_by_name(server: Server, fields: dict[str, Any], param: str) -> None:
    answer = server.ask("POST", RESPONSES, {"input": "hi", "tools": TOOLS, **fields})
    assert answer.error(400)["param"] == param


def test_plain_text_shows_no_calls(server: Server) -> None:
    assert ask(server, "play two", PLAIN, stream=True).error(400)["param"] == "tools"
    assert ask(server, chat("x")["messages"], PLAIN, stream=True, tool_choice="none", max_output_tokens=4).status == 200
