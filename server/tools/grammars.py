"""Grammars (see engine.grammar) for answers that must be JSON, or call tools, in a family's own format.

Text only: nothing is compiled here. White space between a JSON text's parts is one space, or a line end with its
indentation: a model that may go on with blanks for ever does so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from server.tools.numbers import NotHeld, held
from server.tools.parser import ARGS, LLAMA3, Syntax

# More calls than anybody asks for at once. A weak model that must call would not stop before its max_tokens.
CALLS_MAX = 16
# llguidance reads JSON to about this depth.
SCHEMA_DEPTH_MAX = 100
# Of one object. Where they are optional, any of them may follow any other, which each token is compared with.
PROPERTIES_MAX = 1000
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_LIST = '" "? "["'  # of calls in Mistral's older form: its templates differ in the blank
_JSON_OPTIONS = {"whitespace_pattern": r"(\n {0,40}| )?"}


def schema_fault(schema: Mapping[str, Any]) -> str:
    """What no compiler of grammars will say against a schema, as a sentence; "" for nothing."""
    unseen: list[tuple[Any, int]] = [(schema, 1)]
    left: set[int] = set()
    while unseen:
        value, depth = unseen.pop()
        if depth > SCHEMA_DEPTH_MAX:
            return f"it is nested more than {SCHEMA_DEPTH_MAX} levels deep"
        if isinstance(value, Mapping):
            least = value.get("minProperties")
            if isinstance(least, int) and least > 1:  # a name may be given twice, and then counts once
                return "minProperties above 1 is not supported; name the properties in required"
            if len(value) > PROPERTIES_MAX:
                return f"it has more than {PROPERTIES_MAX} properties in one object"
            unseen += [(each, depth + 1) for each in value.values()]
            if _leads_to_itself(schema, value, left):
                return "a $ref in it leads to itself, and to nothing else"
        elif isinstance(value, list):
            unseen += [(each, depth + 1) for each in value]
    try:
        held(schema)
    except NotHeld as fault:
        return str(fault)
    return ""


def _leads_to_itself(root: Mapping[str, Any], start: Mapping[str, Any], left: set[int]) -> bool:
    """Whether what `start` must satisfy, by its $ref and all of its allOf, comes back to where it was. `left` has the
    ids of values that were followed to their ends before."""
    path: list[tuple[int, list[Any]]] = []
    entered: set[int] = set()
    ahead = [start]
    while True:
        while ahead:
            value = ahead.pop()
            if id(value) in entered:
                return True
            if isinstance(value, Mapping) and id(value) not in left:
                path.append((id(value), ahead))
                entered.add(id(value))
                ahead = _musts(root, value)
        if not path:
            return False
        done, ahead = path.pop()
        entered.remove(done)
        left.add(done)


def _musts(root: Mapping[str, Any], value: Mapping[str, Any]) -> list[Any]:
    both = value.get("allOf")
    musts = list(both) if isinstance(both, list) else []
    reference = value.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        musts.append(_resolved(root, reference))
    return musts


def _resolved(root: Mapping[str, Any], reference: str) -> Any:
    """What a JSON pointer (RFC 6901) in a fragment points to; None for nothing, which the compiler will say."""
    value: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        elif isinstance(value, Mapping):
            value = value.get(name)
        else:
            return None
    return value


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls that a grammar allows: each function's name and the schema of its arguments. `marker_ids`: ids of the
    syntax's markers that are special tokens, by their text."""

    syntax: Syntax
    functions: tuple[tuple[str, Mapping[str, Any]], ...]
    marker_ids: Mapping[str, int]
    several: bool


def json_grammar(schema: Mapping[str, Any]) -> str:
    """An answer that is one JSON text."""
    return f"start: {_json(schema)}\n"


def calls_grammar(calls: Calls) -> str:
    """An answer of at least one call, and nothing else."""
    return f"start: calls\n{_rules(calls)}"


def calls_or_json_grammar(calls: Calls, schema: Mapping[str, Any]) -> str:
    """An answer of calls, or one JSON text."""
    return f"start: calls | {_json(schema)}\n{_rules(calls)}"


def text_and_calls_grammar(calls: Calls) -> str:
    """Any text, in which calls are as they should be."""
    if calls.syntax is LLAMA3:  # whose answer is either calls, which begin with a brace, or text
        return f"start: calls | TEXT\nTEXT: /([^{{ \\n](.|\\n)*)?/\n{_rules(calls)}"
    marker = _marker(calls, calls.syntax.marker)
    if marker.startswith("<["):
        rules = f"marked: TEXT {marker}\n"
    else:
        rules = f"marked[lazy]: TEXT {marker}\n"
    return (
        f"start: (marked behind)* TEXT\nTEXT: /(.|\\n)*/\n{rules}behind: {_behind_marker(calls)}\n{_functions(calls)}"
    )


def _rules(calls: Calls) -> str:
    syntax = calls.syntax
    between = ' "; "' if syntax is LLAMA3 else ' "\\n"' if syntax.close else ""
    rules = _functions(calls)
    if syntax is LLAMA3:
        one = "function"
    else:
        one = "call"
        rules += f"call: {_marker(calls, syntax.marker)} {_behind_marker(calls)}\n"
    if not calls.several:
        return f"calls: {one}\n{rules}"
    if syntax.name_before and ARGS not in calls.marker_ids:  # one list holds all
        listed = f'{_LIST} function (", " function){{0,{CALLS_MAX - 1}}} "]"'
        return f"calls: {_marker(calls, syntax.marker)} {listed}\n{_functions(calls)}"
    return f"calls: {one} ({between} {one}){{0,{CALLS_MAX - 1}}}\n{rules}"


def _behind_marker(calls: Calls) -> str:
    """What follows the marker of one call."""
    syntax = calls.syntax
    if syntax.close:
        return f'"\\n" function "\\n" {_marker(calls, syntax.close)}'
    if ARGS in calls.marker_ids:
        return "function"
    return f'{_LIST} function "]"'


def _functions(calls: Calls) -> str:
    """One function's call, without markers."""
    names = " | ".join(f"function_{i}" for i in range(len(calls.functions)))
    rules = [f"function: {names}"]
    for i, (name, schema) in enumerate(calls.functions):
        if ARGS in calls.marker_ids:
            rules.append(f"function_{i}: {_literal(name)} {_marker(calls, ARGS)} {_json(schema)}")
        else:
            key = "parameters" if calls.syntax is LLAMA3 else "arguments"
            head = _literal(f'{{"name": {json.dumps(name)}, "{key}": ')
            rules.append(f'function_{i}: {head} {_json(schema)} "}}"')
    return "\n".join(rules) + "\n"


def _marker(calls: Calls, text: str) -> str:
    id_ = calls.marker_ids.get(text)
    return _literal(text) if id_ is None else f"<[{id_}]>"


def _literal(text: str) -> str:
    return json.dumps(text)


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**held(schema), "x-guidance": _JSON_OPTIONS})
