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
from typing import IO, Any

from bench import signals
from bench.machine import CORES, REPOSITORY
from bench.readers import HEARD_BYTES_MAX
from engine.synthetic import CONTEXT_TOKENS_MAX, SyntheticRunner
from engine.wire import WIRE_VERSION, Hello

OURS = "our server"
STOP_S_MAX = 10.0
SEQUENCES_MAX = 10_000  # that an engine played by a bench runs at once
HURRY_S = 0.5
# From the moment when a process's sockets close, which its clients notice, to the one when it can be waited for.
GONE_S_MAX = 1.0
SAID_BYTES_MAX = 1000
SERVER_CORE = CORES[0] if len(CORES) > 1 else None
CLIENT_CORE = CORES[1] if len(CORES) > 1 else None
ENGINE_CORE = CORES[2] if len(CORES) > 2 else SERVER_CORE


@dataclass(frozen=True)
class Ours:
    """Our server, and the engine that it is attached to."""

    port: int
    pid: int
    engine_pid: int


class Wrong(SystemExit):
    """A server did something else than a benchmark can go on with: one sentence, and exit code 1. `did`: in the past
    tense; `heard`: how its answer to what was `asked` began."""

    def __init__(self, who: str, asked: str, did: str, heard: bytes = b"") -> None:
        answered = f"its answer began {heard[:HEARD_BYTES_MAX]!r}" if heard else "it had not answered"
        super().__init__(f"{_clear()}{who}, asked for {asked}, {did}; {answered}")


class Gone(SystemExit):
    """A process ended by itself while it was needed: one sentence, and exit code 1."""

    def __init__(self, who: str, code: int, said: str) -> None:
        how = f"by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"with exit code {code}"
        told = f"the last that it said on stderr is: {said}" if said else "it said nothing on stderr"
        super().__init__(f"{_clear()}{who} ended {how}; {told}")


def _clear() -> str:
    """What is shown of the run."""
    return "\r\033[K" if sys.stderr.isatty() else ""


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
        with started("the synthetic engine", command, REPOSITORY) as process:
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
    with started(OURS, command, REPOSITORY) as process:
        yield Ours(int(ready_line(process).rpartition(":")[2]), process.pid, engine_pid)


def ready_line(process: subprocess.Popen[bytes]) -> str:
    """What it says when it is ready."""
    assert process.stdout is not None
    line = process.stdout.readline().decode().strip()
    if not line:
        raise SystemExit(f"{process.args!r} closed its stdout before it was ready")
    return line


@contextmanager
def started(
    who: str, command: Sequence[str], cwd: Path, env: dict[str, str] | None = None, stderr: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with the block, and its children with it. Raises Gone where it ended by itself before, and
    the block failed or didn't notice. `stderr`: one of Popen's, for a block that reads it; else it is kept for Gone."""
    process: subprocess.Popen[bytes] | None = None
    with tempfile.TemporaryFile() as log:  # a pipe would have to be read by the client that measures
        into = log if stderr is None else stderr
        try:
            with signals.held():
                process = subprocess.Popen(
                    command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=into, start_new_session=True
                )
            yield process
            if process.returncode is None and (code := process.poll()) is not None:  # nobody waited for it
                raise Gone(who, code, _last_line(log))
        except (Exception, SystemExit) as error:
            if process is None or isinstance(error, Gone) or (code := _code_soon(process)) is None:
                raise
            raise Gone(who, code, _last_line(log)) from error
        finally:
            if process is not None:
                with signals.held():
                    _stop(process)


def _code_soon(process: subprocess.Popen[bytes]) -> int | None:
    """Of a process that ended, or is about to; None: it lives."""
    with suppress(subprocess.TimeoutExpired):
        return process.wait(GONE_S_MAX)
    return None


def _last_line(log: IO[bytes]) -> str:
    """Or what of it is at the log's very end."""
    size = os.fstat(log.fileno()).st_size
    end = os.pread(log.fileno(), SAID_BYTES_MAX, max(0, size - SAID_BYTES_MAX))
    lines = end.decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


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
