"""JSON text that no client's line splitting can break."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from protocols.escape import json_text, json_value

ANY_TEXT = st.text(st.characters(exclude_categories=()))  # surrogates too


@given(ANY_TEXT)
@example("\u2028\u2029\u0085\u000b\u000c\u001c\u001d\u001e\u007f\r\n")
@example("a\ud83d\ude00b\ud800")
def test_b02_text_survives_and_never_splits(text: str) -> None:
    """Case B02: the same text comes back, and neither bytes nor decoded text have anything that ends a line."""
    inner = json_text(text)
    assert json.loads(b'"' + inner + b'"') == json.loads(json.dumps(text))
    decoded = inner.decode()
    assert len(decoded.splitlines()) <= 1
    assert len(inner.splitlines()) <= 1
    assert not any(ord(character) < 0x20 or 0x7F <= ord(character) < 0xA0 for character in decoded)


@given(st.text())
def test_well_formed_text_is_exact(text: str) -> None:
    assert json.loads(b'"' + json_text(text) + b'"') == text


@pytest.mark.parametrize("character", "\u2028\u2029\u0085\u000b\u000c\u001c\u001d\u001e\u007f\u0080\u009f\x00")
def test_b02_each_separator_is_escaped(character: str) -> None:
    """Case B02."""
    escaped = json_text(f"é{character}\U0001f600").decode()
    assert character not in escaped
    assert escaped.startswith("é\\") and escaped.endswith("\U0001f600")


@given(st.dictionaries(st.text(), st.text() | st.lists(st.text() | st.integers(-(2**53), 2**53)), max_size=3))
def test_b02_values_likewise(value: object) -> None:
    """Case B02."""
    data = json_value(value)
    assert json.loads(data) == value
    assert len(data.decode().splitlines()) == 1


def test_plain_text_goes_as_it_is() -> None:
    assert json_text(" héllo, 世界 \U0001f600") == " héllo, 世界 \U0001f600".encode()
    assert json_text('a"b\\c') == b'a\\"b\\\\c'
    assert json_text("") == b""
