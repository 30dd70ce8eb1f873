// A whole model as the C interface gets it: Python fills these structs (engine/cpu_ops/decoder.py) and keeps what they
// point to.

#pragma once

#include "kernels.h"
#include "products.h"

namespace sluice {

// Products of the same input, whose outputs lie side by side.
struct Linear {
    const Product *parts;
    int64_t count;
};

struct Layer {
    const float *attention_norm;
    Linear qkv;           // q, then k, then v
    const void *qk_norm;  // [heads + kv_heads, head_dim], of the decoder's kind, or null
    Linear output;
    const float *mlp_norm;
    Linear gate_up;  // gate, then up
    Linear down;
    int64_t window;
    void *k_cache, *v_cache;
};

struct Decoder {
    int64_t kind;  // of queries, keys and values; everything else is float32 between the products
    int64_t layers, hidden, inner, heads, kv_heads, head_dim, rotary_dim;
    const Layer *layer;
    const Product *embedding;
    const float *norm;
    Linear head;
    float eps;
};

}  // namespace sluice
