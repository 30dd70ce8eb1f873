"""The scheduler and the block pool together: the step's budget, turns, and credit."""

from __future__ import annotations

import pytest

from engine.block_pool import BlockPool
from engine.chunks import CHUNK_TOKENS_MIN
from engine.scheduler import Scheduler
from engine.sequence import PARKED, RUNNING, WAITING, Sequence
from tests.support.engines import expected
from tests.support.scheduling import BLOCK, Rig, numbers

# One rule for prefill, decode and resumption


def test_a_prompt_is_computed_in_chunks_of_the_budget_and_then_decodes() -> None:
    rig = Rig(step_tokens_max=9, blocks=32)
    rig.submit(numbers(20), max_tokens=2)
    steps = [[(s.start, s.count, s.sample) for s in rig.step()] for _ in range(4)]
    assert steps == [[(0, 9, False)], [(9, 9, False)], [(18, 2, True)], [(20, 1, True)]]
    assert not rig.live


def test_decodes_come_before_chunks_and_the_budget_holds_for_both() -> None:
    rig = Rig(step_tokens_max=9, blocks=64)
    decoding = [rig.submit([i]) for i in range(3)]
    rig.step()
    long = rig.submit(numbers(50))
    slices = rig.step()
    assert [part.sequence for part in slices[:3]] == decoding
    assert [part.count for part in slices] == [1, 1, 1, 6]
    assert slices[3].sequence is long


def test_prompts_in_progress_share_the_budget_and_take_turns() -> None:
    rig = Rig(step_tokens_max=2 * CHUNK_TOKENS_MIN, blocks=256)
    for start in range(3):
        rig.submit(numbers(300, start * 50), max_tokens=1)
    firsts = [[part.sequence.id for part in rig.step()] for _ in range(3)]
    assert all(len(step) == 2 for step in firsts)
    assert {ids[0] for ids in firsts} == {1000, 1001, 1002}


def test_the_budget_must_exceed_the_batch() -> None:
    with pytest.raises(ValueError, match="budget must exceed"):
        Scheduler(BlockPool(4, BLOCK), step_tokens_max=8, running_max=8)


def test_the_batch_is_never_larger_than_running_max() -> None:
    rig = Rig(running_max=2)
    for i in range(5):
        rig.submit([i], max_tokens=3)
    assert {len(rig.step()) for _ in range(6)} == {2}
    rig.run()
    assert not rig.live


def test_sequences_are_admitted_in_their_order() -> None:
    rig = Rig(blocks=4)
    big = rig.submit(numbers(15), max_tokens=1)
    bigger = rig.submit(numbers(15, 100), max_tokens=1)
    small = rig.submit([7], max_tokens=1)
    assert [part.sequence for part in rig.step()] == [big]
    assert [part.sequence for part in rig.step()] == [bigger]
    assert [part.sequence for part in rig.step()] == [small]


# Turns: readers that take tokens as fast as they come never park; ones that don't return to the queue again and again


def step_with_slow_readers(rig: Rig, slow: list[Sequence], steps: int, window: int = 2) -> None:
    """Every sequence that has used its credit up gets a window before the next step."""
    for _ in range(steps):
        rig.step()
        for sequence in slow:
            if sequence.state == PARKED:
                rig.scheduler.credit(sequence, sequence.generated + window)


def test_slow_readers_share_the_batch_evenly() -> None:
    rig = Rig(blocks=64, running_max=1)
    slow = [rig.submit([i], credit=2, max_tokens=1000) for i in range(4)]
    step_with_slow_readers(rig, slow, 20)  # the first of them go round once or twice before the last one's first turn
    before = [sequence.generated for sequence in slow]
    step_with_slow_readers(rig, slow, 80)
    assert [sequence.generated - was for sequence, was in zip(slow, before, strict=True)] == [20] * 4


def test_slow_readers_keep_no_new_request_out() -> None:
    rig = Rig(blocks=64, running_max=1)
    slow = [rig.submit([i], credit=2, max_tokens=1000) for i in range(5)]
    step_with_slow_readers(rig, slow, 20)
    new = [rig.submit([100 + i], max_tokens=1) for i in range(3)]
    step_with_slow_readers(rig, slow, 10)  # one of theirs, two steps long, between every two new ones
    assert not any(sequence.id in rig.live for sequence in new)


def test_new_requests_keep_no_returning_reader_waiting_for_more_than_one_of_them() -> None:
    rig = Rig(blocks=64, running_max=1)
    slow = rig.submit([1], credit=1, max_tokens=4)
    rig.step()
    new = [rig.submit([100 + i], max_tokens=1) for i in range(10)]
    rig.scheduler.credit(slow, 4)
    for _ in range(5):
        rig.step()
    assert slow.id not in rig.live
    assert sum(sequence.id in rig.live for sequence in new) == 8


def test_who_leaves_the_queue_for_a_while_keeps_the_place() -> None:
    rig = Rig(blocks=64, running_max=1)
    first, second, third = (rig.submit([i], max_tokens=2) for i in range(3))
    for _ in range(3):
        rig.scheduler.credit(second, 0)
        rig.scheduler.credit(second, 2)
    assert [rig.step()[0].sequence for _ in range(6)] == [first, first, second, second, third, third]


# Credit


def test_a_sequence_parks_at_its_credit_and_goes_on_without_computing_anything_twice() -> None:
    rig = Rig()
    sequence = rig.submit(numbers(6), credit=3, max_tokens=6)
    rig.run()
    assert (sequence.state, sequence.generated, sequence.computed) == (PARKED, 3, 8)
    rig.scheduler.credit(sequence, 6)
    rig.run()
    assert sequence.tokens[6:] == expected(numbers(6), 6)
    assert [entry for step in rig.runner.executed for entry in step][-3:] == [(1000, 8, 1), (1000, 9, 1), (1000, 10, 1)]


def test_credit_zero_gives_the_blocks_back_at_once_and_keeps_full_ones_in_the_cache() -> None:
    rig = Rig()
    sequence = rig.submit(numbers(6), max_tokens=20)
    for _ in range(4):
        rig.step()
    assert rig.pool.used == 3
    rig.scheduler.credit(sequence, 0)
    assert (rig.pool.used, rig.pool.cached) == (0, 2)
    assert rig.step() == []
    rig.scheduler.credit(sequence, 20)
    rig.run()
    assert sequence.tokens[6:] == expected(numbers(6), 20)


def test_a_sequence_without_credit_is_parked_from_the_start() -> None:
    rig = Rig()
    sequence = rig.submit([1], credit=0)
    assert sequence.state == PARKED
    assert rig.step() == []


def test_lowering_the_credit_parks_a_sequence_in_any_state() -> None:
    rig = Rig(running_max=1)
    running, waiting = rig.submit([1]), rig.submit([2])
    rig.step()
    assert (running.state, waiting.state) == (RUNNING, WAITING)
    rig.scheduler.credit(running, 1)
    rig.scheduler.credit(waiting, 0)
    assert (running.state, waiting.state) == (PARKED, PARKED)
    assert rig.step() == []
