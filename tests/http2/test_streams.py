"""Streams as readers: a window is a stream's own, the others keep their pace, whoever leaves is detached."""

from __future__ import annotations

from protocols import sse
from protocols.http2_guard import Code
from tests.http2.conftest import Endpoint
from tests.support.http2 import Peer
from tests.support.probes import DETACHED, PARKED, RUNNING, words
from tests.support.serving import chat, until


def _text(peer: Peer, stream: int) -> str:
    return bytes(peer.bodies[stream]).decode()


def metrics(api: Endpoint) -> dict[str, float]:
    with api.peer() as peer:
        lines = peer.answer(peer.ask("/metrics"))[1].decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def wait_metric(api: Endpoint, series: str, value: float) -> None:
    until(lambda: metrics(api)[series] == value, f"{series} is {value}")


PLAIN = [("accept", "text/plain")]
WINDOW = 300
# Windows are opened as the client reads, so two streams are a window apart, and a read may end between them.
APART_BYTES_MAX = 2 * WINDOW


def test_a_hundred_streams_of_which_one_is_not_read(api: Endpoint) -> None:
    """The issue's own case: 99 keep their pace, the one is parked, and goes on when its window opens. None of the 99
    falls behind the others; what it costs them all together is `python -m bench stalled --http2`."""
    tokens = 400
    with api.peer(window=WINDOW) as peer:
        streams = [peer.ask(f"/v1/generate?prompt=p{n}&max_tokens={tokens}", fields=PLAIN) for n in range(100)]
        stalled, others = streams[42], streams[:42] + streams[43:]
        peer.stalled.add(stalled)
        peer.wait(lambda: all(peer.bodies[stream] for stream in others))
        ahead = {stream: len(peer.bodies[stream]) for stream in others}  # those asked for first
        while not peer.ended.issuperset(others):
            peer.pump()
            if not peer.ended & set(others):
                since = [len(peer.bodies[stream]) - ahead[stream] for stream in others]
                assert max(since) - min(since) < APART_BYTES_MAX
        assert [words(_text(peer, stream)) for stream in others] == [tokens] * 99
        assert len(peer.bodies[stalled]) == WINDOW
        assert stalled not in peer.resets | dict.fromkeys(peer.ended)
        wait_metric(api, PARKED, 1)
        assert metrics(api)[RUNNING] == 0
        peer.stalled.clear()
        peer.h2.increment_flow_control_window(1 << 20, stalled)
        peer.flush()
        peer.answer(stalled)
        assert words(_text(peer, stalled)) == tokens


def test_the_connection_s_window_holds_all_back_and_lets_all_go(api: Endpoint) -> None:
    with api.peer(window=1 << 20, connection_window=65_535) as peer:
        streams = [peer.ask(f"/v1/generate?prompt=p{n}&max_tokens=400") for n in range(8)]
        peer.stalled.update(streams)
        peer.wait(lambda: sum(len(body) for body in peer.bodies.values()) == 65_535)
        wait_metric(api, PARKED, 8)
        sizes = [len(peer.bodies[stream]) for stream in streams]
        assert min(sizes) > max(sizes) // 3  # in turns, not one after the other
        peer.stalled.clear()
        peer.h2.increment_flow_control_window(1 << 28)
        peer.flush()
        for stream in streams:
            body = peer.answer(stream)[1]
            ids = [event.id.rpartition(":")[2] for event in sse.Parser().feed(body)]
            assert ids == [str(n) for n in range(len(ids))]


def test_a_long_answer_does_not_hold_up_tokens(echo: Endpoint) -> None:
    """A whole answer of megabytes and a small one, asked for in this order: the small one is here first."""
    with echo.peer(window=1 << 30) as peer:
        large = peer.ask("/", bytes(16_000), end=False)
        for _ in range(200):
            peer.wait(lambda: peer.h2.local_flow_control_window(large) >= 16_000)
            peer.h2.send_data(large, bytes(16_000))
            peer.flush()
        peer.h2.end_stream(large)
        small = peer.ask("/", b"small")
        peer.answer(small)
        assert len(peer.bodies[large]) < 201 * 16_000
        assert len(peer.answer(large)[1]) == 201 * 16_000


def test_a_reset_detaches_and_the_stream_can_be_resumed(api: Endpoint) -> None:
    with api.peer() as peer:
        stream = peer.ask("/v1/generate?prompt=a&max_tokens=2000")
        peer.wait(lambda: len(peer.bodies[stream]) > 1000)
        peer.h2.reset_stream(stream, Code.CANCEL)
        peer.flush()
        wait_metric(api, DETACHED, 1)
        events = sse.Parser().feed(bytes(peer.bodies[stream]))
        again = peer.ask(f"/v1/streams/{peer.fields[stream]['x-stream-id']}", fields=[("last-event-id", events[-1].id)])
        peer.wait(lambda: len(peer.bodies[again]) > 1000)
        first = sse.Parser().feed(bytes(peer.bodies[again]))[0]
        assert int(first.id.rpartition(":")[2]) == int(events[-1].id.rpartition(":")[2]) + 1
        cancel = peer.ask(f"/v1/streams/{peer.fields[stream]['x-stream-id']}", method="DELETE")
        assert peer.answer(cancel)[0][":status"] in ("200", "204")
        body = peer.answer(again)[1]
        assert b'"code":"cancelled"' in body and body.endswith(b"data: [DONE]\n\n")


def test_a_reset_cancels_an_answer_in_one_piece(api: Endpoint) -> None:
    series = 'sluice_requests_total{api="chat",outcome="cancelled"}'
    before = metrics(api)[series]
    with api.peer() as peer:
        stream = peer.ask("/v1/chat/completions", chat("x", max_tokens=5000))
        wait_metric(api, RUNNING, 1)
        peer.h2.reset_stream(stream, Code.CANCEL)
        peer.flush()
        wait_metric(api, series, before + 1)
        assert metrics(api)[RUNNING] == 0


def test_a_connection_that_is_gone_detaches_all_its_streams(api: Endpoint) -> None:
    with api.peer() as peer:
        streams = [peer.ask(f"/v1/generate?prompt=p{n}&max_tokens=5000") for n in range(5)]
        peer.wait(lambda: all(len(peer.bodies[stream]) > 500 for stream in streams))
    wait_metric(api, DETACHED, 5)
    with api.peer() as again:
        for stream in streams:
            again.answer(again.ask(f"/v1/streams/{peer.fields[stream]['x-stream-id']}", method="DELETE"))
    wait_metric(api, DETACHED, 0)
