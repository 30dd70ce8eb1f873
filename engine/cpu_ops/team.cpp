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

// Does one call of the open loop; false when nobody is needed.
bool Team::take() {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    for (;;) {
        const auto left = static_cast<int64_t>(ticket & ((uint64_t{1} << LEFT_BITS) - 1));
        if (!left) return false;
        const auto call = call_.load(std::memory_order_relaxed);
        const void *body = body_.load(std::memory_order_relaxed);
        const int64_t count = count_.load(std::memory_order_relaxed);
        // Succeeds only if the ticket is what it was, so that what was read belongs to it.
        if (ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
            call(body, count - left);
            done_.fetch_add(1, std::memory_order_release);
            return true;
        }
    }
}

void Team::help() {
    for (int spins = 0; !over_.load(std::memory_order_acquire);) spins = take() ? 0 : spins + 1, relax(spins);
}

}  // namespace sluice
