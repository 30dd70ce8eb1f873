"""The official Python SDK against the server, where it is installed: what it parses is what its users see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from conformance_kit.rules import not_offered, rule
from conformance_kit.target import PROMPT, Target

SDK = "PyPI anthropic"
MESSAGES: list[Any] = [{"role": "user", "content": PROMPT}]


@pytest.fixture
def client(target: Target) -> Iterator[Any]:
    try:
        from anthropic import Anthropic, DefaultHttpxClient
    except ImportError:
        not_offered("the package anthropic is not installed here")
    url = target.settings.base_url.rstrip("/").removesuffix("/v1")
    key = target.settings.api_key or "none"
    http2 = target.settings.http2
    with (
        DefaultHttpxClient(http1=not http2, http2=http2, verify=target.tls_context("h2")) as http,
        Anthropic(base_url=url, api_key=key, max_retries=0, timeout=30, http_client=http) as made,
    ):
        yield made


@rule("a message parses", SDK)
def test_message(target: Target, client: Any) -> None:
    found = client.messages.create(model=target.model, max_tokens=8, messages=MESSAGES)
    assert found.role == "assistant" and found.content[0].type == "text" and found.usage.output_tokens > 0


@rule("a stream iterates to its end, and its parts join to the whole answer", SDK)
def test_stream(target: Target, client: Any) -> None:
    ask: dict[str, Any] = {
        "model": target.model,
        "max_tokens": 16,
        "messages": MESSAGES,
        "extra_body": {"temperature": 0},
    }
    with client.messages.stream(**ask) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    whole = client.messages.create(**ask)
    assert text == final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


@rule("every raw event is valid by the SDK's own types", SDK)
def test_strict(target: Target, client: Any) -> None:
    import pydantic
    from anthropic.types import RawMessageStreamEvent

    adapter: Any = pydantic.TypeAdapter(RawMessageStreamEvent)
    for event in client.messages.create(model=target.model, max_tokens=8, messages=MESSAGES, stream=True):
        adapter.validate_python(event.to_dict(), strict=True)


@rule("tokens are counted", SDK)
def test_count(target: Target, client: Any) -> None:
    import anthropic

    try:
        assert client.messages.count_tokens(model=target.model, messages=MESSAGES).input_tokens > 0
    except anthropic.NotFoundError:
        not_offered("count_tokens is not there")


@rule("a stream that its reader leaves is closed without an error", SDK)
def test_stream_left(target: Target, client: Any) -> None:
    with client.messages.stream(model=target.model, max_tokens=500, messages=MESSAGES) as stream:
        next(iter(stream))
    assert client.messages.create(model=target.model, max_tokens=1, messages=MESSAGES).content


ERRORS = [
    ("BadRequestError", {"messages": []}),
    ("BadRequestError", {"max_tokens": -1}),
    ("NotFoundError", {"model": "no-such-model"}),
]


@rule("errors become the exceptions that applications catch", SDK)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("name", "change"), ERRORS)
def test_errors(target: Target, client: Any, name: str, change: dict[str, Any], stream: bool) -> None:
    import anthropic

    ask = {"model": target.model, "max_tokens": 4, "messages": MESSAGES, "stream": stream, **change}
    with pytest.raises(anthropic.APIStatusError) as caught:
        client.messages.create(**ask)
    assert type(caught.value).__name__ == name
    assert caught.value.type and caught.value.request_id


@rule("a wrong key is an AuthenticationError", SDK)
def test_wrong_key(target: Target, client: Any) -> None:
    import anthropic

    if not target.settings.api_key:
        not_offered("no key was given (--api-key)")
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").messages.create(model=target.model, max_tokens=1, messages=MESSAGES)
