"""Five hundred streams at once, one of which nobody reads (issue 2, what must hold). Black-box, on the synthetic
engine at 20 ms a step; the client reads with a selector, so that it is no slower than what it watches."""

from __future__ import annotations

import json
import selectors
import time
from contextlib import ExitStack

import pytest

from tests.support.probes import PARKED, RUNNING, USED, wait_idle, words
from tests.support.serving import DEADLINE_S, Client, Server, chat, joined

pytestmark = pytest.mark.synthetic

CHAT = "/v1/chat/completions"
STREAMS, TOKENS, STEP_MS = 500, 450, 20
# A log's dropped events leave in a group (server/log.py), so its list is as long as it gets from here on.
LOG_FULL_TOKENS = 370
LOG_BYTES = 16 * 1024
PIECE = "x" * 2000


class Crowd:
    """Clients whose answers are read as they come; `bodies` holds what each was sent behind its head."""

    def __init__(self, clients: list[Client]) -> None:
        self.received = [bytearray() for _ in clients]
        self._selector = selectors.DefaultSelector()
        for number, client in enumerate(clients):
            client.socket.setblocking(False)
            self._selector.register(client.socket, selectors.EVENT_READ, number)
        self.open = len(clients)

    def read(self, seconds: float) -> None:
        """Read what comes within so long."""
        for key, _ in self._selector.select(seconds):
            number, socket = key.data, key.fileobj
            data = socket.recv(65536)  # type: ignore[union-attr]
            self.received[number] += data
            if not data or self.received[number].endswith(b"0\r\n\r\n"):
                self._selector.unregister(socket)
                self.open -= 1

    def close(self) -> None:
        self._selector.close()


def chunks(received: bytearray) -> list[object]:
    """The JSON of each event; that the chunked body is whole was seen at its end."""
    return [json.loads(line[6:]) for line in received.split(b"\n") if line.startswith(b"data: {")]


def test_five_hundred_streams_and_one_that_is_never_read() -> None:
    script = {"match": "never read", "tokens": [{"repeat": PIECE, "times": 100_000}]}
    flags = ("--synthetic-step-ms", str(STEP_MS), "--log-bytes-per-stream", str(LOG_BYTES), "--send-buffer", "4096")
    with Server(*flags, "--drain-timeout", "0", scripts=[script]) as server, ExitStack() as stack:
        stalled = stack.enter_context(server.connect(receive_buffer=4096))
        stalled.request("POST", CHAT, chat("never read", stream=True))
        clients = [stack.enter_context(server.connect()) for _ in range(STREAMS - 1)]
        crowd = Crowd(clients)
        stack.callback(crowd.close)
        began = time.monotonic()
        for number, client in enumerate(clients):
            client.request("POST", CHAT, chat(f"reader {number}", stream=True, max_tokens=TOKENS))
        sizes: list[tuple[int, int]] = []
        running: set[float] = set()
        while crowd.open:
            assert time.monotonic() - began < 3 * DEADLINE_S, f"{crowd.open} streams have not ended"
            crowd.read(1)
            progress = sum(map(len, crowd.received))
            if not sizes or progress - sizes[-1][0] > 2_000_000:
                metrics = server.metrics()
                running.add(metrics[RUNNING])
                sizes.append((progress, server.resident_bytes))
        took = time.monotonic() - began
        for received in crowd.received:
            assert received.startswith(b"HTTP/1.1 200 ")
            assert words(joined(chunks(received))) == TOKENS
        metrics = server.metrics()
        assert (metrics[RUNNING], metrics[PARKED]) == (0, 1)
        assert max(running) >= STREAMS - 1
        # At their pace: as long as the steps take, and half as much again for a busy machine.
        assert took < TOKENS * STEP_MS / 1000 * 2.5 + 2, took
        # Flat, once every log is as long as it gets. What still grows are the ids that a resumption needs.
        later = [size for progress, size in sizes if progress > sizes[-1][0] * LOG_FULL_TOKENS / TOKENS]
        assert max(later) - later[0] < 4 * 1024 * 1024, sizes
        assert max(later) - sizes[0][1] < STREAMS * 64 * 1024, sizes
        # What was made for the stalled one fills its buffers and a window, a sliver of all that it asked for.
        assert metrics["sluice_generated_tokens_total"] - (STREAMS - 1) * TOKENS < 200
        stalled.reset()
        server.wait_metric('sluice_streams{state="detached"}', 1)
        server.wait_metric(USED, 0)
        wait_idle(server, detached=1)
