"""Event-stream clients from npm, in Node, each of which must show a scripted stream exactly (issue 3, 5)."""

from __future__ import annotations

import json
import subprocess
from typing import Any
from urllib.parse import quote

import pytest

from tests.clients.conftest import FOLDER
from tests.clients.scripts import ANSWERED, CALLING, FAULT, FAULTY, HARD, HARD_TEXT, LONG, LONG_TEXT
from tests.support.cutter import Cutter
from tests.support.messages import message, text_of
from tests.support.serving import DEADLINE_S, Server, chat, joined

TEXTS = {HARD: HARD_TEXT, LONG: LONG_TEXT}
# EventSource waits three seconds unless `retry:` says less; the server says one.
DEFAULT_RETRY_S = 3.0
RETRY_S = 1.0


def _read(node: str, client: str, url: str, body: Any = None) -> Any:
    argv = [node, str(FOLDER / "read.mjs"), client, url, json.dumps(body)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=2 * DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _text(data: list[str]) -> str:
    assert data[-1] == "[DONE]"
    return joined([json.loads(each) for each in data[:-1]])


def _positions(ids: list[str]) -> list[int]:
    return [int(each.rpartition(":")[2]) for each in ids]


def _path(prompt: str) -> str:
    return f"/v1/generate?prompt={quote(prompt)}"


@pytest.mark.parametrize("prompt", TEXTS)
def test_eventsource(server: Server, node: str, prompt: str) -> None:
    """It comes back behind `[DONE]`, as the standard says, and 204 ends that."""
    got = _read(node, "eventsource", server.url + _path(prompt))
    assert _text(got["data"]) == TEXTS[prompt]
    assert got["opens"] == 1
    assert got["errors"][-1] == 204


@pytest.mark.parametrize("reset", [False, True], ids=["FIN", "RST"])
def test_eventsource_behind_cuts(server: Server, node: str, reset: bool) -> None:
    with Cutter(server.port, [2500, 9000, 613], reset=reset) as cutter:
        got = _read(node, "eventsource", cutter.url + _path(LONG))
    assert _text(got["data"]) == LONG_TEXT
    assert _positions(got["ids"]) == list(range(len(got["data"])))
    first, *others = cutter.seen
    assert first.header("last-event-id") is None
    named = [other.header("last-event-id") for other in others]
    assert all(each in got["ids"] for each in named)
    assert named[-1] == got["ids"][-1]  # answered by 204
    waits = [after.at - before.cut_at for before, after in zip(cutter.seen, others, strict=False) if before.cut_at]
    assert len(waits) == 3
    assert RETRY_S * 0.9 <= min(waits) < DEFAULT_RETRY_S


@pytest.mark.parametrize("prompt", TEXTS)
def test_eventsource_parser(server: Server, node: str, prompt: str) -> None:
    got = _read(node, "eventsource-parser", server.url + _path(prompt))
    assert _text(got["data"]) == TEXTS[prompt]
    assert _positions(got["ids"]) == list(range(len(got["data"])))
    assert got["retries"] == [1000]
    assert got["errors"] == []
    if prompt == HARD:
        assert set(got["comments"]) == {"ping"}


@pytest.mark.parametrize("prompt", TEXTS)
def test_openai(server: Server, node: str, prompt: str) -> None:
    body = chat(prompt, model="synthetic", stream_options={"include_usage": True})
    got = _read(node, "openai", f"{server.url}/v1", body)
    assert got["text"] == got["whole"] == TEXTS[prompt]
    assert len(got["reasons"]) == 1
    assert got["usage"]["completion_tokens"] > 0


def test_openai_sees_an_error_in_the_stream(server: Server, node: str) -> None:
    got = _read(node, "openai", f"{server.url}/v1", chat(FAULTY, model="synthetic"))
    assert (got["text"], got["reasons"]) == ("one two three", [])
    assert FAULT in got["error"]


@pytest.mark.parametrize("prompt", TEXTS)
def test_openai_responses(server: Server, node: str, prompt: str) -> None:
    got = _read(node, "responses", f"{server.url}/v1", {"model": "synthetic", "input": prompt})
    last = got["last"]
    assert got["text"] == last["output"][0]["content"][0]["text"] == TEXTS[prompt]
    assert got["retrieved"] == {**last, "output_text": TEXTS[prompt]}
    assert [number for _, number in got["events"]] == list(range(len(got["events"])))
    assert got["rest"] == got["events"][3:]
    assert got["events"][-1][0] == ("response.incomplete" if prompt == LONG else "response.completed")


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_ai_sdk_streams_and_calls_a_tool(server: Server, node: str, api: str) -> None:
    """What it makes of the stream it sends back, call and result, and the answer to those comes as text."""
    got = _read(node, "ai-sdk", f"{server.url}/v1", {"api": api, "model": "synthetic", "prompt": CALLING})
    assert got["errors"] == []
    assert got["called"] == [{"city": "Paris 😀"}]
    assert "".join(got["deltas"]) == f"Let me see.It is {ANSWERED}."
    assert got["steps"] == ["tool-calls", "stop"]


@pytest.mark.parametrize("prompt", TEXTS)
def test_anthropic(server: Server, node: str, prompt: str) -> None:
    got = _read(node, "anthropic", server.url, message(prompt, max_tokens=500))
    streamed, whole = got["streamed"], got["whole"]
    assert got["text"] == text_of(streamed) == text_of(whole) == TEXTS[prompt]
    assert "ping" not in got["kinds"]
    assert got["kinds"][0] == "message_start" and got["kinds"][-1] == "message_stop"
    assert streamed["stop_reason"] == whole["stop_reason"] == ("max_tokens" if prompt == LONG else "end_turn")
    for usage in (streamed["usage"], whole["usage"]):
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == got["count"]
    assert streamed["usage"]["output_tokens"] == whole["usage"]["output_tokens"] > 0


def test_anthropic_calls_a_tool(server: Server, node: str) -> None:
    tool = {"name": "get_weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
    got = _read(node, "anthropic", server.url, message(CALLING, tools=[tool]))
    for found in (got["streamed"], got["whole"]):
        text, call = found["content"]
        assert (text["text"], call["name"], call["input"]) == ("Let me see.", "get_weather", {"city": "Paris 😀"})
        assert found["stop_reason"] == "tool_use"


def test_anthropic_sees_an_error_in_the_stream(server: Server, node: str) -> None:
    got = _read(node, "anthropic", server.url, message(FAULTY))
    assert got["text"] == "one two three"
    assert FAULT in got["error"]["message"]
    refused = _read(node, "anthropic", server.url, message(FAULTY, max_tokens=0))
    assert refused["error"]["kind"] == "BadRequestError"
