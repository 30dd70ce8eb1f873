"""Every input that ever reached something new or broke something, again; and a few seconds of looking for others.

A long run, which goes on where the last one ended: `python -m tests.fuzz TARGET --seconds 3600`.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.__main__ import CORPUS
from tests.fuzz.targets import TARGETS, seeds
from tests.support.serving import REPOSITORY

SECONDS = 3
START_S = 90


@pytest.mark.parametrize("target", TARGETS)
def test_corpus(target: str) -> None:
    inputs = sorted((CORPUS / target).iterdir())
    assert inputs
    for data in [*seeds(target), *(path.read_bytes() for path in inputs)]:
        TARGETS[target](data)


@pytest.mark.parametrize("target", TARGETS)
def test_a_few_seconds(target: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("atheris") is None:
        sentence = "atheris is not installed; the extra `test` brings it on Linux"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(sentence)
    argv = [
        sys.executable,
        "-m",
        "tests.fuzz",
        target,
        "--seconds",
        str(SECONDS),
        "--seed",
        "1",
        "--work",
        str(tmp_path),
    ]
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=SECONDS + START_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
