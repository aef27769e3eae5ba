// Integers as types, for loops with a compile-time trip count.
#pragma once

namespace ISA {

template <int N>
struct Count {
    static constexpr int value = N;
};

}  // namespace ISA
