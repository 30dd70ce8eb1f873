// Attention in bfloat16 by AMX, within kernels.cpp: the scores of a part and the mix of its values are products of tiles,
// and all between them is as for vectors. Weights are rounded to bfloat16 for the mix.
//
// The sums of a product are the same whatever tile they are in, and tokens are mixed by 32 from multiples of 32 on: so a
// sequence gets the same to the bit however it is cut here, too.

#pragma once

#include "tiles.h"

#ifdef SLUICE_TILES

namespace sluice {
namespace {

constexpr int64_t MIX_TOKENS = 32;  // one tile's depth

// Whether tiles can be read from a cache as it lies.
INLINE bool has_tiles(const Attend &a) { return a.head_dim % 32 == 0 && a.block_size % TILE_ROWS == 0; }

INLINE __m512i load_line(const void *from) { return _mm512_loadu_si512(from); }

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // in GCC's own header

// 16 rows of 16 words, `stride` bytes apart, to columns.
INLINE void transpose_words(const unsigned char *from, int64_t stride, unsigned char *to) {
    __m512i a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) a[i] = load_line(from + i * stride);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + 2 + j]);
            a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + 2 + j]);
        }
    // a[i + c] has column c of each lane's four, of rows i … i + 3.
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        const __m512i low = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x44), high = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xee);
        const __m512i more = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x44);
        const __m512i most = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xee);
        _mm512_store_si512(to + c * LINE, _mm512_shuffle_i32x4(low, more, 0x88));
        _mm512_store_si512(to + (4 + c) * LINE, _mm512_shuffle_i32x4(low, more, 0xdd));
        _mm512_store_si512(to + (8 + c) * LINE, _mm512_shuffle_i32x4(high, most, 0x88));
        _mm512_store_si512(to + (12 + c) * LINE, _mm512_shuffle_i32x4(high, most, 0xdd));
    }
}

#pragma GCC diagnostic pop

// scores[p * PART_TOKENS + i] of 16 keys, `dim` numbers apart, for up to 32 pairs.
INLINE void score_keys(const BFloat16 *keys, const BFloat16 *queries, int64_t pairs, int64_t dim, float *scores) {
    alignas(64) unsigned char columns[HEAD_DIM_MAX / 32 * TILE_BYTES];
    const int64_t stride = dim * static_cast<int64_t>(sizeof *keys), tiles = dim / 32;
    _tile_zero(0);
    _tile_zero(2);
    for (int64_t d = 0; d < tiles; d++) {
        transpose_words(reinterpret_cast<const unsigned char *>(keys + d * 32), stride, columns + d * TILE_BYTES);
        _tile_loadd(6, columns + d * TILE_BYTES, LINE);
        _tile_loadd(4, queries + d * 32, stride);
        _tile_dpbf16ps(0, 4, 6);
        if (pairs > TILE_ROWS) {
            _tile_loadd(5, queries + TILE_ROWS * dim + d * 32, stride);
            _tile_dpbf16ps(2, 5, 6);
        }
    }
    constexpr int64_t ROW = PART_TOKENS * static_cast<int64_t>(sizeof *scores);
    _tile_stored(0, scores, ROW);
    if (pairs > TILE_ROWS) _tile_stored(2, scores + TILE_ROWS * PART_TOKENS, ROW);
}

// Numbers d … d + 31 of 32 values, in pairs of tokens: a tile for each half. `count` of them are there.
INLINE void pair_values(const BFloat16 *cache, const int64_t *offsets, int64_t count, int64_t d, unsigned char *to) {
#pragma GCC unroll 4
    for (int64_t i = 0; i < TILE_ROWS; i++) {
        const __m512i none = _mm512_setzero_si512();
        const __m512i even = 2 * i < count ? load_line(cache + offsets[2 * i] + d) : none;
        const __m512i odd = 2 * i + 1 < count ? load_line(cache + offsets[2 * i + 1] + d) : none;
        _mm512_store_si512(to + i * LINE, _mm512_unpacklo_epi16(even, odd));
        _mm512_store_si512(to + TILE_BYTES + i * LINE, _mm512_unpackhi_epi16(even, odd));
    }
}

// sums[p * dim + d …] for numbers d … d + 31: weights [pairs, PART_TOKENS] · values.
INLINE void mix_values(const BFloat16 *cache, const int64_t *offsets, int64_t count, const BFloat16 *weights, int64_t pairs,
                       int64_t dim, int64_t d, float *sums) {
    alignas(64) unsigned char values[2 * TILE_BYTES];
    alignas(64) float mixed[4][TILE_ROWS * 16];
    constexpr int64_t ROW = PART_TOKENS * static_cast<int64_t>(sizeof *weights);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t t = 0; t < count; t += MIX_TOKENS) {
        pair_values(cache, offsets + t, count - t, d, values);
        _tile_loadd(6, values, LINE);
        _tile_loadd(7, values + TILE_BYTES, LINE);
        _tile_loadd(4, weights + t, ROW);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (pairs > TILE_ROWS) {
            _tile_loadd(5, weights + TILE_ROWS * PART_TOKENS + t, ROW);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, mixed[0], LINE);
    _tile_stored(1, mixed[1], LINE);
    _tile_stored(2, mixed[2], LINE);
    _tile_stored(3, mixed[3], LINE);
    // Fours of numbers went to the two tiles by turns.
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    for (int64_t p = 0; p < pairs; p++) {
        const float *row = mixed[p / TILE_ROWS * 2] + p % TILE_ROWS * 16;
        const __m512 even = _mm512_load_ps(row), odd = _mm512_load_ps(row + TILE_ROWS * 16);
        _mm512_storeu_ps(sums + p * dim + d, _mm512_permutex2var_ps(even, first, odd));
        _mm512_storeu_ps(sums + p * dim + d + 16, _mm512_permutex2var_ps(even, second, odd));
    }
}

// Positions begin … end - 1 of one part, from a multiple of MIX_TOKENS on.
INLINE void attend_part_by_tiles(const Attend &a, const Task &task, const BFloat16 *queries, int64_t begin, int64_t end,
                                 const Partial &to) {
    const int64_t dim = a.head_dim, count = end - begin;
    alignas(64) float scores[PAIRS_MAX * PART_TOKENS];
    alignas(64) BFloat16 weights[PAIRS_MAX * PART_TOKENS];
    int64_t offsets[PART_TOKENS];
    find_slots(a, task, begin, end, offsets);
    const auto *k_cache = static_cast<const BFloat16 *>(a.k_cache), *v_cache = static_cast<const BFloat16 *>(a.v_cache);
    fetch(k_cache, offsets, 0, count < AHEAD_TOKENS ? count : AHEAD_TOKENS, dim);
    for (int64_t t = 0; t < count; t += TILE_ROWS) {
        const int64_t ahead = t + AHEAD_TOKENS, next = ahead + TILE_ROWS < count ? ahead + TILE_ROWS : count;
        fetch(k_cache, offsets, ahead, next, dim);
        score_keys(k_cache + offsets[t], queries, task.pairs, dim, scores + t);
    }
    fetch(v_cache, offsets, 0, count, dim);
    const int64_t whole = (count + MIX_TOKENS - 1) / MIX_TOKENS * MIX_TOKENS;
    for (int64_t p = 0; p < task.pairs; p++) {
        float *row = scores + p * PART_TOKENS;
        for (int64_t t = 0; t < count; t += 16) _mm512_store_ps(row + t, _mm512_mul_ps(_mm512_load_ps(row + t), _mm512_set1_ps(a.scale)));
        weigh<16>(row, begin, end, seen(a, task, p), to.tops + p, to.totals + p);
        for (int64_t t = (count + 15) / 16 * 16; t < whole; t++) row[t] = 0;
        for (int64_t t = 0; t < whole; t += 32)
            _mm512_store_si512(weights + p * PART_TOKENS + t,
                               (__m512i)_mm512_cvtne2ps_pbh(_mm512_load_ps(row + t + 16), _mm512_load_ps(row + t)));
    }
    for (int64_t d = 0; d < dim; d += 32) mix_values(v_cache, offsets, count, weights, task.pairs, dim, d, to.sums);
}

}  // namespace
}  // namespace sluice

#endif
