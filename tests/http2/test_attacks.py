"""What a client may try: each attack ends by its named limit with the code that RFC 9113 names, while the server's
memory stays what it was and another connection's tokens keep coming. The limits one by one: tests/protocols."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest
from conformance_kit.floods import FLOODS, Flood, made_to_reset, play
from conformance_kit.http2_wire import GET, POST, Closed, data, settings, window_update
from h2.events import PingAckReceived

from protocols.http2_guard import Code
from tests.http2.conftest import Endpoint
from tests.support.probes import words

MIB = 1 << 20
RESIDENT_GROWTH_MAX = 48 * MIB
# Without an attack the tokens come each 5 ms; a shared machine may be late by itself.
GAP_MAX_S = 1.5
CONNECTIONS = 3

GENERATE = [*GET[:3], (":path", "/v1/generate?prompt=a")]


def run(endpoint: Endpoint, flood: Flood) -> list[int]:
    """Play it on several connections, one after the other; the codes that the server ended them with."""
    codes = []
    for _ in range(CONNECTIONS):
        with endpoint.wire() as wire:
            wire.get = GENERATE if flood is made_to_reset else GET
            play(wire, flood)
            with contextlib.suppress(Closed):
                while True:
                    wire.read()
            codes.append(-1 if wire.goaway is None else wire.goaway.code)
    return codes


class Bystander:
    """A stream on a connection of its own: how long its tokens kept it waiting."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.gap_s = 0.0
        self.text = b""

    def _watch(self) -> None:
        with self._endpoint.peer() as peer:
            stream = peer.ask("/v1/generate?prompt=a&max_tokens=100000", fields=[("accept", "text/plain")])
            last = 0.0
            while not self._over.is_set():
                peer.pump()
                now = time.monotonic()
                self.gap_s = max(self.gap_s, now - last if last else 0.0)
                last = now
            self.text = bytes(peer.bodies[stream])
            peer.answer(peer.ask(f"/v1/streams/{peer.fields[stream]['x-stream-id']}", method="DELETE"))

    def __enter__(self) -> Bystander:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


@pytest.mark.parametrize("flood", FLOODS, ids=[flood.__name__ for flood in FLOODS])
def test_a_flood(api: Endpoint, flood: Flood) -> None:
    with Bystander(api) as bystander:
        run(api, flood)  # what the allocator keeps after the first time is no growth
        before = api.server.resident_bytes
        codes = run(api, flood)
        grown = api.server.resident_bytes - before
    assert codes == [Code.ENHANCE_YOUR_CALM] * CONNECTIONS
    assert grown < RESIDENT_GROWTH_MAX
    assert words(bystander.text.decode()) > 0
    assert bystander.gap_s < GAP_MAX_S


def test_tiny_data_frames_do_not_stop_others(api: Endpoint) -> None:
    """Every byte of a body in a frame of its own is slow for who sends it only."""
    path = [*POST[:3], (":path", "/v1/completions")]
    with Bystander(api) as bystander, api.wire() as wire:
        wire.send(wire.headers(1, path, end=False))
        for _ in range(60):
            wire.send(data(1, b"x") * 1000)
        wire.send(data(1, end=True))
        assert wire.answer(1)[0][":status"] == "400"
    assert bystander.gap_s < GAP_MAX_S


def test_bodies_of_many_streams_share_one_limit(api: Endpoint) -> None:
    """A hundred bodies of half the limit, none of which comes to its end, would be 400 MiB; together they get about
    what one may have, and their windows."""
    before = api.server.resident_bytes
    with api.peer() as peer:
        left = {peer.ask("/v1/completions", b"[", end=False): 4 * MIB for _ in range(100)}
        sent, sent_before = 0, -1
        while sent > sent_before:
            sent_before = sent
            for stream in left:
                while size := min(peer.h2.local_flow_control_window(stream), 16_384, left[stream]):
                    peer.h2.send_data(stream, bytes(size))
                    peer.flush()
                    left[stream] -= size
                    sent += size
            peer.h2.ping(b"all read")  # answered behind whatever windows the frames before it opened
            peer.flush()
            answered = len(peer.events)
            peer.wait(lambda: any(isinstance(e, PingAckReceived) for e in peer.events[answered:]))  # noqa: B023
        assert not peer.resets
        assert sent < 24 * MIB
        assert api.server.resident_bytes - before < 64 * MIB


@pytest.mark.parametrize("unread", ["windows", "socket"])
def test_answers_that_are_not_read(api: Endpoint, unread: str) -> None:
    """Windows that are never opened, or wide ones and a socket that is never read: the log waits, not our memory."""
    before = api.server.resident_bytes
    wires = []
    for _ in range(CONNECTIONS):
        wire = api.wire()
        wires.append(wire)
        wire.send(settings((4, 0 if unread == "windows" else (1 << 31) - 1)))
        if unread == "socket":
            wire.send(window_update(0, (1 << 31) - 1 - 65_535))
        fields = [*GET[:3], (":path", "/v1/generate?prompt=a&max_tokens=20000")]
        wire.send(*[wire.headers(n, fields) for n in range(1, 200, 2)])
    with Bystander(api) as bystander, api.peer() as peer:
        for _ in range(100):
            peer.answer(peer.ask("/health"))
    grown = api.server.resident_bytes - before
    for wire in wires:
        wire.socket.close()
    assert grown < RESIDENT_GROWTH_MAX
    assert bystander.gap_s < GAP_MAX_S
