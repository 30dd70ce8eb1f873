"""A stream: its one outcome, its choices, its readers and the credit that they earn (DESIGN section 1)."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.wire import End, Logprob, Step
from server import outcome as outcomes
from server.framing import Plain
from server.outcome import SEVERITY, Outcome, worst
from server.readers import BURST_EVENTS
from server.stream import SHARED_CHARS_MAX, text_event
from tests.support.engines import EOS
from tests.support.tables import Client, Rig

CANCELLED = Outcome(outcomes.CANCELLED, "asked for")


def test_a_long_text_is_not_remembered() -> None:
    """A vocabulary's are; prompts that are echoed have no end."""
    token, prompt = "t" * SHARED_CHARS_MAX, "p" * (SHARED_CHARS_MAX + 1)
    assert text_event(0, token) is text_event(0, token)
    assert text_event(0, prompt) == text_event(0, prompt)
    assert text_event(0, prompt) is not text_event(0, prompt)
    assert text_event(1, prompt).choice == 1


# The life of a stream


def test_states_from_queued_to_finished() -> None:
    rig = Rig(credit_window=4)
    client = rig.open()
    stream = client.stream
    assert stream.state == "queued"
    rig.admit(stream)
    assert stream.state == "running"
    client.stall()
    rig.play(stream, "abcd")
    assert stream.state == "parked"
    client.leave()
    assert stream.state == "detached"
    Client(stream)
    assert stream.state == "running"
    rig.end(stream)
    assert stream.state == "finished"


@pytest.mark.parametrize("first", SEVERITY)
@pytest.mark.parametrize("second", SEVERITY)
def test_the_first_finish_wins(first: str, second: str) -> None:
    rig = Rig()
    client = rig.open()
    client.stream.finish(Outcome(first, "first"))
    client.stream.finish(Outcome(second, "second"))
    assert client.stream.outcome == Outcome(first, "first")
    assert rig.access == [client.stream]
    assert sum(rig.metrics.ended.values()) == rig.metrics.ended["chat", first] == 1
    assert client.channel.finished == 1


def test_finish_frees_everything() -> None:
    rig = Rig(keys={"alice": 1}, request_timeout_s=100)
    client = rig.open(key="alice", n=2)
    client.stream.finish(CANCELLED)
    assert sorted(rig.engine.cancelled) == [c.sequence_id for c in client.stream.choices]
    assert not rig.engine.live
    assert not list(rig.table.live)
    assert rig.limiter.streams("alice") == 0
    assert client.stream.readers == []
    assert rig.clock.pending == 1  # the log's own end
    rig.clock.advance(rig.limits.resume_ttl_s)
    assert rig.clock.pending == 0
    assert rig.table.logs.bytes == 0


def test_a_normal_end_is_not_cancelled_at_the_engine() -> None:
    rig = Rig()
    client = rig.open()
    rig.play(client.stream, "hi")
    rig.end(client.stream, "length")
    assert client.stream.outcome == Outcome("length")
    assert rig.engine.cancelled == []


def test_callbacks_on_finish_are_called_once() -> None:
    rig = Rig()
    stream = rig.start()
    calls: list[int] = []
    stream.on_finish.append(lambda: calls.append(1))
    stream.finish(CANCELLED)
    stream.finish(CANCELLED)
    assert calls == [1]


def test_the_last_frames_are_in_the_log_for_whoever_comes_back() -> None:
    rig = Rig()
    client = rig.open()
    rig.play(client.stream, "hi")
    client.leave()
    client.stream.finish(CANCELLED)
    late = Client(client.stream)
    assert late.events[-2]["error"]["code"] == "cancelled"
    assert late.events[-1] == {"done": True}
    assert late.channel.finished == 1


# Choices


def test_text_events_have_no_reason_and_the_reason_comes_alone() -> None:
    """D01."""
    rig = Rig()
    client = rig.open()
    rig.play(client.stream, "hi")
    rig.end(client.stream)
    shown = [(c["delta"], c["finish_reason"]) for e in client.events for c in e.get("choices", ())]
    assert shown == [
        ({"role": "assistant", "content": ""}, None),
        ({"content": "h"}, None),
        ({"content": "i"}, None),
        ({}, "stop"),
    ]


@pytest.mark.parametrize("reason", ["stop", "length", "tool_calls"])
def test_the_engines_reason_is_the_outcome(reason: str) -> None:
    rig = Rig()
    client = rig.open()
    rig.end(client.stream, reason)
    assert client.stream.outcome == Outcome(reason)


def test_an_engines_error_ends_the_stream_and_its_other_choices() -> None:
    rig = Rig()
    client = rig.open(n=2)
    rig.end(client.stream, "error", choice=0, message="no finite number")
    assert client.stream.outcome == Outcome("error", "no finite number")
    assert rig.engine.cancelled == [client.stream.choices[1].sequence_id]


@given(st.lists(st.sampled_from(["stop", "length", "tool_calls"]), min_size=1, max_size=4))
@settings(deadline=None, max_examples=30)
def test_with_several_choices_the_outcome_is_the_worst_and_comes_with_the_last(reasons: list[str]) -> None:
    rig = Rig()
    client = rig.open(n=len(reasons))
    for index, reason in enumerate(reasons):
        assert client.stream.outcome is None
        rig.end(client.stream, reason, choice=index)
    assert client.stream.outcome == Outcome(max(reasons, key=SEVERITY.index))
    shown = {c["index"]: c["finish_reason"] for e in client.events for c in e.get("choices", ()) if c["finish_reason"]}
    assert shown == dict(enumerate(reasons))


def test_severity_orders_all_outcomes() -> None:
    assert worst(["stop", "length"]) == "length"
    assert worst(["stop", "error", "length"]) == "error"
    assert worst(["expired", "cancelled"]) == "expired"


def test_an_end_token_counts_and_is_no_text() -> None:
    rig = Rig()
    client = rig.open()
    rig.play(client.stream, "hi")
    id_ = client.stream.choices[0].sequence_id
    rig.table.on_step(rig.engine.tokens([(id_, EOS)], End(id_, "stop", by_token=True)))
    assert client.text == "hi"
    assert client.events[-2]["usage"]["completion_tokens"] == 3


def test_a_held_tail_goes_out_before_the_reason() -> None:
    rig = Rig()
    client = rig.open(stops=("hit",))
    rig.play(client.stream, "hi")
    assert client.text == ""
    rig.end(client.stream, "length")
    assert client.text == "hi"


def test_a_character_that_max_tokens_cuts_is_shown_as_what_it_is() -> None:
    rig = Rig()
    client = rig.open()
    id_ = client.stream.choices[0].sequence_id
    rig.table.on_step(rig.engine.tokens([(id_, 0xF0)]))
    rig.table.on_step(rig.engine.tokens([(id_, 0x9F)], End(id_, "length")))
    assert client.text == "\ufffd"


def test_usage_counts_through_the_token_that_completes_the_stop_string_and_later_ones_are_discarded() -> None:
    rig = Rig()
    client = rig.open(stops=("b",))
    id_ = client.stream.choices[0].sequence_id
    rig.play(client.stream, "ab")
    assert client.stream.outcome == Outcome("stop")
    assert rig.engine.cancelled == [id_]
    for token in b"cd":
        rig.table.on_step(rig.engine.tokens([(id_, token)]))
    assert client.text == "a"
    assert client.events[-2]["usage"]["completion_tokens"] == 2
    assert (rig.metrics.generated_tokens, rig.metrics.discarded_tokens) == (2, 2)


def test_a_stop_string_and_the_engines_end_in_one_step_are_one_end() -> None:
    rig = Rig()
    client = rig.open(stops=("b",))
    id_ = client.stream.choices[0].sequence_id
    rig.table.on_step(rig.engine.tokens([(id_, ord("b"))], End(id_, "length")))
    assert client.stream.outcome == Outcome("stop")
    assert client.channel.finished == 1


def test_a_stop_string_ends_its_own_choice_only() -> None:
    rig = Rig()
    client = rig.open(n=2, stops=("b",))
    rig.play(client.stream, "ab", choice=0)
    rig.play(client.stream, "xyz", choice=1)
    assert client.stream.outcome is None
    rig.end(client.stream, "length", choice=1)
    assert client.stream.outcome == Outcome("length")
    assert client.stream.completion_tokens == 5


def test_prompts_are_counted_once_however_many_choices_they_have() -> None:
    rig = Rig()
    stream = rig.start(n=3, prompts=2)
    rig.admit(stream, cached=2)
    assert (stream.prompt_tokens, stream.cached_tokens) == (6, 4)


def test_cached_tokens_are_fixed_at_the_first_admission_and_never_exceed_the_prompt() -> None:
    """G04."""
    rig = Rig()
    client = rig.open()
    rig.admit(client.stream, cached=99)
    rig.admit(client.stream, cached=0)
    assert client.stream.cached_tokens == 3


def test_log_probabilities_ride_on_their_tokens() -> None:
    rig = Rig()
    client = rig.open()
    id_ = client.stream.choices[0].sequence_id
    step = rig.engine.tokens([(id_, 65)])
    best = Logprob(0, -0.5, [65], [-0.5])
    rig.table.on_step(Step(step.ids, step.tokens, [], [], [best], step.gauges))
    (shown,) = client.events[-1]["choices"][0]["logprobs"]["content"]
    assert (shown["token"], shown["bytes"], shown["logprob"]) == ("A", [65], -0.5)


# Credit


@pytest.mark.parametrize("window", [2, 3, 8, 64])
def test_the_engine_runs_a_window_ahead_of_a_reader_that_stops_and_no_further(window: int) -> None:
    rig = Rig(credit_window=window)
    client = rig.open()
    rig.play(client.stream, "ab")
    read = len(client.text)
    client.stall()
    rig.run_dry(client.stream)
    assert read < client.stream.completion_tokens <= read + window
    client.go_on()
    rig.run_dry(client.stream, steps_max=500)
    assert len(client.text) == client.stream.completion_tokens > 500


def test_a_reader_that_never_reads_costs_one_window() -> None:
    rig = Rig(credit_window=16)
    client = Client(rig.start(), reads=False)
    assert rig.run_dry(client.stream) == 16
    assert client.channel.data == b""


def test_credit_is_granted_in_halves_of_a_window() -> None:
    rig = Rig(credit_window=8)
    client = rig.open()
    rig.run_dry(client.stream, steps_max=40)
    totals = [total for _, total in rig.engine.credits]
    assert totals == list(range(12, 49, 4))


def test_each_choice_has_a_window_of_its_own() -> None:
    rig = Rig(credit_window=8)
    client = rig.open(n=2)
    client.stall()
    assert rig.run_dry(client.stream) == 8
    assert [len(choice.generated) for choice in client.stream.choices] == [8, 8]


def test_a_choice_that_ended_gets_no_more_credit() -> None:
    rig = Rig(credit_window=2)
    client = rig.open(n=2)
    rig.end(client.stream, "stop", choice=0)
    ended = client.stream.choices[0].sequence_id
    rig.engine.credits.clear()
    rig.play(client.stream, "abcdef", choice=1)
    assert ended not in {id_ for id_, _ in rig.engine.credits}


def test_the_furthest_reader_earns_the_credit_and_the_other_catches_up_from_the_log() -> None:
    rig = Rig(credit_window=4)
    fast = rig.open()
    slow = Client(fast.stream, reads=False)
    rig.run_dry(fast.stream, steps_max=100)
    assert len(fast.text) == 100
    assert slow.text == ""
    slow.go_on()
    assert slow.text == fast.text
    assert slow.channel.data == fast.channel.data


def test_a_reader_behind_earns_nothing_until_it_has_read_everything() -> None:
    rig = Rig(credit_window=4)
    client = Client(rig.start(), reads=False)
    rig.run_dry(client.stream)
    before = list(rig.engine.credits)
    client.stream.wake()
    assert rig.engine.credits == before
    client.go_on()
    assert len(rig.engine.credits) > len(before)


def test_a_write_that_fills_the_transport_earns_nothing_until_it_drains() -> None:
    rig = Rig(credit_window=2)
    client = rig.open()
    granted = len(rig.engine.credits)
    keep = client.channel.write

    def write(data: bytes) -> None:
        keep(data)
        client.stall()

    client.channel.write = write  # type: ignore[method-assign]
    rig.play(client.stream, "a")
    assert client.text == "a"
    assert len(rig.engine.credits) == granted
    client.go_on()
    assert len(rig.engine.credits) == granted + 1


# Readers


def test_a_late_reader_gets_the_log_in_bursts() -> None:
    rig = Rig(credit_window=2 * BURST_EVENTS)
    client = Client(rig.start(), reads=False)
    made = rig.run_dry(client.stream)
    client.go_on()
    assert client.channel.writes == -(-(made + 1) // BURST_EVENTS)
    assert len(client.text) == made


def test_a_burst_stops_when_the_transport_is_full() -> None:
    rig = Rig(credit_window=2 * BURST_EVENTS)
    client = Client(rig.start(), reads=False)
    rig.run_dry(client.stream)

    def write(data: bytes) -> None:
        client.channel.data += data
        client.stall()

    client.channel.write = write  # type: ignore[method-assign]
    client.go_on()
    assert client.reader.cursor == BURST_EVENTS


def test_a_reader_so_slow_that_its_events_are_gone_is_cut_and_the_fast_one_goes_on() -> None:
    rig = Rig(log_bytes_per_stream=2000)
    fast = rig.open()
    slow = Client(fast.stream, reads=False)
    rig.run_dry(fast.stream, steps_max=50)
    slow.go_on()
    assert (slow.channel.cuts, slow.channel.finished) == (1, 0)
    assert fast.stream.readers == [fast.reader]
    assert len(fast.text) == 50


@pytest.mark.parametrize("kind", SEVERITY)
def test_bare_text_is_cut_unless_it_is_whole(kind: str) -> None:
    """Plain text has no frame for an error, so its end must show one."""
    rig = Rig()
    stream = rig.start()
    client = Client(stream, framing=Plain(stream))
    stream.finish(Outcome(kind))
    success = kind in outcomes.SUCCESSES
    assert (client.channel.finished, client.channel.cuts) == (int(success), int(not success))


def test_a_reader_of_a_finished_stream_is_served_to_the_end_and_leaves() -> None:
    rig = Rig()
    first = rig.open()
    rig.play(first.stream, "hi")
    rig.end(first.stream)
    second = Client(first.stream)
    assert second.channel.data == first.channel.data
    assert first.stream.readers == []


def test_leaving_twice_changes_nothing() -> None:
    rig = Rig()
    client = rig.open()
    client.leave()
    client.leave()
    assert client.stream.state == "detached"


# Detaching and coming back


def test_the_last_reader_to_leave_parks_the_stream_at_once_and_gives_its_slot_back() -> None:
    rig = Rig(keys={"alice": 1})
    first = rig.open(key="alice")
    second = Client(first.stream)
    first.leave()
    assert first.stream.state == "queued"
    assert rig.limiter.streams("alice") == 1
    second.leave()
    assert first.stream.state == "detached"
    assert rig.engine.credits[-1] == (first.stream.choices[0].sequence_id, 0)
    assert rig.engine.runnable == []
    assert rig.limiter.streams("alice") == 0
    assert rig.engine.cancelled == []


def test_who_comes_back_within_the_ttl_goes_on_at_its_position() -> None:
    rig = Rig(resume_ttl_s=30, credit_window=8)
    first = rig.open()
    rig.admit(first.stream)
    rig.play(first.stream, "abc")
    first.leave()
    rig.clock.advance(29)
    rig.table.retake_slot(first.stream)
    second = Client(first.stream, cursor=first.reader.cursor)
    rig.clock.advance(1000 - 29)
    rig.play(first.stream, "def")
    rig.end(first.stream)
    whole = Client(first.stream)
    assert first.channel.data + second.channel.data == whole.channel.data
    assert whole.text == "abcdef"


def test_tokens_on_their_way_when_the_reader_left_are_kept() -> None:
    rig = Rig()
    client = rig.open()
    step = rig.engine.tokens([(client.stream.choices[0].sequence_id, 65)])
    client.leave()
    rig.table.on_step(step)
    assert Client(client.stream).text == "A"
    assert rig.metrics.discarded_tokens == 0


def test_who_does_not_come_back_is_cancelled_and_from_then_on_gone() -> None:
    rig = Rig(resume_ttl_s=30)
    client = rig.open()
    client.leave()
    rig.clock.advance(29.9)
    assert client.stream.outcome is None
    rig.clock.advance(0.2)
    assert client.stream.outcome is not None
    assert client.stream.outcome.kind == "cancelled"
    assert rig.table.find(client.stream.id, "") is None
    assert rig.table.was_dropped(client.stream.id, "")


def test_without_resuming_the_last_reader_cancels_at_once() -> None:
    rig = Rig(resume_ttl_s=0)
    client = rig.open()
    other = Client(client.stream)
    client.leave()
    assert client.stream.outcome is None
    other.leave()
    assert client.stream.outcome == Outcome("cancelled", "the client left")
    assert rig.engine.live == {}


def test_a_return_after_the_end_needs_no_slot_and_changes_nothing() -> None:
    rig = Rig(keys={"alice": 1})
    client = rig.open(key="alice")
    rig.end(client.stream)
    other = rig.open(key="alice")
    rig.table.retake_slot(client.stream)
    late = Client(client.stream)
    assert late.channel.finished == 1
    assert other.stream.outcome is None
    other.leave()
    assert rig.limiter.streams("alice") == 0


def test_the_state_of_a_stream_costs_one_call() -> None:
    """Every scrape of /metrics asks all of them, in one turn of the loop: nothing is called or made for a choice."""
    rig = Rig()
    streams = [rig.open(n=2).stream for _ in range(4)]
    for stream in streams[1:]:
        rig.admit(stream)
    rig.run_dry(streams[2])
    streams[3].readers[0].fail()
    calls: list[str] = []
    sys.setprofile(lambda frame, event, arg: calls.append(frame.f_code.co_name) if event == "call" else None)
    try:
        states = [stream.state for stream in streams]
    finally:
        sys.setprofile(None)
    assert states == ["queued", "running", "running", "detached"]
    assert [name for name in calls if name != "<listcomp>"] == ["state"] * 4
