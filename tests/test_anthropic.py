"""The Anthropic Messages API from outside: its events on the wire, resumed in every framing at every position, its
refusals, and what the utilities say of the same prompts. Black-box."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.messages import (
    COUNT_TOKENS,
    MESSAGES,
    MODEL,
    assembled,
    error_object,
    error_of,
    message,
    prompt,
    text_of,
    typed,
)
from tests.support.probes import wait_idle, words
from tests.support.readings import EVENT_STREAM, NDJSON, PLAIN
from tests.support.serving import Answer, Server, WebSocketClient, chat, until

pytestmark = pytest.mark.synthetic

JSON = ("Accept", "application/json")
PING = b'event: ping\ndata: {"type":"ping"}\n\n'
ODD = ["né", '"', "\\", "\n", "😀", "a\u2028b", {"hex": "e4b8"}, {"hex": "ad"}, "</script>", "\x00", "end"]
TEXT = 'né"\\\n😀a\u2028b中</script>\x00end'


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    scripts: list[dict[str, Any]] = [
        {"match": "odd text", "tokens": ODD},
        {"match": "fails", "tokens": ["a", "b", {"error": "on purpose"}]},
        {"match": "silence", "tokens": []},
        {"match": "waits", "tokens": ["a", {"pause_ms": 450}, "b"]},
        {"match": "alphabet", "tokens": ["ABC", "DEF", "G", "HI", "J"]},
    ]
    with Server("--keepalive-interval", "0.1", scripts=scripts) as running:
        yield running


def stream(server: Server, content: str, accept: tuple[str, str] = EVENT_STREAM, **fields: Any) -> Answer:
    """A stream read to its end."""
    answer = server.ask("POST", MESSAGES, message(content, stream=True, **fields), [accept])
    assert answer.status == 200, bytes(answer.body)
    return answer


def whole(server: Server, content: str, **fields: Any) -> dict[str, Any]:
    answer = server.ask("POST", MESSAGES, message(content, **fields))
    assert answer.status == 200, bytes(answer.body)
    return dict(answer.json())


def without_pings(answer: Answer) -> bytes:
    return bytes(answer.body).replace(PING, b"")


class TestEvents:
    @pytest.mark.parametrize(
        ("content", "fields", "reason", "sequence"),
        [
            ("hi", {"max_tokens": 5}, "max_tokens", None),
            ("odd text", {}, "end_turn", None),
            ("silence", {}, "end_turn", None),
            ("alphabet", {"stop_sequences": ["XY", "EFGH"]}, "stop_sequence", "EFGH"),
        ],
    )
    def test_a_stream_makes_the_whole_answer(
        self, server: Server, content: str, fields: dict[str, Any], reason: str, sequence: str | None
    ) -> None:
        found = assembled(typed(stream(server, content, temperature=0, **fields).events()))
        expected = whole(server, content, temperature=0, **fields)
        assert (found["stop_reason"], found["stop_sequence"]) == (reason, sequence)
        assert found["id"].startswith("msg_") and found["id"] != expected["id"]
        for key in ("type", "role", "model", "content", "stop_reason", "stop_sequence"):
            assert found[key] == expected[key], key
        assert found["usage"]["output_tokens"] == expected["usage"]["output_tokens"]

    def test_names_positions_and_the_ping(self, server: Server) -> None:
        """Every event has its name in front and its id behind, except for the ping, which has no position."""
        answer = stream(server, "waits")
        name = answer.header("x-stream-id")
        assert answer.header("content-type") == "text/event-stream; charset=utf-8"
        *blocks, rest = bytes(answer.body).split(b"\n\n")
        assert rest == b""
        assert blocks.count(PING.rstrip()) >= 2
        shown = [block.split(b"\n") for block in blocks if block != PING.rstrip()]
        assert shown[0].pop(0) == b"retry: 1000"
        for position, (event, data, id_) in enumerate(shown):
            assert event == b"event: " + json.loads(data.removeprefix(b"data: "))["type"].encode()
            assert id_ == f"id: {name}:{position}".encode()
        assert b"[DONE]" not in answer.body
        assert answer.comments() == []

    def test_a_fault_in_the_middle_is_an_error_event_and_nothing_behind_it(self, server: Server) -> None:
        answer = stream(server, "fails")
        *before, last = typed(answer.events())
        assert [event["type"] for event in before] == ["message_start", "content_block_start"] + [
            "content_block_delta"
        ] * 2
        error = error_object(last, answer)
        assert error["type"] == "api_error" and "on purpose" in error["message"]
        refused = error_of(server.ask("POST", MESSAGES, message("fails")), 500)
        assert refused["type"] == "api_error" and "on purpose" in refused["message"]

    def test_a_cancelled_stream_says_so(self, server: Server) -> None:
        with server.connect() as client:
            client.request("POST", MESSAGES, message("long", stream=True, max_tokens=100_000))
            answer = client.begin("POST")
            client.read_events(5)
            gone = server.ask("DELETE", f"/v1/streams/{answer.header('x-stream-id')}")
            assert gone.json()["outcome"] == "cancelled"
            client.finish()
        assert "cancelled" in error_object(typed(answer.events())[-1], answer)["message"]
        assert answer.end == "whole"


class TestUsage:
    def test_true_input_tokens(self, server: Server) -> None:
        """D22. All of the prompt at the start; then what the cache gave apart, the same however it is read."""
        content = "the same long prompt, so that its blocks are in the cache the second time"
        counted = server.ask("POST", COUNT_TOKENS, prompt(content)).json()
        assert counted.keys() == {"input_tokens"}
        for hit in (False, True):
            before = server.metrics()
            events = typed(stream(server, content, max_tokens=7).events())
            start, usage = events[0]["message"]["usage"], assembled(events)["usage"]
            assert start == {
                "input_tokens": counted["input_tokens"],
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
                "output_tokens": 0,
            }
            assert usage["output_tokens"] == 7
            assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted["input_tokens"]
            assert (usage["cache_read_input_tokens"] > 0) == hit
            after = wait_idle(server)
            for series, value in (
                ("sluice_prompt_tokens_total", counted["input_tokens"]),
                ("sluice_cached_tokens_total", usage["cache_read_input_tokens"]),
                ("sluice_generated_tokens_total", 7),
                ('sluice_requests_total{api="messages",outcome="length"}', 1),
                ('sluice_requests_started_total{api="messages"}', 1),
            ):
                assert after[series] - before[series] == value, series
        assert whole(server, content, max_tokens=7)["usage"] == usage
        (line, *_) = [line for line in reversed(server.log.splitlines()) if "api=messages" in line]
        for field in (f"cached_tokens={usage['cache_read_input_tokens']}", "completion_tokens=7"):
            assert f" {field} " in line
        assert f" prompt_tokens={counted['input_tokens']} " in line

    def test_count_tokens_is_what_tokenize_counts(self, server: Server) -> None:
        system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
        counted = server.ask("POST", COUNT_TOKENS, prompt("hi", system=system)).json()["input_tokens"]
        turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
        assert server.ask("POST", "/tokenize", {"messages": turns}).json()["count"] == counted


class TestResume:
    """As in tests/test_resume.py, in this API's events: from every position, the rest byte for byte."""

    @pytest.mark.parametrize("content", ["hi", "odd text", "fails", "silence", "waits"])
    def test_sse(self, server: Server, content: str) -> None:
        answer = stream(server, content, max_tokens=12)
        name, body = answer.header("x-stream-id"), without_pings(answer)
        blocks = [block + b"\n\n" for block in body.split(b"\n\n")[:-1]]
        assert without_pings(server.ask("GET", f"/v1/streams/{name}")) == body
        for after in range(len(blocks) - 1):
            last = ("Last-Event-ID", f"{name}:{after}")
            for rest in (
                server.ask("GET", f"/v1/streams/{name}", None, [last]),
                server.ask("GET", f"/v1/streams/{name}?after={after}"),
                server.ask("POST", MESSAGES, message("whatever", stream=True), [last]),
            ):
                assert (rest.status, bytes(rest.body)) == (200, b"".join(blocks[after + 1 :]))
        past = [("Last-Event-ID", f"{name}:{len(blocks) - 1}")]
        assert server.ask("GET", f"/v1/streams/{name}", None, past).status == 204
        posted = server.ask("POST", MESSAGES, message("whatever", stream=True), past)
        assert (posted.status, bytes(posted.body)) == (200, b"")

    @pytest.mark.parametrize("content", ["odd text", "fails"])
    def test_ndjson(self, server: Server, content: str) -> None:
        answer = stream(server, content, NDJSON)
        lines = [line + b"\n" for line in bytes(answer.body).split(b"\n")[:-1] if line]
        assert lines[-1] == b'{"done":true}\n'
        name = answer.header("x-stream-id")
        events = server.ask("GET", f"/v1/streams/{name}", None, [EVENT_STREAM]).events()
        assert [json.loads(line) for line in lines[:-1]] == typed(events)
        for after in range(len(lines) - 2):
            rest = server.ask("GET", f"/v1/streams/{name}?after={after}")
            assert rest.header("x-stream-from") == str(after + 1)
            assert bytes(rest.body) == b"".join(lines[after + 1 :])
        assert server.ask("GET", f"/v1/streams/{name}?after={len(lines) - 2}").status == 204

    def test_plain_text(self, server: Server) -> None:
        answer = stream(server, "odd text", PLAIN)
        assert bytes(answer.body).decode() == TEXT
        name = answer.header("x-stream-id")
        for skip in range(1, len(answer.body)):
            assert server.ask("GET", f"/v1/streams/{name}?after_bytes={skip}").body == answer.body[skip:]
        assert stream(server, "fails", PLAIN).end == "cut"

    def test_polling(self, server: Server) -> None:
        answer = stream(server, "odd text")
        name, events = answer.header("x-stream-id"), typed(answer.events())
        for after in range(-1, len(events) - 1):
            polled = server.ask("GET", f"/v1/streams/{name}?after={after}", None, [JSON]).json()
            assert [event["data"] for event in polled["events"]] == events[after + 1 :]
            assert [event["event"] for event in polled["events"]] == [event["type"] for event in events[after + 1 :]]
            assert (polled["next"], polled["outcome"]) == (len(events), "stop")

    def test_a_running_stream_cut_in_the_middle(self, server: Server) -> None:
        with server.connect() as client:
            client.request("POST", MESSAGES, message("cut", stream=True, max_tokens=300))
            name = client.begin("POST").header("x-stream-id")
            seen = client.read_events(5).events()
            client.reset()
        rest = server.ask("POST", MESSAGES, message("cut", stream=True), [("Last-Event-ID", seen[-1].id)])
        found = assembled([*typed(seen), *typed(rest.events())])
        assert words(text_of(found)) == 300 == found["usage"]["output_tokens"]
        assert rest.header("x-stream-id") == name

    def test_over_a_websocket_its_text_goes_on(self, server: Server) -> None:
        name = stream(server, "odd text").header("x-stream-id")
        with WebSocketClient(server) as client:
            client.send_json(type="resume", id="a", stream=name, after=3)
            messages = client.receive_until("done")
        assert "".join(m.get("text", "") for m in messages) == TEXT[3:]


class TestPrompt:
    """Told by the counts: the template of the synthetic engine shows every turn, and a byte is a token."""

    def count(self, server: Server, messages: list[dict[str, Any]], **fields: Any) -> int:
        answer = server.ask("POST", COUNT_TOKENS, {"model": MODEL, "messages": messages, **fields})
        assert answer.status == 200, bytes(answer.body)
        return int(answer.json()["input_tokens"])

    def test_turns_of_one_role_are_one(self, server: Server) -> None:
        parts = [{"role": "user", "content": "one"}, {"role": "user", "content": [{"type": "text", "text": "two"}]}]
        assert self.count(server, parts) == self.count(server, [{"role": "user", "content": "one\ntwo"}])

    def test_a_last_turn_of_the_assistant_is_continued(self, server: Server) -> None:
        turns = [{"role": "user", "content": "hi"}]
        started = [*turns, {"role": "assistant", "content": "The answer is ("}]
        assert self.count(server, started) == self.count(server, turns) + len("The answer is (")
        assert self.count(server, [*turns, {"role": "assistant", "content": ""}]) == self.count(server, turns)
        body = {"model": MODEL, "max_tokens": 3, "messages": started, "temperature": 0}
        text = text_of(server.ask("POST", MESSAGES, body).json())
        assert words(text) == 3  # what was given isn't said again
        raw = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nThe answer is ("
        same = server.ask("POST", "/v1/completions", {"prompt": raw, "max_tokens": 3, "temperature": 0}).json()
        assert same["choices"][0]["text"] == text


class TestRefusals:
    @pytest.mark.parametrize(
        ("body", "status", "kind", "path"),
        [
            (message("hi", max_tokens=0), 400, "invalid_request_error", "max_tokens"),
            (message("hi", model="other"), 404, "not_found_error", "model"),
            (message("hi", tempreature=1), 400, "invalid_request_error", "tempreature"),
            (message("x" * 200_000), 400, "invalid_request_error", "messages"),
            (b"{", 400, "invalid_request_error", ""),
        ],
    )
    @pytest.mark.parametrize("streamed", [False, True])
    def test_what_is_wrong_with_a_request(
        self, server: Server, body: Any, status: int, kind: str, path: str, streamed: bool
    ) -> None:
        if isinstance(body, dict):
            body = {**body, "stream": streamed}
        error = error_of(server.ask("POST", MESSAGES, body), status)
        assert error["type"] == kind
        assert error["message"].startswith(path)

    def test_routes_and_methods(self, server: Server) -> None:
        for target in (MESSAGES, COUNT_TOKENS):
            answer = server.ask("GET", target)
            assert error_of(answer, 405)["type"] == "invalid_request_error"
            assert answer.header("allow") == "POST, OPTIONS"
        assert error_of(server.ask("POST", f"{MESSAGES}/batches", {}), 404)["type"] == "not_found_error"
        assert error_of(server.ask("POST", MESSAGES, b"x", [("Content-Type", "text/plain")]), 415)
        said = [("anthropic-version", "2023-06-01")]
        assert error_of(server.ask("GET", "/v1/files", None, said), 404)["type"] == "not_found_error"
        server.ask("GET", "/v1/files").error(404)  # and to others in OpenAI's shape

    def test_headers_that_its_clients_send_are_no_fault(self, server: Server) -> None:
        headers = [("x-api-key", "k"), ("anthropic-version", "1999-01-01"), ("anthropic-beta", "a,b")]
        assert server.ask("POST", MESSAGES, message("hi", max_tokens=1), headers).status == 200

    def test_draining(self) -> None:
        with Server("--drain-timeout", "30") as server, server.connect(receive_buffer=4096) as client:
            client.request("POST", MESSAGES, message("hi", stream=True, max_tokens=5000))
            client.begin("POST")
            client.read_events(3)  # and no more for now, so that it can't end before it is told
            server.terminate()
            until(lambda: server.ask("GET", "/ready").status == 503, "it drains")
            refused = server.ask("POST", MESSAGES, message("next"))
            assert error_of(refused, 503)["type"] == "overloaded_error"
            assert refused.header("retry-after")
            assert words(text_of(assembled(typed(client.finish().events())))) == 5000


class TestUtilities:
    def test_tokenize_a_prompt(self, server: Server) -> None:
        found = server.ask("POST", "/tokenize", {"prompt": "hé<|im_end|>", "return_token_strs": True}).json()
        assert found == {
            "count": 4,
            "max_model_len": 131_072,
            "tokens": [104, 0xC3, 0xA9, 258],
            "token_strs": ["h", "\ufffd", "\ufffd", "<|im_end|>"],
        }
        assert server.ask("POST", "/tokenize", {"prompt": "x"}).json()["token_strs"] is None

    def test_a_prompts_count_is_its_usage(self, server: Server) -> None:
        turns = [{"role": "user", "content": "how long am I?"}]
        counted = server.ask("POST", "/tokenize", {"messages": turns, "model": MODEL}).json()
        usage = server.ask("POST", "/v1/chat/completions", chat("how long am I?", max_tokens=1)).json()["usage"]
        assert usage["prompt_tokens"] == counted["count"] == len(counted["tokens"])
        bare = server.ask("POST", "/tokenize", {"messages": turns, "add_generation_prompt": False}).json()
        assert counted["tokens"][: bare["count"]] == bare["tokens"] and bare["count"] < counted["count"]

    def test_a_message_that_is_continued(self, server: Server) -> None:
        turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so "}]
        body = {"messages": turns, "continue_final_message": True, "add_generation_prompt": False}
        assert server.ask("POST", "/tokenize", body).json()["tokens"][-3:] == list(b"so ")
        server.ask("POST", "/tokenize", {**body, "add_generation_prompt": True}).error(400)

    def test_detokenize_undoes_it(self, server: Server) -> None:
        text = 'né 😀 "\u2028<|im_end|>'
        tokens = server.ask("POST", "/tokenize", {"prompt": text}).json()["tokens"]
        assert server.ask("POST", "/detokenize", {"tokens": tokens}).json() == {"prompt": text}

    @pytest.mark.parametrize(
        ("target", "body", "param"),
        [
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": "x", "messages": []}, "prompt"),
            ("/tokenize", {"prompt": 3}, "prompt"),
            ("/tokenize", {"prompt": "x", "truncate": 1}, "truncate"),
            ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
            ("/tokenize", {"prompt": "x" * 200_000 * 9}, "prompt"),
            ("/tokenize", {"messages": []}, "messages"),
            ("/tokenize", {"messages": [{"role": "user"}]}, "messages.0.content"),
            (
                "/tokenize",
                {"messages": [{"role": "user", "content": "x"}], "continue_final_message": True},
                "continue_final_message",
            ),
            ("/detokenize", {}, "tokens"),
            ("/detokenize", {"tokens": [1, 99_999]}, "tokens.1"),
            ("/detokenize", {"tokens": [1, "x"]}, "tokens.1"),
            ("/detokenize", {"tokens": [0] * 131_073}, "tokens"),
        ],
    )
    def test_refusals(self, server: Server, target: str, body: Any, param: str) -> None:
        assert server.ask("POST", target, body).error(400)["param"] == param
