"""An engine's death in the table: what goes on elsewhere, from where, and what is told when it can't."""

from __future__ import annotations

from server.outcome import Outcome
from server.table import ENGINE_DEATHS_MAX, REGROUP_S
from tests.support.tables import Client, Rig


def test_another_engine_goes_on_from_the_prompt_and_what_was_generated() -> None:
    rig = Rig(credit_window=8)
    client = rig.open()
    rig.admit(client.stream, cached=2)
    rig.play(client.stream, "abc")
    rig.lose_engine()
    rig.regain_engine()
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
    rig.lose_engine()
    rig.regain_engine()
    assert rig.engine.submitted[-1].sampling.choice_index == 1
    assert len(rig.engine.submitted) == 3


def test_a_detached_stream_comes_back_parked() -> None:
    rig = Rig()
    client = rig.open()
    rig.play(client.stream, "ab")
    client.leave()
    rig.lose_engine()
    rig.regain_engine()
    assert rig.engine.submitted[-1].credit == 0
    again = Client(client.stream, cursor=client.reader.cursor)
    rig.play(client.stream, "cd")
    assert again.text == "cd"


def test_who_leaves_and_returns_while_there_is_no_engine_loses_nothing() -> None:
    rig = Rig(keys={"alice": 1})
    client = rig.open(key="alice")
    rig.play(client.stream, "ab")
    rig.lose_engine()
    client.leave()
    rig.table.retake_slot(client.stream)
    again = Client(client.stream, cursor=client.reader.cursor)
    rig.regain_engine()
    rig.play(client.stream, "cd")
    assert again.text == "cd"


def test_a_cancel_while_there_is_no_engine_is_not_submitted_again() -> None:
    rig = Rig()
    client = rig.open()
    rig.lose_engine()
    client.stream.finish(Outcome("cancelled"))
    rig.regain_engine()
    assert len(rig.engine.submitted) == 1


def test_a_request_present_at_two_deaths_is_not_tried_again() -> None:
    assert ENGINE_DEATHS_MAX == 2
    rig = Rig()
    old = rig.open()
    rig.lose_engine()
    rig.regain_engine()
    young = rig.open()
    rig.lose_engine()
    assert old.stream.outcome == Outcome("error", "the engine died", retriable=False)
    assert old.events[-2]["error"]["code"] == "error"
    assert young.stream.outcome is None
    rig.regain_engine()
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
    rig.lose_engine()
    rig.clock.advance(29)
    assert client.stream.outcome is None
    rig.clock.advance(1)
    assert client.stream.outcome is not None
    assert (client.stream.outcome.kind, client.stream.outcome.retriable) == ("error", True)
    rig.regain_engine()
    assert len(rig.engine.submitted) == 1


def test_the_wait_ends_with_the_engines_return() -> None:
    rig = Rig(engine_restart_wait_s=30)
    client = rig.open()
    rig.lose_engine()
    rig.clock.advance(20)
    rig.regain_engine()
    rig.admit(client.stream)
    rig.clock.advance(20)
    assert client.stream.outcome is None


def test_without_waiting_a_death_is_an_error_at_once() -> None:
    rig = Rig(engine_restart_wait_s=0)
    client = rig.open()
    rig.play(client.stream, "ab")
    rig.lose_engine()
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
