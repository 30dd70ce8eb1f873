// kv_gather: reads keys and values from slots of the paged cache into rows; what kv_write wrote, in any order.
//
// Layout: the caches [block][kv_head][BLOCK_SIZE][HEAD_DIM], slots [token] as in kv_write.cu, k and v
// [token][kv_head][HEAD_DIM] without gaps. A token whose slot is below 0 gets zeros. KIND, HEAD_DIM and BLOCK_SIZE are
// compile-time constants.
// Launch: grid (tokens), any number of threads.
// The engine doesn't use it; tests read the cache by it.
// Work: reads and writes each number once, 16 bytes at a time; no operations: bound by memory.
// Why: a token's heads lie BLOCK_SIZE rows apart in the cache, so a CUDA block for each token reads whole rows of them.
#include "numbers.cuh"

constexpr int VECTORS = HEAD_DIM / NUMBERS_IN_16_BYTES;  // of a head

extern "C" __global__ void kv_gather(Numbers *__restrict__ k, Numbers *__restrict__ v, const Numbers *__restrict__ k_cache,
                                     const Numbers *__restrict__ v_cache, const long long *__restrict__ slots, int kv_heads) {
    const long long token = blockIdx.x, slot = slots[token];
    for (int at = threadIdx.x; at < kv_heads * VECTORS; at += blockDim.x) {
        const long long target = token * kv_heads * VECTORS + at;
        if (inside(slot, 0)) {
            *reinterpret_cast<Words<4> *>(k + target) = *reinterpret_cast<Words<4> *>(v + target) = Words<4>{};
            continue;
        }
        const long long row = (slot / BLOCK_SIZE * kv_heads + at / VECTORS) * BLOCK_SIZE + slot % BLOCK_SIZE;
        k[target] = k_cache[row * VECTORS + at % VECTORS];
        v[target] = v_cache[row * VECTORS + at % VECTORS];
    }
}
