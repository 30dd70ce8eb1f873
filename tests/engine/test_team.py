"""Threads that share loops: every call is made once, and under ThreadSanitizer nothing races."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from engine.cpu_ops.build import HERE, _compiler

DRIVER = Path(__file__).with_name("team_driver.cpp")


@pytest.mark.timeout(200)
@pytest.mark.parametrize("flags", [("-O2",), ("-O1", "-fsanitize=thread")])
def test_each_call_of_a_loop_is_made_once_and_in_order(flags: tuple[str, ...], tmp_path: Path) -> None:
    program = tmp_path / "driver"
    command = [*_compiler(), "-std=c++17", "-pthread", *flags, f"-I{HERE}", DRIVER, HERE / "team.cpp", "-o", program]
    subprocess.run(command, check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
