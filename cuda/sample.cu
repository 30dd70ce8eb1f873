// sample: draws one token for each row of logits, by temperature, top-k, top-p and min-p, as engine/sampler.py does.
//
// Layout: logits and weights (scratch) are [row][vocab] floats; tokens [row]. Of each row: temperature (above 0), top_k
// (at least 1, at most vocab), top_p, min_p, and the four words that its randomness is a function of: words [row][4]
// (seed, prompt index, choice index, token index). A token's weight is exp((logit - highest) / temperature). top-k and
// top-p keep the heaviest, of equals those with lower ids; min-p is relative to the heaviest; the draw inverts the sums
// in the order of ids. A row with a NaN or an infinite logit, or with no finite one, gets -1. The least temperature with
// a top_k of 1 chooses the largest logit, of equals that of the lowest id.
// Launch: grid (rows), 512 threads; shared memory for Scratch.
// Work: reads the row twice from memory, then four times from L2, where a row (200 KB to 600 KB) stays, and four times
// more for each threshold: none for a row without top-k and top-p or for a top_k of 1, one for either, two for both.
// Why: sorting a row moves it tens of times. The threshold is found by its bits instead, 8 at a time from the top, each
// time by a histogram. Weights are summed as whole numbers of 2^-44, so that sums by atomics don't depend on the order
// of threads; a vocabulary of 2^19 tokens fits in 64 bits, and what is lost is below 2^-44 of the heaviest. Most of a
// row's weights are in a few bins, so threads meet there: an addition of 64 bits to shared memory, which is a loop of
// compare-and-swap, would try again once for each of them. It is made of two of 32 bits, which the hardware has.
#include "warp.cuh"

typedef unsigned long long Sum;

constexpr int BINS = 256;
constexpr int GROUP_BINS = 16;  // bins of a group, which are passed over at once

struct Scratch {
    Sum sums[BINS];
    unsigned counts[BINS];
    Sum group_sums[BINS / GROUP_BINS];
    unsigned group_counts[BINS / GROUP_BINS];
    Sum thread_sums[512];
    unsigned thread_counts[512];
    float highest[512 / WARP_THREADS];
    unsigned prefix, above_count;  // of the threshold's bits, and of the weights above it
    Sum above_sum;
};

// A weight of 0 to 1 times 2^44, cut off: by its bits, since many GPUs have few units for double.
__device__ Sum whole(float weight) {
    const unsigned bits = __float_as_uint(weight);
    const Sum digits = (bits & 0x7fffffu) | 0x800000u;  // times 2^(exponent - 150)
    const int shift = (int)(bits >> 23) - 150 + 44;
    return shift >= 0 ? digits << shift : shift > -24 ? digits >> -shift : 0;
}

// sum += more, whoever else does; the lower half's carry is told to the thread that made it.
__device__ void add(Sum &sum, Sum more) {
    unsigned *half = reinterpret_cast<unsigned *>(&sum);
    const unsigned low = (unsigned)more, before = atomicAdd(half, low);
    const unsigned high = (unsigned)(more >> 32) + (before + low < before ? 1u : 0u);
    if (high != 0) atomicAdd(half + 1, high);
}

// The finaliser of SplitMix64 (Steele, Lea, Flood 2014), as in engine/sampler.py.
__device__ Sum mixed(Sum x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

// Goes down from the last of `size` places to the first that has anything and with which `most` and `share` are reached,
// or to 0. What lies above it is added to what is above.
__device__ int descend(Scratch &scratch, const unsigned *counts, const Sum *sums, int size, unsigned most, Sum share) {
    int at = size - 1;
    for (; at > 0; at--) {
        const unsigned count = scratch.above_count + counts[at];
        const Sum sum = scratch.above_sum + sums[at];
        if (counts[at] != 0 && count >= most && sum >= share) break;
        scratch.above_count = count;
        scratch.above_sum = sum;
    }
    return at;
}

// Finds the largest weight such that those from it on are at least `most` in number, and in sum at least `share`
// (either may be 0). Weights aren't negative, so their bits are in their order. The results are in scratch, for all
// threads.
__device__ void find_threshold(Scratch &scratch, const float *weights, int vocab, unsigned most, Sum share) {
    if (threadIdx.x == 0) {
        scratch.prefix = scratch.above_count = 0;
        scratch.above_sum = 0;
    }
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x) scratch.counts[bin] = 0, scratch.sums[bin] = 0;
        __syncthreads();
        const unsigned prefix = scratch.prefix, known = shift == 24 ? 0 : 0xffffff00u << shift;
        for (int at = threadIdx.x; at < vocab; at += blockDim.x) {
            const unsigned bits = __float_as_uint(weights[at]);
            if (((bits ^ prefix) & known) != 0) continue;
            atomicAdd(&scratch.counts[bits >> shift & 255], 1u);
            add(scratch.sums[bits >> shift & 255], whole(weights[at]));
        }
        __syncthreads();
        if (threadIdx.x < BINS) {
            const unsigned count = total<GROUP_BINS>(scratch.counts[threadIdx.x]);
            const Sum sum = total<GROUP_BINS>(scratch.sums[threadIdx.x]);
            if (threadIdx.x % GROUP_BINS == 0) {
                scratch.group_counts[threadIdx.x / GROUP_BINS] = count;
                scratch.group_sums[threadIdx.x / GROUP_BINS] = sum;
            }
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            const int group = descend(scratch, scratch.group_counts, scratch.group_sums, BINS / GROUP_BINS, most, share);
            const int first = group * GROUP_BINS;
            const int bin = first + descend(scratch, scratch.counts + first, scratch.sums + first, GROUP_BINS, most, share);
            scratch.prefix |= (unsigned)bin << shift;
        }
        __syncthreads();
    }
}

// How many of the heaviest stay; the threshold is then that of the last of them. `all` is the sum of all weights.
__device__ unsigned kept_count(Scratch &scratch, const float *weights, int vocab, unsigned most, double top_p, Sum all) {
    const bool every = most == (unsigned)vocab, cut = top_p < 1.0;
    if (most == 1 || (every && !cut)) {  // the heaviest, which is 1, or whatever there is
        if (threadIdx.x == 0) {
            scratch.prefix = most == 1 ? __float_as_uint(1.0f) : 0;
            scratch.above_count = 0;
        }
        __syncthreads();
        return most;
    }
    Sum reach = all;
    if (!every) {
        find_threshold(scratch, weights, vocab, most, 0);
        if (!cut) return most;
        reach = scratch.above_sum + (most - scratch.above_count) * whole(__uint_as_float(scratch.prefix));
        __syncthreads();  // the first threshold is read
    }
    const Sum rounded_share = (Sum)ceil(top_p * (double)reach), share = rounded_share < reach ? rounded_share : reach;
    find_threshold(scratch, weights, vocab, 0, share);
    const Sum equal = whole(__uint_as_float(scratch.prefix));  // not 0, as the share is reached by it
    const Sum missing = share > scratch.above_sum ? share - scratch.above_sum : 0;
    return scratch.above_count + (missing > equal ? (unsigned)((missing + equal - 1) / equal) : 1u);
}

extern "C" __global__ void __launch_bounds__(512)
    sample(long long *__restrict__ tokens, float *weights, const float *__restrict__ logits, const float *__restrict__ temperature,
           const int *__restrict__ top_k, const double *__restrict__ top_p, const float *__restrict__ min_p,
           const Sum *__restrict__ words, int vocab) {
    Scratch &scratch = *reinterpret_cast<Scratch *>(shared_memory());
    const int row = blockIdx.x, thread = threadIdx.x;
    logits += (long long)row * vocab;
    weights += (long long)row * vocab;
    float highest = __uint_as_float(0xff800000u);
    for (int at = thread; at < vocab; at += blockDim.x) {
        const float logit = logits[at];
        highest = fmaxf(highest, logit == logit ? logit : __uint_as_float(0x7f800000u));  // fmaxf passes over a NaN
    }
    highest = maximum<WARP_THREADS>(highest);
    if (thread % WARP_THREADS == 0) scratch.highest[thread / WARP_THREADS] = highest;
    __syncthreads();
    for (int warp = 0; warp < (int)blockDim.x / WARP_THREADS; warp++) highest = fmaxf(highest, scratch.highest[warp]);
    if (!(fabsf(highest) < __uint_as_float(0x7f800000u))) {
        if (thread == 0) tokens[row] = -1;
        return;
    }
    Sum all = 0;
    for (int at = thread; at < vocab; at += blockDim.x) {
        weights[at] = expf((logits[at] - highest) / temperature[row]);
        all += whole(weights[at]);
    }
    all = total<WARP_THREADS>(all);
    if (thread % WARP_THREADS == 0) scratch.thread_sums[thread / WARP_THREADS] = all;
    __syncthreads();
    all = 0;
    for (int warp = 0; warp < (int)blockDim.x / WARP_THREADS; warp++) all += scratch.thread_sums[warp];

    const unsigned kept = kept_count(scratch, weights, vocab, (unsigned)top_k[row], top_p[row], all);
    const float threshold = __uint_as_float(scratch.prefix);
    const unsigned spare = kept - scratch.above_count;  // of those equal to the threshold

    // Each thread has neighbouring ids, so that what comes before its own is what the threads before it have.
    const int share = (vocab + blockDim.x - 1) / blockDim.x, first = thread * share, end = min(first + share, vocab);
    unsigned equals = 0;
    for (int at = first; at < end; at++) equals += weights[at] == threshold;
    scratch.thread_counts[thread] = equals;
    __syncthreads();
    unsigned before = 0;
    for (int other = 0; other < thread; other++) before += scratch.thread_counts[other];
    Sum sum = 0;
    unsigned seen = before;
    for (int at = first; at < end; at++) {
        const bool stays = weights[at] > threshold || (weights[at] == threshold && seen++ < spare);
        if (stays && weights[at] >= min_p[row]) sum += whole(weights[at]);
    }
    scratch.thread_sums[thread] = sum;
    __syncthreads();
    Sum state = 0, reached = 0;
    all = 0;
    for (int word = 0; word < 4; word++) state = mixed((state ^ words[4 * row + word]) + 0x9E3779B97F4A7C15ull);
    for (int other = 0; other < (int)blockDim.x; other++) {
        if (other < thread) reached += scratch.thread_sums[other];
        all += scratch.thread_sums[other];
    }
    const double target = (double)(state >> 11) * (1.0 / 9007199254740992.0) * (double)all;
    if (!((double)reached <= target && target < (double)(reached + sum))) return;
    seen = before;
    for (int at = first; at < end; at++) {
        const bool stays = weights[at] > threshold || (weights[at] == threshold && seen++ < spare);
        if (stays && weights[at] >= min_p[row]) reached += whole(weights[at]);
        if (target < (double)reached) {
            tokens[row] = at;
            return;
        }
    }
}
