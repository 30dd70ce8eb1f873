"""All streams together: room, what is submitted, finding and forgetting, logs within their budget, and deadlines."""

from __future__ import annotations

import pytest

from server.outcome import Outcome
from server.stream import new_stream_id
from server.table import GONE_MAX, Busy
from tests.support.tables import Client, Rig

# Room


def test_stream_ids_are_unguessable_and_never_repeat() -> None:
    """And never an option of a command line."""
    ids = {new_stream_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(len(id_) == 24 and id_[0].isalnum() for id_ in ids)


def test_without_an_engine_nothing_starts() -> None:
    rig = Rig(keys={"alice": 1})
    rig.engine.die()
    with pytest.raises(Busy, match="starting") as busy:
        rig.start(key="alice")
    assert (busy.value.status, busy.value.retry_after_s) == (503, 2)
    assert rig.limiter.streams("alice") == 0


def test_the_servers_limit_is_503_and_counts_streams_that_have_not_ended() -> None:
    rig = Rig(streams_max=2)
    first, _ = rig.open(), rig.open()
    with pytest.raises(Busy) as busy:
        rig.start()
    assert busy.value.status == 503
    first.stream.finish(Outcome("cancelled"))
    rig.start()


def test_the_queues_limit_counts_sequences_that_were_not_admitted() -> None:
    rig = Rig(queue_max=2, running_max=1)
    waiting = rig.open(n=3)
    with pytest.raises(Busy, match=r"waiting sequences \(3\)") as busy:
        rig.start()
    assert (busy.value.status, busy.value.retry_after_s) == (503, 5)
    rig.admit(waiting.stream)
    rig.start(n=3)
    with pytest.raises(Busy):
        rig.start()


@pytest.mark.parametrize("way", ["end", "cancel", "death"])
def test_a_sequence_that_ends_while_queued_leaves_the_queue(way: str) -> None:
    rig = Rig(queue_max=1, running_max=1, engine_restart_wait_s=0)
    stream = rig.open(n=2).stream
    if way == "end":
        for choice in range(2):
            rig.end(stream, "error" if choice == 0 else "stop", choice=choice)
    elif way == "cancel":
        stream.finish(Outcome("cancelled"))
    else:
        rig.lose_engine()
        rig.regain_engine()
    rig.start(n=2)


def test_a_keys_limit_is_429_and_refused_before_engine_work() -> None:
    rig = Rig(keys={"alice": 1, "bob": 1})
    rig.open(key="alice")
    submitted = len(rig.engine.submitted)
    with pytest.raises(Busy) as busy:
        rig.start(key="alice")
    assert (busy.value.status, busy.value.retry_after_s) == (429, 1)
    assert len(rig.engine.submitted) == submitted
    rig.start(key="bob")


def test_a_refusal_is_not_counted_as_started() -> None:
    rig = Rig(streams_max=1)
    rig.open()
    with pytest.raises(Busy):
        rig.start()
    assert rig.metrics.started["chat"] == 1


def test_a_returning_reader_takes_a_slot_again_or_is_told_that_there_is_none() -> None:
    rig = Rig(keys={"alice": 1})
    first = rig.open(key="alice")
    first.leave()
    second = rig.open(key="alice")
    with pytest.raises(Busy) as busy:
        rig.table.retake_slot(first.stream)
    assert busy.value.status == 429
    assert first.stream.state == "detached"
    second.stream.finish(Outcome("cancelled"))
    rig.table.retake_slot(first.stream)
    rig.table.retake_slot(first.stream)
    assert rig.limiter.streams("alice") == 1


# What is submitted


def test_each_choice_is_a_sequence_of_its_own_under_its_key() -> None:
    rig = Rig(keys={"alice": None}, credit_window=16)
    rig.start(key="alice", n=2, prompts=2)
    assert [(m.sampling.prompt_index, m.sampling.choice_index) for m in rig.engine.submitted] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert {m.salt for m in rig.engine.submitted} == {"alice"}
    assert {m.credit for m in rig.engine.submitted} == {16}
    assert len({m.id for m in rig.engine.submitted}) == 4


# Finding and forgetting


def test_a_stream_is_found_by_its_own_key_only() -> None:
    rig = Rig(keys={"alice": None, "bob": None})
    stream = rig.open(key="alice").stream
    assert rig.table.find(stream.id, "alice") is stream
    assert rig.table.find(stream.id, "bob") is None
    assert rig.table.find("never", "alice") is None


def test_a_finished_stream_is_held_for_the_ttl_and_then_known_to_be_gone() -> None:
    rig = Rig(keys={"alice": None}, resume_ttl_s=30)
    client = rig.open(key="alice")
    stream = client.stream
    rig.end(stream)
    rig.clock.advance(29)
    assert rig.table.find(stream.id, "alice") is stream
    assert not rig.table.was_dropped(stream.id, "alice")
    rig.clock.advance(1)
    assert rig.table.find(stream.id, "alice") is None
    assert rig.table.was_dropped(stream.id, "alice")
    assert not rig.table.was_dropped(stream.id, "bob")
    assert not rig.table.was_dropped("never", "alice")
    assert not rig.table.was_dropped("never", "")


def test_streams_that_are_gone_are_remembered_up_to_a_bound() -> None:
    rig = Rig(resume_ttl_s=0)
    stream = rig.start()
    stream.finish(Outcome("cancelled"))
    rig.clock.advance(0)
    assert rig.table.was_dropped(stream.id, "")
    rig.table._gone.update((str(n), "") for n in range(GONE_MAX - 1))
    last = rig.start()
    last.finish(Outcome("cancelled"))
    rig.clock.advance(0)
    assert len(rig.table._gone) == GONE_MAX
    assert not rig.table.was_dropped(stream.id, "")
    assert rig.table.was_dropped(last.id, "")


# The budget of all logs


def test_over_the_budget_the_oldest_finished_stream_goes_first() -> None:
    rig = Rig(log_bytes=4000)
    clients = [rig.open() for _ in range(3)]
    for client in clients:
        rig.end(client.stream)
    streams = [client.stream for client in clients]
    assert all(rig.table.find(stream.id, "") for stream in streams)
    growing = rig.open()
    rig.run_dry(growing.stream, steps_max=5)
    held = [rig.table.find(stream.id, "") is not None for stream in streams]
    assert held == sorted(held)
    assert not held[0]
    assert rig.table.logs.bytes <= 4000


def test_a_stream_that_grows_makes_room_though_none_ends() -> None:
    rig = Rig(log_bytes=6000)
    done = rig.open()
    rig.end(done.stream)
    growing = rig.open()
    rig.run_dry(growing.stream, steps_max=50)
    assert rig.table.find(done.stream.id, "") is None
    assert rig.table.logs.bytes == growing.stream.log.size


def test_live_streams_are_never_dropped_for_the_budget() -> None:
    rig = Rig(log_bytes=100)
    client = rig.open()
    rig.run_dry(client.stream, steps_max=50)
    assert rig.table.find(client.stream.id, "") is client.stream
    assert client.stream.log.first == 0


def test_the_books_are_even_when_a_stream_over_the_budget_ends() -> None:
    rig = Rig(log_bytes=100)
    for _ in range(3):
        client = rig.open()
        rig.play(client.stream, "hello")
        rig.end(client.stream)
        assert client.channel.finished == 1
        assert client.text == "hello"
    assert rig.table.logs.bytes == 0


def test_a_reader_finishes_a_stream_that_was_dropped_under_it() -> None:
    rig = Rig(log_bytes=100)
    client = Client(rig.start(), reads=False)
    rig.play(client.stream, "hello")
    rig.end(client.stream)
    assert rig.table.find(client.stream.id, "") is None
    client.go_on()
    assert client.text == "hello"
    assert client.channel.finished == 1


# Deadlines


def test_a_request_that_waits_too_long_for_its_turn_expires() -> None:
    rig = Rig(queue_timeout_s=60)
    waiting, admitted = rig.open(), rig.open()
    rig.admit(admitted.stream)
    rig.clock.advance(59)
    assert waiting.stream.outcome is None
    rig.clock.advance(1)
    assert waiting.stream.outcome is not None
    assert (waiting.stream.outcome.kind, waiting.stream.outcome.retriable) == ("expired", True)
    assert waiting.events[-2]["error"]["code"] == "expired"
    assert admitted.stream.outcome is None


def test_a_request_that_takes_too_long_expires_in_any_state() -> None:
    rig = Rig(request_timeout_s=100, resume_ttl_s=1000)
    running, queued, detached = rig.open(), rig.open(), rig.open()
    rig.admit(running.stream)
    rig.admit(detached.stream)
    detached.leave()
    rig.clock.advance(100)
    kinds = [client.stream.outcome and client.stream.outcome.kind for client in (running, queued, detached)]
    assert kinds == ["expired"] * 3
