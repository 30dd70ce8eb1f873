"""Who loses its blocks or its place when the pool is full, and that it goes on unchanged."""

from __future__ import annotations

from engine.priority import LOSSES_MAX
from engine.sequence import PARKED, RUNNING
from tests.support.engines import expected
from tests.support.scheduling import BLOCK, Rig, numbers


def test_the_latest_admitted_is_preempted_and_later_goes_on_unchanged() -> None:
    rig = Rig(blocks=6)
    first = rig.submit(numbers(8), max_tokens=12)
    second = rig.submit(numbers(8, 100), max_tokens=12)
    rig.run()
    assert rig.scheduler.preemptions > 0
    assert first.tokens[8:] == expected(numbers(8), 12)
    assert second.tokens[8:] == expected(numbers(8, 100), 12)


def test_parked_sequences_lose_their_blocks_before_a_running_one_does() -> None:
    rig = Rig(blocks=5)
    parked = rig.submit(numbers(8), credit=1, max_tokens=8)
    rig.run()
    running = rig.submit(numbers(8, 100), max_tokens=10)
    rig.run()
    assert running.tokens[8:] == expected(numbers(8, 100), 10)
    assert parked.blocks == []
    rig.scheduler.credit(parked, 8)
    rig.run()
    assert parked.tokens[8:] == expected(numbers(8), 8)


def test_sequences_that_wait_with_their_blocks_do_not_starve_the_one_in_front() -> None:
    """Two that were parked get credit in one message: each keeps blocks that the other needs to go on."""
    rig = Rig(blocks=4)
    both = [rig.submit(numbers(7, start), credit=2, max_tokens=6) for start in (0, 100)]
    rig.run()
    assert [len(sequence.blocks) for sequence in both] == [2, 2]
    for sequence in both:
        rig.scheduler.credit(sequence, 6)
    rig.run()
    assert [sequence.tokens[7:] for sequence in both] == [expected(numbers(7, start), 6) for start in (0, 100)]


def test_a_running_sequence_takes_the_blocks_of_one_that_waits() -> None:
    rig = Rig(blocks=4, running_max=1)
    waiting = rig.submit(numbers(7), credit=1, max_tokens=6)
    rig.run()
    running = rig.submit(numbers(7, 100), max_tokens=8)
    rig.step()
    rig.scheduler.credit(waiting, 6)
    rig.run()
    assert running.tokens[7:] == expected(numbers(7, 100), 8)
    assert waiting.tokens[7:] == expected(numbers(7), 6)


def test_the_latest_parked_loses_its_blocks_first_and_who_waits_to_go_on_last() -> None:
    rig = Rig(blocks=8, running_max=1)
    parked = [rig.submit(numbers(7, start), credit=1, max_tokens=9) for start in (0, 50, 100)]
    rig.run()
    rig.submit(numbers(3, 200), max_tokens=20)
    rig.step()
    rig.scheduler.credit(parked[2], 9)
    held: list[list[int]] = []
    while len(rig.live) == 4:
        now = [len(sequence.blocks) for sequence in parked]
        held += [now] if not held or held[-1] != now else []
        rig.step()
    assert held == [[2, 2, 2], [2, 0, 2], [0, 0, 2]]


def test_the_least_important_is_preempted_whenever_it_was_admitted() -> None:
    rig = Rig(blocks=6)
    low = rig.submit(numbers(8), max_tokens=12, priority=1)
    high = rig.submit(numbers(8, 100), max_tokens=12)
    rig.run()
    assert (low.losses > 0, high.losses) == (True, 0)
    assert low.tokens[8:] == expected(numbers(8), 12)
    assert high.tokens[8:] == expected(numbers(8, 100), 12)


def test_priorities_take_no_place_from_another_key() -> None:
    rig = Rig(blocks=6)
    first = rig.submit(numbers(8), max_tokens=12, salt="a", priority=1)
    second = rig.submit(numbers(8, 100), max_tokens=12, salt="b", priority=-1)
    rig.run()
    assert (first.losses, second.losses > 0) == (0, True)


def test_an_endless_stream_of_better_ones_that_need_its_blocks_starves_nobody() -> None:
    rig = Rig(blocks=6, running_max=3)
    low = rig.submit(numbers(3), max_tokens=8, priority=9)
    for turn in range(60):  # without an end to its losses it would be there for ever
        while len(rig.live) - (low.id in rig.live) < 3:
            rig.submit(numbers(6, (40 * turn + 7 * len(rig.live)) % 200 + 20), max_tokens=6)
        rig.step()
    assert low.id not in rig.live
    assert low.losses == LOSSES_MAX
    assert low.tokens[3:] == expected(numbers(3), 8)


def test_what_parked_sequences_hold_is_no_load() -> None:
    """The signal to scale on: their readers stalled, and their blocks are for whoever needs them."""
    rig = Rig(blocks=16, running_max=1)
    parked = rig.submit(numbers(8), credit=1)
    rig.step()
    running = rig.submit(numbers(12, start=50))
    rig.step()
    assert (parked.state, running.state) == (PARKED, RUNNING)
    gauges = rig.scheduler.gauges(0)
    assert gauges.blocks_used == len(parked.blocks) + len(running.blocks)
    assert gauges.running_tokens == len(running.blocks) * BLOCK
    rig.scheduler.credit(parked, 5)  # it is read again, and waits for the place with what it holds
    gauges = rig.scheduler.gauges(0)
    assert gauges.running_tokens == gauges.blocks_used * BLOCK
    assert gauges.waiting_tokens == len(parked.tokens) - parked.computed == 1


def test_a_pool_that_one_sequence_fills_serves_it_to_the_last_token() -> None:
    rig = Rig(blocks=3)
    sequence = rig.submit(numbers(2), max_tokens=100)
    rig.run()
    assert len(sequence.tokens) == rig.capacity
