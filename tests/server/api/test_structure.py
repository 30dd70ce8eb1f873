"""Which grammar a request asks for, and that looking at a schema holds nobody up (server/api/structure)."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from server.api import structure
from server.api.errors import ApiError
from server.api.generation import Generation, Model
from server.api.structure import JsonForm, answer_grammar
from server.api.tool_use import REQUIRED, Tool, ToolUse
from server.chat import ChatTemplate
from tests.support.engines import hello
from tests.support.tables import Rig

F, STRICT = Tool("f", parameters={"properties": {"a": {}}}), Tool("g", strict=True)
LONG = {"const": {"a": "x" * 9000}}
FORM = JsonForm({"type": "object"}, "form")


def generation() -> Generation:
    rig = Rig()
    return Generation(rig.table, Model("model", hello(), rig.tokenizer, ChatTemplate("x"), 0))


def grammar(use: ToolUse | None, form: JsonForm | None) -> str:
    return asyncio.run(answer_grammar(generation(), use, form))


def test_free_text_has_none() -> None:
    assert grammar(None, None) == grammar(ToolUse((F,)), None) == ""


@pytest.mark.parametrize(
    ("use", "form", "parts"),
    [
        (None, FORM, ["start: %json"]),
        (ToolUse((F,), REQUIRED), None, ["start: calls\n", "function_0"]),
        (ToolUse((F,), REQUIRED), FORM, ["start: calls\n"]),
        (ToolUse((F,)), FORM, ["start: calls | %json"]),
        (ToolUse((F, STRICT)), None, ["TEXT: ", "function_1"]),
    ],
)
def test_each_form_has_its_own(use: ToolUse | None, form: JsonForm | None, parts: list[str]) -> None:
    made = grammar(use, form)
    assert all(part in made for part in parts), made


def test_a_function_without_parameters_takes_nothing() -> None:
    assert '"additionalProperties": false' in grammar(ToolUse((Tool("f"),), REQUIRED), None)


@pytest.mark.parametrize(
    ("use", "form", "param"),
    [
        (None, JsonForm({"not": {}}, "form"), "form"),
        (ToolUse((F, Tool("g", parameters={"not": {}}, param="tools.1")), REQUIRED), None, "tools.1"),
        (ToolUse((Tool("g", parameters={"type": "string"}, strict=True, param="tools.0"),)), None, "tools.0"),
        (ToolUse(tuple(Tool(f"f{n}", parameters=LONG) for n in range(40)), REQUIRED), None, "tools"),
    ],
)
def test_what_can_not_be_enforced_is_refused_by_name(use: ToolUse | None, form: JsonForm | None, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        grammar(use, form)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, "invalid_schema")


def test_a_slow_schema_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    def slow(_: str) -> str:
        gate.wait()
        return ""

    monkeypatch.setattr(structure, "grammar_fault", slow)

    async def main() -> list[Any]:
        waiting = asyncio.ensure_future(answer_grammar(generation(), None, FORM))
        others = [await answer_grammar(generation(), None, None) for _ in range(100)]
        assert not waiting.done()
        gate.set()
        return [*others, await waiting]

    *others, waited = asyncio.run(main())
    assert others == [""] * 100 and waited
