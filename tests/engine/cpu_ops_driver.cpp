// Runs every operator once over heap blocks of the exact sizes, for a build with sanitizers: a read or write beyond them
// ends it. argv[1] is the level.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "kernels.h"

extern "C" {
const char *sluice_ops_init(int level, void *parallel);
void sluice_attend(const sluice::Attend *, const void *q, int64_t, const void *k, int64_t, const void *v, int64_t,
                   void *k_cache, void *v_cache, void *out, int64_t window, int64_t threads);
void sluice_norm(int64_t kind, void *, const void *, const void *, void *, int64_t, int64_t, float, int64_t);
void sluice_rotate(int64_t kind, void *, const float *, const float *, const void *, int64_t, int64_t, int64_t, int64_t,
                   int64_t, float, int64_t);
void sluice_silu_mul(int64_t kind, const void *, void *, int64_t, int64_t, int64_t);
}

static std::vector<unsigned char> numbers(int64_t count, int64_t kind) {
    std::vector<unsigned char> bytes(static_cast<size_t>(count * (kind ? 2 : 4)));
    for (auto &each : bytes) each = static_cast<unsigned char>(std::rand() & 0x3f);
    return bytes;
}

static void attend(int64_t kind, int64_t kv_heads, int64_t shared, int64_t dim, int64_t block_size, int64_t window) {
    const std::vector<int64_t> counts = {1, 1, 40, 1, 5}, contexts = {1, 600, 300, 257, 5};
    std::vector<int64_t> rows = {0}, tables, slots;
    int64_t most = (600 + block_size - 1) / block_size, used = 0;
    for (size_t s = 0; s < counts.size(); s++) {
        const int64_t needed = (contexts[s] + block_size - 1) / block_size;
        for (int64_t i = 0; i < most; i++) tables.push_back(i < needed ? used + i : -1);
        for (int64_t p = contexts[s] - counts[s]; p < contexts[s]; p++)
            slots.push_back((used + p / block_size) * block_size + p % block_size);
        used += needed;
        rows.push_back(rows.back() + counts[s]);
    }
    const int64_t tokens = rows.back(), heads = kv_heads * shared, row = (heads + 2 * kv_heads) * dim;
    auto qkv = numbers(tokens * row, kind), out = numbers(tokens * heads * dim, kind);
    auto keys = numbers(used * kv_heads * block_size * dim, kind), values = keys;
    sluice::Attend step = {};
    step.kind = kind, step.slices = 5, step.heads = heads, step.kv_heads = kv_heads, step.head_dim = dim;
    step.block_size = block_size, step.table_stride = most, step.scale = 0.1f;
    step.rows = rows.data(), step.contexts = contexts.data(), step.tables = tables.data(), step.slots = slots.data();
    const int64_t item = kind ? 2 : 4;
    sluice_attend(&step, qkv.data(), row, qkv.data() + heads * dim * item, row,
                  qkv.data() + (heads + kv_heads) * dim * item, row, keys.data(), values.data(), out.data(), window, 1);
}

int main(int, char **arguments) {
    std::puts(sluice_ops_init(std::atoi(arguments[1]), nullptr));
    for (int64_t kind = 0; kind < 2; kind++) {
        for (int64_t dim : {2, 12, 24, 64, 256})
            for (int64_t window : {0, 33}) {
                attend(kind, 2, 3, dim, 16, window);
                attend(kind, 1, 35, dim, 3, window);
            }
        for (int64_t size : {1, 15, 577})
            for (int64_t rows : {1, 70}) {
                auto x = numbers(rows * size, kind), y = x, out = x, weight = numbers(size, kind);
                auto wide = numbers(2 * rows * size, kind);
                sluice_norm(kind, x.data(), y.data(), weight.data(), out.data(), rows, size, 1e-5f, 2);
                sluice_silu_mul(kind, wide.data(), out.data(), rows, size, 2);
            }
        auto x = numbers(9 * 4 * 24, kind), weight = numbers(4 * 24, kind);
        auto cosines = numbers(9 * 12, 0), sines = numbers(9 * 12, 0);
        const auto *cos = reinterpret_cast<float *>(cosines.data()), *sin = reinterpret_cast<float *>(sines.data());
        sluice_rotate(kind, x.data(), cos, sin, weight.data(), 9, 4, 24, 12, 4 * 24, 1e-5f, 2);
        sluice_rotate(kind, x.data(), cos, sin, nullptr, 9, 4, 24, 12, 4 * 24, 1e-5f, 2);
    }
}
