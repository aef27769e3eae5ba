// Asking memory for lines ahead of their use: into which cache, by the kind of CPU.
#pragma once

#include "simd.h"

namespace ISA {

#if defined(__x86_64__)
// AMD's family 19h (Zen 3 and 4), whose second-level cache has more requests under way than the
// nearest one. On a Zen 4 weights of 4 and 8 bits come at 0.8 to 0.9 of memory's rate that way, and
// those of 8 bits at 0.6 into the nearest cache. No Zen 3 has been timed.
INLINE bool prefers_second_level() { return __builtin_cpu_is("amdfam19h"); }

// Whether what is asked for past the outer caches stays in the nearest one until it is read, at
// memory's rate. On AMD's other CPUs it does; a Xeon had to read most of it twice.
INLINE bool passes_outer_caches() { return __builtin_cpu_is("amd") && !prefers_second_level(); }
#else
INLINE bool prefers_second_level() { return false; }
INLINE bool passes_outer_caches() { return false; }
#endif

// A line that is needed soon.
INLINE void prefetch_line(const void* line) {
    if (prefers_second_level())
        __builtin_prefetch(line, 0, 2);
    else
        __builtin_prefetch(line, 0, 3);
}

// A block of weights. What few rows meet once goes past the outer caches, where these are passed
// best, and leaves in them what the next step needs again; more rows may meet a block when the
// nearest cache has lost it.
INLINE void prefetch_block(const uint8_t* block, int64_t bytes, bool once) {
    if (once && passes_outer_caches())
        for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(block + line, 0, 0);
    else
        for (int64_t line = 0; line < bytes; line += 64) prefetch_line(block + line);
}

}  // namespace ISA
