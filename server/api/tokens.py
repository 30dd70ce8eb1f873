"""POST /tokenize and /detokenize, as vLLM has them: what a prompt or a chat becomes, and what ids say."""

from __future__ import annotations

from typing import Any

import msgspec

from server.api.errors import invalid
from server.api.generation import Generation
from server.api.openai_turns import tools_of, turns_of
from server.api.types import MESSAGES_MAX, Message, ToolDefinition, decode
from server.http import Call, Response, json_response

# Turned into text at once: some ten milliseconds of the loop's time.
IDS_MAX = 131_072


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A `prompt`, or `messages`. `add_special_tokens` None: true for a prompt, false for messages, whose template
    writes them."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[ToolDefinition] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Token ids."""

    model: str | None = None
    tokens: list[int]


async def tokenize(generation: Generation, call: Call) -> Response:
    """POST /tokenize. Raises ApiError."""
    request = decode(call.body, TokenizeRequest)
    generation.check_model(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise invalid("prompt", "give either prompt or messages")
    if request.prompt is not None:
        ids = await _of_prompt(generation, request, request.prompt)
    else:
        ids = await _of_messages(generation, request, request.messages or [])
    answer: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": generation.model.hello.context_tokens_max,
        "tokens": ids,
        "token_strs": [generation.model.tokenizer.name_of(id_) for id_ in ids] if request.return_token_strs else None,
    }
    return json_response(answer)


async def _of_prompt(generation: Generation, request: TokenizeRequest, prompt: str) -> list[int]:
    for name in ("tools", "add_generation_prompt", "continue_final_message"):
        if getattr(request, name) is not None:
            raise invalid(name, f"{name} is for messages, not for a prompt")
    tokenizer = generation.model.tokenizer
    add_bos = False if request.add_special_tokens is False else None
    try:
        return await generation.encode_sized(len(prompt), lambda: tokenizer.encode(prompt, add_bos=add_bos), "prompt")
    except ValueError as error:
        raise invalid("prompt", str(error)) from None


async def _of_messages(generation: Generation, request: TokenizeRequest, messages: list[Message]) -> list[int]:
    if len(messages) > MESSAGES_MAX:
        raise invalid("messages", f"messages holds {len(messages)}; at most {MESSAGES_MAX} are allowed")
    continues = bool(request.continue_final_message)
    generates = request.add_generation_prompt
    if continues and generates:
        raise invalid("continue_final_message", "a message that is continued has no generation prompt behind it")
    if continues and messages and messages[-1].role != "assistant":
        raise invalid("continue_final_message", "only an assistant's message can be continued")
    ids = await generation.encode_turns(
        turns_of(messages),
        "messages",
        tools=[tool.shown for tool in tools_of(request.tools or [])] or None,
        add_generation_prompt=generates is not False and not continues,
        continue_final_message=continues,
    )
    spec = generation.model.tokenizer.spec
    return [spec.bos_id, *ids] if request.add_special_tokens and spec.add_bos and spec.bos_id >= 0 else ids


async def detokenize(generation: Generation, call: Call) -> Response:
    """POST /detokenize: the text, with special tokens shown. Raises ApiError."""
    request = decode(call.body, DetokenizeRequest, ids=IDS_MAX)
    generation.check_model(request.model)
    if len(request.tokens) > IDS_MAX:
        raise invalid("tokens", f"tokens holds {len(request.tokens)} ids; at most {IDS_MAX} are allowed")
    generation.check_ids(request.tokens, "tokens")
    return json_response({"prompt": generation.model.tokenizer.decode(request.tokens, skip_special=False)})
