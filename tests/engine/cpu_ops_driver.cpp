// Runs every operator once over heap blocks of the exact sizes, for a build with sanitizers: a read or write beyond them
// ends it. argv[1] is the level.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "decoder.h"

extern "C" {
const char *sluice_ops_init(int level, void *parallel);
void sluice_attend(const sluice::Attend *, const void *q, int64_t, const void *k, int64_t, const void *v, int64_t,
                   void *k_cache, void *v_cache, void *out, int64_t window, int64_t threads);
void sluice_norm(int64_t kind, void *, const void *, const void *, void *, int64_t, int64_t, float, int64_t);
void sluice_rotate(int64_t kind, void *, const float *, const float *, const void *, int64_t, int64_t, int64_t, int64_t,
                   int64_t, float, int64_t);
void sluice_silu_mul(int64_t kind, const void *, void *, int64_t, int64_t, int64_t);
int64_t sluice_space(const sluice::Decoder *, int64_t rows);
void sluice_forward(const sluice::Decoder *, const sluice::Attend *, const int64_t *ids, const float *cos, const float *sin,
                    float *x, void *space, int64_t threads);
void sluice_logits(const sluice::Decoder *, float *x, int64_t rows, float *out, void *space, int64_t threads);
void sluice_multiply(const sluice::Product *, const void *x, int64_t kind, int64_t rows, void *out, int64_t out_kind,
                     int64_t threads);
void sluice_draw(const uint32_t *weights, int64_t rows, int64_t size, const int64_t *top_k, const double *top_p,
                 const float *min_p, const double *chances, int64_t *tokens, int64_t threads);
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

// A matrix in exactly the memory that its layout takes.
struct Matrix {
    std::vector<unsigned char> weights, scales, offsets;
    sluice::Product product;

    Matrix(int64_t format, int64_t outputs, int64_t inputs) {
        const sluice::Preparation how = sluice::PREPARATION[format];
        const bool four_bits = format == sluice::Q4_0 || format == sluice::Q4_1, blocks = how == sluice::AS_BLOCKS;
        const int64_t panels = (outputs + sluice::PANEL - 1) / sluice::PANEL;
        const int64_t row = sluice::prepared_bytes(how, inputs) / (four_bits ? 2 : 1);
        const int64_t spans = panels * sluice::PANEL * (blocks ? inputs / sluice::BLOCK : 1);
        weights = numbers(panels * sluice::PANEL * row / 4, 0);
        scales = numbers(blocks || format == sluice::INT8 ? spans : 0, blocks);
        offsets = numbers(format == sluice::Q4_1 ? spans : 0, 1);
        product = {format, inputs, outputs, weights.data(), scales.data(), offsets.data(), nullptr};
    }
};

static void multiply(int64_t format) {
    const bool blocks = sluice::PREPARATION[format] == sluice::AS_BLOCKS;
    for (int64_t outputs : {1, 17, 80, 200})
        for (int64_t inputs : {blocks ? 32 : 1, blocks ? 96 : 43})
            for (int64_t rows : {1, 7, 100})
                for (int64_t kind = 0; kind < 2; kind++) {
                    Matrix matrix(format, outputs, inputs);
                    auto x = numbers(rows * inputs, kind), out = numbers(rows * outputs, 1 - kind);
                    sluice_multiply(&matrix.product, x.data(), kind, rows, out.data(), 1 - kind, 2);
                }
}

// Two layers with keys and values of `kind`: a step of a whole prompt and one token of another.
static void decode(int64_t kind, int64_t format) {
    constexpr int64_t HIDDEN = 64, INNER = 96, HEADS = 4, KV_HEADS = 2, DIM = 16, VOCABULARY = 50, ROWS = 20;
    const int64_t width = (HEADS + 2 * KV_HEADS) * DIM;
    Matrix table(format, VOCABULARY, HIDDEN), qkv(format, width, HIDDEN), output(format, HIDDEN, HEADS * DIM);
    Matrix half(format, INNER, HIDDEN), down(format, HIDDEN, INNER);
    const sluice::Product both[] = {half.product, half.product};
    auto norm = numbers(HIDDEN, 0), qk_norm = numbers((HEADS + KV_HEADS) * DIM, kind);
    auto keys = numbers(4 * KV_HEADS * 16 * DIM, kind), values = keys;
    const auto *scale = reinterpret_cast<float *>(norm.data());
    const sluice::Layer layer = {scale, {&qkv.product, 1}, qk_norm.data(), {&output.product, 1}, scale, {both, 2},
                                 {&down.product, 1}, 0, keys.data(), values.data()};
    const sluice::Layer layers[] = {layer, layer};
    const sluice::Decoder decoder = {kind, 2, HIDDEN, INNER, HEADS, KV_HEADS, DIM, DIM, layers, &table.product, scale,
                                     {&table.product, 1}, 1e-5f};
    const std::vector<int64_t> rows = {0, ROWS - 1, ROWS}, contexts = {ROWS - 1, 9}, tables = {0, 1, 2, -1};
    std::vector<int64_t> slots, ids;
    for (int64_t i = 0; i < ROWS; i++) slots.push_back(i < ROWS - 1 ? i : 2 * 16 + 8), ids.push_back(i * 2);
    sluice::Attend step = {};
    step.kind = kind, step.slices = 2, step.heads = HEADS, step.kv_heads = KV_HEADS, step.head_dim = DIM;
    step.block_size = 16, step.table_stride = 2, step.scale = 0.25f;
    step.rows = rows.data(), step.contexts = contexts.data(), step.tables = tables.data(), step.slots = slots.data();
    auto angles = numbers(ROWS * DIM, 0), x = numbers(ROWS * HIDDEN, 0), out = numbers(ROWS * VOCABULARY, 0);
    std::vector<unsigned char> space(static_cast<size_t>(sluice_space(&decoder, ROWS)));
    const auto *turn = reinterpret_cast<float *>(angles.data());
    auto *hidden = reinterpret_cast<float *>(x.data());
    sluice_forward(&decoder, &step, ids.data(), turn, turn, hidden, space.data(), 2);
    sluice_logits(&decoder, hidden, ROWS, reinterpret_cast<float *>(out.data()), space.data(), 2);
}

// Rows of weights in [0.5, 1], of their bits at random, of zeros with a one at the end, and of nothing that is a weight.
static void draw(int64_t size) {
    std::vector<uint32_t> weights;
    for (int64_t row = 0; row < 4; row++)
        for (int64_t i = 0; i < size; i++) {
            const auto random = static_cast<uint32_t>(std::rand());
            const uint32_t kinds[] = {0x3f000000 | (random & 0x7fffff), random % 0x3f800001, 0, 0xffc00000 | random};
            weights.push_back(row == 2 && i == size - 1 ? 0x3f800000 : kinds[row]);
        }
    for (int64_t top_k : {int64_t{1}, (size + 1) / 2, size + 1})
        for (double top_p : {0.0, 0.5, 1 - 0x1p-53, 1.0})
            for (float min_p : {0.0f, 0.25f, 2.0f})
                for (double chance : {0.0, 0.7, 1 - 0x1p-53}) {
                    const std::vector<int64_t> most(4, top_k);
                    const std::vector<double> share(4, top_p), chances(4, chance);
                    const std::vector<float> least(4, min_p);
                    std::vector<int64_t> tokens(4);
                    sluice_draw(weights.data(), 4, size, most.data(), share.data(), least.data(), chances.data(),
                                tokens.data(), 2);
                }
}

int main(int, char **arguments) {
    std::puts(sluice_ops_init(std::atoi(arguments[1]), nullptr));
    for (int64_t size : {1, 63, 64, 65, 3000}) draw(size);
    for (int64_t format = 0; format < sluice::FORMATS; format++) {
        multiply(format);
        for (int64_t kind = 0; kind < 2; kind++) decode(kind, format);
    }
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
