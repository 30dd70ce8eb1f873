"""An answer that follows its constraint is the grammar's, whatever chooses among the ids that it allows."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from engine.constraints import CACHED_MAX, Constraint, Grammars
from engine.grammar import GRAMMAR_CHARS_MAX, _checked, grammar_fault
from server.tools.numbers import held
from tests.support.schemas import BAD, SCHEMAS
from tests.support.specs import bytes_spec

EOS = 256
STEPS_MAX = 3000
SPEC = bytes_spec(["<|end|>", "<|other|>"])
CLOSING = [ord(char) for char in '"}]']


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(SPEC, 260, [EOS])


def begun(grammars: Grammars, grammar: str, generated: list[int] | None = None) -> Constraint:
    return grammars.constraint(grammars.compile(grammar).result(), generated or [])


def of(schema: dict[str, Any]) -> str:
    return f"start: %json {json.dumps(held(schema))}"


def walk(constraint: Constraint, draw: random.Random) -> tuple[list[int], bool]:
    """Ids chosen at random, closing what is open now and then; and whether the answer came to its end."""
    ids: list[int] = []
    while len(ids) < STEPS_MAX:
        (row,) = constraint.allowed([constraint])
        allowed = np.flatnonzero(row).tolist()
        assert allowed and not constraint.fault
        if EOS in allowed:
            return ids, True
        closing = [id_ for id_ in CLOSING if id_ in allowed]
        ids.append(closing[0] if closing and draw.random() < 0.4 else draw.choice(allowed))
        if constraint.follow(ids[-1]):
            assert not constraint.fault
            return ids, True
    return ids, False


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("seed", range(8))
def test_every_answer_that_ends_is_valid(grammars: Grammars, name: str, seed: int) -> None:
    ids, ended = walk(begun(grammars, of(SCHEMAS[name])), random.Random(seed))
    if ended:
        value = json.loads(bytes(ids).decode())
        jsonschema.validate(value, SCHEMAS[name], jsonschema.Draft202012Validator)
    else:
        assert name in ("any object", "recursive", "all of", "more properties"), "only these need not end"


def test_from_any_prefix_another_engine_goes_on_the_same_way(grammars: Grammars) -> None:
    grammar = of(SCHEMAS["person"])
    ids, ended = walk(begun(grammars, grammar), random.Random(1))
    assert ended
    first, other = begun(grammars, grammar), Grammars(SPEC, 260, [EOS])
    for index, id_ in enumerate(ids):
        again = begun(other, grammar, ids[:index])
        assert (first.allowed([first]) == again.allowed([again])).all()
        assert not first.ended
        first.follow(id_)
    assert first.ended and begun(other, grammar, ids).ended


def test_sequences_of_one_grammar_do_not_see_each_other(grammars: Grammars) -> None:
    first, second = (begun(grammars, of({"const": "ab"})) for _ in "12")
    before = second.allowed([second])
    first.follow(ord('"'))
    rows = first.allowed([first, second])
    assert (rows[1] == before[0]).all()
    assert np.flatnonzero(rows[0]).tolist() == [ord("a")]


def test_ids_that_the_tokenizer_does_not_know_are_never_allowed(grammars: Grammars) -> None:
    constraint = begun(grammars, "start: /(.|\\n)*/")
    (row,) = constraint.allowed([constraint])
    assert row.shape == (260,)
    assert row[EOS] and row[ord("a")]
    assert not row[257:].any()


def test_a_fault_is_told_and_ends_the_answer(grammars: Grammars) -> None:
    constraint = begun(grammars, of({"type": "object"}))
    assert constraint.follow(ord("["))
    assert constraint.ended and constraint.fault
    for grammar in (of({"type": "x"}), "nonsense", "", "x" * (GRAMMAR_CHARS_MAX + 1)):
        assert begun(grammars, grammar).fault


def test_a_model_without_an_end_token_ends_where_the_grammar_does() -> None:
    endless = Grammars(SPEC, 258, [])
    constraint = begun(endless, of(SCHEMAS["person"]))
    ids, ended = walk(constraint, random.Random(3))
    assert ended and not constraint.fault
    jsonschema.validate(json.loads(bytes(ids)), SCHEMAS["person"])


def test_the_cache_is_bounded_and_keeps_what_is_used(grammars: Grammars) -> None:
    kept = grammars.compile('start: "kept"')
    for number in range(3 * CACHED_MAX):
        grammars.compile(f'start: "{number}"').result()
        assert grammars.compile('start: "kept"') is kept
    assert len(grammars._compiled) == CACHED_MAX


# What the server asks before a stream begins


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_can_be_enforced_has_no_fault(name: str) -> None:
    assert grammar_fault(of(SCHEMAS[name])) == ""


@pytest.mark.parametrize(("schema", "word"), BAD)
def test_what_can_not_is_told_in_a_sentence(schema: dict[str, Any], word: str) -> None:
    fault = grammar_fault(of(schema))
    assert word in fault
    assert "\n" not in fault and "%json" not in fault and len(fault) <= 300


def test_a_grammar_has_a_size() -> None:
    assert "characters" in grammar_fault("x" * (GRAMMAR_CHARS_MAX + 1))


def test_a_grammar_that_is_too_long_is_not_kept() -> None:
    before = _checked.cache_info().currsize
    grammar_fault("x" * (GRAMMAR_CHARS_MAX + 2))
    assert _checked.cache_info().currsize == before
