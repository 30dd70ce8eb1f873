"""Cases of kind B, streams over HTTP: frames that say what is meant, whatever the text, and end as they must."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.played import BREAKS, PAUSE_MS, SCRIPTS, SEPARATORS
from tests.support.serving import Answer, Server, WebSocketClient, chat, joined

pytestmark = pytest.mark.synthetic

SSE, NDJSON, PLAIN = FRAMINGS = ("text/event-stream", "application/x-ndjson", "text/plain")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HOSTILE = "m\r\nevent: x\rdata: [DONE]\n\n\u2028\u2029\x85\x0b\x0c\x1c"


def ask(server: Server, prompt: str, framing: str = SSE, path: str = CHAT, **fields: Any) -> Answer:
    """A streamed generation."""
    body = chat(prompt, stream=True, **fields) if path == CHAT else {"prompt": prompt, "stream": True, **fields}
    return server.ask("POST", path, body, [("Accept", framing)])


def naive(answer: Answer) -> list[Any]:
    """The JSON of an event stream, or of NDJSON, as clients read it that split lines by Unicode's rules."""
    lines = bytes(answer.body).decode().splitlines()
    if answer.header("content-type") == f"{SSE}; charset=utf-8":
        lines = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line and line != "[DONE]"]


def field_lines(answer: Answer) -> set[bytes]:
    """The names of the fields that an event stream's lines have, by the standard's line ends."""
    lines = re.split(rb"\r\n|\r|\n", bytes(answer.body))
    return {line.partition(b":")[0] for line in lines if line}


class TestB01TextCanMakeNoEvents:
    TEXT = "".join(BREAKS)

    @pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
    def test_b01_a_strict_parser_sees_exactly_the_events_sent(self, server: Server, path: str) -> None:
        answer = ask(server, "[breaks]", path=path)
        events = answer.events()
        assert len(events) == 1 + len(BREAKS) + 2  # opening, texts, reason, [DONE]
        assert {event.event for event in events} == {"message"}
        assert [event.id.rpartition(":")[2] for event in events] == [str(n) for n in range(len(events))]
        assert field_lines(answer) == {b"retry", b"id", b"data"}
        assert answer.text() == self.TEXT

    def test_b01_likewise_in_ndjson_plain_text_and_in_one_piece(self, server: Server) -> None:
        lines = ask(server, "[breaks]", NDJSON).lines()
        assert len(lines) == 1 + len(BREAKS) + 2
        assert joined(lines[:-1]) == self.TEXT
        assert ask(server, "[breaks]", PLAIN).body == self.TEXT.encode()
        whole = server.ask("POST", CHAT, chat("[breaks]")).json()
        assert whole["choices"][0]["message"]["content"] == self.TEXT

    @pytest.mark.parametrize("framing", [SSE, NDJSON])
    def test_b01_an_error_message_is_one_line(self, server: Server, framing: str) -> None:
        answer = ask(server, "[error]", framing)
        messages = [c["error"]["message"] for c in naive(answer) if "error" in c]
        assert messages == ["the fault\r\ndata: [DONE]\u2028 was played"]

    def test_b01_a_models_name_is_data_too(self) -> None:
        with Server("--served-model-name", HOSTILE, scripts=[{"tokens": ["a", "b"]}]) as server:
            assert server.ask("GET", "/v1/models").json()["data"][0]["id"] == HOSTILE
            for framing in (SSE, NDJSON):
                for path in (CHAT, COMPLETIONS):
                    chunks = naive(ask(server, "x", framing, path, stream_options={"include_usage": True}))
                    assert {c["model"] for c in chunks if "model" in c} == {HOSTILE}
                    assert joined(chunks) == "ab"
            with WebSocketClient(server) as client:
                client.send_json(type="generate", id=HOSTILE, model="other", prompt="x")
                assert client.receive_json()["id"] == HOSTILE

    def test_b01_names_in_refusals(self, server: Server) -> None:
        error = server.ask("POST", CHAT, chat("x", model=HOSTILE)).error(404)
        assert repr(HOSTILE)[1:9] in error["message"]
        server.ask("GET", "/v1/a%0d%0aX-Evil:%20b").error(404)
        answer = server.ask("GET", "/v1/streams/%0d%0adata:%20x")
        answer.error(404)
        assert answer.header("x-evil") is None

    @pytest.mark.parametrize("id_", ["a\rb", "a\nb", "a\r\nb", "a\0b", "\u2028", "1:2:3", "x:", ":1", "9" * 5000])
    def test_b01_a_last_event_id_that_is_none_of_ours(self, server: Server, id_: str) -> None:
        """What a header may hold is refused by its meaning, the rest with the request."""
        with server.connect() as client:
            head = f"GET /v1/generate?prompt=x HTTP/1.1\r\nHost: localhost\r\nLast-Event-ID: {id_}\r\n\r\n"
            client.send(head.encode())
            assert client.answer().status == 400


class TestB02LineSeparatorsOfUnicode:
    TEXT = "".join(SEPARATORS)

    @pytest.mark.parametrize("framing", [SSE, NDJSON])
    @pytest.mark.parametrize(
        ("path", "fields"),
        [(CHAT, {}), (COMPLETIONS, {}), (CHAT, {"logprobs": True, "top_logprobs": 2}), (COMPLETIONS, {"logprobs": 2})],
    )
    def test_b02_strict_and_naive_clients_rebuild_the_same(
        self, server: Server, framing: str, path: str, fields: dict[str, Any]
    ) -> None:
        answer = ask(server, "[separators]", framing, path, **fields)
        strict = answer.chunks() if framing == SSE else answer.lines()
        assert joined(strict) == self.TEXT
        assert naive(answer) == strict

    def test_b02_the_echo_of_a_prompt_too(self, server: Server) -> None:
        answer = ask(server, "[length]" + self.TEXT, SSE, COMPLETIONS, echo=True)
        assert joined(naive(answer)) == "[length]" + self.TEXT + "one two"

    def test_b02_plain_text_is_left_as_it_is(self, server: Server) -> None:
        assert ask(server, "[separators]", PLAIN).body == self.TEXT.encode()

    def test_b02_messages_of_a_websocket(self, server: Server) -> None:
        with WebSocketClient(server) as client:
            client.send_json(type="generate", id="\u2028\x85", messages=[{"role": "user", "content": "[separators]"}])
            texts: list[str] = []
            while (message := client.receive()) and isinstance(message, str):
                assert len(message.splitlines()) == 1
                value = json.loads(message)
                assert value["id"] == "\u2028\x85"
                if value["type"] == "done":
                    break
                texts.append(value.get("text", ""))
            assert "".join(texts) == self.TEXT


class TestB05AFaultInMidStream:
    ERROR = 'sluice_requests_total{api="chat",outcome="error"}'

    @pytest.fixture(scope="class")
    @classmethod
    def server(cls) -> Iterator[Server]:
        """One whose log holds the tracebacks of the faults that are played."""
        with Server(scripts=SCRIPTS, faults_expected=True) as running:
            yield running

    @pytest.mark.parametrize("prompt", ["[error]", "[raise]"])
    @pytest.mark.parametrize("framing", [SSE, NDJSON])
    def test_b05_an_error_frame_a_terminator_and_the_connection_goes_on(
        self, server: Server, prompt: str, framing: str
    ) -> None:
        before = server.metrics()[self.ERROR]
        with server.connect() as client:
            client.request("POST", CHAT, chat(prompt, stream=True), [("Accept", framing)])
            answer = client.answer()
            assert (answer.status, answer.end) == (200, "whole")
            assert answer.raw.endswith(b"\r\n0\r\n\r\n")
            if framing == SSE:
                assert answer.events()[-1].data == "[DONE]"
                chunks = answer.chunks()
            else:
                *chunks, last = answer.lines()
                assert last == {"done": True}
            assert joined(chunks) == "one two three"
            error = chunks[-1]["error"]
            assert error.keys() == {"message", "type", "param", "code"}
            assert (error["type"], error["code"]) == ("server_error", "error")
            assert ("fault" in error["message"]) == (prompt == "[error]")  # the model's code is nobody's business
            assert not [c for chunk in chunks[:-1] for c in chunk["choices"] if c["finish_reason"]]
            client.request("GET", "/health")
            assert client.answer().status == 200
        assert server.metrics()[self.ERROR] == before + 1

    def test_b05_plain_text_shows_it_by_a_missing_end(self, server: Server) -> None:
        answer = ask(server, "[error]", PLAIN)
        assert (answer.status, answer.end) == (200, "cut")
        assert answer.body == b"one two three"

    def test_b05_in_one_piece_it_is_a_status(self, server: Server) -> None:
        with server.connect() as client:
            for prompt in ("[error]", "[raise]"):
                client.request("POST", CHAT, chat(prompt))
                assert client.answer().error(500)["code"] == "error"

    def test_b05_on_a_websocket_the_others_go_on(self, server: Server) -> None:
        with WebSocketClient(server) as client:
            client.send_json(type="generate", id="good", prompt="[slow]")
            client.send_json(type="generate", id="bad", prompt="[error]")
            messages = client.receive_until("done", id_="good")
            bad = [m for m in messages if m["id"] == "bad"]
            assert [m["type"] for m in bad] == ["started", "token", "token", "token", "error"]
            assert bad[-1]["error"]["code"] == "error"
            assert "".join(m.get("text", "") for m in messages if m["id"] == "good") == " w" * 12
            client.send_json(type="generate", id="bad", prompt="[length]")  # the id is free again
            assert client.receive_until("done")[-1]["finish_reason"] == "length"

    def test_b05_a_bare_prompt_is_closed_with_the_fault(self, server: Server) -> None:
        with WebSocketClient(server) as client:
            client.send_text("[error]")
            assert [client.receive() for _ in range(3)] == ["one", " two", " three"]
            assert client.closed().code == 1011
            assert client.ended() == "fin"

    def test_b05_official_client(self, server: Server) -> None:
        with openai_client(server) as client:
            stream = client.chat.completions.create(
                model="synthetic", messages=[{"role": "user", "content": "[error]"}], stream=True
            )
            texts: list[str] = []
            with pytest.raises(openai.APIError, match="fault"):
                texts += (chunk.choices[0].delta.content or "" for chunk in stream)


def openai_client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30)


class TestB07Tails:
    @pytest.mark.parametrize(
        ("prompt", "fields", "reasons"),
        [
            ("plain", {"max_tokens": 3}, ["length"]),
            ("[length]", {}, ["length"]),
            ("[breaks]", {}, ["stop"]),
            ("[tool]", {}, ["tool_calls"]),
            ("[empty]", {}, ["stop"]),
            ("[late]", {"max_tokens": 2}, ["length"]),
            ("plain", {"n": 3, "max_tokens": 2}, ["length"] * 3),
            ("[length]", {"stop": " two"}, ["stop"]),
            ("[length]", {"n": 2, "stop": ["e"]}, ["stop"] * 2),
        ],
    )
    @pytest.mark.parametrize("usage", [False, True])
    @pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
    def test_b07_every_stream_has_the_whole_of_it(
        self, server: Server, path: str, usage: bool, prompt: str, fields: dict[str, Any], reasons: list[str]
    ) -> None:
        if usage:
            fields = {**fields, "stream_options": {"include_usage": True}}
        answer = ask(server, prompt, path=path, **fields)
        assert answer.end == "whole"
        assert answer.body.endswith(b"\ndata: [DONE]\n\n")
        assert [e.data for e in answer.events()].count("[DONE]") == 1
        chunks = answer.chunks()
        if usage:
            assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["total_tokens"] > 0
            assert all(chunk["usage"] is None for chunk in chunks[:-1])
            chunks.pop()
        assert all(("usage" in chunk) == usage for chunk in chunks)
        assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
        for index, reason in enumerate(reasons):
            mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
            assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + [reason]
            if path == CHAT:
                assert mine[0]["delta"] == {"role": "assistant", "content": ""}
                assert not any("role" in c["delta"] for c in mine[1:])
                assert mine[-1]["delta"] == {}
        assert {c["index"] for chunk in chunks for c in chunk["choices"]} == set(range(len(reasons)))

    @pytest.mark.parametrize("prompt", ["[length]", "[empty]", "[error]"])
    def test_b07_ndjson_ends_with_done(self, server: Server, prompt: str) -> None:
        answer = ask(server, prompt, NDJSON)
        assert answer.body.endswith(b'\n{"done":true}\n')
        assert answer.lines().count({"done": True}) == 1
        assert b"\n\n" not in answer.body

    @pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
    def test_b07_usage_is_that_of_the_whole_answer(self, server: Server, path: str) -> None:
        body = chat("[breaks]") if path == CHAT else {"prompt": "[breaks]"}
        whole = server.ask("POST", path, body).json()["usage"]
        streamed = ask(server, "[breaks]", path=path, stream_options={"include_usage": True}).chunks()[-1]["usage"]
        cached = "prompt_tokens_details"
        assert {**streamed, cached: None} == {**whole, cached: None}
        assert whole["completion_tokens"] == len(BREAKS) + 1  # the end token counts

    def test_b07_get_generate_is_shown_in_chat_chunks(self, server: Server) -> None:
        answer = server.ask("GET", "/v1/generate?prompt=%5Blength%5D")
        assert answer.text() == "one two"
        assert answer.chunks()[0]["choices"][0]["delta"]["role"] == "assistant"
        assert answer.chunks()[-1]["choices"][0]["finish_reason"] == "length"
        assert answer.body.endswith(b"\ndata: [DONE]\n\n")

    def test_b07_official_client_sees_the_same(self, server: Server) -> None:
        with openai_client(server) as client:
            chunks = list(
                client.chat.completions.create(
                    model="synthetic",
                    messages=[{"role": "user", "content": "[separators]"}],
                    stream=True,
                    stream_options={"include_usage": True},
                )
            )
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "".join(SEPARATORS)
        assert chunks[-1].usage and chunks[-1].usage.completion_tokens == len(SEPARATORS) + 1
        assert chunks[-2].choices[0].finish_reason == "stop"


@pytest.fixture(scope="module")
def narrow() -> Iterator[Server]:
    """One sequence at a time: others queue."""
    scripts = [{"match": "[hold]", "tokens": ["a", {"pause_ms": PAUSE_MS}, "b"]}]
    flags = ("--max-running", "1", "--max-batch-tokens", "64", "--keepalive-interval", "0.2")
    with Server(*flags, scripts=scripts) as running:
        yield running


class TestB08QuietStreams:
    @pytest.mark.parametrize(("prompt", "text"), [("[prefill]", "late words"), ("[pause]", "before after")])
    def test_b08_headers_at_once_and_pings_of_one_line(self, quick: Server, prompt: str, text: str) -> None:
        with quick.connect() as client:
            begun = time.monotonic()
            client.request("POST", CHAT, chat(prompt, stream=True))
            client.begin()
            client.read_events(1)  # the role, before any token
            assert prompt != "[prefill]" or time.monotonic() - begun < PAUSE_MS / 1000
            answer = client.finish()
        assert answer.text() == text
        assert set(answer.comments()) == {"ping"}
        assert len(answer.comments()) >= 3
        assert b": ping\n" in answer.body and b": ping\n\n" not in answer.body
        blocks = bytes(answer.body).split(b"\n\n")
        assert all(re.search(rb"(?m)^data: ", block) for block in blocks[:-1]) and not blocks[-1]  # none without data

    def test_b08_ndjson_has_empty_lines(self, quick: Server) -> None:
        answer = ask(quick, "[pause]", NDJSON)
        lines = bytes(answer.body).split(b"\n")[:-1]
        assert lines.count(b"") >= 3
        assert joined(answer.lines()[:-1]) == "before after"
        assert answer.header("x-stream-from") == "0"

    def test_b08_plain_text_has_no_room_for_pings(self, quick: Server) -> None:
        assert ask(quick, "[pause]", PLAIN).body == b"before after"

    def test_b08_while_it_queues(self, narrow: Server) -> None:
        with narrow.connect() as first, narrow.connect() as second:
            first.request("POST", CHAT, chat("[hold]", stream=True))
            first.begin()
            first.read_events(2)
            second.request("POST", CHAT, chat("next", stream=True, max_tokens=2))
            second.begin()
            second.read_events(1)
            assert narrow.metrics()['sluice_streams{state="queued"}'] == 1
            answer = second.finish()
            assert len(answer.comments()) >= 2
            assert len(answer.text().split()) == 2
            assert first.finish().text() == "ab"

    def test_b08_official_client_passes_over_them(self, quick: Server) -> None:
        with openai_client(quick) as client:
            for prompt, text in (("[prefill]", "late words"), ("[pause]", "before after")):
                stream = client.chat.completions.create(
                    model="synthetic", messages=[{"role": "user", "content": prompt}], stream=True
                )
                chunks = list(stream)
                assert "".join(c.choices[0].delta.content or "" for c in chunks) == text
                assert chunks[-1].choices[0].finish_reason == "stop"

    def test_b08_official_client_of_text_completions(self, quick: Server) -> None:
        with openai_client(quick) as client:
            stream = client.completions.create(model="synthetic", prompt="[pause]", stream=True)
            assert "".join(c.choices[0].text for c in stream) == "before after"
