"""Answers whose form is required over the Messages API: `tool_choice` any and tool, strict tools and output formats.

The synthetic engine writes whatever the grammar allows, so what holds here holds for any model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic
from jsonschema import Draft202012Validator

from tests.support.messages import MESSAGES, MODEL, assembled, error_of, message, text_of, typed
from tests.support.serving import Server

pytestmark = pytest.mark.synthetic

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "kind": {"enum": ["a", "b"]}, "on": {"type": "boolean"}},
    "required": ["name", "kind", "on"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [{"name": name, "description": name, "input_schema": SCHEMA} for name in ("one", "two")]
VALID = Draft202012Validator(SCHEMA)
FORMAT: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
BEGUN = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "{"}]
SEEDS = range(4)  # prompts, each with an answer of its own
ENOUGH = 600


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def both(server: Server, content: str, **fields: Any) -> dict[str, Any]:
    """The message, streamed and whole, which must say the same."""
    body = message(content, max_tokens=ENOUGH, **{"temperature": 0, **fields})
    streamed = assembled(typed(server.ask("POST", MESSAGES, {**body, "stream": True}).events()))
    answer = server.ask("POST", MESSAGES, body)
    assert answer.status == 200, bytes(answer.body)
    found: dict[str, Any] = answer.json()
    for each in (streamed, found):
        for block in each["content"]:
            block.pop("id", None)
    assert (streamed["content"], streamed["stop_reason"]) == (found["content"], found["stop_reason"])
    return found


@pytest.mark.parametrize("seed", SEEDS)
class TestCalls:
    def test_any_is_calls_and_nothing_else(self, server: Server, seed: int) -> None:
        found = both(server, f"any {seed}", tools=TOOLS, tool_choice={"type": "any"})
        assert found["content"] and all(block["type"] == "tool_use" for block in found["content"])
        self.check(found)

    def test_one_of_any(self, server: Server, seed: int) -> None:
        choice = {"type": "any", "disable_parallel_tool_use": True}
        found = both(server, f"one of any {seed}", tools=TOOLS, tool_choice=choice)
        assert len(found["content"]) == 1 and found["content"][0]["type"] == "tool_use"
        self.check(found)

    def test_the_one_that_is_named(self, server: Server, seed: int) -> None:
        found = both(server, f"named {seed}", tools=TOOLS, tool_choice={"type": "tool", "name": "two"})
        assert [block["name"] for block in found["content"]] == ["two"]
        self.check(found)

    @staticmethod
    def check(found: dict[str, Any]) -> None:
        assert found["stop_reason"] in ("tool_use", "max_tokens")
        whole = found["content"] if found["stop_reason"] == "tool_use" else found["content"][:-1]
        for block in whole:
            VALID.validate(block["input"])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_an_output_format_is_kept(server: Server, field: str, seed: int) -> None:
    fields = {"output_config": FORMAT} if field == "output_config" else {"output_format": FORMAT["format"]}
    found = both(server, f"{field} {seed}", **fields)
    assert found["stop_reason"] == "end_turn"
    VALID.validate(json.loads(text_of(found)))


@pytest.mark.parametrize("tokens", [1, 5, 12])
def test_what_max_tokens_cuts_is_a_prefix(server: Server, tokens: int) -> None:
    body = message("cut", output_config=FORMAT, temperature=0)
    whole = text_of(server.ask("POST", MESSAGES, {**body, "max_tokens": ENOUGH}).json())
    cut = server.ask("POST", MESSAGES, {**body, "max_tokens": tokens}).json()
    assert cut["stop_reason"] == "max_tokens"
    assert whole.startswith(text_of(cut)) and len(text_of(cut)) < len(whole)


def test_strict_tools(server: Server) -> None:
    tools = [{**tool, "strict": True} for tool in TOOLS]
    found = both(server, "strict", tools=tools)
    for block in found["content"]:
        if block["type"] == "tool_use":
            VALID.validate(block["input"])


def test_by_the_official_client(client: Anthropic) -> None:
    answer = client.messages.create(
        model=MODEL,
        max_tokens=ENOUGH,
        messages=[{"role": "user", "content": "x"}],
        tools=TOOLS,
        tool_choice={"type": "tool", "name": "one"},
    )
    assert answer.stop_reason == "tool_use" and answer.content[0].type == "tool_use"
    with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format\.schema"):
        client.messages.create(
            model=MODEL,
            max_tokens=9,
            messages=[{"role": "user", "content": "x"}],
            output_config={"format": {"type": "json_schema", "schema": {"type": "nonsense"}}},
        )


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [{**TOOLS[0], "strict": True, "input_schema": {"type": "x"}}]}, "tools.0.input_schema"),
        ({"output_config": FORMAT, "output_format": FORMAT["format"]}, "output_format"),
        ({"output_config": FORMAT, "messages": BEGUN}, "messages"),
    ],
)  # fmt: skip
def test_refusals(server: Server, fields: dict[str, Any], path: str) -> None:
    error = error_of(server.ask("POST", MESSAGES, {**message("x"), **fields}), 400)
    assert error["message"].startswith(path)
