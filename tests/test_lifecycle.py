"""How streams end before their text does (issue 6): cancelled in every phase, over a deadline, by a drain. Black-box:
the client's frames, the metrics and the access log tell the same outcome, and nothing is left of the stream."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from wsproto.events import TextMessage

from tests.support.probes import (
    DETACHED,
    GENERATED,
    PARKED,
    QUEUED,
    RUNNING,
    USED,
    crowd,
    outcomes,
    settle,
    tokens,
    wait_idle,
    words,
)
from tests.support.readings import NDJSON, PLAIN
from tests.support.serving import Answer, Client, Server, WebSocketClient, chat, joined, until

pytestmark = pytest.mark.synthetic

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONG = 100_000
JSON = ("Accept", "application/json")
DISCARDED = "sluice_tokens_discarded_total"


def access_lines(server: Server) -> list[dict[str, Any]]:
    """Of streams."""
    lines = [json.loads(line) for line in server.log.splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == "stream"]


def begin(client: Client, content: str, *, accept: tuple[str, str] | None = None, **fields: Any) -> str:
    """Start a stream; its id."""
    body = chat(content, **{"stream": True, "max_tokens": LONG, **fields})
    client.request("POST", CHAT, body, [accept] if accept else [])
    return client.begin("POST").header("x-stream-id") or ""


def check_error(answer: Answer, code: str, kind: str) -> str:
    """The stream ended in-band with this error, and then in its framing's own way; the error's message."""
    assert answer.end == "whole"
    media = (answer.header("content-type") or "").partition(";")[0]
    if media == "text/event-stream":
        *chunks, error = answer.chunks()
        assert answer.events()[-1].data == "[DONE]"
    else:
        *chunks, error, done = answer.lines()
        assert done == {"done": True}
    assert (error["error"]["code"], error["error"]["type"]) == (code, kind)
    assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])
    message: str = error["error"]["message"]
    return message


class TestBeforeItBegan:
    """What was asked for and never became a stream has a line in the log all the same, and counts once."""

    @staticmethod
    def _lines(server: Server) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in server.log.splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == "request" and "outcome" in line]

    def test_on_a_websocket(self) -> None:
        """Both messages are there before anything is done about the first one."""
        with Server("--log-format", "json") as server, WebSocketClient(server) as socket:
            generate = {"type": "generate", "id": "a", **chat("hi", max_tokens=3)}
            messages = [generate, {"type": "cancel", "id": "a"}, {**generate, "id": "b", "max_tokens": 0}, generate]
            socket.send_bytes(b"".join(socket.frame(TextMessage(json.dumps(message))) for message in messages))
            codes = [m["error"]["code"] for m in socket.receive_until("done") if m["type"] == "error"]
            assert codes[0] == "cancelled" and len(codes) == 2
            told = [(line["api"], line["outcome"], line["status"]) for line in self._lines(server)]
            assert told == [("websocket", "cancelled", 409), ("websocket", "refused", 400)]
            assert len(access_lines(server)) == 1
            metrics = wait_idle(server)
            ended = outcomes(metrics)
            assert (ended["cancelled"], ended["refused"], ended["length"]) == (1, 1, 1)
            assert metrics['sluice_requests_started_total{api="websocket"}'] == 3

    def test_a_client_that_left_while_it_waited(self) -> None:
        scripts = [{"match": "", "tokens": ["a", {"pause_ms": 600_000}]}]
        flags = ("--log-format", "json", "--drain-timeout", "0")
        with Server(*flags, scripts=scripts) as server, crowd(server, 2) as (reader, poller):
            name = begin(reader, "waits")
            reader.read_events(2)
            reader.close()
            server.wait_metric(DETACHED, 1)
            poller.request("GET", f"/v1/streams/{name}?after=1&wait=30", None, [JSON])
            server.wait_metric(DETACHED, 0)
            poller.reset()
            until(lambda: '"status": 499' in server.log, "its line in the log")
            assert name not in server.log


class TestCancelInEveryPhase:
    """Within one step, whatever the stream is at. `tests/test_processes.py` has the running one."""

    def test_queued(self) -> None:
        with Server("--max-running", "1", "--synthetic-step-ms", "5") as server, crowd(server, 3) as (hog, one, other):
            first = begin(hog, "hog")
            hog.read_events(3)
            names = [begin(one, "one"), begin(other, "other", n=2)]
            server.wait_metric(QUEUED, 2)
            for name, client in zip(names, (one, other), strict=True):
                assert server.ask("DELETE", f"/v1/streams/{name}").json()["outcome"] == "cancelled"
                check_error(client.finish(), "cancelled", "cancelled_error")
            server.wait_metric(QUEUED, 0)
            assert server.metrics()["sluice_queue_seconds_count"] == 1  # they never had a place
            server.ask("DELETE", f"/v1/streams/{first}")
            assert outcomes(wait_idle(server))["cancelled"] == 3

    def test_between_two_chunks_of_the_prompt(self) -> None:
        flags = ("--max-running", "4", "--max-batch-tokens", "64", "--synthetic-step-ms", "20")
        with Server(*flags) as server, server.connect() as client:
            name = begin(client, "x" * 5000)  # some eighty steps
            server.wait_metric(RUNNING, 1)
            until(lambda: server.metrics()[USED] > 0, "the prompt is being computed")
            assert server.ask("DELETE", f"/v1/streams/{name}").json()["outcome"] == "cancelled"
            check_error(client.finish(), "cancelled", "cancelled_error")
            metrics = wait_idle(server)
            assert (metrics[GENERATED], metrics[DISCARDED]) == (0, 0)
            assert words(server.ask("POST", CHAT, chat("hi", stream=True, max_tokens=5)).text()) == 5

    def test_parked(self) -> None:
        with Server("--send-buffer", "4096") as server, server.connect(receive_buffer=4096) as client:
            name = begin(client, "parked")
            settle(server, client)
            made = tokens(server)
            assert server.ask("DELETE", f"/v1/streams/{name}").json()["outcome"] == "cancelled"
            metrics = wait_idle(server)
            assert (metrics[GENERATED], metrics[DISCARDED]) == (made, 0)
            check_error(client.finish(), "cancelled", "cancelled_error")
            assert words(client.finish().text()) == made

    def test_detached(self) -> None:
        with Server("--synthetic-step-ms", "5") as server:
            with server.connect() as client:
                name = begin(client, "detached")
                client.read_events(3)
            server.wait_metric(DETACHED, 1)
            assert server.ask("DELETE", f"/v1/streams/{name}").json()["outcome"] == "cancelled"
            assert outcomes(wait_idle(server))["cancelled"] == 1
            check_error(server.ask("GET", f"/v1/streams/{name}"), "cancelled", "cancelled_error")

    def test_with_several_choices(self) -> None:
        """One has ended, one runs, one waits for its place."""
        scripts: list[dict[str, Any]] = [{"match": "", "tokens": ["a", {"pause_ms": 600_000}, "b"]}]
        with Server("--max-running", "2", scripts=scripts) as server, server.connect() as client:
            name = begin(client, "several", n=3)
            client.read_events(3 + 2)
            assert server.ask("DELETE", f"/v1/streams/{name}").json()["outcome"] == "cancelled"
            check_error(client.finish(), "cancelled", "cancelled_error")
            assert [client.finish().text(index) for index in range(3)] == ["a", "a", ""]
            assert outcomes(wait_idle(server))["cancelled"] == 1

    @pytest.mark.parametrize("means", ["route", "message"])
    def test_in_the_step_of_the_end(self, means: str) -> None:
        """Around the last token: whichever was first is the one outcome, and everybody is told that one."""
        seen: set[str] = set()
        with Server("--synthetic-step-ms", "2", "--log-format", "json", "--resume-ttl", "0.1") as server:
            rounds = 0
            while rounds < 40 or (len(seen) < 2 and rounds < 400):
                rounds += 1
                told = self._race(server, means, rounds)
                until(lambda: len(access_lines(server)) == rounds, "the line in the log")  # noqa: B023
                assert {access_lines(server)[-1]["outcome"]} == told
                seen |= told
            ended = outcomes(wait_idle(server))
            assert ended["length"] + ended["cancelled"] == rounds
        assert seen == {"length", "cancelled"}

    @staticmethod
    def _race(server: Server, means: str, turn: int) -> set[str]:
        """What the client was told, by the stream and by the answer to its cancel."""
        if means == "message":
            with WebSocketClient(server) as socket:
                socket.send_json(type="generate", id="a", **chat("race", max_tokens=4))
                for _ in range(1 + turn % 5):
                    message = socket.receive_json()
                if message["type"] != "done":
                    socket.send_json(type="cancel", id="a")
                    message = socket.receive_until("done", "error")[-1]
            return {message["finish_reason"] if message["type"] == "done" else message["error"]["code"]}
        with server.connect() as client:
            name = begin(client, "race", max_tokens=4)
            client.read_events(1 + turn % 5)
            outcome = server.ask("DELETE", f"/v1/streams/{name}").json()["outcome"]
            last = client.finish().chunks()[-1]
        return {outcome, last["error"]["code"] if "error" in last else last["choices"][0]["finish_reason"]}


class TestDeadlines:
    """Each has its outcome, in the metrics and in-band."""

    def test_the_wait_for_a_place(self) -> None:
        flags = ("--queue-timeout", "0.4", "--max-running", "1", "--synthetic-step-ms", "5", "--log-format", "json")
        with Server(*flags) as server, crowd(server, 5) as clients, WebSocketClient(server) as socket:
            hog, sse, ndjson, plain, whole = clients
            first = begin(hog, "hog")
            hog.read_events(3)
            begin(sse, "sse", n=2)
            begin(ndjson, "ndjson", accept=NDJSON)
            begin(plain, "plain", accept=PLAIN)
            whole.request("POST", CHAT, chat("whole", max_tokens=LONG))
            socket.send_json(type="generate", id="w", **chat("socket", max_tokens=LONG))
            polled = server.ask("GET", f"/v1/generate?prompt=poll&max_tokens={LONG}", None, [JSON]).json()["stream"]
            assert "0.4 s" in check_error(sse.finish(), "expired", "timeout_error")
            check_error(ndjson.finish(), "expired", "timeout_error")
            assert (plain.finish().end, bytes(plain.finish().body)) == ("cut", b"")
            refused = whole.answer("POST")
            assert refused.error(503)["code"] == "expired"  # it may well succeed later
            assert refused.header("retry-after")
            assert socket.receive_until("error")[-1]["error"]["code"] == "expired"
            document = server.ask("GET", f"/v1/streams/{polled}?wait=10", None, [JSON]).json()
            while document["outcome"] is None:
                document = server.ask(
                    "GET", f"/v1/streams/{polled}?after={document['next'] - 1}&wait=10", None, [JSON]
                ).json()
            assert document["outcome"] == "expired"
            server.ask("DELETE", f"/v1/streams/{first}")
            assert words(joined(hog.finish().chunks()[:-1])) > 3
            ended = outcomes(wait_idle(server))
            assert (ended["cancelled"], ended["expired"]) == (1, 6)
            assert sorted(line["outcome"] for line in access_lines(server)) == ["cancelled"] + ["expired"] * 6

    def test_the_whole_request(self) -> None:
        """Running, parked and detached ones alike."""
        flags = ("--request-timeout", "0.6", "--synthetic-step-ms", "10", "--send-buffer", "4096")
        scripts = [{"match": "large", "tokens": [{"repeat": "x" * 4000, "times": 1000}]}]
        with (
            Server(*flags, scripts=scripts) as server,
            crowd(server, 4) as (sse, ndjson, plain, whole),
            server.connect(receive_buffer=4096) as parked,
            WebSocketClient(server) as socket,
        ):
            begin(sse, "sse")
            begin(ndjson, "ndjson", accept=NDJSON)
            begin(plain, "plain", accept=PLAIN)
            whole.request("POST", CHAT, chat("whole", max_tokens=LONG))
            socket.send_json(type="generate", id="w", **chat("socket", max_tokens=LONG))
            begin(parked, "large")
            with server.connect() as gone:
                detached = begin(gone, "detached")
                gone.read_events(3)
            assert "0.6 s" in check_error(sse.finish(), "expired", "timeout_error")
            assert words(joined(sse.finish().chunks()[:-1])) > 0
            check_error(ndjson.finish(), "expired", "timeout_error")
            assert plain.finish().end == "cut" and words(bytes(plain.finish().body).decode()) > 0
            assert whole.answer("POST").error(504)["code"] == "expired"
            assert socket.receive_until("error")[-1]["error"]["code"] == "expired"
            check_error(parked.finish(), "expired", "timeout_error")
            check_error(server.ask("GET", f"/v1/streams/{detached}"), "expired", "timeout_error")
            assert outcomes(wait_idle(server))["expired"] == 7

    def test_a_write_that_stalls(self) -> None:
        """The reader is cut off, and its stream is detached: it may come back for the rest, or be cancelled."""
        flags = ("--write-stall-timeout", "0.4", "--resume-ttl", "1.5", "--send-buffer", "4096")
        with Server(*flags) as server:
            with crowd(server, 2, receive_buffer=4096) as clients:
                names = [begin(client, "stalled", max_tokens=3000) for client in clients]
                server.wait_metric(PARKED, 2)
                server.wait_metric(DETACHED, 2)
                assert server.metrics()['sluice_connections{protocol="http1"}'] == 1  # that of the scrape
                assert server.metrics()[USED] == 0
                assert words(server.ask("GET", f"/v1/streams/{names[0]}").text()) == 3000
            metrics = wait_idle(server)
            assert (outcomes(metrics)["length"], outcomes(metrics)["cancelled"]) == (1, 1)


class TestDrain:
    def test_queued_ones_are_ended_in_their_grammar_too(self) -> None:
        flags = ("--max-running", "1", "--synthetic-step-ms", "5", "--drain-timeout", "0.5", "--log-format", "json")
        with Server(*flags) as server, crowd(server, 5) as clients, WebSocketClient(server) as socket:
            hog, sse, ndjson, plain, whole = clients
            begin(hog, "hog")
            hog.read_events(3)
            begin(sse, "sse")
            begin(ndjson, "ndjson", accept=NDJSON, n=2)
            begin(plain, "plain", accept=PLAIN)
            whole.request("POST", CHAT, chat("whole", max_tokens=LONG))
            socket.send_json(type="generate", id="w", **chat("socket", max_tokens=LONG))
            server.wait_metric(QUEUED, 5)
            server.terminate()
            for client in (hog, sse, ndjson):
                message = check_error(client.finish(), "error", "server_error")
                assert "resum" not in message and "retry" not in message  # this server is gone; there is no other
            assert plain.finish().end == "cut"
            assert whole.answer("POST").error(503)["code"] == "error"
            assert socket.receive_until("error")[-1]["error"]["code"] == "error"
            assert socket.closed().code == 1012
            assert server.wait() == 0
            assert [line["outcome"] for line in access_lines(server)] == ["error"] * 6

    def test_what_is_served_meanwhile(self) -> None:
        """Everything that is about a stream that was begun; nothing that would begin one."""
        flags = ("--synthetic-step-ms", "5", "--drain-timeout", "20")
        with Server(*flags) as server, crowd(server, 3) as clients, WebSocketClient(server) as socket:
            key = ("Idempotency-Key", "once")
            body = chat("posted", stream=True, max_tokens=400)
            clients[0].request("POST", CHAT, body, [key])
            posted = clients[0].begin("POST").header("x-stream-id")
            last = clients[0].read_events(3).events()[-1].id or ""
            victim, hold = begin(clients[1], "victim"), begin(clients[2], "hold")
            socket.send_json(type="generate", id="a", **chat("socket", max_tokens=LONG))
            started = socket.receive_json()
            server.terminate()
            until(lambda: server.ask("GET", "/ready").status == 503, "readiness fails")
            clients[0].reset()
            assert server.ask("GET", "/health").status == 200
            assert server.ask("GET", "/metrics").status == 200
            for method, target, content in (
                ("POST", CHAT, chat("new")),
                ("POST", COMPLETIONS, {"prompt": "new"}),
                ("GET", "/v1/generate?prompt=new", None),
            ):
                refused = server.ask(method, target, content)
                assert refused.error(503)["type"] == "overloaded_error"
                assert refused.header("retry-after")
            assert server.ask("POST", CHAT, body, [("Idempotency-Key", "another")]).status == 503
            socket.send_json(type="generate", id="b", **chat("new"))
            assert socket.receive_until("error")[-1]["error"]["code"] == "overloaded"
            # What was begun goes on, in every way.
            polled = server.ask("GET", f"/v1/streams/{posted}?wait=5", None, [JSON])
            assert polled.status == 200 and polled.json()["events"]
            socket.send_json(type="resume", id="c", stream=posted, after=0)
            socket.send_json(type="cancel", id="a")
            messages = socket.receive_until("done", id_="c")
            assert words("".join(m["text"] for m in messages if m["type"] == "token" and m["id"] == "c")) == 400
            assert [m["error"]["code"] for m in messages if m["type"] == "error" and m["id"] == "a"] == ["cancelled"]
            again = server.ask("POST", CHAT, body, [key])
            resumed = server.ask("POST", CHAT, chat("whatever", stream=True), [("Last-Event-ID", last)])
            assert again.header("x-stream-id") == resumed.header("x-stream-id") == posted
            assert words(again.text()) == 400 and again.body.endswith(resumed.body)
            assert started["stream"] not in (posted, victim)
            assert server.ask("DELETE", f"/v1/streams/{victim}").json()["outcome"] == "cancelled"
            assert server.ask("DELETE", f"/v1/streams/{hold}").json()["outcome"] == "cancelled"
            assert server.wait() == 0

    def test_a_connection_that_has_not_asked_yet_is_answered(self) -> None:
        """One that has is closed, as it may be at any time (RFC 9112 9.5)."""
        with Server() as server, server.connect() as new, server.connect() as used:
            used.request("GET", "/health")
            assert used.answer().status == 200
            server.wait_metric('sluice_connections{protocol="http1"}', 3)
            server.terminate()
            assert used.closed() == "fin"
            new.request("GET", "/v1/generate?prompt=new", None, [JSON])
            refused = new.answer()
            assert refused.error(503)["type"] == "overloaded_error"
            assert refused.header("connection") == "close" and new.closed() == "fin"
            assert server.wait() == 0

    def test_whoever_is_connected_when_the_signal_comes_is_answered(self) -> None:
        """Hundreds that the loop meets in the same turns as the signal, their requests in their sockets. The first of
        them may be read before it."""
        with Server() as server, ExitStack() as stack:
            server.process.send_signal(signal.SIGSTOP)
            server.terminate()
            clients = [stack.enter_context(server.connect()) for _ in range(300)]
            for client in clients:
                client.request("GET", "/v1/generate?prompt=new&max_tokens=1", None, [JSON])
            server.process.send_signal(signal.SIGCONT)
            answers = [client.answer() for client in clients]
            assert {(answer.status, answer.end) for answer in answers} <= {(202, "whole"), (503, "whole")}
            assert answers[-1].status == 503
            assert {client.closed() for client in clients} == {"fin"}
            assert server.wait() == 0

    def test_clients_that_keep_coming_are_answered_or_cannot_connect(self) -> None:
        def keep_coming(server: Server) -> set[tuple[int, str]]:
            seen = set()
            with suppress(ConnectionRefusedError):
                while True:
                    answer = server.ask("GET", "/v1/generate?prompt=x&max_tokens=1", None, [JSON])
                    seen.add((answer.status, answer.end))
            return seen

        with ThreadPoolExecutor(8) as pool, Server() as server:
            comers = [pool.submit(keep_coming, server) for _ in range(8)]
            until(lambda: tokens(server) > 50, "they have come")
            server.terminate()
            assert set().union(*(each.result() for each in comers)) <= {(202, "whole"), (503, "whole")}
            assert server.wait() == 0


class TestRandomness:
    @pytest.fixture(scope="class")
    @classmethod
    def server(cls) -> Iterator[Server]:
        with Server("--synthetic-step-ms", "5") as server:
            yield server

    def test_a_stream_without_a_seed_goes_on_as_it_began(self, server: Server) -> None:
        """Temperature 1, no seed: the server drew one, and keeps it through a detachment and an engine's death."""
        with server.connect() as client:
            name = begin(client, "drawn", max_tokens=100, n=2, temperature=1)
            seen = client.read_events(12).events()
            client.reset()
        server.wait_metric(DETACHED, 1)
        whole = server.ask("GET", f"/v1/streams/{name}")
        assert [event.data for event in whole.events()[: len(seen)]] == [event.data for event in seen]
        texts = [whole.text(index) for index in range(2)]
        assert [words(text) for text in texts] == [100, 100]
        assert texts[0] != texts[1]
        with server.connect() as client:
            begin(client, "drawn", max_tokens=100, n=2, temperature=1)
            assert client.finish().text() != texts[0]  # another request draws another one
