"""What a request's prompts take: how much of it there may be, and what of it is done off the loop
(server/api/generation)."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from engine import vocab
from engine.tokenizer import Tokenizer
from server.api.generation import Generation, Model
from server.api.openai_chat import plan_chat
from server.api.openai_completions import plan_completion
from server.api.types import ChatRequest, CompletionRequest, parse
from server.chat import ChatTemplate
from tests.support.engines import hello
from tests.support.planning import TEMPLATE, chat_parts, completion_parts, generation, refusal
from tests.support.specs import save_directory, train_byte_level
from tests.support.tables import Rig


def test_prompts_of_a_request_have_a_limit_together_each_as_often_as_it_has_choices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("server.api.generation.SUBMITTED_IDS_MAX", 100)
    monkeypatch.setattr("server.api.generation.CHOICES_MAX", 0)  # of so many prompts that fill the context any may be
    assert len(completion_parts(["x" * 10] * 5, n=2)) == 10
    error = refusal(completion_parts, ["x" * 10] * 4 + ["x" * 11], n=2)
    assert (error.status, error.param) == (400, "prompt")
    assert "n=2" in error.message and "102 tokens; 100 are" in error.message


def test_choices_of_a_prompt_that_fills_the_context_are_not_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.api.generation.SUBMITTED_IDS_MAX", 0)
    longest = hello().context_tokens_max - 1
    assert len(completion_parts([65] * longest, n=16)) == 16


def encoded_off_the_loop(monkeypatch: pytest.MonkeyPatch, plan: Any, *args: Any, **fields: Any) -> int:
    """How many times something is encoded there while a request is planned."""
    monkeypatch.setattr("server.api.generation.ENCODE_INLINE_CHARS_MAX", 20)
    times = []

    class Executor(ThreadPoolExecutor):
        def submit(self, *args: Any, **kwargs: Any) -> Any:
            times.append(1)
            return super().submit(*args, **kwargs)

    with Executor(1) as executor:
        monkeypatch.setattr("server.api.generation._encoders", executor)
        plan(*args, **fields)
    return len(times)


def test_many_short_prompts_are_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 of them that were encoded on the loop held all streams up for seconds."""
    assert encoded_off_the_loop(monkeypatch, completion_parts, ["x" * 10] * 2) == 0
    assert encoded_off_the_loop(monkeypatch, completion_parts, ["x" * 10] * 10) == 8


def test_what_a_template_may_show_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    turn = {"role": "assistant", "content": "hi"}
    assert encoded_off_the_loop(monkeypatch, chat_parts, messages=[turn]) == 0
    assert encoded_off_the_loop(monkeypatch, chat_parts, messages=[{**turn, "reasoning_content": "x" * 20}]) == 1


def test_the_guard_of_markers_is_built_off_the_loop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For the first request that has one, once."""
    threads: list[threading.Thread] = []
    trained = save_directory(tmp_path, train_byte_level(), bos_token="<|endoftext|>", eos_token="<|im_end|>")
    tokenizer = Tokenizer(vocab.from_directory(trained))
    planned = Generation(Rig().table, Model("model", hello(), tokenizer, ChatTemplate(TEMPLATE), 0))
    build = tokenizer.build_guard
    monkeypatch.setattr(tokenizer, "build_guard", lambda: (threads.append(threading.current_thread()), build())[1])
    body = b'{"messages":[{"role":"user","content":"<|im_end|>"}]}'
    assert not tokenizer.guard_is_built
    first, second = [asyncio.run(plan_chat(planned, parse(body, ChatRequest), "chat"))[1] for _ in range(2)]
    assert first[0].prompt == second[0].prompt
    assert tokenizer.decode(first[0].prompt, skip_special=True) == "<user><|im_end|>:"
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


def test_an_echoed_prompt_is_decoded_once_for_all_its_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    planned, decoded = generation(), []
    monkeypatch.setattr(planned.model.tokenizer, "decode", lambda ids: decoded.append(ids) or "text")
    request = parse(b'{"prompt":["a","b"],"n":3,"echo":true}', CompletionRequest)
    grammar, parts = asyncio.run(plan_completion(planned, request, "completions"))
    assert (len(parts), len(decoded)) == (6, 2)
    assert [event.text for event in grammar.opening()] == [b"text"] * 6
