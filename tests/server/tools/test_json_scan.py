"""The scanner takes exactly what is JSON (RFC 8259), and knows of each character whether it can follow."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.tools.json_scan import BAD, CLOSED, DEPTH_MAX, DONE, KEY, OPENED, QUOTE, STRING, JsonScanner

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
).filter(lambda value: isinstance(value, dict | list))
LETTERS = '{}[]",:\\/ \n\tubfnrtalsetrue0123456789+-.eE\u0001é😀'


def scan(text: str) -> tuple[int, int]:
    """What the last character that was looked at is, and how many were taken."""
    scanner = JsonScanner()
    kind = -1
    for index, char in enumerate(text):
        kind = scanner.step(char)
        if kind == BAD:
            return BAD, index
        if kind == DONE:
            return DONE, index + 1
    return kind, len(text)


def is_json(text: str) -> bool:
    def refuse(_: str) -> Any:
        raise ValueError

    try:
        return isinstance(json.loads(text, parse_constant=refuse), dict | list)
    except (ValueError, RecursionError):
        return False


@given(VALUES, st.sampled_from([None, 2]), st.booleans())
def test_any_value_ends_with_its_last_character(value: Any, indent: int | None, ascii_only: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert scan(f" \n{text} rest") == (DONE, len(text) + 2)


@given(VALUES, st.data())
@settings(max_examples=300, deadline=None)
def test_a_slip_anywhere_is_seen_where_the_text_can_not_be_json_any_more(value: Any, data: Any) -> None:
    text = json.dumps(value, ensure_ascii=False)
    at = data.draw(st.integers(0, len(text) - 1))
    slip = text[:at] + data.draw(st.text(LETTERS, max_size=2)) + text[at + 1 :]
    kind, taken = scan(slip)
    if kind == DONE:
        assert is_json(slip[:taken])
    else:
        assert not is_json(slip.rstrip(" \n\t"))


@given(st.text(LETTERS, max_size=20))
@settings(max_examples=500)
def test_noise(text: str) -> None:
    kind, taken = scan("{" + text)
    assert (kind == DONE) <= is_json(("{" + text)[:taken])


@pytest.mark.parametrize(
    "text",
    ["1 ", '"a"', "true", "{1:2}", "{'a':1}", "[1,]", '{"a":1,}', "[01]", "[1.]", "[.5]", "[+1]", "[1e]", "[-]",
     "[tru ]", "[nulL]", "[NaN]", '["\\x"]', '["\\u12g4"]', '["\n"]', "[1 2]", "{]", "[}", '{"a" 1}', '{"a":}', "[,]"],
)  # fmt: skip
def test_what_is_no_json(text: str) -> None:
    assert scan(text)[0] == BAD


def test_kinds() -> None:
    scanner = JsonScanner()
    kinds = [scanner.step(char) for char in '{"a":["b",{}]}']
    told = [kind for kind in kinds if kind in (OPENED, CLOSED, QUOTE, KEY, STRING, DONE)]
    assert told == [OPENED, QUOTE, KEY, OPENED, QUOTE, STRING, OPENED, CLOSED, CLOSED, DONE]


def test_depth_has_a_bound() -> None:
    assert scan("[" * DEPTH_MAX + "]" * DEPTH_MAX)[0] == DONE
    assert scan("[" * (DEPTH_MAX + 1)) == (BAD, DEPTH_MAX)
