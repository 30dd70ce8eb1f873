"""What the model runner asks of a model with its KV cache, and the model that torch computes.

May import torch and the engine's model side.
"""

from __future__ import annotations

from typing import Protocol

import torch

from engine.attention import Attention, StepBatch
from engine.models.llama import LlamaDecoder


class Decoder(Protocol):
    """Computes steps over a paged cache that it owns."""

    cache_dtype: torch.dtype

    def allocate(self, blocks: int, block_size: int) -> None:
        """Makes the cache, all layers. RuntimeError when the memory can't be had."""

    def forward(self, ids: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """ids [tokens] int64, on the CPU -> the last layer's output [tokens, hidden], before the final norm."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows of `forward`'s output -> [rows, vocab_size], float32."""


class TorchDecoder:
    """See `Decoder`: the layers one by one, attention by a backend."""

    def __init__(self, model: LlamaDecoder, attention: Attention, dtype: torch.dtype, device: torch.device) -> None:
        self.cache_dtype = dtype
        self.attention = attention
        self.logits = model.logits
        self._model = model
        self._device = device

    def allocate(self, blocks: int, block_size: int) -> None:
        """See `Decoder`."""
        self.attention.allocate(blocks, block_size)

    def forward(self, ids: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """See `Decoder`."""
        plan = self.attention.plan(batch)
        return self._model.forward(
            ids.to(self._device),
            torch.from_numpy(batch.positions).to(self._device),
            lambda layer, q, k, v: self.attention.attend(plan, layer, q, k, v),
        )
