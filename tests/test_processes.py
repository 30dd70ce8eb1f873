"""The two processes: what happens when one of them dies, hangs or runs elsewhere. Black-box, over real sockets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.probes import (
    GENERATED,
    RUNNING,
    USED,
    alive,
    crowd,
    kill_engine,
    outcomes,
    processes_with,
    tokens,
    wait_idle,
    words,
)
from tests.support.readings import NDJSON, PLAIN
from tests.support.serving import REPOSITORY, Client, Server, WebSocketClient, chat, joined, lone_engine, until

pytestmark = pytest.mark.synthetic

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONG = 100_000
PACE = ("--synthetic-step-ms", "5")
DEATHS: list[dict[str, Any]] = [
    {"match": "once", "tokens": ["a", "b", {"hex": "f09f"}, {"die": True}, {"hex": "9880"}, "c"]},
    {"match": "twice", "tokens": ["a", {"die": True}, "b", {"die": True}, "c"]},
    {"match": "immediately", "tokens": [{"die": True}, "a"]},
    {"match": "hang", "tokens": ["a", "b", {"hang_ms": 600_000}, "c"]},
    {"match": "raise", "tokens": ["a", "b", {"raise": "a fault of the model"}, "c"]},
]


def begin(client: Client, method: str, target: str, body: Any = None, headers: Any = ()) -> None:
    """Send a request and read until some text is there."""
    client.request(method, target, body, headers)
    client.begin(method)
    client.read_until(lambda answer: len(answer.body) > (0 if PLAIN in headers else 1200))


class TestEngineKilled:
    def test_without_waiting_every_client_is_told(self) -> None:
        with (
            Server("--engine-restart-wait", "0", *PACE) as server,
            crowd(server, 6) as clients,
            WebSocketClient(server) as socket,
            WebSocketClient(server) as bare,
        ):
            sse, ndjson, plain, completion, got, whole = clients
            whole.request("POST", CHAT, chat("whole", max_tokens=LONG))
            begin(sse, "POST", CHAT, chat("sse", stream=True, max_tokens=LONG, n=2))
            begin(ndjson, "POST", CHAT, chat("ndjson", stream=True, max_tokens=LONG), [NDJSON])
            begin(plain, "POST", CHAT, chat("plain", stream=True, max_tokens=LONG), [PLAIN])
            begin(completion, "POST", COMPLETIONS, {"prompt": "completion", "stream": True, "max_tokens": LONG})
            begin(got, "GET", f"/v1/generate?prompt=get&max_tokens={LONG}")
            socket.send_json(type="generate", id="w", **chat("websocket", max_tokens=LONG))
            bare.send_text("bare")
            assert [socket.receive_json()["type"] for _ in range(3)] == ["started", "token", "token"]
            assert isinstance(bare.receive(), str)
            server.wait_metric(RUNNING, 8)
            before = kill_engine(server)
            for client in (sse, completion, got):
                answer = client.finish()
                *chunks, error = answer.chunks()
                assert error["error"] == {
                    "message": "the engine died", "type": "server_error", "param": None, "code": "error"
                }  # fmt: skip
                assert (answer.events()[-1].data, answer.end) == ("[DONE]", "whole")
                assert words(joined(chunks)) > 0
                assert all(c["finish_reason"] is None for chunk in chunks for c in chunk["choices"])
            answer = ndjson.finish()
            assert (answer.lines()[-1], answer.end) == ({"done": True}, "whole")
            assert answer.lines()[-2]["error"]["code"] == "error"
            assert plain.finish().end == "cut"
            refused = whole.answer("POST")
            assert refused.error(503)["code"] == "error"
            assert refused.header("retry-after")
            assert socket.receive_until("error")[-1]["error"]["code"] == "error"
            assert bare.closed().code == 1011
            until(lambda: server.ask("GET", "/ready").status == 200, "ready again")
            assert server.engine_pids != [before]
            assert words(server.ask("POST", CHAT, chat("again", stream=True, max_tokens=20)).text()) == 20
            metrics = wait_idle(server)
            assert outcomes(metrics)["error"] == 8
            assert metrics["sluice_engine_restarts_total"] == 1

    def test_by_default_streams_go_on(self) -> None:
        """No gap and no repeat, in any framing, and the usage of one run."""
        with Server(*PACE) as server, crowd(server, 5) as clients, WebSocketClient(server) as socket:
            sse, ndjson, plain, whole, several = clients
            usage = {"stream": True, "stream_options": {"include_usage": True}}
            whole.request("POST", CHAT, chat("whole", max_tokens=300))
            begin(sse, "POST", CHAT, chat("sse", max_tokens=300, **usage))
            begin(ndjson, "POST", CHAT, chat("ndjson", max_tokens=300, **usage), [NDJSON])
            begin(plain, "POST", CHAT, chat("plain", stream=True, max_tokens=300), [PLAIN])
            begin(several, "POST", CHAT, chat("several", max_tokens=300, n=2, **usage))
            socket.send_json(type="generate", id="w", **chat("websocket", max_tokens=300))
            server.wait_metric(RUNNING, 6)
            kill_engine(server)
            assert server.ask("GET", "/health").status == 200  # it goes on answering
            for answer, count in ((sse.finish(), 300), (several.finish(), 600)):
                assert (words(answer.text()), answer.end) == (300, "whole")
                assert answer.chunks()[-1]["usage"]["completion_tokens"] == count
                positions = [int((event.id or "").rpartition(":")[2]) for event in answer.events()]
                assert positions == list(range(len(positions)))
            assert words(several.finish().text(1)) == 300
            assert words(joined(ndjson.finish().lines()[:-2])) == 300
            assert words(bytes(plain.finish().body).decode()) == 300
            document = whole.answer("POST").json()
            assert words(document["choices"][0]["message"]["content"]) == 300
            assert document["usage"]["completion_tokens"] == 300
            messages = socket.receive_until("done", "error")
            assert words("".join(m["text"] for m in messages if m["type"] == "token")) == 300
            assert outcomes(wait_idle(server))["length"] == 6

    def test_a_detached_stream_outlives_the_engine(self) -> None:
        with Server(*PACE) as server:
            with server.connect() as client:
                client.request("POST", CHAT, chat("hi", stream=True, max_tokens=200))
                name = client.begin("POST").header("x-stream-id")
                seen = client.read_events(10).events()
                client.reset()
            server.wait_metric('sluice_streams{state="detached"}', 1)
            before = kill_engine(server)
            until(lambda: server.engine_pids and server.engine_pids != [before], "another engine")
            until(lambda: server.ask("GET", "/ready").status == 200, "ready again")
            answer = server.ask("GET", f"/v1/streams/{name}?after={len(seen) - 1}")
            whole = server.ask("GET", f"/v1/streams/{name}")
            assert words(whole.text()) == 200
            assert whole.body.endswith(answer.body)

    def test_while_it_is_away_new_requests_are_told_when_to_return(self) -> None:
        with Server(*PACE) as server:
            kill_engine(server)
            answer = server.ask("POST", CHAT, chat("hi", max_tokens=2))
            if answer.status != 200:  # it may be back already
                assert answer.error(503)["type"] == "overloaded_error"
                assert answer.header("retry-after")
            until(lambda: server.ask("POST", CHAT, chat("hi", max_tokens=2)).status == 200, "served again")


class TestEngineThatDies:
    """Each with a server of its own: an engine that dies young is started again after a growing pause."""

    @pytest.mark.parametrize("stream", [True, False])
    def test_once_is_not_seen(self, stream: bool) -> None:
        """Not even in the middle of a character."""
        with Server(*PACE, scripts=DEATHS) as server:
            answer = server.ask("POST", CHAT, chat("once", stream=stream))
            text = answer.text() if stream else answer.json()["choices"][0]["message"]["content"]
            assert text == "ab😀c"

    @pytest.mark.parametrize(("content", "text"), [("twice", "ab"), ("immediately", "")])
    @pytest.mark.parametrize("stream", [True, False])
    def test_twice_is_an_error_and_no_loop(self, content: str, text: str, stream: bool) -> None:
        with Server(*PACE, scripts=DEATHS) as server:
            answer = server.ask("POST", CHAT, chat(content, stream=stream))
            if stream:
                assert answer.chunks()[-1]["error"]["code"] == "error"
                assert answer.events()[-1].data == "[DONE]"
                assert answer.text() == text
            else:
                assert answer.error(500)["code"] == "error"  # not worth repeating
            until(lambda: server.ask("GET", "/ready").status == 200, "ready again")
            assert wait_idle(server)["sluice_engine_restarts_total"] == 2
            assert server.ask("POST", CHAT, chat("hi", max_tokens=2)).status == 200

    def test_a_fault_in_the_model_ends_its_stream_alone(self) -> None:
        with Server(*PACE, scripts=DEATHS, faults_expected=True) as server:
            (engine,) = server.engine_pids
            answer = server.ask("POST", CHAT, chat("raise", stream=True))
            assert answer.chunks()[-1]["error"]["message"] == "the engine failed; its log says how"
            assert answer.text() == "ab"
            assert "RuntimeError: a fault of the model" in server.log
            assert server.ask("POST", CHAT, chat("hi", max_tokens=2)).status == 200
            assert server.engine_pids == [engine]


class TestServerKilled:
    @pytest.mark.parametrize("content", [None, "hi", "hang"])
    def test_no_engine_is_left(self, content: str | None) -> None:
        """Idle, in mid-stream, and while the engine stands still in the middle of a step."""
        with Server(*PACE, scripts=DEATHS) as server, server.connect() as client:
            engines = server.engine_pids
            assert engines and all(map(alive, engines))
            if content:
                client.request("POST", CHAT, chat(content, stream=True))
                client.begin("POST")
                client.read_events(3)
            server.kill()
            until(lambda: not any(map(alive, engines)), "the engine is gone", 5)

    @pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a stopped process that its parent died")
    def test_nor_one_that_is_stopped(self) -> None:
        with Server() as server:
            (stopped,) = server.engine_pids
            os.kill(stopped, signal.SIGSTOP)
            server.kill()
            until(lambda: not alive(stopped), "the engine is gone", 5)

    def test_a_hanging_engine_does_not_hold_a_drain(self) -> None:
        with Server("--drain-timeout", "0.2", scripts=DEATHS) as server, server.connect() as client:
            engines = server.engine_pids
            client.request("POST", CHAT, chat("hang", stream=True))
            client.begin("POST")
            client.read_events(3)
            server.terminate()
            assert client.finish().events()[-1].data == "[DONE]"
            assert server.wait() == 0
            until(lambda: not any(map(alive, engines)), "the engine is gone", 5)


class TestCancel:
    """Within one step. At 50 ms a step whatever is made afterwards is counted."""

    @pytest.fixture(scope="class")
    @classmethod
    def server(cls) -> Iterator[Server]:
        with Server("--synthetic-step-ms", "50") as server:
            yield server

    DISCARDED = "sluice_tokens_discarded_total"

    def test_delete(self, server: Server) -> None:
        discarded = server.metrics()[self.DISCARDED]
        with server.connect() as client:
            client.request("POST", CHAT, chat("hi", stream=True, max_tokens=LONG))
            name = client.begin("POST").header("x-stream-id")
            client.read_events(4)
            answer, made = server.ask("DELETE", f"/v1/streams/{name}"), tokens(server)
            assert answer.json() == {"stream": name, "status": "finished", "outcome": "cancelled"}
            end = client.finish()
            assert end.chunks()[-1]["error"]["code"] == "cancelled"
            assert (end.events()[-1].data, end.end) == ("[DONE]", "whole")
            assert words(end.text()) == made
        metrics = wait_idle(server)
        assert metrics[GENERATED] == made
        assert metrics[self.DISCARDED] <= discarded + 1  # the step that was under way
        assert server.ask("DELETE", f"/v1/streams/{name}").json() == answer.json()  # changes nothing

    def test_websocket(self, server: Server) -> None:
        discarded = server.metrics()[self.DISCARDED]
        with WebSocketClient(server) as socket:
            for id_ in "ab":
                socket.send_json(type="generate", id=id_, **chat(id_, max_tokens=LONG if id_ == "a" else 10))
            while socket.receive_json()["type"] != "token":
                pass
            socket.send_json(type="cancel", id="a")
            messages = socket.receive_until("error", id_="a")
            assert messages[-1]["error"]["code"] == "cancelled"
            rest = socket.receive_until("done", id_="b")
            assert not any(m["id"] == "a" for m in rest)
        assert wait_idle(server)[self.DISCARDED] <= discarded + 1


class TestAttached:
    def test_two_servers_share_an_engine(self, tmp_path: Path) -> None:
        address = f"unix:{tmp_path / 'engine'}"
        with (
            lone_engine(address, *PACE) as engine,
            Server("--engine-url", address, engine=None) as one,
            Server("--engine-url", address, engine=None) as other,
            one.connect() as client,
        ):
            assert one.engine_pids == []
            client.request("POST", CHAT, chat("hi", stream=True, max_tokens=100))
            client.begin("POST")
            client.read_events(3)
            assert words(other.ask("POST", CHAT, chat("hi", stream=True, max_tokens=20)).text()) == 20
            other.kill()
            assert words(client.finish().text()) == 100
            assert engine.poll() is None
            until(lambda: one.metrics()[USED] == 0, "the other server's blocks are back")

    def test_an_engine_that_comes_back(self, tmp_path: Path) -> None:
        address = f"unix:{tmp_path / 'engine'}"
        with lone_engine(address, *PACE) as engine, Server("--engine-url", address, engine=None) as server:
            with server.connect() as client:
                client.request("POST", CHAT, chat("hi", stream=True, max_tokens=300))
                client.begin("POST")
                client.read_events(5)
                engine.kill()
                until(lambda: server.ask("GET", "/ready").status == 503, "not ready")
                assert server.ask("POST", CHAT, chat("hi")).error(503)
                with lone_engine(address, *PACE):
                    assert words(client.finish().text()) == 300
                    assert server.ask("GET", "/ready").status == 200
            wait_idle(server)

    def test_an_engine_that_does_not_come_back_in_time(self, tmp_path: Path) -> None:
        """Each stream ends in its grammar, with an error that is worth a retry; a detached one too."""
        address = f"unix:{tmp_path / 'engine'}"
        flags = ("--engine-url", address, "--engine-restart-wait", "0.3", "--drain-timeout", "0")
        with (
            lone_engine(address, *PACE) as engine,
            Server(*flags, engine=None) as server,
            crowd(server, 3) as (sse, plain, whole),
            WebSocketClient(server) as socket,
        ):
            begin(sse, "POST", CHAT, chat("sse", stream=True, max_tokens=LONG))
            begin(plain, "POST", CHAT, chat("plain", stream=True, max_tokens=LONG), [PLAIN])
            whole.request("POST", CHAT, chat("whole", max_tokens=LONG))
            socket.send_json(type="generate", id="w", **chat("socket", max_tokens=LONG))
            with server.connect() as gone:
                gone.request("POST", CHAT, chat("detached", stream=True, max_tokens=LONG))
                name = gone.begin("POST").header("x-stream-id")
            server.wait_metric(RUNNING, 4)
            engine.kill()
            *chunks, error = sse.finish().chunks()
            assert "did not come back in time" in error["error"]["message"]
            assert (error["error"]["code"], words(joined(chunks)) > 0) == ("error", True)
            assert (sse.finish().events()[-1].data, sse.finish().end) == ("[DONE]", "whole")
            assert plain.finish().end == "cut"
            refused = whole.answer("POST")
            assert refused.error(503)["code"] == "error" and refused.header("retry-after")
            assert socket.receive_until("error")[-1]["error"]["code"] == "error"
            assert server.ask("GET", f"/v1/streams/{name}").chunks()[-1]["error"]["code"] == "error"
            seen = wait_idle(server)
            assert outcomes(seen)["error"] == 5
            assert seen["sluice_engine_restarts_total"] == 0  # it was tried, and is not there
            with lone_engine(address):
                server.wait_metric("sluice_engine_restarts_total", 1)

    def test_tcp_with_a_token(self, tmp_path: Path, unused_port: int) -> None:
        address = f"tcp://127.0.0.1:{unused_port}"
        right, wrong = tmp_path / "right", tmp_path / "wrong"
        right.write_text("a secret\n")
        wrong.write_text("a secreT\n")
        with lone_engine(address, "--token-file", str(right)) as engine:
            flags = ("--engine-url", address, "--engine-token-file")
            with Server(*flags, str(right), engine=None) as server:
                assert words(server.ask("POST", CHAT, chat("hi", stream=True, max_tokens=20)).text()) == 20
            for arguments in ((*flags, str(wrong)), (*flags, str(tmp_path / "none")), flags[:2]):
                refused = self._run("server", "--port", "0", *arguments)
                assert refused.returncode in (1, 2)
                assert refused.stderr.startswith(("server: ", "usage: "))
                assert "Traceback" not in refused.stderr
            assert engine.poll() is None

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_an_engine_that_is_asked_to_end_leaves_no_socket(self, tmp_path: Path, number: signal.Signals) -> None:
        path = tmp_path / "engine.sock"
        with lone_engine(f"unix:{path}") as engine:
            assert path.is_socket()
            engine.send_signal(number)
            assert engine.wait(30) == 0
            assert not path.exists()

    def test_what_can_not_be_attached_to(self, tmp_path: Path) -> None:
        for arguments in (
            ("server", "--port", "0", "--engine-url", f"unix:{tmp_path / 'nothing'}"),
            ("server", "--port", "0", "--engine-url", "ftp://x"),
            ("engine", "--listen", "tcp://127.0.0.1:1", "--engine", "synthetic"),
            ("engine", "--listen", f"unix:{tmp_path / 'none' / 'x'}", "--engine", "synthetic"),
        ):
            refused = self._run(*arguments)
            assert refused.returncode in (1, 2), arguments
            assert "Traceback" not in refused.stderr and refused.stderr

    @staticmethod
    def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", *arguments]
        return subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=30, check=False)


class TestUsage:
    """What can't be served is said in a sentence, with exit code 2 for bad usage and 1 otherwise."""

    @pytest.mark.parametrize(
        ("flags", "code"),
        [
            (("--nonsense",), 2),
            (("--port", "70000"), 2),
            (("--host", "0.0.0.0"), 2),
            (("--engine", "synthetic", "--synthetic-script", "/does/not/exist"), 2),
            (("--model", "/does/not/exist"), 1),
            (("--api-keys", "/does/not/exist"), 2),
            (("--credit-window", "1"), 2),
            (("--engine", "synthetic", "--max-running", "5", "--max-batch-tokens", "5"), 2),
        ],
    )
    def test_exit_codes(self, flags: tuple[str, ...], code: int) -> None:
        argv = [sys.executable, "-m", "server", "--port", "0", *flags]
        done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == code, done.stderr
        assert done.stdout == ""
        assert done.stderr and "Traceback" not in done.stderr

    def test_a_port_in_use(self) -> None:
        with Server() as server:
            argv = [sys.executable, "-m", "server", "--engine", "synthetic", "--port", str(server.port)]
            done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=30, check=False)
            assert done.returncode == 1
            assert str(server.port) in done.stderr and "Traceback" not in done.stderr

    def test_a_unix_socket(self, tmp_path: Path) -> None:
        path = tmp_path / "http"
        with Server("--uds", str(path)) as server:
            assert server.ready_line == f"sluice ready on unix:{path}"
            assert path.is_socket()
        assert not path.exists()
        assert not processes_with(str(path))


def test_generated_tokens_are_counted_once_over_a_death() -> None:
    with Server(*PACE) as server, server.connect() as client:
        client.request("POST", CHAT, chat("hi", stream=True, max_tokens=100))
        client.begin("POST")
        client.read_events(10)
        kill_engine(server)
        assert words(client.finish().text()) == 100
        assert server.metrics()[GENERATED] == 100
