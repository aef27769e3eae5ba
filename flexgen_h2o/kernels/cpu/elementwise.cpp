// norm, rotate, activate: what stands between the products of a decoder layer. All is computed in
// float32 and rounded once; no bit depends on the number of threads.
#include <math.h>

#include "kernels.h"
#include "memory.h"
#include "simd.h"

namespace ISA {
namespace {

constexpr int64_t LEAST_WORK = 1 << 15;  // elements for which waking other threads pays
constexpr int64_t PIECE = 1024;          // elements of a row that are one task

// WIDTH elements, or `count` of them if those are fewer, and then `rest`.
template <class T>
INLINE Floats some(const T* from, int64_t count, float rest = 0) {
    if (count >= WIDTH) return load(from);
    Floats x = broadcast(rest);
    for (int64_t i = 0; i < count; i++) x[i] = one(from + i);
    return x;
}

template <class T>
INLINE void put_some(T* to, Floats x, int64_t count) {
#if defined(__AVX512F__)
    if (count >= WIDTH) return put_all(to, x);
#endif
    for (int64_t i = 0; i < WIDTH && i < count; i++) put(to + i, x[i]);
}

template <class T>
void norm_row(const Norm& a, int64_t row) {
    const T *x = static_cast<const T*>(a.x) + row * a.x_row;
    const T *weight = static_cast<const T*>(a.weight), *bias = static_cast<const T*>(a.bias);
    T* out = static_cast<T*>(a.out) + row * a.out_row;
    const float width = static_cast<float>(a.width);
    float mean = 0;
    if (a.centred) {
        Floats total{};
        for (int64_t i = 0; i < a.width; i += WIDTH) total += some(x + i, a.width - i);
        mean = sum(total) / width;
    }
    Floats squares{};
    for (int64_t i = 0; i < a.width; i += WIDTH) {
        const Floats apart = some(x + i, a.width - i, mean) - mean;
        squares = fma(apart, apart, squares);
    }
    const float factor = 1.0f / sqrtf(sum(squares) / width + static_cast<float>(a.eps));
    for (int64_t i = 0; i < a.width; i += WIDTH) {
        const int64_t count = a.width - i;
        Floats y = (some(x + i, count) - mean) * factor;
        if (weight) y *= some(weight + i, count);
        if (bias) y += some(bias + i, count);
        put_some(out + i, y, count);
    }
}

template <class T>
void rotate_row(const Rotate& a, int64_t row) {
    const float *cos = a.cos + row * a.half, *sin = a.sin + row * a.half;
    for (int64_t head = 0; head < a.heads; head++) {
        T *first = static_cast<T*>(a.x) + row * a.x_row + head * a.x_head, *second = first + a.half;
        for (int64_t i = 0; i < a.half; i += WIDTH) {
            const int64_t count = a.half - i;
            const Floats x = some(first + i, count), y = some(second + i, count);
            const Floats c = some(cos + i, count), s = some(sin + i, count);
            put_some(first + i, x * c - y * s, count);
            put_some(second + i, y * c + x * s, count);
        }
    }
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
    static INLINE Floats of(Floats x) { return x <= 0.0f ? Floats{} : x; }  // NaN stays
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
struct GeluTanh {  // (1 + tanh(u)) / 2 is the sigmoid of 2 u
    static INLINE Floats of(Floats x) {
        return x * sigmoid(1.59576912f * (x + 0.044715f * x * x * x));
    }
};

template <class T, class F>
void activate_piece(const Activate& a, int64_t row, int64_t begin, int64_t end) {
    T* x = static_cast<T*>(a.x) + row * a.x_row;
    const T* factor = static_cast<const T*>(a.factor);
    if (factor) factor += row * a.factor_row;
    for (int64_t i = begin; i < end; i += WIDTH) {
        Floats y = F::of(some(x + i, end - i));
        if (factor) y *= some(factor + i, end - i);
        put_some(x + i, y, end - i);
    }
}

template <class T>
int normed(const Norm& a) {
#pragma omp parallel for schedule(static) num_threads(a.threads) if (a.rows * a.width > LEAST_WORK)
    for (int64_t row = 0; row < a.rows; row++) norm_row<T>(a, row);
    return DONE;
}

template <class T>
int rotated(const Rotate& a) {
#pragma omp parallel for schedule(static) num_threads(a.threads) \
    if (a.rows * a.heads * a.half > LEAST_WORK)
    for (int64_t row = 0; row < a.rows; row++) rotate_row<T>(a, row);
    return DONE;
}

template <class T, class F>
int activated(const Activate& a) {
    const int64_t pieces = (a.width + PIECE - 1) / PIECE;
#pragma omp parallel for schedule(static) num_threads(a.threads) if (a.rows * a.width > LEAST_WORK)
    for (int64_t task = 0; task < a.rows * pieces; task++) {
        const int64_t begin = task % pieces * PIECE, end = begin + PIECE;
        activate_piece<T, F>(a, task / pieces, begin, end < a.width ? end : a.width);
    }
    return DONE;
}

template <class T>
int by_function(const Activate& a) {
    switch (a.function) {
        case RELU: return activated<T, Relu>(a);
        case SILU: return activated<T, Silu>(a);
        case GELU: return activated<T, Gelu>(a);
        default: return activated<T, GeluTanh>(a);
    }
}

}  // namespace

#define BY_DTYPE(function)                          \
    switch (a.dtype) {                              \
        case BFLOAT16: return function<bf16>(a);    \
        case FLOAT16: return function<fp16>(a);     \
        default: return function<float>(a);         \
    }

int norm(const Norm& a) { BY_DTYPE(normed) }
int rotate(const Rotate& a) { BY_DTYPE(rotated) }
int activate(const Activate& a) { BY_DTYPE(by_function) }

}  // namespace ISA
