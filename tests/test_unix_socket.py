"""`--uds`: a server's end on a Unix socket, of one process and of several. Whoever connects is answered. Black-box."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.frontends import Frontends
from tests.support.probes import alive
from tests.support.serving import Server, until

pytestmark = pytest.mark.synthetic

COMERS = 8
TARGET = "/v1/generate?prompt=x&max_tokens=1"
JSON = ("Accept", "application/json")
ANSWERS = {(202, "whole"), (503, "whole")}
REFUSED = (FileNotFoundError, ConnectionRefusedError)
ROUNDS = 3


def begun(count: int, path: Path, *flags: str) -> Server:
    if count == 1:
        return Server("--uds", str(path), *flags)
    return Frontends("--uds", str(path), *flags, count=count)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


class TestTheEnd:
    @pytest.mark.parametrize("count", [1, 2, 3])
    @pytest.mark.parametrize("_", range(ROUNDS))
    def test_clients_that_keep_coming_are_answered_or_cannot_connect(self, _: int, count: int, tmp_path: Path) -> None:
        path = tmp_path / "s.sock"

        def keep_coming(server: Server) -> set[tuple[int, str]]:
            seen = set()
            with suppress(*REFUSED):
                while True:
                    answer = server.ask("GET", TARGET, None, [JSON])
                    seen.add((answer.status, answer.end))
            return seen

        with ThreadPoolExecutor(COMERS) as pool, begun(count, path) as server:
            comers = [pool.submit(keep_coming, server) for _ in range(COMERS)]
            until(lambda: server.metrics()["sluice_generated_tokens_total"] > 50, "they have come")
            server.terminate()
            assert set().union(*(each.result() for each in comers)) <= ANSWERS
            assert server.wait() == 0

    @pytest.mark.parametrize("count", [1, 2])
    def test_hundreds_that_come_with_the_signal(self, count: int, tmp_path: Path) -> None:
        with begun(count, tmp_path / "s.sock") as server, ExitStack() as stack:
            pids = [server.process.pid] if count == 1 else server.frontends  # type: ignore[attr-defined]
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            server.terminate()
            clients = [stack.enter_context(server.connect()) for _ in range(300)]
            for client in clients:
                client.request("GET", TARGET, None, [JSON])
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            assert {(answer.status, answer.end) for answer in (client.answer() for client in clients)} <= ANSWERS
            assert {client.closed() for client in clients} == {"fin"}
            assert server.wait() == 0

    def test_while_the_engine_ends_nobody_can_connect(self, tmp_path: Path) -> None:
        """Nobody would accept them."""
        path = tmp_path / "s.sock"
        with Frontends("--uds", str(path)) as server:
            pids = server.frontends
            with stopped(server.engines[0]):
                server.terminate()
                until(lambda: not any(map(alive, pids)), "the frontends have ended")
                assert server.process.poll() is None
                with pytest.raises(FileNotFoundError):
                    server.connect()
                path.write_text("another server's")
            assert server.wait() == 0
        assert path.read_text() == "another server's"

    def test_a_frontend_that_is_late_answers_alone(self, tmp_path: Path) -> None:
        """One process has nothing to do and leaves; the other's stream goes on, and is polled by new connections."""
        with (
            Frontends("--uds", str(tmp_path / "s.sock"), "--synthetic-step-ms", "5") as server,
            server.connect() as client,
        ):
            client.request("GET", "/v1/generate?prompt=x&max_tokens=300")
            name = client.begin().header("x-stream-id")
            client.read_events(3)
            server.terminate()
            until(lambda: len(server.frontends) == 1, "the other one has left")
            assert server.ask("GET", TARGET).status == 503
            assert server.ask("GET", f"/v1/streams/{name}", None, [JSON]).status == 200
            assert client.finish().end == "whole"
            assert server.wait() == 0
