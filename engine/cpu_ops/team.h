// Loops that are shared among threads: torch's own, which its OpenMP runtime lends by an address that Python hands over,
// so that there is one pool of threads and nothing to link. Without one everything runs on the caller's thread.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace sluice {

typedef void (*GompParallel)(void (*body)(void *), void *data, unsigned threads, unsigned flags);
extern GompParallel gomp_parallel;

// A parallel region in which one thread leads through many loops and the others help with each. To wake the threads for
// every loop would take longer than many a loop does. A thread that the system has put to sleep holds nothing up but the
// body that it is in: whoever is awake does the rest.
class Team {
public:
    // The team that this thread leads, or null.
    static thread_local Team *led;

    // Calls `body` on this thread, with up to `threads` - 1 others helping in its loops.
    template <class Body>
    static void lead(int64_t threads, const Body &body) {
        if (led || threads < 2 || !gomp_parallel) return body();
        Team team;
        struct Shared {
            Team &team;
            const Body &body;
            const void *leader;
        } shared{team, body, &led};
        const auto enter = [](void *data) {
            Shared &shared = *static_cast<Shared *>(data);
            if (&led != shared.leader) return shared.team.help();
            led = &shared.team;
            shared.body();
            led = nullptr;
            shared.team.over_.store(true, std::memory_order_release);
        };
        gomp_parallel(enter, &shared, static_cast<unsigned>(threads), 0);
    }

    // body(0) … body(count - 1), each once, in any order; over when all are.
    template <class Body>
    void share(int64_t count, const Body &body) {
        call_.store([](const void *data, int64_t i) { (*static_cast<const Body *>(data))(i); }, std::memory_order_relaxed);
        body_.store(&body, std::memory_order_relaxed);
        count_.store(count, std::memory_order_relaxed);
        done_.store(0, std::memory_order_relaxed);
        ticket_.store(++loops_ << LEFT_BITS | static_cast<uint64_t>(count), std::memory_order_release);
        while (take()) {
        }
        for (int spins = 0; done_.load(std::memory_order_acquire) < count; spins++) relax(spins);
    }

private:
    static constexpr int LEFT_BITS = 32;
    static constexpr int SPINS = 2000;  // some 20 to 80 microseconds; then the core goes to whoever wants it

    static void relax(int spins);
    void help();
    bool take();

    // The loop's number, and how many of its calls nobody has taken yet. While any is left the fields below it are that
    // loop's: the leader writes them only when all calls of the loop before are done.
    std::atomic<uint64_t> ticket_{0};
    std::atomic<void (*)(const void *, int64_t)> call_{nullptr};
    std::atomic<const void *> body_{nullptr};
    std::atomic<int64_t> count_{0}, done_{0};
    std::atomic<bool> over_{false};
    uint64_t loops_ = 0;
};

// body(0) … body(count - 1), in any order, each once.
template <class Body>
void parallel(int64_t count, int64_t threads, const Body &body) {
    if (count < 2 || threads < 2 || !gomp_parallel) {
        for (int64_t i = 0; i < count; i++) body(i);
    } else if (Team::led) {
        Team::led->share(count, body);
    } else {
        Team::lead(std::min(threads, count), [&] { Team::led->share(count, body); });
    }
}

}  // namespace sluice
