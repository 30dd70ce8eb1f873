"""Bias and penalties against the plain formulas of OpenAI and vLLM, one id at a time, and that nothing but a sequence's
own ids decides them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.penalties import _IDS_INITIAL, adjust, is_adjusted
from engine.sampler import Sampler
from engine.sequence import Sequence
from engine.wire import Sampling

VOCAB = 12
EOS = 3
IDS = st.integers(0, VOCAB - 1)


def sequence(prompt: list[int], generated: list[int], **sampling: Any) -> Sequence:
    return Sequence(0, prompt + generated, len(prompt), Sampling(max_tokens=99, **sampling), credit=99)


def plain(logits: list[float], each: Sequence) -> list[float]:
    """OpenAI's and vLLM's formulas, in float32."""
    sampling = each.sampling
    out = [np.float32(x) for x in logits]
    for id_, value in sampling.logit_bias:
        out[id_] += np.float32(value)
    generated = each.tokens[each.prompt_len :]
    for id_ in set(each.tokens):
        factor = np.float32(sampling.repetition_penalty)
        out[id_] = out[id_] / factor if out[id_] > 0 else out[id_] * factor
        out[id_] -= np.float32(sampling.frequency_penalty) * np.float32(generated.count(id_))
        out[id_] -= np.float32(sampling.presence_penalty) * np.float32(id_ in generated)
    return [float(x) for x in out]


SEQUENCES = st.lists(
    st.builds(
        sequence,
        st.lists(IDS, min_size=1, max_size=20),
        st.lists(IDS, max_size=20),
        frequency_penalty=st.sampled_from([0.0, 0.5, -2.0]),
        presence_penalty=st.sampled_from([0.0, 1.5, -1.0]),
        repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
        logit_bias=st.dictionaries(IDS, st.floats(-100, 100, width=32), max_size=4).map(lambda x: tuple(x.items())),
    ),
    min_size=1,
    max_size=5,
)


@settings(deadline=None)
@given(SEQUENCES, st.integers(0, 2**32))
def test_each_row_gets_what_the_formulas_say(sequences: list[Sequence], seed: int) -> None:
    logits = torch.randn(len(sequences) + 1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 5
    rows = [len(sequences) - i for i in range(len(sequences))]  # in no particular order, and row 0 is left alone
    expected = logits.clone()
    for row, each in zip(rows, sequences, strict=True):
        expected[row] = torch.tensor(plain(logits[row].tolist(), each))
    adjust(logits, rows, sequences)
    torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)


@settings(deadline=None)
@given(SEQUENCES.map(lambda each: each[0]), st.lists(IDS, max_size=3 * VOCAB), st.data())
def test_what_is_counted_step_by_step_equals_what_is_counted_at_once(
    each: Sequence, more: list[int], data: st.DataObject
) -> None:
    """So a sequence that another engine goes on with, or that was preempted meanwhile, chooses the same."""
    logits = torch.linspace(-3, 3, VOCAB)[None]
    for id_ in more:
        each.tokens.append(id_)
        if data.draw(st.booleans()):
            adjust(logits.clone(), [0], [each])
    stepwise, anew = logits.clone(), logits.clone()
    adjust(stepwise, [0], [each])
    adjust(anew, [0], [Sequence(1, list(each.tokens), each.prompt_len, each.sampling, credit=99)])
    assert stepwise.equal(anew)


def test_more_ids_than_there_was_room_for() -> None:
    count = 5 * _IDS_INITIAL
    each = sequence(list(range(count)), [], presence_penalty=1.0, repetition_penalty=2.0)
    each.tokens += range(count, 2 * count)
    logits = torch.ones(1, 3 * count)
    adjust(logits, [0], [each])
    assert logits[0].tolist() == [0.5] * count + [-0.5] * count + [1.0] * count


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, False),
        ({"logit_bias": ((1, 0.5),)}, True),
        ({"frequency_penalty": -0.1}, True),
        ({"presence_penalty": 0.1}, True),
        ({"repetition_penalty": 1.01}, True),
    ],
)
def test_what_is_off_costs_nothing(sampling: dict[str, Any], expected: bool) -> None:
    assert is_adjusted(Sampling(max_tokens=1, **sampling)) == expected


def choose(logits: list[float], each: Sequence) -> int:
    (answer,) = Sampler([EOS]).choose(torch.tensor([logits]), [each])
    assert not answer.error
    return answer.token


LOGITS = [1.0, 4.0, 3.0, 5.0, 2.0]


def test_greedy_choice_obeys_bias_penalties_and_bans_together() -> None:
    assert choose(LOGITS, sequence([0], [], temperature=0.0)) == EOS
    assert choose(LOGITS, sequence([0], [], temperature=0.0, logit_bias=((EOS, -100.0),))) == 1
    assert choose(LOGITS, sequence([0], [], temperature=0.0, logit_bias=((4, 100.0),))) == 4
    assert choose(LOGITS, sequence([EOS], [], temperature=0.0, repetition_penalty=2.0)) == 1
    assert choose(LOGITS, sequence([EOS], [], temperature=0.0, presence_penalty=2.0)) == EOS  # was not generated
    assert choose(LOGITS, sequence([0], [EOS, 1, 1], temperature=0.0, frequency_penalty=0.9)) == EOS  # 4.1 and 2.2
    assert choose(LOGITS, sequence([0], [EOS, 1, 1], temperature=0.0, presence_penalty=1.5)) == EOS  # 3.5 and 2.5
    bans = {"min_tokens": 5, "logit_bias": ((EOS, 100.0),)}
    assert choose(LOGITS, sequence([0], [], temperature=0.0, **bans)) == 1  # no bias lifts a ban


def test_a_biased_distribution() -> None:
    """A bias of log 9 for one of two equal ids makes it nine times as likely."""
    rows = [sequence([0], [], seed=seed, logit_bias=((1, math.log(9)),)) for seed in range(20_000)]
    answers = Sampler([9]).choose(torch.zeros(1, 2).expand(len(rows), -1), rows)
    assert sum(answer.token for answer in answers) / len(rows) == pytest.approx(0.9, abs=0.01)


def test_log_probabilities_stay_the_models_own() -> None:
    each = sequence([0], [1], temperature=0.0, logit_bias=((4, 100.0),), presence_penalty=2.0, logprobs=1)
    (answer,) = Sampler([9]).choose(torch.tensor([LOGITS]), [each])
    own = torch.tensor(LOGITS).log_softmax(-1).tolist()
    assert answer.logprob is not None
    assert answer.logprob.logprob == pytest.approx(own[4])
    assert (answer.logprob.top_ids, answer.logprob.top_logprobs) == ([3], [pytest.approx(own[3])])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "sampling", [{"logit_bias": ((2, -100.0),)}, {"repetition_penalty": 1e-40}, {"min_tokens": 9, "stop_ids": (2,)}]
)
def test_a_broken_row_is_an_error_whatever_hides_it(bad: float, sampling: dict[str, Any]) -> None:
    logits = torch.zeros(2, 5)
    logits[1, 2] = bad
    answers = Sampler([EOS]).choose(logits, [sequence([2], [], temperature=0.0, **sampling) for _ in range(2)])
    assert [bool(answer.error) for answer in answers] == [False, True]


@pytest.mark.parametrize("factor", [1e-300, 1e-30, 100.0])
def test_extreme_factors_leave_finite_numbers(factor: float) -> None:
    logits = torch.tensor([[-1e4, 1e4, 0.0]])
    adjust(logits, [0], [sequence([0, 1, 2], [], repetition_penalty=factor)])
    assert logits.isfinite().all()
