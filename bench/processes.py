"""Processes that benchmarks measure: ours and others, each on its own core, CPU time and memory read from outside.

The server under measurement has the first core to itself as far as the machine allows, the client the second; our
engine process has a third one, or shares the server's. Linux only, as the clocks of other processes are.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import signals
from bench.machine import REPOSITORY
from engine.synthetic import CONTEXT_TOKENS_MAX, SyntheticRunner
from engine.wire import WIRE_VERSION, Hello

STOP_S_MAX = 10.0
SEQUENCES_MAX = 10_000  # that an engine played by a bench runs at once
HURRY_S = 0.5
_CORES = sorted(os.sched_getaffinity(0))
SERVER_CORE = _CORES[0] if len(_CORES) > 1 else None
CLIENT_CORE = _CORES[1] if len(_CORES) > 1 else None
ENGINE_CORE = _CORES[2] if len(_CORES) > 2 else SERVER_CORE


@dataclass(frozen=True)
class Ours:
    """Our server, and the engine that it is attached to."""

    port: int
    pid: int
    engine_pid: int


def cpu_s(pid: int) -> float:
    """CPU seconds of all threads of a process so far, to the nanosecond."""
    return time.clock_gettime((~pid << 3) | 2)  # what clock_getcpuclockid(3) gives for a process, see time(7)


def resident_bytes(pid: int) -> int:
    """What the process holds in memory; the kernel's socket buffers are no part of it."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def on_core(core: int | None) -> list[str]:
    """What stands before a command so that it stays on a core. Raises SystemExit where that can't be had."""
    if core is None:
        return []
    if shutil.which("taskset") is None:
        raise SystemExit(
            "taskset, which keeps processes on their cores, is not here (Debian: apt-get install util-linux)"
        )
    return ["taskset", "-c", str(core)]


def synthetic_hello() -> Hello:
    """What the synthetic engine says of itself, for a bench that plays it."""
    runner = SyntheticRunner()
    return Hello(
        wire_version=WIRE_VERSION,
        engine_version="bench",
        model="bench",
        tokenizer=runner.tokenizer,
        tokenizer_hash="",
        vocab_size=runner.vocab_size,
        eos_ids=runner.eos_ids,
        context_tokens_max=CONTEXT_TOKENS_MAX,
        pool_tokens=10**7,
        running_max=SEQUENCES_MAX,
    )


@contextmanager
def engine(step_ms: float, script: dict[str, Any] | None = None) -> Iterator[tuple[str, int]]:
    """The synthetic engine in a process of its own; its URL and process id. `script`: see engine/synthetic.py."""
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        flags = ["--engine", "synthetic", "--synthetic-step-ms", f"{step_ms:g}"]
        if script is not None:
            path = Path(folder) / "script.json"
            path.write_text(json.dumps(script), encoding="utf-8")
            flags += ["--synthetic-script", str(path)]
        url = f"unix:{folder}/engine.sock"
        command = [*on_core(ENGINE_CORE), sys.executable, "-m", "engine", "--listen", url, *flags]
        with started(command, REPOSITORY) as process:
            ready_line(process)
            yield url, process.pid


@contextmanager
def server(attached: tuple[str, int], *flags: str, runner: Sequence[str] = ()) -> Iterator[Ours]:
    """Our server on an engine that runs. `runner`: what Python gets in front of `-m server`, for a profiler."""
    url, engine_pid = attached
    command = [
        *on_core(SERVER_CORE),
        sys.executable,
        *runner,
        "-m",
        "server",
        "--port",
        "0",
        "--engine-url",
        url,
        *flags,
    ]
    with started(command, REPOSITORY) as process:
        yield Ours(int(ready_line(process).rpartition(":")[2]), process.pid, engine_pid)


def ready_line(process: subprocess.Popen[bytes]) -> str:
    """What it says when it is ready."""
    assert process.stdout is not None
    line = process.stdout.readline().decode().strip()
    if not line:
        raise SystemExit(f"{process.args!r} ended with {process.wait()} before it was ready")
    return line


@contextmanager
def started(
    command: Sequence[str], cwd: Path, env: dict[str, str] | None = None, stderr: int = subprocess.DEVNULL
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with the block, and its children with it. What it logs is dropped, unless `stderr` is another
    of Popen's."""
    process: subprocess.Popen[bytes] | None = None
    try:
        with signals.held():
            process = subprocess.Popen(
                command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True
            )
        yield process
    finally:
        if process is not None:
            with signals.held():
                _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask it to end, then end it and all that it started."""
    process.terminate()
    if signals.came():  # nobody waits for streams that no one reads: our server takes a second one for "now"
        with suppress(subprocess.TimeoutExpired):
            process.wait(HURRY_S)
        process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S_MAX)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
