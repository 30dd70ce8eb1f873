"""`python -m bench engine` on a small model: every contender that Python can be runs, and the table names it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from bench.contenders import prompts
from bench.machine import markdown, spread
from tests.support.checkpoints import save, small_model
from tests.support.serving import REPOSITORY

RUN_S = 120


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    """`python -m bench engine` with these."""
    command = [sys.executable, "-m", "bench", "engine", *flags]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=RUN_S)


def test_it_measures_each_contender_in_each_round(tmp_path: Path) -> None:
    model = save(small_model("llama", max_position_embeddings=2048, vocab_size=512), tmp_path / "model")
    kept = tmp_path / "figures.json"
    contenders = ["sluice:float32", "transformers:float32"]
    flags = ("--contenders", *contenders, "--batches", "1", "2", "--rounds", "2", "--json", str(kept))
    done = run("--model", str(model), *flags)
    assert done.returncode == 0, done.stderr
    rounds = json.loads(kept.read_text())["rounds"]
    assert {name: len(found) for name, found in rounds.items()} == dict.fromkeys(contenders, 2)
    for name, found in rounds.items():
        for figures in found:
            assert figures["prefill"] > 0
            assert figures["decode"].keys() == {"1", "2"}
            assert min(figures["decode"].values()) > 0
            assert figures["resident_mib"] > 0
        assert any(line.startswith(f"| {name} ") for line in done.stdout.splitlines())
    assert all(0 < figures["outside"] < 1 for figures in rounds["sluice:float32"])


def test_a_contender_that_is_none_is_named() -> None:
    done = run("--contenders", "abacus:float32")
    assert done.returncode == 2
    assert "'abacus:float32' is no contender" in done.stderr


def test_prompts_differ_and_are_the_same_each_time() -> None:
    first, second = prompts(2, 64, 49152, seed=1)
    assert first != second
    assert prompts(2, 64, 49152, seed=1) == [first, second]
    assert all(300 <= id_ < 49152 for id_ in first)


def test_a_spread_is_the_median_and_both_ends() -> None:
    assert spread([3.0, 1.0, 2000.0]) == "3 (1 to 2,000)"
    assert markdown(["", "a"], [["x", "1"]]).splitlines() == ["|   | a |", "| - | - |", "| x | 1 |"]


def test_a_server_answers_the_same_requests_in_a_closed_loop_and_at_random(tmp_path: Path) -> None:
    model = save(small_model("llama", max_position_embeddings=2048, vocab_size=512), tmp_path / "model")
    kept = tmp_path / "figures.json"
    done = run(
        *("--http", "--model", str(model), "--rounds", "1", "--contenders", "sluice:float32", "--ids-max", "500"),
        *("--json", str(kept), "--batches", "2", "--rates", "20", "--arrivals", "3"),
    )
    assert done.returncode == 0, done.stderr
    (shown,) = json.loads(kept.read_text())["rounds"]["sluice:float32"]
    for load in (shown["closed"]["2"], shown["random"]["20.0"]):
        assert load["tokens_s"] > 0
        assert 0 < load["ttft_p50_ms"] <= load["ttft_p99_ms"]
        assert load["itl_p50_ms"] <= load["itl_p99_ms"]
    assert 0 < shown["pss_mib"] <= shown["rss_mib"]
