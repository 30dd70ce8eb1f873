"""What sequences share in the scheduler: the prefix cache (E11), and one prefill for all that come with one prompt."""

from __future__ import annotations

from typing import Any

import pytest

from engine.sequence import PARKED, Sequence
from engine.wire import Sampling
from tests.support.engines import expected
from tests.support.scheduling import Rig, numbers

# The prefix cache (E11)


def test_only_wholly_computed_blocks_are_shared() -> None:
    rig = Rig(step_tokens_max=10)
    prompt = numbers(14)
    first = rig.submit(prompt, max_tokens=1)
    rig.step()  # 10 tokens: two blocks and a half
    rig.remove(first)
    assert rig.pool.cached == 2
    second = rig.submit(prompt, max_tokens=4)
    rig.run()
    assert second.cached_tokens == 8
    assert second.tokens[14:] == expected(prompt, 4)


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    rig = Rig()
    prompt = numbers(8)
    rig.submit(prompt, max_tokens=1)
    rig.run()
    again = rig.submit(prompt, max_tokens=1)
    slices = rig.step()
    assert (again.cached_tokens, slices[0].start, slices[0].count) == (4, 4, 4)


def test_sequences_with_different_salts_share_nothing() -> None:
    rig = Rig()
    first = rig.submit(numbers(9), max_tokens=1)
    rig.run()
    second = Sequence(1, numbers(9), 9, Sampling(max_tokens=1), credit=1, salt="another key")
    rig.live[1] = second
    rig.scheduler.add(second)
    rig.run()
    assert (first.cached_tokens, second.cached_tokens) == (0, 0)


def test_cached_tokens_are_fixed_at_the_first_admission() -> None:
    rig = Rig(blocks=8)
    sequence = rig.submit(numbers(9), max_tokens=20, credit=5)
    rig.run()
    assert (sequence.state, sequence.generated, sequence.cached_tokens) == (PARKED, 5, 0)
    rig.scheduler.credit(sequence, 0)
    rig.scheduler.credit(sequence, 20)
    rig.run()
    assert sequence.cached_tokens == 0
    assert rig.scheduler.admitted == [sequence]


def test_a_resubmitted_sequence_counts_no_more_cached_tokens_than_its_prompt_has() -> None:
    rig = Rig()
    prompt = numbers(5)
    rig.submit(prompt, max_tokens=9)
    rig.run()
    again = rig.submit(prompt, max_tokens=12, generated=expected(prompt, 8))
    rig.run()
    assert again.cached_tokens == 5  # 12 tokens were found in the cache
    assert again.tokens[5:] == expected(prompt, 12)


# One prefill for all that come with the same prompt

CHOICES, LENGTH, LARGE = 8, 200, 16
SHARED, TAIL = 192, 8  # full blocks of LENGTH, and the rest


@pytest.mark.parametrize("budget", [65, 100, 256, 2000])
def test_choices_of_one_prompt_compute_it_once_and_each_its_tail(budget: int) -> None:
    rig = Rig(blocks=200, block=LARGE, step_tokens_max=budget)
    prompt = numbers(LENGTH)
    choices = [rig.submit(prompt, max_tokens=4) for _ in range(CHOICES)]
    rig.run()
    assert rig.computed_tokens == SHARED + CHOICES * (TAIL + 3)  # the last token of each is never computed
    assert all(each.tokens[LENGTH:] == expected(prompt, 4) for each in choices)


def test_a_prompt_that_goes_another_way_computes_only_from_there() -> None:
    rig = Rig(blocks=200, block=LARGE, step_tokens_max=65)
    prompts = [numbers(100) + numbers(100, start) for start in (0, 50, 150)]
    for prompt in prompts:
        rig.submit(prompt, max_tokens=1)
    rig.run()
    assert rig.computed_tokens == 3 * LENGTH - 2 * 96  # six blocks of the first 100


def test_a_prompt_that_comes_later_joins_where_the_first_one_is() -> None:
    rig = Rig(blocks=200, block=LARGE, step_tokens_max=65)
    prompt = numbers(LENGTH)
    rig.submit(prompt, max_tokens=1)
    rig.step()
    late = rig.submit(prompt, max_tokens=1)
    rig.run()
    assert (late.cached_tokens, rig.computed_tokens) == (64, LENGTH + TAIL)


def test_what_was_shared_is_held_once() -> None:
    rig = Rig(blocks=200, block=LARGE, step_tokens_max=256)
    for _ in range(CHOICES):
        rig.submit(numbers(LENGTH), max_tokens=50)
    rig.step()
    rig.step()
    assert rig.pool.used == SHARED // LARGE + CHOICES


def test_others_pass_while_choices_wait() -> None:
    rig = Rig(blocks=200, block=LARGE, step_tokens_max=130)
    for _ in range(CHOICES - 1):
        rig.submit(numbers(LENGTH), max_tokens=1)
    short = rig.submit([1, 2, 3], max_tokens=1)
    rig.step()
    assert short.id not in rig.live


@pytest.mark.parametrize("leave", [Rig.remove, lambda rig, leader: rig.scheduler.credit(leader, 0)])
def test_when_the_one_that_computes_leaves_another_goes_on(leave: Any) -> None:
    rig = Rig(blocks=200, block=LARGE, step_tokens_max=70)
    prompt = numbers(LENGTH)
    leader, *others = [rig.submit(prompt, max_tokens=2) for _ in range(3)]
    rig.step()
    leave(rig, leader)
    rig.run()
    assert all(each.tokens[LENGTH:] == expected(prompt, 2) for each in others)
    assert rig.computed_tokens <= SHARED + LARGE + 2 * (TAIL + 1)  # at most its unfinished block again


def test_nobody_waits_for_one_that_has_no_answer_yet() -> None:
    """A scripted pause holds up its own sequence and no other."""
    rig = Rig(blocks=200, block=LARGE, step_tokens_max=2000)
    prompt = numbers(LENGTH)
    paused, other = rig.submit(prompt, max_tokens=1), rig.submit(prompt, max_tokens=1)
    rig.runner.answers[paused.id] = None
    rig.step()
    rig.runner.answers[paused.id] = None
    rig.step()
    assert other.id not in rig.live
    assert paused.id in rig.live
    rig.run()
    assert paused.tokens[LENGTH:] == expected(prompt, 1)
