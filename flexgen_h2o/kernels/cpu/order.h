// Whole numbers by their order. Nothing is sorted: a threshold is found bit by bit, by counting.
#pragma once

#include "simd.h"

namespace ISA {

// How many of some numbers, or of floats' bits as whole numbers, are below a limit; `count` is a
// multiple of WIDTH.
template <class P>
int64_t count_below(const P* numbers, int64_t count, int32_t limit) {
    const Ints limits = Ints{} + limit;
    Ints below{};
    for (int64_t i = 0; i < count; i += WIDTH) below -= limits > load_raw<Ints>(numbers + i);
    return sum(below);
}

}  // namespace ISA
