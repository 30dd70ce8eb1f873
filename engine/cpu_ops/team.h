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
        Team team(threads);
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

    // body(0) … body(count - 1), each once, in any order; over when all are. A thread's own calls follow each other, so
    // that what one reads ahead is what its next call wants; it takes of others' when it has no more, from their ends.
    template <class Body>
    void share(int64_t count, const Body &body) {
        if (count > CALLS_MAX) {
            for (int64_t i = 0; i < count; i++) body(i);  // more than any tensor's rows
            return;
        }
        call_.store([](const void *data, int64_t i) { (*static_cast<const Body *>(data))(i); }, std::memory_order_relaxed);
        body_.store(&body, std::memory_order_relaxed);
        done_.store(0, std::memory_order_relaxed);
        open(count);
        while (take(0)) {
        }
        for (int spins = 0; done_.load(std::memory_order_acquire) < count; spins++) relax(spins);
    }

private:
    static constexpr int64_t CALLS_MAX = (1 << 24) - 1;  // of one loop
    static constexpr int RANGES_MAX = 32;  // of more threads some share
    static constexpr int SPINS = 2000;     // some 20 to 80 microseconds; then the core goes to whoever wants it

    // The calls of a loop that nobody has taken yet, of those that are one thread's: the loop's number in 16 bits, the
    // first call and the one behind the last in 24 each. A team ends long before its loops' numbers come again. While any
    // is left the team's fields are that loop's: the leader writes them only when all calls of the loop before are done.
    struct alignas(64) Range {
        std::atomic<uint64_t> left{0};
    };

    explicit Team(int64_t threads) : ranges_(static_cast<int>(std::min<int64_t>(threads, RANGES_MAX))) {}

    static void relax(int spins);
    void open(int64_t count);
    void help();
    bool take(int mine);
    bool take_of(Range &range, bool own);

    const int ranges_;
    Range range_[RANGES_MAX];
    std::atomic<void (*)(const void *, int64_t)> call_{nullptr};
    std::atomic<const void *> body_{nullptr};
    std::atomic<int64_t> done_{0};
    std::atomic<int> helpers_{0};
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
