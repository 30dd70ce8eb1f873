"""Memory for weights: what is put there is what it was, and the system is asked for huge pages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.cpu_ops.packing import pack
from engine.cpu_ops.pages import ALIGNMENT, HUGE_BYTES, REGION_BYTES, Pages


def test_tensors_are_kept_as_they_were_side_by_side() -> None:
    """Of every kind, also more than one region holds."""
    pages = Pages()
    tensors = [
        torch.arange(17, dtype=torch.int8),
        torch.randn(3, 5),
        torch.randn(4, 2, 16).to(torch.bfloat16),
        torch.zeros(REGION_BYTES // 2, dtype=torch.uint8),
        torch.ones(REGION_BYTES // 2, dtype=torch.uint8),
        torch.full((REGION_BYTES + 1,), 2, dtype=torch.uint8),
        torch.arange(9, dtype=torch.float16),
    ]
    kept = [pages.keep(tensor) for tensor in tensors]
    for tensor, copy in zip(tensors, kept, strict=True):
        assert torch.equal(tensor, copy)
        assert copy.dtype == tensor.dtype
        assert copy.data_ptr() != tensor.data_ptr()
        assert copy.data_ptr() % ALIGNMENT == 0
    assert kept[0].data_ptr() % HUGE_BYTES == 0
    assert kept[1].data_ptr() - kept[0].data_ptr() == ALIGNMENT


def test_a_packed_matrix_moves_whole() -> None:
    packed = pack(torch.randn(40, 64), "int8")
    moved = packed.kept(Pages())
    assert moved.bytes == packed.bytes
    assert moved.scales is not None and packed.scales is not None
    assert torch.equal(moved.weights, packed.weights)
    assert torch.equal(moved.scales, packed.scales)
    assert moved.offsets is None


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this system's kernel has no huge pages to ask for"
)
def test_huge_pages_are_asked_for() -> None:
    kept = Pages().keep(torch.ones(10))
    place, inside, asked = kept.data_ptr(), False, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            start, _, end = name.partition("-")
            inside = int(start, 16) <= place < int(end, 16)
        elif name == "VmFlags:" and inside:
            asked = "hg" in rest.split()
    assert asked
