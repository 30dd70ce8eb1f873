"""Checkpoints on disk: which format a path holds, and one interface over all of them.

May import torch, numpy, safetensors and gguf. Weights are read one tensor at a time from a mapped file, so that
loading needs little more memory than the model itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from engine.cpu_ops.packing import Blocks
from engine.models.config import ModelConfig, ModelError
from engine.wire import TokenizerSpec


class Checkpoint(Protocol):
    """A readable checkpoint. Tensors go by their Hugging Face names, whatever the file calls them."""

    config: ModelConfig
    eos_ids: list[int]  # every id that ends a turn or a text
    auto_dtype: str  # what the C++ operators compute with if nobody says

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A float tensor on the CPU. Raises ModelError when it is missing, has another shape or can't be read."""

    def blocks(self, name: str, shape: tuple[int, ...]) -> Blocks | None:
        """A matrix as the file holds it, where that is in blocks that the CPU's products take."""

    def tokenizer(self) -> TokenizerSpec:
        """The checkpoint's tokenizer."""


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a directory with config.json and safetensors files, or a .gguf file."""
    from engine.loaders.gguf import GGUFCheckpoint
    from engine.loaders.safetensors import SafetensorsCheckpoint

    if path.is_dir():
        return SafetensorsCheckpoint(path)
    if path.is_file():
        return GGUFCheckpoint(path)
    raise ModelError(f"{path}: there is no such file or directory")
