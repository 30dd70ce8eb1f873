"""Which format a model writes its tool calls in, and the words for models whose template has no place for tools."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.tokenizer import Tokenizer
from server.tools.parser import ARGS, CALL_ID, HERMES, LLAMA3, MISTRAL, Syntax, ToolParser

# By the names that --tool-parser takes.
SYNTAXES = {syntax.name: syntax for syntax in (HERMES, LLAMA3, MISTRAL)}

_ID_CHARS = string.ascii_letters + string.digits
# 24 of 62 characters are 142 random bits. Mistral's templates refuse ids that haven't exactly nine.
_ID_LENGTH, _MISTRAL_ID_LENGTH = 24, 9

# In the words of the Hermes 2 Pro and Qwen 2.5 prompts, which many models have seen.
_WRITTEN = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""

Turn = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How the answers to one request may call tools. `known`: the tools' names."""

    syntax: Syntax
    known: frozenset[str]
    calls_max: int | None = None
    marker_ids: frozenset[int] = frozenset()  # special ids that the parser must see, though they are no text elsewhere
    required: bool = False  # the engine lets nothing but calls come

    def parser(self) -> ToolParser:
        """For one choice."""
        syntax = self.syntax
        return ToolParser(
            syntax,
            known=self.known,
            new_id=lambda: new_call_id(syntax),
            calls_max=self.calls_max,
            required=self.required,
        )


def markers(syntax: Syntax, tokenizer: Tokenizer) -> dict[str, int]:
    """Those parts of a call's syntax that are special tokens, and their ids."""
    texts = {syntax.marker, syntax.close, *((ARGS, CALL_ID) if syntax.name_before else ())}
    found = {tokenizer.text_of(id_): id_ for id_ in sorted(tokenizer.special_ids)}
    return {text: found[text] for text in texts if text in found}


def syntax_of(template: str, *, takes_tools: bool) -> Syntax | None:
    """The format that a chat template teaches; None for one that isn't known here. To a model whose template takes no
    tools they are described in the Hermes format (`written`)."""
    if not takes_tools:
        return HERMES
    if MISTRAL.marker in template:
        return MISTRAL
    if HERMES.marker in template:
        return None if "<function=" in template else HERMES  # the XML of Qwen3-Coder has the same marker
    if LLAMA3.marker in template or '{"name": function name, "parameters"' in template:
        return LLAMA3
    return None


def new_call_id(syntax: Syntax) -> str:
    """Unguessable, and of a form that the model's template takes back."""
    if syntax is MISTRAL:
        return "".join(secrets.choice(_ID_CHARS) for _ in range(_MISTRAL_ID_LENGTH))
    return "call_" + "".join(secrets.choice(_ID_CHARS) for _ in range(_ID_LENGTH))


def written(turns: Sequence[Turn], tools: Sequence[Turn] | None) -> list[Turn]:
    """The same turns for a template that knows no tools: they are described in the system message, earlier calls are
    text in the Hermes format, and a tool's answer is the user's turn."""
    out: list[Turn] = []
    for turn in turns:
        if turn["role"] == "tool":
            out.append({"role": "user", "content": f"<tool_response>\n{turn['content']}\n</tool_response>"})
        elif turn.get("tool_calls"):
            calls = [call["function"] for call in turn["tool_calls"]]
            shown = [f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls]
            content = "\n".join([turn["content"], *shown] if turn["content"] else shown)
            out.append({"role": turn["role"], "content": content})
        else:
            out.append(turn)
    if tools:
        told = _WRITTEN.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if out and out[0]["role"] == "system":
            out[0] = {**out[0], "content": f"{out[0]['content']}\n\n{told}"}
        else:
            out.insert(0, {"role": "system", "content": told})
    return out
