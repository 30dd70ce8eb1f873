"""`python -m bench request`: every request is answered to its end, and each of its parts has a time."""

from __future__ import annotations

import re
import subprocess
import sys

from bench.request import requests
from tests.support.serving import REPOSITORY

RUN_S = 60


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench", "request", *flags]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=RUN_S)


def test_it_measures_every_request() -> None:
    done = run("--rounds", "1")
    assert done.returncode == 0, done.stderr
    for name in requests():
        found = re.search(rf"^\| {name} +\| ([\d.]+) +\| ([\d.]+) +\| ([\d.]+) +\| ([\d.]+) +\|$", done.stdout, re.M)
        assert found, done.stdout
        begin, end, both, token = map(float, found.groups())
        assert begin > 0
        assert (min(end, token) > 0) == (name != "chat, refused")
        assert abs(begin + end - both) < 0.2  # each is rounded


def test_a_request_that_is_none_is_named() -> None:
    done = run("--requests", "pigeon")
    assert done.returncode == 2
    assert "'pigeon' is no request" in done.stderr
