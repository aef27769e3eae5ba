// norm, rotate, activate: the elementwise operations between the matmuls of a decoder layer. They
// compute in float32 and round once. Results do not depend on the number of threads.
#include <math.h>

#include "kernels.h"
#include "memory.h"
#include "vector_math.h"

namespace ISA {
namespace {

constexpr int64_t MIN_PARALLEL_ELEMENTS = 1 << 15;     // elements that pay for waking other threads
constexpr int64_t MIN_PARALLEL_ACTIVATIONS = 1 << 12;  // the same for an activation
constexpr int64_t TASK_ELEMENTS = 1024;                // elements of a row in one task

template <class T>
void norm_row(const Norm& args, int64_t row) {
    const T* x = static_cast<const T*>(args.x) + row * args.x_row;
    const T *weight = static_cast<const T*>(args.weight), *bias = static_cast<const T*>(args.bias);
    T* out = static_cast<T*>(args.out) + row * args.out_row;
    const float width = static_cast<float>(args.width);
    float mean = 0;
    if (args.centered) {
        Floats total{};
        for (int64_t i = 0; i < args.width; i += WIDTH) total += load_partial(x + i, args.width - i);
        mean = sum(total) / width;
    }
    Floats squares{};
    for (int64_t i = 0; i < args.width; i += WIDTH) {
        const Floats deviation = load_partial(x + i, args.width - i, mean) - mean;
        squares = fma(deviation, deviation, squares);
    }
    const float factor = 1.0f / sqrtf(sum(squares) / width + static_cast<float>(args.eps));
    for (int64_t i = 0; i < args.width; i += WIDTH) {
        const int64_t count = args.width - i;
        Floats y = (load_partial(x + i, count) - mean) * factor;
        if (weight) y *= load_partial(weight + i, count);
        if (bias) y += load_partial(bias + i, count);
        store_partial(out + i, y, count);
    }
}

template <class T>
void rotate_row(const Rotate& args, int64_t row) {
    const float *cos = args.cos + row * args.half_rotary, *sin = args.sin + row * args.half_rotary;
    for (int64_t head = 0; head < args.heads; head++) {
        T *first = static_cast<T*>(args.x) + row * args.x_row + head * args.x_head,
          *second = first + args.half_rotary;
        for (int64_t i = 0; i < args.half_rotary; i += WIDTH) {
            const int64_t count = args.half_rotary - i;
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
void smooth_row(const Rotate& args, int64_t row, float* x) {
    const float *cos = args.cos + row * args.half_rotary, *sin = args.sin + row * args.half_rotary;
    const int64_t group = args.heads / args.kv_heads;
    for (int64_t head = 0; head < args.heads; head++) {
        T* to = static_cast<T*>(args.x) + row * args.x_row + head * args.x_head;
        for (int64_t i = 0; i < args.head_dim; i += WIDTH)
            store_partial(x + i, load_partial(to + i, args.head_dim - i), args.head_dim - i);
        for (int64_t i = 0; i < args.half_rotary; i += WIDTH) {
            const int64_t count = args.half_rotary - i;
            const Floats first = load_partial(x + i, count);
            const Floats second = load_partial(x + args.half_rotary + i, count);
            const Floats c = load_partial(cos + i, count), s = load_partial(sin + i, count);
            store_partial(x + i, first * c - second * s, count);
            store_partial(x + args.half_rotary + i, second * c + first * s, count);
        }
        if (args.offsets) {
            const float* mean = args.mean + head / group * args.head_dim;
            Floats all{};
            for (int64_t i = 0; i < args.head_dim; i += WIDTH)
                all = fma(load_partial(x + i, args.head_dim - i),
                          load_partial(mean + i, args.head_dim - i), all);
            args.offsets[row * args.heads + head] = sum(all);
        }
        const float* factor = args.factor + head / group * args.head_dim;
        const float* shift = args.shift ? args.shift + head / group * args.head_dim : nullptr;
        for (int64_t i = 0; i < args.head_dim; i += WIDTH) {
            const int64_t count = args.head_dim - i;
            Floats y = load_partial(x + i, count) * load_partial(factor + i, count);
            if (shift) y += load_partial(shift + i, count);
            store_partial(x + i, y, count);
        }
        hadamard(x, args.head_dim);
        for (int64_t i = 0; i < args.head_dim; i += WIDTH)
            store_partial(to + i, load_partial(x + i, args.head_dim - i), args.head_dim - i);
    }
}

template <class T, class F>
void activate_part(const Activate& args, int64_t row, int64_t begin, int64_t end) {
    T* x = static_cast<T*>(args.x) + row * args.x_row;
    const T* factor = static_cast<const T*>(args.factor);
    activate_span<T, F>(x + begin, factor ? factor + row * args.factor_row + begin : nullptr,
                        end - begin);
}

template <class T>
int norm_rows(const Norm& args) {
#pragma omp parallel for schedule(static) \
    num_threads(args.threads) if (args.rows * args.width > MIN_PARALLEL_ELEMENTS)
    for (int64_t row = 0; row < args.rows; row++) norm_row<T>(args, row);
    return DONE;
}

template <class T>
int rotate_rows(const Rotate& args) {
    if (args.factor) {
        const Buffer<float> scratch = allocate<float>(args.threads * args.head_dim);
        if (!scratch) return NO_MEMORY;
#pragma omp parallel for schedule(static) \
    num_threads(args.threads) if (args.rows * args.heads * args.head_dim > MIN_PARALLEL_ELEMENTS)
        for (int64_t row = 0; row < args.rows; row++)
            smooth_row<T>(args, row, scratch.get() + thread_index() * args.head_dim);
        return DONE;
    }
#pragma omp parallel for schedule(static) \
    num_threads(args.threads) if (args.rows * args.heads * args.half_rotary > MIN_PARALLEL_ELEMENTS)
    for (int64_t row = 0; row < args.rows; row++) rotate_row<T>(args, row);
    return DONE;
}

template <class T, class F>
int activate_rows(const Activate& args) {
    const int64_t parts = (args.width + TASK_ELEMENTS - 1) / TASK_ELEMENTS;
#pragma omp parallel for schedule(static) \
    num_threads(args.threads) if (args.rows * args.width > MIN_PARALLEL_ACTIVATIONS)
    for (int64_t task = 0; task < args.rows * parts; task++) {
        const int64_t begin = task % parts * TASK_ELEMENTS, end = begin + TASK_ELEMENTS;
        activate_part<T, F>(args, task / parts, begin, end < args.width ? end : args.width);
    }
    return DONE;
}

template <class T>
int by_function(const Activate& args) {
    switch (args.function) {
        case RELU: return activate_rows<T, Relu>(args);
        case SILU: return activate_rows<T, Silu>(args);
        case GELU: return activate_rows<T, Gelu>(args);
        default: return activate_rows<T, GeluTanh>(args);
    }
}

}  // namespace

int norm(const Norm& args) { BY_DTYPE(norm_rows) }
int rotate(const Rotate& args) { BY_DTYPE(rotate_rows) }
int activate(const Activate& args) { BY_DTYPE(by_function) }

}  // namespace ISA
