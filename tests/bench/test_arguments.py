"""What the benchmarks refuse before they run, and what they say of it."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import arguments, engine, plots, processes, transports
from bench.__main__ import BENCHMARKS
from bench.peers import race
from tests.support.serving import REPOSITORY


def refused(capsys: pytest.CaptureFixture[str], name: str, *flags: str) -> str:
    """What a benchmark says of flags that it refuses as argparse does."""
    with pytest.raises(SystemExit) as raised:
        importlib.import_module(f"bench.{name}").main(list(flags))
    shown = capsys.readouterr()
    assert (raised.value.code, shown.out) == (2, "")
    return shown.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "flag", "values", "range_"),
    [
        ("engine", "--arrivals", "0", "1 to"),
        ("engine", "--batches", "1 0", "1 to"),
        ("engine", "--ids-max", "300", "301 to"),
        ("engine", "--prompts", "0", "1 to"),
        ("engine", "--rates", "0", "0.001 to"),
        ("engine", "--rounds", "0", "1 to"),
        ("first_token", "--requests", "0", "1 to"),
        ("first_token", "--streams", "0", "1 to 10,000"),
        ("gateway", "--rounds", "0", "1 to"),
        ("gateway", "--streams", "0", "1 to"),
        ("gateway", "--times", "0", "1 to"),
        ("peers", "--rounds", "0", "1 to"),
        ("peers", "--steps", "20 -1", "0 to"),
        ("peers", "--steps", "nan", "0 to"),
        ("peers", "--streams", "0", "1 to"),
        ("peers", "--tokens", "1", "2 to 100,000"),
        ("request", "--rounds", "0", "1 to"),
        ("stalled", "--rounds", "0", "1 to"),
        ("stalled", "--seconds", "-1", "0.2 to 1,800"),
        ("stalled", "--seconds", "0", "0.2 to 1,800"),
        ("stalled", "--streams", "0", "1 to"),
        ("transports", "--rounds", "0", "1 to"),
        ("transports", "--streams", "64 -3", "1 to"),
        ("transports", "--streams", "many", "1 to"),
        ("transports", "--tokens", "0", "2 to 100,000"),
        ("transports", "--tokens", "1", "2 to 100,000"),
    ],
)
def test_a_number_out_of_its_range(
    name: str, flag: str, values: str, range_: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, name, flag, *values.split())
    assert f"argument {flag}: {values.split()[-1]!r} is no " in said
    assert f"number from {range_}" in said


@pytest.mark.parametrize(
    ("name", "flag", "what", "known"),
    [
        ("transports", "--transports", "transport", "'SSE, HTTP/2', 'WebSocket'"),
        ("request", "--requests", "request", "'chat', \"chat, OpenAI's SDK\""),
        ("peers", "--contenders", "contender", "'uvicorn, httptools', "),
        ("peers", "--modes", "mode", "'sse', 'chunked', 'ws'"),
    ],
)
def test_a_name_that_is_none(name: str, flag: str, what: str, known: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Names have commas, so that each stands in quotes."""
    said = refused(capsys, name, flag, "pigeon")
    assert f"argument {flag}: 'pigeon' is no {what}: " in said
    assert known in said


@pytest.mark.parametrize("name", ["engine", "peers", "transports"])
def test_a_file_that_can_not_be_written(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path / "none" / "x.json", Path("/proc/x.json")):
        said = refused(capsys, name, "--json", str(path))
        assert f"argument --json: {path} can't be written: {path.parent}: No such file" in said
    assert f"{tmp_path} is a folder" in refused(capsys, name, "--json", str(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["peers", "transports"])
def test_a_folder_that_can_not_be_made(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "argument --plots: /proc/x can't be written: /proc: " in refused(capsys, name, "--plots", "/proc/x")
    (file := tmp_path / "file").touch()
    assert f"{file}: Not a directory" in refused(capsys, name, "--plots", str(file / "pictures"))


def test_what_can_be_written_is_taken_and_not_made_yet(tmp_path: Path) -> None:
    (old := tmp_path / "old.json").write_text("{}")
    for take, path in (
        (arguments.new_file, old),
        (arguments.new_file, tmp_path / "new.json"),
        (arguments.new_folder, tmp_path),
        (arguments.new_folder, tmp_path / "a" / "b"),
    ):
        assert take(str(path)) == str(path)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("old.json", "{}")]


RUN: dict[str, Any] = {"cpu_us": 5.0, "itl_p99_ms": 21.0, "bytes_from": 90.0, "memory_kib": 30.0}
MACHINE = {"machine": "m", "load": 0.1}
TRANSPORTS = MACHINE | {"tokens": 2, "figures": {"WebSocket": {"2": [RUN]}}}
WRITER = race.Sample(0, "C writer", "sse", 20.0, 512, 5.0, True, None, 1.0, 2.0, 20.0, 21.0, 0)
SAMPLES = [WRITER, replace(WRITER, contender="sluice")]
PEERS = MACHINE | {"versions": {}, "samples": [vars(sample) for sample in SAMPLES]}


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("transports", PEERS),
        ("transports", MACHINE | {"figures": {"WebSocket": {"2": []}}}),
        ("transports", MACHINE | {"figures": {"WebSocket": {"2": [{"cpu_us": None}]}}}),
        ("peers", TRANSPORTS),
        ("peers", MACHINE | {"samples": [{"round": 0}]}),
        ("peers", MACHINE | {"samples": [vars(SAMPLES[1])]}),
        ("peers", {"samples": []}),
        ("peers", []),
    ],
)
def test_another_benchmark_s_run_is_not_compared_with(
    name: str, other: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path := tmp_path / "old.json").write_text(json.dumps(other))
    said = refused(capsys, name, "--compare", str(path))
    assert f"argument --compare: {path} holds no run that --json of `python -m bench {name}` kept" in said


@pytest.mark.parametrize("name", ["peers", "transports"])
def test_a_run_that_is_none(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path := tmp_path / "old.json").write_text("half of")
    assert f"{path} holds no JSON" in refused(capsys, name, "--compare", str(path))
    assert "can't be read: No such file" in refused(capsys, name, "--compare", str(tmp_path / "none.json"))


def test_runs_with_nothing_in_common_say_so() -> None:
    assert "nothing to compare" in transports.moved(TRANSPORTS, {"WebSocket": {3: []}})
    assert "nothing to compare" in race.moved(PEERS, [replace(sample, streams=2000) for sample in SAMPLES])
    assert "nothing to compare" not in race.moved(PEERS, SAMPLES)


@pytest.mark.parametrize("held", ["half of", "[]", json.dumps(MACHINE), json.dumps(MACHINE | {"samples": []})])
def test_pictures_of_nothing(held: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path := tmp_path / "kept.json").write_text(held)
    assert "argument KEPT.json: " in refused(capsys, "plots", str(path), str(tmp_path))
    said = refused(capsys, "plots", str(tmp_path / "none.json"), str(tmp_path))
    assert "none.json can't be read: No such file" in said
    assert plots.SHARES


def test_a_run_is_kept_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / ("a" * 251 + ".json")[-255:]  # with no room for the name of another beside it
    path.write_text("an older run")
    with pytest.raises(SystemExit, match="can't be written: File name too long"):
        arguments.keep(str(path), {})
    assert [each.read_text() for each in tmp_path.iterdir()] == ["an older run"]
    with pytest.raises(SystemExit, match="/dev/full can't be written: No space left on device"):
        arguments.keep("/dev/full", MACHINE)
    arguments.keep(str(tmp_path / "new.json"), MACHINE)
    assert json.loads((tmp_path / "new.json").read_text()) == MACHINE
    assert len(list(tmp_path.iterdir())) == 2


def test_a_model_and_programs_that_are_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for flags in (["--model", "/none"], ["--model", "/none", "--http"]):
        assert engine.main(flags) == 2
        assert "argument --model: '/none' is no model" in capsys.readouterr().err
    for flags, program in (([], "llama-batched-bench"), (["--http"], "llama-server")):
        assert engine.main(["--llama-cpp", str(tmp_path), "--contenders", "llama.cpp:BF16", *flags]) == 2
        assert f"'llama.cpp:BF16' needs {program}: name its folder" in capsys.readouterr().err
        program_path = tmp_path / program
        program_path.touch(0o755)
        assert engine.main(["--llama-cpp", str(tmp_path), "--contenders", "llama.cpp:BF16", *flags]) == 2
        assert "needs llama-quantize" in capsys.readouterr().err


def test_programs_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "argument --python: there is no program '/none'" in refused(capsys, "peers", "--python", "/none")
    for flag in ("--vllm", "--transformers", "--xllamacpp"):
        assert f"argument {flag}: there is no program '/none'" in refused(capsys, "engine", flag, "/none")
    assert "argument --llama-cpp: there is no folder '/none'" in refused(capsys, "engine", "--llama-cpp", "/none")
    with pytest.raises(SystemExit, match="true is no Python"):
        race.main(["--python", "true"])


def test_a_contender_without_its_type_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert engine.main(["--contenders", "sluice"]) == 2
    assert "each with :DTYPE" in capsys.readouterr().err


def test_a_race_that_its_client_would_cut(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "peers", "--steps", "0", "1000", "--tokens", "61")
    assert "argument --steps: 61 tokens, 1000 ms each, take longer than 60 s" in said


@pytest.mark.parametrize("name", ["first_token", "peers", "stalled", "transports"])
def test_more_streams_than_files_may_be_open(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1024))
    said = refused(capsys, name, "--streams", "2000")
    assert "argument --streams: " in said and "the limit (ulimit -Hn) is 1,024" in said


def test_the_limit_on_open_files_is_taken_as_high_as_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1024))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    for sockets in (100, 500):
        arguments.allow_open_files(argparse.ArgumentParser(), sockets, "--streams")
    assert asked == [(500 + arguments.OTHER_FILES, 1024)]


def test_without_taskset_it_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert processes.on_core(None) == []
    with pytest.raises(SystemExit, match=r"taskset.*util-linux"):
        processes.on_core(0)


@pytest.mark.parametrize("name", ["engine", "first_token", "gateway", "peers", "request", "stalled", "transports"])
def test_help_has_a_word_and_the_default_of_every_flag(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        importlib.import_module(f"bench.{name}").main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for flag in ("--contenders", "--modes", "--requests", "--rounds", "--streams", "--tokens", "--transports"):
        told = shown.rpartition(f" {flag} ")[2].partition(" --")[0]
        assert f" {flag} " not in shown or "(default: " in told, (flag, told)


def test_ours_and_the_writer_may_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They run always; what is refused is the next flag."""
    said = refused(capsys, "peers", "--contenders", "sluice", "C writer", "--rounds", "0")
    assert "argument --rounds" in said


def bench(*flags: str) -> tuple[int, str, str]:
    """The exit code of `python -m bench`, and what it says."""
    command = [sys.executable, "-m", "bench", *flags]
    done = subprocess.run(command, cwd=REPOSITORY, env={**os.environ}, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


def test_a_benchmark_that_is_none() -> None:
    code, out, err = bench("pigeon")
    assert (code, out) == (2, "")
    assert "usage: python -m bench NAME" in err


def test_help_is_what_is_said_without_a_name_and_no_error() -> None:
    code, out, usage = bench()
    assert (code, out) == (2, "")
    assert all(f"  {name} " in usage for name in BENCHMARKS)
    assert bench("--help") == bench("-h") == (0, usage, "")
