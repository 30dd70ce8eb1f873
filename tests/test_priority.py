"""`priority` from outside: the lower number has its place in the batch first, on every route and on a socket, and a
stream that its engine's death sends back keeps it."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.probes import QUEUED, RUNNING
from tests.support.serving import Server, WebSocketClient, until

pytestmark = pytest.mark.synthetic

ROUTES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/responses": {"input": "x", "max_output_tokens": 2},
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server("--max-running", "1", "--synthetic-step-ms", "2", "--drain-timeout", "0") as running:
        yield running


def hold_the_place(socket: WebSocketClient) -> None:
    """The batch has one place."""
    socket.send_json(type="generate", id="holds", prompt="x", max_tokens=10**5)
    while socket.receive_json()["type"] != "token":
        pass


def test_on_a_socket(server: Server) -> None:
    with WebSocketClient(server) as socket:
        hold_the_place(socket)
        for name, fields in {"late": {"priority": 5}, "middle": {}, "first": {"priority": -1}}.items():
            socket.send_json(type="generate", id=name, prompt="x", max_tokens=2, **fields)
        server.wait_metric(QUEUED, 3)
        socket.send_json(type="cancel", id="holds")
        done: list[str] = []
        while len(done) < 3:
            message = socket.receive_json()
            done += [message["id"]] if message["type"] == "done" else []
        assert done == ["first", "middle", "late"]


@pytest.mark.parametrize("path", [*ROUTES, "/v1/generate"])
def test_on_each_route(server: Server, path: str) -> None:
    def ask(priority: int) -> int:
        name = [("X-Request-Id", f"of-{priority}")]
        if path in ROUTES:
            answer = server.ask("POST", path, {**ROUTES[path], "priority": priority}, name)
        else:
            answer = server.ask("GET", f"{path}?prompt=x&max_tokens=2&priority={priority}", None, name)
        return answer.status

    with WebSocketClient(server) as socket, ThreadPoolExecutor(3) as threads:
        hold_the_place(socket)
        before = len(server.log)
        asked = []
        for number, priority in enumerate((7, 0, -7), 1):
            asked.append(threads.submit(ask, priority))
            server.wait_metric(QUEUED, number)
        socket.send_json(type="cancel", id="holds")
        assert [each.result() for each in asked] == [200] * 3
        ended = re.findall(r"of-(-?\d)", server.log[before:])
    assert ended == ["-7", "0", "7"]


def test_a_queued_stream_keeps_it_when_its_engine_dies() -> None:
    flags = ("--max-running", "1", "--synthetic-step-ms", "2", "--drain-timeout", "0")
    with Server(*flags) as server, WebSocketClient(server) as socket:
        hold_the_place(socket)
        for name, priority in (("late", 5), ("first", -1)):
            socket.send_json(type="generate", id=name, prompt="x", max_tokens=2, priority=priority)
        server.wait_metric(QUEUED, 2)
        (engine,) = server.engine_pids
        os.kill(engine, signal.SIGKILL)
        until(lambda: server.metrics()["sluice_engine_restarts_total"] == 1, "there is a new engine")
        until(lambda: server.metrics()[RUNNING] == 1, "one has the place")
        socket.send_json(type="cancel", id="holds")
        done: list[str] = []
        while len(done) < 2:
            message = socket.receive_json()
            done += [message["id"]] if message["type"] == "done" else []
        assert done == ["first", "late"]
