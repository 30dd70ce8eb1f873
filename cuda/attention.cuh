// One warp's part of attention: some query rows take in keys and values, a few positions at a time, by the online
// softmax (arXiv 1805.02867). Used by paged_attention.cu and paged_prefill.cu.
//
// Compile-time constants: KIND, CACHE, HEAD_DIM (a multiple of 16, of 32 above 128, at most 256), BLOCK_SIZE (a multiple of
// 16), GROUP (query heads that share one key-value head).
//
// `Rows<ROWS>` is the warp's state. A `Tile` is where STEP positions lie: key(t) and value(t) are the rows of its t-th
// position, and has(t) says whether they may be read. Slots that nobody wrote may hold NaN, and 0 × NaN is NaN, so what
// a tile doesn't have is taken as zeros.
//
// fp16 and bf16 go through the tensor cores (mma.m16n8k16, 16 rows). The order of the head's dimensions within a
// product is free as long as both sides agree, and so is the order of its columns. Both are chosen so that each lane
// reads 16 bytes in one piece from a key and from a value, straight into the registers where the product wants them: no
// transpose, no shuffle. float32 has no mma of its own precision (TF32 would lose 13 bits): a lane takes one position,
// with plain multiply-adds.
#pragma once

#include "cache.cuh"

static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM <= 256 && (HEAD_DIM <= 128 || HEAD_DIM % 32 == 0), "no such head");
static_assert(BLOCK_SIZE % 16 == 0, "a step of 16 positions must not cross blocks");

constexpr float LOG2_E = 1.44269504088896340736f;

#if KIND == FLOAT32
constexpr int STEP = 32;  // positions that a warp takes in at once
#else
constexpr int STEP = 16;
#endif

// The peak of a row that has seen no position: minus infinity.
__device__ inline float nothing() {
    return __uint_as_float(0xff800000u);
}

// A row's result. One that saw no position, of a sequence that a captured graph's batch has no use for, gets zeros.
__device__ inline float mean(float sum, float weight) {
    return weight == 0.0f ? 0.0f : sum / weight;
}

// A peak to subtract: of a row without a position every weight is exp2(-inf - 0) = 0, where -inf - -inf would be NaN.
__device__ inline float finite(float peak) {
    return peak == nothing() ? 0.0f : peak;
}

// Positions [first, first + STEP) of a sequence in the cache; those of [from, end) may be read.
struct CacheTile {
    static constexpr bool FAR = true;  // in global memory
    static constexpr int PARTS = STEP > BLOCK_SIZE ? 2 : 1;  // blocks that it touches

    struct Blocks {
        int number[PARTS];

        __device__ Blocks(const int *table, int first, int end) {
#pragma unroll
            for (int part = 0; part < PARTS; part++) {
                const int at = first + part * BLOCK_SIZE;
                number[part] = inside(at, end) ? table[at / BLOCK_SIZE] : 0;
            }
        }
    };
    const Cached *k, *v;
    long long start[PARTS];
    int first, from, end;

    __device__ CacheTile(const Cached *k_cache, const Cached *v_cache, const Blocks &blocks, int kv_heads, int head, int first,
                         int from, int end)
        : k(k_cache), v(v_cache), first(first), from(from), end(end) {
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            const int place = (first + part * BLOCK_SIZE) % BLOCK_SIZE;
            start[part] = (((long long)blocks.number[part] * kv_heads + head) * BLOCK_SIZE + place) * HEAD_DIM;
        }
    }

    __device__ long long row(int t) const {
        if constexpr (PARTS == 1) return start[0] + t * HEAD_DIM;
        return (t < BLOCK_SIZE ? start[0] : start[PARTS - 1]) + t % BLOCK_SIZE * HEAD_DIM;  // never an array in local memory
    }

    __device__ const Cached *key(int t) const {
        return k + row(t);
    }

    __device__ const Cached *value(int t) const {
        return v + row(t);
    }

    __device__ bool has(int t) const {
        return inside(first + t, end) && inside(from - 1, first + t);
    }
};

#if KIND == FLOAT32

// Every lane knows all rows' peaks; `sum` is of the positions that the lane took, `out` of the dimensions that it
// holds: 4 from 4 * lane on, and the same 128 dimensions further. `shared` belongs to the warp alone: SHARED_FLOATS of
// it.
template <int ROWS> struct Rows {
    static constexpr int HELD = ROWS;
    static constexpr int QUADS = (HEAD_DIM + 127) / 128;
    static constexpr int SHARED_FLOATS = ROWS * (HEAD_DIM + STEP);
    float *queries;  // [ROWS][HEAD_DIM]
    float *weights;  // [ROWS][STEP]
    float peak[ROWS], sum[ROWS], out[ROWS][4 * QUADS];
    int lane;

    __device__ static int row(int held) {
        return held;
    }

    // `query(row)` is null for a row that isn't there.
    template <class Query> __device__ Rows(float *shared, Query query) : queries(shared), weights(shared + ROWS * HEAD_DIM) {
        lane = threadIdx.x % WARP_THREADS;
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            const float *from = query(row);
            for (int dim = lane; dim < HEAD_DIM; dim += WARP_THREADS) {
                queries[row * HEAD_DIM + dim] = from ? from[dim] : 0.0f;
            }
            peak[row] = nothing();
            sum[row] = 0.0f;
            for (int at = 0; at < 4 * QUADS; at++) out[row][at] = 0.0f;
        }
        __syncwarp();
    }

    // Row r sees the positions [from[r], end[r]) of those at `first` and after; `scale` is for powers of 2.
    template <class Tile>
    __device__ void take(const Tile &tile, int first, const int (&from)[HELD], const int (&end)[HELD], float scale) {
        float score[ROWS] = {};
        if (tile.has(lane)) {
            const Cached *key = tile.key(lane);
            for (int dim = 0; dim < HEAD_DIM; dim += 4) {
                const float4 part = read_4(key + dim);
#pragma unroll
                for (int row = 0; row < ROWS; row++) {
                    const float4 query = *reinterpret_cast<const float4 *>(queries + row * HEAD_DIM + dim);
                    score[row] += part.x * query.x + part.y * query.y + part.z * query.z + part.w * query.w;
                }
            }
        }
        const int position = first + lane;
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            const bool seen = inside(position, end[row]) && inside(from[row] - 1, position);
            const float scaled = seen ? score[row] * scale : nothing();
            const float higher = fmaxf(peak[row], maximum<WARP_THREADS>(scaled));
            const float kept = exp2f(peak[row] - finite(higher));
            const float weight = exp2f(scaled - finite(higher));
            peak[row] = higher;
            sum[row] = sum[row] * kept + weight;
#pragma unroll
            for (int at = 0; at < 4 * QUADS; at++) out[row][at] *= kept;
            weights[row * STEP + lane] = weight;
        }
        __syncwarp();  // weights are written
        for (int t = 0; t < STEP; t++) {
            if (tile.has(t)) add_value(tile.value(t), t);
        }
        __syncwarp();  // weights are read
    }

    __device__ void add_value(const Cached *value, int t) {
#pragma unroll
        for (int quad = 0; quad < QUADS; quad++) {
            const int dim = 128 * quad + 4 * lane;
            if (!inside(dim, HEAD_DIM)) continue;
            const float4 part = read_4(value + dim);
#pragma unroll
            for (int row = 0; row < ROWS; row++) {
                const float weight = weights[row * STEP + t];
                out[row][4 * quad] += weight * part.x;
                out[row][4 * quad + 1] += weight * part.y;
                out[row][4 * quad + 2] += weight * part.z;
                out[row][4 * quad + 3] += weight * part.w;
            }
        }
    }

    // Whether this lane tells the others of a row, whose peak and sum several lanes know.
    __device__ bool tells(int held) const {
        return lane == held;
    }

    // The row's sum of weights, for every lane.
    __device__ float whole_sum(int held) {
        return total<WARP_THREADS>(sum[held]);
    }

    // Calls use(dimension, out) for what this lane holds of a row.
    template <class Use> __device__ void each(int held, Use use) {
#pragma unroll
        for (int at = 0; at < 4 * QUADS; at++) {
            const int dim = 128 * (at / 4) + 4 * lane + at % 4;
            if (inside(dim, HEAD_DIM)) use(dim, out[held][at]);
        }
    }
};

#else

// A lane holds rows g = lane / 4 and g + 8 (held 0 and 1): of the scores the columns 2t and 2t + 1 with t = lane % 4,
// so `sum` is of a part of the positions. Rows are always 16, whatever ROWS says; those that aren't there are zeros.
template <int ROWS> struct Rows {
    static constexpr int HELD = 2;
    static constexpr int SHARED_FLOATS = 0;
    static constexpr int WIDE = HEAD_DIM / 64 * 64;  // dimensions of values that are read 8 at a time
    static constexpr bool KEPT = HEAD_DIM <= 128;  // queries of longer heads leave no registers, so they are read again each time
    unsigned query[KEPT ? HEAD_DIM / 16 : 1][4];
    const Number *source[2];
    float peak[2], sum[2], out[HEAD_DIM / 8][4];
    int g, t;

    __device__ static int row(int held) {
        return threadIdx.x % WARP_THREADS / 4 + 8 * held;
    }

    // `query_of(row)` is null for a row that isn't there.
    template <class Query> __device__ Rows(float *, Query query_of) {
        g = threadIdx.x % WARP_THREADS / 4;
        t = threadIdx.x % 4;
#pragma unroll
        for (int held = 0; held < 2; held++) {
            source[held] = query_of(row(held));
            peak[held] = nothing();
            sum[held] = 0.0f;
        }
        if constexpr (KEPT) {
#pragma unroll
            for (int dim = 0; dim + 32 <= HEAD_DIM; dim += 32) read_query(dim, query[dim / 16], query[dim / 16 + 1]);
            if constexpr (HEAD_DIM % 32 != 0) read_last_query(query[HEAD_DIM / 16 - 1]);
        }
#pragma unroll
        for (int at = 0; at < HEAD_DIM / 8; at++) out[at][0] = out[at][1] = out[at][2] = out[at][3] = 0.0f;
    }

    // Operands of two products: of the 32 dimensions from `dim` on, 8 neighbours for each lane.
    __device__ void read_query(int dim, unsigned (&first)[4], unsigned (&second)[4]) const {
#pragma unroll
        for (int held = 0; held < 2; held++) {
            const Words<4> part =
                source[held] ? *reinterpret_cast<const Words<4> *>(source[held] + dim + 8 * t) : Words<4>{};
            first[held] = part.word[0];
            first[2 + held] = part.word[1];
            second[held] = part.word[2];
            second[2 + held] = part.word[3];
        }
    }

    // The operand of the last 16 dimensions where 32 don't divide the head, 4 neighbours for each lane.
    __device__ void read_last_query(unsigned (&operand)[4]) const {
#pragma unroll
        for (int held = 0; held < 2; held++) {
            const Number *from = source[held] + HEAD_DIM - 16 + 4 * t;
            const Words<2> part = source[held] ? *reinterpret_cast<const Words<2> *>(from) : Words<2>{};
            operand[held] = part.word[0];
            operand[2 + held] = part.word[1];
        }
    }

    // Row r sees the positions [from[r], end[r]) of those at `first` and after; `scale` is for powers of 2.
    template <class Tile>
    __device__ void take(const Tile &tile, int first, const int (&from)[HELD], const int (&end)[HELD], float scale) {
        float score[2][4] = {};
        multiply_keys(tile, score);
        unsigned weights[4];
#pragma unroll
        for (int held = 0; held < 2; held++) {
            float scaled[4];
#pragma unroll
            for (int at = 0; at < 4; at++) {
                const int position = first + 8 * (at / 2) + 2 * t + at % 2;
                const bool seen = inside(position, end[held]) && inside(from[held] - 1, position);
                scaled[at] = seen ? score[at / 2][2 * held + at % 2] * scale : nothing();
            }
            const float own = fmaxf(fmaxf(scaled[0], scaled[1]), fmaxf(scaled[2], scaled[3]));
            const float higher = fmaxf(peak[held], maximum<4>(own));
            const float kept = exp2f(peak[held] - finite(higher));
#pragma unroll
            for (int at = 0; at < 4; at++) scaled[at] = exp2f(scaled[at] - finite(higher));
            peak[held] = higher;
            sum[held] = sum[held] * kept + (scaled[0] + scaled[1]) + (scaled[2] + scaled[3]);
            weights[held] = packed(scaled[0], scaled[1]);
            weights[2 + held] = packed(scaled[2], scaled[3]);
#pragma unroll
            for (int at = 0; at < HEAD_DIM / 8; at++) {
                out[at][2 * held] *= kept;
                out[at][2 * held + 1] *= kept;
            }
        }
#pragma unroll
        for (int dim = 0; dim < WIDE; dim += 64) multiply_values<64>(tile, dim, weights);
        if constexpr (HEAD_DIM % 64 >= 32) multiply_values<32>(tile, WIDE, weights);
        if constexpr (HEAD_DIM % 32 != 0) multiply_values<16>(tile, HEAD_DIM - 16, weights);
    }

    template <int WORDS, class Tile> __device__ static Held<WORDS> read(const Tile &tile, const Cached *from, int position) {
        if constexpr (Tile::FAR) {
            return read_far<WORDS>(from, tile.has(position));
        } else {
            return read_near<WORDS>(from);
        }
    }

    // Scores of all STEP positions, 8 a product: lane (g, t) brings the g-th's key.
    template <class Tile> __device__ void multiply_keys(const Tile &tile, float (&score)[2][4]) {
#pragma unroll(KEPT ? 4 : 2)
        for (int dim = 0; dim + 32 <= HEAD_DIM; dim += 32) {
            unsigned first[4], second[4];
            if constexpr (!KEPT) read_query(dim, first, second);
            Held<4> keys[2];
#pragma unroll
            for (int half = 0; half < 2; half++) keys[half] = read<4>(tile, tile.key(8 * half + g) + dim + 8 * t, 8 * half + g);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const Words<4> part = widened<4>(keys[half]);
                multiply_add(score[half], KEPT ? query[dim / 16] : first, part.word[0], part.word[1]);
                multiply_add(score[half], KEPT ? query[dim / 16 + 1] : second, part.word[2], part.word[3]);
            }
        }
        if constexpr (HEAD_DIM % 32 != 0) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const Cached *key = tile.key(8 * half + g) + HEAD_DIM - 16 + 4 * t;
                const Words<2> part = widened<2>(read<2>(tile, key, 8 * half + g));
                multiply_add(score[half], query[HEAD_DIM / 16 - 1], part.word[0], part.word[1]);
            }
        }
    }

    // `WIDTH` dimensions of the 16 values from `dim` on: a lane reads WIDTH / 8 neighbours of each of its four positions, and
    // the g-th lanes' n-th numbers are the columns of the n-th product.
    template <int WIDTH, class Tile> __device__ void multiply_values(const Tile &tile, int dim, const unsigned (&weights)[4]) {
        constexpr int WORDS = WIDTH / 16;
        Held<WORDS> held[4];
        Words<WORDS> part[4];
#pragma unroll
        for (int at = 0; at < 4; at++) {
            const int position = 2 * t + at % 2 + 8 * (at / 2);
            held[at] = read<WORDS>(tile, tile.value(position) + dim + WIDTH / 8 * g, position);
        }
#pragma unroll
        for (int at = 0; at < 4; at++) part[at] = widened<WORDS>(held[at]);
#pragma unroll
        for (int word = 0; word < WORDS; word++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const unsigned halves = half ? 0x7632 : 0x5410;
                multiply_add(out[dim / 8 + 2 * word + half], weights,
                             __byte_perm(part[0].word[word], part[1].word[word], halves),
                             __byte_perm(part[2].word[word], part[3].word[word], halves));
            }
        }
    }

    // Whether this lane tells the others of a row, whose peak and sum several lanes know.
    __device__ bool tells(int) const {
        return t == 0;
    }

    // The row's sum of weights, for the lanes that hold it.
    __device__ float whole_sum(int held) {
        return total<4>(sum[held]);
    }

    // Calls use(dimension, out) for what this lane holds of a row.
    template <class Use> __device__ void each(int held, Use use) {
#pragma unroll
        for (int at = 0; at < HEAD_DIM / 8; at++) {
            const int dim = 8 * at;
            const int width = dim < WIDE ? 64 : HEAD_DIM % 64 >= 32 && dim < WIDE + 32 ? 32 : 16;
            const int start = width == 64 ? dim / 64 * 64 : width == 32 ? WIDE : HEAD_DIM - 16;
#pragma unroll
            for (int column = 0; column < 2; column++) {
                use(start + width / 8 * (2 * t + column) + (dim - start) / 8, out[at][2 * held + column]);
            }
        }
    }
};

#endif
