"""The kernels in cuda/, compiled for the CPU from their own source, equal float64 references."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cuda_kernels import E4M3, Cache, Kernels, Load, Shape, Tables
from tests.cuda_on_cpu import checks
from tests.cuda_on_cpu.emulator import ORDERS, Emulated, Sanitized

EXAMPLES = 12  # for each shape and kernel

# Each type, head size, block size and kind of group somewhere: fewer than a tile's rows, and more (17).
SHAPES = [
    Shape("float32", heads=6, kv_heads=2, head_dim=64, rotary_dim=48, block_size=16),
    Shape("float32", heads=2, kv_heads=2, head_dim=256, rotary_dim=256, block_size=32),
    Shape("bfloat16", heads=14, kv_heads=2, head_dim=64, rotary_dim=64, block_size=16),
    Shape("bfloat16", heads=4, kv_heads=4, head_dim=80, rotary_dim=80, block_size=32),
    Shape("bfloat16", heads=8, kv_heads=2, head_dim=128, rotary_dim=128, block_size=16),
    Shape("float16", heads=17, kv_heads=1, head_dim=96, rotary_dim=96, block_size=16),
    Shape("float16", heads=8, kv_heads=1, head_dim=256, rotary_dim=256, block_size=32),
    Shape("bfloat16", heads=14, kv_heads=2, head_dim=64, rotary_dim=64, block_size=16, cache=E4M3),
    Shape("float16", heads=8, kv_heads=2, head_dim=80, rotary_dim=80, block_size=32, cache=E4M3),
    Shape("float32", heads=4, kv_heads=2, head_dim=96, rotary_dim=48, block_size=16, cache=E4M3),
]
SMALL = [
    Shape("float32", heads=4, kv_heads=2, head_dim=32, rotary_dim=32, block_size=16),
    Shape("bfloat16", heads=6, kv_heads=2, head_dim=80, rotary_dim=80, block_size=32),
    Shape("bfloat16", heads=6, kv_heads=2, head_dim=48, rotary_dim=32, block_size=16, cache=E4M3),
]
shapes = pytest.mark.parametrize(
    "shape", SHAPES, ids=lambda s: f"{s.cache or s.kind}-{s.group}x{s.head_dim}-{s.block_size}"
)
small = pytest.mark.parametrize("shape", SMALL, ids=lambda s: s.cache or s.kind)
seeds = st.integers(0, 2**32 - 1)
orders = st.sampled_from(sorted(ORDERS))


def emulated(order: str) -> Load:
    return lambda source, constants: Emulated(source, constants, order=order)


def sanitized(sanitizer: str) -> Load:
    def load(source: str, constants: Mapping[str, int]) -> Sanitized:
        return Sanitized(source, constants, sanitizer, order="shuffled")

    return load


@shapes
@given(
    contexts=st.lists(st.integers(0, 70) | st.integers(250, 600), min_size=1, max_size=4),
    window=st.sampled_from([0, 0, 1, 33, 400]),
    more_splits=st.integers(0, 1),
    blocks=st.integers(0, 2),
    order=orders,
    seed=seeds,
)
@settings(max_examples=EXAMPLES)
def test_decode(
    shape: Shape, contexts: list[int], window: int, more_splits: int, blocks: int, order: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    checks.check_decode(emulated(order), shape, rng, contexts, window, more_splits, blocks)


@shapes
@given(
    slices=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 90)), min_size=1, max_size=4),
    window=st.sampled_from([0, 0, 1, 20, 64]),
    order=orders,
    seed=seeds,
)
@settings(max_examples=EXAMPLES)
def test_prefill(shape: Shape, slices: list[tuple[int, int]], window: int, order: str, seed: int) -> None:
    checks.check_prefill(emulated(order), shape, np.random.default_rng(seed), slices, window)


@shapes
@given(tokens=st.integers(1, 60), order=orders, seed=seeds)
@settings(max_examples=EXAMPLES)
def test_kv_write_and_gather(shape: Shape, tokens: int, order: str, seed: int) -> None:
    checks.check_kv_write(emulated(order), shape, np.random.default_rng(seed), tokens)


@given(order=orders, seed=seeds)
@settings(max_examples=EXAMPLES)
def test_copies(order: str, seed: int) -> None:
    checks.check_copies(emulated(order), SHAPES[0], np.random.default_rng(seed))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
@given(order=orders, seed=seeds)
@settings(max_examples=EXAMPLES)
def test_rows(kind: str, order: str, seed: int) -> None:
    checks.check_rows(emulated(order), replace(SHAPES[0], kind=kind), np.random.default_rng(seed))


def test_a_context_of_many_splits() -> None:
    shape = SHAPES[2]
    checks.check_decode(emulated("numbered"), shape, np.random.default_rng(0), [20_000, 1, 0, 700])


@pytest.mark.parametrize(
    ("sequences", "splits", "blocks"),
    [(1, 16, 16), (1, 512, 256), (64, 16, 16), (256, 512, 16), (8, 512, 32), (256, 1, 1)],
)
def test_a_launch_has_no_more_blocks_than_keep_a_gpu_busy(sequences: int, splits: int, blocks: int) -> None:
    """Of Llama-3-8B's 8 key-value heads. A graph's splits are as many as its longest sequence may have."""
    grids: dict[str, tuple[int, ...]] = {}

    class Module:
        def launch(self, name: str, grid: tuple[int, ...], *_: object) -> None:
            grids[name] = grid

    kernels = Kernels(replace(SHAPES[4], heads=32, kv_heads=8), lambda *_: Module())
    kernels.decode(
        None, None, (None, 0), Cache(None, None), Tables(None, 1, None), None, sequences, splits=splits, window=0
    )
    assert grids["paged_attention"] == (blocks, 8, sequences)
    assert grids.get("paged_attention_merge") == ((32, sequences) if splits > 1 else None)


def test_the_longest_context() -> None:
    checks.check_longest(emulated("numbered"))


@pytest.mark.parametrize("more_splits", [0, 3])
def test_a_batch_of_no_positions_gets_zeros(more_splits: int) -> None:
    for shape in SMALL:
        checks.check_decode(emulated("numbered"), shape, np.random.default_rng(0), [0, 0], more_splits=more_splits)


def test_bytes_are_those_of_the_format() -> None:
    """The reference's own e4m3 is torch's, number for number and rounding for rounding."""
    codes = torch.arange(256).to(torch.uint8)
    numbers = codes.view(torch.float8_e4m3fn).double().numpy()
    np.testing.assert_array_equal(checks.decoded(codes.numpy(), E4M3), numbers)
    values = np.concatenate([numbers, (numbers[:126] + numbers[1:127]) / 2, np.geomspace(1e-4, 448, 999)])
    theirs = torch.from_numpy(values).float().to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    np.testing.assert_array_equal(
        checks.encoded(values.astype(np.float32), E4M3)[~np.isnan(values)], theirs[~np.isnan(values)]
    )


@small
@pytest.mark.parametrize("sanitizer", ["address", "thread"])
@pytest.mark.parametrize("check", checks.CHECKS)
def test_under_a_sanitizer(shape: Shape, check: str, sanitizer: str) -> None:
    checks.CHECKS[check](sanitized(sanitizer), shape, np.random.default_rng(1))


@pytest.mark.parametrize(
    "shape",
    [
        Shape("float32", heads=4, kv_heads=4, head_dim=24, rotary_dim=24, block_size=16),
        Shape("bfloat16", heads=4, kv_heads=4, head_dim=144, rotary_dim=144, block_size=16),
        Shape("bfloat16", heads=4, kv_heads=4, head_dim=64, rotary_dim=24, block_size=16),
        Shape("float32", heads=4, kv_heads=4, head_dim=64, rotary_dim=64, block_size=8),
    ],
)
def test_a_shape_without_kernels_is_told(shape: Shape) -> None:
    assert "needed" in (shape.problem() or "")
    assert all(each.problem() is None for each in SHAPES + SMALL)
