"""The sampling kernel chooses as the engine's sampler does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.sampler import draw
from engine.wire import Sampling
from tests.cuda_on_cpu import checks
from tests.cuda_on_cpu.emulator import Emulated

VOCAB = 5_000
SETTINGS = [
    {},
    {"temperature": 0.3, "top_k": 40},
    {"temperature": 1.5, "top_p": 0.9},
    {"temperature": 1e-3, "top_p": 0.1},
    {"temperature": 0.9, "top_k": 300, "top_p": 0.95, "min_p": 0.01},
    {"temperature": 2.0, "top_k": 1},
    {"temperature": 1.0, "top_p": 0.0},
]


@pytest.mark.parametrize("ties", [False, True])
def test_choices_are_those_of_the_cpu(ties: bool) -> None:
    rng = np.random.default_rng(2)
    samplings = [
        Sampling(
            9, **{"temperature": 1.0, **each}, seed=int(rng.integers(0, 2**63)), prompt_index=number, choice_index=1
        )
        for number, each in enumerate(SETTINGS * 4)
    ]
    logits = (4 * rng.standard_normal((len(samplings), VOCAB))).astype(np.float32)
    if ties:
        logits = logits.round()
    generated = list(range(len(samplings)))
    draws = [
        checks.Draw(
            each.temperature,
            each.top_k if 0 < each.top_k < VOCAB else VOCAB,
            each.top_p,
            each.min_p,
            (each.seed, each.prompt_index, each.choice_index, index),
        )
        for each, index in zip(samplings, generated, strict=True)
    ]
    expected = draw(torch.from_numpy(logits.copy()), samplings, generated)
    assert checks.drawn(Emulated, logits, draws).tolist() == expected.tolist()
    assert len(set(expected.tolist())) > 10


def test_the_least_temperature_chooses_the_first_of_the_largest() -> None:
    logits = np.random.default_rng(3).standard_normal((8, VOCAB)).astype(np.float32)
    logits[:4] = logits[:4].round()
    greedy = [checks.Draw(1e-30, 1, 1.0, 0.0, (row, 0, 0, 0)) for row in range(len(logits))]
    assert checks.drawn(Emulated, logits, greedy).tolist() == logits.argmax(-1).tolist()


def test_a_row_without_a_usable_number_is_told() -> None:
    logits = np.zeros((5, 700), np.float32)
    logits[0, 650], logits[1, 3], logits[2] = np.nan, np.inf, -np.inf
    logits[3, :699] = -np.inf
    draws = [checks.Draw(1.0, 700, 1.0, 0.0, (1, 0, 0, 0))] * len(logits)
    assert checks.drawn(Emulated, logits, draws)[:4].tolist() == [-1, -1, -1, 699]
