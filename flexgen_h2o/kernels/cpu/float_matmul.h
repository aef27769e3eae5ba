// Matmuls of many rows in float32, for CPUs without 16-bit matmul instructions.
//
// Sums stay in registers for MATMUL_DEPTH inputs. Weights are converted to floats once per panel of
// rows, one block of outputs at a time, and the operands stay in the L2 cache. Results are rounded
// once.
//
// A matmul is a struct that converts its weights to floats: PlainWeights or QuantizedWeights.
#pragma once

#include "kernels.h"
#include "memory.h"
#include "simd.h"

namespace ISA {

#if defined(__AVX512F__)
constexpr int64_t FLOAT_BLOCK_ROWS = 12;  // of x in the register block, by two vectors of outputs
#elif defined(__AVX2__)
constexpr int64_t FLOAT_BLOCK_ROWS = 6;
#else
constexpr int64_t FLOAT_BLOCK_ROWS = 4;
#endif
constexpr int64_t FLOAT_BLOCK_OUTPUTS = 2 * WIDTH;     // of a register block, contiguous for each input
constexpr int64_t PANEL_OUTPUTS = 4 * MATMUL_OUTPUTS;  // maximum of an L2 panel, converted together
// Up to this many rows use a panel so rarely that it should fit in the L1 cache.
constexpr int64_t MAX_L1_PANEL_ROWS = 2 * FLOAT_BLOCK_ROWS;
constexpr int64_t MIN_PANEL_OUTPUTS =
    FLOAT_BLOCK_OUTPUTS > MATRIX_TILE ? FLOAT_BLOCK_OUTPUTS : MATRIX_TILE;
static_assert(PANEL_OUTPUTS % MIN_PANEL_OUTPUTS == 0 && MIN_PANEL_OUTPUTS % FLOAT_BLOCK_OUTPUTS == 0 &&
                  MATMUL_DEPTH % WIDTH == 0,
              "whole register blocks and vectors");

// A block of weights: the first output, the first input, and their counts.
struct PanelExtent {
    int64_t output, outputs, input, inputs;
};

// Multiply M rows of x [M, MATMUL_DEPTH] by a register block of weights [depth, FLOAT_BLOCK_OUTPUTS]
// and add to totals [M, PANEL_OUTPUTS].
template <int M>
void add_register_block(const float* x, const float* weights, int64_t depth, float* totals) {
    Floats sums[M][2];
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
        sums[m][0] = load(totals + m * PANEL_OUTPUTS);
        sums[m][1] = load(totals + m * PANEL_OUTPUTS + WIDTH);
    }
    for (int64_t k = 0; k < depth; k++) {
        const Floats first = load(weights + k * FLOAT_BLOCK_OUTPUTS);
        const Floats second = load(weights + k * FLOAT_BLOCK_OUTPUTS + WIDTH);
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) {
            const Floats element = broadcast(x[m * MATMUL_DEPTH + k]);
            sums[m][0] = fma(first, element, sums[m][0]);
            sums[m][1] = fma(second, element, sums[m][1]);
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
        store(totals + m * PANEL_OUTPUTS, sums[m][0]);
        store(totals + m * PANEL_OUTPUTS + WIDTH, sums[m][1]);
    }
}

inline void add_register_block(int64_t rows, const float* x, const float* weights, int64_t depth,
                               float* totals) {
#define ROWS_OF(count) \
    case count: return add_register_block<count>(x, weights, depth, totals);
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

// Compute an L2 panel of outputs for `rows` rows: x [blocks of inputs, rows, MATMUL_DEPTH] to totals
// [rows, PANEL_OUTPUTS].
template <class Weights>
void multiply_panel(const Weights& weights, PanelExtent part, int64_t inputs, const float* x,
                    int64_t rows, float* floats, float* totals) {
    const int64_t tiles = (rows + FLOAT_BLOCK_ROWS - 1) / FLOAT_BLOCK_ROWS;
    const int64_t blocks_per_panel = (part.outputs + FLOAT_BLOCK_OUTPUTS - 1) / FLOAT_BLOCK_OUTPUTS;
    std::memset(totals, 0, static_cast<size_t>(rows * PANEL_OUTPUTS) * sizeof *totals);
    for (part.input = 0; part.input < inputs; part.input += MATMUL_DEPTH, x += rows * MATMUL_DEPTH) {
        const int64_t left = inputs - part.input, depth = left < MATMUL_DEPTH ? left : MATMUL_DEPTH;
        part.inputs = depth;
        weights.unpack(part, floats);
        for (int64_t tile = 0; tile < tiles; tile++) {
            const int64_t first = rows * tile / tiles, height = rows * (tile + 1) / tiles - first;
            for (int64_t s = 0; s < blocks_per_panel; s++) {
                weights.prefetch(part, tile * blocks_per_panel + s, tiles * blocks_per_panel);
                add_register_block(height, x + first * MATMUL_DEPTH,
                                   floats + s * MATMUL_DEPTH * FLOAT_BLOCK_OUTPUTS, depth,
                                   totals + first * PANEL_OUTPUTS + s * FLOAT_BLOCK_OUTPUTS);
            }
        }
    }
}

// Convert rows of x from `row` on to floats [blocks of inputs, rows, MATMUL_DEPTH], padded with zeros.
template <class T>
void widen_rows(const T* x, int64_t inputs, int64_t row, int64_t rows, float* to) {
    for (int64_t begin = 0; begin < inputs; begin += MATMUL_DEPTH) {
        float* target = to + begin * rows + row * MATMUL_DEPTH;
        const int64_t left = inputs - begin, count = left < MATMUL_DEPTH ? left : MATMUL_DEPTH;
        to_floats(x + begin, count, target);
        for (int64_t i = count; i < MATMUL_DEPTH; i++) target[i] = 0;
    }
}

// Compute all matmuls of a chain that share x of `inputs` inputs. Weights<A>(a) wraps the weights of
// one matmul.
template <class T, class Weights, class Args>
int float_matmul(const Args& args, int64_t inputs) {
    const int64_t max_rows = args.rows < MATMUL_ROWS ? args.rows : MATMUL_ROWS;
    const int64_t blocks = (inputs + MATMUL_DEPTH - 1) / MATMUL_DEPTH,
                  size = PANEL_OUTPUTS * (max_rows + MATMUL_DEPTH);
    const Buffer<float> x = allocate<float>(blocks * max_rows * MATMUL_DEPTH);
    const Buffer<float> workspace = allocate<float>(args.threads * size);
    if (!x || !workspace) return NO_MEMORY;
#pragma omp parallel num_threads(args.threads)
    {
        float* const totals = workspace.get() + thread_index() * size;
        float* const floats = totals + max_rows * PANEL_OUTPUTS;
        // Zeros pad outputs that fill no whole register block.
        std::memset(floats, 0, static_cast<size_t>(PANEL_OUTPUTS * MATMUL_DEPTH) * sizeof *floats);
        for (int64_t first = 0; first < args.rows; first += MATMUL_ROWS) {
            const int64_t left = args.rows - first, rows = left < MATMUL_ROWS ? left : MATMUL_ROWS;
#pragma omp for schedule(static)
            for (int64_t row = 0; row < rows; row++)
                widen_rows(static_cast<const T*>(args.x) + (first + row) * args.x_row, inputs, row, rows,
                           x.get());
            for (const Args* matmul = &args; matmul; matmul = matmul->next) {
                const Weights weights(*matmul);
                int64_t width = rows > MAX_L1_PANEL_ROWS ? PANEL_OUTPUTS : 2 * MIN_PANEL_OUTPUTS;
                // Smaller if there are too few panels for the threads.
                while (width > MIN_PANEL_OUTPUTS && weights.outputs() < 4 * width * args.threads)
                    width /= 2;
                const int64_t panels = (weights.outputs() + width - 1) / width;
#pragma omp for schedule(static) nowait
                for (int64_t panel = 0; panel < panels; panel++) {
                    const int64_t output = panel * width, rest = weights.outputs() - output;
                    const int64_t count = rest < width ? rest : width;
                    multiply_panel(weights, PanelExtent{output, count, 0, 0}, inputs, x.get(), rows,
                                   floats, totals);
                    const T* bias = matmul->bias ? static_cast<const T*>(matmul->bias) + output
                                               : nullptr;
                    for (int64_t row = 0; row < rows; row++)
                        store_outputs(
                            totals + row * PANEL_OUTPUTS, bias,
                            static_cast<T*>(matmul->out) + (first + row) * matmul->out_row + output,
                            count, matmul->add);
                }
            }
#pragma omp barrier
        }
    }
    return DONE;
}

}  // namespace ISA
