"""Anthropic's messages to the turns of a chat template, and to token ids."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from server.api.anthropic_types import CountTokensRequest, TextBlock, Turn, UnreadBlock
from server.api.errors import invalid
from server.api.generation import Generation


async def encode_prompt(generation: Generation, request: CountTokensRequest) -> list[int]:
    """The prompt's ids. An assistant's turn at the end is continued, as if the model had written it so far. Raises
    ApiError."""
    turns = turns_of(request)
    last = turns[-1]
    continues = last["role"] == "assistant"
    if continues and last["content"] != last["content"].rstrip():
        path = f"messages.{len(request.messages) - 1}.content"
        raise invalid(path, "an assistant's text that is to be continued can't end with white space")
    if continues and not last["content"]:
        continues = False
        turns.pop()
    return await generation.encode_turns(turns, "messages", continue_final_message=continues)


def turns_of(request: CountTokensRequest) -> list[dict[str, Any]]:
    """What the chat template takes. Turns of one role that follow each other are one, as in Anthropic's API; texts are
    joined by line ends, as the parts of OpenAI's messages are. Raises ApiError."""
    turns: list[dict[str, Any]] = []
    if request.system:
        turns.append({"role": "system", "content": _text(request.system, "system")})
    given = [(turn.role, _turn_text(turn, f"messages.{index}")) for index, turn in enumerate(request.messages)]
    for role, group in groupby(given, key=itemgetter(0)):
        turns.append({"role": role, "content": "\n".join(text for _, text in group if text)})
    return turns


def _turn_text(turn: Turn, path: str) -> str:
    text = _text(turn.content, f"{path}.content")
    if not text and turn.role != "assistant":  # the model's own answer may have been empty
        raise invalid(f"{path}.content", f"a turn of the role {turn.role!r} needs some text")
    return text


def _text(content: str | Sequence[TextBlock | UnreadBlock], path: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_block_text(block, f"{path}.{index}") for index, block in enumerate(content))


def _block_text(block: TextBlock | UnreadBlock, path: str) -> str:
    if isinstance(block, UnreadBlock):
        kind = block.__struct_config__.tag
        raise invalid(f"{path}.type", f"{kind!r} blocks are not supported; only text is")
    return block.text
