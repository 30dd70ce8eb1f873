// The products' kernels by AMX. A packed panel is what its unit wants of weights, so it reads them as they lie; see
// products.h for the layouts.
//
// bfloat16 is multiplied here for every number of rows, since the unit adds up in an order of its own. Whole numbers are
// exact, so that few rows, for which the unit is too large, may go by the vectors of the level below.

#include "products.h"
#include "tiles.h"

#ifdef SLUICE_TILES

#include "panels.h"

#include <sys/syscall.h>
#include <unistd.h>

namespace sluice {
namespace {

// From so many rows on a tile is faster than vectors: of whole numbers that are scaled once for 64 inputs, or for 32.
constexpr int64_t SPAN_ROWS_MIN = 16, BLOCK_ROWS_MIN = 32;

// A panel's weights: whole tiles as they lie, and a last one filled up with zeros.
struct Column {
    const unsigned char *whole;
    alignas(64) unsigned char last[TILE_BYTES];

    void begin(const unsigned char *weights, int64_t bytes) {
        whole = weights;
        const int64_t rest = bytes % LINE * PANEL;
        if (!rest) return;
        std::memset(last, 0, sizeof last);
        std::memcpy(last, weights + bytes / LINE * TILE_BYTES, static_cast<size_t>(rest));
    }
};

// Two tiles of rows by two panels, or one by four, so that each tile that is read is used as often as the unit's eight
// tiles allow. BOTH: there are two tiles of rows.
template <bool BOTH, int PANELS>
INLINE void multiply_tiles(const unsigned char *x, int64_t stride, int64_t bytes, const Column *columns) {
    _tile_zero(0);
    if constexpr (PANELS > 1) _tile_zero(1);
    if constexpr (BOTH || PANELS > 2) _tile_zero(2);
    if constexpr ((BOTH && PANELS > 1) || PANELS > 3) _tile_zero(3);
    const int64_t tiles = (bytes + LINE - 1) / LINE;
    const auto step = [&](int64_t t, const unsigned char *first, const unsigned char *second, const unsigned char *third,
                          const unsigned char *fourth) {
        _tile_loadd(4, x + t * LINE, stride);
        if constexpr (BOTH) _tile_loadd(5, x + TILE_ROWS * stride + t * LINE, stride);
        _tile_loadd(6, first, LINE);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (BOTH) _tile_dpbf16ps(2, 5, 6);
        if constexpr (PANELS > 1) {
            _tile_loadd(7, second, LINE);
            _tile_dpbf16ps(1, 4, 7);
            if constexpr (BOTH) _tile_dpbf16ps(3, 5, 7);
        }
        if constexpr (!BOTH && PANELS > 2) {
            _tile_loadd(6, third, LINE);
            _tile_dpbf16ps(2, 4, 6);
            _tile_loadd(7, fourth, LINE);
            _tile_dpbf16ps(3, 4, 7);
        }
    };
    constexpr int SECOND = PANELS > 1 ? 1 : 0, THIRD = PANELS > 2 ? 2 : 0, FOURTH = PANELS > 2 ? 3 : 0;
    const int64_t whole = bytes / LINE;
    for (int64_t t = 0; t < whole; t++)
        step(t, columns[0].whole + t * TILE_BYTES, columns[SECOND].whole + t * TILE_BYTES,
             columns[THIRD].whole + t * TILE_BYTES, columns[FOURTH].whole + t * TILE_BYTES);
    if (whole < tiles) step(whole, columns[0].last, columns[SECOND].last, columns[THIRD].last, columns[FOURTH].last);
}

template <bool BOTH, int PANELS>
INLINE void bfloat16_block(const Product &p, const Rows &x, int64_t row, int64_t rows, int64_t panel, void *out,
                           int64_t kind, int64_t stride) {
    const int64_t bytes = prepared_bytes(AS_BFLOAT16, p.inputs);
    Column columns[PANELS];
    for (int i = 0; i < PANELS; i++)
        columns[i].begin(static_cast<const unsigned char *>(p.weights) + (panel + i) * bytes * PANEL, bytes);
    multiply_tiles<BOTH, PANELS>(x.values + row * x.stride, x.stride, bytes, columns);
    alignas(64) float sums[4][TILE_ROWS][PANEL];
    _tile_stored(0, sums[0], LINE);
    if constexpr (PANELS > 1) _tile_stored(1, sums[1], LINE);
    if constexpr (BOTH || PANELS > 2) _tile_stored(2, sums[2], LINE);
    if constexpr ((BOTH && PANELS > 1) || PANELS > 3) _tile_stored(3, sums[3], LINE);
    for (int64_t r = 0; r < rows; r++)
        for (int i = 0; i < PANELS; i++) {
            const F values = load<W>(sums[(BOTH && r >= TILE_ROWS ? 2 : 0) + i][r % TILE_ROWS]);
            write_panel(&values, p, panel + i, out, kind, (row + r) * stride);
        }
}

void multiply_bfloat16(const Product &p, const Rows &x, const Span &span, void *out, int64_t kind, int64_t stride) {
    Tiles tiles;
    const int64_t end = span.first_panel + span.panels;
    for (int64_t done = 0; done < span.rows; done += 2 * TILE_ROWS) {
        const int64_t left = span.rows - done, row = span.first_row + done;
        const int64_t rows = left < 2 * TILE_ROWS ? left : 2 * TILE_ROWS;
        const int64_t first = rows < TILE_ROWS ? rows : TILE_ROWS;
        tiles.use(first, rows - first, LINE);
        int64_t panel = span.first_panel;
        if (rows > first) {
            for (; panel + 2 <= end; panel += 2) bfloat16_block<true, 2>(p, x, row, rows, panel, out, kind, stride);
            for (; panel < end; panel++) bfloat16_block<true, 1>(p, x, row, rows, panel, out, kind, stride);
        } else {
            for (; panel + 4 <= end; panel += 4) bfloat16_block<false, 4>(p, x, row, rows, panel, out, kind, stride);
            for (; panel < end; panel++) bfloat16_block<false, 1>(p, x, row, rows, panel, out, kind, stride);
        }
    }
}

// Weights in 8 or 4 bits are read as signed bytes from a copy of a part of a panel that stays in the first cache, which
// the rows of a piece share; as are the float sums between the parts.
constexpr int64_t PART_SPANS = 32;
constexpr int64_t PIECE_ROWS = 96;

template <int FORMAT>
struct Depth {
    static constexpr bool FOUR_BITS = FORMAT == Q4_0 || FORMAT == Q4_1;
    static constexpr int64_t INPUTS = FORMAT == INT8 ? SPAN : BLOCK;   // that share a scale
    static constexpr int64_t PER_PART = PART_SPANS * SPAN / INPUTS;
    static constexpr int64_t VECTORS = INPUTS / 4 / (FOUR_BITS ? 2 : 1);  // of 64 bytes, as they are stored
};

// Blocks `first` … `first` + `count` - 1 of a panel.
template <int FORMAT>
struct Part {
    alignas(64) int8_t weights[PART_SPANS * SPAN * PANEL];
    F scales[Depth<FORMAT>::PER_PART], offsets[Depth<FORMAT>::PER_PART];
    int64_t first, count;

    void unpack(const Product &p, int64_t panel, int64_t blocks, int64_t from) {
        typedef Depth<FORMAT> D;
        first = from, count = blocks - from < D::PER_PART ? blocks - from : D::PER_PART;
        const int64_t all = FORMAT == INT8 ? (p.inputs + 3) / 4 : blocks * D::VECTORS, begin = from * D::VECTORS;
        const int64_t there = all - begin < count * D::VECTORS ? all - begin : count * D::VECTORS;
        const auto *stored = static_cast<const unsigned char *>(p.weights) + (panel * all + begin) * VECTOR;
        for (int64_t i = 0; i < there; i++) {
            const U each = words(stored + i * VECTOR);
            if constexpr (!D::FOUR_BITS) {
                put(i, each ^ 0x80808080u);
            } else {
                const int64_t at = i / D::VECTORS * D::VECTORS * 2 + i % D::VECTORS;
                put(at, nibbles(each));
                put(at + D::VECTORS, nibbles(each >> 4));
            }
        }
        for (int64_t i = there; !D::FOUR_BITS && i < count * D::VECTORS; i++) put(i, U{});
        if constexpr (FORMAT != INT8)
            for (int64_t i = 0; i < count; i++) {
                const int64_t at = (panel * blocks + from + i) * PANEL;
                scales[i] = load_halves(static_cast<const Half *>(p.scales) + at);
                if constexpr (FORMAT == Q4_1) offsets[i] = load_halves(static_cast<const Half *>(p.offsets) + at);
            }
    }

private:
    void put(int64_t i, U each) { std::memcpy(weights + i * VECTOR, &each, sizeof each); }

    // 0 … 15, less the zero.
    static U nibbles(U each) {
        const auto zero = _mm512_set1_epi8(static_cast<char>(ZERO[FORMAT]));
        return bits_of<U>(_mm512_sub_epi8(bits_of<__m512i>(each & 0x0f0f0f0fu), zero));
    }
};

// R rows, one tile, by a part: added to their float sums as the vectors' kernels do, block by block.
template <int FORMAT, int R>
INLINE void add_part(const Part<FORMAT> &part, const Rows &x, int64_t row, int64_t rows, float *totals) {
    typedef Depth<FORMAT> D;
    const int64_t count = R == TILE_ROWS ? R : rows;
    const unsigned char *values = x.values + row * x.stride + part.first * D::INPUTS;
    const float *scales = x.scales + row * x.blocks + part.first;
    const int32_t *counts = x.sums + row * x.blocks + part.first;
    F each[R];
#pragma GCC unroll 16
    for (int64_t r = 0; r < count; r++) each[r] = load<W>(totals + r * PANEL);
    alignas(64) int32_t sums[2][TILE_ROWS][PANEL];
    for (int64_t b = 0; b < part.count; b++) {
        _tile_zero(0);
        _tile_loadd(4, values + b * D::INPUTS, x.stride);
        _tile_loadd(6, part.weights + b * D::INPUTS * PANEL, LINE);
        _tile_dpbssd(0, 4, 6);
        _tile_stored(0, sums[b % 2], LINE);
#pragma GCC unroll 16
        for (int64_t r = 0; r < count; r++) {
            const float its = scales[r * x.blocks + b];
            const F sum = __builtin_convertvector(bits_of<I>(_mm512_load_si512(sums[b % 2][r])), F);
            each[r] = fused(sum, FORMAT == INT8 ? _mm512_set1_ps(its) : part.scales[b] * its, each[r]);
            if constexpr (FORMAT == Q4_1)
                each[r] = fused(part.offsets[b], _mm512_set1_ps(its * static_cast<float>(counts[r * x.blocks + b])), each[r]);
        }
    }
#pragma GCC unroll 16
    for (int64_t r = 0; r < count; r++) store(totals + r * PANEL, each[r]);
}

template <int FORMAT>
void multiply_bytes(const Product &p, const Rows &x, const Span &span, void *out, int64_t kind, int64_t stride) {
    if (span.rows < (FORMAT == INT8 ? SPAN_ROWS_MIN : BLOCK_ROWS_MIN))
        return avx512_bf16_products()->multiply[FORMAT](p, x, span, out, kind, stride);
    Tiles tiles;
    Part<FORMAT> part;
    alignas(64) float totals[PIECE_ROWS * PANEL];
    const int64_t last_row = span.first_row + span.rows;
    for (int64_t panel = span.first_panel; panel < span.first_panel + span.panels; panel++)
        for (int64_t piece = span.first_row; piece < last_row; piece += PIECE_ROWS) {
            const int64_t rows = last_row - piece < PIECE_ROWS ? last_row - piece : PIECE_ROWS;
            std::memset(totals, 0, static_cast<size_t>(rows * PANEL) * sizeof *totals);
            for (int64_t first = 0; first < x.blocks; first += part.count) {
                part.unpack(p, panel, x.blocks, first);
                for (int64_t r = 0; r < rows; r += TILE_ROWS) {
                    const int64_t count = rows - r < TILE_ROWS ? rows - r : TILE_ROWS;
                    tiles.use(count, 0, Depth<FORMAT>::INPUTS);
                    if (count == TILE_ROWS)
                        add_part<FORMAT, TILE_ROWS>(part, x, piece + r, count, totals + r * PANEL);
                    else
                        add_part<FORMAT, TILE_ROWS - 1>(part, x, piece + r, count, totals + r * PANEL);
                }
            }
            for (int64_t r = 0; r < rows; r++) {
                F total = load<W>(totals + r * PANEL);
                if constexpr (FORMAT == INT8) total *= load<W>(static_cast<const float *>(p.scales) + panel * PANEL);
                write_panel(&total, p, panel, out, kind, (piece + r) * stride);
            }
        }
}

// Whether the processor has the unit and the system lets this process use it: its state is large, so one has to ask.
bool granted() {
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;
    return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-int8") && __builtin_cpu_supports("amx-bf16") &&
           !syscall(SYS_arch_prctl, REQUEST, TILE_DATA);
}

Products with_tiles() {
    Products table = *avx512_bf16_products();
    table.name = "amx";
    table.panels[BFLOAT16] = 4;
    table.multiply[BFLOAT16] = multiply_bfloat16;
    table.multiply[INT8] = multiply_bytes<INT8>;
    table.multiply[Q8_0] = multiply_bytes<Q8_0>;
    table.multiply[Q4_0] = multiply_bytes<Q4_0>;
    table.multiply[Q4_1] = multiply_bytes<Q4_1>;
    return table;
}

}  // namespace

const Products *amx_products() {
    static const Products table = with_tiles();
    return granted() ? &table : nullptr;
}

}  // namespace sluice

#else

namespace sluice {

const Products *amx_products() { return nullptr; }

}  // namespace sluice

#endif
