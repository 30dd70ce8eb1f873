// Draws a token of each row from weights that top_k, top_p and min_p narrow: what `chosen` of engine/sampler.py does, to
// the bit, without sorting whole rows. All sums are of float32 numbers in float64, one by one in the order given there;
// ids of weight 0 change none of them, so a few candidates stand for the row.

#include "ops.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>
#include <utility>
#include <vector>

using namespace sluice;

namespace {

// Weights are 0 to 1, so their bits, read as a whole number, are in the order of the weights and below 2^30.
constexpr int KEY_BITS = 30, DIGIT_BITS = 10, DIGITS = 1 << DIGIT_BITS;
constexpr int64_t BLOCK = 64;

// Fewer are sorted by comparison: three passes over 2^10 counts take longer.
constexpr size_t RADIX_MIN = 1024;

struct Filters {
    int64_t top_k;  // at least the row's size: off
    double top_p;   // at least 1: off
    float min_p;
};

// What is reused from row to row.
struct Space {
    std::vector<int64_t> ids;  // of the candidates, rising
    std::vector<uint32_t> keys, falling, spare;
    std::vector<double> reached;
    int64_t counts[DIGITS];
    double masses[DIGITS];
};

uint32_t key_of(float weight) {
    uint32_t bits;
    std::memcpy(&bits, &weight, sizeof bits);
    return bits;
}

double weight_of(uint32_t key) {
    float weight;
    std::memcpy(&weight, &key, sizeof weight);
    return weight;
}

// A key such that top_k numbers of the row, or p's share of the sum, are not below it; 1 if all above 0 may be needed.
uint32_t floor_of(const uint32_t *row, int64_t size, const Filters &filters, double &total, Space &space) {
    const bool weighed = filters.top_k >= size;
    std::fill_n(space.counts, DIGITS, 0);
    std::fill_n(space.masses, DIGITS, 0.0);
    for (int64_t i = 0; i < size; i++) {
        const uint32_t digit = row[i] >> (KEY_BITS - DIGIT_BITS);
        space.counts[digit]++;
        if (weighed) space.masses[digit] += weight_of(row[i]);
    }
    total = std::accumulate(space.masses, space.masses + DIGITS, 0.0);
    uint32_t digit = DIGITS;
    int64_t count = 0;
    double mass = 0;
    while (digit > 0 && (count == 0 || (weighed ? mass < filters.top_p * total : count < filters.top_k))) {
        mass += space.masses[--digit];
        count += space.counts[digit];
    }
    return std::max(digit << (KEY_BITS - DIGIT_BITS), 1u);
}

// Candidates: the ids whose keys are at least `floor`.
void gather(const uint32_t *row, int64_t size, uint32_t floor, Space &space) {
    space.ids.clear();
    space.keys.clear();
    for (int64_t first = 0; first < size; first += BLOCK) {
        const int64_t end = std::min(size, first + BLOCK);
        int32_t found = 0;
        for (int64_t i = first; i < end; i++) found += static_cast<int32_t>(row[i]) >= static_cast<int32_t>(floor);
        for (int64_t i = first; found; i++) {
            if (row[i] < floor) continue;
            space.ids.push_back(i);
            space.keys.push_back(row[i]);
            found--;
        }
    }
}

// The candidates, at most the top_k largest, from the largest down.
void sort_falling(int64_t top_k, Space &space) {
    space.falling = space.keys;
    if (top_k < static_cast<int64_t>(space.falling.size())) {
        std::nth_element(space.falling.begin(), space.falling.begin() + top_k, space.falling.end(), std::greater<>());
        space.falling.resize(top_k);
    }
    if (space.falling.size() < RADIX_MIN) return std::sort(space.falling.begin(), space.falling.end(), std::greater<>());
    space.spare.resize(space.falling.size());
    for (int shift = 0; shift < KEY_BITS; shift += DIGIT_BITS) {
        std::fill_n(space.counts, DIGITS, 0);
        for (const uint32_t key : space.falling) space.counts[key >> shift & (DIGITS - 1)]++;
        int64_t place = 0;
        for (int digit = DIGITS; digit--;) place += std::exchange(space.counts[digit], place);
        for (const uint32_t key : space.falling) space.spare[space.counts[key >> shift & (DIGITS - 1)]++] = key;
        std::swap(space.falling, space.spare);
    }
}

// How many of the sorted candidates top_p keeps. -1: only with `all` that are above 0 could it be told, since
// top_p's share is of their sum from the largest down, and `total` is one of another order.
int64_t kept_of(Space &space, const Filters &filters, int64_t size, double total, bool all) {
    const auto count = static_cast<int64_t>(space.falling.size());
    if (filters.top_p >= 1) return count;
    space.reached.resize(count);
    double sum = 0;
    for (int64_t i = 0; i < count; i++) space.reached[i] = sum += weight_of(space.falling[i]);
    const bool exact = all || filters.top_k < size;
    // Each of two orders is off the true sum by at most 2^-53 for each number; twice that is allowed for.
    const double slack = exact ? 0 : static_cast<double>(size) * 0x1p-51, share = filters.top_p * (exact ? sum : total);
    const auto begin = space.reached.begin(), end = space.reached.end();
    const auto least = std::lower_bound(begin, end, share * (1 - slack));
    const auto most = std::lower_bound(least, end, share * (1 + slack));
    return least == most && most != end ? most - begin + 1 : -1;
}

// Leaves the candidates that the filters keep; among equals the lower ids.
void narrow(const uint32_t *row, int64_t size, const Filters &filters, Space &space) {
    const uint32_t least = std::max(key_of(filters.min_p), 1u);
    if (filters.top_k >= size && filters.top_p >= 1) return gather(row, size, least, space);
    double total;
    const uint32_t floor = floor_of(row, size, filters, total, space);
    int64_t kept = -1;
    for (bool all = floor == 1; kept < 0; all = true) {
        gather(row, size, all ? 1 : floor, space);
        sort_falling(filters.top_k, space);
        kept = kept_of(space, filters, size, total, all);
    }
    const uint32_t threshold = space.falling[kept - 1];
    const auto begin = space.falling.begin();
    int64_t equal = begin + kept - std::lower_bound(begin, begin + kept, threshold, std::greater<>());
    size_t left = 0;
    for (size_t i = 0; i < space.keys.size(); i++) {
        const uint32_t key = space.keys[i];
        if (key < threshold || key < least || (key == threshold && equal-- <= 0)) continue;
        space.ids[left] = space.ids[i];
        space.keys[left++] = key;
    }
    space.ids.resize(left);
    space.keys.resize(left);
}

// The first of `count` keys at which the sum, from `sum` on, is above the target; else the last.
int64_t reach(const uint32_t *keys, int64_t count, double sum, double target) {
    int64_t i = 0;
    while (i < count - 1 && !((sum += weight_of(keys[i])) > target)) i++;
    return i;
}

int64_t draw_whole(const uint32_t *row, int64_t size, double chance, Space &space) {
    space.reached.clear();  // by the end of each block
    double sum = 0;
    for (int64_t first = 0; first < size; first += BLOCK) {
        for (int64_t i = first; i < std::min(size, first + BLOCK); i++) sum += weight_of(row[i]);
        space.reached.push_back(sum);
    }
    const auto begin = space.reached.begin();
    const int64_t block = std::upper_bound(begin, space.reached.end() - 1, chance * sum) - begin;
    const int64_t first = block * BLOCK;
    return first + reach(row + first, std::min(BLOCK, size - first), block ? begin[block - 1] : 0, chance * sum);
}

int64_t draw(const uint32_t *row, int64_t size, const Filters &filters, double chance, Space &space) {
    const uint32_t largest = *std::max_element(row, row + size);
    if (largest == 0 || largest > key_of(1)) return -1;
    if (filters.top_k >= size && filters.top_p >= 1 && !(filters.min_p > 0)) return draw_whole(row, size, chance, space);
    narrow(row, size, filters, space);
    if (space.keys.empty()) return -1;
    double sum = 0;
    for (const uint32_t key : space.keys) sum += weight_of(key);
    return space.ids[reach(space.keys.data(), static_cast<int64_t>(space.keys.size()), 0, chance * sum)];
}

}  // namespace

// weights [rows, size]: the bits of float32 numbers of 0 to 1; a row with others, a NaN say, or of zeros alone gets -1.
// top_k (above 0), top_p, min_p and chances (0 to below 1): [rows]. tokens: [rows].
EXPORT void sluice_draw(const uint32_t *weights, int64_t rows, int64_t size, const int64_t *top_k, const double *top_p,
                        const float *min_p, const double *chances, int64_t *tokens, int64_t threads) {
    over_rows(rows, size, threads, [&](int64_t first, int64_t count) {
        Space space;
        for (int64_t row = first; row < first + count; row++)
            tokens[row] = draw(weights + row * size, size, {top_k[row], top_p[row], min_p[row]}, chances[row], space);
    });
}
