"""Rotary position embedding: the frequencies of each scaling variant, and the rotation itself.

May import torch. The angles of a token depend on its own position alone, so what a sequence computes is the same
however it is cut into chunks.
"""

from __future__ import annotations

import math

import torch

from engine.models.config import Rope


def inverse_frequencies(rope: Rope, dim: int) -> torch.Tensor:
    """Radians for each position, [dim / 2] float32. For `dynamic` they hold up to its original context."""
    frequencies = 1.0 / rope.theta ** _exponents(dim)
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        frequencies = _llama3(frequencies, rope)
    elif rope.kind == "yarn":
        frequencies = _yarn(frequencies, rope, dim)
    if rope.divisors:
        frequencies = frequencies / torch.tensor(rope.divisors, dtype=torch.float32)
    return frequencies


def attention_factor(rope: Rope) -> float:
    """What the cosines and sines are multiplied by: yarn's attention temperature (arXiv 2309.00071, section 3.4)."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind != "yarn" or rope.factor <= 1:
        return 1.0
    if rope.mscale and rope.mscale_all_dim:
        return (0.1 * rope.mscale * math.log(rope.factor) + 1) / (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1)
    return 0.1 * math.log(rope.factor) + 1.0


class Rotary:
    """Rotates the first `dim` numbers of each head by position, in the half-split layout of Hugging Face checkpoints:
    number i is paired with number i + dim / 2."""

    def __init__(self, rope: Rope, dim: int, *, device: torch.device, dtype: torch.dtype) -> None:
        self._rope = rope
        self._dim = dim
        self._dtype = dtype
        self._frequencies = inverse_frequencies(rope, dim).to(device)
        self._factor = attention_factor(rope)

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin for `rotate`, [tokens, 1, dim] each, from positions [tokens]."""
        radians = positions.to(torch.float32)[:, None] * self._at(positions)
        cos, sin = radians.cos() * self._factor, radians.sin() * self._factor
        # The sign of the rotation sits in the sine, so that rotating is one multiplication and one addition.
        both = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return both[0].to(self._dtype)[:, None], both[1].to(self._dtype)[:, None]

    def rotate(self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """[tokens, heads, head_dim], rotated."""
        cos, sin = angles
        if self._dim == x.shape[-1]:
            return torch.addcmul(x * cos, x.roll(self._dim // 2, -1), sin)
        turned, kept = x[..., : self._dim], x[..., self._dim :]
        return torch.cat((torch.addcmul(turned * cos, turned.roll(self._dim // 2, -1), sin), kept), -1)

    def _at(self, positions: torch.Tensor) -> torch.Tensor:
        """Frequencies, [dim / 2] or, for `dynamic`, [tokens, dim / 2]: beyond the original context the base grows with
        the length that a token ends, which is what step-by-step decoding with a cache computes."""
        rope = self._rope
        if rope.kind != "dynamic":
            return self._frequencies
        length = (positions + 1).clamp(min=rope.original_context).to(torch.float32)
        growth = rope.factor * length / rope.original_context - (rope.factor - 1)
        base = rope.theta * growth ** (self._dim / (self._dim - 2))
        return 1.0 / base[:, None] ** _exponents(self._dim, base.device)


def _exponents(dim: int, device: torch.device | None = None) -> torch.Tensor:
    return torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim


def _llama3(frequencies: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Llama 3.1: wavelengths longer than the original context / low_freq_factor are stretched by `factor`, those
    shorter than the original context / high_freq_factor are left, and between them the two are mixed."""
    turns = rope.original_context * frequencies / (2 * math.pi)  # in the original context
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = smooth.clamp(0, 1)
    return (1 - smooth) * frequencies / rope.factor + smooth * frequencies


def _yarn(frequencies: torch.Tensor, rope: Rope, dim: int) -> torch.Tensor:
    """arXiv 2309.00071, section 3.2: a ramp over the dimensions from kept to interpolated frequencies."""

    def dimension_of(turns: float) -> float:
        return dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = high - low if high != low else 0.001  # a ramp of no width would divide by zero
    interpolated = ((torch.arange(dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return frequencies / rope.factor * interpolated + frequencies * (1 - interpolated)
