"""The checks of the kernels catch a barrier or a bound test that is missing."""

from __future__ import annotations

import os
import random

import pytest

from tests.cuda_on_cpu.mutate import Mutant, caught_by, mutants

DRAWN = 10  # of all; `python -m tests.cuda_on_cpu.mutate` tries every one
SEED = int(os.environ.get("SLUICE_MUTATION_SEED", random.randrange(10**6)))


def drawn() -> list[Mutant]:
    return random.Random(SEED).sample(mutants(), DRAWN)


@pytest.mark.parametrize("number", range(DRAWN))
def test_a_mutant_is_caught(number: int) -> None:
    mutant = drawn()[number]
    print(f"SLUICE_MUTATION_SEED={SEED}")
    assert caught_by(mutant), f"{mutant} is not caught (SLUICE_MUTATION_SEED={SEED})"


def test_every_kind_of_mutant_is_known() -> None:
    texts = [mutant.text for mutant in mutants()]
    assert {"__syncthreads();", "__syncwarp();", "wait_for_copies<1>();"} <= set(texts)
    assert sum(text.startswith("inside(") for text in texts) >= 15
