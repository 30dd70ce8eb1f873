"""How kernels are compiled and launched by CuPy: what it is told, with a recorder in its place (no GPU is needed)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine import cuda_device
from engine.cuda_device import CuPyModule


class Recorder:
    """CuPy's RawModule, its only kernel and its streams."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.compiled = 0
        self.stream = self.next = "none"
        self.max_dynamic_shared_size_bytes = 48 * 1024

    def module(self, **told: Any) -> Recorder:
        self.told = told
        return self

    def compile(self) -> None:
        self.compiled += 1

    def get_function(self, name: str) -> Recorder:
        self.name = name
        return self

    def __call__(self, grid: Any, block: Any, values: Any, *, shared_mem: int) -> None:
        self.calls.append((self.name, self.stream, grid, block, values, shared_mem))

    def on(self, stream: str) -> Recorder:
        self.next = stream
        return self

    def __enter__(self) -> None:
        self.stream = self.next

    def __exit__(self, *_: object) -> None:
        self.stream = "none"


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    recorder, streams = Recorder(), iter(["first", "second", "third", "fourth"])
    stream = SimpleNamespace(from_external=recorder.on)
    nvrtc = SimpleNamespace(getVersion=lambda: (12, 9))
    cupy = SimpleNamespace(RawModule=recorder.module, cuda=SimpleNamespace(Stream=stream, nvrtc=nvrtc))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: next(streams))
    return recorder


def test_sources_are_compiled_at_once_with_their_options(recorder: Recorder) -> None:
    CuPyModule("silu_mul", {"KIND": 1})
    assert recorder.compiled == 1
    assert "silu_mul(" in recorder.told["code"]
    assert {"-std=c++17", "-DKIND=1"} <= set(recorder.told["options"])
    assert isinstance(recorder.told["options"], tuple)  # RawModule takes nothing else


def test_arguments_are_addresses_and_numbers_of_their_types(recorder: Recorder) -> None:
    memory = torch.zeros(4)
    module = CuPyModule("silu_mul", {"KIND": 1})
    for _ in range(2):
        module.launch("silu_mul", (2, 3), (128,), 0, [memory, None, np.int32(7), np.float32(0.5)])
    (name, stream, grid, block, values, shared), again = recorder.calls
    assert (name, grid, block, shared) == ("silu_mul", (2, 3), (128,), 0)
    assert [(type(each), each) for each in values] == [
        (np.uint64, memory.data_ptr()),
        (np.uint64, 0),
        (np.int32, 7),
        (np.float32, 0.5),
    ]
    assert (stream, again[1], recorder.stream) == ("first", "second", "none")  # asked for at every launch


def test_more_shared_memory_is_asked_for_once(recorder: Recorder) -> None:
    module = CuPyModule("paged_prefill", {"KIND": 1})
    asked = []
    for size in (48 * 1024, 71_000, 60_000):
        module.launch("paged_prefill", (1,), (128,), size, [])
        asked.append(recorder.max_dynamic_shared_size_bytes)
    assert asked == [48 * 1024, 71_000, 71_000]


def test_headers_are_of_cupy_s_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for wheel in ("cuda_runtime", "cu13"):
        (tmp_path / wheel / "include").mkdir(parents=True)
        (tmp_path / wheel / "include" / "cuda_fp16.h").touch()
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(cuda_device.importlib.util, "find_spec", lambda name: spec)
    assert cuda_device._header_folders(12) == [tmp_path / "cuda_runtime" / "include"]
    assert cuda_device._header_folders(13) == [tmp_path / "cu13" / "include"]
    assert cuda_device._header_folders(14) == []
    monkeypatch.setattr(cuda_device.importlib.util, "find_spec", lambda name: None)
    assert cuda_device._header_folders(12) == []


def test_a_gpu_that_is_too_old_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert cuda_device.problem() == "the kernels need compute capability 8.0, and Tesla T4 has 7.5"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (12, 0))
    monkeypatch.setattr(cuda_device.importlib.util, "find_spec", lambda name: None)
    assert "CuPy is not installed" in (cuda_device.problem() or "")
