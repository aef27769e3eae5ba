// norm, rotate, activate: the elementwise operations between the matmuls of a decoder layer. They
// compute in float32 and round once. Results do not depend on the number of threads.
#include <math.h>

#include "activations.h"
#include "hadamard.h"
#include "kernels.h"
#include "memory.h"

namespace ISA {
namespace {

constexpr int64_t MIN_PARALLEL_WORK = 1 << 15;  // elements that pay for waking other threads
constexpr int64_t MIN_PARALLEL_ACTIVATION = 1 << 12;  // the same for an activation
constexpr int64_t PIECE = 1024;                       // elements of a row in one task

template <class T>
void norm_row(const Norm& a, int64_t row) {
    const T *x = static_cast<const T*>(a.x) + row * a.x_row;
    const T *weight = static_cast<const T*>(a.weight), *bias = static_cast<const T*>(a.bias);
    T* out = static_cast<T*>(a.out) + row * a.out_row;
    const float width = static_cast<float>(a.width);
    float mean = 0;
    if (a.centered) {
        Floats total{};
        for (int64_t i = 0; i < a.width; i += WIDTH) total += load_partial(x + i, a.width - i);
        mean = sum(total) / width;
    }
    Floats squares{};
    for (int64_t i = 0; i < a.width; i += WIDTH) {
        const Floats apart = load_partial(x + i, a.width - i, mean) - mean;
        squares = fma(apart, apart, squares);
    }
    const float factor = 1.0f / sqrtf(sum(squares) / width + static_cast<float>(a.eps));
    for (int64_t i = 0; i < a.width; i += WIDTH) {
        const int64_t count = a.width - i;
        Floats y = (load_partial(x + i, count) - mean) * factor;
        if (weight) y *= load_partial(weight + i, count);
        if (bias) y += load_partial(bias + i, count);
        store_partial(out + i, y, count);
    }
}

template <class T>
void rotate_row(const Rotate& a, int64_t row) {
    const float *cos = a.cos + row * a.half, *sin = a.sin + row * a.half;
    for (int64_t head = 0; head < a.heads; head++) {
        T *first = static_cast<T*>(a.x) + row * a.x_row + head * a.x_head, *second = first + a.half;
        for (int64_t i = 0; i < a.half; i += WIDTH) {
            const int64_t count = a.half - i;
            const Floats x = load_partial(first + i, count), y = load_partial(second + i, count);
            const Floats c = load_partial(cos + i, count), s = load_partial(sin + i, count);
            store_partial(first + i, x * c - y * s, count);
            store_partial(second + i, y * c + x * s, count);
        }
    }
}

// Apply the rotation, then factor, shift and Hadamard matrix (h2o/key_smoothing.py), and round once.
// `x` is scratch memory for a head.
template <class T>
void smooth_row(const Rotate& a, int64_t row, float* x) {
    const float *cos = a.cos + row * a.half, *sin = a.sin + row * a.half;
    const int64_t group = a.heads / a.kv_heads;
    for (int64_t head = 0; head < a.heads; head++) {
        T* to = static_cast<T*>(a.x) + row * a.x_row + head * a.x_head;
        for (int64_t i = 0; i < a.head_dim; i += WIDTH)
            store_partial(x + i, load_partial(to + i, a.head_dim - i), a.head_dim - i);
        for (int64_t i = 0; i < a.half; i += WIDTH) {
            const int64_t count = a.half - i;
            const Floats first = load_partial(x + i, count);
            const Floats second = load_partial(x + a.half + i, count);
            const Floats c = load_partial(cos + i, count), s = load_partial(sin + i, count);
            store_partial(x + i, first * c - second * s, count);
            store_partial(x + a.half + i, second * c + first * s, count);
        }
        if (a.offsets) {
            const float* mean = a.mean + head / group * a.head_dim;
            Floats all{};
            for (int64_t i = 0; i < a.head_dim; i += WIDTH)
                all = fma(load_partial(x + i, a.head_dim - i), load_partial(mean + i, a.head_dim - i),
                          all);
            a.offsets[row * a.heads + head] = sum(all);
        }
        const float* factor = a.factor + head / group * a.head_dim;
        const float* shift = a.shift ? a.shift + head / group * a.head_dim : nullptr;
        for (int64_t i = 0; i < a.head_dim; i += WIDTH) {
            const int64_t count = a.head_dim - i;
            Floats y = load_partial(x + i, count) * load_partial(factor + i, count);
            if (shift) y += load_partial(shift + i, count);
            store_partial(x + i, y, count);
        }
        hadamard(x, a.head_dim);
        for (int64_t i = 0; i < a.head_dim; i += WIDTH)
            store_partial(to + i, load_partial(x + i, a.head_dim - i), a.head_dim - i);
    }
}

template <class T, class F>
void activate_piece(const Activate& a, int64_t row, int64_t begin, int64_t end) {
    T* x = static_cast<T*>(a.x) + row * a.x_row;
    const T* factor = static_cast<const T*>(a.factor);
    activate_span<T, F>(x + begin, factor ? factor + row * a.factor_row + begin : nullptr,
                        end - begin);
}

template <class T>
int normed(const Norm& a) {
#pragma omp parallel for schedule(static) num_threads(a.threads) \
    if (a.rows * a.width > MIN_PARALLEL_WORK)
    for (int64_t row = 0; row < a.rows; row++) norm_row<T>(a, row);
    return DONE;
}

template <class T>
int rotated(const Rotate& a) {
    if (a.factor) {
        const Memory<float> scratch = memory<float>(a.threads * a.head_dim);
        if (!scratch) return NO_MEMORY;
#pragma omp parallel for schedule(static) num_threads(a.threads) \
    if (a.rows * a.heads * a.head_dim > MIN_PARALLEL_WORK)
        for (int64_t row = 0; row < a.rows; row++)
            smooth_row<T>(a, row, scratch.get() + thread_number() * a.head_dim);
        return DONE;
    }
#pragma omp parallel for schedule(static) num_threads(a.threads) \
    if (a.rows * a.heads * a.half > MIN_PARALLEL_WORK)
    for (int64_t row = 0; row < a.rows; row++) rotate_row<T>(a, row);
    return DONE;
}

template <class T, class F>
int activated(const Activate& a) {
    const int64_t pieces = (a.width + PIECE - 1) / PIECE;
#pragma omp parallel for schedule(static) num_threads(a.threads) \
    if (a.rows * a.width > MIN_PARALLEL_ACTIVATION)
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

int norm(const Norm& a) { BY_DTYPE(normed) }
int rotate(const Rotate& a) { BY_DTYPE(rotated) }
int activate(const Activate& a) { BY_DTYPE(by_function) }

}  // namespace ISA
