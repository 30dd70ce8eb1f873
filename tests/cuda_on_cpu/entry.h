// Launches by name, at the end of a unit that includes a kernel: KERNELS is the list of its kernels, as KERNEL(name)
// each. Compiled with CUDA_ON_CPU_PROGRAM it is a program that runs launches from its standard input, where every
// buffer has memory of its own and exact size, for the sanitizers; otherwise a library.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "scheduler.h"

namespace {

template <class... Parameters, std::size_t... At>
void call(void (*kernel)(Parameters...), void **arguments, std::index_sequence<At...>) {
    kernel(*static_cast<Parameters *>(arguments[At])...);
}

template <class... Parameters> void call(void (*kernel)(Parameters...), void **arguments) {
    call(kernel, arguments, std::index_sequence_for<Parameters...>{});
}

struct Named {
    const char *name;
    void (*entry)(void **);
};

const Named named[] = {
#define KERNEL(name) {#name, [](void **arguments) { call(name, arguments); }},
    KERNELS
#undef KERNEL
};

const char *launch_named(const char *name, const unsigned *grid, const unsigned *size, std::size_t shared_bytes,
                         void **arguments, int order, unsigned seed) {
    for (const Named &each : named) {
        if (std::strcmp(each.name, name) == 0) {
            return cuda_on_cpu::launch(each.entry, grid, size, shared_bytes, arguments, cuda_on_cpu::Order(order), seed);
        }
    }
    return "there is no kernel of this name";
}

}  // namespace

#ifndef CUDA_ON_CPU_PROGRAM
extern "C" const char *cuda_on_cpu_launch(const char *name, const unsigned *grid, const unsigned *size,
                                          std::size_t shared_bytes, void **arguments, int order, unsigned seed) {
    return launch_named(name, grid, size, shared_bytes, arguments, order, seed);
}
#else
namespace {

template <class Value> Value read() {
    Value value;
    if (std::fread(&value, sizeof value, 1, stdin) != 1) std::exit(0);
    return value;
}

// In: name (bytes before which stands their number, as everywhere), grid, block, shared bytes, order, seed, the
// buffers, then for each argument the number of its buffer (-1: the value itself follows, -2: a null pointer). Out: the
// error, and the buffers as they are now.
void run_one() {
    const auto read_bytes = [] {
        const auto size = read<std::uint64_t>();
        auto *bytes = static_cast<char *>(std::malloc(size ? size : 1));
        if (size && std::fread(bytes, 1, size, stdin) != size) std::exit(1);
        return std::pair(bytes, size);
    };
    const auto [name_bytes, name_size] = read_bytes();
    const std::string name(name_bytes, name_size);
    unsigned shape[6];
    for (unsigned &each : shape) each = read<unsigned>();
    const auto shared_bytes = read<std::uint64_t>();
    const auto order = read<int>();
    const auto seed = read<unsigned>();
    std::vector<std::pair<char *, std::uint64_t>> buffers(read<unsigned>());
    for (auto &each : buffers) each = read_bytes();
    std::vector<void *> values(read<unsigned>()), pointers(values.size());
    for (std::size_t at = 0; at < values.size(); at++) {
        const auto buffer = read<int>();
        values[at] = &pointers[at];
        if (buffer == -1) values[at] = read_bytes().first;
        if (buffer >= 0) pointers[at] = buffers[std::size_t(buffer)].first;
    }
    const char *error = launch_named(name.c_str(), shape, shape + 3, shared_bytes, values.data(), order, seed);
    const auto write_bytes = [](const char *bytes, std::uint64_t size) {
        std::fwrite(&size, sizeof size, 1, stdout);
        std::fwrite(bytes, 1, size, stdout);
    };
    write_bytes(error ? error : "", error ? std::strlen(error) : 0);
    for (const auto &[bytes, size] : buffers) write_bytes(bytes, size);
    std::fflush(stdout);
}

}  // namespace

int main() {
    run_one();
    return 0;
}
#endif
