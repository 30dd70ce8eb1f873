"""Cases of kinds B, D, F and G as clients of the Anthropic Messages API meet them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_type_hints

import anthropic
import pytest
from anthropic.types.message_count_tokens_params import MessageCountTokensParams
from anthropic.types.message_create_params import MessageCreateParamsNonStreaming

from tests.support.messages import (
    COUNT_TOKENS,
    MESSAGES,
    assembled,
    error_object,
    error_of,
    message,
    prompt,
    text_of,
    typed,
)
from tests.support.played import BREAKS, KEY, MAX_BODY, SCRIPTS, SEPARATORS, SMALL_KEY
from tests.support.serving import Answer, Header, Server

pytestmark = pytest.mark.synthetic

NDJSON = ("Accept", "application/x-ndjson")
STARTED = 'sluice_requests_started_total{api="messages"}'
BOTH = pytest.mark.parametrize("path", [MESSAGES, COUNT_TOKENS])


def ask(server: Server, content: Any, *headers: Header, **fields: Any) -> Answer:
    """A streamed message."""
    return server.ask("POST", MESSAGES, message(content, stream=True, **fields), headers)


def body_for(path: str, content: Any, **fields: Any) -> dict[str, Any]:
    return message(content, **fields) if path == MESSAGES else prompt(content, **fields)


class TestB01AndB02TextCanMakeNoEvents:
    @pytest.mark.parametrize(("content", "pieces"), [("[breaks]", BREAKS), ("[separators]", SEPARATORS)])
    def test_strict_and_naive_clients_see_the_same(self, server: Server, content: str, pieces: list[str]) -> None:
        answer = ask(server, content)
        events = typed(answer.events())
        assert text_of(assembled(events)) == "".join(pieces)
        naive = [line.removeprefix("data: ") for line in answer.body.decode().splitlines() if line.startswith("data:")]
        assert [json.loads(line) for line in naive] == events


class TestB04OneGeneration:
    def test_b04_the_same_key_or_position_attaches(self, server: Server) -> None:
        before = server.metrics()[STARTED]
        body = message("[slow]", stream=True)
        named = [("Idempotency-Key", "anthropic-b04")]
        with server.connect() as client:
            client.request("POST", MESSAGES, body, named)
            client.begin("POST")
            seen = client.read_events(5).events()
            client.reset()
        again = [server.ask("POST", MESSAGES, body, named) for _ in range(2)]
        assert again[0].body == again[1].body
        assert typed(again[0].events())[:5] == typed(seen[:5])
        rest = [server.ask("POST", MESSAGES, body, [("Last-Event-ID", seen[4].id)]) for _ in range(2)]
        assert [*typed(seen[:5]), *typed(rest[0].events())] == typed(again[0].events())
        assert rest[0].body == rest[1].body
        assert server.metrics()[STARTED] == before + 1
        refused = server.ask("POST", MESSAGES, message("other", stream=True), named)
        assert error_of(refused, 422)["type"] == "invalid_request_error"


class TestB05AFaultInMidStream:
    @pytest.fixture(scope="class")
    @classmethod
    def faulty(cls) -> Iterator[Server]:
        """One whose log holds the tracebacks of the faults that are played."""
        with Server(scripts=SCRIPTS, faults_expected=True) as running:
            yield running

    @pytest.mark.parametrize("content", ["[error]", "[raise]"])
    @pytest.mark.parametrize("ndjson", [False, True])
    def test_b05_an_error_event_and_the_connection_goes_on(self, faulty: Server, content: str, ndjson: bool) -> None:
        series = 'sluice_requests_total{api="messages",outcome="error"}'
        before = faulty.metrics()[series]
        with faulty.connect() as client:
            client.request("POST", MESSAGES, message(content, stream=True), [NDJSON] if ndjson else [])
            answer = client.answer()
            assert answer.end == "whole"
            events = [line for line in answer.lines() if "type" in line] if ndjson else typed(answer.events())
            assert error_object(events[-1], answer)["type"] == "api_error"
            text = "".join(e["delta"]["text"] for e in events if e["type"] == "content_block_delta")
            assert text == "one two three"
            assert not {"content_block_stop", "message_delta", "message_stop"} & {e["type"] for e in events}
            client.request("GET", "/health")
            assert client.answer().status == 200
        assert faulty.metrics()[series] == before + 1


class TestB07Tails:
    @pytest.mark.parametrize(
        ("content", "fields", "reason"),
        [
            ("plain", {"max_tokens": 3}, "max_tokens"),
            ("[length]", {}, "max_tokens"),
            ("[breaks]", {}, "end_turn"),
            ("[empty]", {}, "end_turn"),
            ("[late]", {"max_tokens": 2}, "max_tokens"),
            ("[length]", {"stop_sequences": [" two"]}, "stop_sequence"),
        ],
    )
    def test_b07_message_stop_is_last_and_there_is_no_done(
        self, server: Server, content: str, fields: dict[str, Any], reason: str
    ) -> None:
        answer = ask(server, content, **fields)
        assert assembled(typed(answer.events()))["stop_reason"] == reason
        assert b"\ndata: [DONE]" not in answer.body
        assert answer.body.endswith(b"\n\n")
        assert ask(server, content, NDJSON, **fields).body.endswith(b'\n{"done":true}\n')


class TestB08QuietStreams:
    @pytest.mark.parametrize(("content", "text"), [("[prefill]", "late words"), ("[pause]", "before after")])
    def test_b08_ping_events_while_nothing_comes(self, quick: Server, content: str, text: str) -> None:
        answer = ask(quick, content)
        events = answer.events()
        pings = [event for event in events if event.event == "ping"]
        assert len(pings) >= 3 and {event.data for event in pings} == {'{"type":"ping"}'}
        assert answer.body.count(b"\nid: ") == len(events) - len(pings)
        kinds = [event.event for event in events]
        assert kinds[:2] == ["message_start", "content_block_start"]
        assert content != "[prefill]" or kinds.index("ping") < kinds.index("content_block_delta")
        assert text_of(assembled(typed(events))) == text
        assert answer.comments() == []

    def test_b08_official_client_passes_over_them(self, quick: Server) -> None:
        with (
            anthropic.Anthropic(base_url=quick.url, api_key="none", max_retries=0) as client,
            client.messages.stream(
                model="synthetic", max_tokens=9, messages=[{"role": "user", "content": "[prefill]"}]
            ) as stream,
        ):
            assert "".join(stream.text_stream) == "late words"


class TestD11AndD15Content:
    @BOTH
    @pytest.mark.parametrize(
        "content", ["", [], [{"type": "text", "text": ""}], None, 3, [3], [{"text": "x"}], [{"type": "text"}], {}]
    )
    def test_none_to_speak_of(self, server: Server, path: str, content: Any) -> None:
        error = error_of(server.ask("POST", path, body_for(path, content)), 400)
        assert error["message"].startswith("messages.0.content")

    @BOTH
    @pytest.mark.parametrize("kind", ["image", "document", "thinking", "redacted_thinking", "search_result", "x"])
    def test_a_block_that_is_not_read_is_named(self, server: Server, path: str, kind: str) -> None:
        source = {"type": "base64", "media_type": "image/png", "data": "AA=="}
        blocks = [{"type": "text", "text": "what is this?"}, {"type": kind, "source": source}]
        error = error_of(server.ask("POST", path, body_for(path, blocks)), 400)
        assert error["message"].startswith("messages.0.content.1.type: ") and repr(kind) in error["message"]

    def test_one_block_is_the_same_as_a_string(self, server: Server) -> None:
        blocks = [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}, "citations": None}]
        system = [{"type": "text", "text": "be brief"}]
        counts = [
            server.ask("POST", COUNT_TOKENS, prompt(content, system=said)).json()
            for content, said in (("hi", "be brief"), (blocks, system))
        ]
        assert counts[0] == counts[1]

    @BOTH
    def test_no_messages(self, server: Server, path: str) -> None:
        body = {**body_for(path, "x"), "messages": []}
        assert error_of(server.ask("POST", path, body), 400)["message"].startswith("messages")


JSON_OBJECT = {"type": "json_schema", "schema": {"type": "object"}}
# Each with values that it refuses, and one that it takes.
FIELDS: list[tuple[str, list[Any], Any]] = [
    ("max_tokens", [0, -1, None, "5", 2.5], 1),
    ("temperature", [-0.1, 1.1, "x", []], 1),
    ("top_p", [0, 1.1, "x"], 0.5),
    ("top_k", [-2, 1.5, "x"], 3),
    ("stop_sequences", ["x", [""], [1], ["x"] * 17], ["x"]),
    ("stream", ["yes", 1], False),
    ("system", [1, [{"type": "image"}], [{"type": "text"}]], "x"),
    ("model", [None, 1], "synthetic"),
    ("messages", [None, "x", [], [1], [{"role": "wizard", "content": "x"}]], [{"role": "user", "content": "x"}]),
    ("tools", ["x", [1], [{"name": "f"}]], []),
    ("tool_choice", ["auto", {"type": "x"}, {"type": "any"}], {"type": "auto"}),
    ("metadata", ["x", {"user": "x"}, {"user_id": 1}], {"user_id": "x"}),
    ("service_tier", ["fast", 1], "standard_only"),
    ("cache_control", ["x", {"type": "other"}], {"type": "ephemeral", "ttl": "5m"}),
    ("thinking", [{"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}, "x"], {"type": "disabled"}),
    ("output_config", [{"effort": "high"}, {"format": {"type": "json"}}, {"x": 1}], {"format": JSON_OBJECT}),
    ("output_format", [{"type": "json_schema"}, {"type": "text"}, "json"], JSON_OBJECT),
    ("mcp_servers", [[{}], "x"], []),
    ("context_management", [{"edits": []}], None),
    ("container", ["x"], None),
    ("inference_geo", ["eu"], None),
    ("diagnostics", [{"previous_message_id": None}], None),
    ("speed", ["fast"], "standard"),
    ("n", [1, 2], ...),
    ("max_completion_tokens", [5], ...),
]  # fmt: skip


# Parameters of the SDK's methods that go as headers, which change no answer.
AS_HEADERS = {"user_profile_id", "workspace_id"}


class TestD12AndD18Fields:
    """Each field works, is harmless, or is refused by its name; none is dropped in silence."""

    @pytest.mark.parametrize("kind", [MessageCreateParamsNonStreaming, MessageCountTokensParams])
    def test_all_that_the_official_client_sends_are_told_of(self, kind: type) -> None:
        """A field that a new release brings fails here until somebody says what becomes of it."""
        assert get_type_hints(kind).keys() - AS_HEADERS <= {name for name, _, _ in FIELDS}

    @pytest.mark.parametrize(("name", "bad", "good"), FIELDS, ids=[name for name, _, _ in FIELDS])
    def test_its_values(self, server: Server, name: str, bad: list[Any], good: Any) -> None:
        for value in bad:
            error = error_of(server.ask("POST", MESSAGES, message("hi", **{"max_tokens": 1} | {name: value})), 400)
            assert error["message"].startswith(name), (value, error)
        if good is not ...:
            answer = server.ask("POST", MESSAGES, message("hi", **{"max_tokens": 1} | {name: good}))
            assert answer.status == 200, bytes(answer.body)

    @pytest.mark.parametrize("name", ["max_tokens", "model", "messages"])
    def test_what_is_required(self, server: Server, name: str) -> None:
        body = message("hi")
        del body[name]
        assert error_of(server.ask("POST", MESSAGES, body), 400)["message"].startswith(name)

    def test_count_tokens_takes_what_makes_a_prompt_only(self, server: Server) -> None:
        assert error_of(server.ask("POST", COUNT_TOKENS, message("hi")), 400)["message"].startswith("max_tokens")


class TestD17BadText:
    @BOTH
    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b"{",
            b"[]",
            b"null",
            b'{"model":"synthetic","model":"synthetic","max_tokens":1,"messages":[{"role":"user","content":"x"}]}',
            b'{"model":"synthetic","max_tokens":1,"messages":[{"role":"user","content":"\\ud83d"}]}',
            b'{"model":"synthetic","max_tokens":1,"messages":[{"role":"user","content":"\xff"}]}',
            b'{"model":"\\ud83d","max_tokens":1,"messages":[{"role":"user","content":"x"}]}',
            b'{"model":"synthetic","max_tokens":1,"stop_sequences":["\\ud83d"],"messages":[]}',
            b'{"messages":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        ],
    )
    def test_bad_bodies(self, server: Server, path: str, body: bytes) -> None:
        assert error_of(server.ask("POST", path, body), 400)["type"] == "invalid_request_error"


class TestD18Refusals:
    """The same faults as elsewhere, in this API's shape."""

    @BOTH
    def test_a_key_is_needed(self, keyed: Server, path: str) -> None:
        body = body_for(path, "hi")
        for headers in ([], [("x-api-key", "wrong")], [("Authorization", "Bearer wrong")], [("x-api-key", "")]):
            assert error_of(keyed.ask("POST", path, body, headers), 401)["type"] == "authentication_error"
        for headers in ([("x-api-key", KEY)], [("Authorization", f"Bearer {KEY}")]):
            assert keyed.ask("POST", path, body, headers).status == 200

    @BOTH
    def test_too_large(self, server: Server, path: str) -> None:
        answer = server.ask("POST", path, body_for(path, "x" * MAX_BODY))
        assert error_of(answer, 413)["type"] == "request_too_large"

    @BOTH
    def test_methods_and_media_types(self, server: Server, path: str) -> None:
        for method in ("GET", "PUT", "DELETE"):
            assert error_of(server.ask(method, path), 405)["type"] == "invalid_request_error"
        answer = server.ask("POST", path, b"x=1", [("Content-Type", "application/x-www-form-urlencoded")])
        assert error_of(answer, 415)["type"] == "invalid_request_error"

    def test_unknown_routes_below(self, server: Server) -> None:
        for target in (f"{MESSAGES}/", f"{MESSAGES}/batches", f"{MESSAGES}/count_tokens/x"):
            assert error_of(server.ask("POST", target, {}), 404)["type"] == "not_found_error"

    def test_a_body_that_does_not_come(self, quick: Server) -> None:
        with quick.connect() as client:
            client.send(f"POST {MESSAGES} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n".encode())
            assert error_of(client.answer(), 408)["type"] == "timeout_error"


class TestD19TooLong:
    @pytest.mark.parametrize("streamed", [False, True])
    def test_a_prompt_that_does_not_fit(self, streamed: bool) -> None:
        with Server("--max-body", "3000000") as server:
            answer = server.ask("POST", MESSAGES, message("x" * 131_072, stream=streamed))
            found = error_of(answer, 400)
            assert "131072" in found["message"] and found["type"] == "invalid_request_error"
            assert error_of(server.ask("POST", COUNT_TOKENS, prompt("x" * 2_000_000)), 400)["message"]

    def test_a_larger_max_tokens_than_the_room_is_cut_to_it(self, server: Server) -> None:
        answer = server.ask("POST", MESSAGES, message("[breaks]", max_tokens=10**9))
        assert answer.json()["stop_reason"] == "end_turn"


class TestD21Markers:
    def test_control_markers_in_a_message_are_plain_text(self, server: Server) -> None:
        plain = server.ask("POST", COUNT_TOKENS, prompt("a")).json()["input_tokens"]
        marked = server.ask("POST", COUNT_TOKENS, prompt("a<|im_end|>")).json()["input_tokens"]
        assert marked == plain + len("<|im_end|>")  # a byte each, and not one control token

    def test_special_tokens_of_the_model_are_not_shown(self, server: Server) -> None:
        assert text_of(server.ask("POST", MESSAGES, message("[specials]")).json()) == ""


class TestD22AndG04Usage:
    def test_the_same_in_every_form(self, server: Server) -> None:
        content = "count me: " + "x" * 100
        counted = server.ask("POST", COUNT_TOKENS, prompt(content)).json()["input_tokens"]
        before = server.metrics()
        events = typed(ask(server, content, max_tokens=9).events())
        whole = server.ask("POST", MESSAGES, message(content, max_tokens=9)).json()
        after = server.metrics()
        assert events[0]["message"]["usage"]["input_tokens"] == counted
        cached = 0
        for usage in (assembled(events)["usage"], whole["usage"]):
            assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counted
            assert 0 <= usage["cache_read_input_tokens"] < counted
            assert usage["output_tokens"] == 9
            cached += usage["cache_read_input_tokens"]
        assert whole["usage"]["cache_read_input_tokens"] > 0
        for series, value in (("prompt", 2 * counted), ("generated", 18), ("cached", cached)):
            assert after[f"sluice_{series}_tokens_total"] - before[f"sluice_{series}_tokens_total"] == value


class TestF04RetryAfter:
    def test_the_keys_limit_of_streams(self, keyed: Server) -> None:
        key = [("x-api-key", SMALL_KEY)]
        with keyed.connect() as client:
            client.request("POST", MESSAGES, message("[pause]", stream=True), key)
            client.begin("POST")
            answer = keyed.ask("POST", MESSAGES, message("next"), key)
            assert error_of(answer, 429)["type"] == "rate_limit_error"
            assert 1 <= int(answer.header("retry-after") or 0) <= 120
            client.finish()
        assert keyed.ask("POST", MESSAGES, message("next", max_tokens=1), key).status == 200

    def test_a_full_server(self) -> None:
        with Server("--max-streams", "1", scripts=SCRIPTS) as server, server.connect() as client:
            client.request("POST", MESSAGES, message("[pause]", stream=True))
            client.begin("POST")
            answer = server.ask("POST", MESSAGES, message("next"))
            assert error_of(answer, 503)["type"] == "overloaded_error"
            assert 1 <= int(answer.header("retry-after") or 0) <= 120
            client.finish()
