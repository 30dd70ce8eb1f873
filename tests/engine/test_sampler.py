"""The sampler draws from the distribution that its filters leave, and each row by itself alone."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import catalog, cpu_ops
from engine.sampler import LOGPROB_MIN, Pick, Sampler, _invert, picked, uniform
from engine.sequence import Sampled, Sequence
from engine.wire import Sampling

EOS = 3
# The 1 - 1e-6 quantile of chi-square for 1 to 10 degrees of freedom: seeds are fixed, so a failure is a defect.
CHI_SQUARE_LIMIT = [23.9, 27.6, 30.7, 33.4, 35.9, 38.3, 40.5, 42.7, 44.8, 46.9]
DRAWS = 20_000


def sequence(generated: int = 0, **sampling: Any) -> Sequence:
    return Sequence(0, [0] * (1 + generated), 1, Sampling(max_tokens=10, **sampling), credit=10)


@pytest.fixture(scope="module")
def by_operator() -> Pick:
    library = cpu_ops.load(catalog.cache_folder().parent / "cpu-ops", lambda *_: None)
    return partial(picked, choose=library.draw)


def choose(logits: torch.Tensor, *sequences: Sequence) -> list[Sampled]:
    return Sampler([EOS]).choose(logits, list(sequences))


def tokens(logits: torch.Tensor, draws: int = DRAWS, **sampling: Any) -> list[int]:
    """Tokens from one row of logits, each with its own seed."""
    rows = [sequence(seed=seed, **sampling) for seed in range(draws)]
    return [answer.token for answer in choose(logits.expand(draws, -1), *rows)]


def assert_distributed(drawn: list[int], probabilities: dict[int, float]) -> None:
    assert set(drawn) == set(probabilities)
    assert sum(probabilities.values()) == pytest.approx(1)
    counts = np.bincount(drawn)
    statistic = sum((counts[each] - DRAWS * p) ** 2 / (DRAWS * p) for each, p in probabilities.items())
    assert statistic < CHI_SQUARE_LIMIT[max(len(probabilities) - 2, 0)]


# Ids in no order of probability: 4 is the likeliest, then 0, 2, 5, 1, 3.
PROBABILITIES = [0.2, 0.06, 0.18, 0.04, 0.4, 0.12]
LOGITS = torch.tensor(PROBABILITIES).log() + 2.5


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"top_k": 3}, [4, 0, 2]),
        ({"top_k": 6}, [0, 1, 2, 3, 4, 5]),
        ({"top_p": 0.7}, [4, 0, 2]),
        ({"top_p": 0.39}, [4]),
        ({"top_p": 1e-9}, [4]),
        ({"min_p": 0.29}, [4, 0, 2, 5]),
        ({"min_p": 1.0}, [4]),
        ({"top_k": 4, "top_p": 0.8}, [4, 0, 2]),  # top_k leaves 0.9; 0.72 of it is reached with 2
        ({"top_k": 5, "min_p": 0.4, "top_p": 0.9}, [4, 0, 2]),
    ],
)
def test_frequencies_match_the_filtered_distribution(sampling: dict[str, Any], kept: list[int]) -> None:
    total = sum(PROBABILITIES[each] for each in kept)
    assert_distributed(tokens(LOGITS, **sampling), {each: PROBABILITIES[each] / total for each in kept})


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_sharpens_and_flattens(temperature: float) -> None:
    powers = [p ** (1 / temperature) for p in PROBABILITIES]
    drawn = tokens(LOGITS, temperature=temperature)
    assert_distributed(drawn, {each: power / sum(powers) for each, power in enumerate(powers)})


@pytest.mark.parametrize(
    ("sampling", "kept"), [({"top_p": 0.6}, 1200), ({"top_k": 700}, 700), ({"top_k": 600, "top_p": 0.5}, 300)]
)
def test_filters_on_a_nearly_flat_vocabulary(sampling: dict[str, Any], kept: int) -> None:
    drawn = tokens(torch.linspace(0, 1e-3, 2000), draws=3000, **sampling)
    assert min(drawn) == pytest.approx(2000 - kept, abs=kept * 0.01)
    assert len(set(drawn)) > 0.85 * kept


@pytest.mark.parametrize("sampling", [{"top_k": 3}, {"top_p": 0.24}, {"top_k": 6, "top_p": 0.49}])
def test_among_equals_the_lower_ids_stay(sampling: dict[str, Any]) -> None:
    logits = torch.tensor([-5.0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1])
    assert set(tokens(logits, draws=500, **sampling)) == {1, 2, 3}


def test_greedy_takes_the_likeliest() -> None:
    logits = torch.randn(32, 1000, generator=torch.Generator().manual_seed(0))
    answers = choose(logits, *(sequence(temperature=0) for _ in range(32)))
    assert [answer.token for answer in answers] == logits.argmax(-1).tolist()


def test_a_tiny_temperature_is_greedy_and_a_huge_one_is_flat() -> None:
    assert set(tokens(LOGITS, temperature=1e-300)) == {4}
    assert_distributed(tokens(LOGITS, temperature=1e300), dict.fromkeys(range(6), 1 / 6))


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "seed": st.integers(0, 2**64 - 1),
                "temperature": st.sampled_from([0.0, 0.7, 1.0, 5.0]),
                "top_k": st.sampled_from([0, 1, 5, 64, 65, 600, 10**6]),
                "top_p": st.sampled_from([1.0, 0.999, 0.5, 0.01]),
                "min_p": st.sampled_from([0.0, 0.1, 1.0]),
                "choice_index": st.integers(0, 100),
                "logprobs": st.integers(-1, 3),
            }
        ),
        min_size=1,
        max_size=8,
    ),
    st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_a_row_never_depends_on_its_neighbours(samplings: list[dict[str, Any]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(samplings), 1500, generator=generator) * 3
    logits[0] = logits[0].round()  # ties
    rows = [sequence(index, **sampling) for index, sampling in enumerate(samplings)]
    together = choose(logits, *rows)
    for row, expected in zip(range(len(rows)), together, strict=True):
        (alone,) = choose(logits[row : row + 1], rows[row])
        assert alone.token == expected.token
        assert (alone.logprob is None) == (samplings[row]["logprobs"] < 0)


@given(
    samplings=st.lists(
        st.fixed_dictionaries(
            {
                "seed": st.integers(0, 2**64 - 1),
                "temperature": st.sampled_from([0.0, 1e-30, 0.3, 1.0, 5.0, 1e30]),
                "top_k": st.sampled_from([0, 0, 1, 5, 40, 600, 10**6]),
                "top_p": st.sampled_from([1.0, 1 - 2.0**-53, 0.999999, 0.95, 0.5, 0.25, 1e-9]),
                "min_p": st.sampled_from([0.0, 0.0, 1e-30, 0.1, 1.0]),
            }
        ),
        min_size=1,
        max_size=12,
    ),
    vocab=st.one_of(st.integers(1, 200), st.sampled_from([1500, 3000])),
    spread=st.sampled_from([0.0, 1e-7, 1e-3, 1.0, 4.0, 40.0]),
    ties=st.booleans(),
    banned=st.sampled_from([0.0, 0.5, 0.999, 1.0]),
    broken=st.sampled_from([None, math.nan, math.inf]),
    huge=st.booleans(),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=100, deadline=None)
def test_the_operator_chooses_the_very_tokens_that_torch_does(
    by_operator: Pick,
    samplings: list[dict[str, Any]],
    vocab: int,
    spread: float,
    ties: bool,
    banned: float,
    broken: float | None,
    huge: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(samplings), vocab, generator=generator) * spread
    if ties:
        logits = logits.round()
    logits[torch.rand(logits.shape, generator=generator) < banned] = -torch.inf
    if huge:
        logits[-1, vocab // 2] = 3e38
    if broken is not None:
        logits[len(samplings) // 2, seed % vocab] = broken
    rows = [sequence(index, **sampling) for index, sampling in enumerate(samplings)]
    expected = Sampler([]).choose(logits, rows)
    assert Sampler([], by_operator).choose(logits, rows) == expected
    if broken is not None:
        assert expected[len(samplings) // 2].error


@given(
    st.lists(st.sampled_from([0.0, 1e-38, 1e-9, 1 / 3, 1.0]), min_size=1, max_size=12),
    st.sampled_from([0.0, 2.0**-53, 0.5, 1 - 2.0**-53]),
)
@settings(deadline=None)
def test_a_token_of_no_weight_is_never_drawn(weights: list[float], chance: float) -> None:
    row = torch.tensor([[0.0, *weights, 1.0, 0.0]])
    column = int(_invert(row, torch.tensor([[chance]], dtype=torch.float64)))
    assert row[0, column] > 0
    before, total = row[0, :column].double().sum(), row.double().sum()
    assert before <= chance * total
    if chance == 0:
        assert before == 0


def test_small_changes_of_the_logits_leave_the_draw() -> None:
    """Two tokens of nearly equal probability that trade places must not trade the draw: ids order the distribution."""
    logits = torch.tensor([1.0, 1.0 + 1e-6, 1.0 - 1e-6, 0.5])
    for sampling in ({}, {"top_k": 3}, {"top_p": 0.95}):
        assert tokens(logits, **sampling) == tokens(logits[[1, 2, 0, 3]], **sampling)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_broken_row_is_an_error_of_its_own(bad: float, temperature: float) -> None:
    logits = torch.zeros(3, 10)
    logits[1, 4] = bad
    answers = choose(logits, *(sequence(temperature=temperature, logprobs=1, top_p=0.9) for _ in range(3)))
    assert [bool(answer.error) for answer in answers] == [False, True, False]
    assert answers[1].logprob is None


def test_no_finite_logit_is_an_error() -> None:
    logits = torch.full((1, 10), -math.inf)
    for temperature in (0.0, 1.0):
        assert choose(logits, sequence(temperature=temperature))[0].error


def test_min_tokens_bans_ends_until_there_are_enough() -> None:
    logits = torch.tensor([[0.0, 5.0, 0.0, 9.0, 7.0, 8.0]])
    ends = {"min_tokens": 3, "stop_ids": (5, 4, 99, -1), "temperature": 0.0}
    assert [choose(logits, sequence(generated, **ends))[0].token for generated in range(4)] == [1, 1, 1, EOS]
    drawn = choose(
        logits.expand(200, -1), *(sequence(seed=seed, **{**ends, "temperature": 3.0}) for seed in range(200))
    )
    assert {answer.token for answer in drawn} == {0, 1, 2}
    assert logits[0, EOS] == 9  # the caller's logits are left alone


def test_logprobs_are_of_the_raw_logits() -> None:
    expected = LOGITS.log_softmax(-1).tolist()
    rows = [
        sequence(temperature=0, logprobs=0),
        sequence(temperature=0.3, top_k=1, logprobs=3),
        sequence(temperature=0),
        sequence(temperature=0, min_tokens=5, stop_ids=(4,), logprobs=2),
    ]
    none, three, off, banned = (answer.logprob for answer in choose(LOGITS.expand(4, -1), *rows))
    assert none is not None and three is not None and banned is not None
    assert off is None
    assert (none.top_ids, none.top_logprobs) == ([], [])
    assert none.logprob == pytest.approx(expected[4])
    assert three.top_ids == [4, 0, 2]
    assert three.top_logprobs == pytest.approx([expected[each] for each in (4, 0, 2)])
    assert banned.top_ids == [4, 0]
    assert banned.logprob == pytest.approx(expected[0])


def test_the_logarithm_of_nothing_is_a_number() -> None:
    """JSON has no infinity."""
    logits = torch.tensor([[1.0, -math.inf, -math.inf]])
    (answer,) = choose(logits, sequence(temperature=0, logprobs=3))
    assert answer.logprob is not None
    assert answer.logprob.top_logprobs == [0.0, LOGPROB_MIN, LOGPROB_MIN]


def test_randomness_is_a_function_of_four_numbers() -> None:
    """With a known value: a change of it breaks every stream that goes on across an upgrade."""
    base = {"seed": 1, "prompt_index": 2, "choice_index": 3}
    variants = [base, base, {**base, "seed": 2}, {**base, "prompt_index": 3}, {**base, "choice_index": 2}]
    values = uniform([Sampling(max_tokens=1, **each) for each in variants], [4, 5, 4, 4, 4])
    assert len(set(values.tolist())) == 5
    assert values[0] == uniform([Sampling(max_tokens=1, **base)], [4])[0]
    assert values[0] == 0.8334472949893438


def test_uniform_numbers_are_uniform_and_uncorrelated() -> None:
    for axis in ("seed", "prompt_index", "choice_index", "generated"):
        count = DRAWS
        samplings = [Sampling(max_tokens=1, **({axis: each} if axis != "generated" else {})) for each in range(count)]
        values = uniform(samplings, list(range(count)) if axis == "generated" else [0] * count)
        assert values.min() >= 0 and values.max() < 1
        counts = np.bincount((values * 10).astype(int), minlength=10)
        assert ((counts - count / 10) ** 2 / (count / 10)).sum() < CHI_SQUARE_LIMIT[8]
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 5 / math.sqrt(count)


def test_the_largest_seed_fits() -> None:
    assert choose(LOGITS[None], sequence(seed=2**64 - 1, prompt_index=2**63, choice_index=2**64 - 1))[0].error == ""
