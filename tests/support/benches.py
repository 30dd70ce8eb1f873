"""A benchmark that runs until something ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.probes import processes_with
from tests.support.serving import REPOSITORY


@contextmanager
def endless_bench(
    folder: Path, mark: str, where: str = "cmdline", *, before: Callable[[], object] | None = None
) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """`python -m bench transports` with its scratch files in `folder`, and a list that gets, when the block ends, those
    of its processes with `mark` (see `processes_with`) that are left; they are killed. `before`: run in it first."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench", "transports", "--streams", "2", "--tokens", "100000", "--rounds", "1"],
        cwd=REPOSITORY,
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=before,
    )
    left: list[int] = []
    try:
        yield process, left
    finally:
        process.kill()
        left += processes_with(mark, where)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
