"""A benchmark that is ended early leaves nothing behind, and says so in one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench import signals
from tests.support.serving import REPOSITORY, until

RUN_S = 60
CASES = [(signal.SIGTERM, 143), (signal.SIGINT, 130)]


def those_with(mark: str) -> set[int]:
    """Processes that have this in their environment, zombies not."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                found.add(int(path.parent.name))
        except OSError:
            pass
    return found


@pytest.mark.synthetic
@pytest.mark.parametrize(("number", "code"), CASES, ids=["SIGTERM", "SIGINT"])
def test_no_server_engine_or_folder_is_left(number: signal.Signals, code: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench", "transports", "--streams", "2", "--tokens", "100000", "--rounds", "1"]
    mark = f"TMPDIR={tmp_path}"
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        until(lambda: len(those_with(mark)) >= 3, "the bench, an engine and a server")
        process.send_signal(number)
        process.send_signal(number)  # as `timeout` does, to the process and to its group
        out, err = process.communicate(timeout=RUN_S)
    finally:
        process.kill()
        left = those_with(mark)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    assert (process.returncode, out, err) == (code, "", f"ended by {number.name}\n")
    assert left == set()
    assert list(tmp_path.iterdir()) == []


def script(body: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, as the handlers are for good."""
    code = f"import os, signal, sys\nfrom bench import signals\n{body}"
    return subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=RUN_S)


def test_what_is_held_is_not_cut_and_only_the_first_signal_counts() -> None:
    done = script(
        "def work():\n"
        "    try:\n"
        "        with signals.held(), signals.held():\n"
        "            os.kill(os.getpid(), signal.SIGTERM)\n"
        "            print('whole')\n"
        "        print('never')\n"
        "    finally:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        with signals.held():\n"
        "            print('tidied')\n"
        "sys.exit(signals.guarded(work))"
    )
    assert (done.returncode, done.stdout, done.stderr) == (143, "whole\ntidied\n", "ended by SIGTERM\n")


def test_what_is_ignored_stays_so() -> None:
    """As under nohup."""
    done = script(
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "sys.exit(signals.guarded(lambda: os.kill(os.getpid(), signal.SIGHUP) or 7))"
    )
    assert (done.returncode, done.stderr) == (7, "")


def test_without_a_guard_nothing_is_held_back() -> None:
    with signals.held():
        pass
