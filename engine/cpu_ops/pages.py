"""Memory in huge pages, where the system has them. May import torch.

A token reads all of a model, and in pages of 4 KiB the processor waits for their addresses as well.
"""

from __future__ import annotations

import contextlib
import mmap

import torch

REGION_BYTES = 64 * 1024 * 1024  # what isn't used of one was never touched, and takes no memory
HUGE_BYTES = 2 * 1024 * 1024
ALIGNMENT = 64


class Pages:
    """Hands out memory from regions, which live for as long as anything in them."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of it here."""
        size = tensor.nbytes
        if size > len(self._free):
            self._free = _region(max(REGION_BYTES, size))
        memory = self._free[:size]
        self._free = self._free[-(-size // ALIGNMENT) * ALIGNMENT :]
        return memory.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _region(size: int) -> torch.Tensor:
    """Bytes from the start of a huge page to the end of one."""
    size = -(-size // HUGE_BYTES) * HUGE_BYTES
    mapped = mmap.mmap(-1, size + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # Linux's, if its kernel was built with them
        mapped.madvise(mmap.MADV_HUGEPAGE)
    bytes_ = torch.frombuffer(mapped, dtype=torch.uint8)
    first = -bytes_.data_ptr() % HUGE_BYTES
    return bytes_[first : first + size]
