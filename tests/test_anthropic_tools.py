"""Tool use over the Anthropic Messages API: the official SDK, streamed and not, the round trip, resumption in every
framing, and refusals (D09). The synthetic engine plays what a model would write; every other part is the real path."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pydantic
import pytest
from anthropic import Anthropic
from anthropic.types import Message, RawMessageStreamEvent

from tests.support.messages import COUNT_TOKENS, MESSAGES, MODEL, assembled, error_of, message, prompt, typed
from tests.support.readings import NDJSON, PLAIN
from tests.support.serving import Server

pytestmark = pytest.mark.synthetic

EVENT: Any = pydantic.TypeAdapter(RawMessageStreamEvent)
F = ["<tool", "_call>", '\n{"', 'name": "get_', "weather", '", "arg', 'uments": {"city', '": "Par', 'is \\"é😀"}']
F += ["}\n</", "tool_call>"]
G = ["\n<tool_call>", '{"name": "add", "arguments": {"a": 1', ', "b": 2}}</tool_call>']
BIG = ['<tool_call>{"name": "add", "arguments": {"a": 1e999, "b": 12345678901234567890123}}</tool_call>']
TOOLS: list[Any] = [
    {
        "name": name,
        "description": f"what {name} does",
        "input_schema": {"type": "object", "properties": {field: {} for field in fields}},
    }
    for name, fields in (("get_weather", ["city"]), ("add", ["a", "b"]))
]
PARIS, SUM = {"city": 'Paris "é😀'}, {"a": 1, "b": 2}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    scripts: list[dict[str, Any]] = [
        {"match": "<tool_response>\nError: no such", "tokens": ["Pardon", "."]},
        {"match": "<tool_response>\n21 degrees", "tokens": ["It is", " 21 degrees."]},
        {"match": "play two", "tokens": [*F, *G]},
        {"match": "play text around", "tokens": ["Let me", " see.", *F, " Done", "."]},
        {"match": "play broken", "tokens": ["<tool_call>", "{oops}", "</tool_call>"]},
        {"match": "play cut", "tokens": F[:8], "finish": "length"},
        {"match": "play plain", "tokens": ["No", " tools < needed", "."]},
        {"match": "play nothing", "tokens": []},
        {"match": "play big", "tokens": BIG},
        {"match": "play slowly", "tokens": [*F[:7], {"pause_ms": 300}, *F[7:]]},
    ]
    with Server("--keepalive-interval", "0.1", scripts=scripts) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def says(content: str) -> list[Any]:
    return [{"role": "user", "content": content}]


def shown(content: list[Any]) -> list[Any]:
    return [block.text if block.type == "text" else (block.name, block.input) for block in content]


class TestSdk:
    @pytest.mark.parametrize(
        ("content", "blocks", "reason"),
        [
            ("play two", [("get_weather", PARIS), ("add", SUM)], "tool_use"),
            ("play text around", ["Let me see.", ("get_weather", PARIS), " Done."], "tool_use"),
            ("play broken", ["<tool_call>{oops}</tool_call>"], "end_turn"),
            ("play plain", ["No tools < needed."], "end_turn"),
            ("play nothing", [], "end_turn"),
        ],
    )
    def test_streamed_and_whole_agree(self, client: Anthropic, content: str, blocks: list[Any], reason: str) -> None:
        ask: dict[str, Any] = {"model": MODEL, "max_tokens": 100, "messages": says(content), "tools": TOOLS}
        with client.messages.create(**ask, stream=True) as raw:
            for event in raw:
                EVENT.validate_python(event.to_dict(), strict=True)
        with client.messages.stream(**ask) as stream:
            final = stream.get_final_message()
        whole = client.messages.create(**ask)
        pydantic.TypeAdapter(Message).validate_python(whole.to_dict(), strict=True)
        for found in (final, whole):
            assert shown(found.content) == blocks
            assert found.stop_reason == reason
        assert final.usage.output_tokens == whole.usage.output_tokens
        ids = [block.id for found in (final, whole) for block in found.content if block.type == "tool_use"]
        assert len(set(ids)) == len(ids) and all(ids)

    def test_a_call_that_max_tokens_cut(self, client: Anthropic) -> None:
        """The stream shows what came of its input; in one piece there is no place for a half of it."""
        ask: dict[str, Any] = {"model": MODEL, "max_tokens": 100, "messages": says("play cut"), "tools": TOOLS}
        with client.messages.stream(**ask) as stream:
            parts = [event.partial_json for event in stream if event.type == "input_json"]
            assert stream.get_final_message().stop_reason == "max_tokens"
        assert "".join(parts) == '{"city": "Par'
        whole = client.messages.create(**ask)
        assert (shown(whole.content), whole.stop_reason) == ([("get_weather", {})], "max_tokens")

    def test_the_round_trip(self, client: Anthropic) -> None:
        for is_error, text, reply in ((False, "21 degrees", "It is 21 degrees."), (True, "no such city", "Pardon.")):
            first = client.messages.create(model=MODEL, max_tokens=100, messages=says("play two"), tools=TOOLS)
            results: list[Any] = [
                {"type": "tool_result", "tool_use_id": block.id, "content": content, "is_error": is_error}
                for block, content in zip(first.content, (text, [{"type": "text", "text": text}]), strict=True)
                if block.type == "tool_use"
            ]
            turns = [*says("play two"), first.to_param(), {"role": "user", "content": results}]
            answer = client.messages.create(model=MODEL, max_tokens=100, messages=turns, tools=TOOLS)
            assert shown(answer.content) == [reply]
            counted = client.messages.count_tokens(model=MODEL, messages=turns, tools=TOOLS).input_tokens
            assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == counted

    def test_one_call_at_most(self, client: Anthropic) -> None:
        answer = client.messages.create(
            model=MODEL,
            max_tokens=100,
            messages=says("play two"),
            tools=TOOLS,
            tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        )
        assert (shown(answer.content), answer.stop_reason) == ([("get_weather", PARIS)], "tool_use")

    def test_none_leaves_the_text_as_it_is(self, client: Anthropic) -> None:
        answer = client.messages.create(
            model=MODEL, max_tokens=100, messages=says("play two"), tools=TOOLS, tool_choice={"type": "none"}
        )
        assert (shown(answer.content), answer.stop_reason) == (["".join([*F, *G])], "end_turn")

    def test_what_is_refused_is_an_exception(self, client: Anthropic) -> None:
        with pytest.raises(anthropic.BadRequestError, match="tool_choice"):
            client.messages.create(
                model=MODEL, max_tokens=9, messages=says("x"), tools=TOOLS, tool_choice={"type": "tool", "name": "x"}
            )


class TestWire:
    def test_numbers_of_any_size_are_passed_on(self, server: Server) -> None:
        answer = server.ask("POST", MESSAGES, message("play big", tools=TOOLS))
        assert b'"input":{"a": 1e999, "b": 12345678901234567890123}' in answer.body

    @pytest.mark.parametrize("content", ["play two", "play text around", "play cut", "play nothing", "play slowly"])
    def test_resumed_from_every_position(self, server: Server, content: str) -> None:
        ping = b'event: ping\ndata: {"type":"ping"}\n\n'
        body = message(content, tools=TOOLS, stream=True)
        answer = server.ask("POST", MESSAGES, body)
        events = typed(answer.events())
        assembled(events)
        assert events[0]["message"]["content"] == [] and events[1]["type"] != "content_block_delta"
        blocks = [block + b"\n\n" for block in bytes(answer.body).replace(ping, b"").split(b"\n\n")[:-1]]
        name = answer.header("x-stream-id")
        ndjson = server.ask("GET", f"/v1/streams/{name}", None, [NDJSON])
        lines = bytes(ndjson.body).splitlines(keepends=True)
        assert [json.loads(line) for line in lines] == [*events, {"done": True}]
        for after in range(len(blocks) - 1):
            last = [("Last-Event-ID", f"{name}:{after}")]
            assert server.ask("POST", MESSAGES, body, last).body == b"".join(blocks[after + 1 :])
            assert server.ask("GET", f"/v1/streams/{name}", None, [*last, NDJSON]).body == b"".join(lines[after + 1 :])
            polled = server.ask("GET", f"/v1/streams/{name}?after={after}", None, [("Accept", "application/json")])
            assert [event["data"] for event in polled.json()["events"]] == events[after + 1 :]

    def test_tools_are_part_of_the_prompt(self, server: Server) -> None:
        counts = [
            server.ask("POST", COUNT_TOKENS, prompt("hi", **fields)).json()["input_tokens"]
            for fields in ({}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": {"type": "none"}})
        ]
        assert counts[0] == counts[2] < counts[1]

    def test_plain_text_has_no_place_for_calls(self, server: Server) -> None:
        answer = server.ask("POST", MESSAGES, message("play two", tools=TOOLS, stream=True), [PLAIN])
        assert "tools" in error_of(answer, 400)["message"]


def called(id_: str = "a") -> dict[str, Any]:
    return {"type": "tool_use", "id": id_, "name": "add", "input": {}, "toolset_name": None}


def result(id_: str = "a", **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id_, "content": "x", **fields}


IMAGE = {"type": "image", "source": {}}
SAYS = {"role": "user", "content": "x"}


def by_user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def by_assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


CALLS = by_assistant(called())


class TestRefusals:
    @pytest.mark.parametrize("target", [MESSAGES, COUNT_TOKENS])
    @pytest.mark.parametrize(
        ("fields", "path"),
        [
            ({"tools": [{**TOOLS[0], "name": "a b"}]}, "tools.0.name"),
            ({"tools": [{**TOOLS[0], "name": "x" * 129}]}, "tools.0.name"),
            ({"tools": [TOOLS[0], TOOLS[0]]}, "tools.1.name"),
            ({"tools": [{"name": "f"}]}, "tools.0.input_schema"),
            ({"tools": [{**TOOLS[0], "input_schema": "x"}]}, "tools.0.input_schema"),
            ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
            ({"tools": [{**TOOLS[0], "type": "bash_20250124"}]}, "tools.0.type"),
            ({"tools": [{**TOOLS[0], "input_examples": [{}]}]}, "tools.0.input_examples"),
            ({"tools": [{**TOOLS[0], "x": 1}]}, "tools.0.x"),
            ({"tools": [{**TOOLS[0], "name": f"f{n}"} for n in range(129)]}, "tools"),
            ({"tools": TOOLS, "tool_choice": "auto"}, "tool_choice"),
            ({"tools": TOOLS, "tool_choice": {"type": "some"}}, "tool_choice.type"),
            ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
            ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
            ({"tools": TOOLS, "tool_choice": {"type": "auto", "name": "add"}}, "tool_choice.name"),
            ({"tool_choice": {"type": "any"}}, "tool_choice"),
            ({"messages": [by_user(called())]}, "messages.0.content.0.type"),
            ({"messages": [SAYS, by_assistant(result())]}, "messages.1.content.0.type"),
            ({"messages": [by_user(result())]}, "messages.0.content.0.tool_use_id"),
            ({"messages": [SAYS, CALLS, by_user(result("b"))]}, "messages.2.content.0.tool_use_id"),
            ({"messages": [SAYS, CALLS, by_user(result(), result())]}, "messages.2.content.1.tool_use_id"),
            ({"messages": [SAYS, CALLS]}, "messages.1.content.0"),
            ({"messages": [SAYS, CALLS, SAYS]}, "messages.1.content.0"),
            ({"messages": [SAYS, CALLS, by_user(result(content=[IMAGE]))]}, "messages.2.content.0.content.0.type"),
            ({"messages": [SAYS, by_assistant({**called(), "input": "{}"})]}, "messages.1.content.0.input"),
        ],
    )  # fmt: skip
    def test_by_path(self, server: Server, target: str, fields: dict[str, Any], path: str) -> None:
        body = {**(message("x") if target == MESSAGES else prompt("x")), **fields}
        assert error_of(server.ask("POST", target, body), 400)["message"].startswith(path)

    def test_fields_of_a_tool_that_change_nothing(self, server: Server) -> None:
        tool = {**TOOLS[0], "type": "custom", "strict": True, "cache_control": {"type": "ephemeral"},
                "eager_input_streaming": True, "allowed_callers": ["direct"], "input_examples": []}  # fmt: skip
        counts = [
            server.ask("POST", COUNT_TOKENS, prompt("x", tools=[each])).json()["input_tokens"]
            for each in (tool, TOOLS[0])
        ]
        assert counts[0] == counts[1]
