"""What a grammar makes, the parser of the same format reads: calls and nothing else, or text with calls in it."""

from __future__ import annotations

import json
import random
from itertools import count
from typing import Any

import jsonschema
import numpy as np
import pytest

from engine.constraints import Constraint, Grammars
from engine.grammar import grammar_fault
from server.tools.grammars import (
    ANY_OBJECT,
    CALLS_MAX,
    PROPERTIES_MAX,
    Calls,
    calls_grammar,
    calls_or_json_grammar,
    json_grammar,
    schema_fault,
    text_and_calls_grammar,
)
from server.tools.parser import ARGS, HERMES, LLAMA3, MISTRAL, Syntax, ToolParser
from server.tools.pieces import Piece, TextPiece, ToolArguments, ToolCallBegin
from tests.support.schemas import SCHEMAS
from tests.support.specs import bytes_spec

EOS = 256
SPECIAL = {"[TOOL_CALLS]": 257, ARGS: 258, "<tool_call>": 259, "</tool_call>": 260}
SPEC = bytes_spec(["<|end|>", *SPECIAL])
GRAMMARS = Grammars(SPEC, len(SPEC.token_bytes), [EOS])
ADD = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
FUNCTIONS = {"add": ADD, 'odd."name"': SCHEMAS["person"], "any": ANY_OBJECT}
# Each format, with its markers as text and as special tokens.
FORMATS: list[tuple[Syntax, dict[str, int]]] = [
    (HERMES, {}),
    (HERMES, {text: SPECIAL[text] for text in ("<tool_call>", "</tool_call>")}),
    (LLAMA3, {}),
    (MISTRAL, {}),
    (MISTRAL, {"[TOOL_CALLS]": 257}),
    (MISTRAL, {"[TOOL_CALLS]": 257, ARGS: 258}),
]


def calls(syntax: Syntax, markers: dict[str, int], *, several: bool = True) -> Calls:
    functions = {name: schema for name, schema in FUNCTIONS.items() if '"' not in name}
    return Calls(syntax, tuple(functions.items()), markers, several)


def begun(grammar: str) -> Constraint:
    assert grammar_fault(grammar) == ""
    constraint = GRAMMARS.constraint(GRAMMARS.compile(grammar).result(), [])
    assert not constraint.fault
    return constraint


def walk(grammar: str, draw: random.Random, steps_max: int = 4000) -> tuple[str, bool]:
    """A text at random, and whether it ended. It closes what is open soon, and ends half of the times that it may."""
    constraint = begun(grammar)
    ids: list[int] = []
    while len(ids) < steps_max:
        (row,) = constraint.allowed([constraint])
        allowed = np.flatnonzero(row).tolist()
        if allowed == [EOS] or (EOS in allowed and draw.random() < 0.5):
            return decoded(ids), True
        allowed = [id_ for id_ in allowed if id_ != EOS]
        allowed = [id_ for id_ in allowed if id_ > EOS or 31 < id_ < 127] or allowed
        closing = [id_ for id_ in map(ord, '"}]') if id_ in allowed]
        ids.append(closing[0] if closing and draw.random() < 0.4 else draw.choice(allowed))
        if constraint.follow(ids[-1]):
            assert not constraint.fault
            return decoded(ids), True
    return decoded(ids), False


def decoded(ids: list[int]) -> str:
    return b"".join(SPEC.token_bytes[id_] for id_ in ids).decode("utf-8", "replace")


def parsed(syntax: Syntax, text: str, *, cut: bool = False) -> list[Piece]:
    numbers = count()
    parser = ToolParser(syntax, known=set(FUNCTIONS), new_id=lambda: str(next(numbers)))
    return parser.feed(text) + parser.finish(cut=cut)


def check_calls(pieces: list[Piece]) -> int:
    """Every call's arguments follow its function's schema; how many there are."""
    names = [piece.name for piece in pieces if isinstance(piece, ToolCallBegin)]
    for index, name in enumerate(names):
        arguments = "".join(p.text for p in pieces if isinstance(p, ToolArguments) and p.index == index)
        jsonschema.validate(json.loads(arguments), FUNCTIONS[name])
    return len(names)


@pytest.mark.parametrize(
    ("syntax", "markers"), FORMATS, ids=lambda value: value.name if isinstance(value, Syntax) else str(len(value))
)
class TestEachFormat:
    @pytest.mark.parametrize("several", [True, False])
    def test_calls_and_nothing_else(self, syntax: Syntax, markers: dict[str, int], several: bool) -> None:
        grammar = calls_grammar(calls(syntax, markers, several=several))
        numbers = set()
        for seed in range(12):
            text, ended = walk(grammar, random.Random(seed))
            assert ended, text
            pieces = parsed(syntax, text)
            assert not [piece for piece in pieces if isinstance(piece, TextPiece)], text
            numbers.add(check_calls(pieces))
        assert max(numbers) <= CALLS_MAX and min(numbers) >= 1
        assert (max(numbers) > 1) == several

    def test_calls_or_one_json_text(self, syntax: Syntax, markers: dict[str, int]) -> None:
        form = {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3}
        grammar = calls_or_json_grammar(calls(syntax, markers), form)
        kinds = set()
        for seed in range(20):
            text, ended = walk(grammar, random.Random(seed))
            assert ended
            pieces = parsed(syntax, text)
            kinds.add(bool(check_calls(pieces)))
            if not check_calls(pieces):
                jsonschema.validate(json.loads(text), form)
        assert kinds == {True, False} or MISTRAL is syntax  # whose marker and a list begin alike

    def test_text_in_which_calls_are_right(self, syntax: Syntax, markers: dict[str, int]) -> None:
        grammar = text_and_calls_grammar(calls(syntax, markers))
        constraint = begun(grammar)
        for byte in b"Some text, 1 < 2 [and] more.":
            assert not constraint.follow(byte)
        assert constraint.matcher.is_accepting()
        for seed in range(6):
            text, ended = walk(calls_grammar(calls(syntax, markers, several=False)), random.Random(seed))
            assert ended
            constraint = begun(grammar)
            for id_ in encoded(text, markers):
                constraint.follow(id_)
            assert not constraint.fault, text
        constraint = begun(grammar)
        wrong = text.replace('"a"', '"b"').replace("add", "sub").replace("any", "all")
        for id_ in encoded(wrong, markers):
            constraint.follow(id_)
        assert constraint.fault, wrong


def encoded(text: str, markers: dict[str, int]) -> list[int]:
    ids: list[int] = []
    while text:
        marker = next((m for m in markers if text.startswith(m)), None)
        ids += [markers[marker]] if marker else text[0].encode()
        text = text[len(marker or text[0]) :]
    return ids


def test_names_are_written_as_json() -> None:
    grammar = calls_grammar(Calls(HERMES, (('odd."name"', ANY_OBJECT),), {}, False))
    text, _ = walk(grammar, random.Random(0))
    assert text.startswith('<tool_call>\n{"name": "odd.\\"name\\"", "arguments": {')


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"properties": {"a": {"anyOf": [{"minProperties": 2}]}}}, "minProperties"),
        (json.loads('{"items":' * 100 + "{}" + "}" * 100), "deep"),
        ({"properties": {f"p{n}": {} for n in range(PROPERTIES_MAX + 1)}}, "properties"),
        ({"properties": {f"p{n}": {} for n in range(PROPERTIES_MAX)}}, ""),
        ({"$ref": "#"}, "leads to itself"),
        ({"allOf": [{"$ref": "#"}]}, "leads to itself"),
        ({"$defs": {"a": {"$ref": "#/$defs/b~1%20"}, "b/ ": {"$ref": "#/$defs/a"}}}, "leads to itself"),
        ({"properties": {"a": {"$ref": "#/properties/a"}}}, "leads to itself"),
        ({"properties": {"next": {"$ref": "#"}}}, ""),
        ({"anyOf": [{"type": "null"}, {"$ref": "#"}]}, ""),
        ({"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}], "$defs": {"a": {}}}, ""),
        ({"$ref": "#/nowhere/0"}, ""),
        ({"minProperties": 1, "properties": {"minProperties": {"type": "integer"}}}, ""),
        (json.loads('{"items":' * 99 + "{}" + "}" * 99), ""),
        *[(schema, "") for schema in SCHEMAS.values()],
    ],
)
def test_what_grammars_can_not_say(schema: dict[str, Any], word: str) -> None:
    fault = schema_fault(schema)
    assert word in fault if word else not fault


def test_as_many_optional_properties_as_there_may_be() -> None:
    names = {f"p{n}": {"type": "integer"} for n in range(PROPERTIES_MAX)}
    constraint = begun(json_grammar({"type": "object", "properties": names, "additionalProperties": False}))
    for byte in b'{"p7": 1, "p999": 2':
        assert constraint.allowed([constraint])[0].any()
        assert not constraint.follow(byte), constraint.fault
    constraint.follow(ord("}"))
    assert constraint.ended and not constraint.fault


def test_white_space_has_an_end() -> None:
    constraint = begun(json_grammar({**ADD, "x-guidance": {"whitespace_flexible": False}}))
    for byte in b'{\n    "a"' + b" " + b":":
        assert not constraint.follow(byte), bytes([byte])
    constraint.follow(ord("\n"))
    for _ in range(41):
        if constraint.ended:
            break
        constraint.follow(ord(" "))
    assert constraint.fault
