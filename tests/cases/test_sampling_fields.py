"""The fields that change how tokens are chosen, and those that tell how likely they were, through a real server: on
chat, completions, GET and WebSocket, and as the official SDK sends and reads them."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.support.serving import Server, WebSocketClient, chat

FIELDS: dict[str, Any] = {
    "frequency_penalty": 0.5,
    "presence_penalty": -2,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": -100, "300": 1.5},
    "max_tokens": 2,
}
QUERY = "&".join(
    f"{name}={value}".replace("'", "%22").replace(" ", "").replace("{", "%7B") for name, value in FIELDS.items()
)


def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("stream", [False, True])
def test_every_route_takes_them(server: Server, stream: bool) -> None:
    assert server.ask("POST", "/v1/chat/completions", {**chat("hi", stream=stream), **FIELDS}).status == 200
    assert server.ask("POST", "/v1/completions", {"prompt": "hi", "stream": stream, **FIELDS}).status == 200
    assert server.ask("GET", f"/v1/generate?prompt=hi&{QUERY}").status == 200
    with WebSocketClient(server) as socket:
        socket.send_json(type="generate", id="a", **chat("hi"), **FIELDS)
        assert [socket.receive_json()["type"] for _ in range(4)] == ["started", "token", "token", "done"]


def test_the_sdk_reads_an_echo_with_logprobs_streamed_or_not(server: Server) -> None:
    fields: dict[str, Any] = {"model": "synthetic", "prompt": "héy", "temperature": 0, "max_tokens": 2}
    fields |= {"echo": True, "logprobs": 2}
    with client(server) as api:
        whole = api.completions.create(**fields).choices[0]
        chunks = [chunk.choices[0] for chunk in api.completions.create(**fields, stream=True) if chunk.choices]
    assert whole.text.startswith("héy") and len(whole.text) == 3 + 2 * 5
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert whole.logprobs is not None and whole.logprobs.token_logprobs is not None
    assert whole.logprobs.tokens is not None and len(whole.logprobs.tokens) == 4 + 2
    assert whole.logprobs.token_logprobs[0] is None
    assert all(value is not None and value < 0 for value in whole.logprobs.token_logprobs[1:])
    assert whole.logprobs.text_offset == [0, 1, 1, 2, 3, 8]
    streamed = [value for chunk in chunks if chunk.logprobs for value in chunk.logprobs.token_logprobs or ()]
    assert streamed == whole.logprobs.token_logprobs


def test_prompt_logprobs_come_with_the_whole_answer_only(server: Server) -> None:
    answer = server.ask("POST", "/v1/completions", {"prompt": "abc", "prompt_logprobs": 1, "max_tokens": 1}).json()
    assert [entry and list(entry) for entry in answer["choices"][0]["prompt_logprobs"]] == [None, ["98"], ["99"]]
    answer = server.ask("POST", "/v1/chat/completions", {**chat("abc"), "prompt_logprobs": 0, "max_tokens": 1}).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    body = {"prompt": "abc", "prompt_logprobs": 1, "stream": True}
    assert server.ask("POST", "/v1/completions", body).error(400)["param"] == "prompt_logprobs"
    with WebSocketClient(server) as socket:
        socket.send_json(type="generate", id="a", prompt="abc", prompt_logprobs=1)
        assert socket.receive_json()["error"]["param"] == "prompt_logprobs"
    assert server.ask("GET", "/v1/generate?prompt=x&prompt_logprobs=1").error(400)["param"] == "prompt_logprobs"


def test_an_echo_over_websocket_is_text_like_any_other(server: Server) -> None:
    with WebSocketClient(server) as socket:
        socket.send_json(type="generate", id="a", prompt="abc", echo=True, logprobs=1, max_tokens=1)
        assert socket.receive_json()["type"] == "started"
        text = ""
        while (message := socket.receive_json())["type"] == "token":
            text += message["text"]
    assert message["type"] == "done"
    assert text.startswith("abc") and len(text) == 8
