"""Attention by the CUDA kernels, on torch's memory: sequences of one token by the decode kernel, chunks by prefill.

May import numpy, torch and the engine's model side. Queries and keys come unrotated and are rotated as they are
written, so the decoder's `Pointwise` must be `CUDAPointwise`. What launches the kernels is passed in: on a GPU
engine.cuda_device, in tests the CPU emulation, where all tensors are the CPU's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from engine.attention import Ints, StepBatch, sent
from engine.cuda_kernels import E4M3_MAX, SPLIT_TOKENS, Cache, Kernels, Load, RowKernels, Shape, Tables
from engine.models.config import ModelConfig, ModelError
from engine.models.pointwise import Angles, TorchPointwise
from engine.models.rotary import Rotary

# How far above the largest number that was measured a cache of bytes reaches. Rotation alone makes 1.4 times as much of
# a key's number, and of SmolLM2's heads some were 2.3 times as large in text; below, e4m3 is as exact down to a 7,000th
# of it.
SCALE_MARGIN = 4.0


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Sequences of one token. `splits` by the layer's window."""

    rows: torch.Tensor
    tables: Tables
    count: int
    splits: dict[int, int]
    partials: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Chunks:
    """Slices of more than one token: all of the step's, of which the tiles name some."""

    rows: torch.Tensor
    tables: Tables
    tiles: torch.Tensor
    count: int  # of tiles


@dataclass(frozen=True, slots=True)
class CUDAPlan:
    """A step, worked out once for all its layers; tensors on the device."""

    slots: torch.Tensor
    cos: torch.Tensor  # [tokens, rotary_dim / 2], as sin
    sin: torch.Tensor
    decodes: _Decodes | None
    chunks: _Chunks | None


class CUDAPointwise(TorchPointwise):
    """See `Pointwise`. It leaves the rotation to `CUDAAttention`; rows that the kernels can't read go through torch."""

    def __init__(self, config: ModelConfig, *, device: torch.device, dtype: torch.dtype, load: Load) -> None:
        super().__init__(config, device=device, dtype=dtype)
        self._kernels = RowKernels(_kind(dtype), load)

    def normed(self, x: torch.Tensor, more: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
        """See `Pointwise`."""
        rows, size = x.shape
        if not self._kernels.serves(size):
            return super().normed(x, more, weight)
        out = torch.empty_like(x)
        if weight.data_ptr() % 16:  # never on a GPU; on the CPU it may be a view of a mapped file
            weight = weight.clone()
        self._kernels.add_rms_norm(out, x, more, weight, rows, size, self._eps)
        return out

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """See `Pointwise`."""
        rows, size = len(x), x.shape[1] // 2
        if not self._kernels.serves(size):
            return super().gated(x)
        out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
        self._kernels.silu_mul(out, x, rows, size)
        return out

    def angles(self, positions: torch.Tensor) -> Angles:
        """See `Pointwise`. Nothing is needed."""
        return positions, positions

    def rotated(self, heads: torch.Tensor, norm: torch.Tensor | None, angles: Angles) -> torch.Tensor:
        """See `Pointwise`. Normed only."""
        return heads if norm is None else functional.rms_norm(heads, heads.shape[-1:], None, self._eps) * norm


class CUDAAttention:
    """See `Attention`."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, load: Load, *, cache: str = ""
    ) -> None:
        """`cache`: E4M3 for keys and values in bytes, else they are of `dtype`."""
        self._config = config
        self._dtype = dtype
        self._cache = cache
        self._device = device
        self._load = load
        self._rotary = Rotary(config.rope, config.rotary_dim, device=device, dtype=torch.float32)
        self._caches: list[Cache] = []
        self._kernels: Kernels | None = None
        self._measures = False

    def allocate(self, blocks: int, block_size: int) -> None:
        """See `Attention`. Raises ModelError where there are no kernels for the model's shape."""
        config = self._config
        sizes = config.heads, config.kv_heads, config.head_dim, config.rotary_dim, block_size
        shape = Shape(_kind(self._dtype), *sizes, self._cache)
        if problem := shape.problem():
            raise ModelError(f"the CUDA kernels don't serve {problem}; use --device cpu")
        self._caches = []
        self._kernels = Kernels(shape, self._load)
        size = (blocks, config.kv_heads, block_size, config.head_dim)
        for _ in config.windows:
            k, v = (torch.empty(size, dtype=self.cache_dtype, device=self._device) for _ in range(2))
            self._caches.append(Cache(k, v, self._scales()))

    @property
    def cache_dtype(self) -> torch.dtype:
        """What keys and values are stored as."""
        return torch.uint8 if self._cache else self._dtype

    @property
    def scaled(self) -> bool:
        """Whether keys and values are stored as bytes, and so want `measure`."""
        return bool(self._cache)

    def _scales(self) -> torch.Tensor | None:
        """What a stored 1 is worth, of each head's keys and values."""
        return torch.ones((2, self._config.kv_heads), device=self._device) if self._cache else None

    @contextmanager
    def measure(self) -> Iterator[None]:
        """What is attended to meanwhile sets the scales, those of a layer before it writes: so nothing may be in the
        cache yet. e4m3 is exact to a 16th from 2^-6 to 448; a head whose numbers lie elsewhere would lose them."""
        self._measures = True
        try:
            yield
        finally:
            self._measures = False

    def _set_scales(self, scales: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        peaks = torch.stack([each.abs().amax((0, 2)) for each in (k, v)]).float()
        scales.copy_(torch.where(peaks.isfinite() & (peaks > 0), peaks * (SCALE_MARGIN / E4M3_MAX), 1.0))

    def plan(self, batch: StepBatch) -> CUDAPlan:
        """See `Attention`."""
        positions, slots = self._upload([batch.positions, batch.slots], np.int64)
        counts = np.diff(batch.rows)
        decodes = self._decodes(batch, np.flatnonzero(counts == 1))
        return CUDAPlan(slots, *self._angles(positions), decodes, self._chunks(batch, counts))

    def decode_plan(
        self, positions: torch.Tensor, slots: torch.Tensor, contexts: torch.Tensor, tables: torch.Tensor, splits: int
    ) -> CUDAPlan:
        """Of a step in which each sequence computes one token, and none sees more than `splits` times SPLIT_TOKENS
        positions. All is on the device, and is read only there: positions and slots [rows] int64, contexts [rows] and
        tables [rows, width] int32."""
        count, width = tables.shape
        rows = torch.arange(count, dtype=torch.int32, device=self._device)
        by_window = {each: min(splits, _splits_of(each)) if each else splits for each in set(self._config.windows)}
        decodes = _Decodes(
            rows, Tables(tables, width, contexts), count, by_window, self._partials(count, max(by_window.values()))
        )
        return CUDAPlan(slots, *self._angles(positions), decodes, None)

    def _angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self._rotary.angles(positions)  # the second half of the sines has the sign that the kernel's have
        half = self._config.rotary_dim // 2
        return cos[:, 0, :half].contiguous(), sin[:, 0, half:].contiguous()

    def _partials(self, count: int, splits: int) -> torch.Tensor:
        return torch.empty(self._ready.partials_floats(count, splits), dtype=torch.float32, device=self._device)

    def attend(self, plan: CUDAPlan, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See `Attention`. The heads of each token lie side by side; q is rotated in place."""
        kernels, cache, window = self._ready, self._caches[layer], self._config.windows[layer]
        if self._measures:
            self._set_scales(cache.scales, k, v)
        queries, keys, values = ((each, each.stride(0)) for each in (q, k, v))
        kernels.kv_write(cache, plan.slots, len(q), q=queries, k=keys, v=values, cos=plan.cos, sin=plan.sin)
        out = torch.empty((len(q), q.shape[1] * q.shape[2]), dtype=q.dtype, device=q.device)
        if (part := plan.decodes) is not None:
            kernels.decode(
                *(out, part.partials, queries, cache, part.tables, part.rows, part.count),
                splits=part.splits[window],
                window=window,
            )
        if (chunks := plan.chunks) is not None:
            arguments = (out, queries, cache, chunks.tables, chunks.rows, chunks.tiles, chunks.count)
            kernels.prefill(*arguments, window=window)
        return out

    @property
    def _ready(self) -> Kernels:
        assert self._kernels is not None, "allocate comes first"
        return self._kernels

    def _decodes(self, batch: StepBatch, slices: Ints) -> _Decodes | None:
        if not len(slices):
            return None
        contexts = batch.contexts[slices]
        splits = {window: _splits(contexts, window) for window in set(self._config.windows)}
        rows, tables = self._tables(batch.rows[slices], batch.tables[slices], contexts)
        return _Decodes(rows, tables, len(slices), splits, self._partials(len(slices), max(splits.values())))

    def _chunks(self, batch: StepBatch, counts: Ints) -> _Chunks | None:
        tiles = self._ready.prefill_tiles(np.where(counts > 1, counts, 0).tolist())
        if not len(tiles):
            return None
        rows, tables = self._tables(batch.rows, batch.tables, batch.contexts)
        (uploaded,) = self._upload([tiles], np.int32)
        return _Chunks(rows, tables, uploaded, len(tiles))

    def _tables(self, rows: Ints, blocks: Ints, contexts: Ints) -> tuple[torch.Tensor, Tables]:
        on_device = self._upload([rows, blocks, contexts], np.int32)
        return on_device[0], Tables(on_device[1], blocks.shape[1], on_device[2])

    def _upload(self, arrays: Sequence[np.ndarray[Any, Any]], dtype: type) -> list[torch.Tensor]:
        """The arrays, flat, by one copy: each copy costs a GPU more time than the bytes do."""
        joined = torch.from_numpy(np.concatenate([each.ravel() for each in arrays]).astype(dtype, copy=False))
        sizes = [each.size for each in arrays]
        return list(torch.split(sent(joined, self._device), sizes))


def _kind(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _splits_of(window: int) -> int:
    """How many splits cover a window wherever it lies; see `Kernels.decode`."""
    return -(-(window + 31) // SPLIT_TOKENS)


def _splits(contexts: Ints, window: int) -> int:
    """How many splits cover what the longest of these sequences sees; see `Kernels.decode`."""
    firsts = np.maximum(contexts - window, 0) // 32 * 32 if window else np.zeros_like(contexts)
    return -(-int((contexts - firsts).max()) // SPLIT_TOKENS)
