// What the scheduler offers to the code that launches kernels.
#pragma once

#include <cstddef>

namespace cuda_on_cpu {

enum Order { NUMBERED, REVERSED, SHUFFLED };

// Runs `entry` with `args` once for each thread of the grid. Null, or what went wrong, valid until the next launch.
const char *launch(void (*entry)(void **), const unsigned *grid, const unsigned *size, size_t shared_bytes, void **args,
                   Order order, unsigned seed);

}  // namespace cuda_on_cpu
