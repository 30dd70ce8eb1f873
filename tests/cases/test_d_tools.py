"""Kinds B and D where an answer calls tools: what clients put together, and what keeps a stream alive meanwhile."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from tests.support.readings import EVENT_STREAM, NDJSON
from tests.support.serving import Server, WebSocketClient, chat

CHAT = "/v1/chat/completions"
PAUSE_MS = 700
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"q": {}}}}}
    for name in ("foo", "bar")
]
CALLS = [("foo", '{"q": "a\\u2028\u2028\\n😀"}'), ("bar", "{}")]
TEXT = "".join(
    f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>\n' for name, arguments in CALLS
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    scripts: list[dict[str, Any]] = [
        # In the middle of characters too.
        {"match": "play calls", "tokens": [{"hex": bytes([byte]).hex()} for byte in TEXT.encode()]},
        {"match": "play slow", "tokens": [TEXT[:20], {"pause_ms": PAUSE_MS}, TEXT[20:]]},
    ]
    with Server("--keepalive-interval", "0.2", scripts=scripts) as running:
        yield running


class TestD09ParallelCalls:
    """id, type and name once, at the first delta of each call; index 0, 1; joined arguments are JSON."""

    @pytest.mark.parametrize("framing", [EVENT_STREAM, NDJSON])
    @pytest.mark.parametrize("choices", [1, 3])
    def test_deltas(self, server: Server, framing: tuple[str, str], choices: int) -> None:
        answer = server.ask("POST", CHAT, chat("play calls", stream=True, tools=TOOLS, n=choices), [framing])
        chunks = answer.chunks() if framing is EVENT_STREAM else answer.lines()[:-1]
        for index in range(choices):
            parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
            calls: list[list[str]] = []
            for delta in [part for c in parts for part in c["delta"].get("tool_calls", ())]:
                if "id" in delta:
                    assert delta["index"] == len(calls)
                    assert delta["type"] == "function" and delta["id"]
                    calls.append([delta["function"]["name"], ""])
                else:
                    assert delta.keys() == {"index", "function"} and delta["function"].keys() == {"arguments"}
                    assert delta["index"] == len(calls) - 1
                calls[delta["index"]][1] += delta["function"]["arguments"]
            assert [tuple(call) for call in calls] == CALLS
            assert [c["finish_reason"] for c in parts] == [None] * (len(parts) - 1) + ["tool_calls"]
            assert not "".join(c["delta"].get("content") or "" for c in parts)
        whole = server.ask("POST", CHAT, chat("play calls", tools=TOOLS)).json()["choices"][0]
        told = [(call["function"]["name"], call["function"]["arguments"]) for call in whole["message"]["tool_calls"]]
        assert told == CALLS and all(isinstance(json.loads(arguments), dict) for _, arguments in told)

    def test_the_official_sdk_accumulates_them(self, server: Server) -> None:
        messages: list[Any] = [{"role": "user", "content": "play calls"}]
        with (
            OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
            client.chat.completions.stream(model="synthetic", messages=messages, tools=TOOLS) as stream,
        ):
            final = stream.get_final_completion()
        calls = final.choices[0].message.tool_calls or ()
        assert [(call.function.name, call.function.arguments) for call in calls] == CALLS
        assert final.choices[0].finish_reason == "tool_calls"


class TestB07Tail:
    def test_a_stream_of_calls_ends_as_any_other(self, server: Server) -> None:
        answer = server.ask("POST", CHAT, chat("play calls", stream=True, tools=TOOLS))
        assert bytes(answer.body).endswith(b"\n\n")
        events = answer.events()
        assert [event.data for event in events].index("[DONE]") == len(events) - 1
        roles = [chunk["choices"][0]["delta"].get("role") for chunk in answer.chunks()]
        assert roles == ["assistant"] + [None] * (len(roles) - 1)


class TestB08KeptAlive:
    def test_pings_while_a_call_is_held(self, server: Server) -> None:
        """Its head has no name yet, so nothing of it can be shown: the connection is quiet, but not silent."""
        answer = server.ask("POST", CHAT, chat("play slow", stream=True, tools=TOOLS))
        assert answer.comments()
        assert answer.chunks()[-1]["choices"][0]["finish_reason"] == "tool_calls"


class TestD17OddText:
    @pytest.mark.parametrize(
        "fields",
        [
            {"tools": [{"type": "function", "function": {"name": "\\ud83d"}}]},
            {"tools": [{"type": "function", "function": {"name": "f", "description": "\\ud83d"}}]},
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"\\ud83d": 1}}}]},
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": ["\\ud83d"]}}}]},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "\\ud83d"}}}},
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "\\ud83d"}}},
        ],
        ids=lambda fields: json.dumps(fields)[:60],
    )  # fmt: skip
    def test_lone_surrogates(self, server: Server, fields: dict[str, Any]) -> None:
        document = json.dumps(chat("x", max_tokens=2, **fields)).replace("\\\\ud83d", "\\ud83d")
        assert "\\ud83d" in document
        assert server.ask("POST", CHAT, document.encode()).error(400)["type"] == "invalid_request_error"
        with WebSocketClient(server) as socket:
            socket.send_text('{"type":"generate","id":"a",' + document[1:])
            assert socket.receive_json()["type"] == "error"

    @pytest.mark.parametrize("depth", [50, 500, 5000])
    def test_deep_schemas(self, server: Server, depth: int) -> None:
        schema = '{"items":' * depth + "{}" + "}" * depth
        for form in (
            f'"response_format":{{"type":"json_schema","json_schema":{{"name":"x","schema":{schema}}}}}',
            f'"tools":[{{"type":"function","function":{{"name":"f","parameters":{schema}}}}}],"tool_choice":"required"',
            f'"tools":[{{"type":"function","function":{{"name":"f","parameters":{schema}}}}}]',
        ):
            body = '{"messages":[{"role":"user","content":"x"}],"max_tokens":2,' + form + "}"
            assert server.ask("POST", CHAT, body.encode()).status in (200, 400)
