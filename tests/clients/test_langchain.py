"""LangChain's OpenAI provider, by both of the APIs that it speaks: it streams, and calls a tool (issue 7)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.scripts import ANSWERED, CALLING, HARD, HARD_TEXT
from tests.support.serving import DEADLINE_S, Server


def model(server: Server, *, responses: bool) -> Any:
    from langchain_openai import ChatOpenAI  # heavy, and only these tests need it

    fields: dict[str, Any] = {"base_url": f"{server.url}/v1", "api_key": "none", "model": "synthetic"}
    fields |= {"stream_usage": True, "max_retries": 0, "timeout": DEADLINE_S}
    return ChatOpenAI(**fields, use_responses_api=responses)


BOTH = pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])


@BOTH
def test_it_streams(server: Server, responses: bool) -> None:
    chat = model(server, responses=responses)
    chunks = list(chat.stream(HARD))
    assert "".join(chunk.text for chunk in chunks) == chat.invoke(HARD).text == HARD_TEXT
    usage = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert len(usage) == 1 and usage[0]["output_tokens"] > 0


@BOTH
def test_it_calls_a_tool_and_goes_on_with_what_that_says(server: Server, responses: bool) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    def get_weather(city: str) -> str:
        """The weather of a city."""
        return f"{ANSWERED} in {city}"

    chat = model(server, responses=responses).bind_tools([get_weather])
    message = None
    for chunk in chat.stream(CALLING):
        message = chunk if message is None else message + chunk
    assert message is not None and message.text == "Let me see."
    (call,) = message.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris 😀"})
    result = ToolMessage(get_weather(**call["args"]), tool_call_id=call["id"])
    assert chat.invoke([HumanMessage(CALLING), message, result]).text == f"It is {ANSWERED}."
