// Teams of threads over loops of every length: each call is made once, and the leader's own follow each other. Threads of
// this program's own stand for the OpenMP runtime's.

#include "team.h"

#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

using namespace sluice;

namespace {

constexpr int TURNS = 40, LOOPS = 80;
constexpr int THREADS[] = {2, 3, 5, 40};  // also more than a team has ranges for

void parallel_region(void (*body)(void *), void *data, unsigned threads, unsigned) {
    std::vector<std::thread> others;
    for (unsigned i = 1; i < threads; i++) others.emplace_back(body, data);
    body(data);
    for (auto &each : others) each.join();
}

void check(bool holds, const char *what, int64_t calls, int threads) {
    if (holds) return;
    std::fprintf(stderr, "%s: %d calls, %d threads\n", what, static_cast<int>(calls), threads);
    std::exit(1);
}

void loop(int64_t calls, int threads) {
    std::vector<int> made(static_cast<size_t>(calls));
    std::vector<int64_t> by_leader;
    const auto leader = std::this_thread::get_id();
    parallel(calls, threads, [&](int64_t i) {
        made[static_cast<size_t>(i)]++;  // a second call would be a race, too
        if (std::this_thread::get_id() == leader) by_leader.push_back(i);
    });
    for (int each : made) check(each == 1, "a call was not made once", calls, threads);
    for (size_t i = 0; i < by_leader.size() && by_leader[i] < calls / threads; i++)
        check(by_leader[i] == static_cast<int64_t>(i), "the leader's calls are out of order", calls, threads);
}

}  // namespace

int main() {
    gomp_parallel = parallel_region;
    for (int turn = 0; turn < TURNS; turn++)
        for (int threads : THREADS)
            Team::lead(threads, [&] {
                for (int i = 0; i < LOOPS; i++) loop((i * 7 + turn) % 61 + 1, threads);
            });
}
