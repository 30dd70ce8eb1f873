// Intel's AMX: eight registers of 16 rows of 64 bytes, multiplied by a unit of their own.

#pragma once

#if defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__AMX_BF16__) && defined(__linux__)
#define SLUICE_TILES 1

#include <cstdint>
#include <immintrin.h>

namespace sluice {
namespace {

constexpr int64_t TILE_ROWS = 16;
constexpr int64_t LINE = 64;  // bytes of a tile's row
constexpr int64_t TILE_BYTES = TILE_ROWS * LINE;

struct alignas(64) TileShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, int64_t count, int64_t width) {
        rows[tile] = static_cast<uint8_t>(count), bytes[tile] = static_cast<uint16_t>(width);
    }
};

// The unit's state costs time whenever a thread is put to sleep, so it is held as long as this is, for one call.
class Tiles {
public:
    // Tile 4 for `first` rows of activations and 5 for `next`, of `depth` bytes; 6 and 7 for weights; 0 … 3 for sums, of
    // which 2 and 3 belong to the `next` rows if there are any.
    void use(int64_t first, int64_t next, int64_t depth) {
        if (first == first_ && next == next_) return;
        TileShapes shapes;
        for (int i = 0; i < 4; i++) shapes.set(i, next && i >= 2 ? next : first, LINE);
        shapes.set(4, first, depth);
        shapes.set(5, next ? next : first, depth);
        shapes.set(6, depth / 4, LINE);
        shapes.set(7, depth / 4, LINE);
        _tile_loadconfig(&shapes);
        first_ = first, next_ = next;
    }
    ~Tiles() { _tile_release(); }

private:
    int64_t first_ = 0, next_ = 0;
};

}  // namespace
}  // namespace sluice

#endif
