// Matmuls of many rows in float32, for CPUs without 16-bit matmul instructions.
//
// Sums stay in registers for DEPTH inputs. Weights are converted to floats once per panel of rows, one
// block of outputs at a time, and the operands stay in the L2 cache. Results are rounded once.
//
// A matmul is a struct that converts its weights to floats: PlainWeights or CodedWeights.
#pragma once

#include "count.h"
#include "kernels.h"
#include "memory.h"
#include "outputs.h"

namespace ISA {

#if defined(__AVX512F__)
constexpr int64_t TILE_HEIGHT = 12;  // rows of x in the register block, by two vectors of outputs
#elif defined(__AVX2__)
constexpr int64_t TILE_HEIGHT = 6;
#else
constexpr int64_t TILE_HEIGHT = 4;
#endif
constexpr int64_t SLIVER = 2 * WIDTH;  // outputs of a register block, contiguous for each input
constexpr int64_t DEPTH = PRODUCT_DEPTH;
constexpr int64_t STRIP = 4 * PRODUCT_OUTPUTS;  // maximum outputs of a panel, converted together
constexpr int64_t NARROWEST = SLIVER > MATRIX_TILE ? SLIVER : MATRIX_TILE;  // minimum of a panel
static_assert(STRIP % NARROWEST == 0 && NARROWEST % SLIVER == 0 && DEPTH % WIDTH == 0,
              "whole slivers and vectors");

// A block of weights: the first output, the first input, and their counts.
struct Extent {
    int64_t output, outputs, input, inputs;
};

// Multiply M rows of x [M, DEPTH] by a register block [depth, SLIVER] and add to totals [M, STRIP].
template <int M>
void add_tile(const float* x, const float* sliver, int64_t depth, float* totals) {
    Floats sums[M][2];
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
        sums[m][0] = load(totals + m * STRIP);
        sums[m][1] = load(totals + m * STRIP + WIDTH);
    }
    for (int64_t k = 0; k < depth; k++) {
        const Floats first = load(sliver + k * SLIVER), second = load(sliver + k * SLIVER + WIDTH);
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) {
            const Floats element = broadcast(x[m * DEPTH + k]);
            sums[m][0] = fma(first, element, sums[m][0]);
            sums[m][1] = fma(second, element, sums[m][1]);
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
        store(totals + m * STRIP, sums[m][0]);
        store(totals + m * STRIP + WIDTH, sums[m][1]);
    }
}

inline void add_tile(int64_t rows, const float* x, const float* sliver, int64_t depth,
                     float* totals) {
#define ROWS_OF(count) case count: return add_tile<count>(x, sliver, depth, totals);
    switch (rows) {
        ROWS_OF(1) ROWS_OF(2) ROWS_OF(3) ROWS_OF(4)
#if defined(__AVX2__)
        ROWS_OF(5) ROWS_OF(6)
#endif
#if defined(__AVX512F__)
        ROWS_OF(7) ROWS_OF(8) ROWS_OF(9) ROWS_OF(10) ROWS_OF(11) ROWS_OF(12)
#endif
    }
#undef ROWS_OF
}

// Compute an L2 panel of outputs for `rows` rows: x [blocks of inputs, rows, DEPTH] to totals [rows,
// STRIP].
template <class Weights>
void strip_of_outputs(const Weights& weights, Extent part, int64_t inputs, const float* x,
                      int64_t rows, float* floats, float* totals) {
    const int64_t tiles = (rows + TILE_HEIGHT - 1) / TILE_HEIGHT;
    const int64_t slivers = (part.outputs + SLIVER - 1) / SLIVER;
    std::memset(totals, 0, static_cast<size_t>(rows * STRIP) * sizeof *totals);
    for (part.input = 0; part.input < inputs; part.input += DEPTH, x += rows * DEPTH) {
        const int64_t left = inputs - part.input, depth = left < DEPTH ? left : DEPTH;
        part.inputs = depth;
        weights.unpack(part, floats);
        for (int64_t tile = 0; tile < tiles; tile++) {
            const int64_t first = rows * tile / tiles, height = rows * (tile + 1) / tiles - first;
            for (int64_t s = 0; s < slivers; s++) {
                weights.prefetch(part, tile * slivers + s, tiles * slivers);
                add_tile(height, x + first * DEPTH, floats + s * DEPTH * SLIVER, depth,
                         totals + first * STRIP + s * SLIVER);
            }
        }
    }
}

// Convert rows of x from `row` on to floats [blocks of inputs, rows, DEPTH], padded with zeros.
template <class T>
void widen_rows(const T* x, int64_t inputs, int64_t row, int64_t rows, float* to) {
    for (int64_t begin = 0; begin < inputs; begin += DEPTH) {
        float* mine = to + begin * rows + row * DEPTH;
        const int64_t left = inputs - begin, count = left < DEPTH ? left : DEPTH;
        to_floats(x + begin, count, mine);
        for (int64_t i = count; i < DEPTH; i++) mine[i] = 0;
    }
}

// Compute all matmuls of a chain that share x of `inputs` inputs. Weights<A>(a) wraps the weights of
// one matmul.
template <class T, class Weights, class A>
int float_product(const A& a, int64_t inputs) {
    const int64_t most = a.rows < PRODUCT_ROWS ? a.rows : PRODUCT_ROWS;
    const int64_t blocks = (inputs + DEPTH - 1) / DEPTH, size = STRIP * (most + DEPTH);
    const Memory<float> x = memory<float>(blocks * most * DEPTH);
    const Memory<float> everyone = memory<float>(a.threads * size);
    if (!x || !everyone) return NO_MEMORY;
#pragma omp parallel num_threads(a.threads)
    {
        float* const totals = everyone.get() + thread_number() * size;
        float* const floats = totals + most * STRIP;
        // Zeros pad outputs that fill no whole register block.
        std::memset(floats, 0, static_cast<size_t>(STRIP * DEPTH) * sizeof *floats);
        for (int64_t first = 0; first < a.rows; first += PRODUCT_ROWS) {
            const int64_t left = a.rows - first, rows = left < PRODUCT_ROWS ? left : PRODUCT_ROWS;
#pragma omp for schedule(static)
            for (int64_t row = 0; row < rows; row++)
                widen_rows(static_cast<const T*>(a.x) + (first + row) * a.x_row, inputs, row, rows,
                           x.get());
            for (const A* each = &a; each; each = each->next) {
                const Weights weights(*each);
                int64_t width = STRIP;  // smaller if there are too few panels for the threads
                while (width > NARROWEST && weights.outputs() < 4 * width * a.threads) width /= 2;
                const int64_t strips = (weights.outputs() + width - 1) / width;
#pragma omp for schedule(static) nowait
                for (int64_t strip = 0; strip < strips; strip++) {
                    const int64_t output = strip * width, rest = weights.outputs() - output;
                    const int64_t count = rest < width ? rest : width;
                    strip_of_outputs(weights, Extent{output, count, 0, 0}, inputs, x.get(), rows,
                                     floats, totals);
                    const T* bias = each->bias ? static_cast<const T*>(each->bias) + output
                                               : nullptr;
                    for (int64_t row = 0; row < rows; row++)
                        put_outputs(totals + row * STRIP, bias,
                                    static_cast<T*>(each->out) + (first + row) * each->out_row +
                                        output, count, each->add);
                }
            }
#pragma omp barrier
        }
    }
    return DONE;
}

}  // namespace ISA
