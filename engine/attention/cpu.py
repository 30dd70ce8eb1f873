"""Attention on the CPU in torch: decode rows in batches, prefill chunks one at a time.

May import numpy and torch. Blocks are gathered with one index_select for each of K and V, straight into the
[kv_head, token, head_dim] order that the products need; grouped-query heads share their keys without a copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from engine.attention import Ints, StepBatch
from engine.models.config import ModelConfig

# Decode rows share one padded batch while the longest has at most this many times the blocks of the shortest, so
# padding at most doubles the work; short contexts are cheap enough to be padded to _GROUP_BLOCKS_MIN anyway.
_GROUP_RATIO = 2
_GROUP_BLOCKS_MIN = 8

# Queries of a prefill chunk that are computed together. Keys after a tile's last query are left out, which saves up to
# half of a causal product; smaller tiles lose more to call overhead than they save.
_TILE_TOKENS = 128


@dataclass(frozen=True, slots=True)
class _Single:
    """One decode row: exactly its own keys, so that nothing has to be masked."""

    row: int
    gather: torch.Tensor  # [kv_heads * blocks] rows of the cache seen as [blocks * kv_heads, block_size * head_dim]
    first: int  # of the gathered tokens that count
    end: int


@dataclass(frozen=True, slots=True)
class _Group:
    """Decode rows padded to one number of blocks."""

    rows: torch.Tensor  # [R]
    gather: torch.Tensor  # [R * kv_heads * blocks]
    hidden: torch.Tensor  # [R, 1, 1, tokens] bool: gathered tokens that don't count
    stale: torch.Tensor  # places never written in the rows' last blocks, counted over [R * kv_heads * tokens]


@dataclass(frozen=True, slots=True)
class _Tile:
    """Some queries of a prefill chunk and the gathered keys that they may see."""

    queries: slice
    keys: slice
    mask: torch.Tensor  # [queries, keys]: 0 or -inf


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One prefill chunk."""

    rows: slice
    gather: torch.Tensor  # [kv_heads * blocks]
    tiles: list[_Tile]


_Part = _Single | _Group | _Chunk


@dataclass(frozen=True, slots=True)
class CPUPlan:
    """A step, worked out once for all its layers."""

    stores: torch.Tensor  # [T * kv_heads] rows of the cache seen as [blocks * kv_heads * block_size, head_dim]
    parts: dict[int, list[_Part]]  # by the layer's window


class CPUAttention:
    """See `Attention`."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self._windows = config.windows
        self._kv_heads = config.kv_heads
        self._shared = config.heads // config.kv_heads  # query heads for each key-value head
        self._head_dim = config.head_dim
        self._scale = config.head_dim**-0.5
        self.cache_dtype = dtype
        self.caches: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._blocks = 0
        self._block_size = 0

    def allocate(self, blocks: int, block_size: int) -> None:
        """See `Attention`. One more block, of zeros, stands in wherever a padded block table has none."""
        self.caches = []
        self._blocks, self._block_size = blocks, block_size
        shape = (blocks + 1, self._kv_heads, block_size, self._head_dim)
        for _ in self._windows:
            k, v = torch.empty(shape, dtype=self.cache_dtype), torch.empty(shape, dtype=self.cache_dtype)
            k[blocks] = 0
            v[blocks] = 0
            self.caches.append((k, v))

    def plan(self, batch: StepBatch) -> CPUPlan:
        """See `Attention`."""
        block, place = np.divmod(batch.slots, self._block_size)
        heads = np.arange(self._kv_heads)
        stores = (block[:, None] * self._kv_heads + heads) * self._block_size + place[:, None]
        parts = {window: self._parts(batch, window) for window in set(self._windows)}
        return CPUPlan(torch.from_numpy(stores.ravel()), parts)

    def attend(self, plan: CPUPlan, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See `Attention`."""
        dim = self._head_dim
        for cache, new in zip(self.caches[layer], (k, v), strict=True):
            cache.view(-1, dim).index_copy_(0, plan.stores, new.reshape(-1, dim))
        mixed = torch.empty(q.shape, dtype=q.dtype)
        for part in plan.parts[self._windows[layer]]:
            keys, values = (
                cache.view(-1, self._block_size * dim).index_select(0, part.gather) for cache in self.caches[layer]
            )
            if isinstance(part, _Chunk):
                self._attend_chunk(part, q, keys, values, mixed)
            elif isinstance(part, _Single):
                self._attend_single(part, q, keys, values, mixed)
            else:
                self._attend_group(part, q, keys, values, mixed)
        return mixed.view(len(q), -1)

    def _attend_single(
        self, part: _Single, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor
    ) -> None:
        shape = (1, self._kv_heads, -1, self._head_dim)
        k, v = (each.view(shape)[:, :, part.first : part.end] for each in (keys, values))
        mixed = functional.scaled_dot_product_attention(q[part.row].reshape(shape), k, v, scale=self._scale)
        out[part.row] = mixed.view(-1, self._head_dim)

    def _attend_group(
        self, part: _Group, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor
    ) -> None:
        # A weight of zero doesn't silence a NaN value, so stale values are zeroed; stale keys are masked afterwards.
        values.view(-1, self._head_dim).index_fill_(0, part.stale, 0)
        rows = len(part.rows)
        shape = (rows * self._kv_heads, -1, self._head_dim)
        scaled = (q.index_select(0, part.rows) * self._scale).view(shape)
        scores = torch.bmm(scaled, keys.view(shape).transpose(1, 2))
        scores.view(rows, self._kv_heads, self._shared, -1).masked_fill_(part.hidden, -torch.inf)
        mixed = torch.bmm(scores.softmax(-1), values.view(shape))
        out.index_copy_(0, part.rows, mixed.view(rows, -1, self._head_dim))

    def _attend_chunk(
        self, part: _Chunk, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor
    ) -> None:
        # Key-value heads take the batch dimension and the query heads that share one take the head dimension, so that
        # keys are shared by a stride of 0.
        shape = (self._kv_heads, 1, -1, self._head_dim)
        k, v = (each.view(shape).expand(-1, self._shared, -1, -1) for each in (keys, values))
        heads = (-1, self._kv_heads, self._shared, self._head_dim)
        queries, target = q[part.rows].view(heads), out[part.rows].view(heads)
        for tile in part.tiles:
            mixed = functional.scaled_dot_product_attention(
                queries[tile.queries].permute(1, 2, 0, 3),
                k[:, :, tile.keys],
                v[:, :, tile.keys],
                attn_mask=tile.mask,
                scale=self._scale,
            )
            target[tile.queries] = mixed.permute(2, 0, 1, 3)

    def _parts(self, batch: StepBatch, window: int) -> list[_Part]:
        counts = np.diff(batch.rows)
        parts: list[_Part] = [self._chunk(batch, int(s), window) for s in np.flatnonzero(counts > 1)]
        parts += [self._decodes(batch, slices, window) for slices in self._grouped(batch, counts, window)]
        return parts

    def _grouped(self, batch: StepBatch, counts: Ints, window: int) -> list[Ints]:
        """The slices of one token, in groups of similar numbers of blocks."""
        slices = np.flatnonzero(counts == 1)
        contexts = batch.contexts[slices]
        blocks = -(-(np.minimum(contexts, window) if window else contexts) // self._block_size)
        order = np.argsort(blocks, kind="stable")
        groups: list[Ints] = []
        first = 0
        for at in range(1, len(order) + 1):
            most = max(_GROUP_BLOCKS_MIN, _GROUP_RATIO * blocks[order[first]]) if first < len(order) else 0
            if at == len(order) or blocks[order[at]] > most:
                groups.append(slices[order[first:at]])
                first = at
        return groups if len(slices) else []

    def _decodes(self, batch: StepBatch, slices: Ints, window: int) -> _Single | _Group:
        size, contexts = self._block_size, batch.contexts[slices]
        firsts = np.maximum(contexts - window, 0) if window else np.zeros_like(contexts)
        skipped = firsts // size  # whole blocks before the window
        blocks = int((-(-contexts // size) - skipped).max())
        columns = skipped[:, None] + np.arange(blocks)
        inside = columns < -(-contexts[:, None] // size)
        tables = batch.tables[slices[:, None], np.where(inside, columns, 0)]
        gather = self._gather(np.where(inside, tables, self._blocks))
        if len(slices) == 1:
            offset = int(skipped[0]) * size
            return _Single(int(batch.rows[slices[0]]), gather, int(firsts[0]) - offset, int(contexts[0]) - offset)
        positions = skipped[:, None] * size + np.arange(blocks * size)
        hidden = (positions >= contexts[:, None]) | (positions < firsts[:, None])
        unwritten = (positions >= contexts[:, None]) & np.repeat(inside, size, axis=1)
        stale = np.broadcast_to(unwritten[:, None], (len(slices), self._kv_heads, blocks * size))
        return _Group(
            rows=torch.from_numpy(batch.rows[slices]),
            gather=gather,
            hidden=torch.from_numpy(hidden[:, None, None]),
            stale=torch.from_numpy(np.flatnonzero(stale)),
        )

    def _chunk(self, batch: StepBatch, at: int, window: int) -> _Chunk:
        size, end = self._block_size, int(batch.contexts[at])
        first_row, end_row = int(batch.rows[at]), int(batch.rows[at + 1])
        count = end_row - first_row
        start = end - count
        skipped = max(start + 1 - window, 0) // size if window else 0
        offset = skipped * size
        tiles = []
        for query in range(0, count, _TILE_TOKENS):
            query_end = min(query + _TILE_TOKENS, count)
            key = max(start + query + 1 - window, 0) if window else 0
            positions = torch.arange(start + query, start + query_end)[:, None]
            keys = torch.arange(key, start + query_end)
            seen = keys <= positions
            if window:
                seen &= keys > positions - window
            mask = torch.zeros(seen.shape, dtype=self.cache_dtype).masked_fill_(~seen, -torch.inf)
            tiles.append(_Tile(slice(query, query_end), slice(key - offset, start + query_end - offset), mask))
        table = batch.tables[at : at + 1, skipped : -(-end // size)]
        return _Chunk(slice(first_row, end_row), self._gather(table), tiles)

    def _gather(self, tables: Ints) -> torch.Tensor:
        """[R, blocks] -> the cache rows of [R, kv_heads, blocks], flat."""
        rows = tables[:, None, :] * self._kv_heads + np.arange(self._kv_heads)[:, None]
        return torch.from_numpy(rows.ravel())
