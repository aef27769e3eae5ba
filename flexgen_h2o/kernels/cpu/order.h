// Order statistics of integers without sorting. A threshold is found bit by bit, by counting.
#pragma once

#include "simd.h"

namespace ISA {

// Count the integers, or the floats by their bits as integers, below a limit. `count` is a multiple of
// WIDTH.
template <class P>
int64_t count_below(const P* numbers, int64_t count, int32_t limit) {
    const Ints limits = Ints{} + limit;
    Ints below{};
    for (int64_t i = 0; i < count; i += WIDTH) below -= limits > load_raw<Ints>(numbers + i);
    return sum(below);
}

}  // namespace ISA
