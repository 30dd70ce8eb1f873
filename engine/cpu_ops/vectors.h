// Vectors of W lanes, and the two types of numbers that models are stored in.
//
// Vectors are the compiler's own (GCC and Clang), so that the source is the same for all machines. Everything sits in an
// unnamed namespace: an inline function that units of different instruction sets shared would be linked from either.

#pragma once

#include <cstdint>
#include <cstring>

namespace sluice {
namespace {

template <int W>
struct Lanes;

#define SLUICE_LANES_OF(W)                                       \
    template <>                                                  \
    struct Lanes<W> {                                            \
        typedef float F __attribute__((vector_size(W * 4)));     \
        typedef uint32_t U __attribute__((vector_size(W * 4)));  \
        typedef int32_t I __attribute__((vector_size(W * 4)));   \
        typedef uint16_t H __attribute__((vector_size(W * 2)));  \
    }
SLUICE_LANES_OF(2);
SLUICE_LANES_OF(4);
SLUICE_LANES_OF(8);
SLUICE_LANES_OF(16);
#undef SLUICE_LANES_OF

#define INLINE static inline __attribute__((always_inline))

struct BFloat16 {
    uint16_t bits;
};

INLINE float widen(float x) { return x; }

INLINE float widen(BFloat16 x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

INLINE void narrow(float x, float &to) { to = x; }

// To the nearest, ties to even; a NaN stays one.
INLINE void narrow(float x, BFloat16 &to) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    to.bits = static_cast<uint16_t>(x != x ? 0x7fc0 : rounded);
}

template <int W>
INLINE typename Lanes<W>::F load(const float *from) {
    typename Lanes<W>::F wide;
    std::memcpy(&wide, from, sizeof wide);
    return wide;
}

template <int W>
INLINE typename Lanes<W>::F load(const BFloat16 *from) {
    typename Lanes<W>::H halves;
    std::memcpy(&halves, from, sizeof halves);
    const typename Lanes<W>::U bits = __builtin_convertvector(halves, typename Lanes<W>::U) << 16;
    typename Lanes<W>::F wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

template <class F>
INLINE void store(float *to, F x) {
    std::memcpy(to, &x, sizeof x);
}

}  // namespace
}  // namespace sluice
