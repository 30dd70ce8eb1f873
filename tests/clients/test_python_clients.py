"""Event-stream clients from PyPI, each of which must show a scripted stream exactly (issue 3, 5)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
import sseclient
from httpx_sse import connect_sse

from tests.clients.scripts import FAULT, FAULTY, HARD, HARD_TEXT, LONG, LONG_TEXT
from tests.support.cutter import Cutter
from tests.support.serving import DEADLINE_S, Server, chat, joined

TEXTS = {HARD: HARD_TEXT, LONG: LONG_TEXT}
MODEL = "synthetic"


def _text(data: list[str]) -> str:
    assert data[-1] == "[DONE]"
    return joined([json.loads(each) for each in data[:-1]])


@pytest.mark.parametrize("prompt", TEXTS)
def test_httpx_sse(server: Server, prompt: str) -> None:
    body = chat(prompt, stream=True)
    with (
        httpx.Client(timeout=DEADLINE_S) as client,
        connect_sse(client, "POST", f"{server.url}/v1/chat/completions", json=body) as source,
    ):
        events = list(source.iter_sse())
    assert _text([event.data for event in events]) == TEXTS[prompt]
    assert {event.event for event in events} == {"message"}
    assert [int(event.id.rpartition(":")[2]) for event in events] == list(range(len(events)))
    assert events[0].retry == 1000


@pytest.mark.parametrize("prompt", TEXTS)
def test_sseclient_py(server: Server, prompt: str) -> None:
    """Its line splitting knows more line ends than SSE has."""
    with httpx.stream("GET", f"{server.url}/v1/generate", params={"prompt": prompt}, timeout=DEADLINE_S) as answer:
        events = list(sseclient.SSEClient(answer.iter_bytes()).events())
    assert _text([event.data for event in events]) == TEXTS[prompt]


def test_pings_come_in_the_pauses(server: Server) -> None:
    """What the other tests rely on: their clients do meet pings."""
    with server.connect() as client:
        client.request("GET", f"/v1/generate?prompt={HARD.replace(' ', '+')}")
        assert "ping" in client.answer().comments()


def test_sseclient_py_goes_on_behind_a_cut(server: Server) -> None:
    """It does not reconnect by itself: its user does, with the last id."""
    with Cutter(server.port, [4000, 3000]) as cutter:
        data: list[str] = []
        headers: dict[str, str] = {}
        while not data or data[-1] != "[DONE]":
            with httpx.stream("GET", f"{cutter.url}/v1/generate", params={"prompt": LONG}, headers=headers) as answer:
                try:
                    for event in sseclient.SSEClient(answer.iter_bytes()).events():
                        data.append(event.data)
                        headers["Last-Event-ID"] = event.id or ""
                except httpx.RemoteProtocolError:
                    assert len(cutter.seen) <= 2
        assert len(cutter.seen) == 3
    assert _text(data) == LONG_TEXT


# The official SDK


def _sdk(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("prompt", TEXTS)
def test_openai_chat(server: Server, prompt: str) -> None:
    messages: Any = [{"role": "user", "content": prompt}]
    with _sdk(server) as sdk:
        with sdk.chat.completions.create(
            model=MODEL, messages=messages, stream=True, stream_options={"include_usage": True}
        ) as stream:
            chunks = list(stream)
        whole = sdk.chat.completions.create(model=MODEL, messages=messages)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content == TEXTS[prompt]
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert [c.finish_reason for chunk in chunks for c in chunk.choices][-1] == whole.choices[0].finish_reason


@pytest.mark.parametrize("prompt", TEXTS)
def test_openai_completions(server: Server, prompt: str) -> None:
    with _sdk(server) as sdk:
        with sdk.completions.create(model=MODEL, prompt=prompt, stream=True) as stream:
            text = "".join(chunk.choices[0].text for chunk in stream)
        whole = sdk.completions.create(model=MODEL, prompt=prompt)
    assert text == whole.choices[0].text == TEXTS[prompt]


def test_openai_async(server: Server) -> None:
    async def read() -> str:
        messages: Any = [{"role": "user", "content": HARD}]
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
            stream = await sdk.chat.completions.create(model=MODEL, messages=messages, stream=True)
            async with stream:
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(read()) == HARD_TEXT


def test_openai_sees_an_error_in_the_stream(server: Server) -> None:
    """Never a text that looks whole."""
    messages: Any = [{"role": "user", "content": FAULTY}]
    seen: list[Any] = []
    with _sdk(server) as sdk, sdk.chat.completions.create(model=MODEL, messages=messages, stream=True) as stream:
        chunks = iter(stream)
        with pytest.raises(openai.APIError, match=FAULT):
            seen.extend(chunks)
    choices = [chunk.choices[0] for chunk in seen]
    assert "".join(choice.delta.content or "" for choice in choices) == "one two three"
    assert {choice.finish_reason for choice in choices} == {None}
