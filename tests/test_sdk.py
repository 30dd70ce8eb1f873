"""The official `openai` client against a real server: what its users iterate over, and what it raises."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.support.probes import wait_idle, words
from tests.support.serving import Server

pytestmark = pytest.mark.synthetic

MODEL = "synthetic"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    scripts: list[dict[str, Any]] = [
        {"match": "emoji", "tokens": ["n", {"hex": "c3"}, {"hex": "a9"}, {"hex": "f09f"}, {"hex": "9880"}, "\n", "."]},
        {"match": "fails", "tokens": ["a", "b", {"error": "on purpose"}]},
    ]
    with Server("--resume-ttl", "0", scripts=scripts) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


class TestChat:
    def test_whole(self, client: OpenAI) -> None:
        answer = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=5)
        assert words(answer.choices[0].message.content or "") == 5
        assert (answer.choices[0].message.role, answer.choices[0].finish_reason) == ("assistant", "length")
        assert answer.usage is not None and answer.usage.completion_tokens == 5
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + 5
        assert (answer.object, answer.model) == ("chat.completion", MODEL)
        assert answer._request_id

    def test_streamed(self, client: OpenAI) -> None:
        with client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=50, seed=1, stream=True) as stream:
            chunks = list(stream)
        assert chunks[0].choices[0].delta.role == "assistant"
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert words(text) == 50
        assert chunks[-1].choices[0].finish_reason == "length"
        assert all(chunk.usage is None for chunk in chunks)
        whole = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=50, seed=1)
        assert whole.choices[0].message.content == text

    def test_usage_in_a_stream(self, client: OpenAI) -> None:
        with client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=5, stream=True, stream_options={"include_usage": True}
        ) as stream:
            *chunks, last = stream
        assert all(chunk.usage is None for chunk in chunks)
        assert last.choices == []
        assert last.usage is not None and last.usage.completion_tokens == 5

    def test_choices(self, client: OpenAI) -> None:
        with client.chat.completions.create(
            model=MODEL, messages=HELLO, max_tokens=9, n=2, seed=4, stream=True
        ) as stream:
            texts = ["", ""]
            for chunk in stream:
                texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        whole = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=9, n=2, seed=4)
        assert [choice.message.content for choice in whole.choices] == texts
        assert texts[0] != texts[1]

    def test_logprobs(self, client: OpenAI) -> None:
        messages: list[Any] = [{"role": "user", "content": "emoji"}]
        answer = client.chat.completions.create(model=MODEL, messages=messages, logprobs=True, top_logprobs=3)
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None and logprobs.content is not None
        assert answer.choices[0].message.content == "né😀\n."
        assert b"".join(bytes(entry.bytes or ()) for entry in logprobs.content).decode() == "né😀\n."
        assert all(len(entry.top_logprobs) == 3 and entry.logprob < 0 for entry in logprobs.content)
        with client.chat.completions.create(
            model=MODEL, messages=messages, logprobs=True, top_logprobs=3, stream=True
        ) as stream:
            shown = [chunk.choices[0].logprobs for chunk in stream]
        assert [entry for part in shown if part for entry in part.content or ()] == logprobs.content

    def test_characters(self, client: OpenAI) -> None:
        messages: list[Any] = [{"role": "user", "content": "emoji"}]
        with client.chat.completions.create(model=MODEL, messages=messages, stream=True) as stream:
            pieces = [chunk.choices[0].delta.content for chunk in stream if chunk.choices[0].delta.content]
        assert pieces == ["n", "é", "😀", "\n", "."]

    def test_the_stream_helper(self, client: OpenAI) -> None:
        """It accumulates the chunks by rules of its own."""
        messages: list[Any] = [{"role": "user", "content": "emoji"}]
        with client.chat.completions.stream(model=MODEL, messages=messages) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_completion()
        assert {"chunk", "content.delta", "content.done"} <= kinds
        assert final.choices[0].message.content == "né😀\n."
        assert final.choices[0].finish_reason == "stop"

    def test_leaving_in_the_middle(self, client: OpenAI, server: Server) -> None:
        with client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=100_000, stream=True) as stream:
            for number, _ in enumerate(stream):
                if number == 5:
                    break
        wait_idle(server)


class TestCompletions:
    def test_whole(self, client: OpenAI) -> None:
        answer = client.completions.create(model=MODEL, prompt="hello", max_tokens=5, logprobs=2, echo=True)
        assert answer.choices[0].text.startswith("hello ")
        assert answer.choices[0].finish_reason == "length"
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None and len(logprobs.tokens or ()) == len("hello") + 5  # each byte is a token
        assert (logprobs.token_logprobs or ())[0] is None  # nothing comes before the first one
        assert answer.usage is not None and answer.usage.completion_tokens == 5

    def test_streamed(self, client: OpenAI) -> None:
        with client.completions.create(
            model=MODEL, prompt=["a", "b"], n=2, max_tokens=20, stream=True, stream_options={"include_usage": True}
        ) as stream:
            texts = ["", "", "", ""]
            for chunk in stream:
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
        assert [words(text) for text in texts] == [20] * 4
        assert chunk.usage is not None and chunk.usage.completion_tokens == 80


class TestErrors:
    """Each status is the exception that the client's users catch, with our message, parameter and code."""

    def test_bad_request(self, client: OpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=0)
        assert (caught.value.param, caught.value.type) == ("max_tokens", "invalid_request_error")
        assert caught.value.request_id
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model=MODEL, prompt="x" * 200_000)
        assert caught.value.code == "context_length_exceeded"

    def test_unsupported(self, client: OpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=MODEL, messages=HELLO, reasoning_effort="low")
        assert (caught.value.param, caught.value.code) == ("reasoning_effort", "unsupported_parameter")

    def test_not_found(self, client: OpenAI) -> None:
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(model="gpt-5", messages=HELLO)
        assert caught.value.code == "model_not_found"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("gpt-5")
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model=MODEL, input="x")

    def test_in_band(self, client: OpenAI) -> None:
        """An error behind the first bytes is raised from the iteration, after the text before it."""
        messages: list[Any] = [{"role": "user", "content": "fails"}]
        pieces: list[str] = []
        with (
            client.chat.completions.create(model=MODEL, messages=messages, stream=True) as stream,
            pytest.raises(openai.APIError, match="on purpose") as caught,
        ):
            pieces.extend(chunk.choices[0].delta.content or "" for chunk in stream)
        assert ("".join(pieces), caught.value.code) == ("ab", "error")
        with pytest.raises(openai.InternalServerError, match="on purpose"):
            client.chat.completions.create(model=MODEL, messages=messages)

    def test_keys_and_limits(self, tmp_path: Path) -> None:
        path = tmp_path / "keys.toml"
        digest = hashlib.sha256(b"secret").hexdigest()
        path.write_text(f'[keys.one]\nsha256 = "{digest}"\nmax_streams = 1\n')
        with Server("--api-keys", str(path), "--synthetic-step-ms", "5", "--resume-ttl", "0") as server:
            with OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as client:
                with pytest.raises(openai.AuthenticationError) as refused:
                    client.models.list()
                assert refused.value.code == "invalid_api_key"
            with OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as client:
                with client.chat.completions.create(
                    model=MODEL, messages=HELLO, max_tokens=10_000, stream=True
                ) as stream:
                    next(stream)
                    with pytest.raises(openai.RateLimitError) as limited:
                        client.chat.completions.create(model=MODEL, messages=HELLO)
                    assert limited.value.code == "rate_limit_exceeded"
                wait_idle(server)
                # The client's own retries heed Retry-After.
                patient = client.with_options(max_retries=1)
                assert patient.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1).choices


class TestModels:
    def test_list_and_retrieve(self, client: OpenAI) -> None:
        (model,) = client.models.list()
        assert (model.id, model.object, model.owned_by) == (MODEL, "model", "sluice")
        assert client.models.retrieve(MODEL) == model


def test_the_async_client(server: Server) -> None:
    async def one(client: AsyncOpenAI, number: int) -> tuple[str, str]:
        messages: list[Any] = [{"role": "user", "content": f"hello {number}"}]
        whole = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=40, seed=1)
        stream = await client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=40, seed=1, stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        return text, whole.choices[0].message.content or ""

    async def main() -> list[tuple[str, str]]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*[one(client, number) for number in range(20)])

    texts = asyncio.run(main())
    assert all(streamed == whole and words(whole) == 40 for streamed, whole in texts)
    assert len(set(texts)) > 1
