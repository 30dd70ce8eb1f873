"""What the core refuses (E07), what doesn't fit, and that neither touches a neighbour."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core import BIASED_IDS_MAX, LOGPROBS_MAX
from engine.wire import Credit, Sampling, Submit
from tests.support.cores import Rig, submit
from tests.support.engines import VOCAB, expected


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (submit(prompt=[]), "no token"),
        (submit(prompt=[1] * 64), "leave no room for a new one in 64"),
        (submit(prompt=[1] * 5000), "leave no room"),
        (submit(prompt=[1] * 60, generated=[1] * 4, max_tokens=9), "leave no room"),
        (submit(prompt=[-1]), "vocabulary"),
        (submit(prompt=[1, VOCAB]), "vocabulary"),
        (submit(prompt=[2**64 - 1]), "vocabulary"),
        (submit(generated=[VOCAB], max_tokens=9), "vocabulary"),
        (submit(generated=[1, 2], max_tokens=2), "reached already"),
        (submit(max_tokens=0), "max_tokens"),
        (submit(max_tokens=-(2**63)), "max_tokens"),
        (submit(temperature=-0.1), "temperature"),
        (submit(temperature=math.nan), "temperature"),
        (submit(temperature=math.inf), "temperature"),
        (submit(top_p=1.5), "top_p"),
        (submit(top_p=math.nan), "top_p"),
        (submit(min_p=-1.0), "min_p"),
        (submit(min_p=2.0), "min_p"),
        (submit(top_k=-1), "top_k"),
        (submit(seed=-1), "seed"),
        (submit(seed=2**64), "seed"),
        (submit(prompt_index=-1), "prompt_index"),
        (submit(choice_index=-1), "choice_index"),
        (submit(frequency_penalty=2.1), "frequency_penalty"),
        (submit(frequency_penalty=math.nan), "frequency_penalty"),
        (submit(presence_penalty=-2.1), "presence_penalty"),
        (submit(presence_penalty=math.inf), "presence_penalty"),
        (submit(repetition_penalty=0.0), "repetition_penalty"),
        (submit(repetition_penalty=-1.0), "repetition_penalty"),
        (submit(repetition_penalty=math.nan), "repetition_penalty"),
        (submit(repetition_penalty=math.inf), "repetition_penalty"),
        (submit(logit_bias=((VOCAB, 1.0),)), "logit_bias"),
        (submit(logit_bias=((-1, 1.0),)), "logit_bias"),
        (submit(logit_bias=((1, 100.5),)), "logit_bias"),
        (submit(logit_bias=((1, math.nan),)), "logit_bias"),
        (submit(logit_bias=((1, 1.0), (1, 2.0))), "names an id twice"),
        (submit(logit_bias=tuple((i, 1.0) for i in range(BIASED_IDS_MAX + 1))), "at most"),
        (submit(logprobs=-2), "logprobs"),
        (submit(prompt_logprobs=-2), "prompt_logprobs"),
        (submit(prompt_logprobs=LOGPROBS_MAX + 1), "prompt_logprobs"),
        (submit(logprobs=LOGPROBS_MAX + 1), "logprobs"),
    ],
)
def test_a_bad_submission_ends_with_an_error_and_nothing_else(message: Submit, sentence: str) -> None:
    rig = Rig()
    rig.send(submit(7), message, submit(8))
    rig.run()
    bad = [end for end in rig.ends if end.id == 1]
    assert [(end.reason, end.by_token) for end in bad] == [("error", False)]
    assert sentence in bad[0].message
    assert rig.tokens(1) == []
    assert rig.tokens(7) == rig.tokens(8) == expected([1, 2, 3], 5)
    assert {entry[0] for step in rig.runner.executed for entry in step} == {7, 8}
    rig.assert_idle()


INTEGERS = st.one_of(st.integers(-2, 3), st.integers(-(2**63), 2**64 - 1))
FLOATS = st.one_of(st.floats(0, 1), st.floats())


@settings(max_examples=150, deadline=None)
@given(
    st.builds(
        Submit,
        id=st.just(1),
        prompt=st.lists(st.one_of(st.integers(0, VOCAB - 1), INTEGERS), max_size=70),
        sampling=st.builds(
            Sampling,
            max_tokens=INTEGERS,
            temperature=FLOATS,
            top_k=INTEGERS,
            top_p=FLOATS,
            min_p=FLOATS,
            seed=INTEGERS,
            prompt_index=INTEGERS,
            choice_index=INTEGERS,
            min_tokens=INTEGERS,
            stop_ids=st.tuples(INTEGERS),
            logprobs=INTEGERS,
            prompt_logprobs=st.one_of(st.integers(-1, 2), INTEGERS),
            frequency_penalty=FLOATS,
            presence_penalty=FLOATS,
            repetition_penalty=FLOATS,
            logit_bias=st.lists(st.tuples(INTEGERS, FLOATS), max_size=2).map(tuple),
        ),
        credit=INTEGERS,
        generated=st.lists(st.one_of(st.integers(0, VOCAB - 1), INTEGERS), max_size=5),
        priority=INTEGERS,
    )
)
def test_hostile_numbers_never_end_the_loop_nor_touch_a_neighbour(message: Submit) -> None:
    rig = Rig()
    rig.send(submit(7), message)
    rig.run()
    assert rig.tokens(7) == expected([1, 2, 3], 5)
    assert len([end for end in rig.ends if end.id == 1]) <= 1
    rig.send(Credit([(1, 2**64 - 1)]))
    rig.run()
    assert len([end for end in rig.ends if end.id == 1]) == 1
    rig.assert_idle()


def test_an_impossible_prompt_does_not_stop_the_ones_behind_it() -> None:
    rig = Rig(blocks=2)
    rig.send(submit(1, [9] * 100), *[submit(id_, max_tokens=3) for id_ in range(2, 12)])
    rig.run()
    assert {end.id: end.reason for end in rig.ends} == {1: "error"} | dict.fromkeys(range(2, 12), "length")
    rig.assert_idle()


def test_growth_beyond_the_pool_ends_with_length() -> None:
    rig = Rig(blocks=3)
    rig.send(submit(1, [5], max_tokens=1000), submit(2, [6], max_tokens=3))
    rig.run()
    assert {end.id: end.reason for end in rig.ends} == {1: "length", 2: "length"}
    assert rig.tokens(1) == expected([5], rig.core.hello.context_tokens_max - 1)
    rig.assert_idle()


def test_hello_tells_what_fits() -> None:
    assert Rig(blocks=16).core.hello.context_tokens_max == 64
    assert Rig(blocks=16, context=40).core.hello.context_tokens_max == 40
    assert Rig(blocks=16).core.hello.pool_tokens == 64


def test_an_id_that_is_in_use_is_passed_over_and_its_owner_goes_on() -> None:
    rig = Rig()
    rig.send(submit(1), submit(1, [9, 9]))
    rig.run()
    assert rig.tokens(1) == expected([1, 2, 3], 5)
    assert [end.reason for end in rig.ends] == ["length"]


def test_an_id_may_be_used_again_after_its_end() -> None:
    rig = Rig()
    rig.send(submit(1))
    rig.run()
    rig.send(submit(1, [9, 9]))
    rig.run()
    assert rig.tokens(1) == expected([1, 2, 3], 5) + expected([9, 9], 5)
