// The packed input of a quantized matmul, which all threads read.
#pragma once

#include "memory.h"
#include "quantized_operands.h"

namespace ISA {

#if defined(__AVX512F__)
constexpr int REGISTER_ROWS = 8;  // rows of x in the register block
#else
constexpr int REGISTER_ROWS = FEW_VARIANTS ? 1 : 4;
#endif
constexpr int64_t CHUNK_OUTPUTS = MATMUL_OUTPUTS;  // two tiles, which are computed together
constexpr int64_t MIN_PARALLEL_PACKING = 1 << 16;  // elements that pay for waking other threads

// Packed rows of x, padded with zeros to whole groups and to the rows that tiles need. The rows of a
// register block are interleaved step by step.
struct PackedInput {
    uint32_t* x;   // [groups, blocks of rows, steps, rows of the block]
    float* sums;   // [groups, rows], sums of x
    int64_t rows, steps;
};

// Return whether the matrices of a chain, which share x, have one format.
inline bool same_format(const QuantizedLinear& args) {
    for (const QuantizedLinear* matmul = args.next; matmul; matmul = matmul->next)
        if (matmul->matrix.inputs != args.matrix.inputs || matmul->matrix.group != args.matrix.group ||
            matmul->matrix.bits != args.matrix.bits || matmul->rows != args.rows ||
            matmul->matrix.activation_bits != args.matrix.activation_bits)
            return false;
    return true;
}

// Scratch memory of one thread.
struct Workspace {
    float* totals;     // [rows of the panel, columns]
    uint32_t* values;  // [steps, columns]
    float* scales;     // [CHUNK_OUTPUTS]
    float* zeros;      // [CHUNK_OUTPUTS], factors for the sums of x
};

// Call add(Constant<R>, first) for R rows at a time.
template <class F>
INLINE void for_register_rows(int64_t rows, const F& add) {
    int64_t row = 0;
    for (; row + REGISTER_ROWS <= rows; row += REGISTER_ROWS) add(Constant<REGISTER_ROWS>{}, row);
#if !FEW_VARIANTS
    switch (rows - row) {
#if defined(__AVX512F__)
        case 7: return add(Constant<7>{}, row);
        case 6: return add(Constant<6>{}, row);
        case 5: return add(Constant<5>{}, row);
        case 4: return add(Constant<4>{}, row);
#endif
        case 3: return add(Constant<3>{}, row);
        case 2: return add(Constant<2>{}, row);
        case 1: return add(Constant<1>{}, row);
    }
#endif
}

// Interleave R vectors into WIDTH times R words: the first word of each vector, then the second of
// each.
template <int R>
INLINE void store_interleaved(const Words (&from)[R], uint32_t* to) {
    constexpr int ALL = R > 4 ? 8 : R > 2 ? 4 : R;
    Words low, high;  // word order of the two interleaved halves
    for (int i = 0; i < WIDTH; i++) {
        low[i] = static_cast<uint32_t>(i / 2 + i % 2 * WIDTH);
        high[i] = low[i] + WIDTH / 2;
    }
    Words vectors[ALL]{};
    for (int r = 0; r < R; r++) vectors[r] = from[r];
    for (int done = 1; done < ALL; done *= 2) {
        Words next[ALL];
        for (int r = 0; r < ALL / 2; r++) {
            next[2 * r] = __builtin_shuffle(vectors[r], vectors[r + ALL / 2], low);
            next[2 * r + 1] = __builtin_shuffle(vectors[r], vectors[r + ALL / 2], high);
        }
        for (int r = 0; r < ALL; r++) vectors[r] = next[r];
    }
    if (ALL == R) {
        for (int r = 0; r < R; r++) store(to + r * WIDTH, vectors[r]);
        return;
    }
    uint32_t words[WIDTH * ALL];
    for (int r = 0; r < ALL; r++) store(words + r * WIDTH, vectors[r]);
    for (int i = 0; i < WIDTH; i++) std::memcpy(to + i * R, words + i * ALL, R * sizeof *to);
}

// Interleave the steps of R rows of x, which are `x_row` apart. Elements beyond `size` are zeros.
template <class Operands, int R, class T>
INLINE void pack_rows(const T* x, int64_t x_row, int64_t size, int64_t steps, uint32_t* to) {
    int64_t step = 0;
    for (; (step + WIDTH) * Operands::inputs <= size; step += WIDTH) {
        Words words[R];
        for (int r = 0; r < R; r++)
            words[r] = Operands::pack_all(x + r * x_row + step * Operands::inputs);
        store_interleaved<R>(words, to + step * R);
    }
    for (; step * Operands::inputs < size; step++)
        for (int r = 0; r < R; r++)
            to[step * R + r] =
                Operands::pack(x + r * x_row + step * Operands::inputs, size - step * Operands::inputs);
    for (; step < steps; step++)
        for (int r = 0; r < R; r++) to[step * R + r] = 0;
}

// Pack `rows` rows of x from `first` on to a panel, in blocks of BLOCK rows (REGISTER_ROWS or 1). The
// last block may have fewer. If BLOCK is 1, the panel may have more rows, which are zeros. The panel
// is written sequentially, because the rows of consecutive groups are too far apart to stay in the L1
// cache.
template <class Operands, class T, int64_t BLOCK>
void pack_input(const QuantizedLinear& args, const MatrixBlocks& m, int64_t first, int64_t rows,
                const PackedInput& p) {
#pragma omp parallel for schedule(static) collapse(2) \
    num_threads(args.threads) if (rows * args.matrix.inputs > MIN_PARALLEL_PACKING)
    for (int64_t g = 0; g < m.groups; g++)
        for (int64_t row = 0; row < p.rows; row += BLOCK) {
            const T* x = static_cast<const T*>(args.x) + (first + row) * args.x_row + g * m.group;
            const int64_t left = args.matrix.inputs - g * m.group;
            const int64_t size = row >= rows ? 0 : left < m.group ? left : m.group;
            uint32_t* to = p.x + (g * p.rows + row) * p.steps;
            float* sums = p.sums + g * p.rows + row;
            const auto pack = [&](auto count, int64_t) {
                constexpr int R = decltype(count)::value;
                for (int r = 0; r < R; r++) sums[r] = sum_of(x + r * args.x_row, size);
                pack_rows<Operands, R>(x, args.x_row, size, p.steps, to);
            };
            if constexpr (BLOCK == 1)
                pack(Constant<1>{}, 0);
            else
                for_register_rows(p.rows - row < BLOCK ? p.rows - row : BLOCK, pack);
        }
}

// Store totals [rows, columns] to the outputs from `begin` on, for rows from `first` on.
template <class T>
NOINLINE void store_columns(const QuantizedLinear& args, int64_t begin, int64_t columns, int64_t first,
                            int64_t rows, const float* totals) {
    const int64_t left = args.matrix.outputs - begin, count = left < columns ? left : columns;
    const T* bias = args.bias ? static_cast<const T*>(args.bias) + begin : nullptr;
    for (int64_t row = 0; row < rows; row++)
        store_outputs(totals + row * columns, bias,
                      static_cast<T*>(args.out) + (first + row) * args.out_row + begin, count, args.add);
}

}  // namespace ISA
