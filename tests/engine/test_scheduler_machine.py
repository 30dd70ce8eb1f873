"""The scheduler and the block pool under every order of events.

The invariants are DESIGN section 1's: parking, preempting and finishing are one act; a detached sequence pins no
memory; running ahead, chunks and preemption never change a sequence.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.sequence import PARKED, RUNNING, Sequence, Slice
from engine.wire import Sampling
from tests.support.engines import expected, next_token
from tests.support.scheduling import BLOCK, Rig, numbers


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
