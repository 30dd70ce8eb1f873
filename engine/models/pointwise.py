"""What a decoder layer does between its products: norms, rotation, gating; what a device does its own way.

May import torch and the modules beside it.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional

from engine.models.config import ModelConfig
from engine.models.rotary import Rotary

Angles = tuple[torch.Tensor, torch.Tensor]


class Pointwise(Protocol):
    """The steps of one model, in its type; tensors are contiguous but for the heads of `rotated`."""

    def normed(self, x: torch.Tensor, more: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
        """Adds `more` to x [tokens, hidden] in place if there is any. Returns x / rms(x) * weight."""

    def angles(self, positions: torch.Tensor) -> Angles:
        """What `rotated` needs of positions [tokens], for all layers."""

    def rotated(self, heads: torch.Tensor, norm: torch.Tensor | None, angles: Angles) -> torch.Tensor:
        """heads [tokens, heads, head_dim], which may be overwritten: each normed and multiplied by its row of `norm`
        [heads, head_dim] if there is one, then rotated."""

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, 2 * inner] -> silu of the first half times the second half."""


class TorchPointwise:
    """See `Pointwise`; for every device and type."""

    def __init__(self, config: ModelConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        self._eps = config.rms_norm_eps
        self._rotary = Rotary(config.rope, config.rotary_dim, device=device, dtype=dtype)

    def normed(self, x: torch.Tensor, more: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
        """See `Pointwise`."""
        if more is not None:
            x.add_(more)
        return functional.rms_norm(x, weight.shape, weight, self._eps)

    def angles(self, positions: torch.Tensor) -> Angles:
        """See `Pointwise`."""
        return self._rotary.angles(positions)

    def rotated(self, heads: torch.Tensor, norm: torch.Tensor | None, angles: Angles) -> torch.Tensor:
        """See `Pointwise`."""
        if norm is not None:
            heads = functional.rms_norm(heads, heads.shape[-1:], None, self._eps) * norm
        return self._rotary.rotate(heads, angles)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """See `Pointwise`."""
        gate, up = x.chunk(2, -1)
        return functional.silu(gate).mul_(up)
