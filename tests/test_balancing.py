"""Several engine processes behind one server: conversations find their blocks, an engine that dies loses no stream."""

from __future__ import annotations

import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from engine.wire import FrameReader, Gauges, Stats, Step, encode
from tests.support.probes import crowd, words
from tests.support.serving import Server, WebSocketClient, chat, lone_engine, until

pytestmark = pytest.mark.synthetic

CHAT = "/v1/chat/completions"


def ask(server: Server, messages: list[dict[str, Any]]) -> Any:
    answer = server.ask("POST", CHAT, {"messages": messages, "max_tokens": 12})
    assert answer.status == 200
    return answer.json()


@pytest.mark.parametrize("engines", [2, 4])
def test_a_second_turn_finds_the_blocks_of_the_first(engines: int) -> None:
    with Server("--engines", str(engines)) as server:
        assert len(server.engine_pids) == engines

        def first(number: int) -> tuple[list[dict[str, Any]], int]:
            messages = [{"role": "user", "content": f"{number} is a number: " + f"{number} " * number}]
            answer = ask(server, messages)
            reply = {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
            return [*messages, reply, {"role": "user", "content": "and then?"}], answer["usage"]["prompt_tokens"]

        with ThreadPoolExecutor(8) as threads:
            turns = list(threads.map(first, range(20, 60)))
        with ThreadPoolExecutor(2) as threads:
            answers = threads.map(lambda turn: ask(server, turn[0]), turns)
            for answer, (_, prompt_tokens) in zip(answers, turns, strict=True):
                cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert cached >= prompt_tokens - 16  # all of its whole blocks


class TestDeath:
    STREAMS, TOKENS = 200, 100

    def test_none_of_200_streams_is_lost_or_doubled(self) -> None:
        flags = ("--engines", "2", "--synthetic-step-ms", "5", "--max-running", "16")  # so that most are queued
        with Server(*flags) as server, WebSocketClient(server) as socket:
            for number in range(self.STREAMS):
                socket.send_json(
                    type="generate", id=str(number), prompt=f"{number}", max_tokens=self.TOKENS, seed=number
                )
            texts = dict.fromkeys(map(str, range(self.STREAMS)), "")
            ends: dict[str, str] = {}
            killed = False
            while len(ends) < self.STREAMS:
                message = socket.receive_json()
                if message["type"] == "token":
                    texts[message["id"]] += message["text"]
                    if not killed and len(texts[message["id"]]) >= 5 * self.TOKENS // 2:
                        killed = True
                        os.kill(server.engine_pids[0], signal.SIGKILL)
                elif message["type"] != "started":
                    assert message["type"] == "done", message
                    assert message["id"] not in ends, "ended twice"
                    ends[message["id"]] = message["finish_reason"]
            assert killed
            assert set(ends.values()) == {"length"}
            assert {words(text) for text in texts.values()} == {self.TOKENS}
            # It comes back by itself, and takes part.
            until(lambda: len(server.engine_pids) == 2, "another engine is started")
            assert server.metrics()["sluice_engine_restarts_total"] == 1
            assert server.ask("POST", CHAT, chat("x", max_tokens=3)).status == 200


def gauges_of(address: str) -> Gauges:
    """What an engine says of itself to whoever connects."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(10)
        sock.connect(address.removeprefix("unix:"))
        sock.sendall(encode(Stats()))
        reader = FrameReader(engine_side=False)
        while True:
            for message in reader.feed(sock.recv(2**20)):
                if isinstance(message, Step):
                    return message.gauges


@pytest.mark.parametrize("engines", [2, 4])
def test_equal_streams_are_spread_evenly_over_the_processes(engines: int, tmp_path: Path) -> None:
    addresses = [f"unix:{tmp_path / str(number)}" for number in range(engines)]
    flags = [flag for address in addresses for flag in ("--engine-url", address)]
    with ExitStack() as stack:
        for address in addresses:
            stack.enter_context(lone_engine(address, "--synthetic-step-ms", "20"))
        server = stack.enter_context(Server(*flags, "--drain-timeout", "0", engine=None))
        client = stack.enter_context(WebSocketClient(server))
        for number in range(200):
            client.send_json(type="generate", id=str(number), max_tokens=2000, **chat(f"{number} of two hundred"))
        started = 0
        while started < 200:
            started += client.receive_json()["type"] == "started"

        def counted() -> list[int]:
            return [gauges.running + gauges.waiting + gauges.parked for gauges in map(gauges_of, addresses)]

        until(lambda: sum(counted()) == 200, "every engine has read what it was sent")
        counts = counted()
        assert all(abs(count - 200 / engines) <= 20 / engines for count in counts), counts


class TestAttached:
    def test_an_engine_leaves_and_comes_back_and_streams_go_on_beside_it(self, tmp_path: Path) -> None:
        first, second = (f"unix:{tmp_path / name}" for name in ("first", "second"))
        pace = ("--synthetic-step-ms", "5")
        flags = ("--engine-url", first, "--engine-url", second, "--drain-timeout", "1")
        with (
            lone_engine(second, *pace) as engine,
            Server(*flags, engine=None) as server,
            # It was not there when the server began: it is tried again, and takes part once it is.
            lone_engine(first, *pace),
            crowd(server, 8) as clients,
        ):
            until(lambda: server.log.count("engine_ready") == 2, "both are there")
            for number, client in enumerate(clients):
                client.request("POST", CHAT, chat(f"{number}", stream=True, max_tokens=200))
                client.begin("POST")
                client.read_events(5)
            engine.kill()
            assert [words(client.finish().text()) for client in clients] == [200] * 8
            assert server.ask("GET", "/ready").status == 200
            with lone_engine(second, *pace):
                until(lambda: server.log.count("engine_ready") == 3, "it is back")
                assert words(server.ask("POST", CHAT, chat("x", stream=True, max_tokens=20)).text()) == 20

    def test_engines_of_different_models_do_not_mix(self, tmp_path: Path) -> None:
        first, second = (f"unix:{tmp_path / name}" for name in ("first", "second"))
        script = tmp_path / "script.json"
        script.write_text('{"scripts": [{"match": "x", "tokens": ["a piece of its own"]}]}')
        flags = ("--engine-url", first, "--engine-url", second)
        with (
            lone_engine(first),
            lone_engine(second, "--synthetic-script", str(script)),
            Server(*flags, engine=None) as server,
        ):
            assert server.log.count("engine_refused") >= 1
            for _ in range(4):
                assert server.ask("POST", CHAT, chat("y", max_tokens=3)).status == 200
