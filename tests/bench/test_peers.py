"""`python -m bench peers`: ours and others run against the C load client, which checks every answer."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from bench.peers.contenders import BASELINE, MODES, OURS, PEERS, missing
from bench.peers.race import Sample, moved, ratios, table
from tests.support.serving import REPOSITORY

RUN_S = 120


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench", "peers", *flags]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=RUN_S)


def test_ours_runs_beside_the_writers(tmp_path: Path) -> None:
    """uvloop is one of the server's own packages, so that nothing more than a C compiler is needed."""
    kept = tmp_path / "figures.json"
    writers = ("--contenders", BASELINE, "uvloop writer")
    sizes = ("--streams", "8", "--tokens", "12", "--steps", "5", "--rounds", "1")
    done = run(*writers, *sizes, "--json", str(kept))
    assert done.returncode == 0, done.stdout + done.stderr
    samples = [Sample(**each) for each in json.loads(kept.read_text())["samples"]]
    assert {(each.contender, each.mode) for each in samples} == {
        (name, mode) for name in (BASELINE, "uvloop writer", OURS) for mode in MODES
    }
    assert all(each.errors == 0 and each.cpu_us > 0 for each in samples)
    assert all((each.engine_us or 0) > 0 for each in samples if each.contender == OURS)
    assert len(re.findall(rf"^\| {OURS} ", done.stdout, re.MULTILINE)) == len(MODES)


def sample(number: int, contender: str, cpu_us: float) -> Sample:
    return Sample(number, contender, "sse", 20.0, 512, cpu_us, True, None, 1.0, 2.0, 20.0, 21.0, 0)


def test_a_ratio_is_to_the_writer_of_the_same_round() -> None:
    samples = [sample(0, BASELINE, 5.0), sample(0, OURS, 10.0), sample(1, OURS, 30.0), sample(1, BASELINE, 10.0)]
    setting = ("sse", 20.0, 512)
    assert ratios(samples, OURS, setting) == [2.0, 3.0]
    shown = table(samples, setting, [BASELINE, OURS, "hypercorn", "websockets"], {"uvloop": "1"})
    assert "2.50 (2.00 to 3.00)" in shown
    assert "not installed: hypercorn" in shown
    assert "websockets" not in shown  # it has no SSE
    kept = {"machine": "m", "load": 0.1, "samples": [vars(each) for each in samples]}
    assert "× 1.00" in moved(kept, samples)


def test_what_is_missing_is_named() -> None:
    assert missing("node", "ws", {"$node": "v20"}) == ["ws"]
    assert missing("node", "sse", {"$node": "v20"}) == []
    assert missing("aiohttp", "sse", {}) == ["aiohttp", "uvloop"]
    assert missing(OURS, "sse", {}) == []
    assert all(peer.modes for peer in PEERS.values())
