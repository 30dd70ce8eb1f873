// add_rms_norm: x += more, then out = x / rms(x) * weight, for each row (RMSNorm, arXiv 1910.07467, with the residual
// sum before).
//
// Layout: x, more and out are [row][size], without gaps; weight [size]; `more` may be null. `size` is a multiple of 16
// bytes. KIND is a compile-time constant.
// Launch: grid (rows), 256 threads; shared memory for one float a warp.
// Work: reads x, more and weight, writes x and out: 4 numbers moved for each of the row's, 5 operations: bound by
// memory.
// Why: at small batch a step's time is in launches, and this is one instead of two. The second pass finds the row in
// the L1 cache; each thread reads there only what it wrote itself.
#include "warp.cuh"

extern "C" __global__ void __launch_bounds__(256)
    add_rms_norm(Numbers *__restrict__ out, Numbers *x, const Numbers *__restrict__ more, const Numbers *__restrict__ weight,
                 int size, float eps) {
    float *sums = reinterpret_cast<float *>(shared_memory());
    const int vectors = size / NUMBERS_IN_16_BYTES, warps = blockDim.x / WARP_THREADS;
    Numbers *row = x + (long long)blockIdx.x * vectors;
    float sum = 0.0f;
    for (int at = threadIdx.x; at < vectors; at += blockDim.x) {
        Numbers part = row[at];
        if (more) {
            const Numbers added = more[(long long)blockIdx.x * vectors + at];
            for (int i = 0; i < NUMBERS_IN_16_BYTES; i++) {
                part.number[i] = rounded(to_float(part.number[i]) + to_float(added.number[i]));
            }
            row[at] = part;
        }
        for (int i = 0; i < NUMBERS_IN_16_BYTES; i++) sum += to_float(part.number[i]) * to_float(part.number[i]);
    }
    sum = total<WARP_THREADS>(sum);
    if (threadIdx.x % WARP_THREADS == 0) sums[threadIdx.x / WARP_THREADS] = sum;
    __syncthreads();
    float whole = 0.0f;
    for (int warp = 0; warp < warps; warp++) whole += sums[warp];
    const float factor = rsqrtf(whole / size + eps);
    for (int at = threadIdx.x; at < vectors; at += blockDim.x) {
        Numbers part = row[at];
        const Numbers scale = weight[at];
        for (int i = 0; i < NUMBERS_IN_16_BYTES; i++) {
            part.number[i] = rounded(to_float(part.number[i]) * factor * to_float(scale.number[i]));
        }
        out[(long long)blockIdx.x * vectors + at] = part;
    }
}
