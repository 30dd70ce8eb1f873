"""`python -m bench engine` on a small model: every contender that Python can be runs, and the table names it."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import engine, http_servers, over_http
from bench.contenders import kv_tokens, prompts
from bench.machine import describe, markdown, spread
from tests.support.checkpoints import save, small_model
from tests.support.serving import REPOSITORY

RUN_S = 120


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    """`python -m bench engine` with these. One thread: torch's several wait for each other where others compute too."""
    command = [sys.executable, "-m", "bench", "engine", *flags]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=RUN_S)


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


def test_every_contender_has_the_same_room_for_keys_and_values() -> None:
    """Of its largest batch, or of the long prompt where that is longer."""
    assert kv_tokens([1, 8, 32]) == 32 * (128 + 128)
    assert kv_tokens([1]) == 1024 + 16


def test_a_spread_is_the_median_and_both_ends() -> None:
    assert spread([3.0, 1.0, 2000.0]) == "3 (1 to 2,000)"
    assert markdown(["", "a"], [["x", "1"]]).splitlines() == ["|   | a |", "| - | - |", "| x | 1 |"]


def test_a_race_of_servers_goes_on_where_it_was_cut(tmp_path: Path) -> None:
    """Each kind of load is measured; one that the file has is not, and is printed with them."""
    model = save(small_model("llama", max_position_embeddings=2048, vocab_size=512), tmp_path / "model")
    kept = tmp_path / "figures.json"
    before = {**dict.fromkeys(over_http.FIGURES, 77_777.0), "itl_p99_ms": 88_888.0}
    rounds = {"sluice:float32": [{"5 at once": before, "rss_mib": 1.0, "pss_mib": 1.0}]}
    of = f"model, {describe().rpartition(', ')[0]}"
    kept.write_text(json.dumps({"of": of, "rounds": rounds}))
    done = run(
        *("--http", "--model", str(model), "--rounds", "1", "--contenders", "sluice:float32", "--ids-max", "500"),
        *("--json", str(kept), "--batches", "5", "2", "--rates", "20", "--arrivals", "3"),
        *("--prompts", "40"),
    )
    assert done.returncode == 0, done.stderr
    (shown,) = json.loads(kept.read_text())["rounds"]["sluice:float32"]
    assert shown["5 at once"] == before
    assert "88,888" in done.stdout
    for load in (shown["2 at once"], shown["20 a second"], shown["40 of a prompt"]):
        assert load["tokens_s"] > 0
        assert 0 < load["ttft_p50_ms"] <= load["ttft_p99_ms"]
        assert load["itl_p50_ms"] <= load["itl_p99_ms"]
    assert 1 < shown["pss_mib"] <= shown["rss_mib"]


def test_every_load_is_kept_before_the_next_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    async def measured(*_: object) -> over_http.Load:
        return over_http.Load(1.0, [1.0], [1.0])

    monkeypatch.setattr(over_http, "_closed_loop", measured)
    monkeypatch.setattr(over_http, "_poisson", measured)
    monkeypatch.setattr(over_http, "_read", measured)
    shown: over_http.Shown = {}
    written: list[set[str]] = []
    over_http.measure(
        http_servers.Contender("us", os.getpid(), 0, lambda ids: {}, b""),
        ["1 at once", "8 at once", "0.5 a second", "64 of a prompt"],
        argparse.Namespace(ids_max=1000, arrivals=2),
        0,
        shown,
        lambda: written.append(set(shown) - {"rss_mib", "pss_mib"}),
    )
    assert [len(each) for each in written] == [1, 2, 3, 4]


@pytest.mark.parametrize("held", ['{"of": "another, CPU", "rounds": {}}', '{"rounds": {}}', "[]", "half of"])
def test_a_file_of_something_else_is_left_alone(held: str, tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    path.write_text(held)
    with pytest.raises(SystemExit, match="name another file"):
        over_http.Kept(str(path), "this, CPU")
    assert path.read_text() == held


def test_a_race_is_of_three_widths_and_of_every_program_that_is_named() -> None:
    parser = engine.parser()
    alone = http_servers.contenders(parser.parse_args(["--http"]))
    assert alone == ["sluice:bfloat16", "sluice:int8", "sluice:gguf"]
    programs = ["--llama-cpp", "bin", "--vllm", sys.executable, "--transformers", sys.executable]
    others = [each for each in http_servers.contenders(parser.parse_args(programs)) if each not in alone]
    assert others == [
        *("llama.cpp:BF16", "vllm:bfloat16", "transformers:bfloat16", "llama.cpp:Q8_0", "llama.cpp:as-is")
    ]
