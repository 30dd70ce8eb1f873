// kv_write: rotates the queries and keys of a step's tokens by their positions (RoPE) and writes keys and values into
// their slots of the paged cache.
//
// Layout: q [token][head][HEAD_DIM], k and v [token][kv_head][HEAD_DIM], tokens `q_stride`, `k_stride`, `v_stride`
// numbers apart (parts of one product's rows); cos and sin [token][ROTARY_DIM / 2] floats; slots [token]: block *
// BLOCK_SIZE + place, below 0 for a token that isn't there (padding of a captured graph); the caches
// [block][kv_head][BLOCK_SIZE][HEAD_DIM]. q is rotated in place. Dimension i is paired with i + ROTARY_DIM / 2, as in
// Hugging Face checkpoints; those from ROTARY_DIM on stay as they are. `scales` [2][kv_head] are of
// keys and of values, for a cache of bytes (cache.cuh); numbers beyond 448 of them are stored as 448. KIND, CACHE,
// HEAD_DIM, ROTARY_DIM and BLOCK_SIZE are compile-time constants, ROTARY_DIM twice a multiple of 16 bytes.
// Launch: grid (tokens), any number of threads.
// Work: reads q, k and v once and writes them once, 16 bytes at a time, with 3 operations a number: bound by memory.
// Why: rotated keys are needed in the cache alone, so writing them anywhere else first would cost their bytes twice
// more.
#include "cache.cuh"

constexpr int VECTOR = NUMBERS_IN_16_BYTES;
constexpr int HALF = ROTARY_DIM / 2;
constexpr int PAIRS = HEAD_DIM / VECTOR / 2;  // units of work of a head: two vectors each
constexpr int TURNED = HALF / VECTOR;         // of these are rotated
static_assert(HEAD_DIM % (2 * VECTOR) == 0 && ROTARY_DIM % (2 * VECTOR) == 0, "heads must be cut into pairs of vectors");

struct alignas(VECTOR * sizeof(Cached)) CachedVector {
    Cached number[VECTOR];
};

__device__ void put(Number *target, const Numbers &vector, float) {
    *reinterpret_cast<Numbers *>(target) = vector;
}

#if CACHE == E4M3
__device__ void put(Cached *target, const Numbers &vector, float per_scale) {
    CachedVector bytes;
    for (int at = 0; at < VECTOR; at++) {
        bytes.number[at] = __nv_cvt_float_to_fp8(to_float(vector.number[at]) * per_scale, __NV_SATFINITE, __NV_E4M3);
    }
    *reinterpret_cast<CachedVector *>(target) = bytes;
}
#endif

// A unit's two vectors, from where to where.
template <class Target>
__device__ void move(Target *target, const Number *source, int unit, bool turn, const float *cos, const float *sin,
                     float per_scale = 1.0f) {
    const bool turned = turn && unit < TURNED;
    const int first = turned ? unit * VECTOR : turn ? ROTARY_DIM + (unit - TURNED) * 2 * VECTOR : unit * 2 * VECTOR;
    const int second = turned ? first + HALF : first + VECTOR;
    Numbers left = *reinterpret_cast<const Numbers *>(source + first);
    Numbers right = *reinterpret_cast<const Numbers *>(source + second);
    for (int at = 0; turned && at < VECTOR; at++) {
        const float x = to_float(left.number[at]), y = to_float(right.number[at]);
        const float c = cos[first + at], s = sin[first + at];
        left.number[at] = rounded(x * c - y * s);
        right.number[at] = rounded(y * c + x * s);
    }
    put(target + first, left, per_scale);
    put(target + second, right, per_scale);
}

extern "C" __global__ void kv_write(Number *q, const Number *__restrict__ k, const Number *__restrict__ v,
                                    Cached *__restrict__ k_cache, Cached *__restrict__ v_cache, const float *__restrict__ scales,
                                    const float *__restrict__ cos, const float *__restrict__ sin, const long long *__restrict__ slots,
                                    int heads, int kv_heads, int q_stride, int k_stride, int v_stride) {
    const long long token = blockIdx.x, slot = slots[token];
    if (inside(slot, 0)) return;
    const float *own_cos = cos + token * HALF, *own_sin = sin + token * HALF;
    for (int at = threadIdx.x; at < (heads + 2 * kv_heads) * PAIRS; at += blockDim.x) {
        const int head = at / PAIRS, unit = at % PAIRS;
        if (inside(head, heads)) {
            Number *query = q + token * q_stride + head * HEAD_DIM;
            move(query, query, unit, true, own_cos, own_sin);
            continue;
        }
        const bool key = inside(head, heads + kv_heads);
        const int kv_head = head - heads - (key ? 0 : kv_heads);
        const Number *source = (key ? k + token * k_stride : v + token * v_stride) + kv_head * HEAD_DIM;
        const long long row = (slot / BLOCK_SIZE * kv_heads + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE;
        const float per_scale = SCALED ? 1.0f / scales[(key ? 0 : kv_heads) + kv_head] : 1.0f;
        move((key ? k_cache : v_cache) + row * HEAD_DIM, source, unit, key, own_cos, own_sin, per_scale);
    }
}
