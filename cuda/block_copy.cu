// block_copy: copies whole KV-cache blocks, for copy-on-write of blocks that several sequences share.
//
// Layout: `cache` is one layer's K or V, [block][kv_head][token][head_dim], so one block is contiguous. `pairs` holds
// (source, target) block numbers, and no target is a source or another's target.
// Launch: grid (pairs, chunks), where chunk c of a block is copied by the CUDA blocks with blockIdx.y == c; any number
// of threads.
// The engine doesn't use it: its sequences share full blocks only, which nobody writes to again (engine/scheduler.py).
// Work: reads and writes each block's bytes once, 16 at a time; no operations: bound by memory.
// Why: all pairs of a step go in one launch, since a launch costs more than a small copy.

struct alignas(16) Sixteen {
    unsigned int word[4];
};

// `block_units`: a block's size in units of 16 bytes (block sizes are multiples of 16 tokens, so it always is one).
extern "C" __global__ void block_copy(Sixteen *cache, const long long *pairs, long long block_units) {
    const Sixteen *source = cache + pairs[2 * blockIdx.x] * block_units;
    Sixteen *target = cache + pairs[2 * blockIdx.x + 1] * block_units;
    const long long stride = (long long)gridDim.y * blockDim.x;
    for (long long unit = (long long)blockIdx.y * blockDim.x + threadIdx.x; unit < block_units; unit += stride) {
        target[unit] = source[unit];
    }
}
