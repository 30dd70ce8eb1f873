"""Tool calls from the outside: the official SDK, streamed and not, the round trip, resumption and refusals (D09, B07).

The synthetic engine plays what a model would write; every other part is the real path."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.support.probes import words
from tests.support.readings import EVENT_STREAM, NDJSON, PLAIN
from tests.support.serving import Answer, Server, WebSocketClient, chat

pytestmark = pytest.mark.synthetic

MODEL = "synthetic"
CHAT = "/v1/chat/completions"
F = ["<tool", "_call>", '\n{"', 'name": "get_', "weather", '", "arg', 'uments": {"city', '": "Par', 'is \\"é😀"}']
F += ["}\n</", "tool_call>"]
G = ["\n<tool_call>", '{"name": "add", "arguments": {"a": 1', ', "b": 2}}</tool_call>']
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"what {name} does",
            "parameters": {"type": "object", "properties": {field: {} for field in fields}},
        },
    }
    for name, fields in (("get_weather", ["city"]), ("add", ["a", "b"]))
]
CALLED = [("get_weather", '{"city": "Paris \\"é😀"}'), ("add", '{"a": 1, "b": 2}')]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    scripts: list[dict[str, Any]] = [
        {"match": "<tool_response>\n21 degrees", "tokens": ["It is", " 21 degrees."]},
        {"match": "play two", "tokens": [*F, *G]},
        {"match": "play text and one", "tokens": ["Let me", " see.", *F]},
        {"match": "play broken", "tokens": ["<tool_call>", "{oops}", "</tool_call>"]},
        {"match": "play cut", "tokens": F[:8], "finish": "length"},
        {"match": "play plain", "tokens": ["No", " tools < needed", "."]},
    ]
    with Server(scripts=scripts) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def says(content: str) -> list[Any]:
    return [{"role": "user", "content": content}]


def calls_of(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]


class TestSdk:
    @pytest.mark.parametrize(
        ("content", "text", "calls", "reason"),
        [
            ("play two", None, CALLED, "tool_calls"),
            ("play text and one", "Let me see.", CALLED[:1], "tool_calls"),
            ("play broken", "<tool_call>{oops}</tool_call>", [], "stop"),
            ("play plain", "No tools < needed.", [], "stop"),
            ("play cut", None, [("get_weather", '{"city": "Par')], "length"),
        ],
    )
    def test_streamed_and_whole_agree(
        self, client: OpenAI, content: str, text: str | None, calls: list[tuple[str, str]], reason: str
    ) -> None:
        whole = client.chat.completions.create(model=MODEL, messages=says(content), tools=TOOLS)
        message = whole.choices[0].message
        assert (message.content, calls_of(message), whole.choices[0].finish_reason) == (text, calls, reason)
        with client.chat.completions.create(
            model=MODEL, messages=says(content), tools=TOOLS, stream=True, stream_options={"include_usage": True}
        ) as stream:
            chunks = list(stream)
        streamed = chunks[-1].usage
        assert streamed is not None and whole.usage is not None
        assert streamed.completion_tokens == whole.usage.completion_tokens
        assert streamed.prompt_tokens == whole.usage.prompt_tokens
        shown = [c for chunk in chunks for c in chunk.choices]
        assert "".join(c.delta.content or "" for c in shown) == (text or "")
        assert [c.finish_reason for c in shown if c.finish_reason] == [reason]
        joined: list[list[str]] = []
        for part in [part for c in shown for part in c.delta.tool_calls or ()]:
            assert part.function is not None
            if part.index == len(joined):  # D09: id, type and name once, at the first delta of each call
                assert part.id and part.type == "function" and part.function.name
                joined.append([part.function.name, ""])
            else:
                assert part.index == len(joined) - 1
                assert part.id is None and part.type is None and part.function.name is None
            joined[part.index][1] += part.function.arguments or ""
        assert [tuple(call) for call in joined] == calls

    def test_arguments_stream_as_the_model_writes_them(self, client: OpenAI) -> None:
        with client.chat.completions.create(model=MODEL, messages=says("play two"), tools=TOOLS, stream=True) as stream:
            parts = [part for chunk in stream for c in chunk.choices for part in c.delta.tool_calls or ()]
        pieces = [part.function.arguments for part in parts if part.function and part.index == 0]
        assert pieces == ["", '{"city', '": "Par', 'is \\"é😀"}']

    def test_the_stream_helper_accumulates_by_rules_of_its_own(self, client: OpenAI) -> None:
        with client.chat.completions.stream(model=MODEL, messages=says("play two"), tools=TOOLS) as stream:
            done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
            final = stream.get_final_completion()
        assert [(event.name, event.arguments) for event in done] == CALLED
        assert calls_of(final.choices[0].message) == CALLED
        assert final.choices[0].message.content is None

    def test_the_round_trip(self, client: OpenAI) -> None:
        messages = says("play two")
        first = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
        message = first.choices[0].message
        messages.append(message.model_dump())
        for call, result in zip(message.tool_calls or (), ("21 degrees", "3"), strict=True):
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        second = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
        assert second.choices[0].message.content == "It is 21 degrees."
        assert second.choices[0].finish_reason == "stop"

    def test_choices_call_for_themselves(self, client: OpenAI) -> None:
        answer = client.chat.completions.create(model=MODEL, messages=says("play two"), tools=TOOLS, n=3)
        assert [calls_of(choice.message) for choice in answer.choices] == [CALLED] * 3
        ids = [call.id for choice in answer.choices for call in choice.message.tool_calls or ()]
        assert len(set(ids)) == 6

    @pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}])
    def test_without_tools_what_looks_like_a_call_is_text(self, client: OpenAI, fields: Any) -> None:
        answer = client.chat.completions.create(model=MODEL, messages=says("play two"), **fields)
        assert answer.choices[0].message.content == "".join([*F, *G])
        assert answer.choices[0].finish_reason == "stop"

    def test_one_call_at_most(self, client: OpenAI) -> None:
        answer = client.chat.completions.create(
            model=MODEL, messages=says("play two"), tools=TOOLS, parallel_tool_calls=False
        )
        assert calls_of(answer.choices[0].message) == CALLED[:1]
        assert answer.choices[0].finish_reason == "tool_calls"
        assert answer.usage is not None and answer.usage.completion_tokens == len(F) - 1  # not its mark

    def test_allowed_tools(self, client: OpenAI) -> None:
        allowed: Any = {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "add"}}]},
        }
        few = client.chat.completions.create(
            model=MODEL, messages=says("hi"), tools=TOOLS, tool_choice=allowed, max_tokens=1
        )
        one = client.chat.completions.create(model=MODEL, messages=says("hi"), tools=TOOLS[1:], max_tokens=1)
        assert few.usage and one.usage and few.usage.prompt_tokens == one.usage.prompt_tokens


def events(answer: Answer) -> list[bytes]:
    *found, rest = bytes(answer.body).split(b"\n\n")
    assert rest == b""
    return found


class TestResume:
    """DESIGN section 5: position k resumes with k + 1, byte-identical; the calls' ids included."""

    @pytest.mark.parametrize("content", ["play two", "play text and one", "play cut"])
    def test_at_every_position(self, server: Server, content: str) -> None:
        body = chat(content, stream=True, tools=TOOLS)
        answer = server.ask("POST", CHAT, body, [EVENT_STREAM])
        whole = events(answer)
        id_ = answer.header("x-stream-id")
        for position in range(len(whole)):
            again = server.ask("GET", f"/v1/streams/{id_}", None, [("Last-Event-ID", f"{id_}:{position}")])
            assert (events(again) if again.status == 200 else []) == whole[position + 1 :]
            lines = server.ask("GET", f"/v1/streams/{id_}?after={position}", None, [NDJSON])
            if lines.status == 200:
                assert len(bytes(lines.body).splitlines()) == len(whole) - position - 1

    def test_while_it_is_made(self) -> None:
        """Cut at each position of a call that is under way: what comes later goes on in the same log."""
        paced = [item for token in F for item in (token, {"pause_ms": 20})]
        with Server(scripts=[{"match": "play", "tokens": paced}]) as server:
            body = chat("play", stream=True, tools=TOOLS)
            for position in range(5):
                with server.connect() as client:
                    client.request("POST", CHAT, body)
                    client.begin("POST")
                    answer = client.read_events(position + 1)
                id_ = answer.header("x-stream-id")
                rest = server.ask("GET", f"/v1/streams/{id_}", None, [("Last-Event-ID", f"{id_}:{position}")])
                full = server.ask("GET", f"/v1/streams/{id_}", None, [EVENT_STREAM])
                assert events(full)[position + 1 :] == events(rest)
                chunks = [json.loads(e.split(b"data: ", 1)[1].split(b"\n")[0]) for e in events(full)[:-1]]
                deltas = [part for c in chunks for part in c["choices"][0]["delta"].get("tool_calls", ())]
                assert "".join(part["function"]["arguments"] for part in deltas) == CALLED[0][1]


def bad(name: str, value: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", name: value}}


class TestRefusals:
    """Each is a 400 before any header of a stream, with the field's path (D15)."""

    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
            ({"tools": [TOOLS[0], {"type": "function", "function": {"name": "a b"}}]}, "tools.1.function.name"),
            ({"tools": [TOOLS[0], TOOLS[1], TOOLS[0]]}, "tools.2.function.name"),
            ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools.0.type"),
            ({"tools": [bad("parameters", "x")]}, "tools.0.function.parameters"),
            ({"tools": TOOLS * 65}, "tools"),
            ({"tool_choice": "required"}, "tool_choice"),
            ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
            ({"tools": TOOLS, "tool_choice": bad("strict", True)}, "tool_choice.function.name"),
            ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ],
    )  # fmt: skip
    @pytest.mark.parametrize("stream", [False, True])
    def test_a_bad_field(self, client: OpenAI, fields: Any, param: str, stream: bool) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=MODEL, messages=says("hi"), stream=stream, **fields)
        assert caught.value.param == param

    def test_where_calls_could_not_be_seen(self, server: Server) -> None:
        body = chat("play two", tools=TOOLS)
        assert server.ask("POST", CHAT, body | {"stream": True}, [PLAIN]).error(400)["param"] == "tools"
        with WebSocketClient(server) as socket:
            socket.send_json(type="generate", id="a", **body)
            assert socket.receive_json()["error"]["param"] == "tools"


def test_the_prompt_tells_of_the_tools(client: OpenAI) -> None:
    def prompt_tokens(**fields: Any) -> int:
        answer = client.chat.completions.create(model=MODEL, messages=says("hi"), max_tokens=3, **fields)
        assert words(answer.choices[0].message.content or "") == 3
        assert answer.usage is not None
        return answer.usage.prompt_tokens

    assert prompt_tokens(tools=TOOLS) > prompt_tokens(tools=TOOLS[:1]) > prompt_tokens() + len(str(TOOLS[0]))
    assert prompt_tokens(tools=TOOLS, tool_choice="none") == prompt_tokens()


@pytest.mark.parametrize("tools", [[], TOOLS])
def test_tokenize_counts_them(server: Server, client: OpenAI, tools: list[Any]) -> None:
    asked = {"messages": says("hi"), "tools": tools}
    counted = server.ask("POST", "/tokenize", asked).json()["count"]
    answer = client.chat.completions.create(model=MODEL, messages=says("hi"), max_tokens=1, tools=tools)
    assert answer.usage is not None and answer.usage.prompt_tokens == counted
    assert server.ask("POST", "/tokenize", {"prompt": "hi", "tools": TOOLS}).error(400)["param"] == "tools"
    bad = {**asked, "tools": [TOOLS[0], TOOLS[0]]}
    assert server.ask("POST", "/tokenize", bad).error(400)["param"] == "tools.1.function.name"


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'),
        ("llama3", '{"name": "add", "parameters": {"a": 1, "b": 2}}'),
        ("llama3", '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}'),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}, "id": "Ab3Cd6Ef9"}]'),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}'),
    ],
)
def test_each_family_by_its_flag(family: str, text: str) -> None:
    """What the model wrote, and what it must write where a call is required."""
    scripts: list[dict[str, Any]] = [{"match": "play", "tokens": [text[at : at + 3] for at in range(0, len(text), 3)]}]
    with Server("--tool-parser", family, scripts=scripts) as server:
        for fields in ({}, {"tool_choice": "required"}):
            content = "play" if not fields else "make"
            body = chat(content, tools=TOOLS, seed=1, **fields)
            message = server.ask("POST", CHAT, body).json()["choices"][0]
            calls = [call["function"] for call in message["message"]["tool_calls"]]
            assert message["finish_reason"] == "tool_calls" and message["message"]["content"] is None
            assert all(isinstance(json.loads(call["arguments"]), dict) for call in calls)
            if content == "play":
                assert [(call["name"], call["arguments"]) for call in calls] == [("add", '{"a": 1, "b": 2}')]
            if family == "mistral":
                assert {len(call["id"]) for call in message["message"]["tool_calls"]} == {9}
