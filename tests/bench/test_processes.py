"""A process that ends while a benchmark needs it: one sentence says which and what it said, and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench.load import play
from bench.processes import SAID_BYTES_MAX, Gone, engine, ready_line, server, started
from bench.readers import Http1
from tests.support.benches import endless_bench
from tests.support.probes import processes_with
from tests.support.serving import REPOSITORY, until

RUN_S = 60


def script(body: str) -> list[str]:
    return [sys.executable, "-c", f"import os, sys, time\n{body}"]


DIES = script("print('ready', flush=True)\nprint('first\\nthe cause\\n\\n', file=sys.stderr)\nsys.exit(3)")
# Longer than any test waits for it: whoever began it has to end it.
LIVES = script("print('ready', flush=True)\ntime.sleep(60)")


def test_a_block_that_fails_of_it_says_so() -> None:
    def work() -> None:
        with started("x", DIES, REPOSITORY) as process:
            assert process.stdout is not None
            process.stdout.read()  # until it closes
            raise ConnectionResetError

    with pytest.raises(Gone) as raised:
        work()
    assert str(raised.value) == "x ended with exit code 3; the last that it said on stderr is: the cause"


def test_before_it_is_ready() -> None:
    dies = script("os.kill(os.getpid(), 9)")
    with pytest.raises(Gone) as raised, started("x", dies, REPOSITORY) as process:
        ready_line(process)
    assert str(raised.value) == "x ended by signal 9 (Killed); it said nothing on stderr"


def test_a_block_that_does_not_notice() -> None:
    with pytest.raises(Gone, match=r"^x ended with exit code 3;"), started("x", DIES, REPOSITORY) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def test_a_block_that_waits_for_the_end_gets_it() -> None:
    with started("x", DIES, REPOSITORY, stderr=subprocess.PIPE) as process:
        assert process.communicate() == (b"ready\n", b"first\nthe cause\n\n\n")


def test_a_fault_of_another_s_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is that another process ended."""
    monkeypatch.setattr("bench.processes.GONE_S_MAX", 0.01)
    with pytest.raises(ZeroDivisionError), started("x", LIVES, REPOSITORY):
        raise ZeroDivisionError
    with pytest.raises(Gone, match=r"^y ended"), started("x", LIVES, REPOSITORY), started("y", DIES, REPOSITORY) as y:
        os.waitid(os.P_PID, y.pid, os.WEXITED | os.WNOWAIT)


def test_a_line_without_an_end_is_told_from_its_end() -> None:
    dies = script(f"sys.stderr.write('x' * {SAID_BYTES_MAX} + 'the cause')")
    with pytest.raises(Gone) as raised, started("x", dies, REPOSITORY) as process:
        ready_line(process)
    said = str(raised.value).rpartition(": ")[2]
    assert said == "x" * (SAID_BYTES_MAX - len("the cause")) + "the cause"


@pytest.mark.synthetic
@pytest.mark.parametrize("who", ["our server", "the synthetic engine"])
def test_a_server_or_an_engine_that_dies_in_the_middle(who: str) -> None:
    def work() -> None:
        with engine(5) as attached, server(attached, "--engine-restart-wait", "0") as ours:
            pid = ours.pid if who == "our server" else ours.engine_pid

            class Deadly(Http1):
                def feed(self, data: bytes, now: float) -> bytes:
                    if self.streams[0].tokens:
                        os.kill(pid, signal.SIGKILL)
                    return super().feed(data, now)

            play(Deadly, ours, 2, 100_000)

    with pytest.raises(Gone, match=rf"^{who} ended by signal 9 \(Killed\); "):
        work()


@pytest.mark.synthetic
def test_it_is_all_that_a_bench_says_and_nothing_is_left(tmp_path: Path) -> None:
    mark = f"unix:{tmp_path}"  # of the engine's socket, in its command line and the server's
    with endless_bench(tmp_path, mark) as (process, left):
        until(lambda: len(processes_with(mark)) == 2, "an engine and a server")
        (pid,) = processes_with(f"--engine-url\0{mark}")
        os.kill(pid, signal.SIGKILL)
        out, err = process.communicate(timeout=RUN_S)
    assert (process.returncode, out, left, list(tmp_path.iterdir())) == (1, "", [], [])
    assert err.startswith("our server ended by signal 9 (Killed); ")
    assert err.count("\n") == 1
