// The input of a product with quantized matrices, as all threads read it.
#pragma once

#include "codes.h"
#include "count.h"
#include "memory.h"
#include "outputs.h"

namespace ISA {

constexpr int64_t PANEL = PRODUCT_ROWS;
constexpr int64_t COLUMNS = PRODUCT_OUTPUTS;
#if defined(__AVX512F__)
constexpr int ROWS = 8;  // of x, in registers together
#else
constexpr int ROWS = 4;
#endif
constexpr int64_t LEAST_PACKED = 1 << 16;  // elements for which waking other threads pays

// Rows of x, filled up with zeros: to whole groups, and what else tiles ask for. Rows that are in
// registers together lie together, a step of each beside those of the others.
struct Panel {
    uint32_t* x;   // [groups, blocks of rows, steps, rows of the block]
    float* sums;   // [groups, rows]: of x
    int64_t rows, steps;
};

// What one thread works in. In AMX tiles up to EXACT_ROWS rows have all but the totals twice, for two
// groups; more rows have totals [pairs of tiles, rows, COLUMNS] and the weights of a slab alone.
struct Workspace {
    float* totals;    // [rows of the panel, columns]
    uint32_t* codes;  // [steps, columns]
    float* scales;    // [COLUMNS]
    float* zeros;     // [COLUMNS]: what a sum of x is to be multiplied with
    float* products;  // of tiles, before they are scaled
};

// Calls add(Count<R>, first) for R rows at a time.
template <class F>
INLINE void by_rows(int64_t rows, const F& add) {
    int64_t row = 0;
    for (; row + ROWS <= rows; row += ROWS) add(Count<ROWS>{}, row);
    switch (rows - row) {
#if defined(__AVX512F__)
        case 7: return add(Count<7>{}, row);
        case 6: return add(Count<6>{}, row);
        case 5: return add(Count<5>{}, row);
        case 4: return add(Count<4>{}, row);
#endif
        case 3: return add(Count<3>{}, row);
        case 2: return add(Count<2>{}, row);
        case 1: return add(Count<1>{}, row);
    }
}

template <class T>
INLINE float sum_of(const T* x, int64_t count) {
    Floats all{};
    int64_t i = 0;
    for (; i + WIDTH <= count; i += WIDTH) all += load(x + i);
    float total = sum(all);
    for (; i < count; i++) total += one(x + i);
    return total;
}

// `rows` of x from `first` on to a panel, in blocks of BLOCK rows, the last one of what is left.
template <class A, class T, int64_t BLOCK>
void pack_panel(const Product& a, const Blocks& m, int64_t first, int64_t rows, const Panel& p) {
#pragma omp parallel for schedule(static) num_threads(a.threads) \
    if (rows * a.matrix.inputs > LEAST_PACKED)
    for (int64_t row = 0; row < p.rows; row++) {
        const T* from = static_cast<const T*>(a.x) + (first + row) * a.x_row;
        for (int64_t g = 0; g < m.groups; g++) {
            const int64_t before = row / BLOCK * BLOCK, behind = p.rows - before;
            const int64_t apart = behind < BLOCK ? behind : BLOCK;
            uint32_t* to = p.x + (g * p.rows + before) * p.steps + row - before;
            const int64_t left = a.matrix.inputs - g * m.group;
            const int64_t size = row >= rows ? 0 : left < m.group ? left : m.group;
            const T* mine = from + g * m.group;
            p.sums[g * p.rows + row] = sum_of(mine, size);
            int64_t step = 0;
            for (; step * A::inputs < size; step++)
                to[step * apart] = A::pack(mine + step * A::inputs, size - step * A::inputs);
            for (; step < p.steps; step++) to[step * apart] = 0;
        }
    }
}

// Totals [rows, columns] to the outputs from `begin` on, of rows from `first` on.
template <class T>
void put_columns(const Product& a, int64_t begin, int64_t columns, int64_t first, int64_t rows,
                 const float* totals) {
    const int64_t left = a.matrix.outputs - begin, count = left < columns ? left : columns;
    const T* bias = a.bias ? static_cast<const T*>(a.bias) + begin : nullptr;
    for (int64_t row = 0; row < rows; row++)
        put_outputs(totals + row * columns, bias,
                    static_cast<T*>(a.out) + (first + row) * a.out_row + begin, count, a.add);
}

}  // namespace ISA
