"""Answers that must have a form, from the outside: the official SDK, streamed and not, resumed, cut, refused; and calls
that must come. The synthetic engine follows grammars by the same path as a model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.support.probes import kill_engine, wait_idle
from tests.support.readings import EVENT_STREAM, NDJSON, PLAIN
from tests.support.schemas import BAD, BAD_NUMBERS, PERSON, SCHEMAS
from tests.support.serving import Answer, Server, WebSocketClient, chat

pytestmark = pytest.mark.synthetic

MODEL = "synthetic"
CHAT = "/v1/chat/completions"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


class Step(BaseModel):
    explanation: str
    done: bool


class Plan(BaseModel):
    steps: list[Step]
    kind: Literal["short", "long"]
    note: str | None


def form(schema: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **fields}}


def tool(name: str, parameters: Any = None, **fields: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


TOOLS = [tool("add", PERSON), tool("get_weather", SCHEMAS["optional"]), tool("now")]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(scripts=[{"match": "plays nonsense", "tokens": ["no", " JSON"]}]) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


class TestJson:
    @pytest.mark.parametrize("name", SCHEMAS)
    def test_each_schema_streamed_and_whole(self, client: OpenAI, name: str) -> None:
        asked: dict[str, Any] = {
            "model": MODEL,
            "messages": HELLO,
            "response_format": form(SCHEMAS[name], strict=True),
            "max_tokens": 2000,
        }
        for seed in range(3):
            whole = client.chat.completions.create(**asked, seed=seed).choices[0]
            assert whole.finish_reason == "stop"
            jsonschema.validate(json.loads(whole.message.content or ""), SCHEMAS[name])
            with client.chat.completions.create(**asked, seed=seed, stream=True) as stream:
                text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            assert text == whole.message.content

    def test_any_object(self, client: OpenAI) -> None:
        for seed in range(5):
            answer = client.chat.completions.create(
                model=MODEL, messages=HELLO, seed=seed, response_format={"type": "json_object"}
            )
            assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)

    @pytest.mark.parametrize("given", [{"type": "text"}, None])
    def test_free_text(self, client: OpenAI, given: Any) -> None:
        answer = client.chat.completions.create(model=MODEL, messages=HELLO, response_format=given, max_tokens=3)
        assert answer.choices[0].finish_reason == "length"

    def test_parse(self, client: OpenAI) -> None:
        """The SDK's own helper writes the schema, and reads the answer with pydantic."""
        for seed in range(3):
            answer = client.chat.completions.parse(model=MODEL, messages=HELLO, response_format=Plan, seed=seed)
            assert isinstance(answer.choices[0].message.parsed, Plan)
        with client.chat.completions.stream(model=MODEL, messages=HELLO, response_format=Plan, seed=1) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_completion()
        assert "content.done" in kinds and isinstance(final.choices[0].message.parsed, Plan)

    def test_choices_differ_and_all_are_valid(self, client: OpenAI) -> None:
        answer = client.chat.completions.create(
            model=MODEL, messages=HELLO, n=4, seed=3, response_format=form(PERSON), logprobs=True, top_logprobs=2
        )
        texts = [choice.message.content or "" for choice in answer.choices]
        for choice, text in zip(answer.choices, texts, strict=True):
            jsonschema.validate(json.loads(text), PERSON)
            assert choice.logprobs is not None and choice.logprobs.content is not None
            assert b"".join(bytes(entry.bytes or ()) for entry in choice.logprobs.content).decode() == text
        assert len(set(texts)) > 1

    def test_cut_by_max_tokens_it_is_a_prefix(self, client: OpenAI) -> None:
        def answer(**fields: Any) -> Any:
            return client.chat.completions.create(
                model=MODEL, messages=HELLO, seed=5, response_format=form(PERSON), **fields
            )

        whole = answer()
        tokens = whole.usage.completion_tokens
        for max_tokens in range(1, tokens):
            cut = answer(max_tokens=max_tokens).choices[0]
            shown = cut.message.content or ""
            assert (whole.choices[0].message.content or "").startswith(shown)
            assert cut.finish_reason == ("stop" if shown == whole.choices[0].message.content else "length")

    def test_in_every_framing(self, server: Server) -> None:
        body = chat("hello", seed=2, response_format=form(PERSON))
        text = server.ask("POST", CHAT, body).json()["choices"][0]["message"]["content"]
        streamed = body | {"stream": True}
        assert server.ask("POST", CHAT, streamed, [PLAIN]).body.decode() == text
        lines = server.ask("POST", CHAT, streamed, [NDJSON]).lines()
        assert "".join(c["delta"].get("content") or "" for line in lines for c in line.get("choices", ())) == text
        with WebSocketClient(server) as socket:
            socket.send_json(type="generate", id="a", **body)
            messages = [socket.receive_json()]
            while messages[-1]["type"] not in ("done", "error"):
                messages.append(socket.receive_json())
        assert "".join(m["text"] for m in messages if m["type"] == "token") == text

    def test_a_text_that_is_none_of_its_grammars_is_an_error_in_band(self, server: Server) -> None:
        """A model can't write it; a script can. Nothing then looks like an answer."""
        body = chat("plays nonsense", response_format={"type": "json_object"}, stream=True)
        chunks = server.ask("POST", CHAT, body).chunks()
        assert chunks[-1]["error"]["code"] == "error"


class TestResume:
    def test_at_every_position(self, server: Server) -> None:
        answer = server.ask("POST", CHAT, chat("hi", stream=True, seed=1, response_format=form(PERSON)), [EVENT_STREAM])
        whole = blocks(answer)
        id_ = answer.header("x-stream-id")
        for position in range(len(whole)):
            again = server.ask("GET", f"/v1/streams/{id_}", None, [("Last-Event-ID", f"{id_}:{position}")])
            assert (blocks(again) if again.status == 200 else []) == whole[position + 1 :]

    @pytest.mark.parametrize("fields", [{"response_format": form(PERSON)}, {"tools": TOOLS, "tool_choice": "required"}])
    def test_the_engine_dies_and_the_next_one_goes_on(self, fields: dict[str, Any]) -> None:
        body = chat("hi", stream=True, seed=4, **fields)
        with Server("--synthetic-step-ms", "5") as server:
            alone = server.ask("POST", CHAT, body)
            with server.connect() as client:
                client.request("POST", CHAT, body)
                client.begin("POST")
                client.read_events(4)
                kill_engine(server)
                broken = client.finish()
            assert said(broken) == said(alone)
            wait_idle(server)


def blocks(answer: Answer) -> list[bytes]:
    *events, rest = bytes(answer.body).split(b"\n\n")
    assert rest == b""
    return events


def said(answer: Answer) -> tuple[str, list[str], str]:
    """Text, the calls' names and arguments joined, and the reason."""
    choices = [choice for chunk in answer.chunks() for choice in chunk["choices"]]
    parts = [part["function"] for c in choices for part in c["delta"].get("tool_calls", ())]
    calls = [part.get("name", "") + part["arguments"] for part in parts]
    text = "".join(c["delta"].get("content") or "" for c in choices)
    return text, calls, next(c["finish_reason"] for c in choices if c["finish_reason"])


def check_calls(message: Any) -> list[str]:
    schemas = {each["function"]["name"]: each["function"]["parameters"] for each in TOOLS}
    for call in message.tool_calls:
        jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name] or {"maxProperties": 0})
    return [call.function.name for call in message.tool_calls]


class TestCalls:
    @pytest.mark.parametrize("seed", range(6))
    def test_required(self, client: OpenAI, seed: int) -> None:
        asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "tools": TOOLS, "tool_choice": "required"}
        choice = client.chat.completions.create(**asked, seed=seed).choices[0]
        assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
        assert check_calls(choice.message)
        with client.chat.completions.stream(**asked, seed=seed) as stream:
            streamed = stream.get_final_completion().choices[0]
        assert [c.function.arguments for c in streamed.message.tool_calls or ()] == [
            c.function.arguments for c in choice.message.tool_calls or ()
        ]

    @pytest.mark.parametrize("tokens", [1, 3, 5, 8, 12, 20])
    def test_required_and_cut_is_never_text(self, client: OpenAI, tokens: int) -> None:
        """Of what must become a call there is nothing to say before it has a name."""
        asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "tools": TOOLS, "tool_choice": "required"}
        choice = client.chat.completions.create(**asked, max_tokens=tokens, seed=1).choices[0]
        assert (choice.message.content or "", choice.finish_reason) == ("", "length")
        with client.chat.completions.create(**asked, max_tokens=tokens, seed=1, stream=True) as stream:
            assert not any(chunk.choices[0].delta.content for chunk in stream if chunk.choices)

    @pytest.mark.parametrize("name", ["add", "get_weather", "now"])
    def test_named(self, client: OpenAI, name: str) -> None:
        chosen: Any = {"type": "function", "function": {"name": name}}
        for seed in range(3):
            answer = client.chat.completions.create(
                model=MODEL, messages=HELLO, tools=TOOLS, tool_choice=chosen, seed=seed
            )
            assert check_calls(answer.choices[0].message) == [name]
            assert answer.choices[0].finish_reason == "tool_calls"

    def test_allowed_and_one_at_most(self, client: OpenAI) -> None:
        allowed: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TOOLS[2]]}}
        allowed["allowed_tools"]["tools"] = [{"type": "function", "function": {"name": "now"}}]
        for seed in range(3):
            answer = client.chat.completions.create(
                model=MODEL, messages=HELLO, tools=TOOLS, tool_choice=allowed, parallel_tool_calls=False, seed=seed
            )
            assert check_calls(answer.choices[0].message) == ["now"]

    def test_cut_by_max_tokens(self, client: OpenAI) -> None:
        asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "tools": TOOLS[:1], "tool_choice": "required"}
        whole = client.chat.completions.create(**asked, seed=2)
        arguments = (whole.choices[0].message.tool_calls or [])[0].function.arguments
        assert whole.usage is not None
        for max_tokens in range(1, min(whole.usage.completion_tokens, 90), 4):
            cut = client.chat.completions.create(**asked, seed=2, max_tokens=max_tokens).choices[0]
            assert cut.finish_reason == "length"
            if max_tokens > len("<tool_call"):  # a shorter text might have become any
                assert not cut.message.content
            for call in cut.message.tool_calls or ():
                assert arguments.startswith(call.function.arguments)

    def test_strict_tools_hold_free_calls_to_their_schema(self, client: OpenAI) -> None:
        """Free text may hold calls; ones that are strict are as they should be."""
        strict = [tool("add", PERSON, strict=True)]
        for seed in range(4):
            answer = client.chat.completions.create(
                model=MODEL, messages=HELLO, tools=strict, seed=seed, max_tokens=200
            )
            assert answer.choices[0].finish_reason in ("stop", "tool_calls", "length")
            if answer.choices[0].finish_reason == "tool_calls":
                check_calls(answer.choices[0].message)

    def test_a_form_and_tools_together(self, client: OpenAI) -> None:
        kinds = set()
        for seed in range(12):
            answer = client.chat.completions.create(
                model=MODEL, messages=HELLO, tools=TOOLS, seed=seed, response_format=form(SCHEMAS["array"])
            )
            choice = answer.choices[0]
            kinds.add(choice.finish_reason)
            for call in choice.message.tool_calls or ():
                assert isinstance(json.loads(call.function.arguments), dict)  # no more is promised without strict
            if not choice.message.tool_calls:
                jsonschema.validate(json.loads(choice.message.content or ""), SCHEMAS["array"])
        assert kinds == {"stop", "tool_calls"}

    def test_pydantic_tools(self, client: OpenAI) -> None:
        tools = [openai.pydantic_function_tool(Plan)]
        answer = client.chat.completions.parse(
            model=MODEL, messages=HELLO, tools=tools, tool_choice="required", parallel_tool_calls=False
        )
        (call,) = answer.choices[0].message.tool_calls or ()
        assert isinstance(call.function.parsed_arguments, Plan)


class TestOtherApis:
    """The same forms in the terms of Responses and Messages."""

    def test_responses(self, client: OpenAI) -> None:
        for seed in range(3):
            given: Any = {"format": {"type": "json_schema", "name": "x", "schema": PERSON, "strict": True}}
            answer = client.responses.create(model=MODEL, input="hi", text=given, extra_body={"seed": seed})
            jsonschema.validate(json.loads(answer.output_text), PERSON)
            assert answer.text is not None and answer.text.format is not None
            assert answer.text.format.type == "json_schema"
            parsed = client.responses.parse(model=MODEL, input="hi", text_format=Plan, extra_body={"seed": seed})
            assert isinstance(parsed.output_parsed, Plan)
            loose = client.responses.create(model=MODEL, input="hi", text={"format": {"type": "json_object"}})
            assert isinstance(json.loads(loose.output_text), dict)

    def test_responses_must_call(self, client: OpenAI) -> None:
        flat: Any = [{"type": "function", **each["function"], "strict": False} for each in TOOLS]
        answer = client.responses.create(model=MODEL, input="hi", tools=flat, tool_choice="required")
        assert answer.output and all(item.type == "function_call" for item in answer.output)
        named: Any = {"type": "function", "name": "add"}
        answer = client.responses.create(model=MODEL, input="hi", tools=flat, tool_choice=named)
        (item,) = answer.output
        assert item.type == "function_call" and item.name == "add"
        jsonschema.validate(json.loads(item.arguments), PERSON)

    def test_responses_refuses(self, client: OpenAI) -> None:
        given: Any = {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model=MODEL, input="hi", text=given)
        assert caught.value.param == "text.format.schema"
        flat: Any = [{"type": "function", "name": "f", "parameters": {"not": {}}, "strict": True}]
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model=MODEL, input="hi", tools=flat)
        assert caught.value.param == "tools.0.parameters"

    @pytest.mark.parametrize(("choice", "names"), [({"type": "any"}, None), ({"type": "tool", "name": "add"}, ["add"])])
    def test_messages(self, server: Server, choice: Any, names: list[str] | None) -> None:
        tools = [{"name": "add", "input_schema": PERSON}, {"name": "other", "input_schema": {"type": "object"}}]
        body = chat("hi", model=MODEL, max_tokens=2000, tools=tools, tool_choice=choice)
        answer = server.ask("POST", "/v1/messages", body, [("anthropic-version", "2023-06-01")]).json()
        assert answer["stop_reason"] == "tool_use"
        assert answer["content"] and all(block["type"] == "tool_use" for block in answer["content"])
        assert names is None or [block["name"] for block in answer["content"]] == names
        for block in answer["content"]:
            if block["name"] == "add":
                jsonschema.validate(block["input"], PERSON)

    def test_messages_refuses(self, server: Server) -> None:
        tools = [{"name": "add", "input_schema": {"type": "object", "not": {}}, "strict": True}]
        body = chat("hi", model=MODEL, max_tokens=20, tools=tools)
        answer = server.ask("POST", "/v1/messages", body, [("anthropic-version", "2023-06-01")])
        assert answer.status == 400
        assert answer.json()["error"]["message"].startswith("tools.0.input_schema")


class TestRefusals:
    """400 with the field's path, before any header of a stream."""

    @pytest.mark.parametrize(("schema", "word"), BAD + BAD_NUMBERS)
    def test_a_schema_that_can_not_be_enforced(self, client: OpenAI, schema: dict[str, Any], word: str) -> None:
        for stream in (False, True):
            asked: Any = form(schema)
            with pytest.raises(openai.BadRequestError) as caught:
                client.chat.completions.create(model=MODEL, messages=HELLO, response_format=asked, stream=stream)
            assert caught.value.param == "response_format.json_schema.schema"
            assert caught.value.code == "invalid_schema" and word in caught.value.message

    @pytest.mark.parametrize("fields", [{"tool_choice": "required"}, {"strict": True}])
    def test_a_tools_schema(self, client: OpenAI, fields: dict[str, Any]) -> None:
        given = dict(fields)
        strict = given.pop("strict", None)
        for bad in ({"type": "object", "properties": {"a": {"not": {}}}}, {"type": "array"}):
            tools = [tool("ok"), tool("f", bad, strict=strict)]
            with pytest.raises(openai.BadRequestError) as caught:
                client.chat.completions.create(model=MODEL, messages=HELLO, tools=tools, **given)
            assert caught.value.param == "tools.1.function.parameters"
            # Where nothing is enforced, the model is shown the schema as it is.
            tools = [tool("ok"), tool("f", bad)]
            client.chat.completions.create(model=MODEL, messages=HELLO, tools=tools, max_tokens=1)

    @pytest.mark.parametrize(
        ("given", "param"),
        [
            ("json_object", "response_format"),
            ({}, "response_format.type"),
            ({"type": "json"}, "response_format.type"),
            ({"type": "json_schema"}, "response_format.json_schema"),
            ({"type": "json_schema", "json_schema": {"schema": {}}}, "response_format.json_schema.name"),
            ({"type": "json_schema", "json_schema": {"name": "x", "schema": []}}, "response_format.json_schema.schema"),
            ({"type": "json_schema", "json_schema": {"name": "x", "strict": 1}}, "response_format.json_schema.strict"),
            ({"type": "json_schema", "schema": {}}, "response_format.schema"),
            (form({"type": "string", "enum": ["x" * 300_000]}), "response_format.json_schema.schema"),
        ],
    )
    def test_a_bad_format(self, server: Server, given: Any, param: str) -> None:
        for stream in (False, True):
            error = server.ask("POST", CHAT, chat("hi", response_format=given, stream=stream)).error(400)
            assert error["param"] == param
