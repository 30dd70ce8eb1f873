"""Anthropic's messages to the turns of a chat template, and to token ids."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter
from typing import Any

from server.api.anthropic_types import (
    AnyBlock,
    CountTokensRequest,
    TextBlock,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
    UnreadBlock,
)
from server.api.errors import invalid
from server.api.generation import Generation
from server.api.tool_use import ToolUse

BLOCKS_MAX = 16_384  # of a request; each costs some microseconds of the loop's time
Placed = tuple[str, AnyBlock]  # a block and its path in the request
USER, ASSISTANT = "user", "assistant"


async def encode_prompt(generation: Generation, request: CountTokensRequest, use: ToolUse | None) -> list[int]:
    """The prompt's ids. An assistant's turn at the end is continued, as if the model had written it so far. Raises
    ApiError."""
    turns = turns_of(request)
    last = turns[-1]
    continues = last["role"] == ASSISTANT
    if continues and last["content"] != last["content"].rstrip():
        path = f"messages.{len(request.messages) - 1}.content"
        raise invalid(path, "an assistant's text that is to be continued can't end with white space")
    if continues and not last["content"]:
        continues = False
        turns.pop()
    tools = use.shown if use else None
    options = {"add_generation_prompt": not continues, "continue_final_message": continues}
    return await generation.encode_turns(turns, "messages", tools=tools, **options)


def turns_of(request: CountTokensRequest) -> list[dict[str, Any]]:
    """What the chat template takes. Turns of one role that follow each other are one, as in Anthropic's API; texts are
    joined by line ends, as the parts of OpenAI's messages are. Raises ApiError."""
    turns: list[dict[str, Any]] = []
    if request.system:
        turns.append({"role": "system", "content": _joined(_placed(request.system, "system"))})
    waiting: dict[str, Placed] = {}  # calls without an answer, by their ids
    _check_count(request)
    given = [(turn.role, _blocks(turn, f"messages.{index}")) for index, turn in enumerate(request.messages)]
    for role, group in groupby(given, key=itemgetter(0)):
        blocks = [block for _, each in group for block in each]
        if role == USER:
            turns += _user_turns(blocks, waiting)
        _check_answered(waiting)
        if role == ASSISTANT:
            waiting = {block.id: (path, block) for path, block in blocks if isinstance(block, ToolUseBlock)}
        if role != USER:
            turns.append(_turn(role, blocks))
    _check_answered(waiting)
    return turns


def _check_count(request: CountTokensRequest) -> None:
    count = 0
    for index, turn in enumerate(request.messages):
        count += 1 if isinstance(turn.content, str) else len(turn.content)
        if count > BLOCKS_MAX:
            raise invalid(f"messages.{index}.content", f"messages hold more than {BLOCKS_MAX} blocks in all")


def _turn(role: str, blocks: list[Placed]) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": role, "content": _joined(blocks)}
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
        for _, block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    return {**turn, "tool_calls": calls} if calls else turn


def _user_turns(blocks: list[Placed], waiting: dict[str, Placed]) -> Iterable[dict[str, Any]]:
    """Text is the user's, and each answer to a call a tool's, in the order in which they come."""
    for is_result, group in groupby(blocks, key=lambda placed: isinstance(placed[1], ToolResultBlock)):
        if is_result:
            yield from (_result_turn(path, block, waiting) for path, block in group)
        else:
            yield {"role": USER, "content": _joined(group)}


def _result_turn(path: str, block: AnyBlock, waiting: dict[str, Placed]) -> dict[str, Any]:
    assert isinstance(block, ToolResultBlock)
    _, call = waiting.pop(block.tool_use_id, (path, None))
    if not isinstance(call, ToolUseBlock):
        message = f"the message before has no tool_use block with the id {block.tool_use_id[:100]!r}"
        raise invalid(f"{path}.tool_use_id", message)
    text = _joined(_placed(block.content or "", f"{path}.content"))
    content = f"Error: {text}" if block.is_error else text  # templates have no other way to say so
    return {"role": "tool", "content": content, "tool_call_id": block.tool_use_id, "name": call.name}


def _check_answered(waiting: dict[str, Placed]) -> None:
    for id_, (path, _) in waiting.items():
        raise invalid(path, f"the tool_use {id_[:100]!r} has no tool_result in the message behind it")


def _blocks(turn: Turn, path: str) -> list[Placed]:
    """A turn's blocks, all of which may be there."""
    blocks = _placed(turn.content, f"{path}.content")
    for where, block in blocks:
        role = {ToolUseBlock: ASSISTANT, ToolResultBlock: USER}.get(type(block), turn.role)
        if role != turn.role:
            kind = block.__struct_config__.tag
            raise invalid(f"{where}.type", f"{kind!r} blocks belong to turns of the role {role!r}")
    empty = not any(not isinstance(block, TextBlock) or block.text for _, block in blocks)
    if empty and turn.role != ASSISTANT:  # the model's own answer may have been empty
        raise invalid(f"{path}.content", f"a turn of the role {turn.role!r} needs some text")
    return blocks


def _placed(content: str | list[Any], path: str) -> list[Placed]:
    if isinstance(content, str):
        return [(path, TextBlock(text=content))]
    blocks = [(f"{path}.{index}", block) for index, block in enumerate(content)]
    for where, block in blocks:
        if isinstance(block, UnreadBlock):
            kind = block.__struct_config__.tag
            raise invalid(f"{where}.type", f"{kind!r} blocks are not supported; text and tools are")
    return blocks


def _joined(blocks: Iterable[Placed]) -> str:
    return "\n".join(block.text for _, block in blocks if isinstance(block, TextBlock) and block.text)
