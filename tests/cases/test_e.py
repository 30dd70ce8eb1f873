"""Kind E of the fault cases: clients that leave, stall or ask for what can't be. Each test names its case.

A client that is gone is detached (with `--resume-ttl 0` cancelled) within a second; how much was computed for it in
between is counted in tokens, and another request serves as the clock that shows that nothing more is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from operator import itemgetter
from typing import Any

import pytest

from tests.support.probes import (
    DETACHED,
    GENERATED,
    PARKED,
    QUEUED,
    RUNNING,
    USED,
    crowd,
    outcomes,
    started,
    tokens,
    wait_idle,
    words,
)
from tests.support.serving import Client, Closed, Server, WebSocketClient, chat, joined, until

pytestmark = pytest.mark.synthetic

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONG = 2000
STEP_MS = 5
# DESIGN: 250 ms or a step, whichever is longer. The rest is for a machine that does other things too.
GONE_S = 1.0
# Runs ahead of its reader as far as it likes, so that only the reader's leaving can stop it.
FREE = ("--credit-window", "100000", "--synthetic-step-ms", str(STEP_MS))


def nothing_more(server: Server) -> None:
    """Nobody but a request of ours gets tokens, however long it runs."""
    before = tokens(server)
    assert server.ask("POST", COMPLETIONS, {"prompt": "clock", "max_tokens": 30}).status == 200
    assert tokens(server) == before + 30


def leave(client: Client, how: str) -> None:
    client.reset() if how == "rst" else client.close()


class TestE01Disconnect:
    @pytest.fixture(scope="class", params=["abort", "finish"])
    @classmethod
    def server(cls, request: pytest.FixtureRequest) -> Iterator[Server]:
        with Server(*FREE, "--on-half-close", request.param, "--resume-ttl", "60", "--drain-timeout", "0") as server:
            yield server

    @pytest.mark.parametrize("how", ["fin", "rst"])
    @pytest.mark.parametrize("accept", ["text/event-stream", "application/x-ndjson", "text/plain"])
    def test_a_stream_is_detached(self, server: Server, how: str, accept: str) -> None:
        before = server.metrics()
        client = server.connect()
        client.request("POST", CHAT, chat("hi", stream=True, max_tokens=LONG), [("Accept", accept)])
        client.begin("POST")
        client.read_until(lambda answer: tokens(server) >= before[GENERATED] + 3)
        leave(client, how)
        self._gone(server, before)

    @pytest.mark.parametrize("how", ["fin", "rst"])
    def test_a_websocket_is_detached(self, server: Server, how: str) -> None:
        before = server.metrics()
        socket = WebSocketClient(server)
        socket.send_json(type="generate", id="a", **chat("hi", max_tokens=LONG))
        for _ in range(4):
            socket.receive_json()
        leave(socket._client, how)
        self._gone(server, before)

    def _gone(self, server: Server, before: dict[str, float]) -> None:
        wanted = (before[DETACHED] + 1, 0, 0)
        until(lambda: itemgetter(DETACHED, RUNNING, USED)(server.metrics()) == wanted, "detached", GONE_S)
        after = server.metrics()
        assert after[GENERATED] - before[GENERATED] < GONE_S * 1000 / STEP_MS + 4
        nothing_more(server)

    @pytest.mark.parametrize("how", ["fin", "rst"])
    def test_a_whole_answer_is_cancelled(self, server: Server, how: str) -> None:
        """There is nothing to come back to. A FIN may be a half-close, which is the flag's decision."""
        finishes = how == "fin" and "finish" in server.flags
        before = server.metrics()
        client = server.connect()
        client.request("POST", CHAT, chat("hi", max_tokens=100 if finishes else LONG))
        until(lambda: tokens(server) >= before[GENERATED] + 3, "the third token")
        leave(client, how)
        outcome = "length" if finishes else "cancelled"
        until(lambda: outcomes(server.metrics())[outcome] == outcomes(before)[outcome] + 1, outcome)
        if finishes:
            assert tokens(server) == before[GENERATED] + 100
        else:
            assert tokens(server) - before[GENERATED] < GONE_S * 1000 / STEP_MS + 4
            nothing_more(server)
        until(lambda: itemgetter(RUNNING, USED)(server.metrics()) == (0, 0), "the blocks are back")

    @pytest.mark.parametrize("how", ["fin", "rst"])
    @pytest.mark.parametrize("stream", [True, False])
    def test_without_resuming_all_is_cancelled(self, how: str, stream: bool) -> None:
        with Server(*FREE, "--resume-ttl", "0") as server:
            client = server.connect()
            client.request("POST", CHAT, chat("hi", max_tokens=LONG, stream=stream))
            until(lambda: tokens(server) >= 3, "the third token")
            leave(client, how)
            metrics = wait_idle(server, deadline_s=GONE_S)
            assert outcomes(metrics)["cancelled"] == 1
            assert metrics[GENERATED] < GONE_S * 1000 / STEP_MS + 4
            nothing_more(server)


class TestE02DeadInTheQueue:
    @pytest.mark.parametrize("ttl", ["0", "60"])
    @pytest.mark.parametrize("how", ["fin", "rst"])
    def test_they_never_start(self, ttl: str, how: str) -> None:
        flags = ("--max-running", "1", "--resume-ttl", ttl, "--drain-timeout", "0", *FREE)
        with Server(*flags) as server, server.connect() as first:
            first.request("POST", CHAT, chat("first", stream=True, max_tokens=100_000))
            first.begin("POST")
            first.read_events(3)
            with crowd(server, 20) as dead:
                for number, client in enumerate(dead):
                    client.request("POST", CHAT, chat(f"dead {number}", stream=number % 2 == 0, max_tokens=50))
                server.wait_metric(QUEUED, 20)
                for client in dead:
                    leave(client, how)
            server.wait_metric(QUEUED, 0)
            with server.connect() as live:
                live.request("POST", CHAT, chat("live", stream=True, max_tokens=5))
                stream = first._answer.header("x-stream-id") if first._answer else None
                assert server.ask("DELETE", f"/v1/streams/{stream}").status == 200
                assert words(live.answer("POST").text()) == 5
            assert server.metrics()["sluice_queue_seconds_count"] == 2  # places in the batch that were given
            metrics = wait_idle(server, detached=10 if ttl == "60" else 0)
            assert outcomes(metrics)["length"] == 1


class TestE05StoppedReaders:
    def test_a_hundred_leave_nothing_behind(self) -> None:
        with Server("--send-buffer", "4096", "--resume-ttl", "0") as server:
            files = server.open_files
            sizes = []
            for _ in range(5):
                with crowd(server, 20, receive_buffer=4096) as clients:
                    for client in clients:
                        client.request("POST", CHAT, chat("stall", stream=True, max_tokens=100_000))
                    server.wait_metric(PARKED, 20)
                    for client in clients:
                        client.reset()
                metrics = wait_idle(server)
                sizes.append(server.resident_bytes)
            assert outcomes(metrics)["cancelled"] == 100
            assert metrics['sluice_connections{protocol="http1"}'] == 1  # that of the scrape
            until(lambda: server.open_files == files, "all descriptors are closed")
            assert sizes[-1] - sizes[0] < 4 * 1024 * 1024, sizes

    def test_websockets_too(self) -> None:
        with Server("--send-buffer", "4096", "--resume-ttl", "0") as server:
            files = server.open_files
            with ExitStack() as stack:
                for _ in range(20):
                    socket = stack.enter_context(WebSocketClient(server, receive_buffer=4096))
                    for number in range(3):
                        socket.send_json(type="generate", id=str(number), **chat("stall", max_tokens=100_000))
                    stack.callback(socket._client.reset)
                server.wait_metric(PARKED, 60)
            assert outcomes(wait_idle(server))["cancelled"] == 60
            until(lambda: server.open_files == files, "all descriptors are closed")


class TestE06SlowReader:
    LOG_BYTES = 2048  # far less than a window of events: a log never drops what its only reader has not read

    def test_it_costs_no_memory_and_slows_nobody(self) -> None:
        flags = ("--send-buffer", "4096", "--log-bytes-per-stream", str(self.LOG_BYTES))
        with Server(*flags) as server, server.connect(receive_buffer=4096) as slow:
            server.ask("POST", CHAT, chat("warm", max_tokens=5000))
            slow.request("POST", CHAT, chat("slow", stream=True, max_tokens=5000))
            slow.begin("POST")
            server.wait_metric(PARKED, 1)
            size, made = server.resident_bytes, tokens(server)
            for turn in range(20):
                taken = slow.socket.recv(100)
                slow._h11.receive_data(taken)
                answer = server.ask("POST", CHAT, chat(f"normal {turn}", stream=True, max_tokens=500))
                assert words(answer.text()) == 500
            metrics = server.metrics()
            assert metrics[PARKED] == 1
            # What 2,000 bytes bought it: no more than a window beyond what its socket's buffers took.
            assert metrics[GENERATED] - made - 20 * 500 <= 2 * 64
            assert server.resident_bytes - size < 4 * 1024 * 1024
            assert words(joined(slow.finish().chunks())) == 5000


class TestE07TinyPool:
    BLOCKS, TOKENS = 4, 64

    @pytest.fixture(scope="class")
    @classmethod
    def server(cls) -> Iterator[Server]:
        with Server("--kv-blocks", str(cls.BLOCKS)) as server:
            yield server

    def test_what_can_never_fit_is_refused(self, server: Server) -> None:
        for length in (self.TOKENS, self.TOKENS + 1, 5000):
            for stream in (False, True):
                body = {"prompt": "x" * length, "stream": stream}
                assert server.ask("POST", COMPLETIONS, body).error(400)["code"] == "context_length_exceeded"
            assert server.ask("POST", COMPLETIONS, {"prompt": "short", "max_tokens": 3}).status == 200
        wait_idle(server)

    def test_growth_that_cannot_go_on_ends_with_length(self, server: Server) -> None:
        choice = server.ask("POST", COMPLETIONS, {"prompt": "x" * 40}).json()["choices"][0]
        assert (words(choice["text"]), choice["finish_reason"]) == (24, "length")

    @pytest.mark.parametrize("prompt", [20, 31, 50])
    def test_all_that_compete_for_it_end(self, server: Server, prompt: int) -> None:
        """Their text is that of a run alone, however often they give their blocks back."""
        bodies = [{"prompt": f"{n:02d}" + "x" * (prompt - 2), "stream": True, "seed": 1} for n in range(12)]
        alone = [server.ask("POST", COMPLETIONS, body).text() for body in bodies]
        assert all(words(text) == self.TOKENS - prompt for text in alone)
        with crowd(server, len(bodies)) as clients:
            for client, body in zip(clients, bodies, strict=True):
                client.request("POST", COMPLETIONS, body)
            short = server.ask("POST", COMPLETIONS, {"prompt": "short", "max_tokens": 2})
            assert short.status == 200
            assert [client.answer("POST").text() for client in clients] == alone
        wait_idle(server)

    def test_a_stalled_reader_keeps_nobody_out(self) -> None:
        """A parked stream's blocks are anybody's; it goes on when it is read again."""
        flags = ("--kv-blocks", "20", "--credit-window", "8", "--send-buffer", "4096")
        with Server(*flags) as server, server.connect(receive_buffer=4096) as stalled:
            stalled.request("POST", COMPLETIONS, {"prompt": "a" * 60, "stream": True})
            stalled.begin("POST")
            server.wait_metric(PARKED, 1)
            body = {"prompt": "b" * 250, "stream": True}
            assert words(server.ask("POST", COMPLETIONS, body).text()) == 70
            assert server.metrics()["sluice_preemptions_total"] >= 1
            assert words(stalled.finish().text()) == 260
            wait_idle(server)


class TestE09Ids:
    @pytest.fixture(scope="class")
    @classmethod
    def server(cls) -> Iterator[Server]:
        with Server("--synthetic-step-ms", "5", "--resume-ttl", "0") as server:
            yield server

    def test_the_same_request_id_twice(self, server: Server) -> None:
        ids = [("X-Request-Id", "same")]
        with server.connect() as one, server.connect() as other:
            for client, content in ((one, "one"), (other, "other")):
                client.request("POST", CHAT, chat(content, stream=True, max_tokens=60), ids)
                assert client.begin("POST").header("x-request-id") == "same"
            assert one._answer and other._answer
            assert one._answer.header("x-stream-id") != other._answer.header("x-stream-id")
            one.read_events(3)
            one.reset()
            chunks = other.finish().chunks()
            assert words(joined(chunks)) == 60
            assert len({chunk["id"] for chunk in chunks}) == 1
        metrics = wait_idle(server)
        assert all(value >= 0 for value in metrics.values())

    @pytest.mark.parametrize("value", ["x" * 10_000, "a b", 'quote"', "tab\there", "x" * 129, "<b>", "a\\b"])
    def test_odd_request_ids_are_replaced(self, server: Server, value: str) -> None:
        answer = server.ask("POST", CHAT, chat("hi", max_tokens=1), [("X-Request-Id", value)])
        assert answer.status == 200
        given = answer.header("x-request-id")
        assert given and given != value and given.startswith("req-")
        assert value not in server.log

    def test_request_ids_beyond_ascii(self, server: Server) -> None:
        with server.connect() as client:
            client.send(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: \xff\xc3\xa9\r\n\r\n")
            answer = client.answer()
        assert answer.status in (200, 400)
        assert (answer.header("x-request-id") or "").startswith("req-")

    @pytest.mark.parametrize("value", ["x" * 128, "a.b:c/d+e=f@g-h_i"])
    def test_plain_ones_come_back(self, server: Server, value: str) -> None:
        ids = [("X-Request-Id", value)]
        assert server.ask("POST", CHAT, chat("hi", max_tokens=1), ids).header("x-request-id") == value
        assert server.ask("GET", "/nowhere", None, ids).header("x-request-id") == value

    def test_the_same_id_on_two_sockets(self, server: Server) -> None:
        with WebSocketClient(server) as one, WebSocketClient(server) as other:
            for socket, content in ((one, "one"), (other, "other")):
                socket.send_json(type="generate", id="same", **chat(content, max_tokens=40))
                assert socket.receive_json()["type"] == "started"
            one.send_json(type="cancel", id="same")
            assert one.receive_until("error", "done")[-1]["error"]["code"] == "cancelled"
            messages = other.receive_until("done", "error")
            assert words("".join(m["text"] for m in messages[:-1])) == 40
            assert messages[-1]["type"] == "done"

    def test_the_same_id_on_one_socket(self, server: Server) -> None:
        with WebSocketClient(server) as socket:
            for _ in range(2):
                socket.send_json(type="generate", id="same", **chat("hi", max_tokens=40))
            messages = socket.receive_until("done")
            (error,) = [m for m in messages if m["type"] == "error"]
            assert error["error"]["param"] == "id"
            assert words("".join(m["text"] for m in messages if m["type"] == "token")) == 40
            socket.send_json(type="generate", id="same", **chat("hi", max_tokens=1))  # free again
            assert socket.receive_until("done", "error")[-1]["type"] == "done"

    @pytest.mark.parametrize("id_", ["a\r\nb", 'q"q', "é\u2028", "x" * 256, "\x00"])
    def test_socket_ids_come_back_as_they_are(self, server: Server, id_: str) -> None:
        with WebSocketClient(server) as socket:
            socket.send_json(type="generate", id=id_, **chat("hi", max_tokens=2))
            messages = socket.receive_until("done", "error")
        assert {m["id"] for m in messages} == {id_}
        assert messages[-1]["type"] == "done"

    @pytest.mark.parametrize("id_", ["", "x" * 257, 1, None])
    def test_socket_ids_that_are_none(self, server: Server, id_: Any) -> None:
        with WebSocketClient(server) as socket:
            socket.send_json(type="generate", id=id_, **chat("hi", max_tokens=2))
            assert socket.receive_json()["type"] == "error"
            assert socket.close() == Closed(1000)

    def test_sums_agree(self, server: Server) -> None:
        metrics = wait_idle(server)
        assert started(metrics) == sum(outcomes(metrics).values())
