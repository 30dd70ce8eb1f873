"""Kind E of the fault cases, the crowds and the ends: E12 (signals) and E14 (all clients gone at once)."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.probes import alive, crowd, outcomes, processes_with, started, wait_idle, words
from tests.support.readings import NDJSON, PLAIN
from tests.support.serving import (
    REPOSITORY,
    Client,
    Closed,
    Server,
    WebSocketClient,
    chat,
    joined,
    request_bytes,
    until,
)

pytestmark = pytest.mark.synthetic

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONG = 100_000
ROUNDS, CLIENTS = 15, 100


class TestE12Signals:
    """SIGTERM gives running streams their time, then ends each in its own grammar; a second one ends all now."""

    FLAGS = ("--synthetic-step-ms", "10", "--drain-timeout", "1.5")

    def test_every_framing_gets_its_error_and_its_end(self) -> None:
        with Server(*self.FLAGS) as server, crowd(server, 5) as clients, WebSocketClient(server) as socket:
            sse, ndjson, plain, whole, completion = clients
            sse.request("POST", CHAT, chat("a", stream=True, max_tokens=LONG))
            ndjson.request("POST", CHAT, chat("b", stream=True, max_tokens=LONG), [NDJSON])
            plain.request("POST", CHAT, chat("c", stream=True, max_tokens=LONG), [PLAIN])
            whole.request("POST", CHAT, chat("d", max_tokens=LONG))
            completion.request("POST", COMPLETIONS, {"prompt": "e", "stream": True, "max_tokens": LONG})
            socket.send_json(type="generate", id="f", **chat("f", max_tokens=LONG))
            for client in (sse, ndjson, plain, completion):
                client.begin("POST")
                client.read_until(lambda answer: len(answer.body) > 10)
            server.wait_metric('sluice_streams{state="running"}', 6)
            server.terminate()
            until(lambda: server.ask("GET", "/ready").status == 503, "readiness fails")
            assert server.ask("GET", "/ready").json()["status"] == "draining"
            assert server.ask("GET", "/health").status == 200
            refused = server.ask("POST", CHAT, chat("late"))
            assert refused.error(503)["type"] == "overloaded_error"
            assert refused.header("retry-after")
            assert sse.read_until(lambda answer: False).end == "whole"
            for client in (sse, completion):
                *chunks, error = client.finish().chunks()
                assert error["error"]["code"] == "error"
                assert client.finish().events()[-1].data == "[DONE]"
                assert words(joined(chunks)) > 0
                assert all(c["finish_reason"] is None for chunk in chunks for c in chunk["choices"])
            lines = ndjson.finish().lines()
            assert lines[-1] == {"done": True} and lines[-2]["error"]["code"] == "error"
            assert plain.finish().end == "cut"
            assert whole.answer("POST").error(503)["code"] == "error"
            assert socket.receive_until("error")[-1]["error"]["code"] == "error"
            assert socket.closed().code == 1012
            assert server.wait() == 0

    def test_a_stream_that_ends_in_time_is_whole(self) -> None:
        with Server("--synthetic-step-ms", "10") as server, server.connect() as client:
            client.request("POST", CHAT, chat("a", stream=True, max_tokens=60))
            client.begin("POST")
            client.read_events(3)
            server.terminate()
            answer = client.finish()
            assert (words(answer.text()), answer.end) == (60, "whole")
            assert answer.chunks()[-1]["choices"][0]["finish_reason"] == "length"
            assert client.closed() == "fin"
            assert server.wait() == 0

    def test_a_client_may_come_back_while_draining(self) -> None:
        with Server("--synthetic-step-ms", "10") as server, server.connect() as client:
            client.request("POST", CHAT, chat("a", stream=True, max_tokens=60))
            name = client.begin("POST").header("x-stream-id")
            seen = client.read_events(3).events()
            server.terminate()
            until(lambda: server.ask("GET", "/ready").status == 503, "readiness fails")
            client.reset()
            rest = server.ask("GET", f"/v1/streams/{name}", None, [("Last-Event-ID", seen[-1].id or "")])
            chunks = [json.loads(event.data) for event in seen] + rest.chunks()
            assert words(joined(chunks)) == 60
            assert server.wait() == 0

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_a_second_signal_ends_all_now(self, number: signal.Signals) -> None:
        """Streams have their outcome all the same: in their grammar, as far as it gets, and in the log."""
        flags = ("--synthetic-step-ms", "10", "--drain-timeout", "60", "--max-running", "2", "--log-format", "json")
        with Server(*flags) as server, crowd(server, 3) as (client, plain, queued):
            client.request("POST", CHAT, chat("a", stream=True, max_tokens=LONG))
            plain.request("POST", CHAT, chat("b", stream=True, max_tokens=LONG), [PLAIN])
            for each in (client, plain):
                each.begin("POST")
                each.read_until(lambda answer: len(answer.body) > 10)
            queued.request("POST", CHAT, chat("c", max_tokens=LONG))
            server.wait_metric('sluice_streams{state="queued"}', 1)
            engines = server.engine_pids
            server.terminate()
            until(lambda: server.ask("GET", "/ready").status == 503, "readiness fails")
            server.process.send_signal(number)
            assert server.wait() == 1
            answer = client.finish()
            if answer.end == "whole":
                *_, error, done = answer.events()
                assert (json.loads(error.data)["error"]["code"], done.data) == ("error", "[DONE]")
            assert plain.finish().end in ("cut", "reset")
            assert queued.answer("POST").error(503)["code"] == "error"
            lines = [json.loads(line) for line in server.log.splitlines() if line.startswith("{")]
            assert [line["outcome"] for line in lines if line["event"] == "stream"] == ["error"] * 3
            until(lambda: not any(map(alive, engines)), "the engine is gone")

    def test_a_hang_up_ends_nothing(self) -> None:
        """The signal's default would: log rotation sends it, and so does a terminal that closes."""
        with Server("--synthetic-step-ms", "5") as server, server.connect() as client:
            client.request("POST", CHAT, chat("a", stream=True, max_tokens=40))
            client.begin("POST")
            client.read_events(3)
            server.process.send_signal(signal.SIGHUP)
            assert words(client.finish().text()) == 40
            assert server.ask("GET", "/ready").status == 200

    def test_idle_it_stops_at_once(self) -> None:
        with Server("--drain-timeout", "60") as server, server.connect() as idle, WebSocketClient(server) as socket:
            idle.request("GET", "/health")
            assert idle.answer().status == 200
            server.terminate()
            assert socket.closed() == Closed(1001, "the server is going to stop")
            assert idle.closed() == "fin"
            assert server.wait(10) == 0

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    @pytest.mark.parametrize("phase", ["protocols.http1", "uvloop", "server.connection", "the engine's start"])
    def test_during_the_start(self, number: signal.Signals, phase: str, tmp_path: Path) -> None:
        """Before the loop has our handlers a signal kills, as it always does; there is never a traceback, and nothing
        is left."""
        script = tmp_path / "script.json"
        script.write_text('{"scripts":[]}')
        flags = ["--port", "0", "--engine", "synthetic", "--synthetic-script", str(script)]
        with subprocess.Popen(
            [sys.executable, "-X", "importtime", "-m", "server", *flags],  # tells on stderr what it has imported
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        ) as process:
            try:
                assert process.stderr is not None
                if phase == "the engine's start":
                    until(lambda: len(processes_with(str(script))) == 2, phase)
                else:
                    assert any(phase.encode() in line for line in process.stderr)
                process.send_signal(number)
                _, log = process.communicate(timeout=30)
            finally:
                process.kill()
        assert b"Traceback" not in log, log
        assert process.returncode == 0 if phase == "the engine's start" else process.returncode in (0, -number)
        until(lambda: not processes_with(str(script)), "no process is left")


class TestE14AllGoneAtOnce:
    """A hundred mixed requests, all sockets killed at a random moment, again and again. Seeded."""

    @pytest.mark.parametrize("ttl", ["0", "0.2"])
    def test_rounds(self, ttl: str) -> None:
        chosen = random.Random(14)
        flags = ("--resume-ttl", ttl, "--synthetic-step-ms", "1", "--kv-blocks", "2000", "--max-running", "60")
        scripts = [
            {"match": "fails", "tokens": [*"abcde", {"error": "on purpose"}]},
            {"match": "stops", "tokens": [*"abcdefgh"]},
        ]
        with Server(*flags, scripts=scripts) as server:
            engines = server.engine_pids
            for number in range(ROUNDS):
                with ExitStack() as stack:
                    clients = [self._begin(chosen, server, stack, n) for n in range(CLIENTS)]
                    # From none of the tokens to about all of them, some requests ending in the same step.
                    goal = server.metrics()["sluice_generated_tokens_total"] + chosen.choice([0, 10, 100, 1000, 5000])
                    with suppress(AssertionError):
                        until(lambda: server.metrics()["sluice_generated_tokens_total"] >= goal, "", 0.3)  # noqa: B023
                    chosen.shuffle(clients)
                    for client in clients:
                        client.reset() if chosen.random() < 0.5 else client.close()
                metrics = wait_idle(server)
                assert started(metrics) == sum(outcomes(metrics).values()), number
            assert server.engine_pids == engines
            assert metrics["sluice_engine_restarts_total"] == 0
            assert min(outcomes(metrics)[kind] for kind in ("stop", "length", "cancelled", "error")) > 0
            answer = server.ask("POST", CHAT, chat("after", stream=True, max_tokens=100))
            assert words(answer.text()) == 100

    def _begin(self, chosen: random.Random, server: Server, stack: ExitStack, number: int) -> Client:
        content = f"{chosen.choice(['plain', 'fails', 'stops'])} {number}"
        size = chosen.choice([1, 3, 20, 300])
        fields: dict[str, Any] = {"max_tokens": size, "n": chosen.choice([1, 1, 3]), "stream": chosen.random() < 0.7}
        if chosen.random() < 0.2:
            fields["stop"] = [" 1", "5", "d"]
        kind = chosen.choice(["chat", "chat", "ndjson", "completions", "get", "websocket", "cut", "pipelined"])
        if kind == "websocket":
            socket = stack.enter_context(WebSocketClient(server))
            for id_ in "abc":
                socket.send_json(type="generate", id=id_, **chat(content, **fields | {"stream": True}))
            if chosen.random() < 0.5:
                socket.send_json(type="cancel", id="b")
            return socket._client
        client = stack.enter_context(server.connect())
        if kind == "cut":
            data = request_bytes("POST", CHAT, chat(content, **fields))
            client.send(data[: chosen.randrange(len(data))])
        elif kind == "get":
            client.request("GET", f"/v1/generate?prompt={number}&max_tokens={size}")
        elif kind == "completions":
            client.request("POST", COMPLETIONS, {"prompt": [content, "x"], **fields})
        elif kind == "pipelined":
            client.send(request_bytes("POST", CHAT, chat(content, **fields)) * 3)
        else:
            client.request("POST", CHAT, chat(content, **fields), [NDJSON] if kind == "ndjson" else ())
        return client
