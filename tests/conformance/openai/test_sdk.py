"""The official Python SDK against the server, where it is installed: what it parses is what its users see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from conformance_kit.rules import not_offered, rule
from conformance_kit.target import PROMPT, Target

SDK = "PyPI openai"
MESSAGES: list[Any] = [{"role": "user", "content": PROMPT}]


@pytest.fixture
def client(target: Target) -> Iterator[Any]:
    try:
        from openai import DefaultHttpxClient, OpenAI
    except ImportError:
        not_offered("the package openai is not installed here")
    url = target.settings.base_url.rstrip("/").removesuffix("/v1") + "/v1"
    key = target.settings.api_key or "none"
    http2 = target.settings.http2
    with (
        DefaultHttpxClient(http1=not http2, http2=http2, verify=target.tls_context("h2")) as http,
        OpenAI(base_url=url, api_key=key, max_retries=0, timeout=30, http_client=http) as made,
    ):
        yield made


@rule("a chat completion parses", SDK)
def test_chat(target: Target, client: Any) -> None:
    found = client.chat.completions.create(model=target.model, messages=MESSAGES, max_tokens=8)
    assert found.choices[0].message.role == "assistant" and found.usage.total_tokens > 0


@rule("a stream iterates to its end, and its parts join to the whole answer", SDK)
def test_stream(target: Target, client: Any) -> None:
    ask: dict[str, Any] = {"model": target.model, "messages": MESSAGES, "max_tokens": 16, "temperature": 0}
    with client.chat.completions.create(**ask, stream=True) as stream:
        parts = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(parts) == client.chat.completions.create(**ask).choices[0].message.content


@rule("usage comes in the last chunk", SDK)
def test_stream_usage(target: Target, client: Any) -> None:
    options: Any = {"include_usage": True}
    stream = client.chat.completions.create(
        model=target.model, messages=MESSAGES, max_tokens=5, stream=True, stream_options=options
    )
    chunks = list(stream)
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens > 0
    assert all(chunk.usage is None for chunk in chunks[:-1])


@rule("the SDK's accumulating helper knows every chunk", SDK)
def test_stream_helper(target: Target, client: Any) -> None:
    with client.chat.completions.stream(model=target.model, messages=MESSAGES, max_tokens=8) as stream:
        kinds = {event.type for event in stream}
        found = stream.current_completion_snapshot
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert found.choices[0].finish_reason in ("stop", "length") and found.choices[0].message.content


@rule("a stream that its reader leaves is closed without an error", SDK)
def test_stream_left(target: Target, client: Any) -> None:
    with client.chat.completions.create(model=target.model, messages=MESSAGES, max_tokens=500, stream=True) as stream:
        next(iter(stream))
    assert client.models.list().data


@rule("a text completion parses, streamed or not", SDK)
@pytest.mark.parametrize("stream", [False, True])
def test_completion(target: Target, client: Any, stream: bool) -> None:
    if target.ask("POST", "/v1/completions", target.completion()).status in (404, 405):
        not_offered("text completions are not there")
    found = client.completions.create(model=target.model, prompt="Once", max_tokens=8, stream=stream)
    text = "".join(chunk.choices[0].text for chunk in found) if stream else found.choices[0].text
    assert text


@rule("the list of models parses, and a model by its id", SDK)
def test_models(target: Target, client: Any) -> None:
    names = [model.id for model in client.models.list()]
    assert target.model in names
    assert client.models.retrieve(names[0]).id == names[0]


@rule("n choices and log probabilities parse", SDK)
def test_choices(target: Target, client: Any) -> None:
    found = client.chat.completions.create(
        model=target.model, messages=MESSAGES, max_tokens=4, n=2, logprobs=True, top_logprobs=1
    )
    assert [choice.index for choice in found.choices] == [0, 1]
    assert found.choices[0].logprobs.content[0].top_logprobs


ERRORS = [
    ("BadRequestError", {"messages": []}),
    ("BadRequestError", {"temperature": -3}),
    ("NotFoundError", {"model": "no-such-model"}),
]


@rule("errors become the exceptions that applications catch", SDK)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("name", "change"), ERRORS)
def test_errors(target: Target, client: Any, name: str, change: dict[str, Any], stream: bool) -> None:
    import openai

    ask = {"model": target.model, "messages": MESSAGES, "max_tokens": 4, "stream": stream, **change}
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(**ask)
    assert type(caught.value).__name__ == name
    assert caught.value.request_id and caught.value.body["message"]


@rule("a wrong key is an AuthenticationError", SDK)
def test_wrong_key(target: Target, client: Any) -> None:
    import openai

    if not target.settings.api_key:
        not_offered("no key was given (--api-key)")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
