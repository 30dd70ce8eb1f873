"""Servers of several processes from outside: which process a connection is with, and connections to a given one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tests.support.serving import DEADLINE_S, Answer, Client, Header, Server, WebSocketClient, until

CHAT = "/v1/chat/completions"
LONG = 100_000  # tokens: more than any test waits for
PACE = ("--synthetic-step-ms", "5")
ACCEPT_S = 0.5


class Connected(Protocol):
    """Anything with a TCP socket to the server."""

    def __exit__(self, *_: object) -> None: ...


C = TypeVar("C", bound=Connected)


class Frontends(Server):
    """A server with `--frontends`."""

    def __init__(self, *flags: str, count: int = 2, **options: object) -> None:
        super().__init__("--frontends", str(count), *flags, **options)  # type: ignore[arg-type]
        self.count = count

    @property
    def frontends(self) -> list[int]:
        """The serving processes, the oldest first."""
        return [pid for pid in self.engine_pids if b"engine" not in _command(pid)]

    @property
    def engines(self) -> list[int]:
        """The engines."""
        return [pid for pid in self.engine_pids if b"engine" in _command(pid)]

    def process_of(self, port: int) -> int | None:
        """The process that has the server's end of a connection from this local port; None: none has it yet."""
        inode = _inode(self.port, port)
        for pid in self.frontends:
            if inode and f"socket:[{inode}]" in _files(pid):
                return pid
        return None

    def reach(self, pid: int, connect: Callable[[], C]) -> C:
        """A connection with this process."""
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            made = connect()
            port = made.socket.getsockname()[1]  # type: ignore[attr-defined]
            if self._accepted_by(port) == pid:
                return made
            made.__exit__(None, None, None)
        raise AssertionError(f"{pid} accepted no connection; the log:\n{self.log}")

    def _accepted_by(self, port: int) -> int | None:
        """None where that takes long: a process that was killed had it."""
        end = time.monotonic() + ACCEPT_S
        while (pid := self.process_of(port)) is None and time.monotonic() < end:
            time.sleep(0.001)
        return pid

    def kill_frontend(self, pid: int) -> None:
        """SIGKILL, and wait until another one is there."""
        os.kill(pid, signal.SIGKILL)
        until(lambda: pid not in self.frontends and len(self.frontends) == self.count, "started again")

    def client(self, pid: int) -> Client:
        """An HTTP/1.1 connection with this process."""
        return self.reach(pid, self.connect)

    def ask_at(self, pid: int, method: str, target: str, body: Any = None, headers: Iterable[Header] = ()) -> Answer:
        """`ask`, of this process."""
        with self.client(pid) as client:
            client.request(method, target, body, headers)
            return client.answer(method)

    def websocket(self, pid: int) -> WebSocketClient:
        """A WebSocket with this process."""
        return self.reach(pid, lambda: WebSocketClient(self))


def both(server: Frontends) -> tuple[int, int]:
    """The two processes, in no order: what is shown for one pair holds for the other."""
    first, second = server.frontends
    return first, second


def begin(client: Client, max_tokens: int = 40, *, prompt: str = "x", events: int = 3) -> tuple[str, Answer]:
    """A stream by GET, of which some events are here; its id."""
    client.request("GET", f"/v1/generate?prompt={prompt}&max_tokens={max_tokens}")
    answer = client.begin()
    client.read_events(events)
    name = answer.header("x-stream-id")
    assert name
    return name, answer


def begin_and_end(server: Frontends, pid: int) -> None:
    """A short stream of this process."""
    with server.client(pid) as client:
        begin(client, 5)
        client.finish()


def _command(pid: int) -> bytes:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return b""
    return b"engine" if b"engine" in words and b"server" not in words else b"server"


def _inode(server_port: int, client_port: int) -> str:
    ends = (f":{server_port:04X}", f":{client_port:04X}")
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if (fields[1][-5:], fields[2][-5:]) == ends:
            return fields[9]
    return ""


def _files(pid: int) -> set[str]:
    folder = Path(f"/proc/{pid}/fd")
    found = set()
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, ProcessLookupError):
        return found
    for name in names:
        try:
            found.add(os.readlink(folder / name))
        except FileNotFoundError:
            continue
    return found
