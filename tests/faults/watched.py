"""`python -m tests.faults.watched FILE FLAG…`: the real server, which on SIGUSR1 adds a line to FILE: how many
objects it holds of each kind that a stream or a connection is made of, and how many tasks run. Nothing else changes."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

from server.__main__ import main

# By name: a module that is not loaded has none of them.
KINDS = frozenset(
    (
        "Stream", "Choice", "ClientReader", "Collector", "Poller", "Shown", "ApiSession", "WebSocketConnection",
        "Connection", "Http2Connection", "Http2Stream", "HttpChannel", "Call",
    )
)  # fmt: skip


class WatchedServer:
    """The test's side: asks a server process for its objects."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._asked = 0

    def ask(self, pid: int) -> None:
        """Have it look."""
        self._asked += 1
        os.kill(pid, signal.SIGUSR1)

    def answer(self) -> dict[str, int] | None:
        """What it saw, once it has."""
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        return json.loads(lines[-1]) if len(lines) == self._asked else None


def _look(path: str) -> None:
    gc.collect()
    objects = gc.get_objects()
    seen = Counter(type(each).__name__ for each in objects if type(each).__name__ in KINDS)
    tasks = sum(isinstance(each, asyncio.Task) and not each.done() for each in objects)
    with Path(path).open("a") as file:
        file.write(json.dumps({**{kind: seen[kind] for kind in sorted(KINDS)}, "tasks": tasks}) + "\n")


if __name__ == "__main__":
    file_name = sys.argv[1]

    def _on_signal(number: int, frame: FrameType | None) -> None:
        _look(file_name)

    signal.signal(signal.SIGUSR1, _on_signal)
    sys.exit(main(sys.argv[2:]))
