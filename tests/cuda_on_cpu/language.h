// CUDA's language for g++: what a kernel in cuda/ may use, so that its very source runs on the CPU.
//
// Every CUDA thread is a fiber (scheduler.cpp). A fiber runs until it comes to a barrier, so threads of a warp are
// never in step by luck; whatever holds only because real warps run in step is found. Warp functions take the full mask
// alone. __half and __nv_bfloat16 are NVIDIA's own (cuda_fp16.h and cuda_bf16.h have host code). It stands in for
// nvcc's built-ins and is included before the kernel; it is compiled with -fno-strict-aliasing, because kernels read
// numbers as vectors and back.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define __launch_bounds__(...)
#define __restrict__ __restrict

namespace cuda_on_cpu {

constexpr int WARP = 32;
constexpr int PENDING_COPIES_MAX = 128;  // asynchronous copies of a thread; a kernel that starts more has lost a wait

struct Index {
    unsigned x, y, z;
};

// What a lane hands to its warp at once; the most is the fragments of one mma, as floats.
struct Slot {
    uint64_t word[8];
};

struct Copy {
    void *target;
    const void *source;
    unsigned bytes;
    int group;
};

// One CUDA thread. `exchanges` counts the warp functions it has called: two sets of slots are used in turn, so that one
// barrier for each exchange is enough.
struct Thread {
    Index thread, block, block_size, grid_size;
    unsigned char *shared;
    Slot (*slots)[WARP];  // [2] of the warp
    int lane;
    unsigned exchanges;
    int copies, copy_group;
    Copy pending[PENDING_COPIES_MAX];
};

extern Thread *current;

void meet_block(const char *file, int line);
void meet_warp(const char *file, int line, unsigned mask);

// Hands a slot to the warp and waits for it; then `handed` gives what a lane has handed. As on a GPU this orders no
// other memory: a thread that may read what another wrote after a shuffle alone has a race.
const Slot *hand(const Slot &own, const char *file, int line, unsigned mask);
Slot handed(const Slot *slots, int lane);
[[noreturn]] void fail(const char *file, int line, const char *what);

template <class Value> const Slot *exchange(Value value, const char *file, int line, unsigned mask) {
    static_assert(sizeof(Value) <= sizeof(Slot), "too large for a slot");
    Slot own{};
    std::memcpy(&own, &value, sizeof(Value));
    return hand(own, file, line, mask);
}

template <class Value> Value taken(const Slot *slots, int lane) {
    const Slot slot = handed(slots, lane);
    Value value;
    std::memcpy(&value, &slot, sizeof(Value));
    return value;
}

template <class Value>
Value shuffle(Value value, int lane, const char *file, int line, unsigned mask) {
    return taken<Value>(exchange(value, file, line, mask), lane & (WARP - 1));
}

inline unsigned ballot(bool vote, const char *file, int line, unsigned mask) {
    const Slot *slots = exchange(vote, file, line, mask);
    unsigned votes = 0;
    for (int lane = 0; lane < WARP; lane++) votes |= unsigned(taken<bool>(slots, lane)) << lane;
    return votes;
}

template <class Value> Value fetch_add(Value *at, Value more) {
    if constexpr (std::is_integral_v<Value>) {
        return __atomic_fetch_add(at, more, __ATOMIC_RELAXED);
    } else {
        Value before, after;
        __atomic_load(at, &before, __ATOMIC_RELAXED);
        do {
            after = before + more;
        } while (!__atomic_compare_exchange(at, &before, &after, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
        return before;
    }
}

inline unsigned byte_permute(unsigned low, unsigned high, unsigned selector) {
    const uint64_t bytes = uint64_t(high) << 32 | low;
    unsigned result = 0;
    for (int at = 0; at < 4; at++) result |= unsigned(bytes >> 8 * (selector >> 4 * at & 7) & 255) << 8 * at;
    return result;
}

// mma.m16n8k16, row.col, float sums: each lane hands out its parts of A and B as numbers, then makes its four sums.
// Fragments are as in the PTX manual: with g = lane / 4 and t = lane % 4, A has rows g and g + 8 and columns 2t, 2t +
// 1, 2t + 8, 2t + 9; B has those rows of column g; C has rows g and g + 8, columns 2t and 2t + 1.
struct Fragments {
    float a[8], b[4];
};

template <class ToFloat>
void multiply(float *c, const unsigned *a, const unsigned *b, ToFloat to_float, const char *file, int line) {
    Fragments own;
    for (int at = 0; at < 8; at++) own.a[at] = to_float(uint16_t(a[at / 2] >> 16 * (at % 2)));
    for (int at = 0; at < 4; at++) own.b[at] = to_float(uint16_t(b[at / 2] >> 16 * (at % 2)));
    const Slot *slots = exchange(own, file, line, 0xffffffffu);
    const int group = current->lane / 4, pair = current->lane % 4;
    for (int column = 0; column < 2; column++) {
        for (int t = 0; t < 4; t++) {
            const auto left = taken<Fragments>(slots, 4 * group + t);
            const auto right = taken<Fragments>(slots, 4 * (2 * pair + column) + t);
            for (int half = 0; half < 2; half++) {
                c[2 * half + column] += left.a[2 * half] * right.b[0] + left.a[2 * half + 1] * right.b[1] +
                                        left.a[4 + 2 * half] * right.b[2] + left.a[5 + 2 * half] * right.b[3];
            }
        }
    }
}

// Asynchronous copies happen at the wait that covers them and not before: the latest moment that the hardware has, so a
// kernel that reads too early reads what was there.
inline void copy_later(void *target, const void *source, unsigned bytes, const char *file, int line) {
    if (current->copies == PENDING_COPIES_MAX) fail(file, line, "more asynchronous copies are pending than a thread may have");
    current->pending[current->copies++] = {target, source, bytes, current->copy_group};
}

inline void copy_wait(int groups_left) {
    int kept = 0;
    for (int at = 0; at < current->copies; at++) {
        const Copy copy = current->pending[at];
        if (copy.group < current->copy_group - groups_left) {
            std::memcpy(copy.target, copy.source, copy.bytes);
        } else {
            current->pending[kept++] = copy;
        }
    }
    current->copies = kept;
}

}  // namespace cuda_on_cpu

#define threadIdx (::cuda_on_cpu::current->thread)
#define blockIdx (::cuda_on_cpu::current->block)
#define blockDim (::cuda_on_cpu::current->block_size)
#define gridDim (::cuda_on_cpu::current->grid_size)
#define __syncthreads() ::cuda_on_cpu::meet_block(__FILE__, __LINE__)
#define __syncwarp() ::cuda_on_cpu::meet_warp(__FILE__, __LINE__, 0xffffffffu)
#define __shfl_sync(mask, value, from) ::cuda_on_cpu::shuffle(value, from, __FILE__, __LINE__, mask)
#define __shfl_xor_sync(mask, value, with) \
    ::cuda_on_cpu::shuffle(value, ::cuda_on_cpu::current->lane ^ (with), __FILE__, __LINE__, mask)
#define __ballot_sync(mask, vote) ::cuda_on_cpu::ballot(vote, __FILE__, __LINE__, mask)
#define __byte_perm(low, high, selector) ::cuda_on_cpu::byte_permute(low, high, selector)
#define atomicAdd(at, more) ::cuda_on_cpu::fetch_add(at, more)

inline unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline float rsqrtf(float value) {
    return 1.0f / std::sqrt(value);
}

inline int min(int left, int right) {
    return left < right ? left : right;
}

inline int max(int left, int right) {
    return left > right ? left : right;
}
