"""Case B04 and DESIGN section 5: the same Idempotency-Key finds the same generation, and begins no second one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.http_client import Answer, chat, request_bytes
from tests.support.serving import Server

STARTED = 'sluice_requests_started_total{api="chat"}'


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--synthetic-step-ms", "5") as running:
        yield running


def post(server: Server, name: str, body: bytes, **headers: str) -> Answer:
    extra = {"idempotency-key": name, "content-type": "application/json", **headers}
    return server.ask("POST", "/v1/chat/completions", body, list(extra.items()))


def test_b04_the_same_request_reads_the_same_stream(server: Server) -> None:
    before = server.metrics()[STARTED]
    body = json.dumps(chat("once", max_tokens=20, stream=True)).encode()
    first = post(server, "stream-1", body)
    again = post(server, "stream-1", body)
    assert first.status == again.status == 200
    assert first.body == again.body
    assert server.metrics()[STARTED] == before + 1


def test_b04_a_dropped_client_that_posts_again_goes_on_from_the_start(server: Server) -> None:
    before = server.metrics()[STARTED]
    body = json.dumps(chat("dropped", max_tokens=200, stream=True)).encode()
    headers = [("idempotency-key", "stream-2"), ("content-type", "application/json")]
    with server.connect() as client:
        client.send(request_bytes("POST", "/v1/chat/completions", body, headers))
        client.begin("POST")
        seen = [event.data for event in client.read_events(5).events()]
        client.reset()
    whole = post(server, "stream-2", body)
    assert [event.data for event in whole.events()[:5]] == seen[:5]
    assert whole.events()[-1].data == "[DONE]"
    assert server.metrics()[STARTED] == before + 1


def test_b04_requests_at_once_share_one_generation(server: Server) -> None:
    before = server.metrics()[STARTED]
    body = json.dumps(chat("at once " * 3000, max_tokens=10)).encode()  # long enough to be tokenised off the loop
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: post(server, "whole-1", body), range(4)))
    assert len({bytes(answer.body) for answer in answers}) == 1
    assert answers[0].json()["usage"]["completion_tokens"] == 10
    assert server.metrics()[STARTED] == before + 1


def test_another_request_under_the_same_key_is_refused(server: Server) -> None:
    assert post(server, "twice", json.dumps(chat("one", max_tokens=1)).encode()).status == 200
    refused = post(server, "twice", json.dumps(chat("two", max_tokens=1)).encode())
    assert refused.error(422)["code"] == "idempotency_key_reused"


def test_a_refused_request_leaves_its_key_free(server: Server) -> None:
    assert post(server, "free", b'{"messages":[]}').status == 400
    assert post(server, "free", json.dumps(chat("now right", max_tokens=1)).encode()).status == 200


def test_a_key_that_is_too_long_is_refused(server: Server) -> None:
    assert (
        post(server, "k" * 256, json.dumps(chat("x", max_tokens=1)).encode()).error(400)["param"] == "Idempotency-Key"
    )
