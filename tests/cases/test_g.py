"""Kind G of the fault cases: what /metrics shows. Each test names its case."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.probes import GENERATED, RUNNING, STATES, USED, crowd, outcomes, started, tokens, wait_idle
from tests.support.serving import Server, WebSocketClient, chat, request_bytes

pytestmark = pytest.mark.synthetic

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
REQUESTS, BATCH = 10_000, 100


class TestG01GaugesAfterAllLeft:
    @pytest.mark.parametrize("ttl", ["0", "60"])
    def test_they_are_at_zero_with_no_further_request(self, ttl: str) -> None:
        flags = ("--synthetic-step-ms", "5", "--resume-ttl", ttl, "--drain-timeout", "0")
        with Server(*flags) as server:
            before = server.metrics()
            with crowd(server, 30) as clients:
                for number, client in enumerate(clients):
                    client.request("POST", CHAT, chat(f"hi {number}", stream=number < 20, max_tokens=100_000))
                server.wait_metric(RUNNING, 30)
                assert server.metrics()[USED] > 0
            detached = 20 if ttl == "60" else 0
            wait_idle(server, detached=detached, deadline_s=2.0)
            made = tokens(server)
            for _ in range(20):  # and there they stay
                metrics = server.metrics()
                assert [metrics[series] for series in STATES] == [0, 0, 0, detached]
                assert (metrics[USED], metrics[GENERATED]) == (0, made)
            for series in ("sluice_queue_tokens", "sluice_running_tokens"):
                assert metrics[series] == before[series] == 0
            free = [metrics[f'sluice_kv_blocks{{state="{state}"}}'] for state in ("cached", "free")]
            assert sum(free) * 16 == metrics["sluice_token_capacity"]


class TestG03ClosedLabels:
    """Whatever clients send, the series are those of the first scrape."""

    @pytest.fixture
    def server(self) -> Iterator[Server]:
        with Server() as server:
            yield server

    def test_ten_thousand_random_requests(self, server: Server) -> None:
        chosen = random.Random(3)
        server.ask("POST", CHAT, chat("hi", max_tokens=3))
        before = server.metrics()
        size = len(server.ask("GET", "/metrics").body)
        with server.connect() as client:
            for _ in range(REQUESTS // BATCH):
                methods, data = zip(*[self._request(chosen) for _ in range(BATCH)], strict=True)
                client.send(b"".join(data))
                for method in methods:
                    assert client.answer(method).status in (200, 202, 204, 400, 404, 405, 410, 415, 426)
        after = server.metrics()
        assert after.keys() == before.keys()
        assert len(server.ask("GET", "/metrics").body) < size + 500  # figures have more digits; nothing else is new
        assert started(after) == sum(outcomes(after).values())
        assert outcomes(after)["refused"] > 100

    def _request(self, chosen: random.Random) -> tuple[str, bytes]:
        word = "".join(chosen.choices('abcXYZ09-_.~%41{}"\\', k=chosen.randint(1, 12))).replace("%", "%25")
        headers = [("Authorization", f"Bearer {word}"), ("X-Request-Id", word), ("User-Agent", word)]
        kind = chosen.randrange(8)
        if kind == 0:
            return "POST", request_bytes("POST", CHAT, chat("hi", max_tokens=1, model=word), headers)
        if kind == 1:
            return "POST", request_bytes("POST", CHAT, chat("hi", max_tokens=1, **{word: 1}), headers)
        if kind == 2:
            return "GET", request_bytes("GET", f"/v1/streams/{word}", None, headers)
        if kind == 3:
            return "GET", request_bytes("GET", f"/v1/models/{word}", None, headers)
        if kind == 4:
            return "GET", request_bytes("GET", f"/v1/generate?{word}={word}", None, headers)
        if kind == 5:
            return "GET", request_bytes("GET", "/v1/ws", None, headers)
        method = chosen.choice(["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "FOO", "M-SEARCH"])
        return method, request_bytes(method, "/" + "/".join([word] * chosen.randint(1, 4)), None, headers)

    def test_the_format_parses(self, server: Server) -> None:
        server.ask("POST", CHAT, chat("hi", max_tokens=3))
        with WebSocketClient(server) as socket:
            socket.send_json(type="generate", id="a", **chat("hi", max_tokens=2))
            socket.receive_until("done")
            answer = server.ask("GET", "/metrics")
        assert (answer.header("content-type") or "").startswith("text/plain; version=0.0.4")
        families = {family.name: family for family in text_string_to_metric_families(answer.body.decode())}
        assert all(family.documentation and family.type != "unknown" for family in families.values())
        assert {family.type for family in families.values()} == {"counter", "gauge", "histogram"}
        assert families["sluice_connections"].samples
        for name in ("sluice_ttft_seconds", "sluice_itl_seconds", "sluice_request_seconds", "sluice_queue_seconds"):
            values = [sample.value for sample in families[name].samples if sample.name.endswith("_bucket")]
            assert values == sorted(values)
            (count,) = [sample.value for sample in families[name].samples if sample.name.endswith("_count")]
            assert values[-1] == count

    def test_every_count_is_true(self, server: Server) -> None:
        """Tokens in and out, refused requests and outcomes are those that the clients saw."""
        prompt = completion = 0
        for number in range(1, 11):
            usage = server.ask("POST", CHAT, chat("hi", max_tokens=number, n=2)).json()["usage"]
            prompt, completion = prompt + usage["prompt_tokens"], completion + usage["completion_tokens"]
        server.ask("POST", CHAT, chat("hi", max_tokens=0)).error(400)
        server.ask("POST", CHAT, b"{").error(400)
        server.ask("PUT", CHAT).error(405)
        server.ask("GET", "/v1/generate").error(400)
        metrics = server.metrics()
        assert metrics["sluice_prompt_tokens_total"] == prompt
        assert metrics[GENERATED] == completion == 2 * 55
        assert metrics['sluice_requests_started_total{api="chat"}'] == 13
        assert metrics['sluice_requests_total{api="chat",outcome="length"}'] == 10
        assert metrics['sluice_requests_total{api="chat",outcome="refused"}'] == 3
        assert metrics['sluice_requests_total{api="generate",outcome="refused"}'] == 1
        assert metrics["sluice_ttft_seconds_count"] == 10


class TestG04UsageAfterPreemption:
    def test_it_is_the_same_wherever_it_is_told(self) -> None:
        """Sequences that lose their blocks and are read again count no token twice, nor more cached ones than read."""
        flags = ("--kv-blocks", "8", "--synthetic-step-ms", "1", "--log-format", "json")
        bodies = [{"prompt": "x" * 60, "max_tokens": 60, "stream": number % 2 == 0, "seed": 1} for number in range(10)]
        with Server(*flags) as server, crowd(server, len(bodies)) as clients:
            for client, body in zip(clients, bodies, strict=True):
                options = {"stream_options": {"include_usage": True}} if body["stream"] else {}
                client.request("POST", COMPLETIONS, {**body, **options})
            answers = [client.answer("POST") for client in clients]
            usages = [
                json.loads(answer.events()[-2].data)["usage"] if body["stream"] else answer.json()["usage"]
                for answer, body in zip(answers, bodies, strict=True)
            ]
            metrics = wait_idle(server)
            log = [json.loads(line) for line in server.log.splitlines() if '"completion_tokens"' in line]
        assert metrics["sluice_preemptions_total"] > 0
        told = [(each["prompt_tokens"], _cached(each), each["completion_tokens"]) for each in usages]
        assert all((prompt, made) == (60, 60) and 0 <= cached < prompt for prompt, cached, made in told)
        assert all(each["total_tokens"] == 120 for each in usages)
        assert any(_cached(each) for each in usages)
        names = ("prompt_tokens", "cached_tokens", "completion_tokens")
        assert sorted(tuple(line[name] for name in names) for line in log) == sorted(told)
        for series, value in zip(("prompt", "cached", "generated"), map(sum, zip(*told, strict=True)), strict=True):
            assert metrics[f"sluice_{series}_tokens_total"] == value


def _cached(usage: dict[str, Any]) -> int:
    return int(usage["prompt_tokens_details"]["cached_tokens"])
