"""A benchmark that is ended early leaves nothing behind, and says so in one line."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench import signals
from tests.support.benches import endless_bench
from tests.support.probes import processes_with
from tests.support.serving import REPOSITORY, until

RUN_S = 60
CASES = [(signal.SIGTERM, 143), (signal.SIGQUIT, 131), (signal.SIGINT, 130)]


@pytest.mark.synthetic
@pytest.mark.parametrize(("number", "code"), CASES, ids=["SIGTERM", "SIGQUIT", "SIGINT"])
def test_no_server_engine_or_folder_is_left(number: signal.Signals, code: int, tmp_path: Path) -> None:
    mark = f"TMPDIR={tmp_path}"

    def interruptible() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)

    with endless_bench(tmp_path, mark, "environ", before=interruptible) as (process, left):
        until(lambda: len(processes_with(mark, "environ")) >= 3, "the bench, an engine and a server")
        process.send_signal(number)
        process.send_signal(number)  # as `timeout` does, to the process and to its group
        out, err = process.communicate(timeout=RUN_S)
    assert (process.returncode, out, err) == (code, "", f"ended by {number.name}\n")
    assert left == []
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
