"""The official `anthropic` client against a real server: what its users iterate over, and what it raises."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pydantic
import pytest
from anthropic import Anthropic, AsyncAnthropic
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent

from tests.support.probes import wait_idle, words
from tests.support.serving import Server

pytestmark = pytest.mark.synthetic

MODEL = "synthetic"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(RawMessageStreamEvent)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    scripts: list[dict[str, Any]] = [
        {"match": "emoji", "tokens": ["n", {"hex": "c3"}, {"hex": "a9"}, {"hex": "f09f"}, {"hex": "9880"}, "\n", "."]},
        {"match": "fails", "tokens": ["a", "b", {"error": "on purpose"}]},
        {"match": "pauses", "tokens": ["a", {"pause_ms": 500}, "b"]},
    ]
    with Server("--resume-ttl", "0", "--keepalive-interval", "0.1", scripts=scripts) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def strict(found: pydantic.BaseModel, kind: Any) -> None:
    """The object as it came is valid by the SDK's own model, of exact types, and holds nothing that it doesn't know."""
    checked = kind.validate_python(found.to_dict(), strict=True)  # type: ignore[attr-defined]
    _nothing_unknown(checked)


def _nothing_unknown(value: Any) -> None:
    if isinstance(value, pydantic.BaseModel):
        assert not value.model_extra, (type(value), value.model_extra)
        for name in type(value).model_fields:
            _nothing_unknown(getattr(value, name))
    elif isinstance(value, list):
        for item in value:
            _nothing_unknown(item)


def text_of(message: Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


class TestMessages:
    def test_whole(self, client: Anthropic) -> None:
        answer = client.messages.create(model=MODEL, max_tokens=5, messages=HELLO)
        strict(answer, pydantic.TypeAdapter(Message))
        assert words(text_of(answer)) == 5
        assert (answer.role, answer.stop_reason, answer.stop_sequence) == ("assistant", "max_tokens", None)
        assert answer.usage.output_tokens == 5
        assert answer._request_id

    def test_every_event_is_strictly_valid(self, client: Anthropic) -> None:
        for content in ("hello", "emoji", "pauses"):
            messages: list[Any] = [{"role": "user", "content": content}]
            with client.messages.create(model=MODEL, max_tokens=9, messages=messages, stream=True) as stream:
                events = list(stream)
            for event in events:
                strict(event, EVENT)
            assert [events[0].type, events[-1].type] == ["message_start", "message_stop"]

    def test_the_stream_helper(self, client: Anthropic) -> None:
        """It accumulates the events by rules of its own; pings are passed over."""
        messages: list[Any] = [{"role": "user", "content": "pauses"}]
        with client.messages.stream(model=MODEL, max_tokens=9, messages=messages) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_message()
        assert kinds == ["message_start", "content_block_start", *["content_block_delta", "text"] * 2,
                         "content_block_stop", "message_delta", "message_stop"]  # fmt: skip
        assert (text_of(final), final.stop_reason) == ("ab", "end_turn")
        whole = client.messages.create(model=MODEL, max_tokens=9, messages=messages)
        assert whole.content[0].to_dict() == {"type": "text", "text": "ab"}
        read = final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0)
        assert read == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
        assert final.usage.output_tokens == whole.usage.output_tokens

    def test_text_stream(self, client: Anthropic) -> None:
        messages: list[Any] = [{"role": "user", "content": "emoji"}]
        with client.messages.stream(model=MODEL, max_tokens=9, messages=messages) as stream:
            assert list(stream.text_stream) == ["n", "é", "😀", "\n", "."]

    def test_stop_sequences_and_sampling(self, client: Anthropic) -> None:
        """Newer releases of the client have no names for the sampling fields any more; its users still send them."""
        messages: list[Any] = [{"role": "user", "content": "emoji"}]
        sampling: Any = {"temperature": 0.5, "top_k": 40, "top_p": 0.9}
        answer = client.messages.create(
            model=MODEL,
            max_tokens=9,
            messages=messages,
            stop_sequences=["?", "\n"],
            system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
            metadata={"user_id": "u"},
            service_tier="auto",
            thinking={"type": "disabled"},
            extra_body=sampling,
        )
        assert (text_of(answer), answer.stop_reason, answer.stop_sequence) == ("né😀", "stop_sequence", "\n")

    def test_an_answer_goes_back_as_it_came(self, client: Anthropic) -> None:
        answer = client.messages.create(model=MODEL, max_tokens=5, messages=HELLO)
        turns: list[Any] = [*HELLO, answer.to_param(), {"role": "user", "content": "and then?"}]
        counted = client.messages.count_tokens(model=MODEL, messages=turns)
        strict(counted, pydantic.TypeAdapter(MessageTokensCount))
        usage = client.messages.create(model=MODEL, max_tokens=1, messages=turns).usage
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted.input_tokens

    def test_leaving_in_the_middle(self, client: Anthropic, server: Server) -> None:
        with client.messages.stream(model=MODEL, max_tokens=100_000, messages=HELLO) as stream:
            for number, _ in enumerate(stream.text_stream):
                if number == 5:
                    break
        wait_idle(server)


class TestErrors:
    """Each status is the exception that the client's users catch, with our message, type and request id."""

    def test_bad_request(self, client: Anthropic) -> None:
        with pytest.raises(anthropic.BadRequestError, match="max_tokens is 0") as caught:
            client.messages.create(model=MODEL, max_tokens=0, messages=HELLO)
        assert caught.value.type == "invalid_request_error"
        assert caught.value.request_id

    @pytest.mark.parametrize("stream", [False, True])
    def test_not_found(self, client: Anthropic, stream: bool) -> None:
        with pytest.raises(anthropic.NotFoundError) as caught:
            client.messages.create(model="claude", max_tokens=1, messages=HELLO, stream=stream)
        assert caught.value.type == "not_found_error"
        with pytest.raises(anthropic.NotFoundError):
            client.messages.batches.list()

    def test_in_band(self, client: Anthropic) -> None:
        """An error behind the first bytes is raised from the iteration, after the text before it."""
        messages: list[Any] = [{"role": "user", "content": "fails"}]
        pieces: list[str] = []
        with (
            client.messages.stream(model=MODEL, max_tokens=9, messages=messages) as stream,
            pytest.raises(anthropic.APIStatusError, match="on purpose") as caught,
        ):
            pieces.extend(stream.text_stream)
        assert (pieces, caught.value.type) == (["a", "b"], "api_error")
        with pytest.raises(anthropic.InternalServerError, match="on purpose"):
            client.messages.create(model=MODEL, max_tokens=9, messages=messages)

    def test_keys_and_limits(self, tmp_path: Path) -> None:
        path = tmp_path / "keys.toml"
        digest = hashlib.sha256(b"secret").hexdigest()
        path.write_text(f'[keys.one]\nsha256 = "{digest}"\nmax_streams = 1\n')
        flags = ("--api-keys", str(path), "--synthetic-step-ms", "5", "--resume-ttl", "0", "--max-body", "100000")
        with Server(*flags) as server:
            with Anthropic(base_url=server.url, api_key="wrong", max_retries=0) as client:
                with pytest.raises(anthropic.AuthenticationError) as refused:
                    client.messages.count_tokens(model=MODEL, messages=HELLO)
                assert refused.value.type == "authentication_error"
            with Anthropic(base_url=server.url, auth_token="secret", max_retries=0) as client:
                assert client.messages.count_tokens(model=MODEL, messages=HELLO).input_tokens
            with Anthropic(base_url=server.url, api_key="secret", max_retries=0) as client:
                with pytest.raises(anthropic.RequestTooLargeError):
                    client.messages.create(
                        model=MODEL, max_tokens=1, messages=[{"role": "user", "content": "x" * 100_000}]
                    )
                with client.messages.create(model=MODEL, max_tokens=10_000, messages=HELLO, stream=True) as stream:
                    next(stream)
                    with pytest.raises(anthropic.RateLimitError) as limited:
                        client.messages.create(model=MODEL, max_tokens=1, messages=HELLO)
                    assert limited.value.type == "rate_limit_error"
                wait_idle(server)
                # The client's own retries heed Retry-After.
                patient = client.with_options(max_retries=1)
                assert patient.messages.create(model=MODEL, max_tokens=1, messages=HELLO).content


def test_the_async_client(server: Server) -> None:
    async def one(client: AsyncAnthropic, number: int) -> tuple[str, str]:
        ask: dict[str, Any] = {
            "model": MODEL,
            "max_tokens": 40,
            "messages": [{"role": "user", "content": f"hello {number}"}],
            "extra_body": {"temperature": 0},
        }
        async with client.messages.stream(**ask) as stream:
            text = "".join([piece async for piece in stream.text_stream])
        return text, text_of(await client.messages.create(**ask))

    async def main() -> list[tuple[str, str]]:
        async with AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:
            return await asyncio.gather(*[one(client, number) for number in range(20)])

    texts = asyncio.run(main())
    assert all(streamed == whole and words(whole) == 40 for streamed, whole in texts)
    assert len(set(texts)) > 1
