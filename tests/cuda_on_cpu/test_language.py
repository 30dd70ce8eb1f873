"""What takes a GPU's place in the kernels' tests: it runs CUDA's language, and it finds what is wrong in a kernel."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.cuda_kernels import E4M3
from tests.cuda_on_cpu.checks import decoded
from tests.cuda_on_cpu.emulator import ORDERS, Emulated, LaunchError, Sanitized

# `fault` breaks a kernel that is right with 0: sums of a warp's numbers, read in reverse from shared memory.
SUMS = """
extern "C" __global__ void sums(float *out, const float *in, int fault) {
    float *shared = reinterpret_cast<float *>(cuda_on_cpu::current->shared);
    const int thread = threadIdx.x, at = blockIdx.x * blockDim.x + thread;
    shared[thread] = in[at];
    if (fault != 1) __syncthreads();
    if (fault == 2 && thread == 3) return;
    float sum = shared[blockDim.x - 1 - thread];
    for (int with = 16; with > 0; with /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, with);
    if (fault == 3 && thread < 40) __syncthreads();
    if (fault == 4 && thread < 64) __syncthreads(); else if (fault == 4)
        __syncthreads();
    if (fault == 5) shared[thread + 1] = 1;
    out[fault == 6 ? at % 64 : fault == 7 ? at + 1 : at] = sum;
}
"""
MISC = """
extern "C" __global__ void misc(unsigned *out, float *sum, int *count) {
    const int lane = threadIdx.x % 32;
    out[3 * threadIdx.x] = __ballot_sync(0xffffffffu, lane % 3 == 0);
    out[3 * threadIdx.x + 1] = __shfl_sync(0xffffffffu, threadIdx.x * 10, 5);
    out[3 * threadIdx.x + 2] = __byte_perm(0x33221100, 0x77665544, 0x7632);
    atomicAdd(sum, 0.5f);
    atomicAdd(count, 2);
}
"""
EARLY = """
extern "C" __global__ void early(int *out, const int *in, int waits) {
    int *shared = reinterpret_cast<int *>(cuda_on_cpu::current->shared);
    cuda_on_cpu::copy_later(shared + threadIdx.x, in + threadIdx.x, 4, __FILE__, __LINE__);
    cuda_on_cpu::current->copy_group++;
    if (waits) cuda_on_cpu::copy_wait(0);
    out[threadIdx.x] = shared[threadIdx.x];
}
"""
PRODUCT = """
#include "warp.cuh"
extern "C" __global__ void product(float *c, const unsigned short *a, const unsigned short *b) {
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    unsigned left[4], right[2];
    for (int at = 0; at < 4; at++) {
        const unsigned short *from = a + (g + 8 * (at % 2)) * 16 + 2 * t + 8 * (at / 2);
        left[at] = from[0] | unsigned(from[1]) << 16;
    }
    for (int at = 0; at < 2; at++) {
        right[at] = b[(2 * t + 8 * at) * 8 + g] | unsigned(b[(2 * t + 8 * at + 1) * 8 + g]) << 16;
    }
    float sum[4] = {1, 1, 1, 1};
    multiply_add(sum, left, right[0], right[1]);
    for (int at = 0; at < 4; at++) c[(g + 8 * (at / 2)) * 8 + 2 * t + at % 2] = sum[at];
}
"""
BYTES = """
#include "cache.cuh"
extern "C" __global__ void bytes(float *out, const unsigned char *in) {
    const float2 both = __half22float2(halves_of(in[2 * threadIdx.x] | in[2 * threadIdx.x + 1] << 8));
    out[2 * threadIdx.x] = both.x;
    out[2 * threadIdx.x + 1] = both.y;
}
"""
NUMBERS = np.arange(256, dtype=np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kernels")
    for name, text in {"sums": SUMS, "misc": MISC, "early": EARLY}.items():
        (folder / f"{name}.cu").write_text(text)
    return folder


def launch(module: Emulated | Sanitized, fault: int) -> np.ndarray:
    out = np.zeros(256, np.float32)
    module.launch("sums", (2,), (128,), 512, [out, NUMBERS, np.int32(fault)])
    return out


@pytest.mark.parametrize("order", ORDERS)
def test_threads_meet_at_barriers_whatever_their_order(folder: Path, order: str) -> None:
    expected = NUMBERS.reshape(2, 4, 32)[:, ::-1].sum(-1).repeat(32, -1).ravel()
    assert (launch(Emulated("sums", {}, kernels=folder, order=order), 0) == expected).all()


def test_shared_memory_starts_as_nan(folder: Path) -> None:
    assert np.isnan(launch(Emulated("sums", {}, kernels=folder), 1)).any()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (2, r"divergent barrier in block \(0, 0, 0\): .*threads 3, .* have ended"),
        (3, r"threads 0, 1, 2, 3, 4, 5, … \(40\) wait for the block at sums.cu:\d+; threads 40, .* \(88\) have ended"),
        (4, r"threads 0, .* \(64\) wait for the block at sums.cu:(\d+); threads 64, .* \(64\) wait for the block at"),
    ],
)
def test_a_divergent_barrier_names_the_threads(folder: Path, fault: int, said: str) -> None:
    with pytest.raises(LaunchError, match=said):
        launch(Emulated("sums", {}, kernels=folder), fault)


def test_warp_functions_and_atomics(folder: Path) -> None:
    out, total, count = np.zeros((64, 3), np.uint32), np.zeros(1, np.float32), np.zeros(1, np.int32)
    Emulated("misc", {}, kernels=folder, order="shuffled").launch("misc", (1,), (64,), 0, [out, total, count])
    assert (out[:, 0] == sum(1 << lane for lane in range(0, 32, 3))).all()
    assert out[:, 1].tolist() == [50] * 32 + [370] * 32
    assert (out[:, 2] == 0x77663322).all()
    assert (total[0], count[0]) == (32, 128)


def test_a_copy_comes_as_late_as_its_wait_allows(folder: Path) -> None:
    early, numbers = Emulated("early", {}, kernels=folder), np.arange(32, dtype=np.int32)
    out = np.zeros(32, np.int32)
    early.launch("early", (1,), (32,), 128, [out, numbers, np.int32(1)])
    assert (out == numbers).all()
    early.launch("early", (1,), (32,), 128, [out, numbers, np.int32(0)])
    assert (out == -1).all()


def test_tensor_core_products_follow_their_fragments(folder: Path) -> None:
    (folder / "product.cu").write_text(PRODUCT)
    for name in ("warp.cuh", "numbers.cuh"):
        (folder / name).write_text((Path(__file__).parents[2] / "cuda" / name).read_text())
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(np.float16) for shape in ((16, 16), (16, 8)))
    c = np.zeros((16, 8), np.float32)
    Emulated("product", {"KIND": 2}, kernels=folder).launch("product", (1,), (32,), 0, [c, a, b])
    np.testing.assert_allclose(c, 1 + a.astype(np.float64) @ b.astype(np.float64), atol=1e-5)


def test_bytes_are_widened_exactly(folder: Path) -> None:
    """By the way that GPUs before sm_89 take; the others have an instruction. Every byte at either place."""
    (folder / "bytes.cu").write_text(BYTES)
    for name in ("cache.cuh", "warp.cuh", "numbers.cuh"):
        (folder / name).write_text((Path(__file__).parents[2] / "cuda" / name).read_text())
    kernel, codes = Emulated("bytes", {"KIND": 0, "CACHE": 3}, kernels=folder), np.arange(256, dtype=np.uint8)
    for given in (codes, codes[::-1].copy()):
        out = np.zeros(256, np.float32)
        kernel.launch("bytes", (1,), (128,), 0, [out, given])
        np.testing.assert_array_equal(out, decoded(given, E4M3).astype(np.float32))
        assert (np.signbit(out) == (given >= 128))[~np.isnan(out)].all()


def test_address_sanitizer_sees_shared_memory_and_buffers_end(folder: Path) -> None:
    module = Sanitized("sums", {}, "address", kernels=folder)
    assert (launch(module, 0) == launch(Emulated("sums", {}, kernels=folder), 0)).all()
    for fault in (5, 7):
        with pytest.raises(LaunchError, match="heap-buffer-overflow"):
            launch(module, fault)


def test_thread_sanitizer_sees_a_missing_barrier_and_blocks_that_collide(folder: Path) -> None:
    module = Sanitized("sums", {}, "thread", kernels=folder, order="shuffled")
    launch(module, 0)
    for fault in (1, 6):
        with pytest.raises(LaunchError, match="data race"):
            launch(module, fault)
