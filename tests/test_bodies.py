"""Bodies of as many bytes as are allowed, made to take long: each is refused by a bound, before its values are made.

What they would take is memory too, of many times the body's size, and that is what is looked at.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.serving import Server, WebSocketClient, chat, request_bytes

COMPLETIONS, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
SIZE = 8 * 1024 * 1024 - 200
ASK = {"model": "synthetic", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
# The body as it came and its copy, twice in a buffer that grows, and a list of its parts; its values would take more.
ROOM = 60 * 1024 * 1024


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


def filled(head: str, item: str, tail: str, size: int = SIZE) -> bytes:
    """`head` and a list's rest of so many items that it has `size` bytes."""
    count = (size - len(head) - len(tail)) // (len(item) + 1)
    return f"{head}{','.join([item] * count)}{tail}".encode()


def peak_bytes(server: Server, since: bool = False) -> int:
    """The most memory that the server had since this was asked with `since`."""
    process = Path(f"/proc/{server.process.pid}")
    if since:
        with suppress(OSError):  # where the system can't, it is the most so far
            (process / "clear_refs").write_text("5")
    line = next(line for line in (process / "status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def refused(server: Server, route: str, body: bytes) -> dict[str, Any]:
    """The error, found without much memory."""
    before = peak_bytes(server, since=True)
    with server.connect() as client:
        client.send(request_bytes("POST", route, body, [("Content-Type", "application/json")]))
        answer = client.answer("POST")
    assert answer.status == 400
    assert peak_bytes(server) - before < ROOM
    assert len(answer.body) < 10_000
    error: dict[str, Any] = answer.json()["error"]
    return error


@pytest.mark.parametrize("item", ["1", "10000", "-1", "1.5"])
def test_ids_of_a_prompt_that_can_not_fit(server: Server, item: str) -> None:
    body = filled('{"prompt":[', item, "]}")
    error = refused(server, COMPLETIONS, body)
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert (
        f"the prompt has {body.count(b',') + 1} tokens; with room for one new token at most 131071" in error["message"]
    )


@pytest.mark.parametrize("item", [f"[{','.join(['1'] * 16_000)}]", f"[{','.join(['1'] * 131_000)}]", "null"])
def test_ids_of_many_prompts(server: Server, item: str) -> None:
    assert (
        "token ids than a request may (262,144"
        in refused(server, COMPLETIONS, filled('{"prompt":[', item, "]}"))["message"]
    )


def test_ids_of_many_choices(server: Server) -> None:
    """Each is sent to the engine: a request of some bytes could have it name the blocks of a hundred million ids."""
    prompt = [[1] * 131_000, [2] * 131_000]
    body = json.dumps({"prompt": prompt, "n": 16}, separators=(",", ":")).encode()
    assert "4,192,000 tokens; 2,097,152 are allowed" in refused(server, COMPLETIONS, body)["message"]


def test_ids_to_detokenize(server: Server) -> None:
    assert "131,072" in refused(server, "/detokenize", filled('{"tokens":[', "1", "]}"))["message"]


@pytest.mark.parametrize(
    ("route", "head", "tail"),
    [
        (COMPLETIONS, '{"prompt":[[1],', "]}"),
        (CHAT, '{"messages":[{"role":"user","content":"hi"}],"prediction":[', "]}"),
        (RESPONSES, '{"input":"hi","tools":[', "]}"),
        (MESSAGES, '{"model":"synthetic","max_tokens":1,"messages":[', "]}"),
        ("/tokenize", '{"messages":[', "]}"),
    ],
)
def test_long_numbers(server: Server, route: str, head: str, tail: str) -> None:
    """The time to read one grows with the square of its length."""
    assert "a number of more than 128 digits" in refused(server, route, filled(head, "1" * 4000, tail))["message"]


def test_long_stop_strings(server: Server) -> None:
    body = filled('{"prompt":"a","stop":[', f'"{"ab" * 250_000}"', "]}")
    assert refused(server, COMPLETIONS, body)["message"] == "a stop string has at most 4096 characters"
    body = json.dumps({**ASK, "stop_sequences": ["ab" * 4_000_000]}).encode()
    assert "at most 4096 characters" in refused(server, MESSAGES, body)["message"]


@pytest.mark.parametrize("field", ["user", "prompt_cache_key"])
def test_what_a_response_would_show_again_and_again(server: Server, field: str) -> None:
    error = refused(server, RESPONSES, json.dumps({"input": "hi", "stream": True, field: "x" * 8_000_000}).encode())
    assert (error["param"], error["code"]) == (field, "string_above_max_length")


def test_a_name_that_is_not_known_is_not_repeated_at_length(server: Server) -> None:
    error = refused(server, CHAT, json.dumps({**chat("hi"), "x" * 8_000_000: 1}).encode())
    assert error["code"] == "unknown_parameter"
    assert len(error["message"]) < 3000


def test_a_message_of_a_websocket(server: Server) -> None:
    with WebSocketClient(server) as socket:
        socket.send_text(filled('{"type":"generate","id":"a","prompt":[', "1", "]}", 1_000_000).decode())
        assert "262,144" in json.loads(str(socket.receive()))["error"]["message"]


def test_a_path_with_a_nul_is_told_so(server: Server) -> None:
    assert server.ask("GET", "/health%00").error(400)["message"] == "the path holds a NUL character"
