"""A scheduler with its pool, and a runner whose tokens depend on all that went before and on what its KV cache really
holds."""

from __future__ import annotations

from typing import Any

from engine.block_pool import BlockPool
from engine.scheduler import Scheduler
from engine.sequence import RUNNING, Sequence, Slice
from engine.wire import Sampling
from tests.support.engines import ChainRunner

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
        """A new one in the scheduler, with ids from 1000 on."""
        tokens = prompt + (generated or [])
        id_ = max(self.live, default=999) + 1
        sequence = Sequence(id_, tokens, len(prompt), Sampling(max_tokens=max_tokens), credit, **fields)
        self.live[sequence.id] = sequence
        self.scheduler.add(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """It has ended, or nobody wants it any more."""
        self.scheduler.remove(sequence)
        del self.live[sequence.id]

    def step(self) -> list[Slice]:
        """One step of the engine; what was scheduled for it."""
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
        """What the core does with a token."""
        if sequence.tells_prompt:
            assert [each.index for each in sequence.prompt_logprobs] == list(range(1, sequence.prompt_len))
            sequence.prompt_logprobs = []
        sequence.tokens.append(token)
        if sequence.generated >= sequence.sampling.max_tokens or len(sequence.tokens) >= self.capacity:
            self.remove(sequence)
        elif sequence.generated >= sequence.credit:
            self.scheduler.credit(sequence, sequence.credit)

    def run(self, steps: int = 200) -> None:
        """Until nobody runs or waits."""
        for _ in range(steps):
            if not self.step() and not (self.scheduler.running or self.scheduler.waiting):
                return
        raise AssertionError(f"still running after {steps} steps")


def numbers(count: int, start: int = 0) -> list[int]:
    """A prompt, unlike one that starts elsewhere."""
    return [(start + i) % 256 for i in range(count)]
