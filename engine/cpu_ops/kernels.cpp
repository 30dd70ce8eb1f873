// The kernels but for the products, compiled once for each instruction set: SLUICE_LEVEL names it, SLUICE_LANES is how
// many floats its registers hold and SLUICE_PAIRS how many rows of sums fit in them.

#include "kernels.h"
#include "vectors.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

namespace sluice {
namespace {

constexpr float INFINITE = std::numeric_limits<float>::infinity();

// e^x for a number, or for each of a vector, by 2^n * e^r with |r| <= ln(2) / 2: Taylor's polynomial of degree 7, within
// 2 units in the last place. Below the smallest normal result 0; above the largest, the largest; a NaN stays one.
template <class F, class U>
INLINE F exponential(F x) {
    const F low = F{} - 87.3f, high = F{} + 88.3f;
    F y = x < low ? low : x;
    y = y > high ? high : y;
    const F shift = F{} + 12582912.0f;  // 1.5 * 2^23: added, it leaves the nearest whole number in the low bits
    const F shifted = y * 1.44269504f + shift;
    const F n = shifted - shift;
    const F r = y - n * 0.693359375f - n * -2.12194440e-4f;
    F sum = F{} + 1.0f / 5040;
    sum = sum * r + 1.0f / 720;
    sum = sum * r + 1.0f / 120;
    sum = sum * r + 1.0f / 24;
    sum = sum * r + 1.0f / 6;
    sum = sum * r + 0.5f;
    sum = sum * r + 1.0f;
    sum = sum * r + 1.0f;
    U exponent;
    std::memcpy(&exponent, &shifted, sizeof exponent);
    exponent = (exponent + 127) << 23;
    F power;
    std::memcpy(&power, &exponent, sizeof power);
    return x < low ? F{} : sum * power;
}

constexpr int from_first(int lane, int step, int lanes) { return lane & step ? lanes + lane - step : lane; }
constexpr int from_second(int lane, int step, int lanes) { return lane & step ? lanes + lane : lane + step; }

// Lanes without the bit `step` get a's sums of two lanes that differ in that bit, those with it get b's.
template <int S, int W, int... I>
INLINE typename Lanes<W>::F add_pairs(typename Lanes<W>::F a, typename Lanes<W>::F b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, b, from_first(I, S, W)...) + __builtin_shufflevector(a, b, from_second(I, S, W)...);
}

// Lane t of the result is the sum of the lanes of rows[t].
template <int W, int S = 1>
INLINE typename Lanes<W>::F sums_of(typename Lanes<W>::F *rows) {
    if constexpr (S == W) {
        return rows[0];
    } else {
        for (int i = 0; i < W / S / 2; i++)
            rows[i] = add_pairs<S, W>(rows[2 * i], rows[2 * i + 1], std::make_integer_sequence<int, W>());
        return sums_of<W, S * 2>(rows);
    }
}

// Rows of numbers in float32: `rows` themselves, or a copy of them in `space` [count, dim].
template <int W>
INLINE void widen_rows(const float *const *rows, int64_t count, int64_t, float *, const float **wide) {
    for (int64_t i = 0; i < count; i++) wide[i] = rows[i];
}

template <int W>
INLINE void widen_rows(const BFloat16 *const *rows, int64_t count, int64_t dim, float *space, const float **wide) {
    for (int64_t i = 0; i < count; i++) {
        wide[i] = space + i * dim;
        for (int64_t d = 0; d < dim; d += W) store(space + i * dim + d, load<W>(rows[i] + d));
    }
}

// Row d of `to` [head_dim, W] gets number d of each of the W keys.
template <int W>
INLINE void transpose(const float *const *keys, int64_t dim, float *to) {
    for (int64_t d = 0; d < dim; d += W) {
        float rows[W][W];
        for (int t = 0; t < W; t++) store(rows[t], load<W>(keys[t] + d));
        for (int i = 0; i < W; i++)
            for (int t = 0; t < W; t++) to[(d + i) * W + t] = rows[t][i];
    }
}

// Pairs from which on a transposed copy of the keys costs less than adding up the lanes of each score.
constexpr int64_t TRANSPOSE_PAIRS_MIN = 8;

// out[p] lane t: the products of key t and query p at places `first` … first + N - 1 of each W, added up as `sums_of` does.
template <int W, int P, int N>
INLINE void add_columns(const float *columns, const float *queries, int64_t dim, int64_t first, typename Lanes<W>::F *out) {
    typedef typename Lanes<W>::F F;
    if constexpr (N == 1) {
        for (int p = 0; p < P; p++) out[p] = F{};
        for (int64_t d = first; d < dim; d += W) {
            const F column = load<W>(columns + d * W);
            for (int p = 0; p < P; p++) out[p] += column * queries[p * dim + d];
        }
    } else {
        F more[P];
        add_columns<W, P, N / 2>(columns, queries, dim, first, out);
        add_columns<W, P, N / 2>(columns, queries, dim, first + N / 2, more);
        for (int p = 0; p < P; p++) out[p] += more[p];
    }
}

template <int W, int P>
INLINE void score_columns(const float *columns, const float *queries, int64_t dim, float *scores) {
    typename Lanes<W>::F sums[P];
    add_columns<W, P, W>(columns, queries, dim, 0, sums);
    for (int p = 0; p < P; p++) store(scores + p * PART_TOKENS, sums[p]);
}

// Scores of W keys: scores[p * PART_TOKENS + t] for pair p. Each is the same to the bit however many pairs there are: a
// sequence says the same whether its tokens are computed one by one or in chunks.
template <int W>
INLINE void score_tile(const float *const *keys, const float *queries, int64_t pairs, int64_t dim, float *scores) {
    typedef typename Lanes<W>::F F;
    if (pairs < TRANSPOSE_PAIRS_MIN) {
        for (int64_t p = 0; p < pairs; p++) {
            F sums[W] = {};
            for (int64_t d = 0; d < dim; d += W) {
                const F query = load<W>(queries + p * dim + d);
                for (int t = 0; t < W; t++) sums[t] += query * load<W>(keys[t] + d);
            }
            store(scores + p * PART_TOKENS, sums_of<W>(sums));
        }
        return;
    }
    float columns[HEAD_DIM_MAX * W];
    transpose<W>(keys, dim, columns);
    int64_t p = 0;
    for (; p + 4 <= pairs; p += 4) score_columns<W, 4>(columns, queries + p * dim, dim, scores + p * PART_TOKENS);
    for (; p < pairs; p++) score_columns<W, 1>(columns, queries + p * dim, dim, scores + p * PART_TOKENS);
}

// sums[P rows of dim, C vectors from d on] += weights [P, PART_TOKENS] · values
template <int W, int P, int C>
INLINE void mix_block(const float *const *values, int64_t count, const float *weights, int64_t dim, int64_t d, float *sums) {
    typedef typename Lanes<W>::F F;
    F block[P][C];
    for (int p = 0; p < P; p++)
        for (int c = 0; c < C; c++) block[p][c] = load<W>(sums + p * dim + d + c * W);
    for (int64_t t = 0; t < count; t++)
        for (int c = 0; c < C; c++) {
            const F value = load<W>(values[t] + d + c * W);
            for (int p = 0; p < P; p++) block[p][c] += value * weights[p * PART_TOKENS + t];
        }
    for (int p = 0; p < P; p++)
        for (int c = 0; c < C; c++) store(sums + p * dim + d + c * W, block[p][c]);
}

template <int W, int P>
INLINE void mix_rows(const float *const *values, int64_t count, const float *weights, int64_t dim, float *sums) {
    int64_t d = 0;
    for (; d + 4 * W <= dim; d += 4 * W) mix_block<W, P, 4>(values, count, weights, dim, d, sums);
    for (; d < dim; d += W) mix_block<W, P, 1>(values, count, weights, dim, d, sums);
}

template <int W>
INLINE void mix_tile(const float *const *values, int64_t count, const float *weights, int64_t pairs, int64_t dim,
                     float *sums) {
    int64_t p = 0;
    for (; p + SLUICE_PAIRS <= pairs; p += SLUICE_PAIRS)
        mix_rows<W, SLUICE_PAIRS>(values, count, weights + p * PART_TOKENS, dim, sums + p * dim);
    for (; p < pairs; p++) mix_rows<W, 1>(values, count, weights + p * PART_TOKENS, dim, sums + p * dim);
}

// Where the keys, or the values, of positions begin … end - 1 lie in their cache: offsets[t] for begin + t.
INLINE void find_slots(const Attend &a, const Task &task, int64_t begin, int64_t end, int64_t *offsets) {
    const int64_t *block = a.tables + task.slice * a.table_stride + begin / a.block_size;
    int64_t place = begin % a.block_size;
    for (int64_t t = begin; t < end; block++, place = 0) {
        const int64_t first = (*block * a.kv_heads + task.kv_head) * a.block_size;
        for (; place < a.block_size && t < end; place++, t++) offsets[t - begin] = (first + place) * a.head_dim;
    }
}

// Which positions a pair sees.
struct Seen {
    int64_t first, end;
};

INLINE Seen seen(const Attend &a, const Task &task, int64_t pair) {
    const int64_t shared = a.heads / a.kv_heads, count = a.rows[task.slice + 1] - a.rows[task.slice];
    const int64_t end = a.contexts[task.slice] - count + (task.first_pair + pair) / shared + 1;
    return {a.window && end > a.window ? end - a.window : 0, end};
}

// Turns one pair's scores of positions begin … end - 1 into weights relative to the largest; those that it doesn't see
// get none. The scores' buffer is padded to whole vectors.
template <int W>
INLINE void weigh(float *scores, int64_t begin, int64_t end, const Seen &seen, float *top, float *total) {
    typedef typename Lanes<W>::F F;
    typedef typename Lanes<W>::U U;
    const int64_t padded = (end - begin + W - 1) / W * W;
    const int64_t first = seen.first > begin ? seen.first - begin : 0;
    const int64_t last = seen.end < end ? seen.end - begin : end - begin;
    if (first >= last) {
        for (int64_t t = 0; t < padded; t++) scores[t] = 0;
        *top = -INFINITE;
        *total = 0;
        return;
    }
    for (int64_t t = 0; t < first; t++) scores[t] = -INFINITE;
    for (int64_t t = last; t < padded; t++) scores[t] = -INFINITE;
    F tops = F{} - INFINITE;
    for (int64_t t = 0; t < padded; t += W) {
        const F each = load<W>(scores + t);
        tops = each > tops ? each : tops;
    }
    float largest = tops[0];
    for (int i = 1; i < W; i++) largest = tops[i] > largest ? tops[i] : largest;
    F sums = {};
    for (int64_t t = 0; t < padded; t += W) {
        const F weight = exponential<F, U>(load<W>(scores + t) - largest);
        sums += weight;
        store(scores + t, weight);
    }
    float sum = 0;
    for (int i = 0; i < W; i++) sum += sums[i];
    *top = largest;
    *total = sum;
}

// Asks for the cache lines of rows `from` … `end` - 1, tokens that the arithmetic reaches soon. Blocks lie anywhere, so
// that the processor doesn't guess the next one: without this a decode waits for memory most of its time.
template <class T>
INLINE void fetch(const T *cache, const int64_t *offsets, int64_t from, int64_t end, int64_t dim) {
    constexpr int64_t LINE = 64 / sizeof(T);
    for (int64_t t = from; t < end; t++)
        for (int64_t d = 0; d < dim; d += LINE) __builtin_prefetch(cache + offsets[t] + d);
}

// Tokens between what is asked for and what is computed.
constexpr int64_t AHEAD_TOKENS = 32;

// Positions begin … end - 1 of one part.
template <int W, class T>
INLINE void attend_part(const Attend &a, const Task &task, const float *queries, int64_t begin, int64_t end,
                        const Partial &to) {
    const int64_t dim = a.head_dim;
    alignas(64) float scores[PAIRS_MAX * PART_TOKENS];
    alignas(64) float space[W * HEAD_DIM_MAX];
    const float *wide[W];
    int64_t offsets[PART_TOKENS];
    find_slots(a, task, begin, end, offsets);
    const T *const k_cache = static_cast<const T *>(a.k_cache), *const v_cache = static_cast<const T *>(a.v_cache);
    const int64_t count = end - begin;
    fetch(k_cache, offsets, 0, count < AHEAD_TOKENS ? count : AHEAD_TOKENS, dim);
    for (int64_t t = 0; t < count; t += W) {
        const int64_t ahead = t + AHEAD_TOKENS;
        if (ahead < count)
            fetch(k_cache, offsets, ahead, ahead + W < count ? ahead + W : count, dim);
        else
            fetch(v_cache, offsets, ahead - count, ahead - count + W < count ? ahead - count + W : count, dim);
        const T *rows[W];
        for (int i = 0; i < W; i++) rows[i] = k_cache + offsets[t + i < count ? t + i : count - 1];
        widen_rows<W>(rows, W, dim, space, wide);
        score_tile<W>(wide, queries, task.pairs, dim, scores + t);
    }
    for (int64_t p = 0; p < task.pairs; p++)
        weigh<W>(scores + p * PART_TOKENS, begin, end, seen(a, task, p), to.tops + p, to.totals + p);
    for (int64_t i = 0; i < task.pairs * dim; i++) to.sums[i] = 0;
    for (int64_t t = 0; t < count; t += W) {
        const int64_t ahead = t + AHEAD_TOKENS, left = count - t < W ? count - t : W;
        if (ahead < count) fetch(v_cache, offsets, ahead, ahead + W < count ? ahead + W : count, dim);
        const T *rows[W];
        for (int64_t i = 0; i < left; i++) rows[i] = v_cache + offsets[t + i];
        widen_rows<W>(rows, left, dim, space, wide);
        mix_tile<W>(wide, left, scores + t, task.pairs, dim, to.sums);
    }
}

}  // namespace
}  // namespace sluice

#include "attend_tiles.h"

namespace sluice {
namespace {

void merge(const Partial &into, const Partial &from, int64_t pairs, int64_t dim) {
    for (int64_t p = 0; p < pairs; p++) {
        const float before = into.tops[p], after = from.tops[p];
        if (from.totals[p] == 0) continue;
        if (into.totals[p] == 0) {
            into.tops[p] = after;
            into.totals[p] = from.totals[p];
            std::memcpy(into.sums + p * dim, from.sums + p * dim, static_cast<size_t>(dim) * sizeof(float));
            continue;
        }
        const float top = after > before ? after : before;
        const float old_scale = std::exp(before - top), new_scale = std::exp(after - top);
        into.tops[p] = top;
        into.totals[p] = into.totals[p] * old_scale + from.totals[p] * new_scale;
        float *sums = into.sums + p * dim;
        const float *more = from.sums + p * dim;
        for (int64_t d = 0; d < dim; d++) sums[d] = sums[d] * old_scale + more[d] * new_scale;
    }
}

// Calls attend_one(begin, end, to) for the task's parts, which begin at multiples of STEP: a position has the same lane
// whatever window the first pair has.
template <int64_t STEP, class Part>
INLINE void over_parts(const Attend &a, const Task &task, const Partial &to, const Part &attend_one) {
    const int64_t first = seen(a, task, 0).first / STEP * STEP, end = seen(a, task, task.pairs - 1).end;
    float tops[PAIRS_MAX], totals[PAIRS_MAX];
    alignas(64) float sums[PAIRS_MAX * HEAD_DIM_MAX];
    const Partial more = {tops, totals, sums};
    for (int64_t part = task.first_part; part < task.end_part; part++) {
        const int64_t begin = part * PART_TOKENS > first ? part * PART_TOKENS : first;
        const int64_t stop = (part + 1) * PART_TOKENS < end ? (part + 1) * PART_TOKENS : end;
        const bool fresh = part == task.first_part;
        attend_one(begin, stop, fresh ? to : more);
        if (!fresh) merge(to, more, task.pairs, a.head_dim);
    }
}

template <class T>
INLINE const T *query_of(const Attend &a, const Task &task, int64_t pair) {
    const int64_t shared = a.heads / a.kv_heads, query = (task.first_pair + pair) / shared;
    const int64_t head = task.kv_head * shared + (task.first_pair + pair) % shared;
    return static_cast<const T *>(a.q) + (a.rows[task.slice] + query) * a.q_stride + head * a.head_dim;
}

template <int W, class T>
void attend_lanes(const Attend &a, const Task &task, const Partial &to) {
    const int64_t dim = a.head_dim;
    alignas(64) float queries[PAIRS_MAX * HEAD_DIM_MAX];
    for (int64_t p = 0; p < task.pairs; p++) {
        const T *from = query_of<T>(a, task, p);
        for (int64_t d = 0; d < dim; d++) queries[p * dim + d] = widen(from[d]) * a.scale;
    }
    over_parts<W>(a, task, to, [&](int64_t begin, int64_t end, const Partial &sums) {
        attend_part<W, T>(a, task, queries, begin, end, sums);
    });
}

#ifdef SLUICE_TILES
void attend_tiles(const Attend &a, const Task &task, const Partial &to) {
    alignas(64) BFloat16 queries[PAIRS_MAX * HEAD_DIM_MAX];
    for (int64_t p = 0; p < task.pairs; p++)
        std::memcpy(queries + p * a.head_dim, query_of<BFloat16>(a, task, p),
                    static_cast<size_t>(a.head_dim) * sizeof *queries);
    Tiles tiles;
    tiles.use(task.pairs < TILE_ROWS ? task.pairs : TILE_ROWS, task.pairs > TILE_ROWS ? task.pairs - TILE_ROWS : 0, LINE);
    over_parts<MIX_TOKENS>(a, task, to, [&](int64_t begin, int64_t end, const Partial &sums) {
        attend_part_by_tiles(a, task, queries, begin, end, sums);
    });
}
#endif

template <class T>
void attend(const Attend &a, const Task &task, const Partial &to) {
#ifdef SLUICE_TILES
    if (std::is_same<T, BFloat16>::value && has_tiles(a)) return attend_tiles(a, task, to);
#endif
    if (SLUICE_LANES >= 16 && a.head_dim % 16 == 0) return attend_lanes<SLUICE_LANES, T>(a, task, to);
    if (SLUICE_LANES >= 8 && a.head_dim % 8 == 0) return attend_lanes<(SLUICE_LANES < 8 ? SLUICE_LANES : 8), T>(a, task, to);
    if (a.head_dim % 4 == 0) return attend_lanes<4, T>(a, task, to);
    attend_lanes<2, T>(a, task, to);
}

template <class T>
void finish(const Attend &a, const Task &task, const Partial &from) {
    const int64_t dim = a.head_dim, shared = a.heads / a.kv_heads;
    for (int64_t p = 0; p < task.pairs; p++) {
        const int64_t query = (task.first_pair + p) / shared, head = (task.first_pair + p) % shared;
        T *to = static_cast<T *>(a.out) + ((a.rows[task.slice] + query) * a.heads + task.kv_head * shared + head) * dim;
        for (int64_t d = 0; d < dim; d++) narrow(from.sums[p * dim + d] / from.totals[p], to[d]);
    }
}

// 1 / sqrt(mean of squares + eps). Sixteen sums, whatever the registers hold, so that the order of the additions is the
// same for all of them.
template <class T>
INLINE float inverse_rms(const T *x, int64_t size, float eps) {
    float sums[16] = {};
    int64_t i = 0;
    for (; i + 16 <= size; i += 16)
        for (int j = 0; j < 16; j++) sums[j] += widen(x[i + j]) * widen(x[i + j]);
    for (; i < size; i++) sums[0] += widen(x[i]) * widen(x[i]);
    float sum = 0;
    for (int j = 0; j < 16; j++) sum += sums[j];
    return 1.0f / std::sqrt(sum / static_cast<float>(size) + eps);
}

template <class T>
void norm(void *x_, const void *y_, const void *weight_, void *out_, int64_t rows, int64_t size, float eps) {
    const T *weight = static_cast<const T *>(weight_);
    for (int64_t row = 0; row < rows; row++) {
        T *x = static_cast<T *>(x_) + row * size, *out = static_cast<T *>(out_) + row * size;
        if (y_) {
            const T *y = static_cast<const T *>(y_) + row * size;
#pragma GCC ivdep
            for (int64_t i = 0; i < size; i++) narrow(widen(x[i]) + widen(y[i]), x[i]);
        }
        const float scale = inverse_rms(x, size, eps);
#pragma GCC ivdep
        for (int64_t i = 0; i < size; i++) narrow(widen(x[i]) * scale * widen(weight[i]), out[i]);
    }
}

template <class T>
void rotate(void *x_, const float *cos, const float *sin, const void *weight_, int64_t rows, int64_t heads,
            int64_t head_dim, int64_t dim, int64_t stride, float eps) {
    const int64_t half = dim / 2;
    for (int64_t row = 0; row < rows; row++, cos += dim, sin += dim)
        for (int64_t head = 0; head < heads; head++) {
            T *x = static_cast<T *>(x_) + row * stride + head * head_dim, *second = x + half;
            const float *turn = sin + half;
            float wide[HEAD_DIM_MAX];
            for (int64_t i = 0; i < head_dim; i++) wide[i] = widen(x[i]);
            if (weight_) {
                const T *weight = static_cast<const T *>(weight_) + head * head_dim;
                const float scale = inverse_rms(x, head_dim, eps);
                for (int64_t i = 0; i < head_dim; i++) wide[i] *= scale * widen(weight[i]);
                for (int64_t i = dim; i < head_dim; i++) narrow(wide[i], x[i]);
            }
#pragma GCC ivdep
            for (int64_t i = 0; i < half; i++) {
                narrow(wide[i] * cos[i] - wide[half + i] * turn[i], x[i]);
                narrow(wide[half + i] * cos[i] + wide[i] * turn[i], second[i]);
            }
        }
}

template <class T>
void silu_mul(const void *x_, void *out_, int64_t rows, int64_t size) {
    for (int64_t row = 0; row < rows; row++) {
        const T *gate = static_cast<const T *>(x_) + row * 2 * size, *up = gate + size;
        T *out = static_cast<T *>(out_) + row * size;
#pragma GCC ivdep
        for (int64_t i = 0; i < size; i++) {
            const float g = widen(gate[i]);
            narrow(g / (1.0f + exponential<float, uint32_t>(-g)) * widen(up[i]), out[i]);
        }
    }
}

#define SLUICE_TEXT(x) #x
#define SLUICE_NAME(level) SLUICE_TEXT(level)
#define SLUICE_JOINED(level) level##_kernels
#define SLUICE_FUNCTION(level) SLUICE_JOINED(level)

constexpr Kernels TABLE = {
    SLUICE_NAME(SLUICE_LEVEL),
    {attend<float>, attend<BFloat16>},
    merge,
    {finish<float>, finish<BFloat16>},
    {norm<float>, norm<BFloat16>},
    {rotate<float>, rotate<BFloat16>},
    {silu_mul<float>, silu_mul<BFloat16>},
};

}  // namespace

const Kernels *SLUICE_FUNCTION(SLUICE_LEVEL)() { return &TABLE; }

}  // namespace sluice
