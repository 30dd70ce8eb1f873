// What the kernels of products share: vectors of one level's width over packed panels.

#pragma once

#include "products.h"
#include "vectors.h"

#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace sluice {
namespace {

constexpr int W = SLUICE_LANES;
constexpr int PARTS = PANEL / W;  // vectors to a panel
constexpr int64_t VECTOR = 64;    // bytes for a group of inputs in a panel

typedef Lanes<W>::F F;
typedef Lanes<W>::U U;
typedef Lanes<W>::I I;

template <class To, class From>
INLINE To bits_of(From from) {
    To to;
    static_assert(sizeof to == sizeof from);
    std::memcpy(&to, &from, sizeof to);
    return to;
}

INLINE U words(const unsigned char *from) {
    U all;
    std::memcpy(&all, from, sizeof all);
    return all;
}

INLINE uint32_t word(const unsigned char *from) {
    uint32_t one;
    std::memcpy(&one, from, sizeof one);
    return one;
}

// a * b + c, rounded once where the processor can.
INLINE F fused(F a, F b, F c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

struct Half {
    uint16_t bits;
};

INLINE F load_halves(const Half *from) {
#if defined(__AVX512F__)
    return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)));
#elif defined(__F16C__)
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
#else
    Lanes<W>::H halves;
    std::memcpy(&halves, from, sizeof halves);
    const U wide = __builtin_convertvector(halves, U), size = wide & 0x7fff;
    const F scaled = bits_of<F>(size << 13) * 0x1p112f;  // the exponent's bias is 112 more; subnormals come out right
    const U whole = size < 0x7c00 ? bits_of<U>(scaled) : (size << 13 | 0x7f800000);
    return bits_of<F>(whole | (wide & 0x8000) << 16);
#endif
}

// As `narrow` of vectors.h.
INLINE Lanes<W>::H narrowed(F x) {
    const U bits = bits_of<U>(x), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return __builtin_convertvector(x != x ? U{} + 0x7fc0 : rounded, Lanes<W>::H);
}

template <class T>
INLINE void write_numbers(const T *from, int64_t count, T *to) {
    if (count == PANEL)
        std::memcpy(to, from, PANEL * sizeof *to);
    else
        for (int64_t i = 0; i < count; i++) to[i] = from[i];
}

// Writes the outputs of one panel that there are.
INLINE void write_panel(const F *values, const Product &p, int64_t panel, void *out, int64_t kind, int64_t at) {
    const int64_t first = panel * PANEL, left = p.outputs - first, count = left < PANEL ? left : PANEL;
    alignas(64) float wide[PANEL];
    for (int i = 0; i < PARTS; i++) store(wide + i * W, values[i]);
    if (p.bias)
        for (int64_t i = 0; i < count; i++) wide[i] += p.bias[first + i];
    if (kind == 0) return write_numbers(wide, count, static_cast<float *>(out) + at + first);
    alignas(64) uint16_t halves[PANEL];
    for (int i = 0; i < PARTS; i++) {
        const auto part = narrowed(load<W>(wide + i * W));
        std::memcpy(halves + i * W, &part, sizeof part);
    }
    write_numbers(halves, count, static_cast<uint16_t *>(out) + at + first);
}

}  // namespace
}  // namespace sluice
