"""What a new user met who knew nothing but the README, kept so that nobody meets it again."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from server import outlet
from tests.support.http_client import chat
from tests.support.serving import REPOSITORY, Server, until
from tests.support.websocket_client import WebSocketClient

CHAT = "/v1/chat/completions"
GENERATE = "/v1/generate?prompt=hi&max_tokens=2"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--log-format", "json") as running:
        yield running


def lines(server: Server, request_id: str) -> list[dict[str, object]]:
    records = [json.loads(line) for line in server.log.splitlines() if line.startswith("{")]
    return [record for record in records if record.get("request_id") == request_id]


class TestNoForeignPageMakesAKeylessServerCompute:
    @pytest.mark.parametrize(
        "headers",
        [
            [("Origin", "https://evil.example")],
            [("Origin", "null")],
            [("Sec-Fetch-Site", "cross-site")],
            [("Origin", "http://localhost:1")],  # the same host on another port is another site's
        ],
    )
    @pytest.mark.parametrize(("method", "target"), [("GET", GENERATE), ("POST", CHAT), ("DELETE", "/v1/streams/x")])
    def test_refused(self, server: Server, method: str, target: str, headers: list[tuple[str, str]]) -> None:
        body = chat("hi") if method == "POST" else None
        assert server.ask(method, target, body, headers).error(403)["code"] == "origin_not_allowed"

    @pytest.mark.parametrize("headers", [[], [("Sec-Fetch-Site", "same-origin")], [("Sec-Fetch-Site", "none")]])
    def test_answered(self, server: Server, headers: list[tuple[str, str]]) -> None:
        assert server.ask("GET", GENERATE, None, headers).status == 200


def test_a_prompt_that_can_not_fit_is_refused_before_it_is_tokenised(server: Server) -> None:
    before = server.resident_bytes
    for body in (chat("a" * 7_000_000), chat("x " * 3_000_000)):
        error = server.ask("POST", CHAT, body).error(400)
        assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
        assert re.search(r"has (at least )?\d+ tokens", error["message"])
    assert server.resident_bytes - before < 200_000_000


def test_more_sequences_than_can_ever_wait_are_no_overload(server: Server) -> None:
    error = server.ask("POST", "/v1/completions", {"prompt": ["a"] * 256, "n": 16}).error(400)
    assert error["param"] == "n"
    assert "4096 sequences" in error["message"]


def test_every_request_has_its_line(server: Server) -> None:
    began = server.ask("POST", CHAT, chat("hi", stream=True, max_tokens=2), [("X-Request-Id", "began")])
    name = began.header("x-stream-id")
    target = f"/v1/streams/{name}"
    server.ask("GET", target, None, [("X-Request-Id", "resumed")])
    server.ask("GET", target, None, [("X-Request-Id", "polled"), ("Accept", "application/json")])
    server.ask("DELETE", target, None, [("X-Request-Id", "deleted")])
    expected = {"began": "stream", "resumed": "request", "polled": "request", "deleted": "request"}
    for request_id, event in expected.items():
        (record,) = until(lambda request_id=request_id: lines(server, request_id), f"a line for {request_id}")  # type: ignore[misc]
        assert (record["event"], record["client"]) == (event, "127.0.0.1")
    assert str(name) not in server.log  # whoever reads the log can't attach


def test_the_pool_is_shown_before_the_first_request() -> None:
    with Server("--kv-blocks", "77") as server:
        server.wait_metric('sluice_kv_blocks{state="free"}', 77)


def test_what_sends_the_tokens_is_said_at_the_start_and_whenever_asked(server: Server) -> None:
    (start,) = [json.loads(line) for line in server.log.splitlines() if '"start"' in line]
    assert start["event"] == "start"
    assert start["token_sender"] == server.ask("GET", "/status").json()["token_sender"] == outlet.sender()


@pytest.mark.parametrize("flag", ["--kv-blocks", "--block-size"])
def test_a_pool_beyond_all_memory_is_refused_in_a_sentence(flag: str) -> None:
    command = [sys.executable, "-m", "server", "--port", "0", "--engine", "synthetic", flag, "9" * 14]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"engine: {flag} must be at most" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_bare_prompt_takes_its_fields_from_the_address(server: Server) -> None:
    with WebSocketClient(server, "/v1/ws?max_tokens=3&temperature=0") as client:
        client.send_text("hello")
        assert len([client.receive() for _ in range(3)]) == 3
        assert client.closed().reason == "length"


def test_a_bare_prompt_with_a_wrong_field_is_closed_with_the_reason(server: Server) -> None:
    with WebSocketClient(server, "/v1/ws?temperature=hot") as client:
        client.send_text("hello")
        closed = client.closed()
        assert closed.code == 1008
        assert "temperature" in closed.reason


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"max_tokens": "5"}, "max_tokens: must be a whole number, not a string"),
        ({"stop": 1}, "stop: must be a string or a list, not a whole number"),
        ({"stream": 1}, "stream: must be true or false, not a whole number"),
    ],
)
def test_errors_speak_of_json_and_not_of_python(server: Server, fields: dict[str, object], sentence: str) -> None:
    assert server.ask("POST", CHAT, chat("hi", **fields)).error(400)["message"] == sentence


def test_every_flag_of_the_readme_is_one() -> None:
    """The README names no flag that the command line doesn't know."""
    from server import top
    from server.config import _parser

    known = set(_parser()._option_string_actions) | set(top.make_parser()._option_string_actions)
    readme = (REPOSITORY / "README.md").read_text()
    sections = readme.split("## Test another server with our suite")[0]
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", sections))
    # The engine's, curl's, schemathesis' and pytest's.
    elsewhere = {"--listen", "--token-file", "--json", "--http2-prior-knowledge", "--exclude-path", "--checks"}
    elsewhere |= {"--dist"}
    assert named - known - elsewhere == set()
