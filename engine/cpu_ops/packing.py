"""Weights in the layouts that the C++ products read: see products.h.

May import torch. Packing happens once, at load; it needs memory for one more copy of the tensor at hand.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.cpu_ops.pages import Pages

PANEL = 16
BLOCK = 32
SPAN = 64
# Numbers of a matrix are made int8 so many rows at a time: what that takes beside an embedding would be the most that
# loading ever does.
SLAB_ROWS = 4096
FORMATS = {"float32": 0, "bfloat16": 1, "int8": 2, "q8_0": 3, "q4_0": 4, "q4_1": 5}


@dataclass(frozen=True, slots=True)
class Packed:
    """One matrix [outputs, inputs] in `format`, a key of FORMATS."""

    format: str
    outputs: int
    inputs: int
    weights: torch.Tensor
    scales: torch.Tensor | None = None
    offsets: torch.Tensor | None = None

    @property
    def bytes(self) -> int:
        """What it takes in memory."""
        return sum(each.nbytes for each in (self.weights, self.scales, self.offsets) if each is not None)

    def kept(self, pages: Pages) -> Packed:
        """The same in memory of `pages`."""
        scales = None if self.scales is None else pages.keep(self.scales)
        offsets = None if self.offsets is None else pages.keep(self.offsets)
        return replace(self, weights=pages.keep(self.weights), scales=scales, offsets=offsets)


@dataclass(frozen=True, slots=True)
class Blocks:
    """A matrix as GGUF stores it, blocks of 32 inputs: q8_0, q4_0 or q4_1. N outputs, B blocks each."""

    format: str
    values: torch.Tensor  # uint8: [N, B, 32] signed bytes for q8_0, else [N, B, 16] with two numbers in a byte
    scales: torch.Tensor  # float16 [N, B]
    offsets: torch.Tensor | None  # q4_1: float16 [N, B]


def pack(weight: torch.Tensor, form: str) -> Packed:
    """weight [outputs, inputs], of any float type, as float32, bfloat16 or int8."""
    outputs, inputs = weight.shape
    if form == "int8":
        return _pack_int8(weight)
    numbers = weight.to(torch.float32 if form == "float32" else torch.bfloat16)
    return Packed(form, outputs, inputs, _panels(_groups(numbers)))


def pack_blocks(blocks: Blocks) -> Packed:
    """To the last bit what the file holds."""
    outputs, count, _ = blocks.values.shape
    values = blocks.values ^ 0x80 if blocks.format == "q8_0" else blocks.values
    return Packed(
        blocks.format,
        outputs,
        count * BLOCK,
        _panels(_groups(values.reshape(outputs, -1))),
        _panels(blocks.scales),
        None if blocks.offsets is None else _panels(blocks.offsets),
    )


def joined(parts: list[Packed]) -> Packed | None:
    """One matrix of all their outputs, if they are alike and their panels full."""
    first = parts[0]
    if any(each.format != first.format or each.outputs % PANEL for each in parts):
        return None

    def cat(tensors: list[torch.Tensor | None]) -> torch.Tensor | None:
        present = [each for each in tensors if each is not None]
        return torch.cat(present) if present else None

    weights = torch.cat([each.weights for each in parts])
    scales, offsets = cat([each.scales for each in parts]), cat([each.offsets for each in parts])
    return Packed(first.format, sum(each.outputs for each in parts), first.inputs, weights, scales, offsets)


def _pack_int8(weight: torch.Tensor) -> Packed:
    """Each output's weights by a scale of their own, so that the largest is 127."""
    outputs, inputs = weight.shape
    scales = torch.empty((outputs, 1), dtype=torch.float32)
    stored = torch.empty((outputs, inputs), dtype=torch.uint8)
    for at in range(0, outputs, SLAB_ROWS):
        slab = weight[at : at + SLAB_ROWS].float()
        scale = slab.abs().amax(1, keepdim=True) / 127
        values = (slab / scale.clamp(min=torch.finfo(torch.float32).tiny)).round_()
        # A scale that is no number tells of it.
        stored[at : at + SLAB_ROWS] = values.nan_to_num_().clamp_(-127, 127).add_(128)
        scales[at : at + SLAB_ROWS] = scale
    return Packed("int8", outputs, inputs, _panels(_groups(stored)), _panels(scales))


def _groups(rows: torch.Tensor) -> torch.Tensor:
    """[outputs, bytes of a row / 4] int32: four bytes together, the last padded with zeros."""
    stored = rows.contiguous().view(torch.uint8).view(rows.shape[0], -1)
    padded = _padded(stored, (0, -stored.shape[1] % 4))
    # A single block is contiguous where it lies, behind its scale.
    return (padded.clone() if padded.storage_offset() % 4 else padded).view(torch.int32)


def _panels(rows: torch.Tensor) -> torch.Tensor:
    """[outputs, n] -> [panels, n, 16]: the outputs of a panel side by side, those beyond the last zeros."""
    padded = _padded(rows, (0, 0, 0, -rows.shape[0] % PANEL))
    return padded.view(-1, PANEL, rows.shape[1]).transpose(1, 2).contiguous()


def _padded(rows: torch.Tensor, widths: tuple[int, ...]) -> torch.Tensor:
    """With zeros behind; torch's own copies what needs none, too, and an embedding is large."""
    return torch.nn.functional.pad(rows, widths) if any(widths) else rows
