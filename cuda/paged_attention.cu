// paged_attention: attention of sequences that compute one token each (decode) over the paged KV cache, and
// paged_attention_merge, which joins the parts of long sequences.
//
// Layout: q and out are [token][head][HEAD_DIM] (q's tokens `q_stride` numbers apart), the caches
// [block][kv_head][BLOCK_SIZE][HEAD_DIM], `tables` [sequence][table_stride] block numbers. Sequence s has its query in
// row rows[s] and sees its contexts[s] positions, or the last `window` of them if that isn't 0. `scales` [2][kv_head] are
// of keys and of values, for a cache of bytes (cache.cuh). KIND, CACHE, HEAD_DIM, BLOCK_SIZE and GROUP are compile-time
// constants. `partials` is [sequence][kv_head][split][GROUP][HEAD_DIM + 2] floats: sums, peak, weight.
// Launch: grid (blocks, kv_heads * ROW_TILES, sequences), 128 threads; split i of a sequence is `split_tokens` positions (a
// multiple of 32), and the splits that it has go round its blocks. With one split the result is written at once; otherwise
// merge follows, grid (kv_heads * GROUP, sequences), 128 threads, shared memory for a float a split and two a warp.
// `splits` may be more than a sequence has, as in a captured graph: those aren't written, and not read. A sequence of no
// positions gets zeros, so there may be more sequences too.
// Work: reads each key and value once (2 * context * HEAD_DIM numbers for a kv_head) for 2 * GROUP operations a number,
// 32 with the padding of an mma: bound by memory.
// Why: the query heads of a group share keys, so one block serves all of them, padded to the 16 rows of an mma. Warps
// take turns along the sequence and keep their own softmax, so there is no barrier before a split's end, and every lane has
// many independent 16-byte loads in flight. Splits are of one length whatever the batch is, so a row's arithmetic
// doesn't depend on its company, and a long sequence fills the GPU alone.
#include "attention.cuh"

constexpr int WARPS = 4;
constexpr int GROUP_ROWS = GROUP < 16 ? GROUP : 16;  // of a block
constexpr int ROW_TILES = (GROUP + 15) / 16;

typedef Rows<GROUP_ROWS> State;

constexpr int SUMS_STRIDE = HEAD_DIM + 1;  // of a row: the lanes of 8 rows, which store at once, meet different banks
constexpr int OWN_FLOATS =
    State::SHARED_FLOATS > GROUP_ROWS * SUMS_STRIDE ? State::SHARED_FLOATS : GROUP_ROWS * SUMS_STRIDE;

// What a warp tells the others in the end: in its own memory, which its state has no use for any more, the sums
// [GROUP_ROWS][SUMS_STRIDE], relative to its peaks; peaks and weights are [WARPS][GROUP_ROWS].
__device__ void tell_sums(State &state, float *own, float *peaks, float *weights) {
    const int warp = threadIdx.x / WARP_THREADS;
#pragma unroll
    for (int held = 0; held < State::HELD; held++) {
        const int row = State::row(held);
        const float weight = state.whole_sum(held);
        if (!inside(row, GROUP_ROWS)) continue;
        state.each(held, [&](int dim, float sum) { own[row * SUMS_STRIDE + dim] = sum; });
        if (!state.tells(held)) continue;
        peaks[warp * GROUP_ROWS + row] = state.peak[held];
        weights[warp * GROUP_ROWS + row] = weight;
    }
}

// The positions that a sequence sees: [from, context), in so many splits from `first` on.
struct Seen {
    int context, from, first, splits;

    __device__ Seen(int context, int window, int split_tokens)
        : context(context), from(window != 0 && context > window ? context - window : 0), first(from / 32 * 32),
          splits((context - first + split_tokens - 1) / split_tokens) {}
};

extern "C" __global__ void __launch_bounds__(128, 2)
    paged_attention(Number *__restrict__ out, float *__restrict__ partials, const Number *__restrict__ q,
                    const Cached *__restrict__ k_cache, const Cached *__restrict__ v_cache, const float *__restrict__ scales,
                    const int *__restrict__ tables, const int *__restrict__ rows, const int *__restrict__ contexts, int q_stride,
                    int kv_heads, int table_stride, int window, int split_tokens, int splits, float scale) {
    float *sums = reinterpret_cast<float *>(shared_memory());  // [WARPS][OWN_FLOATS]
    float *peaks = sums + WARPS * OWN_FLOATS;
    float *weights = peaks + WARPS * GROUP_ROWS;
    const int warp = threadIdx.x / WARP_THREADS;
    float *own = sums + warp * OWN_FLOATS;

    const int sequence = blockIdx.z;
    const int kv_head = blockIdx.y / ROW_TILES, first_row = blockIdx.y % ROW_TILES * 16;
    const int head = kv_head * GROUP + first_row;
    const Seen seen(contexts[sequence], window, split_tokens);
    const int row_count = min(GROUP_ROWS, GROUP - first_row);
    const Number *query = q + (long long)rows[sequence] * q_stride + (long long)head * HEAD_DIM;
    int froms[State::HELD], ends[State::HELD];
#pragma unroll
    for (int held = 0; held < State::HELD; held++) {
        froms[held] = seen.from;
        ends[held] = seen.context;
    }
    const float score_scale = scale * LOG2_E * (SCALED ? scales[kv_head] : 1.0f);
    const int *table = tables + (long long)sequence * table_stride;

    for (int split = blockIdx.x; split < (splits == 1 ? 1 : seen.splits); split += gridDim.x) {
        State state(own, [&](int row) { return inside(row, row_count) ? query + row * HEAD_DIM : nullptr; });
        const int start = seen.first + split * split_tokens, stop = min(start + split_tokens, seen.context);
        int first = start + warp * STEP;
        CacheTile::Blocks blocks(table, first, stop);
        while (first < stop) {
            const CacheTile tile(k_cache, v_cache, blocks, kv_heads, kv_head, first, seen.from, stop);
            first += WARPS * STEP;
            blocks = CacheTile::Blocks(table, first, stop);  // asked for before the keys are waited for
            state.take(tile, first - WARPS * STEP, froms, ends, score_scale);
        }
        tell_sums(state, own, peaks, weights);
        __syncthreads();  // all have told

        for (int at = threadIdx.x; at < row_count * HEAD_DIM; at += blockDim.x) {
            const int row = at / HEAD_DIM, dim = at % HEAD_DIM;
            float highest = nothing(), weight = 0.0f, sum = 0.0f;
            for (int each = 0; each < WARPS; each++) highest = fmaxf(highest, peaks[each * GROUP_ROWS + row]);
            for (int each = 0; each < WARPS; each++) {
                const float factor = exp2f(peaks[each * GROUP_ROWS + row] - finite(highest));
                weight += weights[each * GROUP_ROWS + row] * factor;
                sum += sums[each * OWN_FLOATS + row * SUMS_STRIDE + dim] * factor;
            }
            if (SCALED) sum *= scales[kv_heads + kv_head];
            if (splits == 1) {
                const long long target = ((long long)rows[sequence] * kv_heads * GROUP + head + row) * HEAD_DIM + dim;
                out[target] = rounded(mean(sum, weight));
                continue;
            }
            const long long part = ((long long)sequence * kv_heads + kv_head) * splits + split;
            float *partial = partials + (part * GROUP + first_row + row) * (HEAD_DIM + 2);
            partial[dim] = sum;
            if (dim == 0) {
                partial[HEAD_DIM] = highest;
                partial[HEAD_DIM + 1] = weight;
            }
        }
        __syncthreads();  // what they told is read
    }
}

extern "C" __global__ void __launch_bounds__(128, 2)
    paged_attention_merge(Number *__restrict__ out, const float *__restrict__ partials, const int *__restrict__ rows,
                          const int *__restrict__ contexts, int window, int split_tokens, int splits) {
    const int head = blockIdx.x, heads = gridDim.x, sequence = blockIdx.y;
    const int kv_head = head / GROUP, row = head % GROUP;
    const long long first = ((long long)sequence * (heads / GROUP) + kv_head) * splits * GROUP + row;
    const float *partial = partials + first * (HEAD_DIM + 2);
    const int stride = GROUP * (HEAD_DIM + 2), warp = threadIdx.x / WARP_THREADS;
    float *factors = reinterpret_cast<float *>(shared_memory());  // [splits]
    float *peaks = factors + splits, *weights = peaks + WARPS;
    const Seen seen(contexts[sequence], window, split_tokens);
    float highest = nothing(), weight = 0.0f;
    for (int split = threadIdx.x; split < seen.splits; split += blockDim.x) {
        highest = fmaxf(highest, partial[split * stride + HEAD_DIM]);
    }
    highest = maximum<WARP_THREADS>(highest);
    if (threadIdx.x % WARP_THREADS == 0) peaks[warp] = highest;
    __syncthreads();
    for (int each = 0; each < WARPS; each++) highest = fmaxf(highest, peaks[each]);
    for (int split = threadIdx.x; split < seen.splits; split += blockDim.x) {
        factors[split] = exp2f(partial[split * stride + HEAD_DIM] - finite(highest));
        weight += partial[split * stride + HEAD_DIM + 1] * factors[split];
    }
    weight = total<WARP_THREADS>(weight);
    if (threadIdx.x % WARP_THREADS == 0) weights[warp] = weight;
    __syncthreads();
    weight = 0.0f;
    for (int each = 0; each < WARPS; each++) weight += weights[each];
    Number *target = out + ((long long)rows[sequence] * heads + head) * HEAD_DIM;
    for (int dim = threadIdx.x; dim < HEAD_DIM; dim += blockDim.x) {
        float sum = 0.0f;
#pragma unroll 8
        for (int split = 0; split < seen.splits; split++) sum += partial[split * stride + dim] * factors[split];
        target[dim] = rounded(mean(sum, weight));
    }
}
