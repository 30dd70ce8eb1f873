"""`python -m bench first_token` measures both of the server's sides."""

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
    figures = r" +\| ([0-9.]+) \([0-9.]+\)" * 3
    for who in ("a relay", "4"):
        (row,) = re.findall(rf"^\| {who}{figures} +\|$", done.stdout, re.MULTILINE)
        assert all(float(ms) > 0 for ms in row)
