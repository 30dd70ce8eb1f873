"""Cases of kind F: who may ask, and how much. Each test names its case."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.keys import bearer
from tests.support.played import KEY, SCRIPTS, SMALL_KEY
from tests.support.probes import PARKED, QUEUED, RUNNING, crowd
from tests.support.serving import Answer, Header, Server, WebSocketClient, WebSocketRefused, chat, until

pytestmark = pytest.mark.synthetic

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LISTED = "https://app.example"
ORIGIN: Header = ("Origin", LISTED)
ROUTES = [
    ("POST", CHAT),
    ("POST", COMPLETIONS),
    ("GET", "/v1/generate"),
    ("GET", "/v1/streams/x"),
    ("DELETE", "/v1/streams/x"),
    ("GET", "/v1/ws"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/x"),
    ("POST", "/v1/access-tokens"),
]


@pytest.fixture(scope="module")
def shared(keys_file: Path) -> Iterator[Server]:
    """With keys, and a page of another origin that may ask."""
    flags = ("--api-keys", str(keys_file), "--cors-origin", LISTED, "--drain-timeout", "1")
    with Server(*flags, scripts=[{"match": "[fail]", "tokens": [{"error": "played"}]}]) as running:
        yield running


class TestF01Preflights:
    @pytest.mark.parametrize(("method", "path"), ROUTES)
    def test_each_route_without_a_key(self, shared: Server, method: str, path: str) -> None:
        asked = [("Access-Control-Request-Method", method), ("Access-Control-Request-Headers", "authorization,x-a")]
        answer = shared.ask("OPTIONS", path, headers=[ORIGIN, *asked])
        assert answer.status == 204 and not answer.body
        assert answer.header("access-control-allow-origin") == LISTED
        assert method in (answer.header("access-control-allow-methods") or "")
        assert answer.header("access-control-allow-headers") == "authorization,x-a"
        foreign = shared.ask("OPTIONS", path, headers=[("Origin", "https://evil.example"), *asked])
        assert not [name for name, _ in foreign.headers if name.startswith(b"access-control-")]

    @pytest.mark.parametrize(
        ("target", "body", "headers", "status"),
        [
            (CHAT, chat("x"), [], 401),
            (CHAT, b"{", bearer(KEY), 400),
            ("/v1/nothing", {}, bearer(KEY), 404),
            ("/health", {}, bearer(KEY), 405),
            (COMPLETIONS, b"x" * 9_000_000, bearer(KEY), 413),
            (CHAT, b"", [*bearer(KEY), ("Content-Type", "text/csv")], 415),
            (COMPLETIONS, {"prompt": "[fail]"}, bearer(KEY), 500),
        ],
    )
    def test_errors_may_be_read_by_the_page(
        self, shared: Server, target: str, body: Any, headers: list[Header], status: int
    ) -> None:
        self.check(shared.ask("POST", target, body, [ORIGIN, *headers]), status)

    def test_refusals_for_now_too(self, shared: Server) -> None:
        with shared.connect() as client:
            client.request("POST", COMPLETIONS, {"prompt": "x", "stream": True, "max_tokens": 9999}, bearer(SMALL_KEY))
            client.begin()
            answer = shared.ask("POST", CHAT, chat("x"), [ORIGIN, *bearer(SMALL_KEY)])
        self.check(answer, 429)
        assert answer.header("retry-after")

    def check(self, answer: Answer, status: int) -> None:
        answer.error(status)
        assert answer.header("access-control-allow-origin") == LISTED
        exposed = (answer.header("access-control-expose-headers") or "").split(", ")
        assert {"Retry-After", "X-Request-Id", "X-Stream-Id", "x-ratelimit-remaining-tokens"} <= set(exposed)


class TestF02Probes:
    @pytest.mark.parametrize("method", ["GET", "HEAD"])
    def test_without_a_key(self, keyed: Server, method: str) -> None:
        for path in ("/health", "/ready", "/metrics", "/"):  # the page at / holds nothing, and asks with a key
            assert keyed.ask(method, path).status == 200
        for path in ("/playground", "/playground/x", "/status/x", "/nothing", "/v1/models", "/health/x", "//health"):
            assert keyed.ask(method, path).status == 401

    def test_they_are_free_of_secrets(self, keyed: Server) -> None:
        keyed.ask("POST", COMPLETIONS, {"prompt": "x", "max_tokens": 1}, bearer(KEY))
        for path in ("/health", "/ready", "/metrics"):
            body = bytes(keyed.ask("GET", path).body)
            for word in (KEY, SMALL_KEY, hashlib.sha256(KEY.encode()).hexdigest(), "alice", "bob"):
                assert word.encode() not in body

    def test_metrics_by_key(self, keys_file: Path) -> None:
        with Server("--api-keys", str(keys_file), "--metrics-access", "key") as server:
            server.ask("GET", "/metrics").error(401)
            assert server.ask("GET", "/metrics", headers=bearer(KEY)).status == 200

    def test_they_answer_while_the_engine_is_busy_and_tell_of_its_end(self, keys_file: Path) -> None:
        scripts = [{"match": "hang", "tokens": ["a", {"hang_ms": 1500}, "b"]}]
        flags = ("--api-keys", str(keys_file), "--engine-restart-wait", "0", "--drain-timeout", "1")
        with Server(*flags, scripts=scripts) as server, server.connect() as client:
            client.request("POST", COMPLETIONS, {"prompt": "hang", "stream": True}, bearer(KEY))
            client.begin()
            client.read_events(1)
            since = time.monotonic()
            assert server.ask("GET", "/health").status == server.ask("GET", "/ready").status == 200
            assert time.monotonic() - since < 1
            (engine,) = server.engine_pids
            os.kill(engine, signal.SIGKILL)
            until(lambda: server.ask("GET", "/ready").status == 503, "readiness tells of the engine's death")
            assert server.ask("GET", "/health").status == 200


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts a server whose one key has these limits."""
    running: list[Server] = []

    def start(*flags: str, **limits: int) -> Server:
        fields = "".join(f"{name} = {value}\n" for name, value in limits.items())
        path = tmp_path / "keys.toml"
        path.write_text(f'[keys.alice]\nsha256 = "{hashlib.sha256(KEY.encode()).hexdigest()}"\n{fields}')
        server = Server("--api-keys", str(path), "--resume-ttl", "1", *flags, scripts=SCRIPTS)
        running.append(server)
        return server.__enter__()

    yield start
    for server in running:
        server.__exit__(None, None, None)


class TestF04RetryAfter:
    def check(self, answer: Answer, status: int) -> int:
        error = answer.error(status)
        assert error["code"] == ("rate_limit_exceeded" if status == 429 else "overloaded")
        wait = answer.header("retry-after")
        assert wait is not None and wait.isdecimal()
        assert 1 <= int(wait) <= 120
        return int(wait)

    def check_everywhere(self, server: Server, status: int) -> int:
        """Both HTTP APIs, a new socket; the longest wait that was told."""
        asks: list[Callable[[], Answer]] = [
            lambda: server.ask("POST", CHAT, chat("x", max_tokens=1), bearer(KEY)),
            lambda: server.ask("GET", "/v1/generate?prompt=x&max_tokens=1", None, bearer(KEY)),
            lambda: server.ask("POST", "/v1/responses", {"input": "x", "max_output_tokens": 1}, bearer(KEY)),
            lambda: self.one(server),
        ]
        if status == 429:
            asks.insert(0, lambda: self.opened(server))
        self.check_messages(server, status)
        return max(self.check(self.refusal(ask), status) for ask in asks)

    def check_messages(self, server: Server, status: int) -> None:
        """Anthropic's shape."""
        body = {"model": "synthetic", **chat("x", max_tokens=1)}
        answer = self.refusal(lambda: server.ask("POST", "/v1/messages", body, [("X-Api-Key", KEY)]))
        assert answer.status in (status, 529)
        assert answer.json()["type"] == "error"
        assert answer.json()["error"]["type"] == ("rate_limit_error" if status == 429 else "overloaded_error")
        assert 1 <= int(answer.header("retry-after") or 0) <= 120

    def opened(self, server: Server) -> Answer:
        try:
            with WebSocketClient(server, headers=bearer(KEY)) as socket:
                return socket.handshake
        except WebSocketRefused as refusal:
            return refusal.answer

    def refusal(self, ask: Callable[[], Answer]) -> Answer:
        """On a slow machine a little may have dripped in meanwhile: ask until that is used up too."""
        for _ in range(20):
            answer = ask()
            if answer.status not in (101, 200):
                return answer
        raise AssertionError("nothing is over the limit")

    def obey(self, retry_after_s: int) -> None:
        """Come back when the server said: that there is room then, not that there will be some, is what is tested."""
        time.sleep(retry_after_s)

    def one(self, server: Server, **fields: Any) -> Answer:
        return server.ask("POST", COMPLETIONS, {"prompt": "x", "max_tokens": 1, **fields}, bearer(KEY))

    def test_requests(self, limited: Callable[..., Server]) -> None:
        server = limited(rate_limit_requests=20)
        with WebSocketClient(server, headers=bearer(KEY)) as socket:
            first = self.one(server)
            assert first.header("x-ratelimit-limit-requests") == "20"
            assert first.header("x-ratelimit-remaining-requests") == "19"
            assert (first.header("x-ratelimit-reset-requests") or "").endswith("s")
            for _ in range(19):
                assert self.one(server).status == 200
            self.refusal(lambda: self.one(server))
            socket.send_json(type="generate", id="a", prompt="x", max_tokens=1)
            refused = socket.receive_until("error", "done")[-1]
            assert refused["error"]["code"] == "rate_limit_exceeded" and refused["retry_after"] >= 1
            wait_s = self.check_everywhere(server, 429)
            self.obey(wait_s)
            assert self.one(server).status == 200
            self.refusal(lambda: self.one(server))
            socket.send_json(type="generate", id="b", prompt="x", max_tokens=1)
            self.obey(socket.receive_until("error", "done")[-1].get("retry_after", 0))
            socket.send_json(type="generate", id="c", prompt="x", max_tokens=1)
            assert socket.receive_until("error", "done")[-1]["type"] == "done"

    def test_tokens(self, limited: Callable[..., Server]) -> None:
        server = limited(rate_limit_tokens=60)
        first = self.one(server, max_tokens=50)
        assert first.header("x-ratelimit-limit-tokens") == "60"
        assert first.json()["usage"]["completion_tokens"] == 50
        assert self.one(server, max_tokens=12).status == 200
        last = self.refusal(lambda: self.one(server))
        assert last.header("x-ratelimit-remaining-tokens") == "0"
        wait_s = self.check(last, 429)
        self.check_everywhere(server, 429)
        self.obey(wait_s)
        assert self.one(server).status == 200

    def test_a_prompt_over_a_whole_minute_is_told_at_once(self, limited: Callable[..., Server]) -> None:
        server = limited(rate_limit_tokens=20)
        answer = self.one(server, prompt="x" * 21)
        assert answer.error(400)["code"] == "prompt_over_rate_limit"
        assert answer.header("retry-after") is None
        assert answer.header("x-ratelimit-remaining-tokens") == "20"
        assert self.one(server, prompt="x" * 19).status == 200

    def test_streams(self, limited: Callable[..., Server]) -> None:
        server = limited(max_streams=1)
        with server.connect() as client:
            client.request("POST", COMPLETIONS, {"prompt": "x", "stream": True, "max_tokens": 9999}, bearer(KEY))
            client.begin()
            self.check_everywhere(server, 429)
        until(lambda: server.metrics()[RUNNING] + server.metrics()[PARKED] == 0, "the reader's leave is seen")
        assert self.one(server).status == 200

    def test_the_queue(self, limited: Callable[..., Server]) -> None:
        server = limited("--max-running", "1", "--max-queue", "2", "--resume-ttl", "0")
        with crowd(server, 4) as clients:
            for count, client in enumerate(clients):
                client.request("POST", COMPLETIONS, {"prompt": "[pause]", "stream": True}, bearer(KEY))
                client.begin()
                server.wait_metric(QUEUED, count)  # the first one has its place
            self.check_everywhere(server, 503)
        server.wait_metric(QUEUED, 0)
        assert self.one(server).status == 200


class TestF05Slots:
    """Key limit 1: every way in which a stream ends gives its slot back; and nobody else's."""

    WAYS = ("cancel", "leave", "invalid", "error", "drop", "whole", "late")

    def test_every_end_frees_the_slot(self, tmp_path: Path) -> None:
        hashes = [hashlib.sha256(secret.encode()).hexdigest() for secret in (KEY, SMALL_KEY)]
        path = tmp_path / "keys.toml"
        path.write_text("".join(f'[keys.k{i}]\nsha256 = "{h}"\nmax_streams = 1\n' for i, h in enumerate(hashes)))
        with (
            Server("--api-keys", str(path), "--drain-timeout", "1", scripts=SCRIPTS) as server,
            server.connect() as other,
        ):
            other.request("POST", COMPLETIONS, {"prompt": "x", "stream": True, "max_tokens": 10**5}, bearer(SMALL_KEY))
            other.begin()  # from here on another key's only slot is in use
            for turn in range(50):
                for tokens in (0, 1, 3):
                    self.play(server, self.WAYS[turn % len(self.WAYS)], tokens)
                answer = server.ask("POST", COMPLETIONS, {"prompt": "x", "max_tokens": 1}, bearer(KEY))
                assert answer.status == 200, (self.WAYS[turn % len(self.WAYS)], bytes(answer.body))
            server.ask("POST", COMPLETIONS, {"prompt": "x"}, bearer(SMALL_KEY)).error(429)

    def play(self, server: Server, way: str, tokens: int) -> None:
        body = {"prompt": "x", "stream": True, "max_tokens": 10**5}
        if way == "invalid":
            server.ask("POST", COMPLETIONS, {**body, "temperature": -1}, bearer(KEY)).error(400)
        elif way == "error":
            answer = server.ask("POST", COMPLETIONS, {**body, "prompt": "[error]"}, bearer(KEY))
            assert b'"code":"error"' in answer.body
        elif way == "whole":
            assert server.ask("POST", COMPLETIONS, {"prompt": "x", "max_tokens": tokens + 1}, bearer(KEY)).status == 200
        elif way == "drop":
            with WebSocketClient(server, headers=bearer(KEY)) as socket:
                socket.send_json(type="generate", id="a", prompt="x", max_tokens=10**5)
                for _ in range(tokens + 1):
                    socket.receive_json()
            self.wait_detached(server)
        else:
            with server.connect() as client:
                client.request("POST", COMPLETIONS, body, bearer(KEY))
                answer = client.begin()
                client.read_events(tokens)
                stream_id = answer.header("x-stream-id")
                if way == "cancel":
                    assert server.ask("DELETE", f"/v1/streams/{stream_id}", None, bearer(KEY)).status == 200
            if way != "cancel":
                self.wait_detached(server)
                if way == "late":  # a reader comes back, and goes again
                    with server.connect() as client:
                        client.request("GET", f"/v1/streams/{stream_id}", None, bearer(KEY))
                        client.begin()
                        client.read_events(tokens + 1)
                    self.wait_detached(server)
                server.ask("DELETE", f"/v1/streams/{stream_id}", None, bearer(KEY))

    def wait_detached(self, server: Server) -> None:
        """Until the one stream that reads is the other key's."""
        deadline = time.monotonic() + 20
        while (seen := server.metrics())[RUNNING] + seen[PARKED] + seen[QUEUED] > 1:
            assert time.monotonic() < deadline, seen
