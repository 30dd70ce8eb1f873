"""`python -m bench kernels` on a CPU in a GPU's place: its tables, and what it says where there is none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from bench import kernels
from bench.machine import REPOSITORY
from tests.cuda_on_cpu.device import CPUDevice
from tests.cuda_on_cpu.emulator import Emulated

SIZES = kernels.Sizes(
    batches=(1, 2),
    contexts=(33,),
    prompts=(20,),
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
    text = "\n".join(kernels.report(CPUDevice(), kernels.host_clock, SIZES))
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


def test_checks_are_counted_and_a_wrong_result_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.cuda_on_cpu import checks

    def wrong(*_: object) -> None:
        raise AssertionError("decode: 1 of 2 wrong")

    def load(name: str, constants: object) -> kernels.Uploading:
        return kernels.Uploading(Emulated(name, constants), torch.device("cpu"))

    monkeypatch.setattr(checks, "CHECKS", {"block_copy": checks.CHECKS["block_copy"]})
    assert kernels.check(load) == 0
    monkeypatch.setattr(checks, "CHECKS", {"block_copy": wrong})
    assert kernels.check(load) == 1
    assert "0 of 10 checks hold" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_both_commands_say_so_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert kernels.main([]) == 1
    assert capsys.readouterr().err == "bench kernels needs a GPU: there is no GPU that this torch can use\n"
    command, environment = [REPOSITORY / "bench" / "gpu.sh"], {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "bench/gpu.sh needs a GPU: there is no GPU that this torch can use\n"
