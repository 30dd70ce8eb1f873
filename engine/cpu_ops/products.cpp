// The products' kernels, compiled once for each instruction set as kernels.cpp is; see products.h for the layouts.
//
// What a row gets never depends on the rows beside it, nor on how the work is cut: whole numbers are exact, and floats
// are added in the order of the inputs, one chain for each output.

#include "panels.h"

#include <limits>

namespace sluice {
namespace {

// The rows and panels whose sums fit in the registers, beside what is being read.
constexpr int TILE_ROWS = W == 16 ? 6 : W == 8 ? 4 : 2;
constexpr int TILE_PANELS = W == 16 ? 4 : 1;
constexpr int BLOCK_ROWS = W == 16 ? 6 : W == 8 ? 4 : 1;  // these have float sums too, once a block
constexpr int BLOCK_PANELS = W == 16 ? 2 : 1;

// Four bytes of activations for all lanes, and their product with the weights of the lanes' outputs, added to a sum.
struct AsFloat32 {
    F all;
    INLINE AsFloat32 of(uint32_t one) { return {bits_of<F>(U{} + one)}; }
    INLINE F dot(F sum, U weights, const AsFloat32 &x) { return fused(bits_of<F>(weights), x.all, sum); }
};

#if defined(__AVX512BF16__)
struct AsBFloat16 {
    __m512bh all;
    INLINE AsBFloat16 of(uint32_t one) { return {bits_of<__m512bh>(U{} + one)}; }
    INLINE F dot(F sum, U weights, const AsBFloat16 &x) { return _mm512_dpbf16_ps(sum, bits_of<__m512bh>(weights), x.all); }
};
#else
struct AsBFloat16 {
    F first, second;
    INLINE AsBFloat16 of(uint32_t one) {
        const U both = U{} + one;
        return {bits_of<F>(both << 16), bits_of<F>(both & 0xffff0000u)};
    }
    INLINE F dot(F sum, U weights, const AsBFloat16 &x) {
        return fused(bits_of<F>(weights & 0xffff0000u), x.second, fused(bits_of<F>(weights << 16), x.first, sum));
    }
};
#endif

// Weights in 8 bits are stored with their zero at WIDE_ZERO, unless `wide` takes it off; what is left of it times the
// activations is subtracted. Products of weights in 4 bits are added up by `dot_few` until `few` ends a block.
#if defined(__AVX512VNNI__)
struct AsBytes {
    typedef U Wide;
    static constexpr int32_t WIDE_ZERO = 128;
    U all;
    INLINE AsBytes of(uint32_t one) { return {U{} + one}; }
    INLINE Wide wide(U stored) { return stored; }
    INLINE I dot(I sum, U weights, const AsBytes &x) {
        return bits_of<I>(_mm512_dpbusd_epi32(bits_of<__m512i>(sum), bits_of<__m512i>(weights), bits_of<__m512i>(x.all)));
    }
    INLINE I dot_few(I sum, U weights, const AsBytes &x) { return dot(sum, weights, x); }
    INLINE I few(I sum) { return sum; }
};
#elif defined(__AVX2__) && !defined(__AVX512BW__)
// Unsigned by signed bytes, added in pairs of 16 bits, which saturate: so weights in 8 bits leave their signs to the
// activations, and a pair is at most 128 * 127 * 2. A whole block's pairs of weights in 4 bits are at most
// 8 * 15 * 127 * 2, and need no more than 16 bits.
struct AsBytes {
    struct Wide {
        __m256i size, number;
    };
    static constexpr int32_t WIDE_ZERO = 0;
    __m256i all;
    INLINE AsBytes of(uint32_t one) { return {_mm256_set1_epi32(static_cast<int>(one))}; }
    INLINE Wide wide(U stored) {
        const auto number = bits_of<__m256i>(stored ^ 0x80808080u);
        return {_mm256_abs_epi8(number), number};
    }
    INLINE I few(I pairs) { return bits_of<I>(_mm256_madd_epi16(bits_of<__m256i>(pairs), _mm256_set1_epi16(1))); }
    INLINE I dot(I sum, const Wide &weights, const AsBytes &x) {
        const auto pairs = _mm256_maddubs_epi16(weights.size, _mm256_sign_epi8(x.all, weights.number));
        return sum + few(bits_of<I>(pairs));
    }
    INLINE I dot_few(I pairs, U weights, const AsBytes &x) {
        return bits_of<I>(
            _mm256_add_epi16(bits_of<__m256i>(pairs), _mm256_maddubs_epi16(bits_of<__m256i>(weights), x.all)));
    }
};
#elif defined(__AVX512BW__)
// Products of 16-bit numbers in pairs, which is exact: maddubs, on bytes, would saturate at 255 * 127 * 2.
INLINE I add_pairs(I sum, U a, U b) {
    return sum + bits_of<I>(_mm512_madd_epi16(bits_of<__m512i>(a), bits_of<__m512i>(b)));
}

struct AsBytes {
    typedef U Wide;
    static constexpr int32_t WIDE_ZERO = 128;
    U even, odd;  // the four bytes as two pairs of 16-bit numbers
    INLINE uint32_t pair(uint32_t low, uint32_t high) {
        const auto a = static_cast<int8_t>(low), b = static_cast<int8_t>(high);
        return static_cast<uint16_t>(a) | static_cast<uint32_t>(static_cast<uint16_t>(b)) << 16;
    }
    INLINE AsBytes of(uint32_t one) { return {U{} + pair(one, one >> 16), U{} + pair(one >> 8, one >> 24)}; }
    INLINE Wide wide(U stored) { return stored; }
    INLINE I dot(I sum, U weights, const AsBytes &x) {
        return add_pairs(add_pairs(sum, weights & 0x00ff00ffu, x.even), weights >> 8 & 0x00ff00ffu, x.odd);
    }
    INLINE I dot_few(I sum, U weights, const AsBytes &x) { return dot(sum, weights, x); }
    INLINE I few(I sum) { return sum; }
};
#else
struct AsBytes {
    typedef U Wide;
    static constexpr int32_t WIDE_ZERO = 128;
    int32_t each[4];
    INLINE AsBytes of(uint32_t one) {
        AsBytes x;
        for (int i = 0; i < 4; i++) x.each[i] = static_cast<int8_t>(one >> 8 * i);
        return x;
    }
    INLINE I dot(I sum, U weights, const AsBytes &x) {
        for (int i = 0; i < 4; i++) sum += bits_of<I>(weights >> 8 * i & 0xffu) * x.each[i];
        return sum;
    }
    INLINE Wide wide(U stored) { return stored; }
    INLINE I dot_few(I sum, U weights, const AsBytes &x) { return dot(sum, weights, x); }
    INLINE I few(I sum) { return sum; }
};
#endif

// Few rows wait for memory, and a panel is over before the processor has guessed that more is coming: so they ask for
// what the next tile reads. A prefetch may be of any address.
constexpr int FETCH_ROWS_MAX = 4;

template <int R>
INLINE void fetch(const void *from, int64_t ahead) {
    const auto place = reinterpret_cast<uintptr_t>(from) + static_cast<uintptr_t>(ahead);
    if constexpr (R <= FETCH_ROWS_MAX) __builtin_prefetch(reinterpret_cast<const void *>(place));
}

// R rows by C panels, of weights that are floats.
template <int FORMAT, class As, int R, int C>
INLINE void tile(const Product &p, const Rows &x, int64_t row, int64_t panel, void *out, int64_t kind, int64_t stride) {
    const int64_t groups = prepared_bytes(PREPARATION[FORMAT], p.inputs) / 4;
    const unsigned char *weights = static_cast<const unsigned char *>(p.weights) + panel * groups * VECTOR;
    const unsigned char *values = x.values + row * x.stride;
    F sums[R][C * PARTS] = {};
    for (int64_t g = 0; g < groups; g++) {
        U each[C * PARTS];
        for (int c = 0; c < C; c++) {
            const unsigned char *from = weights + (c * groups + g) * VECTOR;
            fetch<R>(from, C * groups * VECTOR);
            for (int i = 0; i < PARTS; i++) each[c * PARTS + i] = words(from + i * W * 4);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const As group = As::of(word(values + r * x.stride + g * 4));
            for (int c = 0; c < C * PARTS; c++) sums[r][c] = As::dot(sums[r][c], each[c], group);
        }
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) write_panel(sums[r] + c * PARTS, p, panel + c, out, kind, (row + r) * stride);
}

// R rows by C panels, of weights in 8 or 4 bits: whole numbers within a block, or a span, of activations.
template <int FORMAT, int R, int C>
INLINE void block_tile(const Product &p, const Rows &x, int64_t row, int64_t panel, void *out, int64_t kind,
                       int64_t stride) {
    constexpr bool FOUR_BITS = FORMAT == Q4_0 || FORMAT == Q4_1;
    constexpr int64_t VECTORS = FORMAT == INT8 ? SPAN / 4 : FOUR_BITS ? BLOCK / 8 : BLOCK / 4;  // of a block
    const int64_t blocks = x.blocks, vectors = FORMAT == INT8 ? (p.inputs + 3) / 4 : blocks * VECTORS;
    const unsigned char *weights = static_cast<const unsigned char *>(p.weights) + panel * vectors * VECTOR;
    const Half *scales = static_cast<const Half *>(p.scales) + panel * blocks * PANEL;
    const Half *offsets = static_cast<const Half *>(p.offsets) + panel * blocks * PANEL;
    const unsigned char *values = x.values + row * x.stride;
    F totals[R][C * PARTS] = {};
    for (int64_t b = 0; b < blocks; b++) {
        I sums[R][C * PARTS];
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C * PARTS; c++)
                sums[r][c] = FOUR_BITS ? I{} : I{} - AsBytes::WIDE_ZERO * x.sums[(row + r) * blocks + b];
        const int64_t count = FORMAT == INT8 && b + 1 == blocks ? vectors - b * VECTORS : VECTORS;
        for (int64_t g = 0; g < count; g++) {
            AsBytes::Wide all[C * PARTS];
            U low[C * PARTS], high[C * PARTS];
            for (int c = 0; c < C; c++) {
                const unsigned char *from = weights + (c * vectors + b * VECTORS + g) * VECTOR;
                fetch<R>(from, C * vectors * VECTOR);
                for (int i = 0; i < PARTS; i++) {
                    const U stored = words(from + i * W * 4);
                    all[c * PARTS + i] = AsBytes::wide(stored);
                    low[c * PARTS + i] = stored & 0x0f0f0f0fu;
                    high[c * PARTS + i] = stored >> 4 & 0x0f0f0f0fu;
                }
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const unsigned char *at = values + r * x.stride + b * (FORMAT == INT8 ? SPAN : BLOCK) + g * 4;
                const AsBytes group = AsBytes::of(word(at));
                if constexpr (FOUR_BITS) {
                    const AsBytes more = AsBytes::of(word(at + BLOCK / 2));
                    for (int c = 0; c < C * PARTS; c++) sums[r][c] = AsBytes::dot_few(sums[r][c], low[c], group);
                    for (int c = 0; c < C * PARTS; c++) sums[r][c] = AsBytes::dot_few(sums[r][c], high[c], more);
                } else {
                    for (int c = 0; c < C * PARTS; c++) sums[r][c] = AsBytes::dot(sums[r][c], all[c], group);
                }
            }
        }
        if constexpr (FOUR_BITS)
            for (int r = 0; r < R; r++)
                for (int c = 0; c < C * PARTS; c++)
                    sums[r][c] = AsBytes::few(sums[r][c]) - static_cast<int32_t>(ZERO[FORMAT]) * x.sums[(row + r) * blocks + b];
        for (int c = 0; c < C; c++)
            for (int i = 0; i < PARTS; i++) {
                F scale = {}, offset = {};
                if constexpr (FORMAT != INT8) scale = load_halves(scales + (c * blocks + b) * PANEL + i * W);
                if constexpr (FORMAT == Q4_1) offset = load_halves(offsets + (c * blocks + b) * PANEL + i * W);
                for (int r = 0; r < R; r++) {
                    const float its = x.scales[(row + r) * blocks + b];
                    F &total = totals[r][c * PARTS + i];
                    const F both = FORMAT == INT8 ? F{} + its : scale * its;
                    total = fused(__builtin_convertvector(sums[r][c * PARTS + i], F), both, total);
                    if constexpr (FORMAT == Q4_1)
                        total = fused(offset, F{} + its * static_cast<float>(x.sums[(row + r) * blocks + b]), total);
                }
            }
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) {
            if constexpr (FORMAT == INT8)
                for (int i = 0; i < PARTS; i++)
                    totals[r][c * PARTS + i] *= load<W>(static_cast<const float *>(p.scales) + (panel + c) * PANEL + i * W);
            write_panel(totals[r] + c * PARTS, p, panel + c, out, kind, (row + r) * stride);
        }
}

template <int FORMAT, int R, int C>
INLINE void any_tile(const Product &p, const Rows &x, int64_t row, int64_t panel, void *out, int64_t kind,
                     int64_t stride) {
    if constexpr (FORMAT >= INT8)
        block_tile<FORMAT, R, C>(p, x, row, panel, out, kind, stride);
    else if constexpr (FORMAT == BFLOAT16)
        tile<FORMAT, AsBFloat16, R, C>(p, x, row, panel, out, kind, stride);
    else
        tile<FORMAT, AsFloat32, R, C>(p, x, row, panel, out, kind, stride);
}

// `count` rows in tiles of R, the rest in smaller ones: 6, 4, 2 and 1 serve for every number.
template <int FORMAT, int R, int C>
INLINE void tiles(const Product &p, const Rows &x, int64_t row, int64_t count, int64_t panel, void *out, int64_t kind,
                  int64_t stride) {
    for (; count >= R; row += R, count -= R) any_tile<FORMAT, R, C>(p, x, row, panel, out, kind, stride);
    if constexpr (R > 1)
        if (count) tiles<FORMAT, R == 2 ? 1 : R - 2, C>(p, x, row, count, panel, out, kind, stride);
}

template <int FORMAT>
void multiply(const Product &p, const Rows &x, const Span &span, void *out, int64_t kind, int64_t stride) {
    constexpr bool blocks = FORMAT >= INT8;
    constexpr int R = blocks ? BLOCK_ROWS : TILE_ROWS, C = blocks ? BLOCK_PANELS : TILE_PANELS;
    int64_t panel = span.first_panel;
    const int64_t end = panel + span.panels;
    for (; panel + C <= end; panel += C)
        tiles<FORMAT, R, C>(p, x, span.first_row, span.rows, panel, out, kind, stride);
    for (; panel < end; panel++)  // the last few aren't worth more code
        tiles<FORMAT, 1, 1>(p, x, span.first_row, span.rows, panel, out, kind, stride);
}

template <int HOW, class T>
void prepare_numbers(const void *x_, int64_t first, int64_t count, int64_t size, const Rows &to) {
    for (int64_t row = first; row < first + count; row++) {
        const T *x = static_cast<const T *>(x_) + row * size;
        if constexpr (HOW == AS_FLOAT32) {
            auto *values = reinterpret_cast<float *>(to.values + row * to.stride);
            for (int64_t i = 0; i < size; i++) values[i] = widen(x[i]);
        } else {
            auto *values = reinterpret_cast<BFloat16 *>(to.values + row * to.stride);
            for (int64_t i = 0; i < size; i++) narrow(widen(x[i]), values[i]);
            std::memset(values + size, 0, static_cast<size_t>(to.stride) - static_cast<size_t>(size) * sizeof *values);
        }
    }
}

// Below this a row is zero: its scale's inverse would be no float.
constexpr float LARGEST_MIN = 1e-36f;
constexpr uint32_t NOT_FINITE = 0x7f800000;

// -127 … 127, the largest of them 127, ties to even.
template <class T>
INLINE void prepare_span(const T *x, int64_t size, int8_t *values, float *scale, int32_t *sum) {
    uint32_t top = 0;
    for (int64_t i = 0; i < size; i++) {
        const uint32_t bits = bits_of<uint32_t>(widen(x[i])) & 0x7fffffff;
        top = bits > top ? bits : top;
    }
    const float largest = bits_of<float>(top);
    if (top >= NOT_FINITE || largest < LARGEST_MIN) {
        std::memset(values, 0, static_cast<size_t>(size));
        *scale = top >= NOT_FINITE ? std::numeric_limits<float>::quiet_NaN() : 0.0f;
        *sum = 0;
        return;
    }
    const float inverse = 127.0f / largest;
    int32_t added = 0;
    for (int64_t i = 0; i < size; i++) {
        // 1.5 * 2^23: added, it leaves the nearest whole number in the low bits
        const auto value = static_cast<int8_t>(bits_of<uint32_t>(widen(x[i]) * inverse + 12582912.0f));
        values[i] = value;
        added += value;
    }
    *scale = largest / 127.0f;
    *sum = added;
}

template <int HOW, class T>
void prepare_bytes(const void *x_, int64_t first, int64_t count, int64_t size, const Rows &to) {
    for (int64_t row = first; row < first + count; row++) {
        const T *x = static_cast<const T *>(x_) + row * size;
        auto *values = reinterpret_cast<int8_t *>(to.values + row * to.stride);
        float *scales = to.scales + row * to.blocks;
        int32_t *sums = to.sums + row * to.blocks;
        constexpr int64_t length = HOW == AS_BLOCKS ? BLOCK : SPAN;
        for (int64_t b = 0; b < to.blocks; b++) {
            const int64_t left = size - b * length;
            prepare_span(x + b * length, left < length ? left : length, values + b * length, scales + b, sums + b);
        }
        std::memset(values + size, 0, static_cast<size_t>(to.stride - size));
    }
}

#define SLUICE_TEXT(x) #x
#define SLUICE_NAME(level) SLUICE_TEXT(level)
#define SLUICE_JOINED(level) level##_products
#define SLUICE_FUNCTION(level) SLUICE_JOINED(level)

constexpr Products TABLE = {
    SLUICE_NAME(SLUICE_LEVEL),
    {TILE_PANELS, TILE_PANELS, BLOCK_PANELS, BLOCK_PANELS, BLOCK_PANELS, BLOCK_PANELS},
    {
        {prepare_numbers<AS_FLOAT32, float>, prepare_numbers<AS_FLOAT32, BFloat16>},
        {prepare_numbers<AS_BFLOAT16, float>, prepare_numbers<AS_BFLOAT16, BFloat16>},
        {prepare_bytes<AS_SPANS, float>, prepare_bytes<AS_SPANS, BFloat16>},
        {prepare_bytes<AS_BLOCKS, float>, prepare_bytes<AS_BLOCKS, BFloat16>},
    },
    {multiply<FLOAT32>, multiply<BFLOAT16>, multiply<INT8>, multiply<Q8_0>, multiply<Q4_0>, multiply<Q4_1>},
};

}  // namespace

const Products *SLUICE_FUNCTION(SLUICE_LEVEL)() { return &TABLE; }

}  // namespace sluice
