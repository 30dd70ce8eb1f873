// What the translation units share: the kernels' arguments, and the table that each instruction set fills.
//
// A kernel is serial and works on a part of an operator's job; ops.cpp cuts the job and calls the kernels from threads.
// Types are named by `kind`: 0 is float32, 1 is bfloat16. All arithmetic is in float32.

#pragma once

#include <cstdint>

namespace sluice {

constexpr int KINDS = 2;

// Tokens of a sequence whose scores are computed together. Parts start at multiples of it, whoever computes them and
// with whatever else, so that what a sequence gets never depends on its company.
constexpr int64_t PART_TOKENS = 256;

// (query, head) pairs that share one pass over the keys: what all query heads of a key-value head need in a decode, and
// in a prefill as many queries as keep scores and sums in the first two cache levels.
constexpr int64_t PAIRS_MAX = 32;

// Bounds the stack that a task takes: about 170 KiB with it.
constexpr int64_t HEAD_DIM_MAX = 256;

// One layer of a step; see engine/cpu_ops/__init__.py for the shapes.
struct Attend {
    int64_t kind, slices, heads, kv_heads, head_dim, block_size, window, table_stride;
    float scale;
    const int64_t *rows, *contexts, *tables, *slots;
    const void *q, *k, *v;
    int64_t q_stride, k_stride, v_stride;  // elements from one token to the next
    void *k_cache, *v_cache;
    void *out;
};

// Some (query, head) pairs of one slice under one key-value head, over some of the parts of its context. Pair p is
// query p / shared and the head p % shared of those that share the key-value head.
struct Task {
    int64_t slice, kv_head, first_pair, pairs, first_part, end_part;
};

// A softmax that is under way over some of the keys: `sums` [pairs, head_dim] and `totals` [pairs] are relative to
// exp(`tops`) [pairs]; a pair that saw no key has the total 0 and the top -inf.
struct Partial {
    float *tops, *totals, *sums;
};

struct Kernels {
    const char *name;
    // Computes a task from nothing. The result stands for all of its parts.
    void (*attend[KINDS])(const Attend &, const Task &, const Partial &);
    // Adds a later part's partial result to that of the parts before.
    void (*merge)(const Partial &into, const Partial &from, int64_t pairs, int64_t head_dim);
    // Divides by the totals, and writes the pairs where they belong.
    void (*finish[KINDS])(const Attend &, const Task &, const Partial &);
    // x += y if there is a y; out = x / rms(x) * weight. Rows of `size`, without gaps.
    void (*norm[KINDS])(void *x, const void *y, const void *weight, void *out, int64_t rows, int64_t size, float eps);
    // In place, [rows, heads, head_dim] with `stride` elements from row to row: x / rms(x) * weight [heads, head_dim] for
    // each head if there is a weight; then numbers i and i + dim / 2 of each head are turned by the row's angle i.
    // cos and sin: [rows, dim], of which the first half of cos and the second half of sin are read.
    void (*rotate[KINDS])(void *x, const float *cos, const float *sin, const void *weight, int64_t rows, int64_t heads,
                          int64_t head_dim, int64_t dim, int64_t stride, float eps);
    // [rows, 2 * size] -> silu(first half) * second half, [rows, size].
    void (*silu_mul[KINDS])(const void *x, void *out, int64_t rows, int64_t size);
};

// Each is null where the compiler can't make it.
const Kernels *base_kernels();
const Kernels *avx2_kernels();
const Kernels *avx512_kernels();
const Kernels *amx_kernels();

}  // namespace sluice
