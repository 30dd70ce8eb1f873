// The numbers of the KV cache and of activations, and how kernels read and write them.
//
// KIND is a compile-time constant of every kernel that touches numbers: FLOAT32, BFLOAT16 or FLOAT16. Arithmetic is in
// float; a Number is only stored.
#pragma once

#define FLOAT32 0
#define BFLOAT16 1
#define FLOAT16 2

#if KIND == BFLOAT16
#include <cuda_bf16.h>
typedef __nv_bfloat16 Number;
#elif KIND == FLOAT16
#include <cuda_fp16.h>
typedef __half Number;
#else
typedef float Number;
#endif

constexpr int NUMBERS_IN_16_BYTES = 16 / sizeof(Number);

// Read and written in one instruction, up to 16 bytes.
template <int COUNT> struct alignas(4 * COUNT) Words {
    unsigned word[COUNT];
};

struct alignas(16) Numbers {
    Number number[NUMBERS_IN_16_BYTES];
};

// Every bound test of a kernel is a call of this function, so that tests/cuda_on_cpu/mutate.py finds it and can take it
// away.
__device__ inline bool inside(long long at, long long end) {
    return at < end;
}

__device__ inline float to_float(float number) {
    return number;
}

__device__ inline void from_float(float &number, float value) {
    number = value;
}

#if KIND == BFLOAT16
__device__ inline float to_float(__nv_bfloat16 number) {
    return __bfloat162float(number);
}

__device__ inline void from_float(__nv_bfloat16 &number, float value) {
    number = __float2bfloat16_rn(value);
}
#elif KIND == FLOAT16
__device__ inline float to_float(__half number) {
    return __half2float(number);
}

__device__ inline void from_float(__half &number, float value) {
    number = __float2half_rn(value);
}
#endif

__device__ inline Number rounded(float value) {
    Number number;
    from_float(number, value);
    return number;
}
