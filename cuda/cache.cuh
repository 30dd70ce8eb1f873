// What the KV cache holds, and how kernels read it.
//
// CACHE is a compile-time constant: KIND, and a Cached is a Number; or E4M3, and it is a byte of OCP FP8 (3 bits of
// fraction, numbers up to 448) that stands for itself times the scale of its head. Every e4m3 number is one of fp16 and
// of bf16 too, so bytes are widened without a rounding, and products know nothing of them: the keys' scale goes into
// that of the scores, the values' scale into the result.
#pragma once

#include "warp.cuh"

#define E4M3 3

constexpr bool SCALED = CACHE == E4M3;

#if CACHE == E4M3
#include <cuda_fp8.h>
typedef __nv_fp8_storage_t Cached;

__device__ inline float2 floats_of(unsigned two_bytes) {
    return __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)two_bytes, __NV_E4M3)));
}
#else
typedef Number Cached;
#endif

constexpr int CACHED_IN_16_BYTES = 16 / sizeof(Cached);

#if KIND == FLOAT32
__device__ inline float4 read_4(const Cached *from) {
#if CACHE == E4M3
    const unsigned bytes = *reinterpret_cast<const unsigned *>(from);
    const float2 low = floats_of(bytes & 0xffff), high = floats_of(bytes >> 16);
    return float4{low.x, low.y, high.x, high.y};
#else
    return *reinterpret_cast<const float4 *>(from);
#endif
}
#else
// 2 * WORDS neighbours as Numbers, two in a word.
template <int WORDS> __device__ inline Words<WORDS> read_pairs(const Cached *from) {
#if CACHE == E4M3
    Words<WORDS> pairs;
    Words<(WORDS + 1) / 2> bytes{};
    if constexpr (WORDS == 1) {
        bytes.word[0] = *reinterpret_cast<const unsigned short *>(from);
    } else {
        bytes = *reinterpret_cast<const Words<WORDS / 2> *>(from);
    }
#pragma unroll
    for (int at = 0; at < WORDS; at++) {
        const unsigned two = bytes.word[at / 2] >> 16 * (at % 2) & 0xffff;
#if KIND == BFLOAT16
        const float2 both = floats_of(two);
        pairs.word[at] = packed(both.x, both.y);
#else
        const __half2_raw both = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)two, __NV_E4M3);
        pairs.word[at] = both.x | (unsigned)both.y << 16;
#endif
    }
    return pairs;
#else
    return *reinterpret_cast<const Words<WORDS> *>(from);
#endif
}
#endif
