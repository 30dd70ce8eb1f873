"""What the model runner asks of a model with its KV cache, and the model that torch computes.

May import torch and the engine's model side.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from engine.attention import Attention, StepBatch, sent
from engine.models.llama import LlamaDecoder


class Decoder(Protocol):
    """Computes steps over a paged cache that it owns."""

    cache_dtype: torch.dtype

    def allocate(self, blocks: int, block_size: int) -> None:
        """Makes the cache, all layers. RuntimeError when the memory can't be had."""

    def forward(self, ids: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """ids [tokens] int64, on the CPU or the device -> the last layer's output [tokens, hidden], before the last
        norm."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows of `forward`'s output -> [rows, vocab_size], float32."""


class TorchDecoder:
    """See `Decoder`: the layers one by one, attention by a backend."""

    def __init__(self, model: LlamaDecoder, attention: Attention, device: torch.device) -> None:
        self.cache_dtype = attention.cache_dtype
        self.attention = attention
        self.logits = model.logits
        self._model = model
        self._device = device

    def allocate(self, blocks: int, block_size: int) -> None:
        """See `Decoder`."""
        self.attention.allocate(blocks, block_size)

    def forward(self, ids: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """See `Decoder`."""
        positions = sent(torch.from_numpy(batch.positions), self._device)
        ids = ids if ids.device.type == self._device.type else sent(ids, self._device)
        return self.run(ids, positions, self.attention.plan(batch))

    def run(self, ids: torch.Tensor, positions: torch.Tensor, plan: Any) -> torch.Tensor:
        """As `forward`, with ids and positions on the device and a plan of the attention's."""
        return self._model.forward(ids, positions, lambda layer, *qkv: self.attention.attend(plan, layer, *qkv))
