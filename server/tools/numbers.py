"""Numbers of a JSON schema that doubles don't count exactly, made such that llguidance holds an answer to them.

It reads every limit as a double, makes a 64-bit integer of that of integers, and writes that of other numbers with the
fewest digits that give the same double. So a limit beyond 2^53 is drawn in, to the next double that is within the
schema's limit in each of these ways. The least 64-bit integer, as a limit or a value, would end the process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, TypeGuard

EXACT_MAX = 2**53  # doubles hold every integer up to here
INT64_MAX = 2**63 - 1  # for integers llguidance makes 2^63 of it, and this of 2^63
LENGTH_MAX = 2**32 - 1  # of a repetition in llguidance; no answer is as long
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_LITERALS = frozenset({"const", "enum"})
_LENGTHS = frozenset({"maxLength", "maxItems", "maxProperties"})
_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})


class NotHeld(ValueError):
    """A number that an answer can't be held to, as a sentence."""

    def __init__(self, keyword: str) -> None:
        super().__init__(f"{keyword} has a number beyond 2^53 that an answer can't be held to")


def held(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with limits that are held. What is within the schema's own and not within them is, beyond 2^53, less
    than 1,024 integers, or one step of a double. Limits that no 64-bit integer passes, and lengths that no answer has,
    are not there any more. What a $ref may lead to counts as a schema. Raises NotHeld. Recursive: SCHEMA_DEPTH_MAX."""
    made: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _LITERALS:
            _check_literal(name, value)
            made[name] = value
        elif name in _NAMED_SCHEMAS and isinstance(value, Mapping):
            made[name] = {key: _named(key, each) for key, each in value.items()}
        elif not (name in _LENGTHS and _is_number(value) and value > LENGTH_MAX):
            made[name] = _within(value)
    whole = _is_whole(schema.get("type"))
    _hold(made, _LOWER, whole=whole, sign=-1)
    _hold(made, _UPPER, whole=whole, sign=1)
    _check_range(made)
    return made


def _named(name: str, value: Any) -> Any:
    """One of some schemas with names, which may be keywords too: a $ref to all of them reads them so."""
    made = _within(value)
    if name in _LITERALS or not isinstance(value, Mapping):
        _check_literal(name, made)
    return made


def _within(value: Any) -> Any:
    if isinstance(value, Mapping):
        return held(value)
    return [_within(each) for each in value] if isinstance(value, list) else value


def _check_literal(keyword: str, value: Any) -> None:
    """Of an integer that is no double another would be made, and another text of a double."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            _check_literal(keyword, each)
    elif _is_number(value) and abs(value) > EXACT_MAX and value != INT64_MAX and not _is_exact(value):
        raise NotHeld(keyword)


def _is_exact(value: float) -> bool:
    return isinstance(value, int) and abs(value) < INT64_MAX and int(float(value)) == value


def _check_range(schema: Mapping[str, Any]) -> None:
    """Where nothing is left between limits that were drawn in, and the multiples that can be told."""
    step, low, high = (schema.get(name) for name in ("multipleOf", "minimum", "maximum"))
    if _is_number(step) and abs(step) > EXACT_MAX:
        raise NotHeld("multipleOf")
    if _is_number(low) and _is_number(high) and low > high and max(abs(low), abs(high)) >= EXACT_MAX:
        raise NotHeld("minimum")


def _hold(schema: dict[str, Any], names: tuple[str, str], *, whole: bool, sign: int) -> None:
    """Draw in the limits on one side; `sign` is 1 for the upper ones. What was drawn in is inclusive."""
    plain, exclusive = names
    draft4 = schema.get(exclusive) is True
    for name in names:
        value = schema.get(name)
        if not _is_number(value) or abs(value) < EXACT_MAX:
            continue
        del schema[name]
        if draft4:
            del schema[exclusive]
        limit, strict = sign * value, draft4 or name == exclusive
        if limit - strict > INT64_MAX + 1:
            continue
        drawn = sign * _drawn_in(name, limit, strict=strict, whole=whole, upper=sign > 0)
        other = schema.get(plain, drawn)
        if _is_number(other):
            schema[plain] = min(drawn, other) if sign > 0 else max(drawn, other)


def _drawn_in(keyword: str, limit: float, *, strict: bool, whole: bool, upper: bool) -> int:
    """The largest number within an upper limit (or a lower one, negated) that is told exactly."""
    if whole and upper and limit - strict >= INT64_MAX:
        return INT64_MAX
    if limit <= -INT64_MAX:
        raise NotHeld(keyword)

    def fits(told: float | Fraction) -> bool:
        return told < limit or (told == limit and not strict)

    drawn = float(limit)
    while not (fits(drawn) and (whole or fits(Fraction(repr(drawn)))) and drawn < INT64_MAX):
        drawn = math.nextafter(drawn, -math.inf)
    if drawn < -INT64_MAX:
        raise NotHeld(keyword)
    return int(drawn)


def _is_whole(types: Any) -> bool:
    """Whether a number that follows a schema of this type is an integer."""
    named = types if isinstance(types, list) else [types]
    return "integer" in named and "number" not in named


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
