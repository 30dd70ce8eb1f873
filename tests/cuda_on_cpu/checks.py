"""Each kernel against a float64 reference, through the engine's own launch shapes.

May import numpy and engine.cuda_kernels. A check takes a `Load` (see engine.cuda_kernels), a shape and a random
generator, and raises AssertionError, or the launcher's error. Slots that nothing was written to hold NaN, results are
poisoned before the launch, blocks lie in random order and sequences share them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.cuda_kernels import (
    E4M3,
    E4M3_MAX,
    SPLIT_TOKENS,
    Cache,
    Kernels,
    Load,
    RowKernels,
    SampleKernel,
    Shape,
    Tables,
)

Array = np.ndarray[Any, Any]

# Of results about as large as 1: the rounding of the result, and for attention of the weights too.
TOLERANCE = {"float32": 3e-6, "bfloat16": 2e-2, "float16": 3e-3}
POISON = -77.0  # what no result is

# By the code's lower 7 bits, but for the last, which is NaN: subnormals, then 15 powers of 2 of 8 fractions each.
_E4M3_NUMBERS = np.array([(8 * (code > 7) + code % 8) * 2.0 ** (max(code // 8, 1) - 10) for code in range(127)])


def encoded(values: Array, kind: str) -> Array:
    """As the kernels store them; bfloat16, which numpy lacks, as the upper half of a float32, rounded to even;
    e4m3, which it lacks too, as bytes."""
    if kind == "float32":
        return np.ascontiguousarray(values, np.float32)
    if kind == "float16":
        return np.ascontiguousarray(values).astype(np.float16)
    if kind == E4M3:
        return _bytes_of(values)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    rounded[np.isnan(values)] = 0x7FC0
    return rounded


def decoded(stored: Array, kind: str) -> Array:
    """float64."""
    if kind == E4M3:
        sizes = np.append(_E4M3_NUMBERS, np.nan)[stored & 0x7F]
        numbers: Array = np.where(stored & 0x80, -sizes, sizes)
        return numbers
    if kind == "bfloat16":
        return (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return stored.astype(np.float64)


def _bytes_of(values: Array) -> Array:
    """The nearest of e4m3's numbers, of two the one with an even fraction; 448 for those beyond."""
    size = np.abs(values)
    above = np.searchsorted(_E4M3_NUMBERS, size).clip(1, len(_E4M3_NUMBERS) - 1)
    low, high = size - _E4M3_NUMBERS[above - 1], _E4M3_NUMBERS[above] - size
    code = np.where((high < low) | ((high == low) & (above % 2 == 0)), above, above - 1)
    code = np.where(np.isnan(values), 0x7F, code)
    return (code | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)


@dataclass
class World:
    """Sequences in a paged cache: `keys[s]` and `values[s]` [context, kv_heads, head_dim] are what the cache holds."""

    shape: Shape
    contexts: list[int]
    blocks: list[list[int]]
    keys: list[Array]
    values: list[Array]
    cache: Cache
    tables: Tables

    @classmethod
    def made(cls, shape: Shape, contexts: Sequence[int], rng: np.random.Generator, firsts: Sequence[int] = ()) -> World:
        """A sequence may share the whole blocks of the one before it. With `firsts` none does, and the positions before
        a sequence's first, which no window reaches, hold NaN."""
        size, row, kind = shape.block_size, (shape.kv_heads, shape.head_dim), shape.cache or shape.kind
        scales = scales_of(shape, rng)
        k_scale, v_scale = np.ones((2, shape.kv_heads, 1)) if scales is None else scales[:, :, None].astype(np.float64)
        needed = [-(-context // size) for context in contexts]
        shares = [
            min(context, before) // size if before and not firsts and rng.random() < 0.5 else 0
            for context, before in zip(contexts, [0, *contexts], strict=False)
        ]
        pool = max(
            sum(needed) - sum(shares), 1
        )  # all in use, so that what is read beyond a block is often beyond the pool
        free = rng.permutation(pool).tolist()
        k_cache = np.full((pool, shape.kv_heads, size, shape.head_dim), np.nan)
        v_cache = k_cache.copy()
        blocks: list[list[int]] = []
        keys: list[Array] = []
        values: list[Array] = []
        for number, context in enumerate(contexts):
            shared = shares[number]
            before = blocks[-1][:shared] if shared else []
            own = [*before, *(free.pop() for _ in range(needed[number] - shared))]
            for cache, scale in ((k_cache, k_scale), (v_cache, v_scale)):
                new = decoded(encoded(rng.standard_normal((context - shared * size, *row)) / scale, kind), kind) * scale
                for at, vector in enumerate(new, shared * size):
                    cache[own[at // size], :, at % size] = vector
            blocks.append(own)
        for own, context in zip(blocks, contexts, strict=True):
            for cache, known in ((k_cache, keys), (v_cache, values)):
                known.append(cache[np.array(own, int)].swapaxes(1, 2).reshape(-1, *row)[:context])
        for own, first in zip(blocks, firsts, strict=False):
            for at in range(first):
                k_cache[own[at // size], :, at % size] = v_cache[own[at // size], :, at % size] = np.nan
        # No wider than needed where the last sequence is the longest: what is read beyond its table is beyond all.
        stride = max(*needed, 1) + (0 if needed[-1] == max(needed) else int(rng.integers(0, 2)))
        table = np.full((len(contexts), stride), -1, np.int32)
        for line, own in zip(table, blocks, strict=True):
            line[: len(own)] = own
        return cls(
            shape,
            list(contexts),
            blocks,
            keys,
            values,
            Cache(encoded(k_cache / k_scale[:, None], kind), encoded(v_cache / v_scale[:, None], kind), scales),
            Tables(table, stride, np.array(contexts, np.int32)),
        )

    def attention(self, sequence: int, position: int, query: Array, window: int) -> Array:
        """What query [heads, head_dim] at `position` must get, float64; at -1, of no positions, zeros."""
        if position < 0:
            return np.zeros(query.shape)
        first = max(position + 1 - window, 0) if window else 0
        keys, values = (each[sequence][first : position + 1] for each in (self.keys, self.values))
        grouped = query.reshape(self.shape.kv_heads, self.shape.group, -1)
        scores = np.einsum("kgd,pkd->kgp", grouped, keys) / np.sqrt(self.shape.head_dim)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        merged: Array = np.einsum("kgp,pkd->kgd", weights, values)
        return merged.reshape(query.shape)


def scales_of(shape: Shape, rng: np.random.Generator) -> Array | None:
    """For a cache of bytes: such that numbers about as large as 1 use much of its range."""
    return rng.uniform(0.01, 0.05, (2, shape.kv_heads)).astype(np.float32) if shape.cache else None


def queries(shape: Shape, tokens: int, rng: np.random.Generator) -> tuple[Array, Array, int]:
    """(stored, their values [tokens, heads, head_dim], distance of rows): rows lie apart, as parts of a product's."""
    gap = 16 * int(rng.integers(0, 2))
    stored = encoded(1.5 * rng.standard_normal((tokens, shape.heads * shape.head_dim + gap)), shape.kind)
    values = decoded(stored, shape.kind)[:, : shape.heads * shape.head_dim]
    return stored, values.reshape(tokens, shape.heads, shape.head_dim), stored.shape[1]


def expect(actual: Array, expected: Array, tolerance: float, what: str) -> None:
    wrong = ~(np.abs(actual - expected) <= tolerance * np.maximum(1, np.abs(expected)))
    assert not wrong.any(), f"{what}: {wrong.sum()} of {wrong.size} wrong, the first at {np.argwhere(wrong)[0]}"


def check_decode(
    load: Load,
    shape: Shape,
    rng: np.random.Generator,
    contexts: Sequence[int],
    window: int = 0,
    more_splits: int = 0,
    blocks: int = 0,
) -> None:
    """Sequences of so many positions, their queries in rows of any order, between rows that must be left alone.
    Some may have none, as in a captured graph's batch. `blocks`: of each head at most, whatever the launch is."""
    firsts = [max(context - window, 0) for context in contexts] if window else []
    kernels, world = Kernels(shape, load), World.made(shape, contexts, rng, firsts)
    if blocks:
        kernels.decode_blocks, kernels.sequence_blocks = 1, blocks
    tokens = len(contexts) + 2
    rows = rng.permutation(tokens)[: len(contexts)].astype(np.int32)
    stored, values, stride = queries(shape, tokens, rng)
    out = encoded(np.full((tokens, shape.heads, shape.head_dim), POISON), shape.kind)
    seen = [context - max(context - window, 0) // 32 * 32 if window else context for context in contexts]
    splits = max(-(-max(seen) // SPLIT_TOKENS), 1) + more_splits
    partials = np.full(max(kernels.partials_floats(len(contexts), splits), 1), np.nan, np.float32)
    arguments = (out, partials, (stored, stride), world.cache, world.tables, rows, len(contexts))
    kernels.decode(*arguments, splits=splits, window=window)
    expected = np.full((tokens, shape.heads, shape.head_dim), POISON)
    for sequence, row in enumerate(rows):
        expected[row] = world.attention(sequence, contexts[sequence] - 1, values[row], window)
    expect(decoded(out, shape.kind), expected, TOLERANCE[shape.kind], "decode")


def check_longest(load: Load) -> None:
    """One head over 131,072 positions, a token of its own and the last of a chunk."""
    shape = Shape("bfloat16", heads=1, kv_heads=1, head_dim=32, rotary_dim=32, block_size=16)
    check_decode(load, shape, np.random.default_rng(0), [131_072])
    check_prefill(load, shape, np.random.default_rng(0), [(2, 131_070)])


def check_prefill(
    load: Load, shape: Shape, rng: np.random.Generator, slices: Sequence[tuple[int, int]], window: int = 0
) -> None:
    """Slices of (tokens, positions before them)."""
    counts = [count for count, _ in slices]
    firsts = [max(before + 1 - window, 0) for _, before in slices] if window else []
    kernels, world = Kernels(shape, load), World.made(shape, [sum(each) for each in slices], rng, firsts)
    rows = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    stored, values, stride = queries(shape, int(rows[-1]), rng)
    out = encoded(np.full((rows[-1] + 1, shape.heads, shape.head_dim), POISON), shape.kind)
    tiles = kernels.prefill_tiles(counts)
    kernels.prefill(out, (stored, stride), world.cache, world.tables, rows, tiles, len(tiles), window=window)
    expected = np.full(out.shape, POISON)
    for sequence, (count, before) in enumerate(slices):
        for token in range(count):
            row = rows[sequence] + token
            expected[row] = world.attention(sequence, before + token, values[row], window)
    expect(decoded(out, shape.kind), expected, TOLERANCE[shape.kind], "prefill")


def check_kv_write(load: Load, shape: Shape, rng: np.random.Generator, tokens: int) -> None:
    """Tokens to distinct slots, one of them to none; then they are gathered in another order."""
    kernels = Kernels(shape, load)
    q_width, width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    product = encoded(rng.standard_normal((tokens, q_width + 2 * width)), shape.kind)
    before = decoded(product, shape.kind)
    q, k, v = (np.ascontiguousarray(part) for part in np.split(product, (q_width, q_width + width), 1))
    blocks = tokens // shape.block_size + 2
    slots = rng.permutation(blocks * shape.block_size)[:tokens].astype(np.int64)
    slots[rng.integers(0, tokens)] = -1
    angles = rng.uniform(-3, 3, (tokens, shape.rotary_dim // 2))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    kind, scales = shape.cache or shape.kind, scales_of(shape, rng)
    empty = np.full((blocks, shape.kv_heads, shape.block_size, shape.head_dim), POISON)
    cache = Cache(encoded(empty, kind), encoded(empty, kind), scales)
    kernels.kv_write(cache, slots, tokens, q=(q, q_width), k=(k, width), v=(v, width), cos=cos, sin=sin)

    heads = before.reshape(tokens, -1, shape.head_dim)
    turned = rotated(heads, cos.astype(np.float64), sin.astype(np.float64))
    there = slots >= 0
    tolerance = {"float32": 1e-6, "bfloat16": 2**-8, "float16": 2**-10}[shape.kind]
    expected_q = np.where(there[:, None, None], turned, heads)[:, : shape.heads]
    expect(decoded(q, shape.kind).reshape(expected_q.shape), expected_q, tolerance, "rotated queries")
    scale = np.ones((2, shape.kv_heads)) if scales is None else scales.astype(np.float64)
    for number, (stored, new) in enumerate(
        (
            (cache.k, turned[:, shape.heads : shape.heads + shape.kv_heads]),
            (cache.v, heads[:, shape.heads + shape.kv_heads :]),
        )
    ):
        expected = decoded(encoded(empty, kind), kind)
        block, place = np.divmod(slots[there], shape.block_size)
        expected[block, :, place] = new[there] / scale[number][:, None]
        if shape.cache:
            expect_bytes(stored, expected, tolerance)
        else:
            expect(decoded(stored, kind), expected, tolerance, "written slots")
    if not shape.cache:
        check_gather(kernels, cache, slots[rng.permutation(tokens)])


def expect_bytes(stored: Array, expected: Array, tolerance: float) -> None:
    """e4m3 of what is expected: within half of a unit in its last place (3 bits of fraction; below 2^-6 it is 2^-9),
    beside the relative `tolerance` of what was rounded to it."""
    expected = expected.clip(-E4M3_MAX, E4M3_MAX)
    size = np.abs(expected)
    allowed = (
        np.maximum(2.0 ** (np.floor(np.log2(np.maximum(size, 2.0**-6))) - 4), 0) * (1 + 2**-3) + 2 * tolerance * size
    )
    wrong = ~(np.abs(decoded(stored, E4M3) - expected) <= allowed)
    assert not wrong.any(), f"written bytes: {wrong.sum()} of {wrong.size} wrong, the first at {np.argwhere(wrong)[0]}"


def check_gather(kernels: Kernels, cache: Cache, slots: Array) -> None:
    shape = kernels.shape
    k, v = (encoded(np.full((len(slots), shape.kv_heads, shape.head_dim), POISON), shape.kind) for _ in range(2))
    kernels.kv_gather(k, v, cache, slots, len(slots))
    block, place = np.divmod(slots, shape.block_size)
    for got, stored in ((k, cache.k), (v, cache.v)):
        expected = np.where((slots >= 0)[:, None, None], decoded(stored[block, :, place], shape.kind), 0)
        expect(decoded(got, shape.kind), expected, 0, "gathered")


def rotated(heads: Array, cos: Array, sin: Array) -> Array:
    half = cos.shape[1]
    x, y, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    return np.concatenate((x * cos - y * sin, y * cos + x * sin, rest), -1)


def check_copies(load: Load, shape: Shape, rng: np.random.Generator) -> None:
    """Copies within a pool, then between two, of blocks whose size is no multiple of the threads'."""
    kernels = Kernels(shape, load)
    block_bytes, blocks = 16 * int(rng.integers(1, 700)), 9
    cache = rng.integers(0, 256, (blocks, block_bytes), dtype=np.uint8)
    host = rng.integers(0, 256, (blocks, block_bytes), dtype=np.uint8)
    pairs = np.array([[0, 5], [3, 8], [0, 1]], np.int64)
    expected = cache.copy()
    expected[pairs[:, 1]] = cache[pairs[:, 0]]
    kernels.copy_blocks(cache, pairs, len(pairs), block_bytes)
    assert (cache == expected).all(), "copied blocks"
    expected = host.copy()
    expected[pairs[:, 1]] = cache[pairs[:, 0]]
    kernels.swap_blocks(host, cache, pairs, len(pairs), block_bytes)
    assert (host == expected).all(), "swapped blocks"


def check_rows(load: Load, shape: Shape, rng: np.random.Generator, rows: int = 2) -> None:
    """Residual sum and norm, with and without something to add, and gating: rows of two kernels' widths."""
    kernels, kind = RowKernels(shape.kind, load), shape.kind
    size = 8 * int(rng.integers(1, 400))
    tolerance = {"float32": 1e-5, "bfloat16": 2**-7, "float16": 2**-9}[kind]
    stored = [encoded(rng.standard_normal(each), kind) for each in ((rows, size), (rows, size), (size,))]
    x, more, weight = (decoded(each, kind) for each in stored)
    for added in (stored[1], None):
        target, out = stored[0].copy(), encoded(np.full((rows, size), POISON), kind)
        kernels.add_rms_norm(out, target, added, stored[2], rows, size, 1e-5)
        expected = x if added is None else decoded(encoded(x + more, kind), kind)
        expect(decoded(target, kind), expected, tolerance / 4, "sums")
        rms = np.sqrt((expected**2).mean(-1, keepdims=True) + 1e-5)
        expect(decoded(out, kind), expected / rms * weight, tolerance, "normed")
    both = encoded(3 * rng.standard_normal((rows, 2 * size)), kind)
    gate, up = np.split(decoded(both, kind), 2, 1)
    out = encoded(np.full((rows, size), POISON), kind)
    kernels.silu_mul(out, both, rows, size)
    expect(decoded(out, kind), gate / (1 + np.exp(-gate)) * up, tolerance, "gated")


@dataclass
class Draw:
    """How one row is sampled: see SampleKernel.draw."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    words: tuple[int, int, int, int]


def drawn(load: Load, logits: Array, draws: Sequence[Draw]) -> Array:
    """The kernel's choice for each row."""
    tokens, weights = np.full(len(logits), -1, np.int64), np.full(logits.shape, np.nan, np.float32)
    settings = (
        np.array([each.temperature for each in draws], np.float32),
        np.array([each.top_k for each in draws], np.int32),
        np.array([each.top_p for each in draws], np.float64),
        np.array([each.min_p for each in draws], np.float32),
        np.array([each.words for each in draws], np.uint64),
    )
    SampleKernel(load).draw(tokens, weights, logits, settings, *logits.shape)
    return tokens


def check_sample(load: Load, shape: Shape, rng: np.random.Generator, vocab: int = 700) -> None:
    """Rows with ties at every threshold, against a sort in float64."""
    draws = [
        Draw(0.7, vocab, 1.0, 0.0, (1, 0, 0, 5)),
        Draw(1.3, 20, 0.8, 0.0, (2**64 - 1, 1, 2, 3)),
        Draw(1.0, vocab, 0.5, 0.3, (7, 0, 1, 0)),
    ]
    logits = rng.integers(-12, 3, (len(draws), vocab)).astype(np.float32)
    expected = [expected_draw(row, each) for row, each in zip(logits, draws, strict=True)]
    assert drawn(load, logits, draws).tolist() == expected, "drawn tokens"


def expected_draw(logits: Array, draw: Draw) -> int:
    weights = np.exp((logits - logits.max()) / np.float32(draw.temperature)).astype(np.float64)
    order = np.argsort(-weights, kind="stable")
    reached = weights[order].cumsum()
    kept = draw.top_k
    if draw.top_p < 1:
        kept = min(kept, int(np.searchsorted(reached, draw.top_p * reached[draw.top_k - 1])) + 1)
    stays = np.zeros(len(weights), bool)
    stays[order[:kept]] = True
    summed = np.where(stays & (weights >= np.float32(draw.min_p)), weights, 0).cumsum()
    return int(np.searchsorted(summed, chance(draw.words) * summed[-1], side="right"))


def chance(words: Sequence[int]) -> float:
    """SplitMix64's finaliser over the words, in Python's own whole numbers."""
    state = 0
    for word in words:
        state = ((state ^ word) + 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return (state >> 11) * 2.0**-53


def _decode(load: Load, shape: Shape, rng: np.random.Generator) -> None:
    check_decode(load, shape, rng, [16, 0, 144])
    check_decode(load, shape, rng, [0, 270, 33], window=40, more_splits=1)
    check_decode(load, shape, rng, [2, 260], more_splits=1, blocks=1)


def _prefill(load: Load, shape: Shape, rng: np.random.Generator) -> None:
    check_prefill(load, shape, rng, [(1, 37), (30, 50)])
    check_prefill(load, shape, rng, [(40, 55)], window=13)
    check_prefill(load, shape, rng, [(5, 2)], window=40)


# Small launches that reach every line, for sanitizers and to judge mutations: by the source file that they reach.
CHECKS: dict[str, Callable[[Load, Shape, np.random.Generator], None]] = {
    "paged_attention": _decode,
    "paged_prefill": _prefill,
    "kv_write": lambda load, shape, rng: check_kv_write(load, shape, rng, 5),
    "block_copy": check_copies,
    "sample": check_sample,
    "add_rms_norm": lambda load, shape, rng: check_rows(load, shape, rng, 1),
}

# Files that a check reaches too.
BESIDE = {"kv_write": "kv_gather.cu", "block_copy": "block_swap.cu", "add_rms_norm": "silu_mul.cu"}
