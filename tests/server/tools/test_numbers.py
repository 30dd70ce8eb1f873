"""Numbers beyond 2^53 in a schema: an answer is within its limits, or the schema is refused; see server/tools/numbers.

Each check asks llguidance itself, as the engine does.
"""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import jsonschema
import pytest

from engine.constraints import Grammars
from engine.grammar import grammar_fault
from server.tools.grammars import json_grammar, schema_fault
from server.tools.numbers import EXACT_MAX, INT64_MAX, LENGTH_MAX, held
from tests.support.specs import bytes_spec

SPEC = bytes_spec(["<|end|>"])
GRAMMARS = Grammars(SPEC, len(SPEC.token_bytes), [256])
INT64_MIN = -(2**63)
STEP = 1024  # of doubles below 2^63
EDGES = [EXACT_MAX, EXACT_MAX + 1, 10**16, 10**17 + 1, 10**18 - 1, 10**18, 2**62, 2**63 - STEP, INT64_MAX, 2**63]
LIMITS = [*EDGES, *(-edge for edge in EDGES), INT64_MIN + 1, 1e16, -1e16, 2.0**63, -(2.0**63)]
KEYWORDS = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]
NEAR = [0, 1, 2, 128, STEP - 1, STEP, STEP + 1, 4096]


def accepted(schema: dict[str, Any], values: list[Any]) -> list[bool]:
    """Which of these may be an answer; strings are JSON already."""
    assert not schema_fault(schema)
    grammar = json_grammar(schema)
    assert not grammar_fault(grammar), grammar_fault(grammar)
    compiled = GRAMMARS.compile(grammar).result()
    return [follows(compiled, value if isinstance(value, str) else json.dumps(value)) for value in values]


def follows(compiled: Any, text: str) -> bool:
    constraint = GRAMMARS.constraint(compiled, [])
    for byte in text.encode():
        if constraint.ended or (constraint.follow(byte) and constraint.fault):
            return False
    return constraint.ended or constraint.matcher.is_accepting()


def near(*limits: float) -> list[int]:
    return sorted({int(limit) + way * by for limit in limits for by in NEAR for way in (1, -1)})


def valid(schema: dict[str, Any], value: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


@pytest.mark.parametrize("type_", ["integer", "number", ["integer", "null"]], ids=str)
@pytest.mark.parametrize("keyword", KEYWORDS)
@pytest.mark.parametrize("limit", LIMITS)
def test_no_answer_passes_a_limit(limit: float, keyword: str, type_: Any) -> None:
    """And next to none that is within it is lost."""
    schema: dict[str, Any] = {"type": type_, keyword: limit}
    if (fault := schema_fault(schema)) or grammar_fault(json_grammar(schema)):
        # Too large to be a lower limit, or too small for an upper one.
        assert abs(limit) >= 10**18 - 1 and (limit > 0) == ("Min" in keyword or "min" in keyword), fault
        return
    values = near(limit)
    for value, came in zip(values, accepted(schema, values), strict=True):
        assert valid(schema, value) or not came, value
        assert came or not valid(schema, value) or abs(value - limit) <= STEP, value
    assert accepted(schema, [0, 7])[0] == valid(schema, 0)


INT64 = {"type": "integer", "minimum": INT64_MIN, "maximum": INT64_MAX}


@pytest.mark.parametrize(
    "schema",
    [
        INT64,
        {"type": "integer", "format": "int64", "exclusiveMinimum": INT64_MIN - 1, "exclusiveMaximum": 2**63},
        {"type": "integer", "minimum": float(INT64_MIN), "maximum": 2.0**63},
        {"type": "integer", "minimum": INT64_MIN, "maximum": INT64_MAX + 1, "exclusiveMaximum": True},  # draft 4
        {"anyOf": [INT64, {"type": "null"}]},
        {"$ref": "#/$defs/maximum", "$defs": {"maximum": INT64}},
        {"type": "integer", "allOf": [{"minimum": INT64_MIN}, {"maximum": INT64_MAX}]},
    ],
    ids=json.dumps,
)
def test_integers_of_64_bits(schema: dict[str, Any]) -> None:
    """All but the 1,023 next to the least, or to a limit that stands apart from what says that it is of integers."""
    values = near(INT64_MIN, INT64_MAX, 0)
    most = 2**63 - STEP if "allOf" in schema else INT64_MAX
    assert accepted(schema, values) == [INT64_MIN + STEP <= value <= most for value in values]


@pytest.mark.parametrize("type_", ["integer", "number"])
def test_limits_beyond_64_bits_are_left_out(type_: str) -> None:
    """The only ones: llguidance has nothing for them."""
    for limits in ({"maximum": 2**64 - 1}, {"exclusiveMaximum": 2**64}, {"maximum": 1.7e308, "minimum": -1.7e308}):
        assert held({"type": type_, **limits}) == {"type": type_}
        assert accepted({"type": type_, "minimum": 0, **limits}, [0, 2**64, -1])[:2] == [True, True]
    assert accepted({"type": type_, "minimum": 0, "maximum": 2**64 - 1}, [0, 2**64, -1]) == [True, True, False]
    assert schema_fault({"type": type_, "minimum": 2**64}).startswith("minimum ")
    assert schema_fault({"type": type_, "exclusiveMaximum": -1e300}).startswith("exclusiveMaximum ")


def test_of_two_limits_on_one_side_the_nearer_holds() -> None:
    both = {"type": "integer", "maximum": 10, "exclusiveMaximum": 2**60, "minimum": INT64_MIN, "exclusiveMinimum": 3}
    assert accepted(both, [3, 4, 10, 11]) == [False, True, True, False]


def test_limits_that_leave_nothing_between_them() -> None:
    assert schema_fault({"type": "integer", "minimum": EXACT_MAX + 1, "maximum": EXACT_MAX + 1}).startswith("minimum ")


@pytest.mark.parametrize("keyword", [*KEYWORDS, "multipleOf"])
@pytest.mark.parametrize("number", [EXACT_MAX + 1, 2**64 + 1, 1e300, INT64_MIN])
def test_wherever_it_stands(keyword: str, number: float) -> None:
    """Also where a name is a keyword's, and where only a $ref leads."""
    alone = {"type": "integer", keyword: number}
    places = [
        {"properties": {"enum": {"anyOf": [alone]}}},
        {"properties": {keyword: {"items": alone}}},
        {"$defs": {"const": alone}},
        {"x-mine": [{"allOf": [alone]}]},
        {"default": alone},
    ]
    for place in places:
        assert schema_fault(place) == schema_fault(alone)
        assert json.dumps(held(alone))[1:-1] in json.dumps(held(place)) if not schema_fault(alone) else True


EXACT = [EXACT_MAX + 2, 10**18, -(10**18), 2**62, -(2**62), INT64_MAX, -(2**63 - STEP)]
INEXACT = [EXACT_MAX + 1, -EXACT_MAX - 1, INT64_MAX - 1, 2**63, INT64_MIN, INT64_MIN + 1, 2**64, 1.2345e30, 1e16]


@pytest.mark.parametrize("number", EXACT)
def test_values_that_are_told_exactly(number: int) -> None:
    for schema in ({"const": number}, {"enum": [number, "a"]}, {"type": "number", "const": number}):
        values = near(number)
        assert accepted(schema, values) == [value == number for value in values]
    assert accepted({"const": {"b": [number]}}, [{"b": [number]}, {"b": [number + 1]}]) == [True, False]


@pytest.mark.parametrize("number", INEXACT)
def test_values_that_are_not(number: float) -> None:
    assert schema_fault({"const": number}).startswith("const ")
    assert schema_fault({"enum": ["a", {"b": [{"c": number}]}]}).startswith("enum ")
    for named in ({"const": {"default": number}}, {"minimum": number}, {"enum": [number]}, {"anyOf": [{"a": number}]}):
        assert schema_fault({"$ref": "#/$defs", "$defs": named})


@pytest.mark.parametrize("number", [EXACT_MAX, -EXACT_MAX])
def test_the_largest_that_doubles_count(number: int) -> None:
    limits = {"minimum": number, "maximum": number}
    values = [{"const": number}, {"enum": [number]}, {"const": float(number)}]
    for schema in ({"type": "integer", **limits}, {"type": "number", **limits}, *values):
        assert accepted(schema, near(number)) == [value == number for value in near(number)]


def test_lengths_that_no_answer_has() -> None:
    kinds = [("string", "maxLength", '"ab"'), ("array", "maxItems", "[1]"), ("object", "maxProperties", "{}")]
    for type_, keyword, value in kinds:
        for length in (2**31 - 1, LENGTH_MAX, LENGTH_MAX + 1, INT64_MAX, 2**64, 1e300):
            assert accepted({"type": type_, keyword: length}, [value]) == [True]
    assert grammar_fault(json_grammar({"type": "string", "minLength": INT64_MAX}))


def test_large_numbers_that_limit_nothing() -> None:
    notes = {"default": EXACT_MAX + 1, "examples": [2**64], "x-note": {"of": 1e300}}
    schema = {"properties": {"maximum": {"type": "integer", **notes}}, **notes}
    assert not schema_fault(schema)
    assert held(schema) == schema


def test_a_limit_that_is_none() -> None:
    for schema in ({"maximum": "1", "exclusiveMaximum": 2**60}, {"type": "integer", "minimum": None}):
        assert not schema_fault(schema)
        assert grammar_fault(json_grammar(schema))


def test_every_pair_of_limits() -> None:
    """None ends the process, and each that is taken is held."""
    high_edges = [EXACT_MAX + 1, 10**18 - 1, 2**62 + 1, INT64_MAX, 2**64]
    edges = [INT64_MIN, INT64_MIN + 1, -(2**62), -EXACT_MAX - 1, 0, *high_edges]
    for low, high in product(edges, edges):
        for type_ in ("integer", "number"):
            schema = {"type": type_, "minimum": low, "maximum": high}
            if schema_fault(schema) or grammar_fault(json_grammar(schema)):
                continue
            values = near(low, high)
            for value, came in zip(values, accepted(schema, values), strict=True):
                assert valid(schema, value) or not came or high > 2**63, (schema, value)
