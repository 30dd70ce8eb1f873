"""Cases A04, A11 and A13: clients over HTTP/1.1 that are slow, silent, stalled or half gone."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.support.http1_cases import CHAT, FRAMINGS, accept, post, text_of, wait_let_go
from tests.support.probes import DETACHED
from tests.support.serving import Client, Server, chat, request_bytes, until

pytestmark = pytest.mark.synthetic


class TestA04IdleTimerIsOffInFlight:
    def test_a04_two_slow_pipelined_requests(self, quick: Server) -> None:
        """Each takes longer than the idle timeout of one second, and the second is silent all the while."""
        with quick.connect() as client:
            first = request_bytes("POST", CHAT, chat("[pause] 1", stream=True))
            client.send(first + request_bytes("POST", CHAT, chat("[pause] 2")))
            assert client.answer().text() == "before after"
            assert client.answer().json()["choices"][0]["message"]["content"] == "before after"

    def test_a04_a_body_that_comes_slowly(self, quick: Server) -> None:
        """Each piece within the body timeout of one second, the whole above it and above the idle timeout."""
        body = b'{"messages":[{"role":"user","content":"hi"}],"max_tokens":2}'
        with quick.connect() as client:
            client.send(post(f"Content-Length: {len(body)}\r\n"))
            end = time.monotonic() + 1.6
            for i in range(8):
                client.send(body[i * 8 : i * 8 + 8])
                time.sleep(max(0.0, (end - time.monotonic()) / (8 - i)))  # the client's pace, which is tested
            assert client.answer().status == 200


class TestA11SilentClients:
    EACH = 100

    def test_a11_each_phase_has_its_deadline(self, quick: Server) -> None:
        files = quick.open_files
        silent = [quick.connect() for _ in range(self.EACH)]
        dripping = [quick.connect() for _ in range(self.EACH)]
        stopped = [quick.connect() for _ in range(self.EACH)]
        for client in stopped:
            client.send(post("Content-Length: 50\r\n", b'{"messages":'))
        latencies = [self.drip(quick, dripping, seconds=1.5)]
        for client in silent:
            assert client.closed() == "fin"
        for client in stopped + dripping:
            client.answer().error(408)
            client.close()
        for client in silent:
            client.close()
        until(lambda: quick.open_files <= files, "descriptors back to where they were")
        assert max(latencies) < 5

    def drip(self, server: Server, clients: list[Client], seconds: float) -> float:
        """Send a byte of a head on each connection five times a second; the longest exchange of a client beside."""
        head = b"GET /health HTTP/1.1\r\nX-Long: " + b"x" * 100
        worst = 0.0
        start = time.monotonic()
        for at in range(int(seconds / 0.2)):
            for client in clients:
                try:
                    client.send(head[at : at + 1])
                except OSError:
                    assert time.monotonic() - start > 1  # closed by its deadline meanwhile
            begun = time.monotonic()
            assert server.ask("GET", "/health").status == 200
            worst = max(worst, time.monotonic() - begun)
            time.sleep(max(0.0, start + (at + 1) * 0.2 - time.monotonic()))  # the clients' pace, which is tested
        return worst

    def test_a11_between_requests_too(self, quick: Server) -> None:
        with quick.connect() as client:
            client.request("GET", "/health")
            assert client.answer().status == 200
            assert client.closed() == "fin"

    def test_a11_a_refused_client_that_goes_on_sending_is_let_go(self, quick: Server) -> None:
        """The time to read a refusal is bounded too."""
        with quick.connect() as client:
            client.send(b"NOT HTTP\r\n\r\n")
            client.answer().error(400)
            wait_let_go(client)

    def test_a11_connections_above_the_limit_are_told(self) -> None:
        with Server("--max-connections", "2", "--idle-timeout", "30") as server:
            first, second = server.connect(), server.connect()
            first.request("GET", "/health")
            second.request("GET", "/health")
            assert (first.answer().status, second.answer().status) == (200, 200)
            with server.connect() as third:
                answer = third.answer()
                answer.error(503)
                assert answer.header("retry-after") and answer.header("connection") == "close"
                third.end_sending()
                assert third.closed() == "fin"
            first.close()
            second.close()
            until(lambda: server.ask("GET", "/health").status == 200, "room again")

    def test_a11_a_stalled_reader_is_cut_and_its_stream_held(self) -> None:
        flags = ("--write-stall-timeout", "1", "--send-buffer", "4096", "--drain-timeout", "0")
        with Server(*flags) as server, server.connect(receive_buffer=4096) as client:
            client.request("POST", CHAT, chat("stall", stream=True, max_tokens=100_000))
            server.wait_metric('sluice_streams{state="parked"}', 1)
            server.wait_metric(DETACHED, 1)
            made = server.metrics()["sluice_generated_tokens_total"]
            client.begin()
            assert client.finish().end in ("cut", "reset")
            assert server.metrics()["sluice_generated_tokens_total"] == made


class TestA13HalfClose:
    SLOW = " w" * 12

    @pytest.mark.parametrize("framing", FRAMINGS[:2])
    @pytest.mark.parametrize("before_answer", [True, False])
    def test_a13_a_stream_goes_on(self, server: Server, framing: str, before_answer: bool) -> None:
        with server.connect() as client:
            client.request("POST", CHAT, chat("[slow]", stream=True), accept(framing))
            if not before_answer:
                client.begin()
            client.end_sending()
            if before_answer:
                client.begin()
            answer = client.finish()
            assert answer.end == "whole"
            assert text_of(framing, answer) == self.SLOW
            assert client.closed() == "fin"  # it can't ask again

    def test_a13_plain_text_has_no_ping_so_it_means_gone(self, server: Server) -> None:
        with server.connect() as client:
            client.request("POST", CHAT, chat("[slow]", stream=True), accept("text/plain"))
            client.begin()
            stream = client.read_until(lambda a: a.body).header("x-stream-id")
            client.end_sending()
            assert client.finish().end in ("reset", "cut")
        answer = server.ask("GET", f"/v1/streams/{stream}", headers=accept("text/event-stream"))
        assert answer.text() == self.SLOW

    def test_a13_an_answer_in_one_piece_is_given_up(self, server: Server) -> None:
        cancelled = 'sluice_requests_total{api="chat",outcome="cancelled"}'
        before = server.metrics()[cancelled]
        with server.connect() as client:
            client.request("POST", CHAT, chat("[slow]"))
            client.end_sending()
            client.begin()
            assert client.finish().end == "none" or client.finish().end == "reset"
        server.wait_metric(cancelled, before + 1)

    def test_a13_or_finished_where_the_flag_says_so(self) -> None:
        scripts = [{"match": "", "tokens": ["one", {"pause_ms": 300}, " two"]}]
        with Server("--on-half-close", "finish", scripts=scripts) as server, server.connect() as client:
            client.request("POST", CHAT, chat("half"))
            client.end_sending()
            answer = client.answer()
            assert answer.json()["choices"][0]["message"]["content"] == "one two"
            assert client.closed() == "fin"

    def test_a13_no_generation_is_in_question_for_other_routes(self, server: Server) -> None:
        with server.connect() as client:
            client.send(request_bytes("GET", "/v1/models"))
            client.end_sending()
            assert client.answer().status == 200
            assert client.closed() == "fin"

    def check_detached(self, server: Server, framing: str, leave: Callable[[Client], None]) -> None:
        held = server.metrics()[DETACHED]
        client = server.connect()
        client.request("POST", CHAT, chat("[prefill]", stream=True), accept(framing))
        stream = client.begin().header("x-stream-id")
        leave(client)
        server.wait_metric(DETACHED, held + 1)
        assert server.ask("DELETE", f"/v1/streams/{stream}").status == 200

    @pytest.mark.parametrize("framing", FRAMINGS[:2])
    def test_a13_a_client_that_is_gone_is_told_from_one_that_reads(self, server: Server, framing: str) -> None:
        """FIN with nobody left to read: the probing pings are answered by resets."""
        self.check_detached(server, framing, Client.close)

    @pytest.mark.parametrize("framing", FRAMINGS)
    def test_a13_a_reset_says_it_at_once(self, server: Server, framing: str) -> None:
        self.check_detached(server, framing, Client.reset)

    def test_a13_pipelined_requests_before_the_end_are_all_answered(self, server: Server) -> None:
        """Also when the client reads late, so that the end comes while the server waits to write."""
        with server.connect(receive_buffer=4096) as client:
            client.send(request_bytes("GET", "/metrics") * 50)
            client.end_sending()
            for _ in range(50):
                assert client.answer().status == 200
            assert client.closed() == "fin"
