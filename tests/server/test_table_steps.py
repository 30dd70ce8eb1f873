"""A step in the table: whom it may name, what is measured, and one write for each of its readers, whatever they do."""

from __future__ import annotations

import pytest

from engine.wire import End
from server.framing import Ndjson
from server.log import Event
from server.outcome import Outcome
from server.stream import Choice
from tests.support.tables import START_S, Client, Rig

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
