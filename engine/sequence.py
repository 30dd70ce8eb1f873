"""What the scheduler, the block pool and the model runners know of one sequence, and of its part in a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from engine.block_pool import chain
from engine.wire import Logprob, Sampling

if TYPE_CHECKING:
    from engine.constraints import Constraint

WAITING, RUNNING, PARKED = "waiting", "running", "parked"


@dataclass(slots=True, eq=False)
class Sequence:
    """`computed` of its `tokens` have their keys and values in `blocks`; the scheduler's job is to close the gap."""

    id: int
    tokens: list[int]  # prompt, then generated ids
    prompt_len: int
    sampling: Sampling
    credit: int  # total of generated ids that it may reach
    salt: str = ""
    priority: int = 0  # lower goes first, among those of one salt
    submitted_at: float = 0.0  # by the core's clock
    owner: object = None  # which server it belongs to; the core's business
    runner_state: object = None  # what the runner keeps about it
    constraint: Constraint | None = None  # its place in its grammar
    state: str = WAITING
    computed: int = 0  # those of a step that is launched included
    flying: int = 0  # ids that launched steps draw and that nobody here knows yet; they count among neither
    blocks: list[int] = field(default_factory=list)  # block table: position p lies in blocks[p // block_size]
    hashes: list[bytes] = field(default_factory=list)  # chained hash of each full block of `tokens`, as far as known
    published: int = 0  # how many leading blocks the prefix cache knows
    tried: int = -1  # where its latest chunk started; equal to `computed`: the runner had no answer
    arrival: int = 0  # its place among those that wait; 0: it never did
    losses: int = 0  # how often it lost its place in the batch to others
    prompt_logprobs: list[Logprob] = field(default_factory=list)  # of prompt ids 1, 2, …, until they are told
    cached_tokens: int = -1  # prompt tokens found in the cache at first admission; -1: not admitted yet

    @property
    def generated(self) -> int:
        """How many ids were made so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def next_index(self) -> int:
        """Which of its generated ids the next step draws."""
        return self.generated + self.flying

    @property
    def tells_prompt(self) -> bool:
        """Whether its prompt's log probabilities are wanted, and not told yet."""
        return self.sampling.prompt_logprobs >= 0 and not self.generated

    @property
    def reusable(self) -> int:
        """How many leading ids need not be computed where their keys and values are known: not the last, whose logits
        choose the next id, nor those whose logits are the prompt's log probabilities, as far as they are missing."""
        last = len(self.tokens) - 1
        return min(last, len(self.prompt_logprobs)) if self.tells_prompt else last

    def name_blocks(self, count: int, size: int) -> None:
        """Extend the chained hashes to the first `count` blocks of `size` tokens."""
        while len(self.hashes) < count:
            start = len(self.hashes) * size
            before = self.hashes[-1] if self.hashes else self.salt.encode()
            self.hashes.append(chain(before, self.tokens[start : start + size]))


class Slice(msgspec.Struct, gc=False):  # one for each token: made in a third of a dataclass's time
    """One sequence's part in a step: positions start … start+count-1 are computed, and when `sample` is set they
    end at the last token, so that the next one is chosen from the last position's logits."""

    sequence: Sequence
    start: int
    count: int
    sample: bool

    @property
    def prompt_targets(self) -> range:
        """Places in the prompt whose log probabilities this part's logits tell, one behind each of the logits."""
        sequence = self.sequence
        if not sequence.tells_prompt:
            return range(0)
        start = max(self.start, len(sequence.prompt_logprobs))
        return range(start + 1, min(self.start + self.count, sequence.prompt_len - 1) + 1)


@dataclass(slots=True)
class Launched:
    """A step that a runner has begun. `answers` waits for it: one answer for each slice with `sample` set, in their
    order. `ahead`: the next step may be begun before that, with slices that start at ids which this one draws."""

    answers: Callable[[], list[Sampled | None]]
    ahead: bool


class Sampled(msgspec.Struct, gc=False):
    """A runner's answer for one slice with `sample` set."""

    token: int
    error: str = ""  # set: the sequence can't go on (its logits hold no finite number, say)
    finish: str = ""  # set: the runner itself ends the sequence with this reason (scripts only)
    by_token: bool = False  # with finish: `token` is an end token, which is no text
    logprob: Logprob | None = None  # its index is filled in by the core
