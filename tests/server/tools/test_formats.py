"""Which format a template teaches, and the words for templates that know of no tools."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.tokenizer import Tokenizer
from server.chat import ChatTemplate
from server.tools.formats import markers, new_call_id, syntax_of, written
from server.tools.parser import HERMES, LLAMA3, MISTRAL, Syntax
from tests.support.specs import CHATML, bytes_spec

# The lines that tell, of the families' own templates.
IF_TOOLS, END = "{%- if tools %}", "{% endif %}"
LLAMA_32 = '{"name": function name, "parameters": dictionary of argument name and its value}'
TEMPLATES: dict[str, tuple[str, Syntax | None]] = {
    "Qwen 2.5": (f"{IF_TOOLS}within <tool_call></tool_call> XML tags:\\n<tool_call>\\n…\\n</tool_call>{END}", HERMES),
    "Qwen3-Coder": (f"{IF_TOOLS}<tool_call>\\n<function=example_function_name>\\n<parameter=…>{END}", None),
    "Llama 3.1": (f"{IF_TOOLS}{LLAMA_32}{{{{ '<|python_tag|>' }}}}{END}", LLAMA3),
    "Llama 3.2": (f"{IF_TOOLS}{LLAMA_32}{END}", LLAMA3),
    "Mistral": (f"{IF_TOOLS}[AVAILABLE_TOOLS]{{{{ tools }}}}[/AVAILABLE_TOOLS]{END}{{{{ '[TOOL_CALLS][' }}}}", MISTRAL),
    "of another family": (f"{IF_TOOLS}<|tool_calls_section_begin|>{END}", None),
    "without tools": (CHATML, HERMES),
    "none": ("", HERMES),
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_tells_the_format(name: str) -> None:
    source, syntax = TEMPLATES[name]
    template = ChatTemplate(source)
    assert template.takes_tools == ("tools" in source)
    assert syntax_of(source, takes_tools=template.takes_tools) is syntax


def test_markers_that_are_special_tokens() -> None:
    tokenizer = Tokenizer(bytes_spec(["<|im_end|>", "[TOOL_CALLS]", "[ARGS]", "[INST]"]))
    assert markers(MISTRAL, tokenizer) == {"[TOOL_CALLS]": 257, "[ARGS]": 258}
    assert markers(HERMES, tokenizer) == {}


def test_ids_never_repeat_and_mistrals_have_nine_characters() -> None:
    ids = {new_call_id(MISTRAL) for _ in range(100)}
    assert len(ids) == 100 and {len(id_) for id_ in ids} == {9} and all(id_.isalnum() for id_ in ids)
    assert new_call_id(HERMES).startswith("call_")


def test_tools_are_written_into_the_system_message() -> None:
    turns: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    system, user = written(turns, [TOOL])
    assert user == turns[0] and system["role"] == "system"
    assert json.dumps(TOOL) in system["content"] and "<tool_call>" in system["content"]
    (joined, _) = written([{"role": "system", "content": "Be brief."}, *turns], [TOOL])
    assert joined["content"] == "Be brief.\n\n" + system["content"]
    assert written(turns, None) == turns


def test_calls_and_their_answers_are_written_as_text() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": "é"}}}
    turns: list[dict[str, Any]] = [
        {"role": "assistant", "content": "Hm.", "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "a", "content": "42"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    text = '<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>'
    assert written(turns, None) == [
        {"role": "assistant", "content": f"Hm.\n{text}\n{text}"},
        {"role": "user", "content": "<tool_response>\n42\n</tool_response>"},
        {"role": "assistant", "content": text},
    ]
