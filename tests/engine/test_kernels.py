"""The CUDA sources reach an installed copy, and what is in them copies blocks."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from engine.kernels import source

ROOT = Path(__file__).resolve().parents[2]

# The kernel's language, for a kernel whose threads don't meet: run one after another, they do the same.
SERIAL = """
struct Index { unsigned x, y, z; };
static Index blockIdx, threadIdx, blockDim, gridDim;
#define __global__
#include "kernel.cu"
extern "C" void launch(unsigned gx, unsigned gy, unsigned threads, void *cache, const long long *pairs,
                       long long units) {
    gridDim = {gx, gy, 1};
    blockDim = {threads, 1, 1};
    for (blockIdx.x = 0; blockIdx.x < gx; blockIdx.x++)
        for (blockIdx.y = 0; blockIdx.y < gy; blockIdx.y++)
            for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++)
                block_copy((Sixteen *)cache, pairs, units);
}
"""


def test_a_checkout_finds_its_sources() -> None:
    assert "__global__" in source("block_copy")
    with pytest.raises(FileNotFoundError, match=r"no absent\.cu in"):
        source("absent")


def test_a_wheel_holds_the_sources_and_no_package_named_cuda(tmp_path: Path) -> None:
    copy = tmp_path / "checkout"  # so that no build folder is left in ours
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "*.egg-info", "build", "node_modules", "tests"))
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        ".",
    ]
    subprocess.run(command, cwd=copy, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("sluice-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for path in (ROOT / "cuda").iterdir():
        assert f"engine/_kernels/{path.name}" in names
    assert not [name for name in names if name.startswith("cuda/")]
    assert {"server/__main__.py", "protocols/http1.py", "engine/__main__.py"} <= names


@pytest.mark.parametrize(("chunks", "threads"), [(1, 1), (1, 32), (3, 7)])
def test_block_copy_copies_whole_blocks_and_nothing_else(tmp_path: Path, chunks: int, threads: int) -> None:
    compiler = shutil.which("g++")
    assert compiler, "the kernel's test needs g++ (Debian package g++)"
    (tmp_path / "kernel.cu").write_text(source("block_copy"))
    (tmp_path / "serial.cpp").write_text(SERIAL)
    library = tmp_path / "serial.so"
    command = [compiler, "-O1", "-shared", "-fPIC", "-fsanitize=undefined", "-o", str(library), "serial.cpp"]
    subprocess.run(command, cwd=tmp_path, check=True)
    block_bytes, blocks = 16 * 40, 9
    cache = np.random.default_rng(0).integers(0, 256, (blocks, block_bytes), dtype=np.uint8)
    pairs = np.array([[0, 5], [3, 8], [0, 1]], dtype=np.int64)
    expected = cache.copy()
    for start, target in pairs:
        expected[target] = cache[start]
    launch = ctypes.CDLL(str(library)).launch
    launch.argtypes = [ctypes.c_uint] * 3 + [ctypes.c_void_p] * 2 + [ctypes.c_longlong]
    launch(len(pairs), chunks, threads, cache.ctypes.data, pairs.ctypes.data, block_bytes // 16)
    assert (cache == expected).all()
