"""A CPU in a GPU's place (see `engine.cuda_device.Device`): kernels by the emulator, graphs by a tape.

May import torch, the engine's device and the emulator. A tape holds what a capture did: each of torch's operations and
each launch, with the very memory and numbers that it had. Played back, nothing of the captured Python runs, and
only what lies in the same memory has changed: as in a CUDA graph, what the captured code looked up elsewhere is what it
was then. Before a replay the memory of all that the capture made is filled with NaN, so nothing is left of the one
before. A capture that asks the device for a number, or makes a tensor of numbers, fails.

Work waits, as on a stream: copies and replays are done when somebody waits for something asked for later, or before
anything is launched or computed directly. So host memory that is written too early is found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.cuda_device import GPU
from engine.cuda_kernels import Module
from engine.model_runner import ModelRunner
from tests.cuda_on_cpu.emulator import Emulated

Step = Callable[[], None]


class CPUDevice:
    """See `Device`. `replays` counts, by the number of the capture."""

    place = torch.device("cpu")

    def __init__(self) -> None:
        self.replays: list[int] = []
        self._waiting: list[Step] = []
        self._tape: list[Step] | None = None

    def memory_free_bytes(self) -> int | None:
        return None

    def load(self, name: str, constants: Mapping[str, int]) -> Module:
        return _Taped(self, Emulated(name, constants))

    def host(self, size: int) -> torch.Tensor:
        return torch.full((size,), 0xAB, dtype=torch.uint8)

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert self._tape is None, "a copy from the host is no part of a graph"
        self._waiting.append(lambda: _copy(target, source))

    def fetch(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        def copy() -> None:
            _copy(target, source)

        def wait() -> None:
            while copy in self._waiting:
                self._waiting.pop(0)()

        self._waiting.append(copy)
        return wait

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self.drain()
        work()
        tape: list[Step] = []
        made: list[torch.Tensor] = []
        self._tape = tape
        try:
            with _Recorder(tape, made):
                work()
        finally:
            self._tape = None
        number = len(self.replays)
        self.replays.append(0)

        def play() -> None:
            with torch.inference_mode():
                for each in made:
                    each.fill_(torch.nan if each.is_floating_point() else -(2**30))
                for step in tape:
                    step()

        def replay() -> None:
            self.replays[number] += 1
            self._waiting.append(play)

        return replay

    def drain(self) -> None:
        """Does all that waits."""
        while self._waiting:
            self._waiting.pop(0)()

    def follow(self, runner: ModelRunner) -> None:
        """Has what the runner computes directly, on tensors, wait its turn as it would on a stream."""
        for owner, name in ((runner._cuda, "_compute"), (runner._sampler, "choose")):
            compute = getattr(owner, name)

            def later(*arguments: Any, compute: Callable[..., Any] = compute) -> Any:
                self.drain()
                return compute(*arguments)

            setattr(owner, name, later)

    def launched(self, launch: Step) -> None:
        if self._tape is None:
            self.drain()
        else:
            self._tape.append(launch)
        launch()


class CountingGPU(GPU):
    """A GPU, as tests see `CPUDevice`."""

    def __init__(self) -> None:
        super().__init__()
        self.replays: list[int] = []

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        replay, number = super().capture(work), len(self.replays)
        self.replays.append(0)

        def counted() -> None:
            self.replays[number] += 1
            replay()

        return counted

    def follow(self, runner: ModelRunner) -> None:
        """Its stream does."""


class _Taped:
    """A module whose launches are recorded."""

    def __init__(self, device: CPUDevice, module: Emulated) -> None:
        self._device = device
        self._module = module

    def launch(
        self, name: str, grid: tuple[int, ...], block: tuple[int, ...], shared_bytes: int, arguments: Sequence[Any], /
    ) -> None:
        arguments = list(arguments)
        self._device.launched(lambda: self._module.launch(name, grid, block, shared_bytes, arguments))


class _Recorder(TorchDispatchMode):
    """Records each operation: done again it leaves its results where they were."""

    def __init__(self, tape: list[Step], made: list[torch.Tensor]) -> None:
        super().__init__()
        self._tape = tape
        self._made = made

    def __torch_dispatch__(self, op: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        named = named or {}
        for what in ("_local_scalar_dense", "lift_fresh"):
            assert what not in str(op), "a graph can neither ask for a number nor be told one"
        result = op(*arguments, **named)
        given = {each.untyped_storage().data_ptr() for each in _tensors((arguments, tuple(named.values())))}
        results = _tensors(result)
        new = [each for each in results if each.untyped_storage().data_ptr() not in given]
        self._made += [each for each in new if not str(op).startswith("aten.empty")]
        fresh = [at for at, each in enumerate(results) if any(each is other for other in new)]

        def again() -> None:
            values = _tensors(op(*arguments, **named))
            for at in fresh:
                results[at].copy_(values[at])

        if not str(op).startswith("aten.empty"):
            self._tape.append(again)
        else:
            self._made += new
        return result


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [] if value.is_mkldnn else [value]  # weights in oneDNN's own layout
    return [each for part in value for each in _tensors(part)] if isinstance(value, (tuple, list)) else []


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    assert target.shape == source.shape and target.dtype == source.dtype
    with torch.inference_mode():
        target.copy_(source)
