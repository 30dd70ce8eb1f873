"""`python -m bench first_token` measures both ways to a first token."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.support.serving import REPOSITORY

RUN_S = 120


def test_a_first_token_beside_others() -> None:
    command = [sys.executable, "-m", "bench", "first_token", "--streams", "4", "--requests", "20"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=RUN_S, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = re.findall(r"^\| 4 +\| ([0-9.]+) .*\| ([0-9.]+) .*\| ([0-9.]+) +\|$", done.stdout, re.MULTILINE)
    http_ms, wire_ms, _ = map(float, row)
    assert http_ms > 0 and wire_ms > 0
