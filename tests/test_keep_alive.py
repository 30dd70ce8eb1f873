"""One connection, request after request: none of them is left waiting for bytes that the client has sent. Black-box."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.probes import words
from tests.support.serving import Server, chat, request_bytes

pytestmark = pytest.mark.synthetic

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--body-timeout", "5") as server:
        yield server


@pytest.mark.parametrize("size", [60_000, 70_000, 200_000, 1_000_000, 7_000_000])
def test_a_large_body_behind_a_pipelined_request(server: Server, size: int) -> None:
    """Reading stops when much waits behind a request; it goes on with the next one, whose body isn't all here."""
    body = {"prompt": "x" * size, "max_tokens": 1}
    with server.connect() as client:
        client.send(request_bytes("GET", "/health") * 3 + request_bytes("POST", COMPLETIONS, body))
        for _ in range(3):
            assert client.answer().status == 200
        assert client.answer("POST").status == (200 if size < 131_000 else 400)


def test_large_bodies_by_turns_with_small_requests(server: Server) -> None:
    body = {"prompt": "x" * 400_000}
    with server.connect() as client:
        for _ in range(50):
            client.request("GET", "/health")
            assert client.answer().status == 200
            client.request("POST", COMPLETIONS, body)
            assert client.answer("POST").error(400)["code"] == "context_length_exceeded"


def test_a_large_body_behind_a_stream(server: Server) -> None:
    streamed = request_bytes("POST", CHAT, chat("hi", stream=True, max_tokens=50))
    large = request_bytes("POST", COMPLETIONS, {"prompt": "x" * 1_000_000})
    with server.connect() as client:
        client.send((streamed + large) * 3)
        for _ in range(3):
            assert words(client.answer("POST").text()) == 50
            client.answer("POST").error(400)
