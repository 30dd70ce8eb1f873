// Runs a grid: its CUDA blocks one after another, the threads of a block as fibers, each until its next barrier.
//
// A barrier is a counter. When no fiber can run and not all have ended, or threads meet at different lines, or one
// ended while others wait, the barrier is divergent: the launch stops and names the threads. Order of blocks and
// threads: as numbered, reversed, or shuffled anew each round. Shared memory is filled with ones, which is NaN in every
// type.
//
// Under ThreadSanitizer each CUDA thread is a fiber of its own there too. Only barriers, the start and the end of a
// launch order what threads do, so a missing barrier is a data race, within a block and between blocks. This file is
// compiled without instrumentation: its own bookkeeping is no part of what is checked.
#include "scheduler.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <list>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "language.h"

#ifdef CUDA_ON_CPU_THREAD
#include <sanitizer/tsan_interface.h>
extern "C" void *__tsan_get_current_fiber(void);
extern "C" void *__tsan_create_fiber(unsigned flags);
extern "C" void __tsan_destroy_fiber(void *fiber);
extern "C" void __tsan_switch_to_fiber(void *fiber, unsigned flags);
#endif
#ifdef CUDA_ON_CPU_ADDRESS
#include <sanitizer/common_interface_defs.h>
#endif

// Saves what a called function must keep on the stack at hand, and goes on where the other stack left off.
extern "C" void cuda_on_cpu_switch(void **save, void *load);
#if defined(__x86_64__)
asm(R"(
.text
.globl cuda_on_cpu_switch
.type cuda_on_cpu_switch, @function
cuda_on_cpu_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    retq
.size cuda_on_cpu_switch, .-cuda_on_cpu_switch
)");
constexpr int SAVED_WORDS = 6;
#elif defined(__aarch64__)
asm(R"(
.text
.globl cuda_on_cpu_switch
.type cuda_on_cpu_switch, %function
cuda_on_cpu_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
.size cuda_on_cpu_switch, .-cuda_on_cpu_switch
)");
constexpr int SAVED_WORDS = 20;
#else
#error "the context switch is written for x86-64 and aarch64"
#endif

namespace cuda_on_cpu {

Thread *current;

namespace {

constexpr size_t STACK_BYTES = 256 << 10;  // a sanitizer's frames are several times as large as plain ones
constexpr unsigned THREADS_MAX = 1024;     // CUDA's limit for a block
constexpr int NAMED_MAX = 6;               // threads named for each place in an error

enum State { READY, AT_BLOCK, AT_WARP, DONE };

struct Fiber {
    Thread thread;
    State state;
    void *stack_pointer;
    char *stack;
    const char *file;
    int line;
    unsigned meetings[2];  // barriers passed, of the block and of the warp
    void *tsan_fiber;
    void *fake_stack;
};

struct Warp {
    unsigned arrived;
    Slot slots[2][WARP];
    char order[2];  // ThreadSanitizer's handles on the barrier, used in turn: a fast thread's next arrival isn't this one
};

struct Block {
    unsigned threads = 0, ended = 0, arrived = 0;
    char order[2] = {};
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    std::unique_ptr<unsigned char[]> shared;
};

std::list<Block> blocks;  // the last is running; under ThreadSanitizer all of a launch, so that no two use the same memory
Block *block;
Fiber *running;
void *scheduler_stack_pointer;
void (*kernel)(void **);
void **arguments;
std::string error;
#ifdef CUDA_ON_CPU_THREAD
void *scheduler_fiber;
char launch_end;
#endif
#ifdef CUDA_ON_CPU_ADDRESS
const void *scheduler_stack;
size_t scheduler_stack_bytes;
void *scheduler_fake_stack;
#endif

// The scheduler goes on. `last`: this fiber never comes back.
void yield(bool last = false) {
    Fiber *fiber = running;
#ifdef CUDA_ON_CPU_THREAD
    __tsan_switch_to_fiber(scheduler_fiber, 1);
#endif
#ifdef CUDA_ON_CPU_ADDRESS
    __sanitizer_start_switch_fiber(last ? nullptr : &fiber->fake_stack, scheduler_stack, scheduler_stack_bytes);
#endif
    cuda_on_cpu_switch(&fiber->stack_pointer, scheduler_stack_pointer);
#ifdef CUDA_ON_CPU_ADDRESS
    __sanitizer_finish_switch_fiber(fiber->fake_stack, &scheduler_stack, &scheduler_stack_bytes);
#endif
    (void)last;
}

void resume(Fiber &fiber, bool first) {
    running = &fiber;
    current = &fiber.thread;
#ifdef CUDA_ON_CPU_THREAD
    __tsan_switch_to_fiber(fiber.tsan_fiber, first ? 0 : 1);  // the host's work before the launch comes before
#endif
#ifdef CUDA_ON_CPU_ADDRESS
    __sanitizer_start_switch_fiber(&scheduler_fake_stack, fiber.stack, STACK_BYTES);
#endif
    cuda_on_cpu_switch(&scheduler_stack_pointer, fiber.stack_pointer);
#ifdef CUDA_ON_CPU_ADDRESS
    __sanitizer_finish_switch_fiber(scheduler_fake_stack, nullptr, nullptr);
#endif
    (void)first;
}

void run_thread() {
#ifdef CUDA_ON_CPU_ADDRESS
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_bytes);
#endif
    kernel(arguments);
#ifdef CUDA_ON_CPU_THREAD
    __tsan_release(&launch_end);
#endif
    running->state = DONE;
    block->ended++;
    yield(true);
    std::abort();
}

char *new_stack() {
    const size_t page = size_t(sysconf(_SC_PAGESIZE));
    void *memory = mmap(nullptr, STACK_BYTES + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        std::perror("cuda_on_cpu: a stack");
        std::abort();
    }
    mprotect(memory, page, PROT_NONE);  // below the stack, so that an overflow is seen
    return static_cast<char *>(memory) + page;
}

// Kept for the next block, except under ThreadSanitizer, which would see the threads of two blocks on one stack.
char *stack_of(unsigned number) {
#ifdef CUDA_ON_CPU_THREAD
    (void)number;
    return new_stack();
#else
    static std::vector<char *> stacks;
    while (stacks.size() <= number) stacks.push_back(new_stack());
    return stacks[number];
#endif
}

void start(Fiber &fiber, unsigned number) {
    fiber.state = READY;
    fiber.stack = stack_of(number);
    fiber.meetings[0] = fiber.meetings[1] = 0;
    auto **top = reinterpret_cast<void **>(fiber.stack + STACK_BYTES);
#if defined(__x86_64__)
    *--top = nullptr;  // where run_thread would return to; it keeps the stack aligned as after a call
    *--top = reinterpret_cast<void *>(run_thread);
    top -= SAVED_WORDS;
    std::fill(top, top + SAVED_WORDS, nullptr);
#else
    top -= SAVED_WORDS;
    std::fill(top, top + SAVED_WORDS, nullptr);
    top[11] = reinterpret_cast<void *>(run_thread);  // x30
#endif
    fiber.stack_pointer = top;
#ifdef CUDA_ON_CPU_THREAD
    fiber.tsan_fiber = __tsan_create_fiber(0);
#endif
}

void finish(Fiber &fiber) {
#ifdef CUDA_ON_CPU_THREAD
    __tsan_destroy_fiber(fiber.tsan_fiber);
    const size_t page = size_t(sysconf(_SC_PAGESIZE));
    munmap(fiber.stack - page, STACK_BYTES + page);
#else
    (void)fiber;
#endif
}

void set_ready(unsigned first, unsigned end, State from) {
    for (unsigned at = first; at < end; at++) {
        if (block->fibers[at].state == from) block->fibers[at].state = READY;
    }
}

// "threads 0, 1, 2 … (30) wait at paged.cu:12; threads 3, 4 have ended"
std::string who_waits_where() {
    std::vector<std::pair<std::string, std::vector<unsigned>>> places;
    for (const Fiber &fiber : block->fibers) {
        std::string place = "have ended";
        if (fiber.state != DONE) {
            const std::string file = fiber.file ? fiber.file : "";
            place = std::string(fiber.state == AT_BLOCK ? "wait for the block at " : "wait for their warp at ") +
                    file.substr(file.rfind('/') + 1) + ":" + std::to_string(fiber.line);
        }
        auto found = std::find_if(places.begin(), places.end(), [&](auto &each) { return each.first == place; });
        if (found == places.end()) found = places.insert(found, {place, {}});
        found->second.push_back(unsigned(&fiber - block->fibers.data()));
    }
    std::string text;
    for (auto &[place, threads] : places) {
        text += (text.empty() ? "threads " : "; threads ");
        for (size_t at = 0; at < threads.size() && at < NAMED_MAX; at++) text += (at ? ", " : "") + std::to_string(threads[at]);
        if (threads.size() > NAMED_MAX) text += ", … (" + std::to_string(threads.size()) + ")";
        text += " " + place;
    }
    return text;
}

void diverged() {
    const Index at = block->fibers[0].thread.block;
    error = "divergent barrier in block (" + std::to_string(at.x) + ", " + std::to_string(at.y) + ", " +
            std::to_string(at.z) + "): " + who_waits_where();
}

bool meet_at_one_line(unsigned first, unsigned end) {
    for (unsigned at = first; at < end; at++) {
        if (block->fibers[at].line != block->fibers[first].line || block->fibers[at].state != block->fibers[first].state) return false;
    }
    return true;
}

// Waits until all of [first, end) are here. `kind` 0: the block, 1: a warp. Without `order` memory isn't ordered.
void meet(const char *file, int line, int kind, unsigned first, unsigned end, unsigned &arrived, char *order) {
    Fiber *fiber = running;
    fiber->file = file;
    fiber->line = line;
    fiber->state = kind == 0 ? AT_BLOCK : AT_WARP;
    [[maybe_unused]] char *handle = order ? &order[fiber->meetings[kind]++ & 1] : nullptr;
#ifdef CUDA_ON_CPU_THREAD
    if (handle) __tsan_release(handle);
#endif
    if (++arrived == end - first) {
        arrived = 0;
        if (meet_at_one_line(first, end)) {
            set_ready(first, end, fiber->state);
        } else {
            diverged();
        }
    }
    yield();
#ifdef CUDA_ON_CPU_THREAD
    if (handle) __tsan_acquire(handle);
#endif
}

void start_block(Index size, Index grid, Index where, size_t shared_bytes) {
    const unsigned threads = size.x * size.y * size.z;
    block = &blocks.emplace_back();
    block->threads = threads;
    block->fibers.resize(threads);
    block->warps.resize((threads + WARP - 1) / WARP);
    block->shared.reset(new unsigned char[std::max<size_t>(shared_bytes, 1)]);
    std::memset(block->shared.get(), 0xff, shared_bytes);
    for (unsigned at = 0; at < threads; at++) {
        Thread &thread = block->fibers[at].thread;
        thread.thread = {at % size.x, at / size.x % size.y, at / size.x / size.y};
        thread.block = where;
        thread.block_size = size;
        thread.grid_size = grid;
        thread.shared = block->shared.get();
        thread.slots = block->warps[at / WARP].slots;
        thread.lane = int(at % WARP);
        start(block->fibers[at], at);
    }
}

void run_block(const std::vector<unsigned> &threads_in_order, Order order, std::mt19937 &random) {
    std::vector<unsigned> turns = threads_in_order;
    for (bool first = true; error.empty() && block->ended < block->threads; first = false) {
        if (order == SHUFFLED) std::shuffle(turns.begin(), turns.end(), random);
        bool progress = false;
        for (unsigned number : turns) {
            Fiber &fiber = block->fibers[number];
            if (fiber.state != READY) continue;
            progress = true;
            resume(fiber, first);
            if (!error.empty()) return;
        }
        if (!progress) diverged();
    }
}

std::vector<unsigned> in_order(unsigned count, Order order, std::mt19937 &random) {
    std::vector<unsigned> numbers(count);
    std::iota(numbers.begin(), numbers.end(), 0u);
    if (order == REVERSED) std::reverse(numbers.begin(), numbers.end());
    if (order == SHUFFLED) std::shuffle(numbers.begin(), numbers.end(), random);
    return numbers;
}

}  // namespace

void meet_block(const char *file, int line) {
    meet(file, line, 0, 0, block->threads, block->arrived, block->order);
}

namespace {

void meet_warp(const char *file, int line, unsigned mask, bool ordered) {
    if (mask != 0xffffffffu) fail(file, line, "only full warps are emulated");
    const unsigned first = unsigned(running - block->fibers.data()) / WARP * WARP;
    if (first + WARP > block->threads) fail(file, line, "the block's last warp isn't full");
    Warp &warp = block->warps[first / WARP];
    meet(file, line, 1, first, first + WARP, warp.arrived, ordered ? warp.order : nullptr);
}

}  // namespace

void meet_warp(const char *file, int line, unsigned mask) {
    meet_warp(file, line, mask, true);
}

const Slot *hand(const Slot &own, const char *file, int line, unsigned mask) {
    Slot *slots = current->slots[current->exchanges++ & 1];
    slots[current->lane] = own;
    meet_warp(file, line, mask, false);
    return slots;
}

Slot handed(const Slot *slots, int lane) {
    return slots[lane];
}

void fail(const char *file, int line, const char *what) {
    const std::string name = file;
    error = name.substr(name.rfind('/') + 1) + ":" + std::to_string(line) + ": " + what;
    yield(true);
    std::abort();
}

const char *launch(void (*entry)(void **), const unsigned *grid, const unsigned *size, size_t shared_bytes, void **args,
                   Order order, unsigned seed) {
    const unsigned threads = size[0] * size[1] * size[2];
    const unsigned count = grid[0] * grid[1] * grid[2];
    error.clear();
    blocks.clear();
    if (threads == 0 || threads > THREADS_MAX || count == 0) return (error = "a launch needs 1 to 1024 threads and a block").c_str();
    kernel = entry;
    arguments = args;
    std::mt19937 random(seed);
#ifdef CUDA_ON_CPU_THREAD
    scheduler_fiber = __tsan_get_current_fiber();
#endif
    for (unsigned number : in_order(count, order, random)) {
        const Index where{number % grid[0], number / grid[0] % grid[1], number / grid[0] / grid[1]};
        start_block({size[0], size[1], size[2]}, {grid[0], grid[1], grid[2]}, where, shared_bytes);
        run_block(in_order(threads, order, random), order, random);
        if (!error.empty()) break;
        for (Fiber &fiber : block->fibers) finish(fiber);
#ifndef CUDA_ON_CPU_THREAD
        blocks.clear();
#endif
    }
#ifdef CUDA_ON_CPU_THREAD
    __tsan_acquire(&launch_end);
#endif
    if (error.empty()) blocks.clear();
    return error.empty() ? nullptr : error.c_str();
}

}  // namespace cuda_on_cpu
