// Store accumulated sums to the output of a matmul.
#pragma once

#include "simd.h"

namespace ISA {

// out = sums + bias, or out += sums + bias if `add` is set, rounded once. The bias may be null.
template <class T>
INLINE void put_outputs(const float* sums, const T* bias, T* out, int64_t count, bool add) {
    int64_t i = 0;
    for (; i + WIDTH <= count; i += WIDTH) {
        Floats x = load(sums + i);
        if (bias) x += load(bias + i);
        if (add) x += load(out + i);
        put_all(out + i, x);
    }
    for (; i < count; i++) {
        const float x = sums[i] + (bias ? load_one(bias + i) : 0.0f);
        put(out + i, add ? x + load_one(out + i) : x);
    }
}

}  // namespace ISA
