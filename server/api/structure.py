"""The form that an answer must have, for every API: JSON by a schema, calls of tools, or free text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from engine.grammar import grammar_fault
from server.api.errors import invalid
from server.api.generation import Generation
from server.api.tool_use import REQUIRED, Tool, ToolUse
from server.tools import grammars
from server.tools.formats import markers
from server.tools.grammars import ANY_OBJECT, Calls, schema_fault

# Schemas are checked one at a time: it takes milliseconds, and 0.3 s of another core for the worst.
CHECKERS = 1
_NOTHING: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

_checkers = ThreadPoolExecutor(CHECKERS, thread_name_prefix="grammar")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class JsonForm:
    """An answer that is one JSON text, of this schema. `param` names where the schema came from."""

    schema: Mapping[str, Any]
    param: str


async def answer_grammar(generation: Generation, use: ToolUse | None, form: JsonForm | None) -> str:
    """The grammar of the answers to one request; "" for free text. Raises ApiError 400 for a schema that can't be
    enforced, and names it."""
    if form is not None:
        await _check_schema(form.schema, form.param)
    if use is None or not (form or use.mode == REQUIRED or any(tool.strict for tool in use.tools)):
        return grammars.json_grammar(form.schema) if form else ""
    calls = await _calls(generation, use)
    if use.mode == REQUIRED:
        grammar = grammars.calls_grammar(calls)
    elif form is not None:
        grammar = grammars.calls_or_json_grammar(calls, form.schema)
    else:
        grammar = grammars.text_and_calls_grammar(calls)
    _refuse(await _off_the_loop(grammar_fault, grammar), "tools")
    return grammar


async def _calls(generation: Generation, use: ToolUse) -> Calls:
    model = generation.model
    assert model.syntax is not None, "call_format refuses such a request"
    functions: list[tuple[str, Mapping[str, Any]]] = []
    for tool in use.tools:
        schema: Mapping[str, Any] = ANY_OBJECT
        if tool.strict or use.mode == REQUIRED:
            schema = _arguments(tool)
            await _check_schema(schema, tool.param)
        functions.append((tool.name, schema))
    return Calls(model.syntax, tuple(functions), markers(model.syntax, model.tokenizer), use.parallel)


def _arguments(tool: Tool) -> Mapping[str, Any]:
    if tool.parameters is None:
        return _NOTHING
    if tool.parameters.get("type", "object") != "object":
        raise invalid(tool.param, "a function's parameters are the schema of an object", "invalid_schema")
    return {**tool.parameters, "type": "object"}


async def _check_schema(schema: Mapping[str, Any], param: str) -> None:
    _refuse(await _off_the_loop(_schema_fault, schema), param)


def _schema_fault(schema: Mapping[str, Any]) -> str:
    return schema_fault(schema) or grammar_fault(grammars.json_grammar(schema))


async def _off_the_loop(find_fault: Callable[[T], str], given: T) -> str:
    return await asyncio.get_running_loop().run_in_executor(_checkers, find_fault, given)


def _refuse(fault: str, param: str) -> None:
    if fault:
        raise invalid(param, f"this schema can't be enforced: {fault}", "invalid_schema")
