// What the operators share: the kernels that were picked for this processor, and how a job is cut.

#pragma once

#include "kernels.h"
#include "products.h"
#include "team.h"

#include <algorithm>
#include <cstdint>

namespace sluice {

extern const Kernels *kernels;
extern const Products *products;

// A job of fewer numbers isn't cut: waking the threads takes some microseconds.
constexpr int64_t NUMBERS_MIN = 32768;

// Rows in spans: body(first, count).
template <class Body>
void over_rows(int64_t rows, int64_t size, int64_t threads, const Body &body) {
    const int64_t spans = rows * size < NUMBERS_MIN ? 1 : std::min(rows, threads * 4);
    const int64_t span = spans ? (rows + spans - 1) / spans : 0;
    parallel(spans, threads, [&](int64_t i) {
        const int64_t first = i * span, count = std::min(span, rows - first);
        if (count > 0) body(first, count);
    });
}

// Stores the step's keys and values, then attends.
void attend(const Attend &a, int64_t threads);

}  // namespace sluice

#define EXPORT extern "C" __attribute__((visibility("default")))
