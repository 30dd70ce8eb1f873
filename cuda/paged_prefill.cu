// paged_prefill: causal attention of prompt chunks of any lengths over the paged KV cache, into which the chunk's own
// keys are written already. Sequences that compute one token may be among them.
//
// Layout: as in paged_attention.cu. Slice s is the rows `rows[s]` … `rows[s + 1] - 1` of q, the last positions of its
// contexts[s]. KIND, CACHE, HEAD_DIM, BLOCK_SIZE and GROUP are compile-time constants.
// Launch: grid (tiles, kv_heads), 128 threads; tiles [tile][2] holds a slice and the first of its packed rows: row p of
// a slice is head p % GROUP of the group at token p / GROUP. A tile has WARP_ROWS packed rows for each warp, so chunks
// need no padding beyond their last tile, and a group's heads share keys.
// Work: a tile reads the keys and values up to its last token once, for 2 operations a row and number: bound by
// arithmetic.
// Why: flash attention (arXiv 2307.08691): 4 warps of 16 rows share the keys and values of KEYS positions in shared
// memory, the next ones being copied (cp.async) while these are multiplied. Rows of shared memory are padded so that
// the 16-byte reads of 8 lanes meet 8 different groups of banks: keys are read by 2 neighbouring rows at once, values
// by every second row. float32 reads the cache directly; it is for exactness, not for speed.
#include "attention.cuh"


#if KIND == FLOAT32
constexpr int WARP_ROWS = 8;  // 16 would take more registers than a thread has
#else
constexpr int WARP_ROWS = 16;
constexpr int KEYS = 32;  // positions of a stage; two stages of the largest head take 71 KB, which GPUs from sm_80 on have
constexpr int PIECE = CACHED_IN_16_BYTES;
constexpr int PIECES = HEAD_DIM / PIECE;  // of 16 bytes in a row
// Of keys: a multiple of 4 pieces that isn't one of 8; of bytes, of which lanes read 8 at a time, half of that.
constexpr int KEY_STRIDE = PIECE * (SCALED ? (PIECES + 1) / 4 * 4 + 2 : (PIECES + 3) / 8 * 8 + 4);
constexpr int VALUE_STRIDE = PIECE * (PIECES + 1 - PIECES % 2);  // an odd number of pieces
constexpr int STAGE = KEYS * (KEY_STRIDE + VALUE_STRIDE);
static_assert(KEY_STRIDE >= HEAD_DIM && VALUE_STRIDE >= HEAD_DIM, "a row doesn't fit");

// Starts to copy positions [first, first + KEYS) into a stage; those outside of [from, end) become zeros.
__device__ void fill(Cached *stage, const Cached *k_cache, const Cached *v_cache, const int *table, int kv_heads, int head,
                     int first, int from, int end) {
    for (int at = threadIdx.x; at < KEYS * PIECES; at += blockDim.x) {
        const int t = at / PIECES, dim = at % PIECES * PIECE, position = first + t;
        Cached *key = stage + t * KEY_STRIDE + dim, *value = stage + KEYS * KEY_STRIDE + t * VALUE_STRIDE + dim;
        if (inside(position, end) && inside(from - 1, position)) {
            const long long block = table[position / BLOCK_SIZE];
            const long long at_cache = ((block * kv_heads + head) * BLOCK_SIZE + position % BLOCK_SIZE) * HEAD_DIM + dim;
            copy_16_later(key, k_cache + at_cache);
            copy_16_later(value, v_cache + at_cache);
        } else {
            *reinterpret_cast<Words<4> *>(key) = Words<4>{};
            *reinterpret_cast<Words<4> *>(value) = Words<4>{};
        }
    }
}

// STEP positions of a stage, from its `at`-th on.
struct StageTile {
    static constexpr bool FAR = false;
    const Cached *stage;
    int at;

    __device__ const Cached *key(int t) const {
        return stage + (at + t) * KEY_STRIDE;
    }

    __device__ const Cached *value(int t) const {
        return stage + KEYS * KEY_STRIDE + (at + t) * VALUE_STRIDE;
    }

    __device__ bool has(int) const {
        return true;
    }
};
#endif

typedef Rows<WARP_ROWS> State;

extern "C" __global__ void __launch_bounds__(128, 2)
    paged_prefill(Number *__restrict__ out, const Number *__restrict__ q, const Cached *__restrict__ k_cache,
                  const Cached *__restrict__ v_cache, const float *__restrict__ scales, const int *__restrict__ tables,
                  const int *__restrict__ tiles, const int *__restrict__ rows, const int *__restrict__ contexts, int q_stride,
                  int kv_heads, int table_stride, int window, float scale) {
    const int slice = tiles[2 * blockIdx.x], tile_row = tiles[2 * blockIdx.x + 1], kv_head = blockIdx.y;
    const int first_token = rows[slice], count = rows[slice + 1] - first_token;
    const int context = contexts[slice], before = context - count;
    const int packed_rows = count * GROUP;
    const int warp_row = tile_row + threadIdx.x / WARP_THREADS * WARP_ROWS;
    const long long q_start = (long long)first_token * q_stride + (long long)kv_head * GROUP * HEAD_DIM;
    State state(reinterpret_cast<float *>(shared_memory()) + threadIdx.x / WARP_THREADS * State::SHARED_FLOATS, [&](int row) {
        const int at = warp_row + row;
        return inside(at, packed_rows) ? q + q_start + (long long)(at / GROUP) * q_stride + at % GROUP * HEAD_DIM : nullptr;
    });
    int froms[State::HELD], ends[State::HELD];
#pragma unroll
    for (int held = 0; held < State::HELD; held++) {
        ends[held] = min(before + (warp_row + State::row(held)) / GROUP + 1, context);
        froms[held] = window != 0 ? max(ends[held] - window, 0) : 0;
    }
    // The first position that a row of the tile sees, and what the warp's rows see together.
    const int tile_from = window != 0 ? max(before + tile_row / GROUP + 1 - window, 0) : 0;
    const int tile_first = tile_from / STEP * STEP;
    const int warp_end = min(before + (warp_row + WARP_ROWS - 1) / GROUP + 1, context);
    const int warp_from = window != 0 ? max(before + warp_row / GROUP + 1 - window, 0) : 0;
    const int *table = tables + (long long)slice * table_stride;
    scale *= LOG2_E * (SCALED ? scales[kv_head] : 1.0f);

#if KIND == FLOAT32
    for (int first = tile_first; first < warp_end; first += STEP) {
        const CacheTile::Blocks blocks(table, first, warp_end);
        const CacheTile tile(k_cache, v_cache, blocks, kv_heads, kv_head, first, warp_from, warp_end);
        state.take(tile, first, froms, ends, scale);
    }
#else
    const int tile_end = min(before + (tile_row + (int)blockDim.x / WARP_THREADS * WARP_ROWS - 1) / GROUP + 1, context);
    Cached *stages = reinterpret_cast<Cached *>(shared_memory());
    fill(stages, k_cache, v_cache, table, kv_heads, kv_head, tile_first, tile_from, tile_end);
    end_copy_group();
    int turn = 0;
    for (int first = tile_first; first < tile_end; first += KEYS, turn ^= 1) {
        if (first + KEYS < tile_end) {
            fill(stages + (turn ^ 1) * STAGE, k_cache, v_cache, table, kv_heads, kv_head, first + KEYS, tile_from, tile_end);
        }
        end_copy_group();
        wait_for_copies<1>();
        __syncthreads();  // the stage is filled
        for (int at = 0; at < KEYS; at += STEP) {
            if (first + at < warp_end && warp_from < first + at + STEP) {  // what none of the rows sees is skipped
                state.take(StageTile{stages + turn * STAGE, at}, first + at, froms, ends, scale);
            }
        }
        __syncthreads();  // the stage is read, and may be filled
    }
#endif

#pragma unroll
    for (int held = 0; held < State::HELD; held++) {
        const int at = warp_row + State::row(held);
        const float weight = state.whole_sum(held);
        if (!inside(at, packed_rows)) continue;
        const float value_scale = SCALED ? scales[kv_heads + kv_head] : 1.0f;
        const long long token = first_token + at / GROUP;
        Number *target = out + ((token * kv_heads + kv_head) * GROUP + at % GROUP) * HEAD_DIM;
        state.each(held, [&](int dim, float sum) { target[dim] = rounded(sum * value_scale / weight); });
    }
}
