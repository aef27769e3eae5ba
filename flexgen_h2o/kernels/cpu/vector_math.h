// Functions in float32: exponentials, soft cap, activations and the Hadamard transform.
#pragma once

#include <math.h>

#include "simd.h"

namespace ISA {

// Return e^x for x <= 0, with an error of 2 ulp. The result is 0 below -87 and for -inf.
INLINE Floats exp(Floats x) {
    const Floats lowest = broadcast(-87.0f);
    const Ints under = x < lowest;
    Floats clamped = under ? lowest : x;
    Floats shifted = fma(clamped, broadcast(1.44269504f), broadcast(0x1.8p23f));
    Floats n = shifted - 0x1.8p23f;
    Floats r = fma(n, broadcast(-0.693359375f), clamped);
    r = fma(n, broadcast(2.12194440e-4f), r);
    Floats p = broadcast(1.9875691500e-4f);
    p = fma(p, r, broadcast(1.3981999507e-3f));
    p = fma(p, r, broadcast(8.3334519073e-3f));
    p = fma(p, r, broadcast(4.1665795894e-2f));
    p = fma(p, r, broadcast(1.6666665459e-1f));
    p = fma(p, r, broadcast(5.0000001201e-1f));
    p = fma(p, r * r, r + 1.0f);
    // The low bits of `shifted` are n. Shift them to the exponent.
    Floats scale = bit_cast<Floats>((bit_cast<Words>(shifted) + 127) << 23);
    Floats result = p * scale;
    return under ? Floats{} : result;
}

constexpr float LOG2_E = 1.44269504f;

// Return 2^x for x <= 0, with an error of 2 ulp. The result is 0 below -126.5 and for -inf.
INLINE Floats exp2(Floats x) {
    constexpr float SHIFT = 0x1.8p23f + 127;
    x = max(broadcast(-127.0f), x);  // NaN propagates
    const Floats shifted = x + SHIFT, r = x - (shifted - SHIFT);
    // Minimax polynomial on [-0.5, 0.5] with a relative error of 1e-7.
    Floats p = broadcast(0x1.5c08e6p-10f);
    p = fma(p, r, broadcast(0x1.3d0c52p-7f));
    p = fma(p, r, broadcast(0x1.c6b6e4p-5f));
    p = fma(p, r, broadcast(0x1.ebf918p-3f));
    p = fma(p, r, broadcast(0x1.62e428p-1f));
    p = fma(p, r, broadcast(1.0f));
    // The low bits of `shifted` are the exponent bits.
    return p * bit_cast<Floats>(bit_cast<Words>(shifted) << 23);
}

// Return cap * tanh(x / cap), within a few ulp of the cap. NaN propagates.
INLINE Floats apply_softcap(Floats x, float cap) {
    const Words sign = bit_cast<Words>(x) & 0x80000000u;
    const Floats size = bit_cast<Floats>(bit_cast<Words>(x) ^ sign);
    const Floats e = exp(size * (-2.0f / cap));
    const Floats result = (1.0f - e) / (1.0f + e) * cap;
    return bit_cast<Floats>(bit_cast<Words>(result) | sign);
}

// RAII guard: vector instructions of the calling thread treat denormals as zero and flush denormal
// results. A denormal makes an instruction hundreds of times slower.
class DenormalsAsZeros {
public:
#if defined(__AVX512DQ__)
    DenormalsAsZeros() { _mm_setcsr(before | FLUSH_RESULTS | TAKE_AS_ZEROS); }
    ~DenormalsAsZeros() { _mm_setcsr(before); }
    DenormalsAsZeros(const DenormalsAsZeros&) = delete;
    DenormalsAsZeros& operator=(const DenormalsAsZeros&) = delete;

private:
    static constexpr unsigned FLUSH_RESULTS = 1u << 15, TAKE_AS_ZEROS = 1u << 6;
    const unsigned before = _mm_getcsr();
#else
    DenormalsAsZeros() {}  // exp2 produces no denormals
#endif
};

// Return 2^x with flush-to-zero and an error of 2.3 ulp. The result is 0 below -126 and for -inf. NaN
// propagates. This takes 7 instructions with AVX512DQ, where exp2 takes 11.
INLINE Floats exp2_flush_to_zero(Floats x) {
#if defined(__AVX512DQ__)
    constexpr int LESS_ITS_FLOOR = 9;  // x - floor(x), without floating-point exceptions
    const Floats r = _mm512_maskz_reduce_ps(0xffff, x, LESS_ITS_FLOOR);  // in [0, 1)
    // Minimax polynomial for a relative error of 1.4e-7, exactly 1 at 0.
    Floats p = broadcast(0x1.e974fep-10f);
    p = fma(p, r, broadcast(0x1.27785ap-7f));
    p = fma(p, r, broadcast(0x1.c91cf4p-5f));
    p = fma(p, r, broadcast(0x1.ebdb58p-3f));
    p = fma(p, r, broadcast(0x1.62e4bap-1f));
    p = fma(p, r, broadcast(1.0f));
    return _mm512_maskz_scalef_ps(0xffff, p, x);  // times 2^floor(x)
#else
    return exp2(x);
#endif
}

INLINE Floats magnitude(Floats x) { return bit_cast<Floats>(bit_cast<Words>(x) & 0x7fffffff); }

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

// One butterfly stage of a Hadamard transform within a vector: sums and differences of lanes that are
// DISTANCE lanes apart.
template <int DISTANCE>
INLINE Floats butterfly_stage(Floats x) {
    Words other;
    Floats sign;
    for (int i = 0; i < WIDTH; i++)
        other[i] = static_cast<uint32_t>(i ^ DISTANCE), sign[i] = i & DISTANCE ? -1.0f : 1.0f;
    return __builtin_shuffle(x, other) + sign * x;
}

// Multiply x [dim] by an orthogonal block-diagonal matrix. Its blocks are normalized Sylvester
// Hadamard matrices, of the largest power of two that divides dim.
inline void hadamard(float* x, int64_t dim) {
    const int64_t size = dim & -dim;
    const float scale = 1.0f / sqrtf(static_cast<float>(size));
    int64_t distance = 1;
    if (size % WIDTH == 0) {
        for (int64_t i = 0; i < dim; i += WIDTH) {
            Floats vector = butterfly_stage<2>(butterfly_stage<1>(load(x + i)));
            if constexpr (WIDTH > 4) vector = butterfly_stage<4>(vector);
            if constexpr (WIDTH > 8) vector = butterfly_stage<8>(vector);
            store(x + i, vector);
        }
        for (distance = WIDTH; distance < size; distance *= 2)
            for (int64_t first = 0; first < dim; first += 2 * distance)
                for (int64_t i = first; i < first + distance; i += WIDTH) {
                    const Floats a = load(x + i), b = load(x + i + distance);
                    store(x + i, a + b), store(x + i + distance, a - b);
                }
    }
    for (; distance < size; distance *= 2)
        for (int64_t i = 0; i < dim; i++)
            if (!(i & distance)) {
                const float a = x[i], b = x[i + distance];
                x[i] = a + b, x[i + distance] = a - b;
            }
    for (int64_t i = 0; i < dim; i++) x[i] *= scale;
}

}  // namespace ISA
