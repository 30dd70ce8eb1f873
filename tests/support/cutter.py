"""A TCP relay in front of a server that cuts answers: what a flaky network does to a stream, at a chosen byte."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from tests.support.serving import DEADLINE_S, READ_BYTES

_RESET = b"\x01\0\0\0\0\0\0\0"
BEFORE_THE_CUT_S = 0.4
_METHODS = (b"GET ", b"POST ")


@dataclass
class Seen:
    """One request for a watched path: its head, when it came, and when its answer was cut (None: it wasn't)."""

    head: str
    at: float
    cut_at: float | None = None

    def header(self, name: str) -> str | None:
        """The value of a header, or None."""
        for line in self.head.split("\r\n")[1:]:
            key, _, value = line.partition(":")
            if key.lower() == name:
                return value.strip()
        return None


@dataclass
class Cutter:
    """`cuts[k]`: the k-th request whose target begins with `path` gets so many bytes of its answer, and then the
    connection ends, by FIN or (`reset`) by RST. Later ones are left alone. `carried` has the bytes that went to the
    client on each connection, in the order they were accepted."""

    upstream: int
    cuts: list[int]
    path: str = "/v1/"
    reset: bool = False
    seen: list[Seen] = field(default_factory=list)
    carried: list[int] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads: list[threading.Thread] = []
        self._stopping = threading.Event()
        self._stop_here, self._stop_there = socket.socketpair()
        self._start(self._accept)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stopping.set()
        self._stop_here.close()
        for thread in self._threads:
            thread.join(DEADLINE_S)
        self._stop_there.close()
        self._listener.close()

    @property
    def url(self) -> str:
        """The relay's address, without a slash at its end."""
        return f"http://127.0.0.1:{self.port}"

    def _start(self, work: object, *args: object) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._stop_there, selectors.EVENT_READ)
            while self._stop_there not in [key.fileobj for key, _ in selector.select()]:
                client, _ = self._listener.accept()
                self.carried.append(0)
                self._start(self._relay, client, len(self.carried) - 1)

    def _relay(self, client: socket.socket, number: int) -> None:
        with (
            contextlib.suppress(OSError),
            client,
            socket.create_connection(("127.0.0.1", self.upstream)) as server,
            selectors.DefaultSelector() as selector,
        ):
            for each in (client, server, self._stop_there):
                selector.register(each, selectors.EVENT_READ)
            request: Seen | None = None
            room: int | None = None  # bytes until the cut
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                source = server if server in ready else client
                if self._stop_there in ready or not (data := source.recv(READ_BYTES)):
                    return
                if source is client:
                    if (new := self._watched(data)) is not None:
                        request, room = new, self.cuts.pop(0) if self.cuts else None
                    server.sendall(data)
                    continue
                self.carried[number] += len(data)
                if room is not None and request is not None and len(data) >= room:
                    client.sendall(data[:room])
                    # What a client has not read when its connection ends it may drop, its last id included.
                    self._stopping.wait(BEFORE_THE_CUT_S)
                    request.cut_at = time.monotonic()
                    if self.reset:
                        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                    return
                client.sendall(data)
                room = None if room is None else room - len(data)

    def _watched(self, data: bytes) -> Seen | None:
        """The request that `data` begins, if it is one to count. Heads come in one piece from all clients here."""
        if not data.startswith(_METHODS):
            return None
        head = data.partition(b"\r\n\r\n")[0].decode("latin-1")
        if not head.split(" ")[1].startswith(self.path):
            return None
        seen = Seen(head, time.monotonic())
        self.seen.append(seen)
        return seen
