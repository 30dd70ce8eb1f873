// The C interface: picks the kernels for this processor, cuts each job, and runs the parts on torch's own threads.

#include "ops.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

using namespace sluice;

namespace {

// Attention to fewer keys than this isn't cut: waking the threads takes some microseconds.
constexpr int64_t KEYS_MIN = 512;

// A decode's context is spread over several tasks from so many parts on; fewer are over before a thread is awake.
constexpr int64_t SPREAD_PARTS_MIN = 2;

int64_t item_size(int64_t kind) { return kind ? 2 : 4; }

std::byte *at(const void *base, int64_t elements, int64_t kind) {
    return const_cast<std::byte *>(static_cast<const std::byte *>(base)) + elements * item_size(kind);
}

void store(const Attend &a) {
    const int64_t dim = a.head_dim, tokens = a.rows[a.slices];
    const size_t bytes = static_cast<size_t>(dim * item_size(a.kind));
    for (int64_t token = 0; token < tokens; token++) {
        const int64_t block = a.slots[token] / a.block_size, place = a.slots[token] % a.block_size;
        for (int64_t head = 0; head < a.kv_heads; head++) {
            const int64_t to = ((block * a.kv_heads + head) * a.block_size + place) * dim;
            std::memcpy(at(a.k_cache, to, a.kind), at(a.k, token * a.k_stride + head * dim, a.kind), bytes);
            std::memcpy(at(a.v_cache, to, a.kind), at(a.v, token * a.v_stride + head * dim, a.kind), bytes);
        }
    }
}

// The step's tasks. Consecutive tasks of one part each, by the same pairs, are to be merged; `keys` counts what all read.
std::vector<Task> cut(const Attend &a, int64_t &keys) {
    std::vector<Task> tasks;
    const int64_t shared = a.heads / a.kv_heads;
    for (int64_t slice = 0; slice < a.slices; slice++) {
        const int64_t count = a.rows[slice + 1] - a.rows[slice], pairs = count * shared;
        for (int64_t first = 0; first < pairs; first += PAIRS_MAX) {
            const int64_t taken = std::min(PAIRS_MAX, pairs - first);
            const int64_t start = a.contexts[slice] - count + first / shared + 1;
            const int64_t end = a.contexts[slice] - count + (first + taken - 1) / shared + 1;
            const int64_t begin = a.window ? std::max<int64_t>(start - a.window, 0) : 0;
            const int64_t first_part = begin / PART_TOKENS, end_part = (end + PART_TOKENS - 1) / PART_TOKENS;
            const bool spread = count == 1 && end_part - first_part >= SPREAD_PARTS_MIN;
            const int64_t step = spread ? 1 : end_part - first_part;
            keys += (end - begin) * a.kv_heads;
            for (int64_t head = 0; head < a.kv_heads; head++)
                for (int64_t part = first_part; part < end_part; part += step)
                    tasks.push_back({slice, head, first, taken, part, part + step});
        }
    }
    return tasks;
}

bool same_pairs(const Task &a, const Task &b) {
    return a.slice == b.slice && a.kv_head == b.kv_head && a.first_pair == b.first_pair;
}

void attend_stored(const Attend &a, int64_t threads) {
    int64_t keys = 0;
    const std::vector<Task> tasks = cut(a, keys);
    const int64_t shared = std::min(a.heads / a.kv_heads, PAIRS_MAX), size = shared * (a.head_dim + 2);
    // Only a decode's tasks, of at most `shared` pairs, are ever merged.
    std::vector<float> scratch;
    const auto count = static_cast<int64_t>(tasks.size());
    const auto alone = [&](int64_t i) {
        return (i == 0 || !same_pairs(tasks[i - 1], tasks[i])) && (i + 1 == count || !same_pairs(tasks[i], tasks[i + 1]));
    };
    bool spread = false;
    for (int64_t i = 0; i < count && !spread; i++) spread = !alone(i);
    if (spread) scratch.resize(static_cast<size_t>(count * size));
    const auto partial = [&](int64_t i) {
        float *at = scratch.data() + i * size;
        return Partial{at, at + shared, at + 2 * shared};
    };
    parallel(count, keys < KEYS_MIN ? 1 : threads, [&](int64_t i) {
        if (!alone(i)) return kernels->attend[a.kind](a, tasks[i], partial(i));
        float tops[PAIRS_MAX], totals[PAIRS_MAX];
        alignas(64) float sums[PAIRS_MAX * HEAD_DIM_MAX];
        kernels->attend[a.kind](a, tasks[i], {tops, totals, sums});
        kernels->finish[a.kind](a, tasks[i], {tops, totals, sums});
    });
    for (int64_t i = 0; i < count;) {
        int64_t next = i + 1;
        for (; next < count && same_pairs(tasks[i], tasks[next]); next++)
            kernels->merge(partial(i), partial(next), tasks[i].pairs, a.head_dim);
        if (next > i + 1) kernels->finish[a.kind](a, tasks[i], partial(i));
        i = next;
    }
}

bool has_avx512() {
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq");
#else
    return false;
#endif
}

void pick(int level) {
    kernels = base_kernels(), products = base_products();
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (level >= 1 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
        kernels = avx2_kernels(), products = avx2_products();
    if (level >= 2 && has_avx512()) kernels = avx512_kernels(), products = avx512_products();
    const bool vnni = has_avx512() && __builtin_cpu_supports("avx512vnni");
    if (level >= 3 && vnni) products = avx512_vnni_products();
    if (level >= 4 && vnni && __builtin_cpu_supports("avx512bf16")) products = avx512_bf16_products();
    if (level >= 5 && products == avx512_bf16_products() && amx_products())
        kernels = amx_kernels(), products = amx_products();
#endif
    (void)level;
}

}  // namespace

namespace sluice {

const Kernels *kernels = nullptr;
const Products *products = nullptr;

void attend(const Attend &a, int64_t threads) {
    store(a);
    attend_stored(a, threads);
}

}  // namespace sluice

// The best kernels up to `level` (0: the compiler's default target, 1: AVX2, FMA and F16C, 2: AVX-512, 3: with VNNI, 4: and
// BF16, 5: and AMX) that this processor runs; their name. `parallel` is GOMP_parallel, or null.
EXPORT const char *sluice_ops_init(int level, void *parallel) {
    std::memcpy(&gomp_parallel, &parallel, sizeof parallel);
    pick(level);
    return products->name;
}

EXPORT void sluice_attend(const Attend *step, const void *q, int64_t q_stride, const void *k, int64_t k_stride, const void *v,
                          int64_t v_stride, void *k_cache, void *v_cache, void *out, int64_t window, int64_t threads) {
    Attend a = *step;
    a.q = q, a.k = k, a.v = v, a.out = out;
    a.q_stride = q_stride, a.k_stride = k_stride, a.v_stride = v_stride;
    a.k_cache = k_cache, a.v_cache = v_cache;
    a.window = window;
    attend(a, threads);
}

EXPORT void sluice_norm(int64_t kind, void *x, const void *y, const void *weight, void *out, int64_t rows, int64_t size,
                        float eps, int64_t threads) {
    over_rows(rows, size, threads, [&](int64_t first, int64_t count) {
        const int64_t from = first * size;
        kernels->norm[kind](at(x, from, kind), y ? at(y, from, kind) : nullptr, weight, at(out, from, kind), count, size,
                            eps);
    });
}

EXPORT void sluice_rotate(int64_t kind, void *x, const float *cos, const float *sin, const void *weight, int64_t rows,
                          int64_t heads, int64_t head_dim, int64_t dim, int64_t stride, float eps, int64_t threads) {
    over_rows(rows, heads * head_dim, threads, [&](int64_t first, int64_t count) {
        kernels->rotate[kind](at(x, first * stride, kind), cos + first * dim, sin + first * dim, weight, count, heads,
                              head_dim, dim, stride, eps);
    });
}

EXPORT void sluice_silu_mul(int64_t kind, const void *x, void *out, int64_t rows, int64_t size, int64_t threads) {
    over_rows(rows, size, threads, [&](int64_t first, int64_t count) {
        kernels->silu_mul[kind](at(x, first * 2 * size, kind), at(out, first * size, kind), count, size);
    });
}
