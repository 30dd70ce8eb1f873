"""A real server process, and what its clients need, under one roof.

`Server` starts `python -m server` (on the synthetic engine, unless told otherwise), waits for its ready line, and at
the end stops it and looks for tracebacks in what it logged. Every wait has a deadline, and fails with what was seen.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support.http_client import DEADLINE_S, READ_BYTES, Answer, Client, Header, chat, flood, joined, request_bytes
from tests.support.websocket_client import Closed, WebSocketClient, WebSocketRefused

__all__ = [
    "DEADLINE_S",
    "READ_BYTES",
    "Answer",
    "Client",
    "Closed",
    "Header",
    "Reachable",
    "Server",
    "WebSocketClient",
    "WebSocketRefused",
    "chat",
    "flood",
    "joined",
    "lone_engine",
    "request_bytes",
    "until",
]

REPOSITORY = Path(__file__).resolve().parents[2]
START_S = 60.0
STOP_S = 20.0
_POLL_S = 0.01


def until(condition: Callable[[], Any], what: str | Callable[[], str], deadline_s: float = DEADLINE_S) -> Any:
    """Look until `condition()` is true, and return what it gave; AssertionError with `what` after the deadline, which
    may be asked for only then."""
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {deadline_s:g} s: {what if isinstance(what, str) else what()}"
        time.sleep(_POLL_S)
    return value


class Reachable:
    """Whatever listens on a port of 127.0.0.1, or on a Unix socket."""

    port: int

    @property
    def address(self) -> int | str:
        """The port, or the socket's path."""
        return self.port

    def connect(self, *, receive_buffer: int | None = None) -> Client:
        """A new connection; a small `receive_buffer` (bytes) makes a reader that stalls fill it soon."""
        return Client(self.address, receive_buffer=receive_buffer)

    def ask(self, method: str, target: str, body: Any = None, headers: Iterable[Header] = ()) -> Answer:
        """One whole exchange on a connection of its own."""
        with self.connect() as client:
            client.request(method, target, body, headers)
            return client.answer(method)


class Server(Reachable):
    """A server process, usable with `with`. `scripts`: what the synthetic engine plays (see engine/synthetic.py).

    `faults_expected`: its log may hold tracebacks. `program`: what is run in place of the server itself. `own_group`:
    it leads a process group, as a terminal's job does."""

    def __init__(
        self,
        *flags: str,
        scripts: list[dict[str, Any]] | None = None,
        engine: str | None = "synthetic",
        faults_expected: bool = False,
        program: tuple[str, ...] = ("server",),
        own_group: bool = False,
    ) -> None:
        self.flags = flags
        self._program = program
        self._engine = engine
        self._scripts = scripts
        self._faults_expected = faults_expected
        self._process_group = 0 if own_group else None
        self.process: subprocess.Popen[bytes]
        self.port = 0
        self.ready_line = ""
        self._folder = tempfile.TemporaryDirectory(prefix="sluice-test-")
        self._stderr = Path(self._folder.name) / "stderr"

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self._folder.cleanup()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self.stop()
            if kind is None:
                self.check_log()
        finally:
            self._folder.cleanup()

    def start(self) -> None:
        """Start and wait for the ready line."""
        argv = [sys.executable, "-m", *self._program, "--port", "0"]
        if self._engine:
            argv += ["--engine", self._engine]
        if self._scripts is not None:
            script = Path(self._folder.name) / "script.json"
            script.write_text(json.dumps({"scripts": self._scripts}), encoding="utf-8")
            argv += ["--synthetic-script", str(script)]
        with self._stderr.open("wb") as log:
            self.process = subprocess.Popen(
                [*argv, *self.flags],
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                process_group=self._process_group,
            )
        try:
            self.ready_line = self._read_line()
            found = re.search(r":(\d+)$", self.ready_line)
            self.port = int(found[1]) if found else 0
        except BaseException:
            self.kill()
            raise

    def _read_line(self) -> str:
        stdout = self.process.stdout
        assert stdout is not None
        line = b""
        end = time.monotonic() + START_S
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                assert selector.select(max(0.0, end - time.monotonic())), f"no ready line; its log:\n{self.log}"
                piece = os.read(stdout.fileno(), 1024)
                assert piece, f"the server ended before it was ready; its log:\n{self.log}"
                line += piece
        return line.decode().strip()

    def terminate(self) -> None:
        """SIGTERM: begin to drain."""
        self.process.send_signal(signal.SIGTERM)

    def wait(self, deadline_s: float = STOP_S) -> int:
        """The exit code."""
        return self.process.wait(deadline_s)

    def stop(self) -> None:
        """SIGTERM, and SIGKILL when that takes too long, which is an error."""
        if self.process.poll() is None:
            self.terminate()
        try:
            self.wait()
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the server did not stop; its log:\n{self.log}") from None
        finally:
            self.kill()

    def kill(self) -> None:
        """SIGKILL; nothing to do when it has ended."""
        self.process.kill()
        self.process.wait(STOP_S)
        if self.process.stdout:
            self.process.stdout.close()

    @property
    def log(self) -> str:
        """What the server and its engine wrote to stderr."""
        return self._stderr.read_text(errors="replace")

    def check_log(self) -> None:
        """No traceback, no warning."""
        log = self.log
        if not self._faults_expected:
            for sign in ("Traceback", "Warning:", "never awaited", "never retrieved"):
                assert sign not in log, log

    @property
    def address(self) -> int | str:
        """See Reachable."""
        _, found, path = self.ready_line.partition(" unix:")
        return path if found else self.port

    @property
    def url(self) -> str:
        """The server's address, without a slash at its end."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def engine_pids(self) -> list[int]:
        """The child processes."""
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    @property
    def open_files(self) -> int:
        """Descriptors of the server process."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    @property
    def resident_bytes(self) -> int:
        """The server process's memory (the engine's not)."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def metrics(self) -> dict[str, float]:
        """Each series with its labels, as /metrics shows it: `sluice_streams{state="running"}` for example."""
        answer = self.ask("GET", "/metrics")
        assert answer.status == 200
        lines = [line for line in answer.body.decode().splitlines() if line and line[0] != "#"]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def wait_metric(self, series: str, value: float) -> None:
        """Until a series has this value."""
        seen: list[float] = []

        def reached() -> bool:
            seen.append(self.metrics()[series])
            return seen[-1] == value

        until(reached, lambda: f"{series} is {seen[-1]:g}, not {value:g}; the log:\n{self.log}")


@contextmanager
def lone_engine(address: str, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """`python -m engine --listen`, ready; killed at the end."""
    argv = [sys.executable, "-m", "engine", "--listen", address, "--engine", "synthetic", *flags]
    with subprocess.Popen(argv, cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == f"sluice engine ready on {address}\n".encode()
            yield process
        finally:
            process.kill()
