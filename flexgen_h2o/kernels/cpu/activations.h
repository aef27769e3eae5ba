// Vectorized activations, computed in float32 and rounded once.
#pragma once

#include "simd.h"

namespace ISA {

// Load WIDTH elements. If `count` is smaller, load `count` elements and fill with `rest`.
template <class T>
INLINE Floats load_partial(const T* from, int64_t count, float rest = 0) {
    if (count >= WIDTH) return load(from);
    Floats x = broadcast(rest);
    for (int64_t i = 0; i < count; i++) x[i] = load_one(from + i);
    return x;
}

template <class T>
INLINE void store_partial(T* to, Floats x, int64_t count) {
    if (count >= WIDTH) return put_all(to, x);
    for (int64_t i = 0; i < count; i++) put(to + i, x[i]);
}

INLINE Floats magnitude(Floats x) { return bits_of<Floats>(bits_of<Words>(x) & 0x7fffffff); }

// 1 / (1 + e^-x)
INLINE Floats sigmoid(Floats x) {
    const Floats e = exp(-magnitude(x));
    const Floats above = 1.0f / (1.0f + e);
    return x >= 0.0f ? above : e * above;
}

// erfc(x) for x >= 0, with a relative error of 1.2e-7 (Numerical Recipes, section 6.2).
INLINE Floats erfc(Floats x) {
    const Floats t = 1.0f / (1.0f + 0.5f * x);
    constexpr float FACTORS[] = {-0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f, -0.18628806f,
                                 0.09678418f, 0.37409196f, 1.00002368f, -1.26551223f};
    Floats p = broadcast(0.17087277f);
    for (const float factor : FACTORS) p = fma(p, t, broadcast(factor));
    return t * exp(p - x * x);
}

struct Relu {
    static INLINE Floats of(Floats x) { return x <= 0.0f ? Floats{} : x; }  // keeps NaN
};
struct Silu {
    static INLINE Floats of(Floats x) { return x * sigmoid(x); }
};
struct Gelu {
    static INLINE Floats of(Floats x) {
        const Floats half = 0.5f * erfc(magnitude(x) * 0.70710678f);
        return x * (x >= 0.0f ? 1.0f - half : half);
    }
};
struct GeluTanh {  // (1 + tanh(u)) / 2 equals sigmoid(2 u)
    static INLINE Floats of(Floats x) {
        return x * sigmoid(1.59576912f * (x + 0.044715f * x * x * x));
    }
};

// Compute `x = F(x) * factor` for `count` elements in place. The factor may be null.
template <class T, class F>
INLINE void activate_span(T* x, const T* factor, int64_t count) {
    for (int64_t i = 0; i < count; i += WIDTH) {
        Floats y = F::of(load_partial(x + i, count - i));
        if (factor) y *= load_partial(factor + i, count - i);
        store_partial(x + i, y, count - i);
    }
}

}  // namespace ISA
