"""All streams together: room, deadlines, logs within their budget, an engine's death, and sums that agree."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.wire import End
from server.framing import Ndjson
from server.gateway.limits import unused_tokens
from server.log import Event
from server.outcome import Outcome
from server.stream import Choice, Stream, new_stream_id
from server.table import ENGINE_DEATHS_MAX, GONE_MAX, REGROUP_S, Busy
from tests.support.tables import START_S, Client, Rig, StandingBucket

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
        rig.engine.die()
        rig.table.on_engine_lost()
        rig.engine.revive()
        rig.table.on_engine_ready()
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


# The engine's death


def lose(rig: Rig) -> None:
    rig.engine.die()
    rig.table.on_engine_lost()


def come_back(rig: Rig) -> None:
    rig.engine.revive()
    rig.table.on_engine_ready()


def test_another_engine_goes_on_from_the_prompt_and_what_was_generated() -> None:
    rig = Rig(credit_window=8)
    client = rig.open()
    rig.admit(client.stream, cached=2)
    rig.play(client.stream, "abc")
    lose(rig)
    come_back(rig)
    first, again = rig.engine.submitted
    assert again.id != first.id
    assert (again.prompt, again.sampling, again.salt) == (first.prompt, first.sampling, first.salt)
    assert again.generated == list(b"abc")
    assert again.credit == client.stream.choices[0].credit
    rig.admit(client.stream, cached=0)
    rig.play(client.stream, "def")
    rig.end(client.stream)
    assert client.text == "abcdef"
    assert [e["choices"][0]["delta"].get("content") for e in client.events[1:7]] == list("abcdef")
    assert client.events[-2]["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 6,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_only_choices_that_had_not_ended_are_tried_again() -> None:
    rig = Rig()
    client = rig.open(n=2)
    rig.end(client.stream, "stop", choice=0)
    lose(rig)
    come_back(rig)
    assert rig.engine.submitted[-1].sampling.choice_index == 1
    assert len(rig.engine.submitted) == 3


def test_a_detached_stream_comes_back_parked() -> None:
    rig = Rig()
    client = rig.open()
    rig.play(client.stream, "ab")
    client.leave()
    lose(rig)
    come_back(rig)
    assert rig.engine.submitted[-1].credit == 0
    again = Client(client.stream, cursor=client.reader.cursor)
    rig.play(client.stream, "cd")
    assert again.text == "cd"


def test_who_leaves_and_returns_while_there_is_no_engine_loses_nothing() -> None:
    rig = Rig(keys={"alice": 1})
    client = rig.open(key="alice")
    rig.play(client.stream, "ab")
    lose(rig)
    client.leave()
    rig.table.retake_slot(client.stream)
    again = Client(client.stream, cursor=client.reader.cursor)
    come_back(rig)
    rig.play(client.stream, "cd")
    assert again.text == "cd"


def test_a_cancel_while_there_is_no_engine_is_not_submitted_again() -> None:
    rig = Rig()
    client = rig.open()
    lose(rig)
    client.stream.finish(Outcome("cancelled"))
    come_back(rig)
    assert len(rig.engine.submitted) == 1


def test_a_request_present_at_two_deaths_is_not_tried_again() -> None:
    assert ENGINE_DEATHS_MAX == 2
    rig = Rig()
    old = rig.open()
    lose(rig)
    come_back(rig)
    young = rig.open()
    lose(rig)
    assert old.stream.outcome == Outcome("error", "the engine died", retriable=False)
    assert old.events[-2]["error"]["code"] == "error"
    assert young.stream.outcome is None
    come_back(rig)
    assert rig.engine.submitted[-1].prompt == young.stream.choices[0].prompt.tolist()


def test_engines_that_die_in_one_instant_are_one_death_to_a_stream() -> None:
    rig = Rig()
    first, second = rig.open(), rig.open()
    for client in (first, second):
        rig.admit(client.stream)
    for client in (first, second):
        (choice,) = client.stream.choices
        del rig.engine.live[choice.sequence_id]
        rig.table.on_engine_lost([choice.sequence_id])
        rig.clock.advance(REGROUP_S / 2)
    rig.clock.advance(REGROUP_S)
    assert [client.stream.deaths for client in (first, second)] == [1, 1]
    rig.play(first.stream, "a")
    rig.play(second.stream, "b")
    assert (first.text, second.text) == ("a", "b")


def test_an_engine_that_does_not_come_back_in_time_is_an_error() -> None:
    rig = Rig(engine_restart_wait_s=30)
    client = rig.open()
    lose(rig)
    rig.clock.advance(29)
    assert client.stream.outcome is None
    rig.clock.advance(1)
    assert client.stream.outcome is not None
    assert (client.stream.outcome.kind, client.stream.outcome.retriable) == ("error", True)
    come_back(rig)
    assert len(rig.engine.submitted) == 1


def test_the_wait_ends_with_the_engines_return() -> None:
    rig = Rig(engine_restart_wait_s=30)
    client = rig.open()
    lose(rig)
    rig.clock.advance(20)
    come_back(rig)
    rig.admit(client.stream)
    rig.clock.advance(20)
    assert client.stream.outcome is None


def test_without_waiting_a_death_is_an_error_at_once() -> None:
    rig = Rig(engine_restart_wait_s=0)
    client = rig.open()
    rig.play(client.stream, "ab")
    lose(rig)
    assert client.stream.outcome == Outcome("error", "the engine died", retriable=True)
    assert client.events[-1] == {"done": True}
    assert client.channel.finished == 1


def test_of_several_engines_one_dies_with_its_own_sequences_which_go_on_at_once() -> None:
    rig = Rig(credit_window=8)
    on_dead, on_other, both = rig.open(), rig.open(), rig.open(n=2)
    for client in (on_dead, on_other, both):
        rig.admit(client.stream)
    rig.play(on_dead.stream, "ab")
    rig.play(on_other.stream, "x")
    lost = [on_dead.stream.choices[0].sequence_id, both.stream.choices[1].sequence_id]
    for id_ in lost:
        del rig.engine.live[id_]
    before = len(rig.engine.submitted)
    rig.table.on_engine_lost(lost)
    rig.clock.advance(REGROUP_S)
    again = rig.engine.submitted[before:]
    assert [message.generated for message in again] == [list(b"ab"), []]
    assert rig.clock.pending == 0  # nothing waits for an engine, nor, once admitted, for a place in the batch
    rig.table.on_engine_ready()  # it is back: nobody needs it
    assert len(rig.engine.submitted) == before + 2
    rig.play(on_dead.stream, "c")
    rig.play(on_other.stream, "y")
    assert (on_dead.text, on_other.text) == ("abc", "xy")
    assert [client.stream.deaths for client in (on_dead, on_other, both)] == [1, 0, 1]
    rig.table.on_engine_lost([both.stream.choices[0].sequence_id])  # a second death beside it
    assert both.stream.outcome == Outcome("error", "the engine died", retriable=False)
    assert rig.engine.cancelled == [both.stream.choices[1].sequence_id]  # what it had elsewhere


# Steps


def test_a_step_may_name_sequences_that_are_gone() -> None:
    rig = Rig()
    client = rig.open()
    id_ = client.stream.choices[0].sequence_id
    client.stream.finish(Outcome("cancelled"))
    rig.table.on_step(rig.engine.tokens([(id_, 65), (999, 66)], End(id_, "length"), End(999, "stop")))
    rig.table.on_step(rig.engine.admit(id_, 999))
    assert (rig.metrics.generated_tokens, rig.metrics.discarded_tokens) == (0, 2)
    assert client.stream.outcome == Outcome("cancelled")


def test_the_time_to_the_first_token_is_known_though_it_is_the_last_one_too() -> None:
    rig = Rig()
    client = rig.open()
    rig.clock.advance(1.5)
    times: list[float] = []
    client.stream.on_finish.append(lambda: times.append(client.stream.first_token_at))
    seen: list[float] = []
    rig.table._log_access = lambda stream: seen.append(stream.first_token_at)
    id_ = client.stream.choices[0].sequence_id
    rig.table.on_step(rig.engine.tokens([(id_, 65)], End(id_, "length")))
    assert seen == times == [START_S + 1.5]


def test_latencies_are_observed_once_a_step_for_each_stream() -> None:
    rig = Rig()
    client = rig.open(n=2)
    rig.clock.advance(0.25)
    rig.admit(client.stream, waited_s=0.125)
    rig.clock.advance(0.25)
    ids = [choice.sequence_id for choice in client.stream.choices]
    for _ in range(3):
        rig.table.on_step(rig.engine.tokens([(id_, 65) for id_ in ids]))
        rig.clock.advance(0.1)
    client.stream.finish(Outcome("cancelled"))
    metrics = rig.metrics
    assert [
        (sum(h._counts), round(h._sum, 6)) for h in (metrics.queue, metrics.ttft, metrics.itl, metrics.request)
    ] == [
        (1, 0.125),  # as the engine measured it
        (1, 0.5),
        (2, 0.2),
        (1, 0.8),
    ]


def test_a_stream_that_missed_a_step_has_its_own_latency() -> None:
    rig = Rig()
    steady, late = rig.open(), rig.open()
    ids = [client.stream.choices[0].sequence_id for client in (steady, late)]
    for in_step in (ids, ids[:1], ids, ids):
        rig.table.on_step(rig.engine.tokens([(id_, 65) for id_ in in_step]))
        rig.clock.advance(0.1)
    itl = rig.metrics.itl
    assert (sum(itl._counts), round(itl._sum, 6)) == (5, 0.6)  # 0.1 four times, 0.2 over the missed step


def test_our_own_mistake_ends_its_stream_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    broken, other = rig.open(), rig.open()
    push = Choice.push

    def fail(choice: Choice, *args: object) -> bool:
        if choice.stream is broken.stream:
            raise RuntimeError("a slip")
        return push(choice, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Choice, "push", fail)
    ids = [client.stream.choices[0].sequence_id for client in (broken, other)]
    rig.table.on_step(rig.engine.tokens([(id_, 65) for id_ in ids]))
    assert broken.stream.outcome is not None
    assert broken.stream.outcome.kind == "error"
    assert "slip" not in broken.stream.outcome.message
    assert "a slip" in rig.faults[0][1]
    assert other.text == "A"


# What a step does to its readers


def together(rig: Rig, *clients: Client) -> list[int]:
    """The sequences of these streams, one step's."""
    return [choice.sequence_id for client in clients for choice in client.stream.choices]


def test_a_step_is_one_write_for_a_stream_however_many_choices_it_has() -> None:
    rig = Rig()
    one, several = rig.open(), rig.open(n=3)
    before = (one.channel.writes, several.channel.writes)
    rig.table.on_step(rig.engine.tokens([(id_, 65) for id_ in together(rig, one, several)]))
    assert (one.channel.writes, several.channel.writes) == (before[0] + 1, before[1] + 1)
    assert len(several.events) == 6


def test_steps_that_are_told_together_are_one_write_for_each_stream() -> None:
    rig = Rig()
    one, several, short = rig.open(), rig.open(n=2), rig.open()
    clients = (one, several, short)
    writes = [client.channel.writes for client in clients]
    short_id = short.stream.choices[0].sequence_id
    for number in range(3):
        ids = together(rig, one, several, *([short] if number < 2 else []))
        ends = [End(short_id, "length")] if number == 1 else []
        rig.table.on_step(rig.engine.tokens([(id_, 65 + number) for id_ in ids], *ends), number < 2)
        rig.clock.advance(0.1)
        assert [client.channel.writes for client in (one, several)] == [n + (number == 2) for n in writes[:2]]
        assert short.channel.writes == writes[2] + (number > 0)  # what ends has nothing to wait for
    assert (one.text, short.text, short.channel.finished) == ("ABC", "AB", 1)
    assert sum(event.text in b"ABC" for event in several.stream.log.slice(2, 8)) == 6
    rig.table.on_step(rig.engine.tokens([(id_, 68) for id_ in together(rig, one)]))
    assert (one.text, one.channel.writes) == ("ABCD", writes[0] + 2)
    itl = rig.metrics.itl
    assert (sum(itl._counts), round(itl._sum, 6)) == (6, 0.6)  # each step's, whenever it was written


def test_a_reader_of_steps_that_are_told_together_earns_its_credit() -> None:
    rig = Rig(credit_window=4)
    client = rig.open()
    id_ = client.stream.choices[0].sequence_id
    for number in range(4):
        rig.table.on_step(rig.engine.tokens([(id_, 65 + number)]), number < 3)
    assert (client.text, client.stream.choices[0].credit) == ("ABCD", 8)


def test_a_stop_string_in_steps_that_are_told_together_ends_the_stream_there() -> None:
    rig = Rig()
    client = rig.open(stops=("B",))
    id_ = client.stream.choices[0].sequence_id
    for number in range(4):
        rig.table.on_step(rig.engine.tokens([(id_, 65 + number)]), number < 3)
    assert (client.text, client.channel.finished) == ("A", 1)
    assert client.stream.outcome == Outcome("stop")


@pytest.mark.parametrize("by_token", [False, True])
def test_a_last_token_and_the_end_are_one_write(by_token: bool) -> None:
    rig = Rig()
    client, other = rig.open(), rig.open()
    ids = together(rig, client, other)
    before = client.channel.writes
    rig.table.on_step(rig.engine.tokens([(id_, 65) for id_ in ids], End(ids[0], "stop", by_token)))
    assert (client.channel.writes, client.channel.finished) == (before + 1, 1)
    assert (client.text, other.text) == ("" if by_token else "A", "A")
    assert client.stream.completion_tokens == 1


def test_a_client_that_goes_while_a_step_is_handled_loses_nothing_and_costs_nobody() -> None:
    """The write for one stream closes another's connection, before or behind it in the step."""
    rig = Rig()
    first, middle, last = rig.open(), rig.open(), rig.open()

    def write(data: bytes) -> None:
        first.leave()
        last.leave()
        middle.channel.data += data

    for client in (first, middle, last):
        rig.admit(client.stream)
    middle.channel.write = write  # type: ignore[method-assign]
    ids = together(rig, first, middle, last)
    rig.table.on_step(rig.engine.tokens([(id_, 65) for id_ in ids]))
    assert [client.stream.state for client in (first, middle, last)] == ["detached", "running", "detached"]
    assert (first.text, middle.text, last.text) == ("A", "A", "")
    back = Client(last.stream, last.reader.cursor)
    assert back.text == "A"
    assert rig.faults == []


def test_a_reader_that_takes_a_step_s_token_and_is_full_then_earns_no_credit() -> None:
    rig = Rig(credit_window=4)
    client = rig.open()
    write = client.channel.write

    def fill(data: bytes) -> None:
        write(data)
        client.stall()  # a short write: the transport is above its mark before it returns

    client.channel.write = fill  # type: ignore[method-assign]
    rig.table.on_step(rig.engine.tokens([(id_, 65) for id_ in together(rig, client)]))
    assert (client.text, rig.run_dry(client.stream)) == ("A", 3)
    client.go_on()
    assert client.text == "Aabc"


def test_a_reader_that_fails_is_cut_and_the_stream_goes_on_for_others() -> None:
    rig = Rig()
    broken, other = rig.open(), rig.open()
    beside = Client(broken.stream)

    class Broken(Ndjson):
        def one(self, event: Event, position: int) -> bytes:
            raise RuntimeError("a slip")

    broken.reader.framing = Broken(broken.stream)
    ids = [client.stream.choices[0].sequence_id for client in (broken, other)]
    for _ in range(2):
        rig.table.on_step(rig.engine.tokens([(id_, 65) for id_ in ids]))
    assert (broken.channel.cuts, broken.stream.readers) == (1, [beside.reader])
    assert beside.text == other.text == "AA"
    assert len(rig.faults) == 1


# Every order of events


class TableMachine(RuleBasedStateMachine):
    """Streams start, run, stall, leave, return, end, expire; the engine dies and returns. The sums must agree."""

    @initialize(
        window=st.integers(2, 8),
        ttl=st.sampled_from([0.0, 5.0, 30.0]),
        wait=st.sampled_from([0.0, 10.0]),
        log_bytes=st.sampled_from([500, 5000, 10**6]),
    )
    def begin(self, window: int, ttl: float, wait: float, log_bytes: int) -> None:
        self.rig = Rig(
            keys={"alice": 3, "bob": None},
            credit_window=window,
            resume_ttl_s=ttl,
            engine_restart_wait_s=wait,
            log_bytes=log_bytes,
            streams_max=6,
            queue_max=4,
            queue_timeout_s=20,
            request_timeout_s=60,
        )
        self.buckets = {name: StandingBucket(10**9, 0.0) for name in ("alice", "bob")}
        for name, bucket in self.buckets.items():
            self.rig.limiter._account(name).tokens = bucket
        self.clients: list[Client] = []
        self.streams: list[Stream] = []

    def _stream(self, data: st.DataObject) -> Stream | None:
        return data.draw(st.sampled_from(self.streams)) if self.streams else None

    def _client(self, data: st.DataObject) -> Client | None:
        return data.draw(st.sampled_from(self.clients)) if self.clients else None

    @rule(n=st.integers(1, 3), key=st.sampled_from(["alice", "bob"]), stops=st.sampled_from([(), ("b",), ("ab", "c")]))
    def start(self, n: int, key: str, stops: tuple[str, ...]) -> None:
        try:
            client = self.rig.open(n=n, key=key, stops=stops)
        except Busy:
            return
        self.clients.append(client)
        self.streams.append(client.stream)

    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        if stream := self._stream(data):
            self.rig.admit(stream, cached=1)

    @rule(text=st.text("abc", min_size=1, max_size=4))
    def steps(self, text: str) -> None:
        for char in text:
            self.rig.table.on_step(self.rig.engine.tokens([(id_, ord(char)) for id_ in self.rig.engine.runnable]))

    @rule(data=st.data(), reason=st.sampled_from(["stop", "length", "error"]))
    def end(self, data: st.DataObject, reason: str) -> None:
        if runnable := self.rig.engine.runnable:
            id_ = data.draw(st.sampled_from(runnable))
            tokens = [] if reason == "error" else [(id_, ord("x"))]
            self.rig.table.on_step(self.rig.engine.tokens(tokens, End(id_, reason)))

    @rule(data=st.data(), goes_on=st.booleans())
    def stall_or_go_on(self, data: st.DataObject, goes_on: bool) -> None:
        if client := self._client(data):
            if goes_on and client.reader in client.stream.readers:
                client.go_on()
            elif not goes_on:
                client.stall()

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if client := self._client(data):
            client.leave()

    @rule(data=st.data())
    def come_back_to(self, data: st.DataObject) -> None:
        client = self._client(data)
        if client is None or self.rig.table.find(client.stream.id, client.stream.key) is None:
            return
        try:
            self.rig.table.retake_slot(client.stream)
        except Busy:
            return
        self.clients.append(Client(client.stream, cursor=client.reader.cursor))

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if stream := self._stream(data):
            stream.finish(Outcome("cancelled", "asked for"))

    @rule(seconds=st.sampled_from([0.5, 4.0, 15.0, 31.0]))
    def wait(self, seconds: float) -> None:
        self.rig.clock.advance(seconds)

    @rule()
    def engine_dies_or_returns(self) -> None:
        if self.rig.engine.hello is None:
            come_back(self.rig)
        else:
            lose(self.rig)

    @invariant()
    def started_is_the_sum_of_ended_and_live(self) -> None:
        if not hasattr(self, "rig"):
            return
        metrics, table = self.rig.metrics, self.rig.table
        live = list(table.live)
        assert sum(metrics.started.values()) == len(self.streams) == sum(metrics.ended.values()) + len(live)
        assert set(live) == {stream for stream in self.streams if stream.outcome is None}
        assert Counter(self.rig.access) == Counter(stream for stream in self.streams if stream.outcome)
        assert not self.rig.faults

    @invariant()
    def slots_belong_to_live_streams_with_readers(self) -> None:
        if hasattr(self, "rig"):
            holding = Counter(s.key for s in self.rig.table.live if s.readers)
            assert holding == {name: n for name in self.buckets if (n := self.rig.limiter.streams(name))}

    @invariant()
    def the_engine_has_what_is_live_and_nothing_else(self) -> None:
        if not hasattr(self, "rig"):
            return
        table, engine = self.rig.table, self.rig.engine
        wanted = {c.sequence_id for s in table.live for c in s.live} if engine.hello else set()
        assert set(engine.live) == wanted == set(table._choices)
        queued = [c for c in table._choices.values() if not c.admitted]
        assert table._queued == len(queued)
        assert table._queued_of == Counter(choice.stream.key for choice in queued)

    @invariant()
    def buckets_lack_what_was_made_and_the_prompts_that_were_used(self) -> None:
        if not hasattr(self, "rig"):
            return
        for name, bucket in self.buckets.items():
            account = self.rig.limiter._account(name)
            account.settled_at = -math.inf
            account.settle(self.rig.clock())
            streams = [stream for stream in self.streams if stream.key == name]
            used = sum(stream.completion_tokens + stream.prompt_tokens for stream in streams)
            used -= sum(unused_tokens(stream) for stream in streams if stream.outcome)
            assert bucket.level == bucket.per_minute - used
            assert set(account.charged) == {s for s in streams if not s.outcome}

    @invariant()
    def credit_is_within_a_window_of_the_furthest_reader(self) -> None:
        if not hasattr(self, "rig"):
            return
        for stream in self.rig.table.live:
            for choice in stream.live:
                assert choice.credit <= len(choice.generated) + self.rig.limits.credit_window
                if not stream.readers:
                    assert choice.credit == 0

    @invariant()
    def the_logs_book_is_right(self) -> None:
        if not hasattr(self, "rig"):
            return
        table = self.rig.table
        held = [s for s in self.streams if table.find(s.id, s.key) is not None]
        assert table.logs.bytes == sum(stream.log.size for stream in held)
        assert table.logs.bytes <= self.rig.limits.log_bytes or not table._finished

    @invariant()
    def every_client_has_an_unbroken_part_of_its_stream(self) -> None:
        if not hasattr(self, "rig"):
            return
        for client in self.clients:
            assert client.channel.finished + client.channel.cuts <= 1
            if client.channel.finished and client.start < client.stream.log.end:
                assert client.events[-1] == {"done": True}
                assert client.stream.outcome is not None

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rig.clock.advance(1000)
        self.started_is_the_sum_of_ended_and_live()
        self.slots_belong_to_live_streams_with_readers()
        assert not list(self.rig.table.live)
        assert (self.rig.clock.pending, self.rig.table.logs.bytes) == (0, 0)


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
