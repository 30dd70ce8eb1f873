"""server.status: the streams, the engine and the pool, as they are when somebody asks."""

from __future__ import annotations

import msgspec

from engine.wire import Gauges
from server.api.answers import ServerNow
from server.metrics import PROTOCOLS, STATES, Live
from server.status import ID_CHARS, STREAMS_SHOWN_MAX, server_now
from tests.support.tables import Rig


def look(rig: Rig, *, names_keys: bool = True, **gauges: int) -> ServerNow:
    streams = dict.fromkeys(STATES, 0)
    for stream in rig.table.live:
        streams[stream.state] += 1
    live = Live(streams, dict.fromkeys(PROTOCOLS, 0), Gauges(**gauges), 160, 8)
    return server_now(rig.table, rig.metrics, live, "model", names_keys=names_keys)


def test_a_server_without_work() -> None:
    now = look(Rig(), blocks_free=10)
    assert (now.model, now.engine.up, now.engine.running_max, now.shown) == ("model", True, 8, [])
    assert (now.kv_blocks.used, now.kv_blocks.free, now.kv_blocks.tokens_each) == (0, 10, 16)
    assert set(msgspec.to_builtins(now.streams).values()) == {0}


def test_a_server_whose_engine_is_gone() -> None:
    rig = Rig()
    rig.engine.hello = None
    now = look(rig)
    assert (now.engine.up, now.engine.running_max, now.kv_blocks.tokens_each) == (False, 0, 0)


def test_each_stream_has_its_state_and_its_counts() -> None:
    rig = Rig(keys={"alice": 4}, resume_ttl_s=30)
    waiting, running, parked, left = (rig.open(key="alice") for _ in range(4))
    for client in (running, parked, left):
        rig.admit(client.stream)
    rig.clock.advance(0.25)
    rig.play(running.stream, "abc")
    parked.stall()
    rig.run_dry(parked.stream)
    left.leave()
    rig.clock.advance(1)
    now = look(rig)
    shown = {each.stream: each for each in now.shown}
    states = {c: shown[c.stream.id[:ID_CHARS]].state for c in (waiting, running, parked, left)}
    assert list(states.values()) == ["queued", "running", "parked", "detached"]
    assert msgspec.to_builtins(now.streams) == dict.fromkeys(STATES, 1)
    one = shown[running.stream.id[:ID_CHARS]]
    assert (one.api, one.key, one.request_id, one.readers) == ("chat", "alice", "req", 1)
    assert (one.prompt_tokens, one.completion_tokens, one.age_s, one.ttft_s) == (3, 3, 1.25, 0.25)
    assert shown[waiting.stream.id[:ID_CHARS]].ttft_s is None
    assert shown[left.stream.id[:ID_CHARS]].readers == 0
    assert now.tokens.generated == rig.metrics.generated_tokens > 0


def test_it_names_no_key_to_everybody_and_no_stream_to_anybody() -> None:
    """With a whole id its reader could attach."""
    rig = Rig(keys={"alice": 4})
    stream = rig.open(key="alice").stream
    told = msgspec.json.encode(look(rig, names_keys=False)).decode()
    assert "alice" not in told
    assert stream.id[: ID_CHARS + 1] not in told


def test_the_oldest_streams_are_shown_and_the_rest_is_counted() -> None:
    rig = Rig(queue_max=2 * STREAMS_SHOWN_MAX)
    first, *_, last = [rig.open().stream for _ in range(STREAMS_SHOWN_MAX + 1)]
    now = look(rig)
    assert (now.streams.queued, len(now.shown)) == (STREAMS_SHOWN_MAX + 1, STREAMS_SHOWN_MAX)
    assert now.shown[0].stream == first.id[:ID_CHARS]
    assert last.id[:ID_CHARS] not in [each.stream for each in now.shown]
