"""A GPU: launches the CUDA kernels, compiled by CuPy, on torch's memory and torch's current stream; captures steps in
CUDA graphs; copies without waiting. Every call of torch.cuda is in this file: a CPU runs all else (see `Device`).

May import numpy, torch, CuPy and the kernels' sources. CuPy is imported where it is used: a machine without a GPU
lacks it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from engine.cuda_kernels import Module
from engine.kernels import options, source

# What the kernels are made of, cp.async and mma of bfloat16, came with it.
_CAPABILITY_MIN = (8, 0)
# What a block may have without asking for more.
_SHARED_BYTES_PLAIN = 48 * 1024


def problem() -> str | None:
    """Why this machine can't run them."""
    if not torch.cuda.is_available():
        return "there is no GPU that this torch can use"
    capability = torch.cuda.get_device_capability()
    if capability < _CAPABILITY_MIN:
        least, found = (".".join(map(str, each)) for each in (_CAPABILITY_MIN, capability))
        return f"the kernels need compute capability {least}, and {torch.cuda.get_device_name()} has {found}"
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed (pip install 'sluice[cuda]')"
    return None


class Device(Protocol):
    """What a step needs of its device. Work is done in the order in which it was asked for, and not before it must be:
    host memory that was handed over is left alone until something that was asked for later is waited for."""

    place: torch.device

    def memory_free_bytes(self) -> int | None:
        """Of its own; None where that is the host's."""

    def load(self, name: str, constants: Mapping[str, int]) -> Module:
        """See `engine.cuda_kernels.Load`."""

    def host(self, size: int) -> torch.Tensor:
        """So many bytes of host memory that the device copies from and to by itself, [size] uint8."""

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies host memory to the device's, of one size, without waiting."""

    def fetch(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        """Copies the device's memory to the host's without waiting. The result waits until it is there."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Does `work` once or more, then records it. The result has the device do it again, on the same memory and
        with the same numbers: nothing of `work` itself is called."""


class GPU:
    """See `Device`. The current one of torch."""

    def __init__(self) -> None:
        self.place = torch.device("cuda")
        self._pool = torch.cuda.graph_pool_handle()  # of all graphs: no two run at a time

    def memory_free_bytes(self) -> int | None:
        """See `Device`."""
        torch.cuda.empty_cache()  # what loading freed, torch keeps
        return int(torch.cuda.mem_get_info()[0])

    def load(self, name: str, constants: Mapping[str, int]) -> Module:
        """See `Device`."""
        return CuPyModule(name, constants)

    def host(self, size: int) -> torch.Tensor:
        """See `Device`."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """See `Device`."""
        target.copy_(source, non_blocking=True)

    def fetch(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        """See `Device`."""
        target.copy_(source, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return done.synchronize

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """See `Device`. The first run is for what may not happen while a graph is captured: kernels are compiled,
        cuBLAS takes its workspace."""
        stream = torch.cuda.current_stream()
        side = torch.cuda.Stream()
        side.wait_stream(stream)
        with torch.cuda.stream(side):
            work()
        stream.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            work()
        return graph.replay


class CuPyModule:
    """See `engine.cuda_kernels.Module`."""

    def __init__(self, name: str, constants: Mapping[str, int]) -> None:
        import cupy

        self._cupy = cupy
        headers = _header_folders(cupy.cuda.nvrtc.getVersion()[0])
        told = (*options(name, constants), *(f"-I{folder}" for folder in headers))
        self._module = cupy.RawModule(code=source(name), options=told)
        self._module.compile()  # now, and not in the first step or while a graph is captured
        self._functions: dict[str, Any] = {}

    def launch(
        self, name: str, grid: tuple[int, ...], block: tuple[int, ...], shared_bytes: int, arguments: Sequence[Any], /
    ) -> None:
        """See `engine.cuda_kernels.Module`. Memory is torch's tensors, on the current device."""
        function = self._function(name, shared_bytes)
        values = tuple(_value(each) for each in arguments)
        # Resolved at every launch: a step may run on another stream than the one before, and graphs have their own.
        with self._cupy.cuda.Stream.from_external(torch.cuda.current_stream()):
            function(grid, block, values, shared_mem=shared_bytes)

    def _function(self, name: str, shared_bytes: int) -> Any:
        if name not in self._functions:
            self._functions[name] = self._module.get_function(name)
        function = self._functions[name]
        if shared_bytes > max(_SHARED_BYTES_PLAIN, function.max_dynamic_shared_size_bytes):
            function.max_dynamic_shared_size_bytes = shared_bytes
        return function


def _value(argument: Any) -> np.generic:
    """CuPy would pass a Python float as 8 bytes, so everything is a numpy scalar; an address is one of 8 bytes."""
    if argument is None:
        return np.uint64(0)
    return np.uint64(argument.data_ptr()) if isinstance(argument, torch.Tensor) else argument


def _header_folders(cuda: int) -> list[Path]:
    """Where the wheel of this CUDA's runtime has cuda_fp16.h and cuda_bf16.h, if it is installed. Without it CuPy looks
    for them in a CUDA toolkit."""
    nvidia = importlib.util.find_spec("nvidia")
    places = list(nvidia.submodule_search_locations or ()) if nvidia else []
    wheel = "cuda_runtime" if cuda == 12 else f"cu{cuda}"
    folders = [Path(place) / wheel / "include" for place in places]
    return [folder for folder in folders if (folder / "cuda_fp16.h").is_file()]
