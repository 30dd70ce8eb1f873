"""NVIDIA's own compiler takes every kernel without a warning, and none spills or takes more registers than it did."""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import Path

import pytest

from engine.cuda_kernels import E4M3, KINDS, Shape
from tests.cuda_on_cpu import nvrtc
from tests.cuda_on_cpu.emulator import KERNELS

# One instance of each type; `python -m tests.cuda_on_cpu.nvrtc` compiles all.
SHAPES = [
    Shape("float32", heads=1, kv_heads=1, head_dim=64, rotary_dim=64, block_size=16),
    Shape("bfloat16", heads=4, kv_heads=1, head_dim=128, rotary_dim=128, block_size=16),
    Shape("float16", heads=7, kv_heads=1, head_dim=256, rotary_dim=256, block_size=32),
    Shape("bfloat16", heads=1, kv_heads=1, head_dim=128, rotary_dim=128, block_size=16, cache=E4M3),
]


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_kernels_compile_within_their_registers(architecture: str) -> None:
    table = nvrtc.read_table()
    found = [*nvrtc.plain_usages(architecture)]
    for shape in SHAPES:
        found += nvrtc.usages_of(shape, architecture)
    for key, usage in found:
        assert usage.spilled_bytes == 0, f"{key} spills {usage.spilled_bytes} bytes"
        assert usage.registers <= table[key][0], f"{key} takes {usage.registers} registers, not {table[key][0]}"


def test_the_table_holds_every_instance() -> None:
    table = nvrtc.read_table()
    kernels = {kernel for kernel, _, dim, _ in table if dim}
    assert kernels >= {"paged_attention", "paged_attention_merge", "paged_prefill", "kv_write", "kv_gather"}
    assert not any(spilled for _, spilled in table.values())
    wanted = {
        (kernel, kind, dim, architecture)
        for kernel in kernels
        for kind in nvrtc.KINDS_AND_CACHES
        for dim in nvrtc.HEAD_DIMS
        for architecture in nvrtc.ARCHITECTURES
        if kernel != "kv_gather" or "/" not in kind
    }
    assert wanted == {key for key in table if key[2]}


@pytest.mark.parametrize("path", sorted(KERNELS.glob("*.cu")), ids=lambda path: path.stem)
def test_a_kernel_s_file_opens_with_what_it_is(path: Path) -> None:
    """What it computes, its layout, its launch shape, its bytes and operations, and why this algorithm."""
    opening = list(takewhile(lambda line: line.startswith("//"), path.read_text().splitlines()))
    assert opening[0].startswith(f"// {path.stem}: ")
    words = [line.split()[1] for line in opening if re.match(r"// (Layout|Launch|Work|Why): ", line)]
    assert words == ["Layout:", "Launch:", "Work:", "Why:"]


def test_a_warning_is_an_error() -> None:
    kernel = 'extern "C" __global__ void kernel(int *out) { %s *out = 1; }'
    assert nvrtc.compile_text(kernel % "", (), "sm_90")[0].kernel == "kernel"
    with pytest.raises(nvrtc.CompileError, match="never referenced"):
        nvrtc.compile_text(kernel % "int unused;", (), "sm_90")


def test_sums_in_shared_memory_are_added_by_what_the_hardware_has() -> None:
    """An atomic addition of 64 bits there is a loop of compare-and-swap, which threads that meet go round by turns."""
    atomics = re.findall(r"\b(?:atom|red)\S*", nvrtc.ptx("sample", {"KIND": KINDS["float32"]}))
    assert len(atomics) >= 3
    assert not [each for each in atomics if "64" in each]


@pytest.mark.parametrize("head_dim", [80, 128])
def test_loads_of_bytes_stand_in_no_branch_with_what_is_made_of_them(head_dim: int) -> None:
    """Else each is waited for before the next is asked for."""
    shape = Shape("bfloat16", heads=4, kv_heads=1, head_dim=head_dim, rotary_dim=head_dim, block_size=16, cache=E4M3)
    keys = nvrtc.ptx("paged_attention", shape.constants()).partition("mma.sync")[0].rpartition("$L__")[2]
    assert len(re.findall(r"@p ld\.global\.nc\.v2\.b32", keys)) >= 2
