"""What a grammar allows is one more filter, with everything else that may be asked of a choice, for its rows alone."""

from __future__ import annotations

import json
import math
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.constraints import Grammars
from engine.sampler import Sampler
from engine.sequence import Sampled, Sequence
from engine.wire import Sampling
from tests.support.schemas import PERSON
from tests.support.specs import bytes_spec

EOS = 256
VOCAB = 260  # wider than the tokenizer, as models' are
GRAMMARS = Grammars(bytes_spec(["<|end|>"]), VOCAB, [EOS])
WAYS: list[dict[str, Any]] = [
    {"temperature": 0},
    {},
    {"temperature": 2.0, "top_p": 0.5, "top_k": 4, "min_p": 0.1},
    {"frequency_penalty": 1.5, "presence_penalty": 1.0, "repetition_penalty": 1.3},
    {"logit_bias": ((ord("{"), -100.0), (ord("x"), 2.0), (EOS, 100.0))},
    {"min_tokens": 8},
    {"logprobs": 5},
    {"ignore_eos": True},
]


def sequence(grammar: str, generated: bytes = b"", **sampling: Any) -> Sequence:
    made = Sequence(0, [1, *generated], 1, Sampling(max_tokens=1000, grammar=grammar, **sampling), credit=1000)
    if grammar:
        made.constraint = GRAMMARS.constraint(GRAMMARS.compile(grammar).result(), list(generated))
    return made


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    """Of a model with random weights: each row anew."""
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def choose(values: torch.Tensor, *sequences: Sequence) -> list[Sampled]:
    return Sampler([EOS]).choose(values, list(sequences))


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_answer_that_ends_is_valid_whatever_else_is_asked(way: dict[str, Any]) -> None:
    grammar = f"start: %json {json.dumps(PERSON)}"
    closing = (ord('"'), ord("}"), ord("]"))
    whole = 0
    for seed in range(4):
        held = sequence(grammar, seed=seed, **way)
        for step in range(1000):
            values = logits(1, seed * 1000 + step)
            values[0, list(closing)] += 4  # or strings hardly end
            (answer,) = choose(values, held)
            assert not answer.error
            if answer.token == EOS:
                break
            held.tokens.append(answer.token)
            if way.get("logprobs"):
                assert answer.logprob is not None and answer.logprob.logprob == pytest.approx(
                    values.log_softmax(-1)[0, answer.token].item(), abs=1e-4
                )
            assert held.constraint is not None
            if held.constraint.follow(answer.token):
                assert not held.constraint.fault
                break
        else:
            continue
        whole += 1
        jsonschema.validate(json.loads(bytes(held.tokens[1:]).decode()), PERSON)
    assert whole == 4


@given(st.lists(st.booleans(), min_size=1, max_size=6), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_a_row_does_not_depend_on_the_grammars_beside_it(held: list[bool], seed: int) -> None:
    values = logits(len(held), seed)
    rows = [sequence('start: "ab" | "cd"' if each else "", seed=number) for number, each in enumerate(held)]
    together = [answer.token for answer in choose(values.clone(), *rows)]
    alone = [choose(values[row : row + 1].clone(), each)[0].token for row, each in enumerate(rows)]
    assert together == alone
    assert all(token in (ord("a"), ord("c")) for token, each in zip(together, held, strict=True) if each)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_number_that_is_none_is_told_though_the_grammar_hides_it(temperature: float, bad: float) -> None:
    values = logits(1)
    values[0, ord("z")] = bad
    (answer,) = choose(values, sequence('start: "ab"', temperature=temperature))
    assert "finite" in answer.error


def test_where_the_grammar_and_the_bans_leave_nothing_that_is_said() -> None:
    (answer,) = choose(logits(1), sequence('start: "ab"', min_tokens=5, stop_ids=(ord("a"),)))
    assert "grammar" in answer.error


def test_the_end_may_not_come_before_min_tokens_nor_where_it_is_ignored() -> None:
    values = logits(1)
    values[0, EOS] = 100
    grammar = 'start: "a"+'
    assert choose(values, sequence(grammar, b"a"))[0].token == EOS
    assert choose(values, sequence(grammar, b"a", min_tokens=2))[0].token == ord("a")
    assert choose(values, sequence(grammar, b"a", ignore_eos=True))[0].token == ord("a")
