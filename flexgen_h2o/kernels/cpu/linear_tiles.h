// Matmuls with 16-bit weights in AMX tiles. For few rows, weights [outputs, inputs] are left operands
// in place, x is packed into right operands, and results are transposed. For many rows, see
// tile_matmul.h.
#pragma once

#include "prefetch.h"
#include "tile_matmul.h"

#if defined(TILES)

namespace ISA {

constexpr int64_t VECTOR_ROWS = 2;  // up to this many rows use vectors
constexpr int64_t TILE = SIDE * TILE_PAIRS;  // words
constexpr int64_t TILES_AHEAD = 4;           // prefetch distance in tiles of weights

// x is multiplied in panels of rows: up to four tiles of rows by one tile of outputs, or, for more
// rows, two by two.
struct Panels {
    int64_t steps, row_tiles;  // tiles of all inputs and of all rows
    int64_t tiles;             // row tiles of a panel; the last one may have fewer
    int64_t outputs;           // outputs multiplied with a panel at once

    explicit Panels(const Linear& a)
        : steps((a.inputs + STEP_INPUTS - 1) / STEP_INPUTS), row_tiles((a.rows + SIDE - 1) / SIDE),
          tiles(row_tiles <= 4 ? row_tiles : 2), outputs(tiles > 2 ? SIDE : 2 * SIDE) {}

    int64_t passes() const { return (row_tiles + tiles - 1) / tiles; }
    int64_t tiles_of(int64_t pass) const {
        const int64_t left = row_tiles - pass * tiles;
        return left < tiles ? left : tiles;
    }
};

// Transpose up to 16 rows by 32 inputs to a right operand [pairs, rows], whose pairs are `to_row` words
// apart. The rest is padded with zeros.
INLINE void right_tile(const bf16* from, int64_t from_row, int64_t rows, int64_t inputs, uint32_t* to,
                       int64_t to_row) {
    alignas(64) bf16 rest[STEP_INPUTS] = {};
    for (int64_t row = 0; row < SIDE; row += WIDTH)
        for (int64_t pair = 0; pair < TILE_PAIRS; pair += WIDTH) {
            Floats words[WIDTH];  // bits of pairs of bfloat16
            for (int64_t i = 0; i < WIDTH; i++) {
                words[i] = Floats{};
                if (row + i >= rows) continue;
                const bf16* source = from + (row + i) * from_row;
                if (inputs < STEP_INPUTS) {
                    std::memcpy(rest, source, static_cast<size_t>(inputs) * sizeof *rest);
                    source = rest;
                }
                words[i] = load_raw<Floats>(source + 2 * pair);
            }
            transpose(words);
            for (int64_t i = 0; i < WIDTH; i++)
                store(reinterpret_cast<float*>(to + (pair + i) * to_row + row), words[i]);
        }
}

// Pack one step of a panel of x as right operands [panels, steps, tiles of rows, pairs, rows].
inline void pack_step(const Linear& a, const Panels& panels, int64_t pass, int64_t step,
                      uint32_t* to) {
    const int64_t tiles = panels.tiles_of(pass), begin = pass * panels.tiles * SIDE;
    const bf16* from = static_cast<const bf16*>(a.x) + begin * a.x_row + step * STEP_INPUTS;
    to += (begin / SIDE * panels.steps + step * tiles) * TILE;
    for (int64_t row = 0; row < tiles * SIDE; row += SIDE)
        right_tile(from + row * a.x_row, a.x_row, a.rows - begin - row,
                   a.inputs - step * STEP_INPUTS, to + row / SIDE * TILE, SIDE);
}

// 16 rows of weights by 32 inputs: in place, or a copy padded with zeros.
struct LeftTile {
    const bf16* from;
    int64_t bytes;  // row stride
};
INLINE LeftTile left_tile(const Linear& a, int64_t output, int64_t input, bf16* copy) {
    const bf16* from = static_cast<const bf16*>(a.weight) + output * a.weight_row + input;
    const int64_t outputs = a.outputs - output, inputs = a.inputs - input;
    if (outputs >= SIDE && inputs >= STEP_INPUTS)
        return {from, a.weight_row * static_cast<int64_t>(sizeof(bf16))};
    std::memset(copy, 0, SIDE * STEP_INPUTS * sizeof *copy);
    for (int64_t row = 0; row < SIDE && row < outputs; row++)
        std::memcpy(copy + row * STEP_INPUTS, from + row * a.weight_row,
                    static_cast<size_t>(inputs < STEP_INPUTS ? inputs : STEP_INPUTS) * sizeof *copy);
    return {copy, TILE_BYTES};
}

// Prefetch rows `first` to `last` of a block of `outputs` outputs by 32 inputs of weights. Past the
// last step, prefetch the next block.
INLINE void prefetch_weights(const Linear& a, int64_t output, int64_t outputs, int64_t first,
                             int64_t last, int64_t step, int64_t steps, CacheLevel to) {
    if (step >= steps) output += outputs, step -= steps;
    const bf16* from = static_cast<const bf16*>(a.weight) + output * a.weight_row + step * STEP_INPUTS;
    for (int64_t row = first; row < last; row++) prefetch(from + row * a.weight_row, to);
}

// Multiply O tiles of outputs by R tiles of rows, at most four in all, to results [16 O, 64] float32.
// The first pass prefetches weights into the L1 cache just before their use. With several passes, each
// one prefetches its share of the next block.
template <int O, int R>
void multiply(Tiles& tiles, const Linear& a, const Panels& panels, const uint32_t* x,
              int64_t output, int64_t pass, float* products) {
    const int64_t steps = panels.steps, passes = panels.passes(), outputs = panels.outputs;
    const int64_t begin = outputs * pass / passes, end = outputs * (pass + 1) / passes;
    alignas(64) bf16 copies[2][SIDE * STEP_INPUTS];
    tiles.zero<C0>();
    tiles.zero<C1>();
    tiles.zero<C2>();
    tiles.zero<C3>();
    for (int64_t k = 0; k < steps; k++, x += R * TILE) {
        if (pass == 0)
            prefetch_weights(a, output, outputs, 0, O * SIDE, k + TILES_AHEAD, steps, L1);
        if (passes > 1)
            prefetch_weights(a, output, outputs, begin, end, k + steps, steps, L2);
        const LeftTile first = left_tile(a, output, k * STEP_INPUTS, copies[0]);
        tiles.load<A0>(first.from, first.bytes);
        tiles.load<B0>(x, TILE_BYTES);
        tiles.add_product<C0, A0, B0>();
        if constexpr (R > 1) {
            tiles.load<B1>(x + TILE, TILE_BYTES);
            tiles.add_product<C1, A0, B1>();
        }
        if constexpr (R > 2) {
            tiles.load<B0>(x + 2 * TILE, TILE_BYTES);
            tiles.add_product<C2, A0, B0>();
        }
        if constexpr (R > 3) {
            tiles.load<B1>(x + 3 * TILE, TILE_BYTES);
            tiles.add_product<C3, A0, B1>();
        }
        if constexpr (O > 1) {
            const LeftTile second = left_tile(a, output + SIDE, k * STEP_INPUTS, copies[1]);
            tiles.load<A1>(second.from, second.bytes);
            tiles.add_product<C2, A1, B0>();
            if constexpr (R > 1) tiles.add_product<C3, A1, B1>();
        }
    }
    constexpr int64_t ROW = 4 * SIDE * sizeof(float);
    tiles.store<C0>(products, ROW);
    if constexpr (R > 1) tiles.store<C1>(products + SIDE, ROW);
    float* const second = O > 1 ? products + SIDE * 4 * SIDE : products + 2 * SIDE;
    if constexpr (O > 1 || R > 2) tiles.store<C2>(second, ROW);
    if constexpr ((O > 1 && R > 1) || R > 3) tiles.store<C3>(second + SIDE, ROW);
}

// Store 16 outputs of `rows` rows from `first` on, from results [16, 64].
inline void put_transposed(const Linear& a, int64_t output, int64_t first, int64_t rows,
                           const float* products) {
    const int64_t left = a.outputs - output, count = left < SIDE ? left : SIDE;
    const bf16* bias = a.bias ? static_cast<const bf16*>(a.bias) + output : nullptr;
    for (int64_t row = 0; row < rows; row += WIDTH) {
        alignas(64) float sums[WIDTH * SIDE];
        for (int64_t i = 0; i < SIDE; i += WIDTH) {
            Floats square[WIDTH];
            for (int64_t k = 0; k < WIDTH; k++) square[k] = load(products + (i + k) * 4 * SIDE + row);
            transpose(square);
            for (int64_t k = 0; k < WIDTH; k++) store(sums + k * SIDE + i, square[k]);
        }
        for (int64_t k = 0; k < WIDTH && row + k < rows; k++)
            put_outputs(sums + k * SIDE, bias,
                        static_cast<bf16*>(a.out) + (first + row + k) * a.out_row + output, count,
                        a.add);
    }
}

template <int O, int R>
void outputs_of(Tiles& tiles, const Linear& a, const Panels& panels, const uint32_t* x,
                int64_t output, int64_t pass) {
    if (output + (O - 1) * SIDE >= a.outputs)  // last tile of an odd number
        return outputs_of<1, R>(tiles, a, panels, x, output, pass);
    alignas(64) float products[O * SIDE * 4 * SIDE];
    const int64_t first = pass * panels.tiles * SIDE, left = a.rows - first;
    x += first / SIDE * panels.steps * TILE;
    multiply<O, R>(tiles, a, panels, x, output, pass, products);
    for (int o = 0; o < O; o++)
        put_transposed(a, output + o * SIDE, first, left < R * SIDE ? left : R * SIDE,
                       products + o * SIDE * 4 * SIDE);
}

// Compute all matmuls of a chain that share x.
inline int tiled_linear(const Linear& a) {
    const Panels panels(a);
    const Memory<uint32_t> x = memory<uint32_t>(panels.steps * panels.row_tiles * TILE);
    if (!x) return NO_MEMORY;
#pragma omp parallel num_threads(a.threads)
    {
        const TileShapes shapes = whole_tiles();
        Tiles tiles(shapes);
#pragma omp for schedule(static) collapse(2)
        for (int64_t pass = 0; pass < panels.passes(); pass++)
            for (int64_t step = 0; step < panels.steps; step++)
                pack_step(a, panels, pass, step, x.get());
        for (const Linear* matmul = &a; matmul; matmul = matmul->next) {
            const int64_t blocks = (matmul->outputs + panels.outputs - 1) / panels.outputs;
#pragma omp for schedule(static) nowait
            for (int64_t block = 0; block < blocks; block++) {
                const int64_t output = block * panels.outputs;
                for (int64_t pass = 0; pass < panels.passes(); pass++) {
                    const auto compute = [&](auto height, auto width) {
                        outputs_of<decltype(height)::value, decltype(width)::value>(
                            tiles, *matmul, panels, x.get(), output, pass);
                    };
                    switch (panels.tiles_of(pass)) {
                        case 1: compute(Count<2>{}, Count<1>{}); break;
                        case 2: compute(Count<2>{}, Count<2>{}); break;
                        case 3: compute(Count<1>{}, Count<3>{}); break;
                        default: compute(Count<1>{}, Count<4>{});
                    }
                }
            }
        }
    }
    return DONE;
}

// Weights in place, for matmuls of many rows.
struct PlainPanels {
    const Linear& a;

    explicit PlainPanels(const Linear& a) : a(a) {}
    int64_t outputs() const { return a.outputs; }

    void unpack(const WeightPanel& panel, uint32_t* to) const {
        const bf16* from =
            static_cast<const bf16*>(a.weight) + panel.output * a.weight_row + panel.input;
        for (int64_t first = 0; first < panel.pairs() * TILE_COLUMNS; first += TILE_COLUMNS)
            for (int64_t step = 0; step < panel.steps(); step++, to += TILE_PAIRS * TILE_COLUMNS)
                for (int64_t side = 0; side < TILE_COLUMNS; side += SIDE) {
                    const int64_t output = first + side, input = step * STEP_INPUTS;
                    const bf16* source = from + output * a.weight_row + input;
                    for (int64_t row = 0; row < SIDE; row++)
                        prefetch(source + row * a.weight_row + TILES_AHEAD * STEP_INPUTS, L1);
                    right_tile(source, a.weight_row, panel.outputs - output, panel.inputs - input,
                               to + side, TILE_COLUMNS);
                }
    }
};

}  // namespace ISA

#endif
