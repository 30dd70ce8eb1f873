"""The default model in float32: a stream whose blocks were given away, or whose engine died, says what it would
have said (issue 6). Greedy and seeded; the prompt and what was said are computed anew, in other chunks than before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import pytest

from tests.support.probes import DETACHED, RUNNING, USED, kill_engine, wait_idle
from tests.support.readings import PLAIN
from tests.support.serving import Server, chat, until

CHAT = "/v1/chat/completions"
JSON = ("Accept", "application/json")
QUESTION = "Tell me about the sea."
TOKENS = 30
# Of 16 tokens each. The question and its answer fit, and so does the other prompt, but not both.
BLOCKS = 8
OTHER = "Please read this list and say which one is the longest of all: " + ", ".join(f"number {n}" for n in range(15))
WAYS: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.0, "seed": 11}, {"temperature": 0.8, "top_p": 0.9}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    flags = ("--dtype", "float32", "--kv-blocks", str(BLOCKS), "--send-buffer", "4096", "--drain-timeout", "0")
    with Server(*flags, engine=None) as running:
        yield running


def body(fields: dict[str, Any]) -> dict[str, Any]:
    return chat(QUESTION, stream=True, max_tokens=TOKENS, ignore_eos=True, **fields)


def evict(server: Server) -> None:
    """Another request takes nearly the whole pool."""
    answer = server.ask("POST", CHAT, chat(OTHER, max_tokens=1, temperature=0, ignore_eos=True))
    assert answer.status == 200, bytes(answer.body)
    assert answer.json()["usage"]["prompt_tokens"] > (BLOCKS - 2) * 16, answer.json()["usage"]


@pytest.mark.parametrize("fields", WAYS[:2])
def test_detached_and_evicted(server: Server, fields: dict[str, Any]) -> None:
    alone = server.ask("POST", CHAT, body(fields)).text()
    evict(server)
    with server.connect() as client:
        client.request("POST", CHAT, body(fields))
        name = client.begin("POST").header("x-stream-id")
        seen = client.read_events(15).events()
        client.reset()
    server.wait_metric(DETACHED, 1)
    until(lambda: server.metrics()[USED] == 0, "a detached stream holds no block")
    evict(server)
    rest = server.ask("GET", f"/v1/streams/{name}", None, [("Last-Event-ID", seen[-1].id or "")])
    whole = server.ask("GET", f"/v1/streams/{name}")
    assert whole.text() == alone
    assert whole.body.endswith(rest.body)
    wait_idle(server)


def test_its_engine_died(server: Server) -> None:
    seeded = body(WAYS[1])
    alone = server.ask("POST", CHAT, seeded).text()
    with server.connect() as client:
        client.request("POST", CHAT, seeded)
        client.begin("POST")
        client.read_events(15)
        kill_engine(server)
        assert client.finish().text() == alone
    wait_idle(server)


@pytest.mark.parametrize("fields", WAYS[1:])
def test_parked_and_preempted_again_and_again(fields: dict[str, Any]) -> None:
    """Between two polls the stream is parked, and somebody else takes its blocks."""
    flags = ("--dtype", "float32", "--kv-blocks", str(BLOCKS), "--credit-window", "8", "--drain-timeout", "0")
    target = "/v1/generate?" + urlencode({"prompt": QUESTION, "max_tokens": 24, "ignore_eos": "true", **fields})
    with Server(*flags, engine=None) as server:
        name = server.ask("GET", target, None, [JSON]).json()["stream"]
        polls = 0
        document: dict[str, Any] = {"next": 0, "outcome": None}
        while document["outcome"] is None:
            position = f"&after={document['next'] - 1}" if polls else ""
            document = server.ask("GET", f"/v1/streams/{name}?wait=10{position}", None, [JSON]).json()
            polls += 1
            if document["outcome"] is None:
                until(lambda: server.metrics()[RUNNING] == 0, "parked, or at its end")
                evict(server)
        assert polls > 2 and server.metrics()["sluice_preemptions_total"] >= 2
        text = server.ask("GET", f"/v1/streams/{name}", None, [PLAIN]).body
        if "seed" in fields or not fields["temperature"]:
            assert text == server.ask("GET", target, None, [PLAIN]).body
        else:  # with a seed that only the server knows: what it said once stays said
            assert text and text == server.ask("GET", f"/v1/streams/{name}", None, [PLAIN]).body
