// kv_write: rotates the queries and keys of a step's tokens by their positions (RoPE) and writes keys and values into
// their slots of the paged cache.
//
// Layout: q [token][head][HEAD_DIM], k and v [token][kv_head][HEAD_DIM], tokens `q_stride`, `k_stride`, `v_stride`
// numbers apart (parts of one product's rows); cos and sin [token][ROTARY_DIM / 2] floats; slots [token]: block *
// BLOCK_SIZE + place, below 0 for a token that isn't there (padding of a captured graph); the caches
// [block][kv_head][BLOCK_SIZE][HEAD_DIM]. q is rotated in place. Dimension i is paired with i + ROTARY_DIM / 2, as in
// Hugging Face checkpoints; those from ROTARY_DIM on stay as they are. KIND, HEAD_DIM, ROTARY_DIM and BLOCK_SIZE are
// compile-time constants, ROTARY_DIM twice a multiple of 16 bytes.
// Launch: grid (tokens), any number of threads.
// Work: reads q, k and v once and writes them once, 16 bytes at a time, with 3 operations a number: bound by memory.
// Why: rotated keys are needed in the cache alone, so writing them anywhere else first would cost their bytes twice
// more.
#include "numbers.cuh"

constexpr int VECTOR = NUMBERS_IN_16_BYTES;
constexpr int HALF = ROTARY_DIM / 2;
constexpr int PAIRS = HEAD_DIM / VECTOR / 2;  // units of work of a head: two vectors each
constexpr int TURNED = HALF / VECTOR;         // of these are rotated
static_assert(HEAD_DIM % (2 * VECTOR) == 0 && ROTARY_DIM % (2 * VECTOR) == 0, "heads must be cut into pairs of vectors");

// A unit's two vectors, from where to where.
__device__ void move(Number *target, const Number *source, int unit, bool turn, const float *cos, const float *sin) {
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
    *reinterpret_cast<Numbers *>(target + first) = left;
    *reinterpret_cast<Numbers *>(target + second) = right;
}

extern "C" __global__ void kv_write(Number *q, const Number *__restrict__ k, const Number *__restrict__ v,
                                    Number *__restrict__ k_cache, Number *__restrict__ v_cache, const float *__restrict__ cos,
                                    const float *__restrict__ sin, const long long *__restrict__ slots, int heads, int kv_heads,
                                    int q_stride, int k_stride, int v_stride) {
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
        move((key ? k_cache : v_cache) + row * HEAD_DIM, source, unit, key, own_cos, own_sin);
    }
}
