"""Requests as they are planned, without a server: the parts that a chat or a completion becomes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from server.api.errors import ApiError
from server.api.generation import Generation, Model
from server.api.openai_chat import plan_chat
from server.api.openai_completions import plan_completion
from server.api.types import ChatRequest, CompletionRequest, parse
from server.chat import ChatTemplate
from server.table import Part
from tests.support.engines import hello
from tests.support.tables import Rig

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}:"


def generation(rig: Rig | None = None) -> Generation:
    rig = rig or Rig()
    return Generation(rig.table, Model("model", hello(), rig.tokenizer, ChatTemplate(TEMPLATE), 0))


def chat_parts(**fields: Any) -> list[Part]:
    request = parse(json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode(), ChatRequest)
    return asyncio.run(plan_chat(generation(), request, "chat"))[1]


def completion_parts(prompt: Any, **fields: Any) -> list[Part]:
    request = parse(json.dumps({"prompt": prompt, **fields}).encode(), CompletionRequest)
    return asyncio.run(plan_completion(generation(), request, "completions"))[1]


def refusal(plan: Any, *args: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as error:
        plan(*args, **fields)
    return error.value
