// What the threads of a block do together: shared memory, reductions, asynchronous copies, tensor-core products.
//
// Inline PTX stands beside the calls that take its place where the source is compiled for the CPU (tests/cuda_on_cpu).
#pragma once

#include "numbers.cuh"

constexpr unsigned WHOLE_WARP = 0xffffffffu;
constexpr int WARP_THREADS = 32;

// The block's dynamic shared memory.
__device__ inline unsigned char *shared_memory() {
#ifdef __CUDACC__
    extern __shared__ __align__(16) unsigned char memory[];
    return memory;
#else
    return cuda_on_cpu::current->shared;
#endif
}

// Over the `LANES` neighbours that a lane shares all but its lowest bits with; every lane gets the result.
template <int LANES> __device__ inline float maximum(float value) {
#pragma unroll
    for (int with = 1; with < LANES; with *= 2) {
        value = fmaxf(value, __shfl_xor_sync(WHOLE_WARP, value, with));
    }
    return value;
}

template <int LANES, class Value> __device__ inline Value total(Value value) {
#pragma unroll
    for (int with = 1; with < LANES; with *= 2) {
        value += __shfl_xor_sync(WHOLE_WARP, value, with);
    }
    return value;
}

// Copies 16 bytes to shared memory, past the registers; done when `wait_for_copies` has waited for its group.
__device__ inline void copy_16_later(void *shared, const void *global) {
#ifdef __CUDACC__
    const unsigned address = (unsigned)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
#else
    cuda_on_cpu::copy_later(shared, global, 16, __FILE__, __LINE__);
#endif
}

// What was copied since the last call is a group.
__device__ inline void end_copy_group() {
#ifdef __CUDACC__
    asm volatile("cp.async.commit_group;" ::: "memory");
#else
    cuda_on_cpu::current->copy_group++;
#endif
}

// Until this thread's copies are done, but for those of its last `LEFT` groups.
template <int LEFT> __device__ inline void wait_for_copies() {
#ifdef __CUDACC__
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
#else
    cuda_on_cpu::copy_wait(LEFT);
#endif
}

#if KIND != FLOAT32
// Two numbers as an operand of `multiply_add`: the first in the low half.
__device__ inline unsigned packed(float first, float second) {
#if KIND == BFLOAT16
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
#else
    const __half2 pair = __floats2half2_rn(first, second);
#endif
    return *reinterpret_cast<const unsigned *>(&pair);
}

// sum += a b by one warp: a is 16 × 16, b is 16 × 8, the sums are float (PTX: mma.m16n8k16, row.col). With g = lane / 4
// and t = lane % 4 a lane holds of a: rows g, g + 8, g, g + 8 at columns 2t, 2t + 1, and in a2 and a3 8 columns
// further; of b: column g at rows 2t, 2t + 1 and 8 rows further; of the sums: rows g and g + 8 at columns 2t, 2t + 1.
__device__ inline void multiply_add(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#ifdef __CUDACC__
#if KIND == BFLOAT16
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#endif
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    const unsigned b[2] = {b0, b1};
    const auto number_of = [](unsigned short bits) { return to_float(*reinterpret_cast<const Number *>(&bits)); };
    cuda_on_cpu::multiply(sum, a, b, number_of, __FILE__, __LINE__);
#endif
}
#endif
