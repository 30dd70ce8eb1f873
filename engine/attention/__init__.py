"""Attention over the paged KV cache: the step that a backend gets, and the one interface that all backends have.

May import numpy and torch. A backend owns the cache: for each layer K and V apart, as
[block, kv_head, token in the block, head_dim]. Position p of a sequence lies in its block p // block_size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step's tokens, slice after slice in one row of T tokens; S slices.

    Slice s is rows `rows[s]` … `rows[s + 1] - 1`, the positions `contexts[s] - count` … `contexts[s] - 1` of its
    sequence. Columns of `tables` from the slice's last block on hold -1.
    """

    positions: Ints  # [T]
    slots: Ints  # [T]: block * block_size + place in the block, where the token's keys and values go
    rows: Ints  # [S + 1]
    contexts: Ints  # [S]: positions of the sequence that are computed when the step is over
    tables: Ints  # [S, most blocks]


def sent(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The host's numbers on the device, without waiting for what it does: by way of pinned memory, since a copy from
    any other may wait for the stream's work. Torch uses that memory again only when it has been read."""
    if device.type == "cuda":
        numbers = numbers.pin_memory()
    return numbers.to(device, non_blocking=True)


class Attention(Protocol):
    """What a model runner asks of a backend."""

    @property
    def cache_dtype(self) -> torch.dtype:
        """What keys and values are stored as."""

    def allocate(self, blocks: int, block_size: int) -> None:
        """Makes the cache, all layers. Its memory is touched only as slots are written."""

    def plan(self, batch: StepBatch) -> Any:
        """Whatever the backend can work out once for all layers of a step."""

    def attend(self, plan: Any, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Stores k and v [T, kv_heads, head_dim] in their slots, then attends: each token to the positions of its
        sequence up to its own, within the layer's window. q [T, heads, head_dim] -> [T, heads * head_dim]. Slots that
        were not written may hold anything, NaN too, without effect."""
