// Asking memory for lines ahead of their use: into which cache, by the kind of CPU.
//
// Where memory binds, lines are asked for twice, in most places the second time when half of the way
// to them is gone: a Zen 4 reads 1.1 to 1.4 times as fast then. It may leave a line out that is asked
// for while it waits for as many as it can.
#pragma once

#include "simd.h"

namespace ISA {

#if defined(__x86_64__)
// AMD's family 19h (Zen 3 and 4), whose second-level cache has more requests under way than the
// nearest one. On a Zen 4 weights of 8 bits, asked for line by line, come up to a twentieth faster
// that way, those of 4 as fast; in bursts it was a third. No Zen 3 has been timed.
INLINE bool prefers_second_level() { return __builtin_cpu_is("amdfam19h"); }

// Whether what is asked for past the outer caches stays in the nearest one until it is read, at
// memory's rate. On AMD's other CPUs it does; a Xeon had to read most of it twice.
INLINE bool passes_outer_caches() { return __builtin_cpu_is("amd") && !prefers_second_level(); }
#else
INLINE bool prefers_second_level() { return false; }
INLINE bool passes_outer_caches() { return false; }
#endif

// Where lines are asked for to, if at all.
enum CacheLevel { NOWHERE, PAST_OUTER, SECOND, NEAREST };

// A function that only asks for lines has to be INLINE: GCC takes others for ones without effects, and
// drops their calls.
INLINE void prefetch(const void* line, CacheLevel to) {
    if (to == SECOND)
        __builtin_prefetch(line, 0, 2);
    else if (to == NEAREST)
        __builtin_prefetch(line, 0, 3);
    else if (to == PAST_OUTER)
        __builtin_prefetch(line, 0, 0);
}

// A line that will be written.
INLINE void prefetch_to_write(const void* line) {
    __builtin_prefetch(line, 1, 3);
}

// For lines that are needed soon.
INLINE CacheLevel near_cache() { return prefers_second_level() ? SECOND : NEAREST; }

// For weights. What few rows meet once goes past the outer caches, where these are passed best, and
// leaves in them what the next step needs again; more rows may meet a line when the nearest cache
// has lost it.
INLINE CacheLevel cache_of_weights(bool once) {
    return once && passes_outer_caches() ? PAST_OUTER : near_cache();
}

}  // namespace ISA
