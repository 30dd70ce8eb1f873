"""`python -m bench kernels` on a CPU in a GPU's place: its tables, and what it says where there is none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from bench import kernels
from bench.machine import REPOSITORY
from tests.cuda_on_cpu.device import CPUDevice

SIZES = kernels.Sizes(
    batches=(1, 2),
    contexts=(33,),
    prompts=(20,),
    prompt_repeats=2,
    copy_bytes=1 << 16,
    cache_bytes=1 << 16,
    runs=1,
    step_batches=(1, 2),
    step_context=20,
    layers=1,
    hidden=64,
    inner=64,
    vocab=100,
    kind="float32",
)


@pytest.fixture
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.usefixtures("inference")
def test_every_table_is_there_with_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "HEADS", {"Llama-3-8B": (4, 2, 32), "SmolLM2-135M": (3, 1, 32)})
    device = CPUDevice()

    def clock(work: Callable[[], None], runs: int) -> list[float]:
        return kernels.host_clock(lambda: (work(), device.drain()), runs)  # type: ignore[func-returns-value]

    text = "\n".join(kernels.report(device, clock, SIZES))
    assert all(device.replays)
    assert len(re.findall(r"^\| (?:Llama|Qwen|SmolLM)\S+, [12] +\| \d+\.\d\d, [\d,]+ \(", text, re.MULTILINE)) == 2 * 4
    assert len(re.findall(r"^\| (?:Llama|Qwen|SmolLM)\S+ +\| [\d,]+ \(.*\); \d+\.\d\d +\|$", text, re.MULTILINE)) == 2
    assert (
        len(re.findall(r"^\| [12] +\| [\d,.]+ \(.*\); [\d.]+ +\| [\d,.]+ \(.*\); [\d.]+ +\|$", text, re.MULTILINE)) == 2
    )


def test_a_cache_without_room_is_told() -> None:
    class Small(CPUDevice):
        def memory_free_bytes(self) -> int:
            return 1000

    cell = kernels.decode_cell(Small(), kernels.host_clock, SIZES, "SmolLM2-135M", 1, 33, "", 1e9)
    assert cell == "no room"


@pytest.mark.usefixtures("inference")
def test_a_figure_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object) -> str:
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr(kernels, "prefill_cell", lost)
    monkeypatch.setattr(kernels, "step_rows", lost)
    monkeypatch.setattr(kernels, "decode_cell", lambda *_: "0.9, 7 (6 to 8)")
    text = "\n".join(kernels.report(CPUDevice(), kernels.host_clock, SIZES))
    assert text.count("failed: RuntimeError: out of memory") == 3 + 1
    assert "and more" not in text
    assert text.count("0.9, 7 (6 to 8)") == 2 * 3 * 2


def test_checks_are_counted_and_what_is_wrong_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.cuda_on_cpu import checks

    def wrong(*_: object) -> None:
        raise AssertionError("decode: 1 of 2 wrong")

    def lost(*_: object) -> None:
        raise RuntimeError("an illegal memory access was encountered\nand more")

    monkeypatch.setattr(checks, "CHECKS", {"block_copy": checks.CHECKS["block_copy"]})
    monkeypatch.setattr(checks, "check_longest", lambda _: None)
    assert kernels.check(CPUDevice()) == 0
    assert "12 of 12 checks hold" in capsys.readouterr().out
    monkeypatch.setattr(checks, "CHECKS", {"block_copy": wrong})
    monkeypatch.setattr(checks, "check_longest", lost)
    assert kernels.check(CPUDevice()) == 1
    said = capsys.readouterr().out
    assert "the longest context: RuntimeError: an illegal memory access was encountered\n" in said
    assert "1 of 12 checks hold" in said


def test_each_part_of_the_one_command_runs_whatever_became_of_the_others(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        "#!/usr/bin/env bash\n"
        'case "$*" in\n'
        "-c*) ;;\n"  # nothing stands in the way
        "*--check) echo 59 of 62; exit 3 ;;\n"
        '*) echo "$*" ;;\n'
        "esac\n"
    )
    python.chmod(0o755)
    command, environment = [REPOSITORY / "bench" / "gpu.sh"], {**os.environ, "PYTHON": str(python)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "failed: kernels beside their references: exit code 3\n")
    said = [line for line in done.stdout.splitlines() if not line.startswith("== ")]
    assert [each.split()[:3] for each in said] == [
        ["59", "of", "62"],
        ["-m", "pytest", "-q"],
        ["-m", "bench", "kernels"],
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_both_commands_say_so_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels.main([]) == 1
    assert capsys.readouterr().err == "bench kernels needs a GPU: there is no GPU that this torch can use\n"
    command, environment = [REPOSITORY / "bench" / "gpu.sh"], {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "bench/gpu.sh needs a GPU: there is no GPU that this torch can use\n"
