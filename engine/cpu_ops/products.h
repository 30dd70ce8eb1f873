// Products of rows of activations by packed weights: the layouts, and the table that each instruction set fills.
//
// Weights lie in panels of 16 outputs. A panel is a row of vectors of 64 bytes, four bytes for each output: the weights
// of the next one (float32), two (bfloat16) or four (8 bits) inputs. A block of 4-bit weights, 32 inputs, is four such
// vectors: in vector g the low halves of the bytes are inputs 4g … 4g + 3, the high halves 16 more. Outputs and inputs
// beyond the last are zeros.
//
// The activations are made ready in the same groups of four bytes. Weights of 8 and 4 bits meet signed 8-bit activations,
// and their products are added up in whole numbers, exactly. So that instructions for unsigned by signed bytes serve,
// a weight w is stored as w + zero, and zero times the sum of the activations is taken off.

#pragma once

#include <cstdint>

namespace sluice {

constexpr int64_t PANEL = 16;  // outputs
constexpr int64_t BLOCK = 32;  // inputs that share a scale in GGUF's types
constexpr int64_t SPAN = 64;   // activations that share a scale where weights have one for each output

enum Format {
    FLOAT32,
    BFLOAT16,
    INT8,  // a scale for each output, of weights -127 … 127
    Q8_0,  // the others are GGUF's: a scale for each block, of weights and of activations
    Q4_0,
    Q4_1,  // with an offset for each block
    FORMATS
};

// How activations are made ready: as they are, rounded to bfloat16, or in 8 bits with a scale for each span or block. One
// scale for a whole row is too coarse: beside a row's few large numbers the others vanish (bench/RESULTS.md).
enum Preparation { AS_FLOAT32, AS_BFLOAT16, AS_SPANS, AS_BLOCKS, PREPARATIONS };

constexpr Preparation PREPARATION[FORMATS] = {AS_FLOAT32, AS_BFLOAT16, AS_SPANS, AS_BLOCKS, AS_BLOCKS, AS_BLOCKS};
constexpr int64_t GROUP[PREPARATIONS] = {1, 2, 4, 4};  // inputs in four bytes
constexpr int64_t BITS[FORMATS] = {32, 16, 8, 8, 4, 4};  // of a weight
constexpr int64_t ZERO[FORMATS] = {0, 0, 128, 128, 8, 0};

struct Product {
    int64_t format, inputs, outputs;
    const void *weights;
    const void *scales;   // INT8: float32 [panels, 16]. GGUF's: float16 [panels, blocks, 16]
    const void *offsets;  // Q4_1: as the scales
    const float *bias;    // [outputs], or null
};

// Activations that were made ready. Row r begins at `values` + r * `stride` bytes; `scales` and `sums` (of the values in
// 8 bits) are [rows, blocks], or spans.
struct Rows {
    unsigned char *values;
    int64_t stride, blocks;
    float *scales;
    int32_t *sums;
};

// What is multiplied: some rows by some panels. `out` is [all rows, stride], of kind 0 (float32) or 1 (bfloat16).
struct Span {
    int64_t first_row, rows, first_panel, panels;
};

struct Products {
    const char *name;
    // Panels that are best multiplied together, at most; any number will do.
    int64_t panels[FORMATS];
    // Rows first … first + count - 1 of x [rows, size], of kind 0 or 1. A row with a number that isn't finite gets the
    // scale NaN, so that it is seen to be broken.
    void (*prepare[PREPARATIONS][2])(const void *x, int64_t first, int64_t count, int64_t size, const Rows &to);
    void (*multiply[FORMATS])(const Product &, const Rows &, const Span &, void *out, int64_t kind, int64_t stride);
};

// Bytes of a prepared row, and its blocks.
constexpr int64_t prepared_bytes(Preparation how, int64_t size) { return (size + GROUP[how] - 1) / GROUP[how] * 4; }
// From one row to the next: an odd number of cache lines, so that the same place of 16 rows doesn't compete for the same
// few places of a cache. Zeros lie between.
constexpr int64_t prepared_stride(Preparation how, int64_t size) {
    return ((prepared_bytes(how, size) + 63) / 64 | 1) * 64;
}
constexpr int64_t prepared_blocks(Preparation how, int64_t size) {
    return how == AS_BLOCKS ? size / BLOCK : (size + SPAN - 1) / SPAN;
}

const Products *base_products();
const Products *avx2_products();
const Products *avx512_products();
const Products *avx512_vnni_products();
const Products *avx512_bf16_products();
const Products *amx_products();  // null where the compiler, the processor or the system lacks it

}  // namespace sluice
