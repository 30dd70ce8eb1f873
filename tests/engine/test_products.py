"""Products by packed weights equal references in whole numbers and float64, on every instruction set, for all shapes; a
row's result never depends on the rows beside it."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine import catalog, cpu_ops
from engine.cpu_ops import LEVELS, Library
from engine.cpu_ops.decoder import look_up, multiply
from engine.cpu_ops.packing import BLOCK, FORMATS, SLAB_ROWS, SPAN, Blocks, Packed, joined, pack, pack_blocks

pytestmark = pytest.mark.usefixtures("two_threads")

HEADS = {"q8_0": 2, "q4_0": 2, "q4_1": 4}  # bytes of a block before its values
FLOATS = ("float32", "bfloat16")

seeds = st.integers(0, 10**6)
levels = st.sampled_from(sorted(LEVELS))
formats = st.sampled_from(sorted(FORMATS))
rows_of_a_batch = st.sampled_from([1, 2, 3, 6, 7, 8, 31, 32, 33, 100])


@pytest.fixture(scope="module")
def library() -> Library:
    return cpu_ops.load(catalog.cache_folder().parent / "cpu-ops", lambda *_: None)


def in_blocks(weight: torch.Tensor, form: str) -> tuple[Blocks, torch.Tensor]:
    """A matrix as llama.cpp's own code stores it, and what it means."""
    kind = gguf.GGMLQuantizationType[form.upper()]
    stored = gguf.quantize(weight.numpy(), kind)
    parts = torch.from_numpy(stored.reshape(len(weight), weight.shape[1] // BLOCK, -1))
    head = HEADS[form]
    scales = parts[:, :, :head].contiguous().view(torch.float16)
    offsets = scales[..., 1].contiguous() if head > 2 else None
    blocks = Blocks(form, parts[:, :, head:].contiguous(), scales[..., 0].contiguous(), offsets)
    return blocks, torch.from_numpy(gguf.dequantize(stored, kind))


def packed(weight: torch.Tensor, form: str) -> tuple[Packed, torch.Tensor]:
    """And the matrix that it stands for, in float64."""
    if form in HEADS:
        blocks, meant = in_blocks(weight, form)
        return pack_blocks(blocks), meant.double()
    if form == "int8":
        scales = weight.abs().amax(1, keepdim=True) / 127
        meant = (weight / scales.clamp(min=1e-38)).round().double() * scales.double()
    else:
        meant = weight.to(getattr(torch, form)).double()
    return pack(weight, form), meant


def rounded(x: torch.Tensor, form: str) -> torch.Tensor:
    """The activations that meet weights of a format, in float64: 8 bits with a scale for each span or block."""
    if form in FLOATS:
        return x.to(getattr(torch, form)).double()
    length = BLOCK if form in HEADS else SPAN
    spans = torch.nn.functional.pad(x, (0, -x.shape[1] % length)).reshape(len(x), -1, length)
    top = spans.abs().amax(-1, keepdim=True)
    values = (spans * (torch.tensor(127.0) / top)).nan_to_num().round()
    assert values.abs().max() <= 127
    return (values.double() * (top / 127).double()).reshape(len(x), -1)[:, : x.shape[1]]


@given(
    seed=seeds,
    level=levels,
    form=formats,
    rows=rows_of_a_batch,
    outputs=st.sampled_from([1, 15, 16, 17, 48, 64, 130, 208]),
    inputs=st.integers(1, 200),
    x_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    biased=st.booleans(),
)
@settings(max_examples=120, deadline=None)
def test_equals_the_reference(
    library: Library,
    seed: int,
    level: str,
    form: str,
    rows: int,
    outputs: int,
    inputs: int,
    x_dtype: torch.dtype,
    dtype: torch.dtype,
    biased: bool,
) -> None:
    library.use(level)
    inputs = -(-inputs // BLOCK) * BLOCK if form in HEADS else inputs
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=generator)
    x = (torch.randn(rows, inputs, generator=generator) * 3).to(x_dtype)
    bias = torch.randn(outputs, generator=generator) if biased else None
    ours, meant = packed(weight, form)
    result = multiply(library, ours, x, bias, dtype)
    expected = rounded(x.float(), form) @ meant.T
    expected = expected if bias is None else expected + bias
    size = (rounded(x.float(), form).abs() @ meant.abs().T).max().item() + 1
    tolerance = size * (2e-6 if dtype == torch.float32 else 4e-3)
    torch.testing.assert_close(
        result.double(), expected, atol=tolerance, rtol=4e-3 if dtype == torch.bfloat16 else 1e-6
    )
    for first, end in ((0, 1), (rows // 2, rows), (rows // 3, rows // 3 + 2)):
        part = x[first:end].contiguous()
        assert torch.equal(multiply(library, ours, part, bias, dtype), result[first : first + len(part)])


@pytest.mark.parametrize("form", sorted({"int8", *HEADS}))
def test_amx_and_vectors_agree_to_the_bit(library: Library, form: str) -> None:
    """Few rows go by vectors and many by tiles, so that a row would tell which. Inputs of more than one part, and
    rows of more than one piece with a last tile that isn't full."""
    if library.use("amx") != "amx":
        pytest.skip("this processor, system or compiler has no AMX")
    generator = torch.Generator().manual_seed(7)
    weight, x = torch.randn(33, 2048 + 96, generator=generator), torch.randn(100, 2048 + 96, generator=generator)
    ours, _ = packed(weight, form)
    tiles = multiply(library, ours, x)
    assert library.use("avx512_bf16") == "avx512_bf16"
    assert torch.equal(multiply(library, ours, x), tiles)


@pytest.mark.parametrize("level", sorted(LEVELS))
@pytest.mark.parametrize("form", sorted({"int8", *HEADS}))
def test_the_largest_numbers_do_not_saturate(library: Library, level: str, form: str) -> None:
    """All weights and activations at an end of their range: pairs of products that would not fit in 16 bits."""
    library.use(level)
    for sign in (1.0, -1.0):
        for x_sign in (1.0, -1.0):
            ours, meant = packed(torch.full((16, 512), sign), form)
            result = multiply(library, ours, torch.full((3, 512), x_sign))
            torch.testing.assert_close(result.double(), (x_sign * meant.sum(1)).expand(3, 16), atol=1e-3, rtol=2e-6)


def test_a_matrix_of_more_rows_than_are_packed_at_a_time() -> None:
    """Each slab is what it is by itself."""
    weight = torch.randn(2 * SLAB_ROWS + 32, 24, generator=torch.Generator().manual_seed(3))
    whole = pack(weight, "int8")
    parts = [pack(weight[at : at + SLAB_ROWS], "int8") for at in range(0, len(weight), SLAB_ROWS)]
    together = joined(parts)
    assert together is not None and whole.scales is not None and together.scales is not None
    assert torch.equal(whole.weights, together.weights)
    assert torch.equal(whole.scales, together.scales)


@pytest.mark.parametrize("level", sorted(LEVELS))
def test_sums_of_8_bit_products_are_exact(library: Library, level: str) -> None:
    """Scales of 1: the result is the whole number itself."""
    library.use(level)
    generator = np.random.default_rng(5)
    weight, x = generator.integers(-127, 128, (40, 1001)), generator.integers(-127, 128, (33, 1001))
    weight[:, 0] = x[:, ::SPAN] = 127
    result = multiply(library, pack(torch.from_numpy(weight).float(), "int8"), torch.from_numpy(x).float())
    assert np.array_equal(result.numpy().astype(np.int64), (x @ weight.T).astype(np.float32).astype(np.int64))


@pytest.mark.parametrize("level", sorted(LEVELS))
@pytest.mark.parametrize("form", sorted(FORMATS))
def test_a_broken_row_is_broken_alone(library: Library, level: str, form: str) -> None:
    library.use(level)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    ours, _ = packed(torch.randn(32, 64, generator=torch.Generator().manual_seed(2)), form)
    good = multiply(library, ours, x)
    x[1, 40], x[3, 7], x[4] = torch.nan, torch.inf, 0
    result = multiply(library, ours, x)
    assert not result[1].isfinite().any()
    assert not result[3].isfinite().any()
    assert torch.equal(result[[0, 2]], good[[0, 2]])
    assert torch.equal(result[4], torch.zeros(32))


@given(seed=seeds, form=formats, outputs=st.integers(1, 70), inputs=st.integers(1, 5))
@example(seed=0, form="q4_0", outputs=1, inputs=1)
@settings(max_examples=40, deadline=None)
def test_rows_are_looked_up_as_they_are_stored(
    library: Library, seed: int, form: str, outputs: int, inputs: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    size = inputs * BLOCK if form in HEADS else inputs * 7
    ours, meant = packed(torch.randn(outputs, size, generator=generator), form)
    ids = torch.randint(0, outputs, (5,), generator=generator)
    torch.testing.assert_close(look_up(library, ours, ids), meant[ids].float(), atol=0, rtol=1e-6)


@pytest.mark.parametrize("level", sorted(LEVELS))
def test_any_float16_scale(library: Library, level: str) -> None:
    """Subnormal and huge ones, and both signs of zero."""
    library.use(level)
    scales = torch.tensor([6e-8, 6e-5, 65504.0, -0.0, 0.0, -1.5, 1.0, 3e-6] * 2, dtype=torch.float16)
    blocks = Blocks("q8_0", torch.full((16, 1, BLOCK), 1, dtype=torch.uint8), scales[:, None], None)
    result = multiply(library, pack_blocks(blocks), torch.ones(1, BLOCK))
    torch.testing.assert_close(result[0], scales.float() * BLOCK, atol=0, rtol=1e-6)


def test_what_a_format_takes_in_memory() -> None:
    weight = torch.randn(64, 96)
    sizes = {form: packed(weight, form)[0].bytes / weight.numel() for form in FORMATS}
    assert sizes == pytest.approx(
        {
            "float32": 4,
            "bfloat16": 2,
            "int8": 1 + 4 / 96,
            "q8_0": 1 + 2 / BLOCK,
            "q4_0": 1 / 2 + 2 / BLOCK,
            "q4_1": 1 / 2 + 4 / BLOCK,
        }
    )
