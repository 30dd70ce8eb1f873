"""A reader that stops reading stops the scheduler (issue 6, credit). Black-box: what was made is counted in /metrics,
and what the kernel holds for the client is read from /proc, so the bounds are those of the design."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest

from server.connection import HIGH_WATER_BYTES
from tests.support.http2 import Peer
from tests.support.probes import DETACHED, PARKED, QUEUED, USED, kernel_bytes, settle, tokens, wait_idle, words
from tests.support.readings import EVENT_STREAM, NDJSON, PLAIN
from tests.support.serving import DEADLINE_S, Client, Server, WebSocketClient, chat, joined, until

pytestmark = pytest.mark.synthetic

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WINDOW = 64
LONG = 100_000
SMALL = 4096  # SO_SNDBUF and SO_RCVBUF; the kernel takes twice that
FLAGS = ("--send-buffer", str(SMALL), "--credit-window", str(WINDOW), "--drain-timeout", "0")
# What one token takes in each framing, head and chunk around it included: at least and at most.
TOKEN_BYTES = {"sse": (190, 260), "ndjson": (160, 230), "plain": (5, 20), "websocket": (40, 60)}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(*FLAGS) as running:
        yield running


class TestStoppedReader:
    @pytest.mark.parametrize("door", TOKEN_BYTES)
    def test_parks_within_a_window_of_full_buffers(self, server: Server, door: str) -> None:
        before = tokens(server)
        if door == "websocket":
            socket = WebSocketClient(server, receive_buffer=SMALL)
            socket.send_json(type="generate", id="a", **chat("stop", max_tokens=LONG))
            client = socket._client
        else:
            accept = {"sse": EVENT_STREAM, "ndjson": NDJSON, "plain": PLAIN}[door]
            client = server.connect(receive_buffer=SMALL)
            client.request("POST", CHAT, chat("stop", stream=True, max_tokens=LONG), [accept])
        settle(server, client)
        made, held = tokens(server) - before, kernel_bytes(client, server)
        least, most = TOKEN_BYTES[door]
        assert made >= held / most - 5  # the head and the role chunk
        assert made <= (held + HIGH_WATER_BYTES + most) / least + WINDOW
        # And there it stays, while others are served.
        assert server.ask("POST", COMPLETIONS, {"prompt": "clock", "max_tokens": 50}).status == 200
        assert tokens(server) == before + made + 50
        client.reset()
        until(lambda: server.metrics()[PARKED] == 0, "detached")

    def test_over_http2_the_window_is_the_buffer(self, server: Server) -> None:
        before = tokens(server)
        window = 4096
        with Peer(server.port, window=window) as peer:
            peer.stalled.add(1)
            assert peer.ask(CHAT, chat("stop", stream=True, max_tokens=LONG)) == 1
            peer.wait(lambda: len(peer.bodies[1]) == window)
            server.wait_metric(PARKED, 1)
            made = tokens(server) - before
            least, most = TOKEN_BYTES["sse"]
            # What the client was sent, at most one write behind it, and a window of tokens.
            assert window / most - 2 <= made <= window / least + WINDOW * 2
            assert server.ask("POST", COMPLETIONS, {"prompt": "clock", "max_tokens": 50}).status == 200
            assert tokens(server) == before + made + 50
            other = peer.ask(CHAT, chat("another stream of this connection", stream=True, max_tokens=20))
            _, body = peer.answer(other)
            assert b"[DONE]" in body
        until(lambda: server.metrics()[PARKED] == 0, "detached")

    def test_it_takes_no_place_in_the_batch(self) -> None:
        with Server(*FLAGS, "--max-running", "1") as server, server.connect(receive_buffer=SMALL) as stopped:
            stopped.request("POST", CHAT, chat("stop", stream=True, max_tokens=2000))
            settle(server, stopped)
            for number in range(3):
                assert words(server.ask("POST", CHAT, chat(f"{number}", stream=True, max_tokens=100)).text()) == 100
            metrics = server.metrics()
            assert (metrics[PARKED], metrics[QUEUED]) == (1, 0)
            stopped.begin("POST")
            assert words(stopped.finish().text()) == 2000
            wait_idle(server)

    def test_its_blocks_go_first(self) -> None:
        """The pool holds the parked stream and half of the others; nobody who runs loses a block."""
        flags = (*FLAGS, "--kv-blocks", "40", "--max-running", "2")
        with Server(*flags) as server, server.connect(receive_buffer=SMALL) as stopped:
            stopped.request("POST", COMPLETIONS, {"prompt": "a" * 300, "stream": True, "max_tokens": 300})
            settle(server, stopped)
            held = server.metrics()[USED]
            assert held >= 300 // 16
            body = {"prompt": "b" * 200, "stream": True, "max_tokens": 160}
            assert words(server.ask("POST", COMPLETIONS, body).text()) == 160
            metrics = server.metrics()
            assert (metrics[PARKED], metrics[USED]) == (1, 0)
            assert metrics["sluice_preemptions_total"] == 1
            stopped.begin("POST")
            assert words(stopped.finish().text()) == 300
            wait_idle(server)


class TestHalfClose:
    """A FIN behind the request, while the server's buffers are full: no ping can show who is there."""

    @pytest.mark.parametrize("accept", [EVENT_STREAM, NDJSON])
    def test_a_client_that_reads_gets_the_whole(self, server: Server, accept: tuple[str, str]) -> None:
        with server.connect(receive_buffer=SMALL) as client:
            client.request("POST", CHAT, chat("half", stream=True, max_tokens=1000), [accept])
            client.begin("POST")
            settle(server, client)
            client.end_sending()
            answer = client.finish()
        assert answer.end == "whole"
        chunks = answer.chunks() if accept is EVENT_STREAM else answer.lines()[:-1]
        assert words(joined(chunks)) == 1000

    def test_a_client_that_does_not_is_gone(self, server: Server) -> None:
        with server.connect(receive_buffer=SMALL) as client:
            client.request("POST", CHAT, chat("half", stream=True, max_tokens=1000))
            client.begin("POST")
            settle(server, client)
            detached = server.metrics()[DETACHED]
            client.end_sending()
            until(lambda: server.metrics()[DETACHED] == detached + 1, "detached", 2.0)


class TestReturn:
    STEP_S = 0.2

    def test_the_text_goes_on_within_one_step(self) -> None:
        """Another stream is the clock: one token a step."""
        step_ms = ("--synthetic-step-ms", str(int(self.STEP_S * 1000)))
        flags = ("--credit-window", "4", "--send-buffer", str(SMALL), "--drain-timeout", "0")
        script = {"match": "stop", "tokens": [{"repeat": "x" * 4000, "times": 1000}]}
        with (
            Server(*flags, *step_ms, scripts=[script]) as server,
            server.connect(receive_buffer=SMALL) as stopped,
            server.connect() as clock,
        ):
            clock.request("POST", CHAT, chat("clock", stream=True, max_tokens=LONG))
            clock.begin("POST")
            stopped.request("POST", CHAT, chat("stop", stream=True))
            stopped.begin("POST")
            server.wait_metric(PARKED, 1)
            for _ in range(2):
                made, at = self._read_what_is_there(stopped, self.STEP_S / 4), self._read_what_is_there(clock, 0.001)
                stopped.read_until(lambda answer: answer.body.count(b"data: ") > made)  # noqa: B023
                assert self._read_what_is_there(clock, 0.001) - at <= 2  # the step that was under way, and the next one
                server.wait_metric(PARKED, 1)

    @staticmethod
    def _read_what_is_there(client: Client, quiet_s: float) -> int:
        """Until nothing comes for a moment; how many events there were in all."""
        answer = client._answer
        assert answer is not None
        client.socket.settimeout(quiet_s)
        with suppress(TimeoutError):
            client.finish()
        client.socket.settimeout(DEADLINE_S)
        return answer.body.count(b"data: ")


def test_a_reader_on_this_machine_is_sent_segments_of_a_networks_size(server: Server) -> None:
    """Loopback's own would fill the send buffer alone, and each would wait for a delayed acknowledgement."""
    with server.connect() as client:
        assert client.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG) <= 9000
