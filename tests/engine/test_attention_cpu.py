"""Paged attention equals a plain causal product over each sequence, whatever its slots held before."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention import StepBatch
from engine.attention.cpu import _TILE_TOKENS, CPUAttention, _Group, _Single
from tests.engine.conftest import ATTENTION

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = ATTENTION
STATM = Path("/proc/self/statm")
HEADS, KV_HEADS, DIM = CONFIG.heads, CONFIG.kv_heads, CONFIG.head_dim


class Cache:
    """Sequences with all their queries, keys and values known, computed slice by slice through the backend."""

    def __init__(self, lengths: list[int], *, block_size: int, window: int = 0, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.qkv = [torch.randn(length, HEADS + 2 * KV_HEADS, DIM, generator=self.generator) for length in lengths]
        self.window = window
        self.block_size = block_size
        needed = [-(-length // block_size) for length in lengths]
        blocks = torch.randperm(sum(needed) + 3, generator=self.generator).tolist()
        self.tables = [[blocks.pop() for _ in range(count)] for count in needed]
        self.backend = CPUAttention(replace(CONFIG, windows=(window, 0)), torch.float32)
        self.backend.allocate(sum(needed) + 3, block_size)
        for caches in self.backend.caches:
            for cache in caches:
                cache[:-1].fill_(torch.nan)

    def batch(self, slices: list[tuple[int, int, int]]) -> StepBatch:
        """(sequence, start, count) -> a step."""
        counts = [count for _, _, count in slices]
        positions = np.concatenate([np.arange(start, start + count) for _, start, count in slices])
        owners = np.repeat([sequence for sequence, _, _ in slices], counts)
        blocks = [
            self.tables[owner][position // self.block_size] for owner, position in zip(owners, positions, strict=True)
        ]
        used = [-(-(start + count) // self.block_size) for _, start, count in slices]
        tables = np.full((len(slices), max(used)), -1)
        for row, (sequence, _, _), count in zip(tables, slices, used, strict=True):
            row[:count] = self.tables[sequence][:count]
        return StepBatch(
            positions=positions,
            slots=np.array(blocks) * self.block_size + positions % self.block_size,
            rows=np.concatenate(([0], np.cumsum(counts))),
            contexts=np.array([start + count for _, start, count in slices]),
            tables=tables,
        )

    def attend(self, slices: list[tuple[int, int, int]], layer: int = 0) -> torch.Tensor:
        batch = self.batch(slices)
        rows = torch.cat([self.qkv[sequence][start : start + count] for sequence, start, count in slices])
        q, k, v = rows.split((HEADS, KV_HEADS, KV_HEADS), 1)
        return self.backend.attend(self.backend.plan(batch), layer, q, k, v)

    def expected(self, slices: list[tuple[int, int, int]], layer: int = 0) -> torch.Tensor:
        """The textbook: softmax(q kᵀ / √d) v over the positions that each query sees."""
        rows = []
        for sequence, start, count in slices:
            for position in range(start, start + count):
                first = max(position + 1 - self.window, 0) if self.window and layer == 0 else 0
                q = self.qkv[sequence][position, :HEADS].double()
                seen = self.qkv[sequence][first : position + 1].double()
                k, v = (
                    part.repeat_interleave(HEADS // KV_HEADS, 1)
                    for part in (seen[:, HEADS : HEADS + KV_HEADS], seen[:, HEADS + KV_HEADS :])
                )
                weights = (torch.einsum("hd,phd->hp", q, k) / DIM**0.5).softmax(-1)
                rows.append(torch.einsum("hp,phd->hd", weights, v).flatten())
        return torch.stack(rows).float()

    def check(self, slices: list[tuple[int, int, int]], layer: int = 0) -> None:
        torch.testing.assert_close(self.attend(slices, layer), self.expected(slices, layer), atol=1e-5, rtol=1e-5)


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    block_size=st.sampled_from([1, 3, 4, 16]),
    window=st.sampled_from([0, 1, 5, 16, 100]),
    chunk=st.sampled_from([1, 2, 7, 64]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_any_cut_of_any_sequences(lengths: list[int], block_size: int, window: int, chunk: int, seed: int) -> None:
    """Each step gives every unfinished sequence a chunk; decode rows and prefill chunks of both layers share steps."""
    cache = Cache(lengths, block_size=block_size, window=window, seed=seed)
    done = [0] * len(lengths)
    while any(at < length for at, length in zip(done, lengths, strict=True)):
        slices = []
        for sequence, length in enumerate(lengths):
            count = min(chunk + sequence, length - done[sequence])
            if count:
                slices.append((sequence, done[sequence], count))
                done[sequence] += count
        for layer in range(2):
            cache.check(slices, layer)


def test_a_chunk_of_several_tiles_with_context_and_window() -> None:
    length = 3 * _TILE_TOKENS + 5
    for window in (0, 50, 200):
        cache = Cache([length], block_size=16, window=window)
        cache.check([(0, 0, 37)])
        cache.check([(0, 37, length - 37)])


def test_decode_rows_of_very_different_lengths_are_grouped() -> None:
    lengths = [4, 5, 300, 310, 2000, 6]
    cache = Cache(lengths, block_size=16)
    cache.attend([(sequence, 0, length - 1) for sequence, length in enumerate(lengths)])
    step = [(sequence, length - 1, 1) for sequence, length in enumerate(lengths)]
    parts = cache.backend.plan(cache.batch(step)).parts[0]
    rows = [part.rows.tolist() for part in parts if isinstance(part, _Group)]
    singles = [part.row for part in parts if isinstance(part, _Single)]
    assert sorted(map(sorted, rows)) == [[0, 1, 5], [2, 3]]
    assert singles == [4]
    cache.check(step)


def test_a_window_reads_no_more_blocks_than_it_covers() -> None:
    cache = Cache([1000, 900], block_size=16, window=20)
    cache.attend([(0, 0, 999), (1, 0, 899)])
    (group,) = cache.backend.plan(cache.batch([(0, 999, 1), (1, 899, 1)])).parts[20]
    assert isinstance(group, _Group)
    assert len(group.gather) <= 2 * KV_HEADS * 3
    cache.check([(0, 999, 1), (1, 899, 1)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close(dtype: torch.dtype) -> None:
    cache = Cache([40, 50, 3], block_size=16)
    cache.backend = CPUAttention(CONFIG, dtype)
    cache.backend.allocate(20, 16)
    cache.qkv = [each.to(dtype) for each in cache.qkv]
    for slices in ([(0, 0, 39), (1, 0, 49), (2, 0, 2)], [(0, 39, 1), (1, 49, 1), (2, 2, 1)]):
        ours = cache.attend(slices)
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.float(), cache.expected(slices), atol=0.03, rtol=0.03)


@pytest.mark.skipif(not STATM.exists(), reason="resident memory is read from Linux's /proc")
def test_memory_is_touched_only_as_slots_are_written() -> None:
    def resident_bytes() -> int:
        return int(STATM.read_text().split()[1]) * resource.getpagesize()

    backend = CPUAttention(replace(CONFIG, windows=(0,)), torch.float32)
    before = resident_bytes()
    backend.allocate(2**20, 16)  # 2 GiB
    assert resident_bytes() - before < 2**26
    k, v = backend.caches[0]
    assert k.shape == v.shape == (2**20 + 1, KV_HEADS, 16, DIM)
    assert k.is_contiguous()
    assert v.is_contiguous()
    assert not k[-1].any()
    assert not v[-1].any()
