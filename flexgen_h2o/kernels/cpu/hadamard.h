// Rotation of smoothed keys and of their queries. See h2o/key_smoothing.py.
#pragma once

#include <math.h>

#include "simd.h"

namespace ISA {

// One butterfly stage of a Hadamard transform within a vector: sums and differences of lanes that are
// APART lanes apart.
template <int APART>
INLINE Floats butterflies(Floats x) {
    Words other;
    Floats sign;
    for (int i = 0; i < WIDTH; i++)
        other[i] = static_cast<uint32_t>(i ^ APART), sign[i] = i & APART ? -1.0f : 1.0f;
    return __builtin_shuffle(x, other) + sign * x;
}

// Multiply x [dim] by an orthogonal block-diagonal matrix. Its blocks are normalized Sylvester Hadamard
// matrices, of the largest power of two that divides dim.
inline void hadamard(float* x, int64_t dim) {
    const int64_t size = dim & -dim;
    const float scale = 1.0f / sqrtf(static_cast<float>(size));
    int64_t apart = 1;
    if (size % WIDTH == 0) {
        for (int64_t i = 0; i < dim; i += WIDTH) {
            Floats vector = butterflies<2>(butterflies<1>(load(x + i)));
            if constexpr (WIDTH > 4) vector = butterflies<4>(vector);
            if constexpr (WIDTH > 8) vector = butterflies<8>(vector);
            store(x + i, vector);
        }
        for (apart = WIDTH; apart < size; apart *= 2)
            for (int64_t first = 0; first < dim; first += 2 * apart)
                for (int64_t i = first; i < first + apart; i += WIDTH) {
                    const Floats a = load(x + i), b = load(x + i + apart);
                    store(x + i, a + b), store(x + i + apart, a - b);
                }
    }
    for (; apart < size; apart *= 2)
        for (int64_t i = 0; i < dim; i++)
            if (!(i & apart)) {
                const float a = x[i], b = x[i + apart];
                x[i] = a + b, x[i + apart] = a - b;
            }
    for (int64_t i = 0; i < dim; i++) x[i] *= scale;
}

}  // namespace ISA
