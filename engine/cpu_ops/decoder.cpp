// A model's step in one call: every layer, on one team of threads. Between the products all is float32, but for queries,
// keys and values.

#include "decoder.h"

#include "ops.h"

#include <cstddef>
#include <cstring>
#include <vector>

using namespace sluice;

namespace {

// A product of many rows is cut by rows too, so that the last panels keep all threads busy: at a multiple of the rows that
// the kernels take together.
constexpr int64_t SPAN_ROWS = 96;
// For each thread: enough that one which is late does less.
constexpr int64_t TASKS_PER_THREAD = 16;
// But a few microseconds of reading, so that taking a task costs nothing beside it.
constexpr int64_t TASK_BYTES_MIN = 96 * 1024;

constexpr uintptr_t ALIGNMENT = 64;

int64_t item_size(int64_t kind) { return kind ? 2 : 4; }

// Memory from one piece.
struct Carver {
    uintptr_t base;  // 0 to learn how much is taken
    uintptr_t taken = 0;

    template <class T>
    T *take(int64_t count) {
        const uintptr_t at = base + taken;
        taken += (static_cast<uintptr_t>(count) * sizeof(T) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
        return reinterpret_cast<T *>(at);
    }
};

// Activations of `rows` rows of up to `size` numbers, for every preparation.
struct Scratch {
    unsigned char *values;
    float *scales;
    int32_t *sums;

    Scratch(Carver &from, int64_t rows, int64_t size)
        : values(from.take<unsigned char>(rows * prepared_stride(AS_FLOAT32, size))),
          scales(from.take<float>(rows * (size / BLOCK + 1))),
          sums(from.take<int32_t>(rows * (size / BLOCK + 1))) {}

    Rows rows(Preparation how, int64_t size) const {
        return {values, prepared_stride(how, size), prepared_blocks(how, size), scales, sums};
    }
};

void multiply_part(const Product &p, const Rows &x, int64_t rows, void *out, int64_t kind, int64_t stride,
                   int64_t threads) {
    const int64_t panels = (p.outputs + PANEL - 1) / PANEL, unit = products->panels[p.format];
    const int64_t units = (panels + unit - 1) / unit;
    const int64_t unit_bytes = std::max<int64_t>(unit * PANEL * p.inputs * BITS[p.format] / 8, 1);
    const int64_t worth = std::min(TASK_BYTES_MIN / unit_bytes, units / threads);
    const int64_t width = std::max<int64_t>({units / (threads * TASKS_PER_THREAD), worth, 1}) * unit;
    const int64_t columns = (panels + width - 1) / width, spans = (rows + SPAN_ROWS - 1) / SPAN_ROWS;
    parallel(columns * spans, threads, [&](int64_t i) {
        const int64_t first = i / spans * width, row = i % spans * SPAN_ROWS, count = std::min(SPAN_ROWS, rows - row);
        products->multiply[p.format](p, x, {row, count, first, std::min(width, panels - first)}, out, kind, stride);
    });
}

// x [rows, inputs] of `kind` -> out [rows, all outputs] of `out_kind`.
void multiply(const Linear &linear, const Scratch &scratch, const void *x, int64_t kind, int64_t rows, void *out,
              int64_t out_kind, int64_t threads) {
    int64_t stride = 0;
    for (int64_t i = 0; i < linear.count; i++) stride += linear.parts[i].outputs;
    const int64_t size = linear.parts[0].inputs;
    auto *to = static_cast<std::byte *>(out);
    int prepared = PREPARATIONS;
    for (int64_t i = 0; i < linear.count; i++) {
        const Product &part = linear.parts[i];
        const Preparation how = PREPARATION[part.format];
        const Rows ready = scratch.rows(how, size);
        if (how != prepared)
            over_rows(rows, size, threads, [&](int64_t first, int64_t count) {
                products->prepare[how][kind](x, first, count, size, ready);
            });
        prepared = how;
        multiply_part(part, ready, rows, to, out_kind, stride, threads);
        to += part.outputs * item_size(out_kind);
    }
}

float from_half(uint16_t bits) {
    const uint32_t size = bits & 0x7fffu, sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
    uint32_t wide = size << 13;
    float number;
    std::memcpy(&number, &wide, sizeof number);
    number *= 0x1p112f;
    std::memcpy(&wide, &number, sizeof wide);
    wide = (size < 0x7c00 ? wide : size << 13 | 0x7f800000u) | sign;
    std::memcpy(&number, &wide, sizeof number);
    return number;
}

// Weight `input` of output `lane` of a panel.
float weight(const Product &p, int64_t panel, int64_t lane, int64_t input) {
    const Preparation how = PREPARATION[p.format];
    const auto *weights = static_cast<const unsigned char *>(p.weights);
    const bool four_bits = p.format == Q4_0 || p.format == Q4_1;
    const int64_t place = four_bits ? input / BLOCK * (BLOCK / 2) + input % (BLOCK / 2) : input;
    const int64_t groups = prepared_bytes(how, p.inputs) / (four_bits ? 8 : 4);
    const unsigned char *four = weights + ((panel * groups + place / GROUP[how]) * PANEL + lane) * 4;
    if (how == AS_FLOAT32 || how == AS_BFLOAT16) {
        uint32_t bits;
        std::memcpy(&bits, four, sizeof bits);
        if (how == AS_BFLOAT16) bits = place % 2 ? bits & 0xffff0000u : bits << 16;
        float number;
        std::memcpy(&number, &bits, sizeof number);
        return number;
    }
    const int byte = four[place % 4];
    const int stored = !four_bits ? byte : input % BLOCK < BLOCK / 2 ? byte & 15 : byte >> 4;
    const auto number = static_cast<float>(stored - static_cast<int>(ZERO[p.format]));
    if (how == AS_SPANS) return number * static_cast<const float *>(p.scales)[panel * PANEL + lane];
    const int64_t at = (panel * (p.inputs / BLOCK) + input / BLOCK) * PANEL + lane;
    const float scaled = number * from_half(static_cast<const uint16_t *>(p.scales)[at]);
    return p.format == Q4_1 ? scaled + from_half(static_cast<const uint16_t *>(p.offsets)[at]) : scaled;
}

// Row `output` of the weights.
void look_up(const Product &p, int64_t output, float *to) {
    for (int64_t i = 0; i < p.inputs; i++) to[i] = weight(p, output / PANEL, output % PANEL, i);
}

// The memory of a step of so many rows.
struct Space {
    Carver carver;
    Scratch scratch;
    float *normed, *more, *wide, *gated;
    unsigned char *heads, *mixed;

    Space(const Decoder &d, int64_t rows, void *base)
        : carver{reinterpret_cast<uintptr_t>(base)},
          scratch(carver, rows, std::max({d.hidden, d.inner, d.heads * d.head_dim})),
          normed(carver.take<float>(rows * d.hidden)),
          more(carver.take<float>(rows * d.hidden)),
          wide(carver.take<float>(rows * d.inner * 2)),
          gated(carver.take<float>(rows * d.inner)),
          heads(carver.take<unsigned char>(rows * (d.heads + 2 * d.kv_heads) * d.head_dim * item_size(d.kind))),
          mixed(carver.take<unsigned char>(rows * d.heads * d.head_dim * item_size(d.kind))) {}
};

// x += more if there is any; out = x / rms(x) * weight.
void norm(const Decoder &d, float *x, const float *more, const float *weight, float *out, int64_t rows, int64_t threads) {
    over_rows(rows, d.hidden, threads, [&](int64_t first, int64_t count) {
        const int64_t from = first * d.hidden;
        kernels->norm[0](x + from, more ? more + from : nullptr, weight, out + from, count, d.hidden, d.eps);
    });
}

void attention(const Decoder &d, const Layer &layer, const Attend &step, const float *cos, const float *sin,
               const Space &space, int64_t rows, int64_t threads) {
    const int64_t item = item_size(d.kind), dim = d.head_dim, stride = (d.heads + 2 * d.kv_heads) * dim;
    over_rows(rows, stride, threads, [&](int64_t first, int64_t count) {
        kernels->rotate[d.kind](space.heads + first * stride * item, cos + first * d.rotary_dim, sin + first * d.rotary_dim,
                                layer.qk_norm, count, d.heads + d.kv_heads, dim, d.rotary_dim, stride, d.eps);
    });
    Attend a = step;
    a.q = space.heads, a.k = space.heads + d.heads * dim * item, a.v = space.heads + (d.heads + d.kv_heads) * dim * item;
    a.q_stride = a.k_stride = a.v_stride = stride;
    a.k_cache = layer.k_cache, a.v_cache = layer.v_cache, a.window = layer.window;
    a.out = space.mixed;
    attend(a, threads);
}

void forward(const Decoder &d, const Attend &step, const int64_t *ids, const float *cos, const float *sin, float *x,
             const Space &space, int64_t threads) {
    const int64_t rows = step.rows[step.slices];
    over_rows(rows, d.hidden, threads, [&](int64_t first, int64_t count) {
        for (int64_t row = first; row < first + count; row++) look_up(*d.embedding, ids[row], x + row * d.hidden);
    });
    const float *more = nullptr;  // the last product's output, which the next norm adds to x
    for (int64_t index = 0; index < d.layers; index++, more = space.more) {
        const Layer &layer = d.layer[index];
        norm(d, x, more, layer.attention_norm, space.normed, rows, threads);
        multiply(layer.qkv, space.scratch, space.normed, 0, rows, space.heads, d.kind, threads);
        attention(d, layer, step, cos, sin, space, rows, threads);
        multiply(layer.output, space.scratch, space.mixed, d.kind, rows, space.more, 0, threads);
        norm(d, x, space.more, layer.mlp_norm, space.normed, rows, threads);
        multiply(layer.gate_up, space.scratch, space.normed, 0, rows, space.wide, 0, threads);
        over_rows(rows, d.inner, threads, [&](int64_t first, int64_t count) {
            kernels->silu_mul[0](space.wide + first * 2 * d.inner, space.gated + first * d.inner, count, d.inner);
        });
        multiply(layer.down, space.scratch, space.gated, 0, rows, space.more, 0, threads);
    }
    if (more)
        over_rows(rows, d.hidden, threads, [&](int64_t first, int64_t count) {
            for (int64_t i = first * d.hidden; i < (first + count) * d.hidden; i++) x[i] += more[i];
        });
}

}  // namespace

// Bytes that a step of so many rows works in.
EXPORT int64_t sluice_space(const Decoder *decoder, int64_t rows) {
    return static_cast<int64_t>(Space(*decoder, rows, nullptr).carver.taken);
}

// Ids of the step's tokens -> x [tokens, hidden], the last layer's output. cos and sin: [tokens, rotary_dim].
EXPORT void sluice_forward(const Decoder *decoder, const Attend *step, const int64_t *ids, const float *cos,
                           const float *sin, float *x, void *space, int64_t threads) {
    Team::lead(threads, [&] {
        forward(*decoder, *step, ids, cos, sin, x, Space(*decoder, step->rows[step->slices], space), threads);
    });
}

// x [rows, hidden] -> out [rows, vocabulary], float32.
EXPORT void sluice_logits(const Decoder *decoder, float *x, int64_t rows, float *out, void *space, int64_t threads) {
    Team::lead(threads, [&] {
        const Space all(*decoder, rows, space);
        norm(*decoder, x, nullptr, decoder->norm, all.normed, rows, threads);
        multiply(decoder->head, all.scratch, all.normed, 0, rows, out, 0, threads);
    });
}

// x [rows, inputs] by one product's weights -> out [rows, outputs], each of its kind.
EXPORT void sluice_multiply(const Product *product, const void *x, int64_t kind, int64_t rows, void *out, int64_t out_kind,
                            int64_t threads) {
    const int64_t size = product->inputs;
    Carver sizes{0};
    Scratch(sizes, rows, size);
    std::vector<unsigned char> memory(sizes.taken);
    Carver carver{reinterpret_cast<uintptr_t>(memory.data())};
    const Scratch scratch(carver, rows, size);
    multiply({product, 1}, scratch, x, kind, rows, out, out_kind, threads);
}

// Rows `outputs` of a product's weights -> out [count, inputs].
EXPORT void sluice_look_up(const Product *product, const int64_t *outputs, int64_t count, float *out) {
    for (int64_t i = 0; i < count; i++) look_up(*product, outputs[i], out + i * product->inputs);
}
