// Numbers as types: for loops whose length the compiler is to know.
#pragma once

namespace ISA {

template <int N>
struct Count {
    static constexpr int value = N;
};

}  // namespace ISA
