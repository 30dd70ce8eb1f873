"""What a token costs in the server, by function: samples of a whole server process by its CPU time."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from pathlib import Path

from bench import processes
from bench.load import play
from bench.machine import markdown
from bench.readers import TRANSPORTS

STREAMS = 512
STEP_MS = 20.0
SHOWN = 8
WRITTEN_S_MAX = 10.0


def own_times(transport: str, tokens: int) -> tuple[dict[str, float], int]:
    """Function → µs a token in itself and in the compiled code that it calls; and the number of samples."""
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        path = Path(folder) / "samples"
        runner = ("-m", "bench.sampled", str(path))
        with processes.engine(STEP_MS) as engine, processes.server(engine, runner=runner) as server:
            os.kill(server.pid, signal.SIGUSR2)
            figures = play(TRANSPORTS[transport], server, STREAMS, tokens)
            os.kill(server.pid, signal.SIGUSR2)
            end = time.monotonic() + WRITTEN_S_MAX
            while not path.exists() and time.monotonic() < end:
                time.sleep(0.01)
            rows = json.loads(path.read_text())
    samples = sum(row[3] for row in rows)
    times: dict[str, float] = {}
    for file, line, function, count in rows:
        name = f"{Path(file).stem}.{function} ({Path(file).name}:{line})"
        times[name] = times.get(name, 0.0) + count / samples * figures.cpu_whole_us
    return times, samples


def compared(first: str, second: str, tokens: int) -> str:
    """What dominates `first`, beside what dominates `second`."""
    (here, samples), (there, others) = own_times(first, tokens), own_times(second, tokens)
    whole = sum(here.values())
    top = [*_largest(here, SHOWN), *(name for name in _largest(there, SHOWN // 2) if name not in here)]
    rows = [[name, f"{here.get(name, 0.0):.2f}", f"{there.get(name, 0.0):.2f}"] for name in top]
    dominating = ", ".join(f"{name} {here[name] / whole:.0%}" for name in _largest(here, 3))
    return (
        f"Where the CPU time of a token goes, {STREAMS} streams, the requests' own costs included: {whole:.1f} µs\n"
        f"with {first} ({samples} samples), {sum(there.values()):.1f} with {second} ({others}). Compiled code, as the\n"
        f"send in uvloop's transport.write, counts in the Python function that called it.\n"
        f"{first} is dominated by {dominating}.\n\n"
        f"{markdown(['function', f'{first}: µs', f'{second}: µs'], rows)}"
    )


def _largest(times: dict[str, float], count: int) -> list[str]:
    return sorted(times, key=times.__getitem__, reverse=True)[:count]
