"""The CUDA kernels of cuda/: which constants each is compiled with, and how it is launched.

May import numpy and the kernels' place. It knows nothing of torch or CuPy: memory is whatever the launcher takes (torch
tensors on a GPU, torch tensors or numpy arrays where a test compiles the same sources for the CPU).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

KINDS = {"float32": 0, "bfloat16": 1, "float16": 2}  # as in numbers.cuh
E4M3 = "e4m3"  # what the cache may hold in their place: bytes, with a scale for each head
_CACHES = {**KINDS, E4M3: 3}  # as in cache.cuh
E4M3_MAX = 448.0

# Positions that one block of the decode kernel takes. Partial results are then 2 / 256 of the keys and values that are
# read for a group of one, and a single sequence of 4096 positions with 8 key-value heads fills 128 multiprocessors.
SPLIT_TOKENS = 256

# CUDA blocks of a decode launch, which keep the largest GPUs busy a few times over, and the least of each sequence's
# head, so that a long sequence among many short ones isn't left to a few. More would find nothing to do where most are
# short.
DECODE_BLOCKS = 2048
SEQUENCE_BLOCKS = 16

_THREADS = 128
_WARPS = 4
_HEAD_DIM_MAX = 256  # what a lane's registers hold
_ROWS = 16  # of an mma
_PREFILL_STAGE_TOKENS = 32
_SAMPLE_THREADS = 512
_SAMPLE_SHARED_BYTES = 12 * (256 + 16) + 12 * 512 + 4 * 512 // 32 + 16  # `Scratch` of sample.cu
_ROW_THREADS = 256
_ROW_CHUNKS = 4  # CUDA blocks for each row of `silu_mul`
_COPY_THREADS = 128
_COPY_CHUNKS = 4  # CUDA blocks for each copied block


class Module(Protocol):
    """A compiled source file."""

    def launch(
        self, name: str, grid: tuple[int, ...], block: tuple[int, ...], shared_bytes: int, arguments: Sequence[Any], /
    ) -> None:
        """Starts a kernel. Arguments are memory, None for a null pointer, or numpy scalars of the parameters' types."""


Load = Callable[[str, Mapping[str, int]], Module]  # (source file's name, constants)


@dataclass(frozen=True)
class Shape:
    """What the kernels are compiled for. `kind` is a key of KINDS, sizes are in elements. `cache` is E4M3, or empty for
    a cache of `kind`."""

    kind: str
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    block_size: int
    cache: str = ""

    @property
    def group(self) -> int:
        """Query heads that share a key-value head."""
        return self.heads // self.kv_heads

    def problem(self) -> str | None:
        """Why there are no kernels for this shape."""
        pair = 8 if self.kind == "float32" else 16
        if self.head_dim % (16 if self.head_dim <= 128 else 32) or self.head_dim > _HEAD_DIM_MAX:
            return f"heads of {self.head_dim} (a multiple of 16 up to 128, or of 32 up to {_HEAD_DIM_MAX}, is needed)"
        if self.rotary_dim % pair or (self.head_dim - self.rotary_dim) % pair:
            return f"{self.rotary_dim} rotary dimensions (a multiple of {pair} is needed)"
        if self.block_size % 16:
            return f"blocks of {self.block_size} tokens (a multiple of 16 is needed)"
        return None

    def constants(self) -> dict[str, int]:
        """For the compiler."""
        return {
            "KIND": KINDS[self.kind],
            "CACHE": _CACHES[self.cache or self.kind],
            "HEAD_DIM": self.head_dim,
            "ROTARY_DIM": self.rotary_dim,
            "BLOCK_SIZE": self.block_size,
            "GROUP": self.group,
        }


@dataclass(frozen=True)
class Cache:
    """One layer's keys and values, [block, kv_head, token, head_dim] each. Of a cache of bytes also scales
    [2, kv_heads] float32: what a 1 is worth, of keys and of values."""

    k: Any
    v: Any
    scales: Any = None


@dataclass(frozen=True)
class Tables:
    """Block tables [rows, stride] int32, and for each row how many positions there are: contexts [rows] int32."""

    blocks: Any
    stride: int
    contexts: Any


class Kernels:
    """All kernels of one shape, compiled as they are first used."""

    decode_blocks, sequence_blocks = DECODE_BLOCKS, SEQUENCE_BLOCKS

    def __init__(self, shape: Shape, load: Load) -> None:
        self.shape = shape
        self._load = load
        self._modules: dict[str, Module] = {}
        self._scale = np.float32(shape.head_dim**-0.5)

    @property
    def prefill_tile_rows(self) -> int:
        """Packed rows (tokens times group) of a tile of `prefill`."""
        return _WARPS * (8 if self.shape.kind == "float32" else _ROWS)

    def kv_write(
        self,
        cache: Cache,
        slots: Any,
        tokens: int,
        *,
        q: tuple[Any, int],
        k: tuple[Any, int],
        v: tuple[Any, int],
        cos: Any,
        sin: Any,
    ) -> None:
        """Rotates q in place and k, and writes k and v to slots [tokens] int64. q, k and v come each with the distance
        of its rows; cos and sin are [tokens, rotary_dim / 2] float32."""
        strides = [np.int32(stride) for _, stride in (q, k, v)]
        heads = np.int32(self.shape.heads), np.int32(self.shape.kv_heads)
        arguments = [q[0], k[0], v[0], cache.k, cache.v, cache.scales, cos, sin, slots, *heads, *strides]
        self._module("kv_write").launch("kv_write", (tokens,), (_THREADS,), 0, arguments)

    def kv_gather(self, k: Any, v: Any, cache: Cache, slots: Any, tokens: int) -> None:
        """Reads slots [tokens] int64 into k and v [tokens, kv_heads, head_dim]. Not from a cache of bytes."""
        arguments = [k, v, cache.k, cache.v, slots, np.int32(self.shape.kv_heads)]
        self._module("kv_gather").launch("kv_gather", (tokens,), (_THREADS,), 0, arguments)

    def partials_floats(self, sequences: int, splits: int) -> int:
        """How many floats `decode` needs beside its result."""
        return sequences * splits * self.shape.heads * (self.shape.head_dim + 2) if splits > 1 else 0

    def decode(
        self,
        out: Any,
        partials: Any,
        q: tuple[Any, int],
        cache: Cache,
        tables: Tables,
        rows: Any,
        sequences: int,
        *,
        splits: int,
        window: int,
    ) -> None:
        """The query of each sequence is row rows[i] of q; out [tokens, heads, head_dim]. `splits` times SPLIT_TOKENS
        covers what the longest sees, from its first position rounded down to a multiple of 32 on."""
        shape = self.shape
        heads = shape.kv_heads * -(-shape.group // _ROWS)
        blocks = min(splits, max(-(-self.decode_blocks // (heads * sequences)), self.sequence_blocks))
        module = self._module("paged_attention")
        module.launch(
            "paged_attention",
            (blocks, heads, sequences),
            (_THREADS,),
            self._decode_shared_bytes(),
            [
                *(out, partials, q[0], cache.k, cache.v, cache.scales, tables.blocks, rows, tables.contexts),
                *(np.int32(each) for each in (q[1], shape.kv_heads, tables.stride, window, SPLIT_TOKENS, splits)),
                self._scale,
            ],
        )
        if splits > 1:
            told = (np.int32(each) for each in (window, SPLIT_TOKENS, splits))
            arguments, shared_bytes = [out, partials, rows, tables.contexts, *told], 4 * (splits + 2 * _WARPS)
            module.launch("paged_attention_merge", (shape.heads, sequences), (_THREADS,), shared_bytes, arguments)

    def prefill(
        self,
        out: Any,
        q: tuple[Any, int],
        cache: Cache,
        tables: Tables,
        rows: Any,
        tiles: Any,
        tile_count: int,
        *,
        window: int,
    ) -> None:
        """Slice s is rows rows[s] … rows[s + 1] - 1 of q and of out [tokens, heads, head_dim]; tiles [tile_count, 2]
        int32 as `prefill_tiles` makes them."""
        shape = self.shape
        self._module("paged_prefill").launch(
            "paged_prefill",
            (tile_count, shape.kv_heads),
            (_THREADS,),
            self._prefill_shared_bytes(),
            [
                *(out, q[0], cache.k, cache.v, cache.scales, tables.blocks, tiles, rows, tables.contexts),
                *(np.int32(each) for each in (q[1], shape.kv_heads, tables.stride, window)),
                self._scale,
            ],
        )

    def prefill_tiles(self, counts: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
        """(slice, first packed row) of each tile, for slices of so many tokens. Last tiles first: they see the most."""
        step = self.prefill_tile_rows
        tiles = [(s, row) for s, count in enumerate(counts) for row in range(0, count * self.shape.group, step)]
        tiles.sort(key=lambda each: -each[1])
        return np.array(tiles, np.int32).reshape(-1, 2)

    def copy_blocks(self, cache: Any, pairs: Any, count: int, block_bytes: int) -> None:
        """Within one pool's K or V of a layer: pairs [count, 2] int64 of (source, target)."""
        self._copy("block_copy", [cache, pairs], count, block_bytes)

    def swap_blocks(self, target: Any, source: Any, pairs: Any, count: int, block_bytes: int) -> None:
        """Between two pools: pairs [count, 2] int64 of (source, target)."""
        self._copy("block_swap", [target, source, pairs], count, block_bytes)

    def _copy(self, name: str, memory: list[Any], count: int, block_bytes: int) -> None:
        arguments = [*memory, np.int64(block_bytes // 16)]
        self._module(name).launch(name, (count, _COPY_CHUNKS), (_COPY_THREADS,), 0, arguments)

    def _decode_shared_bytes(self) -> int:
        shape = self.shape
        rows = min(shape.group, _ROWS)
        own = shape.head_dim + (32 if shape.kind == "float32" else 1)  # a warp's, of each row
        return 4 * _WARPS * rows * (own + 2)

    def _prefill_shared_bytes(self) -> int:
        shape = self.shape
        if shape.kind == "float32":
            return 4 * self.prefill_tile_rows * (shape.head_dim + 32)
        pieces = shape.head_dim // (16 if shape.cache else 8)  # of 16 bytes, as in paged_prefill.cu
        key_pieces = (pieces + 1) // 4 * 4 + 2 if shape.cache else (pieces + 3) // 8 * 8 + 4
        stage_pieces = key_pieces + pieces + 1 - pieces % 2
        return 2 * 16 * _PREFILL_STAGE_TOKENS * stage_pieces

    def _module(self, source: str) -> Module:
        if source not in self._modules:
            constants = {} if source.startswith("block_") else self.shape.constants()
            self._modules[source] = self._load(source, constants)
        return self._modules[source]


class RowKernels:
    """What is done to whole rows, of one type: a key of KINDS."""

    def __init__(self, kind: str, load: Load) -> None:
        self._constants = {"KIND": KINDS[kind]}
        self._multiple = 4 if kind == "float32" else 8  # numbers in 16 bytes
        self._load = load
        self._modules: dict[str, Module] = {}

    def serves(self, size: int) -> bool:
        """Whether rows of so many numbers can be read 16 bytes at a time."""
        return size % self._multiple == 0

    def add_rms_norm(self, out: Any, x: Any, more: Any, weight: Any, rows: int, size: int, eps: float) -> None:
        """x [rows, size] += more if there is any; out = x / rms(x) * weight [size]."""
        arguments = [out, x, more, weight, np.int32(size), np.float32(eps)]
        self._launch("add_rms_norm", (rows,), 4 * _ROW_THREADS // 32, arguments)

    def silu_mul(self, out: Any, x: Any, rows: int, size: int) -> None:
        """x [rows, 2 * size] -> out [rows, size]: silu of the first half times the second half."""
        self._launch("silu_mul", (rows, _ROW_CHUNKS), 0, [out, x, np.int32(size)])

    def _launch(self, name: str, grid: tuple[int, ...], shared_bytes: int, arguments: list[Any]) -> None:
        if name not in self._modules:
            self._modules[name] = self._load(name, self._constants)
        self._modules[name].launch(name, grid, (_ROW_THREADS,), shared_bytes, arguments)


class SampleKernel:
    """The draw of engine/sampler.py: one token for each row of logits."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._module: Module | None = None

    def draw(self, tokens: Any, weights: Any, logits: Any, settings: Sequence[Any], rows: int, vocab: int) -> None:
        """tokens [rows] int64 from logits [rows, vocab] float32, with as much room in `weights`; -1 for a row that
        holds a NaN or an infinite logit, or no finite one. `settings` of each row: temperature float32 (above 0), top_k
        int32 (1 to vocab), top_p float64, min_p float32, and words [rows, 4] uint64: seed, prompt index, choice index,
        token index."""
        if self._module is None:
            self._module = self._load("sample", {"KIND": KINDS["float32"]})
        arguments = [tokens, weights, logits, *settings, np.int32(vocab)]
        self._module.launch("sample", (rows,), (_SAMPLE_THREADS,), _SAMPLE_SHARED_BYTES, arguments)
