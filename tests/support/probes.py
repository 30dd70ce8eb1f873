"""What tests look at from outside: whether a text counts up without a gap, how many tokens were made, what an idle
server holds, which processes are there. Imports tests.support.serving only."""

from __future__ import annotations

import itertools
import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.support.serving import Client, Server, until

RUNNING, PARKED = 'sluice_streams{state="running"}', 'sluice_streams{state="parked"}'
QUEUED, DETACHED = 'sluice_streams{state="queued"}', 'sluice_streams{state="detached"}'
USED = 'sluice_kv_blocks{state="used"}'
GENERATED = "sluice_generated_tokens_total"
STATES = (RUNNING, PARKED, QUEUED, DETACHED)
WORDS = 10_000
QUIET_LOOKS = 10


@contextmanager
def crowd(server: Server, count: int, *, receive_buffer: int | None = None) -> Iterator[list[Client]]:
    """So many connections, all of which are closed at the end."""
    with ExitStack() as stack:
        yield [stack.enter_context(server.connect(receive_buffer=receive_buffer)) for _ in range(count)]


def words(text: str) -> int:
    """How many words the synthetic engine wrote, after a check that each follows the one before it."""
    assert re.fullmatch(r"( [0-9]{4})*", text), text[:200]
    numbers = [int(word) for word in text.split()]
    for before, after in itertools.pairwise(numbers):
        assert after == (before + 1) % WORDS, f"{after} behind {before}"
    return len(numbers)


def outcomes(metrics: dict[str, float]) -> dict[str, float]:
    """Ended requests by outcome, over all APIs."""
    counts: dict[str, float] = {}
    for series, value in metrics.items():
        if found := re.fullmatch(r'sluice_requests_total\{api="\w+",outcome="(\w+)"\}', series):
            counts[found[1]] = counts.get(found[1], 0) + value
    return counts


def started(metrics: dict[str, float]) -> float:
    """Requests that began, over all APIs."""
    return sum(value for series, value in metrics.items() if series.startswith("sluice_requests_started_total{"))


def wait_idle(server: Server, *, detached: int = 0, deadline_s: float = 10.0) -> dict[str, float]:
    """Until nothing runs or waits, no block is in use and every request has its outcome; the metrics then."""
    seen: dict[str, float] = {}

    def idle() -> bool:
        seen.update(server.metrics())
        live = [seen[series] for series in STATES]
        ended = sum(outcomes(seen).values())
        return live == [0, 0, 0, detached] and seen[USED] == 0 and started(seen) == ended + detached

    def shown() -> str:
        held = {series: value for series, value in seen.items() if "bucket" not in series}
        return f"idle: {held}\nits log:\n{server.log[-4000:]}"

    until(idle, shown, deadline_s)
    return seen


def tokens(server: Server) -> float:
    """Tokens that streams were given since the server began."""
    return server.metrics()[GENERATED]


def kill_engine(server: Server) -> int:
    """SIGKILL the engine; its process id."""
    (pid,) = server.engine_pids
    os.kill(pid, signal.SIGKILL)
    return pid


def kernel_bytes(client: Client, server: Server) -> int:
    """Bytes on their way to the client: in the server's socket and in the client's own."""
    ours, theirs = f":{client.socket.getsockname()[1]:04X}", f":{server.port:04X}"
    held = 0
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, _, queues = line.split()[:5]
        sent, received = (int(part, 16) for part in queues.split(":"))
        if (local[-5:], remote[-5:]) == (theirs, ours):
            held += sent
        elif (local[-5:], remote[-5:]) == (ours, theirs):
            held += received
    return held


def settle(server: Server, client: Client) -> None:
    """Until the one stream is parked for good: the kernel takes no more of it. What that takes comes in bites, and
    between two of them the stream may park and go on."""
    seen: list[tuple[float, float, int]] = []

    def quiet() -> bool:
        metrics = server.metrics()
        seen.append((metrics[PARKED], metrics[GENERATED], kernel_bytes(client, server)))
        return seen[-1][0] == 1 and len(seen) >= QUIET_LOOKS and len(set(seen[-QUIET_LOOKS:])) == 1

    until(quiet, f"parked for good: {seen[-3:]}")


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and is not waited for doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def processes_with(word: str, where: str = "cmdline") -> list[int]:
    """The processes with this word in their command line, or in their `environ`."""
    found = []
    for path in Path("/proc").glob(f"[0-9]*/{where}"):
        try:
            if word.encode() in path.read_bytes() and alive(int(path.parent.name)):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found
