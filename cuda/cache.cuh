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

// Two bytes as fp16, exactly: by an instruction from sm_89 on. Before, NVIDIA's header takes some 40 with branches for
// each; here a number's bits, in fp16's places, are a 256th of it, and those of a NaN are made to be one.
__device__ inline __half2 halves_of(unsigned two_bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    return __half2(__nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)two_bytes, __NV_E4M3));
#else
    const unsigned apart = (two_bytes & 0xff) | (two_bytes & 0xff00) << 8, sizes = apart & 0x007f007f;
    const unsigned nan = ((sizes + 0x00010001) & 0x00800080) >> 7;
    const unsigned bits = (apart & 0x00800080) << 8 | sizes << 7 | nan * 0x7fff;
    return __hmul2(*reinterpret_cast<const __half2 *>(&bits), __float2half2_rn(256.0f));
#endif
}
#else
typedef Number Cached;
#endif

constexpr int CACHED_IN_16_BYTES = 16 / sizeof(Cached);

#if KIND == FLOAT32
__device__ inline float4 read_4(const Cached *from) {
#if CACHE == E4M3
    const unsigned bytes = *reinterpret_cast<const unsigned *>(from);
    const float2 low = __half22float2(halves_of(bytes & 0xffff)), high = __half22float2(halves_of(bytes >> 16));
    return float4{low.x, low.y, high.x, high.y};
#else
    return *reinterpret_cast<const float4 *>(from);
#endif
}
#else
// 2 * WORDS neighbours as they are held: numbers, or bytes of which a single word's two are its lower half.
template <int WORDS> using Held = Words<SCALED ? (WORDS + 1) / 2 : WORDS>;

template <int WORDS> __device__ inline Held<WORDS> read_near(const Cached *from) {
    if constexpr (2 * WORDS * sizeof(Cached) == 2) {
        return Held<WORDS>{*reinterpret_cast<const unsigned short *>(from)};
    } else {
        return *reinterpret_cast<const Held<WORDS> *>(from);
    }
}

// Zeros where they aren't `there`. Bytes are read by one predicated load: behind a branch their widening would stand
// there too, so each load would be waited for before the next is asked for.
template <int WORDS> __device__ inline Held<WORDS> read_far(const Cached *from, bool there) {
#if defined(__CUDACC__) && CACHE == E4M3
    Held<WORDS> held{};
    if constexpr (WORDS == 4) {
        asm("{.reg .pred p; setp.ne.b32 p, %3, 0; @p ld.global.nc.v2.b32 {%0, %1}, [%2];}"
            : "+r"(held.word[0]), "+r"(held.word[1])
            : "l"(from), "r"((int)there));
    } else if constexpr (WORDS == 2) {
        asm("{.reg .pred p; setp.ne.b32 p, %2, 0; @p ld.global.nc.b32 %0, [%1];}"
            : "+r"(held.word[0])
            : "l"(from), "r"((int)there));
    } else {
        asm("{.reg .pred p; setp.ne.b32 p, %2, 0; @p ld.global.nc.u16 %0, [%1];}"
            : "+r"(held.word[0])
            : "l"(from), "r"((int)there));
    }
    return held;
#else
    return there ? read_near<WORDS>(from) : Held<WORDS>{};
#endif
}

// As Numbers, two in a word.
template <int WORDS> __device__ inline Words<WORDS> widened(const Held<WORDS> &held) {
#if CACHE == E4M3
    Words<WORDS> pairs;
#pragma unroll
    for (int at = 0; at < WORDS; at++) {
        const unsigned two = held.word[at / 2] >> 16 * (at % 2) & 0xffff;
#if KIND == BFLOAT16
        const float2 both = __half22float2(halves_of(two));
        pairs.word[at] = packed(both.x, both.y);
#else
        const __half2 both = halves_of(two);
        pairs.word[at] = *reinterpret_cast<const unsigned *>(&both);
#endif
    }
    return pairs;
#else
    return held;
#endif
}
#endif
