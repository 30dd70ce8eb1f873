// silu_mul: silu of the first half of each row times the second half (SwiGLU, arXiv 2002.05202).
//
// Layout: x [row][2 * size], out [row][size], without gaps. `size` is a multiple of 16 bytes. KIND is a compile-time
// constant.
// Launch: grid (rows, chunks), any number of threads; chunk c is computed by the CUDA blocks with blockIdx.y == c.
// Work: reads two numbers and writes one for about 4 operations: bound by memory.
// Why: torch takes two launches and moves half as much again.
#include "numbers.cuh"

extern "C" __global__ void __launch_bounds__(256) silu_mul(Numbers *__restrict__ out, const Numbers *__restrict__ x, int size) {
    const int vectors = size / NUMBERS_IN_16_BYTES;
    const Numbers *gate = x + (long long)blockIdx.x * 2 * vectors, *up = gate + vectors;
    for (int at = blockIdx.y * blockDim.x + threadIdx.x; at < vectors; at += gridDim.y * blockDim.x) {
        Numbers part = gate[at];
        const Numbers factor = up[at];
        for (int i = 0; i < NUMBERS_IN_16_BYTES; i++) {
            const float value = to_float(part.number[i]);
            part.number[i] = rounded(value / (1.0f + expf(-value)) * to_float(factor.number[i]));
        }
        out[(long long)blockIdx.x * vectors + at] = part;
    }
}
