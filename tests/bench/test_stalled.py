"""`python -m bench stalled`: both ways run to their table, and what is stalled was parked meanwhile."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support.serving import REPOSITORY

RUN_S = 120


@pytest.mark.synthetic
@pytest.mark.parametrize("way", [("--streams", "5"), ("--http2",)], ids=["connections", "http2"])
def test_it_measures_readers_beside_streams_that_stall(way: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "bench", "stalled", *way, "--rounds", "1", "--seconds", "1"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=RUN_S, check=False)
    assert done.returncode == 0, done.stderr
    rows = dict(re.findall(r"^(step|itl_p50|itl_p99) .* ([0-9.]+)$", done.stdout, re.MULTILINE))
    assert rows.keys() == {"step", "itl_p50", "itl_p99"}, done.stdout
    assert all(float(ratio) > 0 for ratio in rows.values())
