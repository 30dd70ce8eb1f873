"""The scheduler and the block pool together, under every order of events, with a runner whose tokens depend on all
that went before and on what its KV cache really holds.

The invariants are DESIGN section 1's: parking, preempting and finishing are one act; a detached sequence pins no
memory; running ahead, chunks and preemption never change a sequence.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.block_pool import BlockPool
from engine.chunks import CHUNK_TOKENS_MIN
from engine.priority import LOSSES_MAX
from engine.scheduler import Scheduler
from engine.sequence import PARKED, RUNNING, WAITING, Sequence, Slice
from engine.wire import Sampling
from tests.support.engines import ChainRunner, expected, next_token

BLOCK = 4


class Rig:
    """A scheduler with its pool and runner, and the little that a core does."""

    def __init__(
        self, *, blocks: int = 16, step_tokens_max: int = 64, running_max: int = 8, block: int = BLOCK
    ) -> None:
        self.pool = BlockPool(blocks, block)
        self.scheduler = Scheduler(self.pool, step_tokens_max=step_tokens_max, running_max=running_max)
        self.runner = ChainRunner(blocks, block)
        self.capacity = blocks * block
        self.live: dict[int, Sequence] = {}
        self.computed_tokens = 0  # that the runner was asked for

    def submit(
        self,
        prompt: list[int],
        *,
        credit: int = 1000,
        max_tokens: int = 8,
        generated: list[int] | None = None,
        **fields: Any,
    ) -> Sequence:
        tokens = prompt + (generated or [])
        id_ = max(self.live, default=999) + 1
        sequence = Sequence(id_, tokens, len(prompt), Sampling(max_tokens=max_tokens), credit, **fields)
        self.live[sequence.id] = sequence
        self.scheduler.add(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        del self.live[sequence.id]

    def step(self) -> list[Slice]:
        slices = self.scheduler.schedule()
        assert all(part.sequence.state == RUNNING for part in slices)
        answers = iter(self.runner.execute(slices)) if slices else iter(())
        self.computed_tokens += sum(part.count for part in slices)
        for part in slices:
            answer = next(answers) if part.sample else None
            if part.sample and answer is None:
                continue  # not yet
            self.scheduler.computed(part)
            if answer is not None:
                self.append(part.sequence, answer.token)
        return slices

    def append(self, sequence: Sequence, token: int) -> None:
        if sequence.tells_prompt:  # the core's part
            assert [each.index for each in sequence.prompt_logprobs] == list(range(1, sequence.prompt_len))
            sequence.prompt_logprobs = []
        sequence.tokens.append(token)
        if sequence.generated >= sequence.sampling.max_tokens or len(sequence.tokens) >= self.capacity:
            self.remove(sequence)
        elif sequence.generated >= sequence.credit:
            self.scheduler.credit(sequence, sequence.credit)

    def run(self, steps: int = 200) -> None:
        for _ in range(steps):
            if not self.step() and not (self.scheduler.running or self.scheduler.waiting):
                return
        raise AssertionError(f"still running after {steps} steps")


def numbers(count: int, start: int = 0) -> list[int]:
    return [(start + i) % 256 for i in range(count)]


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


# Preemption


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


# Every order of events


class SchedulerMachine(RuleBasedStateMachine):
    """Tiny pools, shared prefixes, credit up, down and to nothing, cancels and steps, in any order."""

    @initialize(blocks=st.integers(2, 12), running_max=st.integers(1, 5), spare=st.integers(1, 20))
    def begin(self, blocks: int, running_max: int, spare: int) -> None:
        self.budget = running_max + spare
        self.rig = Rig(blocks=blocks, step_tokens_max=self.budget, running_max=running_max)
        self.known: list[Sequence] = []
        self.pauses = 0

    def _pick(self, data: st.DataObject) -> Sequence | None:
        live = list(self.rig.live.values())
        return data.draw(st.sampled_from(live)) if live else None

    @rule(
        family=st.integers(0, 1),
        length=st.integers(1, 30),
        credit=st.integers(0, 12),
        more=st.integers(1, 12),
        salt=st.sampled_from("ab"),
        priority=st.integers(-2, 2),
    )
    def submit(self, family: int, length: int, credit: int, more: int, salt: str, priority: int) -> None:
        """Of two keys, each with priorities."""
        prompt = numbers(min(length, self.rig.capacity - 1), family * 100)
        self._add(prompt, [], credit, more, salt=salt, priority=priority)

    @rule(length=st.integers(5, 30), count=st.integers(2, 4), credit=st.integers(1, 12), more=st.integers(1, 12))
    def submit_choices(self, length: int, count: int, credit: int, more: int) -> None:
        """Some that have the whole prompt in common."""
        for _ in range(count):
            self._add(numbers(min(length, self.rig.capacity - 1)), [], credit, more)

    @rule(data=st.data())
    def pause(self, data: st.DataObject) -> None:
        """The runner has no answer for it the next time."""
        if sequence := self._pick(data):
            self.rig.runner.answers[sequence.id] = None
            self.pauses += 1

    @rule(length=st.integers(1, 10), made=st.integers(0, 6), credit=st.integers(0, 12), more=st.integers(1, 12))
    def resubmit(self, length: int, made: int, credit: int, more: int) -> None:
        """As after another engine's death: some ids were made before, and are context now."""
        prompt = numbers(min(length, self.rig.capacity - 1))
        generated = expected(prompt, min(made, self.rig.capacity - 1 - len(prompt)))
        self._add(prompt, generated, credit, more)

    @rule(length=st.integers(1, 30), credit=st.integers(0, 12), more=st.integers(1, 12))
    def submit_with_prompt_logprobs(self, length: int, credit: int, more: int) -> None:
        """It shares its blocks, and takes up none whose logits it needs."""
        self._add(numbers(min(length, self.rig.capacity - 1)), [], credit, more, prompt_logprobs=1)

    def _add(
        self,
        prompt: list[int],
        generated: list[int],
        credit: int,
        more: int,
        prompt_logprobs: int = -1,
        **fields: Any,
    ) -> None:
        sampling = Sampling(max_tokens=len(generated) + more, prompt_logprobs=prompt_logprobs)
        sequence = Sequence(len(self.known), prompt + generated, len(prompt), sampling, credit, **fields)
        self.known.append(sequence)
        self.rig.live[sequence.id] = sequence
        self.rig.scheduler.add(sequence)

    @rule(tokens=st.integers(1, 25))
    def leave_prompts_less_beside_decodes(self, tokens: int) -> None:
        """As when steps took long."""
        self.rig.scheduler.chunks.beside = tokens

    @rule(data=st.data(), by=st.integers(-3, 8))
    def credit(self, data: st.DataObject, by: int) -> None:
        if sequence := self._pick(data):
            self.rig.scheduler.credit(sequence, max(0, sequence.generated + by))

    @rule(more=st.integers(1, 8))
    def credit_all(self, more: int) -> None:
        for sequence in list(self.rig.live.values()):
            self.rig.scheduler.credit(sequence, sequence.generated + more)

    @rule(data=st.data())
    def detach(self, data: st.DataObject) -> None:
        if sequence := self._pick(data):
            self.rig.scheduler.credit(sequence, 0)
            assert sequence.blocks == []

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if sequence := self._pick(data):
            self.rig.remove(sequence)
            assert sequence.blocks == []

    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            before = list(self.rig.live.values())
            stuck = {each for each in before if each.tried == each.computed}
            lengths = {each: len(each.tokens) for each in before}
            slices = self.rig.step()
            assert slices or not self.rig.scheduler.running
            self._no_block_is_computed_twice(slices, stuck, lengths)
            assert sum(part.count for part in slices) <= self.budget
            assert len({part.sequence for part in slices}) == len(slices)
            assert all(part.count > 0 for part in slices)

    def _no_block_is_computed_twice(self, slices: list[Slice], stuck: set[Sequence], lengths: dict[Any, int]) -> None:
        """In one step, save by those that had no answer; decodes, which have no prompt to wait for, stand apart."""
        names: list[bytes] = []
        for part in slices:
            sequence, end = part.sequence, part.start + part.count
            if part.count > 1 and sequence not in stuck and sequence.sampling.prompt_logprobs < 0:
                full = min(-(-end // BLOCK), (lengths[sequence] - 1) // BLOCK)
                names += sequence.hashes[part.start // BLOCK : full]
        assert len(set(names)) == len(names)

    @invariant()
    def blocks_are_owned_as_the_tables_say(self) -> None:
        if not hasattr(self, "rig"):
            return
        pool = self.rig.pool
        held = Counter(block for s in self.rig.live.values() for block in s.blocks)
        assert all(len(set(s.blocks)) == len(s.blocks) for s in self.rig.live.values())
        assert list(pool._references) == [held[block] for block in range(pool.blocks)]
        assert pool.used == len(held)
        assert not set(pool._cached) & held.keys()
        assert not set(pool._free) & (held.keys() | pool._cached.keys())

    @invariant()
    def states_are_true(self) -> None:
        if not hasattr(self, "rig"):
            return
        scheduler = self.rig.scheduler
        places = Counter([*scheduler.waiting, *scheduler.running, *scheduler.parked])
        assert set(places) == set(self.rig.live.values())
        assert set(places.values()) <= {1}
        assert len(scheduler.running) <= scheduler.running_max
        for sequence in places:
            out_of_credit = sequence.generated >= sequence.credit
            assert (sequence.state == PARKED) == out_of_credit
            assert sequence.computed < len(sequence.tokens)
            assert not sequence.tells_prompt or sequence.computed <= len(sequence.prompt_logprobs)
            assert len(sequence.blocks) * BLOCK >= sequence.computed
        assert set(scheduler._idle) == {s for s in places if s.blocks and s.state != RUNNING}

    @invariant()
    def cached_blocks_hold_what_their_names_say(self) -> None:
        if not hasattr(self, "rig"):
            return
        for sequence in self.known:
            for name in sequence.hashes:
                block = self.rig.pool._block_of.get(name)
                if block is not None:
                    start = sequence.hashes.index(name) * BLOCK
                    slots = self.rig.runner.slots[block * BLOCK : (block + 1) * BLOCK]
                    assert slots == sequence.tokens[start : start + BLOCK]

    @invariant()
    def sequences_are_what_they_would_be_alone(self) -> None:
        if hasattr(self, "rig"):
            for sequence in self.known:
                for at in range(sequence.prompt_len, len(sequence.tokens)):
                    assert sequence.tokens[at] == next_token(sequence.tokens[:at])

    def teardown(self) -> None:
        """Whatever was left gets all the credit that it needs, and ends within as many steps as there are tokens."""
        if not hasattr(self, "rig"):
            return
        for sequence in list(self.rig.live.values()):
            self.rig.scheduler.credit(sequence, 1000)
        steps_max = (
            sum(2 * len(s.tokens) + 2 * s.sampling.max_tokens for s in self.rig.live.values()) + 10 + self.pauses
        )
        for _ in range(steps_max):
            self.rig.step()
        assert not self.rig.live
        pool = self.rig.pool
        assert (pool.used, pool.available) == (0, pool.blocks)
        self.sequences_are_what_they_would_be_alone()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
