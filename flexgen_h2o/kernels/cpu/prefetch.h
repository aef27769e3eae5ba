// Software prefetch. The target cache depends on the CPU.
//
// Memory-bound kernels prefetch most lines twice, the second time at half the distance. A Zen 4 reads
// 1.1 to 1.4 times as fast this way. The CPU drops a prefetch when its miss buffers are full.
#pragma once

#include "simd.h"

namespace ISA {

#if defined(__x86_64__)
// AMD family 19h (Zen 3 and 4): the L2 cache supports more outstanding misses than the L1 cache. On a
// Zen 4, line-by-line prefetch of 8-bit weights to L2 is up to 5% faster, and that of 4-bit weights is
// equally fast. On a Zen 3 both caches are equally fast for 4-bit and 6-bit weights.
INLINE bool prefers_l2() { return __builtin_cpu_is("amdfam19h"); }

// Return whether a non-temporal prefetch keeps a line in the L1 cache until it is read, at the rate of
// memory. This holds on other AMD CPUs. A Xeon reads most lines twice.
INLINE bool prefers_non_temporal() { return __builtin_cpu_is("amd") && !prefers_l2(); }
#else
INLINE bool prefers_l2() { return false; }
INLINE bool prefers_non_temporal() { return false; }
#endif

// Target cache of a prefetch, if any.
enum CacheLevel { NO_CACHE, NON_TEMPORAL, L2, L1 };

// A function that only prefetches has to be INLINE. Otherwise GCC treats it as free of side effects
// and drops the calls.
INLINE void prefetch(const void* line, CacheLevel to) {
    if (to == L2)
        __builtin_prefetch(line, 0, 2);
    else if (to == L1)
        __builtin_prefetch(line, 0, 3);
    else if (to == NON_TEMPORAL)
        __builtin_prefetch(line, 0, 0);
}

// Prefetch a line that will be written.
INLINE void prefetch_to_write(const void* line) {
    __builtin_prefetch(line, 1, 3);
}

// Return the target cache of lines that are needed soon.
INLINE CacheLevel nearest_cache() { return prefers_l2() ? L2 : L1; }

// Return the target cache of weights. Weights that are read once for few rows bypass the outer caches
// where the CPU supports it, so that these keep the data of the next step. With more rows, a line may
// be read again after its eviction from the L1 cache.
INLINE CacheLevel cache_of_weights(bool once) {
    return once && prefers_non_temporal() ? NON_TEMPORAL : nearest_cache();
}

}  // namespace ISA
