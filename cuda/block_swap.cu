// block_swap: copies whole KV-cache blocks between two pools, one of which may be pinned host memory that the device
// sees.
//
// Layout: `target` and `source` are one layer's K or V of a pool each, [block][kv_head][token][head_dim], so one block
// is contiguous. `pairs` holds (source, target) block numbers; no target comes twice.
// Launch: grid (pairs, chunks), where chunk c of a block is copied by the CUDA blocks with blockIdx.y == c; any number
// of threads. On a side stream, so that a step's kernels go on beside it.
// The engine doesn't use it: what is evicted is computed again.
// Work: reads and writes each block's bytes once, 16 at a time; no operations: bound by the bus.
// Why: a pool's blocks lie apart, and a cudaMemcpyAsync for each block, layer, and of K and V costs more than its few
// KB.
struct alignas(16) Sixteen {
    unsigned int word[4];
};

// `block_units`: a block's size in units of 16 bytes.
extern "C" __global__ void block_swap(Sixteen *__restrict__ target, const Sixteen *__restrict__ source, const long long *pairs,
                                      long long block_units) {
    const Sixteen *from = source + pairs[2 * blockIdx.x] * block_units;
    Sixteen *to = target + pairs[2 * blockIdx.x + 1] * block_units;
    const long long stride = (long long)gridDim.y * blockDim.x;
    for (long long unit = (long long)blockIdx.y * blockDim.x + threadIdx.x; unit < block_units; unit += stride) {
        to[unit] = from[unit];
    }
}
