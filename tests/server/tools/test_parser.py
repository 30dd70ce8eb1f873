"""Tool calls in text: each family's format, and that no split of the text changes what is told."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.tools.parser import HERMES, LLAMA3, MISTRAL, Syntax, ToolParser
from server.tools.pieces import Piece, TextPiece, ToolArguments, ToolCallBegin, ToolCallEnd

KNOWN = ("add", "get_weather")
Told = list[str | tuple[str, str]]


def parser(syntax: Syntax, calls_max: int | None = None) -> ToolParser:
    numbers = count()
    return ToolParser(syntax, known=KNOWN, new_id=lambda: f"id{next(numbers)}", calls_max=calls_max)


def joined(pieces: list[Piece]) -> Told:
    """Text as strings and calls as (name, arguments), in order; checks that the pieces are in their grammar."""
    told: Told = []
    open_call: int | None = None
    calls = 0
    for piece in pieces:
        if isinstance(piece, ToolCallBegin):
            assert open_call is None
            assert (piece.index, piece.id) == (calls, f"id{calls}")
            open_call, calls = piece.index, calls + 1
            told.append((piece.name, ""))
        elif isinstance(piece, ToolArguments):
            assert piece.index == open_call
            assert piece.text
            name, arguments = told[-1]
            told[-1] = (name, arguments + piece.text)
        elif isinstance(piece, ToolCallEnd):
            assert piece.index == open_call
            open_call = None
        else:
            assert isinstance(piece, TextPiece)
            assert open_call is None
            assert piece.text
            if told and isinstance(told[-1], str):
                told[-1] += piece.text
            else:
                told.append(piece.text)
    assert open_call is None
    return told


def read(syntax: Syntax, *texts: str, cut: bool = False, calls_max: int | None = None) -> Told:
    reader = parser(syntax, calls_max)
    pieces = [piece for text in texts for piece in reader.feed(text)]
    return joined(pieces + reader.finish(cut=cut))


ADD = '{"name": "add", "arguments": {"a": 1, "b": [2, "}"]}}'
ADDED = ("add", '{"a": 1, "b": [2, "}"]}')
WEATHER = '{"name": "get_weather", "arguments": {"city": "Z\\u00fcrich \\"{"}}'
WEATHERED = ("get_weather", '{"city": "Z\\u00fcrich \\"{"}')

CALLS: list[tuple[Syntax, str, Told]] = [
    (HERMES, f"<tool_call>\n{ADD}\n</tool_call>", [ADDED]),
    (HERMES, f"<tool_call>{ADD}</tool_call>", [ADDED]),
    (HERMES, f"Let me see. <tool_call>\n{ADD}\n</tool_call>", ["Let me see. ", ADDED]),
    (HERMES, f"\n\n<tool_call>\n{ADD}\n</tool_call>\n<tool_call>\n{WEATHER}\n</tool_call>\n", [ADDED, WEATHERED]),
    (HERMES, f"<tool_call>[{ADD}, {WEATHER}]</tool_call>", [ADDED, WEATHERED]),
    (HERMES, f"<tool_call>\n{ADD}\n{WEATHER}\n</tool_call>", [ADDED, WEATHERED]),
    (HERMES, f"<tool_call>\n{ADD}\n<tool_call>\n{WEATHER}\n", [ADDED, WEATHERED]),
    (HERMES, f"<tool_call>\n{ADD}\n</tool_call>\nDone.", [ADDED, "\nDone."]),
    (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', [("add", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', [("add", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "unheard-of"}</tool_call>', [("unheard-of", "{}")]),
    (HERMES, '<tool_call>{"id": "x", "type": "function", "name": "f", "arguments": {}}</tool_call>', [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}, "id": "x"}</tool_call>', [("f", "{}")]),
    (LLAMA3, '{"name": "add", "parameters": {"a": 1}}', [("add", '{"a": 1}')]),
    (LLAMA3, ' {"type": "function", "name": "add", "parameters": {}}', [("add", "{}")]),
    (LLAMA3, f"<|python_tag|>{ADD}", [ADDED]),
    (LLAMA3, f"{ADD}; {WEATHER}", [ADDED, WEATHERED]),
    (LLAMA3, f"{ADD}\n{WEATHER}", [ADDED, WEATHERED]),
    (LLAMA3, f"<|python_tag|>{ADD}<|python_tag|>{WEATHER}", [ADDED, WEATHERED]),
    (MISTRAL, f"[TOOL_CALLS][{ADD}]", [ADDED]),
    (MISTRAL, f"Well. [TOOL_CALLS] [{ADD}, {WEATHER}]", ["Well. ", ADDED, WEATHERED]),
    (MISTRAL, '[TOOL_CALLS]add[ARGS]{"a": 1}', [("add", '{"a": 1}')]),
    (MISTRAL, '[TOOL_CALLS]add[ARGS] {"a": 1}[TOOL_CALLS]f[ARGS]{}', [("add", '{"a": 1}'), ("f", "{}")]),
    (MISTRAL, '[TOOL_CALLS]add[CALL_ID]Ab3Cd6Ef9[ARGS]{"a": {}}', [("add", '{"a": {}}')]),
]

# What is no call, and is shown as it came.
PLAIN: list[tuple[Syntax, str]] = [
    *[(syntax, text) for syntax in (HERMES, LLAMA3, MISTRAL) for text in ("", " \n", "Hello!", "a < b [T] <|p", "é😀")],
    (HERMES, "<tool_call"),
    (HERMES, "<tool_call>"),
    (HERMES, "<tool_call> hello"),
    (HERMES, "<tool_call>[]</tool_call>"),
    (HERMES, "<tool_call>[[]]</tool_call>"),
    (HERMES, "<tool_call>{}</tool_call>"),
    (HERMES, '<tool_call>{"name": "f"'),
    (HERMES, '<tool_call>{"name": 1, "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "arguments": "no JSON"}</tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>'),
    (HERMES, '<tool_call>{"name": "f" "arguments": {}}</tool_call>'),
    (HERMES, "<tool_call>\n<function=f>\n</function>\n</tool_call>"),
    (HERMES, ADD),
    (LLAMA3, '{"name": "Bob", "parameters": {}}'),
    (LLAMA3, '{"city": "Paris"}'),
    (LLAMA3, "{"),
    (LLAMA3, f"As JSON: {ADD}"),
    (LLAMA3, "<|python_tag|>import os"),
    (MISTRAL, "[TOOL_CALLS]"),
    (MISTRAL, "[TOOL_CALLS]add"),
    (MISTRAL, "[TOOL_CALLS]add[ARGS]"),
    (MISTRAL, "[TOOL_CALLS]add[ARGS][1]"),
    (MISTRAL, "[TOOL_CALLS]add {}"),
    (MISTRAL, f"[TOOL_CALLS]{'x' * 300}[ARGS]{{}}"),
]


@pytest.mark.parametrize(("syntax", "text", "told"), CALLS, ids=lambda value: str(value)[:40])
def test_each_format_whole_and_by_characters(syntax: Syntax, text: str, told: Told) -> None:
    assert read(syntax, text) == told
    assert read(syntax, *text) == told
    for call in told:
        if isinstance(call, tuple):
            assert isinstance(json.loads(call[1]), dict)


@pytest.mark.parametrize(("syntax", "text"), PLAIN, ids=lambda value: str(value)[:40])
def test_what_is_no_call_is_text(syntax: Syntax, text: str) -> None:
    assert read(syntax, text) == ([text] if text else [])
    assert read(syntax, *text) == ([text] if text else [])


@pytest.mark.parametrize(
    ("syntax", "text", "told"),
    [
        (HERMES, f"<tool_call>\n{ADD}\nno end <tool_call>{WEATHER}", [ADDED, "\nno end ", WEATHERED]),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": nil}}', [("add", '{"a": n'), "il}}"]),
        (HERMES, f"<tool_call><tool_call>{ADD}", ["<tool_call>", ADDED]),
        (HERMES, f"<tool_call>{ADD}</tool_<tool_call>{ADD}", [ADDED, "</tool_", ADDED]),
        (HERMES, f"<tool_call>[{ADD}, no]</tool_call>", [ADDED, ", no]</tool_call>"]),
        (MISTRAL, f"[TOOL_CALLS]x[TOOL_CALLS][{ADD}]", ["[TOOL_CALLS]x", ADDED]),
        (LLAMA3, f"{ADD}; and {ADD}", [ADDED, f"; and {ADD}"]),
        (LLAMA3, f"{ADD} so", [ADDED, " so"]),
    ],
)
def test_broken_syntax_beside_calls_is_text_too(syntax: Syntax, text: str, told: Told) -> None:
    assert read(syntax, text) == read(syntax, *text) == told


ATOMS = [
    "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "add", "{", "}", "[", "]",
    ",", ";", ":", '"', '"name"', '"add"', '"arguments": ', '"parameters": {', '{"name": "add", "arguments": {', "}}",
    " ", "\n", "<", "</", "[T", "x", "\\", "\\u12", "1", "-", ".5e", "tru", "null", ADD, WEATHER, "é😀",
]  # fmt: skip


@given(
    st.sampled_from([HERMES, LLAMA3, MISTRAL]), st.lists(st.sampled_from(ATOMS), max_size=14), st.data(), st.booleans()
)
@settings(max_examples=500, deadline=None)
def test_no_split_of_the_text_changes_what_is_told(syntax: Syntax, atoms: list[str], data: Any, cut: bool) -> None:
    text = "".join(atoms)
    whole = read(syntax, text, cut=cut)
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    assert read(syntax, *parts, cut=cut) == whole == read(syntax, *text, cut=cut)
    if not any(isinstance(part, tuple) for part in whole) and not cut:
        assert "".join(map(str, whole)) == text


@pytest.mark.parametrize("syntax", [HERMES, LLAMA3, MISTRAL], ids=lambda syntax: syntax.name)
def test_text_is_not_delayed_but_where_it_may_be_a_marker(syntax: Syntax) -> None:
    reader = parser(syntax)
    for word in ("Hello", " world,", " 1 ", "> 0;\n", " {", "}", "done"):
        assert reader.feed(word) == [TextPiece(word)]
    assert reader.feed(f"so {syntax.marker[0]}") == [TextPiece("so ")]
    assert reader.feed("!") == [TextPiece(f"{syntax.marker[0]}!")]


def test_arguments_stream_as_they_come() -> None:
    reader = parser(HERMES)
    assert reader.feed('<tool_call>{"name": "add", "arguments": ') == []
    assert reader.feed('{"a"') == [ToolCallBegin(0, "id0", "add"), ToolArguments(0, '{"a"')]
    assert reader.feed(": 1") == [ToolArguments(0, ": 1")]
    assert reader.feed("}") == [ToolArguments(0, "}"), ToolCallEnd(0)]
    assert reader.feed("}\n</tool_call>") == []
    assert reader.finish(cut=False) == []


def test_a_call_that_is_cut_is_a_prefix_of_itself_and_one_that_had_not_begun_is_nothing() -> None:
    text = f"<tool_call>{ADD}</tool_call>"
    for length in range(len(text) + 1):
        told = read(HERMES, text[:length], cut=True)
        if length < len("<tool_call>"):
            assert told == ([text[:length]] if length else [])  # as well text
        else:
            assert len(told) <= 1
            for name, arguments in told:
                assert name == "add" and ADDED[1].startswith(arguments)


def test_behind_the_last_call_that_may_be_nothing_is_looked_at() -> None:
    text = f"a<tool_call>{ADD}</tool_call><tool_call>{WEATHER}</tool_call>b"
    assert read(HERMES, text, calls_max=1) == read(HERMES, *text, calls_max=1) == ["a", ADDED]
    reader = parser(HERMES, 1)
    reader.feed(f"<tool_call>{ADD[:-1]}")
    assert not reader.full
    reader.feed("}")
    assert reader.full


def test_what_is_held_has_a_bound() -> None:
    for text in (" " * 5000, "<tool_call>" + " " * 5000, '<tool_call>{"arguments": "' + "x" * 200_000):
        reader = parser(HERMES)
        shown = reader.feed(text)
        assert shown, text[:20]
        assert joined(shown + reader.finish(cut=False)) == [text]


def test_deep_nesting_is_no_call() -> None:
    text = '<tool_call>{"arguments": ' + "[" * 100_000
    assert read(HERMES, text) == [text]
