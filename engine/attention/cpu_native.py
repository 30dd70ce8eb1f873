"""Attention on the CPU by the C++ operators: decode rows and prefill chunks alike, straight from the paged cache.

May import torch and the engine's model side. The cache is the same as the torch backend's.
"""

from __future__ import annotations

import torch

from engine.attention import StepBatch
from engine.cpu_ops import Library, Step
from engine.models.config import ModelConfig


class NativeCPUAttention:
    """See `Attention`. The library must serve the model's type."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, library: Library) -> None:
        self._config = config
        self._dtype = dtype
        self._library = library
        self._caches: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._block_size = 0

    def allocate(self, blocks: int, block_size: int) -> None:
        """See `Attention`."""
        self._caches = []
        self._block_size = block_size
        shape = (blocks, self._config.kv_heads, block_size, self._config.head_dim)
        for _ in self._config.windows:
            self._caches.append((torch.empty(shape, dtype=self._dtype), torch.empty(shape, dtype=self._dtype)))

    def plan(self, batch: StepBatch) -> Step:
        """See `Attention`."""
        config = self._config
        arrays = batch.rows, batch.contexts, batch.tables, batch.slots
        return Step(self._dtype, config.heads, config.kv_heads, config.head_dim, self._block_size, arrays)

    def attend(self, plan: Step, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See `Attention`. The heads of each token lie side by side."""
        return self._library.attend(plan, q, k, v, self._caches[layer], self._config.windows[layer])
