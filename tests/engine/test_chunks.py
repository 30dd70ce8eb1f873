"""How prompts share a step's budget, and what they have of it beside decodes, by scripted times.

The sharing by turns and the budget are in test_scheduler.py, all orders of events in test_scheduler_machine.py; that no
cut changes a text is in test_text_identity.py.
"""

from __future__ import annotations

import pytest

from engine.block_pool import BlockPool
from engine.chunks import CHUNK_TOKENS_MIN, DECODES_MAX, Chunks
from engine.core import Core
from engine.scheduler import Scheduler
from engine.sequence import Sampled, Sequence, Slice
from engine.wire import Sampling, Step, Submit
from tests.support.clock import Clock
from tests.support.engines import ChainRunner

BUDGET, LIMIT_S = 256, 0.1


def prompt(tokens: int) -> Sequence:
    return Sequence(1, [0] * tokens, tokens, Sampling(8), 8)


def step(decodes: int, tokens: int) -> list[Slice]:
    """The parts of a step as far as their lengths go."""
    return [Slice(prompt(1), 0, 1, True)] * decodes + [Slice(prompt(tokens), 0, tokens, False)] * bool(tokens)


def chunk(chunks: Chunks, decodes: int) -> int:
    """How many tokens of a long prompt the next step computes."""
    (part,) = chunks.cut([prompt(8192)], decodes)
    return part.count


def test_a_step_without_decodes_has_the_whole_budget_however_slow() -> None:
    chunks = Chunks(BUDGET, LIMIT_S)
    chunks.took(step(0, 256), seconds=9.0)
    assert chunk(chunks, decodes=0) == BUDGET


@pytest.mark.parametrize(("tokens", "seconds", "next_"), [(256, 0.2, 128), (128, 0.1, 128), (100, 0.05, 200)])
def test_beside_decodes_a_chunk_is_what_fits_the_limit(tokens: int, seconds: float, next_: int) -> None:
    chunks = Chunks(BUDGET, LIMIT_S)
    chunks.took(step(3, tokens), seconds)
    assert chunk(chunks, decodes=3) == next_


def test_a_machine_that_is_fast_enough_cuts_no_chunk() -> None:
    chunks = Chunks(BUDGET, LIMIT_S)
    chunks.took(step(3, 253), seconds=0.09)
    assert chunk(chunks, decodes=3) == BUDGET - 3


def test_prompts_go_on_by_a_least_chunk_on_the_slowest_machine() -> None:
    chunks = Chunks(BUDGET, LIMIT_S)
    chunks.took(step(3, 256), seconds=60.0)
    assert chunk(chunks, decodes=3) == CHUNK_TOKENS_MIN


def test_where_decodes_alone_take_long_prompts_have_two_thirds_of_the_time() -> None:
    chunks = Chunks(BUDGET, LIMIT_S)
    chunks.took(step(32, 0), seconds=0.2)
    chunks.took(step(32, 200), seconds=DECODES_MAX * 0.2 * 2)
    assert chunk(chunks, decodes=32) == 100


def test_what_is_left_of_a_prompt_tells_nothing() -> None:
    chunks = Chunks(BUDGET, LIMIT_S)
    chunks.took(step(3, CHUNK_TOKENS_MIN - 1), seconds=5.0)
    assert chunk(chunks, decodes=3) == BUDGET - 3


def test_without_a_limit_and_without_time_nothing_changes() -> None:
    for chunks, seconds in ((Chunks(BUDGET), 5.0), (Chunks(BUDGET, LIMIT_S), 0.0)):
        chunks.took(step(3, 253), seconds)
        assert chunk(chunks, decodes=3) == BUDGET - 3


class SlowRunner(ChainRunner):
    """Whose steps take time as a small model's on two slow cores."""

    clock: Clock
    STEP_S, DECODE_S, TOKEN_S = 0.005, 0.002, 0.00125

    def execute(self, slices: list[Slice]) -> list[Sampled | None]:
        tokens = sum(part.count for part in slices if part.count > 1)
        decodes = sum(part.count == 1 for part in slices)
        self.clock.advance(self.STEP_S + self.DECODE_S * decodes + self.TOKEN_S * tokens)
        return super().execute(slices)


def test_a_prompt_of_8000_tokens_holds_no_stream_up_for_longer_and_a_short_one_passes_it() -> None:
    pool, clock = BlockPool(1024, 16), Clock()
    runner = SlowRunner(1024, 16, context=16_000)
    runner.clock = clock
    scheduler = Scheduler(pool, step_tokens_max=BUDGET, running_max=32, beside_s=LIMIT_S)
    core = Core(runner, pool, scheduler, version="test", clock=clock)
    times: dict[int, list[float]] = {id_: [] for id_ in range(10)}

    def take(sent: Step) -> None:
        for id_ in sent.ids:
            times[id_].append(clock.now)

    peer = core.join(take)
    for id_ in range(8):
        core.receive(peer, Submit(id_, [id_] * 128, Sampling(400), 400))
    while not all(times[id_] for id_ in range(8)):
        core.step()
    began = clock.now
    core.receive(peer, Submit(8, [9] * 8000, Sampling(1), 1))
    core.step()
    core.receive(peer, Submit(9, [10] * 60, Sampling(1), 1))
    while not times[8]:
        core.step()
    gaps = [b - a for id_ in range(8) for a, b in zip(times[id_], times[id_][1:], strict=False) if b > began]
    assert max(gaps) < 1.1 * LIMIT_S  # a whole budget is 0.34 s
    assert times[9][0] - began < 5 * LIMIT_S
    assert times[8][0] - began < 1.4 * 8000 * SlowRunner.TOKEN_S
