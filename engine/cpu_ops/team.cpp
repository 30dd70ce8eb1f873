#include "team.h"

#include <sched.h>

namespace sluice {

GompParallel gomp_parallel = nullptr;
thread_local Team *Team::led = nullptr;

// Busy for a short while, then by the way of the scheduler.
void Team::relax(int spins) {
    if (spins >= SPINS) {
        sched_yield();
        return;
    }
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

// Gives each thread its part of a loop's calls.
void Team::open(int64_t count) {
    const uint64_t loop = ++loops_ << 48;
    const auto edge = [&](int64_t i) { return static_cast<uint64_t>(count * i / ranges_); };
    for (int i = 0; i < ranges_; i++)
        range_[i].left.store(loop | edge(i) << 24 | edge(i + 1), std::memory_order_release);
}

// Does one call of the open loop; false when nobody is needed.
bool Team::take(int mine) {
    for (int i = 0; i < ranges_; i++)
        if (take_of(range_[(mine + i) % ranges_], i == 0)) return true;
    return false;
}

bool Team::take_of(Range &range, bool own) {
    constexpr uint64_t MASK = CALLS_MAX;
    uint64_t left = range.left.load(std::memory_order_acquire);
    for (;;) {
        const uint64_t first = left >> 24 & MASK, end = left & MASK;
        if (first == end) return false;
        const auto call = call_.load(std::memory_order_relaxed);
        const void *body = body_.load(std::memory_order_relaxed);
        const uint64_t less = own ? left + (uint64_t{1} << 24) : left - 1;
        // Succeeds only if the range is what it was, so that what was read belongs to it.
        if (range.left.compare_exchange_weak(left, less, std::memory_order_acq_rel, std::memory_order_acquire)) {
            call(body, static_cast<int64_t>(own ? first : end - 1));
            done_.fetch_add(1, std::memory_order_release);
            return true;
        }
    }
}

void Team::help() {
    const int mine = (helpers_.fetch_add(1, std::memory_order_relaxed) + 1) % ranges_;
    for (int spins = 0; !over_.load(std::memory_order_acquire);) spins = take(mine) ? 0 : spins + 1, relax(spins);
}

}  // namespace sluice
