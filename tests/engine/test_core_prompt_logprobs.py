"""Log probabilities of a prompt: told once, whole, with the first token, whatever happens to the sequence before."""

from __future__ import annotations

import math

import pytest

from engine.core import PROMPT_LOGPROBS_MAX
from engine.sequence import Sequence
from engine.wire import Admitted, Credit, Logprob
from tests.support.cores import BLOCK, Rig, submit
from tests.support.engines import expected


def told_prompts(rig: Rig) -> list[tuple[int, list[int]]]:
    """Sequences, and for each told place in the prompt the id that the runner knew there."""
    told = [each for step in rig.steps for each in step.prompt_logprobs]
    assert all([best.index for best in each.logprobs] == list(range(1, len(each.logprobs) + 1)) for each in told)
    return [(each.id, [-int(best.logprob) for best in each.logprobs]) for each in told]


def test_prompt_logprobs_are_told_once_with_the_first_token() -> None:
    rig = Rig(step_tokens_max=9, blocks=32)
    prompt = list(range(40))
    rig.send(submit(1, prompt, prompt_logprobs=0), submit(2, prompt))
    rig.run()
    assert told_prompts(rig) == [(1, prompt[1:])]
    (step,) = [step for step in rig.steps if step.prompt_logprobs]
    assert [token for id_, token in zip(step.ids, step.tokens, strict=True) if id_ == 1] == expected(prompt, 1)
    assert rig.tokens(1) == rig.tokens(2) == expected(prompt, 5)
    rig.assert_idle()


def test_prompt_logprobs_of_a_cached_prompt_are_computed_again() -> None:
    rig = Rig(blocks=32)
    prompt = list(range(20))
    rig.send(submit(1, prompt))
    rig.run()
    rig.send(submit(2, prompt, prompt_logprobs=0))
    rig.run()
    assert told_prompts(rig) == [(2, prompt[1:])]
    assert rig.admitted[-1] == Admitted(2, 0)


def test_a_prompt_that_loses_its_blocks_half_way_is_told_whole() -> None:
    rig = Rig(step_tokens_max=9, blocks=32)
    prompt = list(range(40))
    rig.send(submit(1, prompt, prompt_logprobs=0))
    for _ in range(3):
        rig.core.step()
        rig.send(Credit([(1, 0)]))
        rig.core.step()
        rig.send(submit(9, [7] * 120, max_tokens=1))  # takes every block
        rig.run()
        rig.send(Credit([(1, 1000)]))
    rig.run()
    assert told_prompts(rig) == [(1, prompt[1:])]
    assert rig.tokens(1) == expected(prompt, 5)


def test_a_prompt_of_one_id_has_nothing_to_tell_and_says_so() -> None:
    rig = Rig()
    rig.send(submit(1, [5], prompt_logprobs=3))
    rig.run()
    assert told_prompts(rig) == [(1, [])]


def test_another_engine_does_not_tell_the_prompt_again() -> None:
    """The first one told it with the first token."""
    rig = Rig()
    rig.send(submit(1, generated=expected([1, 2, 3], 1), prompt_logprobs=0))
    rig.run()
    assert told_prompts(rig) == []


def test_prompt_logprobs_that_are_no_numbers_end_their_own_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    rig.send(submit(1, prompt_logprobs=0), submit(2, prompt_logprobs=0))

    def tell(sequence: Sequence, place: int) -> None:
        sequence.prompt_logprobs.append(Logprob(place, math.nan if sequence.id == 1 else -0.5, [], []))

    monkeypatch.setattr(rig.runner, "_tell_prompt", tell)
    rig.run()
    assert {end.id: end.reason for end in rig.ends} == {1: "error", 2: "length"}
    assert [each.id for step in rig.steps for each in step.prompt_logprobs] == [2]


def test_prompt_logprobs_of_a_long_prompt_are_bounded() -> None:
    rig = Rig(blocks=PROMPT_LOGPROBS_MAX // BLOCK, context=PROMPT_LOGPROBS_MAX)
    rig.send(submit(1, [1] * (PROMPT_LOGPROBS_MAX // 2 + 1), prompt_logprobs=1))
    rig.run()
    assert "prompt_logprobs" in rig.ends[0].message
