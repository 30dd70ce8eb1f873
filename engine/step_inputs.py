"""What a decode step is told, in one piece of memory: one copy to the device, into a place that never moves.

May import numpy, torch and the engine's types. A step of `rows` sequences may have fewer: a row without one writes no
slot, sees no position and draws a token that nobody reads.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.sampler import TEMPERATURE_MAX, TEMPERATURE_MIN
from engine.sequence import Sequence

Array = np.ndarray[Any, Any]

# (name, type, numbers of a row, what a row without a sequence has); the widest types first, so that all are aligned.
# A table's width is the layout's. torch has no use for unsigned words, and kernels take them by their place.
_FIELDS = (
    ("ids", np.int64, 1, 0),
    ("sources", np.int64, 1, -1),
    ("positions", np.int64, 1, 0),
    ("slots", np.int64, 1, -1),
    ("words", np.int64, 4, 0),
    ("top_p", np.float64, 1, 1.0),
    ("contexts", np.int32, 1, 0),
    ("top_k", np.int32, 1, 1),
    ("temperature", np.float32, 1, TEMPERATURE_MIN),
    ("min_p", np.float32, 1, 0.0),
    ("tables", np.int32, 0, -1),
)
_TORCH: dict[Any, torch.dtype] = {
    np.int64: torch.int64,
    np.float64: torch.float64,
    np.int32: torch.int32,
    np.float32: torch.float32,
}
SETTINGS = ("temperature", "top_k", "top_p", "min_p", "words")  # in the order of `SampleKernel.draw`


@dataclass(frozen=True)
class Layout:
    """Where the inputs of `rows` sequences lie, each with a table of `stride` blocks (0: none)."""

    rows: int
    stride: int

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(self.rows * width * np.dtype(kind).itemsize for _, kind, width, _ in self._fields())

    def arrays(self, memory: torch.Tensor) -> dict[str, Array]:
        """The inputs in host memory, [rows] or [rows, width], all as of rows without sequences."""
        views = {name: view.numpy() for name, view in self.tensors(memory).items()}
        for name, _, _, nothing in self._fields():
            views[name].fill(nothing)
        return views

    def tensors(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """The inputs in any memory, [size or more] uint8."""
        views: dict[str, torch.Tensor] = {}
        start = 0
        for name, kind, width, _ in self._fields():
            end = start + self.rows * width * np.dtype(kind).itemsize
            view = memory[start:end].view(_TORCH[kind])
            views[name] = view if width == 1 else view.view(self.rows, width)
            start = end
        return views

    def _fields(self) -> list[tuple[str, type, int, float]]:
        return [(name, kind, width or self.stride, nothing) for name, kind, width, nothing in _FIELDS]


def tell_settings(inputs: dict[str, Array], sequences: Many[Sequence], vocab: int) -> None:
    """How each sequence's next token is drawn, in its row. Greedy is the least temperature and a top_k of 1."""
    words = inputs["words"].view(np.uint64)
    for row, sequence in enumerate(sequences):
        sampling = sequence.sampling
        words[row] = sampling.seed, sampling.prompt_index, sampling.choice_index, sequence.next_index
        if sampling.temperature > 0:
            inputs["temperature"][row] = min(max(sampling.temperature, TEMPERATURE_MIN), TEMPERATURE_MAX)
            inputs["top_k"][row] = sampling.top_k if 0 < sampling.top_k < vocab else vocab
            inputs["top_p"][row] = sampling.top_p
            inputs["min_p"][row] = sampling.min_p
