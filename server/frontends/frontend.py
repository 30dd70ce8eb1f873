"""One of several server processes: what it was given by the supervisor, and what the two say to each other."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from server.config import Config
from server.gateway.ledger import Ledger

# The supervisor's words; whoever has ended says so by its end of the socket.
STOP, RELOAD, GO = b"s", b"h", b"g"
READY, LEAVING = b"r", b"l"  # a frontend's


@dataclass(frozen=True, slots=True)
class Frontend:
    """`control`: this end of the socket to the supervisor."""

    index: int
    count: int
    folder: str  # of the sockets between processes
    port: int
    listener: socket.socket | None  # a Unix socket, which all frontends accept from; a port each binds by itself
    engine_urls: tuple[str, ...]
    control: socket.socket
    ledger: Ledger
    token_secret: bytes

    def ready(self) -> None:
        """Connections are accepted."""
        self.control.send(READY)

    def leave(self) -> None:
        """Nothing is left to be done here. The supervisor's GO follows, before which the last one's listener turns
        newcomers away: others must not lose theirs by it."""
        self.control.send(LEAVING)

    def watch(
        self, loop: Any, on_stop: Callable[[], None], on_reload: Callable[[], None], on_go: Callable[[], None]
    ) -> None:
        """Do as the supervisor says. When it is gone, this process ends at once, as a server does that is killed."""
        acts = {STOP[0]: on_stop, RELOAD[0]: on_reload, GO[0]: on_go}

        def hear() -> None:
            try:
                words = self.control.recv(64)
            except OSError:
                words = b""
            if not words:
                shutil.rmtree(self.folder, ignore_errors=True)
                os._exit(1)
            for word in words:
                acts[word]()

        self.control.setblocking(False)
        loop.add_reader(self.control, hear)


def share_of(config: Config, count: int) -> Config:
    """What one of `count` processes may have of the bounds that are not counted for all together."""

    def part(whole: int) -> int:
        return -(-whole // count)

    limits, responses = config.limits, config.responses
    return replace(
        config,
        limits=replace(
            limits,
            streams_max=part(limits.streams_max),
            queue_max=part(limits.queue_max),
            log_bytes=part(limits.log_bytes),
        ),
        responses=replace(responses, bytes_max=part(responses.bytes_max)),
        max_connections=part(config.max_connections) if config.max_connections else None,
    )
