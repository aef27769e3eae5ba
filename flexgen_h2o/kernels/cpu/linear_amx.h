// Matmuls with 16-bit weights in AMX tiles. For few rows, weights [outputs, inputs] are left operands
// in place, x is packed into right operands, and results are transposed. For many rows, see
// amx_matmul.h.
#pragma once

#include "amx_matmul.h"
#include "prefetch.h"

#if defined(HAS_AMX_TILES)

namespace ISA {

constexpr int64_t LINEAR_VECTOR_ROWS = 2;  // up to this many rows use vectors
constexpr int64_t PREFETCH_TILES = 4;      // prefetch distance in tiles of weights

// x is multiplied in panels of rows: up to four tiles of rows by one tile of outputs, or, for more
// rows, two by two.
struct InputPanels {
    int64_t steps, row_tiles;  // tiles of all inputs and of all rows
    int64_t tiles;             // row tiles of a panel; the last one may have fewer
    int64_t outputs;           // outputs multiplied with a panel at once

    explicit InputPanels(const Linear& args)
        : steps((args.inputs + AMX_DEPTH - 1) / AMX_DEPTH),
          row_tiles((args.rows + AMX_ROWS - 1) / AMX_ROWS), tiles(row_tiles <= 4 ? row_tiles : 2),
          outputs(tiles > 2 ? AMX_ROWS : 2 * AMX_ROWS) {}

    int64_t passes() const { return (row_tiles + tiles - 1) / tiles; }
    int64_t tiles_of(int64_t pass) const {
        const int64_t left = row_tiles - pass * tiles;
        return left < tiles ? left : tiles;
    }
};

// Transpose up to 16 rows by 32 inputs to a right operand [pairs, rows], whose pairs are `to_row`
// words apart. The rest is padded with zeros.
INLINE void pack_right_tile(const bf16* from, int64_t from_row, int64_t rows, int64_t inputs,
                            uint32_t* to, int64_t to_row) {
    alignas(64) bf16 rest[AMX_DEPTH] = {};
    for (int64_t row = 0; row < AMX_ROWS; row += WIDTH)
        for (int64_t pair = 0; pair < AMX_PAIRS; pair += WIDTH) {
            Floats words[WIDTH];  // bits of pairs of bfloat16
            for (int64_t i = 0; i < WIDTH; i++) {
                words[i] = Floats{};
                if (row + i >= rows) continue;
                const bf16* source = from + (row + i) * from_row;
                if (inputs < AMX_DEPTH) {
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
inline void pack_step(const Linear& args, const InputPanels& panels, int64_t pass, int64_t step,
                      uint32_t* to) {
    const int64_t tiles = panels.tiles_of(pass), begin = pass * panels.tiles * AMX_ROWS;
    const bf16* from = static_cast<const bf16*>(args.x) + begin * args.x_row + step * AMX_DEPTH;
    to += (begin / AMX_ROWS * panels.steps + step * tiles) * AMX_TILE_WORDS;
    for (int64_t row = 0; row < tiles * AMX_ROWS; row += AMX_ROWS)
        pack_right_tile(from + row * args.x_row, args.x_row, args.rows - begin - row,
                        args.inputs - step * AMX_DEPTH, to + row / AMX_ROWS * AMX_TILE_WORDS, AMX_ROWS);
}

// 16 rows of weights by 32 inputs: in place, or a copy padded with zeros.
struct LeftTile {
    const bf16* from;
    int64_t bytes;  // row stride
};
INLINE LeftTile left_tile(const Linear& args, int64_t output, int64_t input, bf16* copy) {
    const bf16* from = static_cast<const bf16*>(args.weight) + output * args.weight_row + input;
    const int64_t outputs = args.outputs - output, inputs = args.inputs - input;
    if (outputs >= AMX_ROWS && inputs >= AMX_DEPTH)
        return {from, args.weight_row * static_cast<int64_t>(sizeof(bf16))};
    std::memset(copy, 0, AMX_ROWS * AMX_DEPTH * sizeof *copy);
    for (int64_t row = 0; row < AMX_ROWS && row < outputs; row++)
        std::memcpy(copy + row * AMX_DEPTH, from + row * args.weight_row,
                    static_cast<size_t>(inputs < AMX_DEPTH ? inputs : AMX_DEPTH) * sizeof *copy);
    return {copy, AMX_ROW_BYTES};
}

// Prefetch rows `first` to `last` of a block of `outputs` outputs by 32 inputs of weights. Past the
// last step, prefetch the next block.
INLINE void prefetch_weights(const Linear& args, int64_t output, int64_t outputs, int64_t first,
                             int64_t last, int64_t step, int64_t steps, CacheLevel to) {
    if (step >= steps) output += outputs, step -= steps;
    const bf16* from =
        static_cast<const bf16*>(args.weight) + output * args.weight_row + step * AMX_DEPTH;
    for (int64_t row = first; row < last; row++) prefetch(from + row * args.weight_row, to);
}

// Multiply O tiles of outputs by R tiles of rows, at most four in all, to results [16 O, 64] float32.
// The first pass prefetches weights into the L1 cache just before their use. With several passes, each
// one prefetches its share of the next block.
template <int O, int R>
void multiply(AmxTiles& tiles, const Linear& args, const InputPanels& panels, const uint32_t* x,
              int64_t output, int64_t pass, float* results) {
    const int64_t steps = panels.steps, passes = panels.passes(), outputs = panels.outputs;
    const int64_t begin = outputs * pass / passes, end = outputs * (pass + 1) / passes;
    alignas(64) bf16 copies[2][AMX_ROWS * AMX_DEPTH];
    zero_block<2>(tiles);
    for (int64_t k = 0; k < steps; k++, x += R * AMX_TILE_WORDS) {
        if (pass == 0)
            prefetch_weights(args, output, outputs, 0, O * AMX_ROWS, k + PREFETCH_TILES, steps, L1);
        if (passes > 1) prefetch_weights(args, output, outputs, begin, end, k + steps, steps, L2);
        const LeftTile first = left_tile(args, output, k * AMX_DEPTH, copies[0]);
        tiles.load<A0>(first.from, first.bytes);
        tiles.load<B0>(x, AMX_ROW_BYTES);
        tiles.add_matmul<C0, A0, B0>();
        if constexpr (R > 1) {
            tiles.load<B1>(x + AMX_TILE_WORDS, AMX_ROW_BYTES);
            tiles.add_matmul<C1, A0, B1>();
        }
        if constexpr (R > 2) {
            tiles.load<B0>(x + 2 * AMX_TILE_WORDS, AMX_ROW_BYTES);
            tiles.add_matmul<C2, A0, B0>();
        }
        if constexpr (R > 3) {
            tiles.load<B1>(x + 3 * AMX_TILE_WORDS, AMX_ROW_BYTES);
            tiles.add_matmul<C3, A0, B1>();
        }
        if constexpr (O > 1) {
            const LeftTile second = left_tile(args, output + AMX_ROWS, k * AMX_DEPTH, copies[1]);
            tiles.load<A1>(second.from, second.bytes);
            tiles.add_matmul<C2, A1, B0>();
            if constexpr (R > 1) tiles.add_matmul<C3, A1, B1>();
        }
    }
    constexpr int64_t ROW = 4 * AMX_ROWS * sizeof(float);
    tiles.store<C0>(results, ROW);
    if constexpr (R > 1) tiles.store<C1>(results + AMX_ROWS, ROW);
    float* const second = O > 1 ? results + AMX_ROWS * 4 * AMX_ROWS : results + 2 * AMX_ROWS;
    if constexpr (O > 1 || R > 2) tiles.store<C2>(second, ROW);
    if constexpr ((O > 1 && R > 1) || R > 3) tiles.store<C3>(second + AMX_ROWS, ROW);
}

// Store 16 outputs of `rows` rows from `first` on, from results [16, 64].
inline void store_transposed(const Linear& args, int64_t output, int64_t first, int64_t rows,
                             const float* results) {
    const int64_t left = args.outputs - output, count = left < AMX_ROWS ? left : AMX_ROWS;
    const bf16* bias = args.bias ? static_cast<const bf16*>(args.bias) + output : nullptr;
    for (int64_t row = 0; row < rows; row += WIDTH) {
        alignas(64) float sums[WIDTH * AMX_ROWS];
        for (int64_t i = 0; i < AMX_ROWS; i += WIDTH) {
            Floats square[WIDTH];
            for (int64_t k = 0; k < WIDTH; k++) square[k] = load(results + (i + k) * 4 * AMX_ROWS + row);
            transpose(square);
            for (int64_t k = 0; k < WIDTH; k++) store(sums + k * AMX_ROWS + i, square[k]);
        }
        for (int64_t k = 0; k < WIDTH && row + k < rows; k++)
            store_outputs(sums + k * AMX_ROWS, bias,
                          static_cast<bf16*>(args.out) + (first + row + k) * args.out_row + output,
                          count, args.add);
    }
}

template <int O, int R>
void compute_output_tiles(AmxTiles& tiles, const Linear& args, const InputPanels& panels,
                          const uint32_t* x, int64_t output, int64_t pass) {
    if (output + (O - 1) * AMX_ROWS >= args.outputs)  // last tile of an odd number
        return compute_output_tiles<1, R>(tiles, args, panels, x, output, pass);
    alignas(64) float results[O * AMX_ROWS * 4 * AMX_ROWS];
    const int64_t first = pass * panels.tiles * AMX_ROWS, left = args.rows - first;
    x += first / AMX_ROWS * panels.steps * AMX_TILE_WORDS;
    multiply<O, R>(tiles, args, panels, x, output, pass, results);
    for (int o = 0; o < O; o++)
        store_transposed(args, output + o * AMX_ROWS, first, left < R * AMX_ROWS ? left : R * AMX_ROWS,
                         results + o * AMX_ROWS * 4 * AMX_ROWS);
}

// Compute all matmuls of a chain that share x.
inline int tiled_linear(const Linear& args) {
    const InputPanels panels(args);
    const Buffer<uint32_t> x = allocate<uint32_t>(panels.steps * panels.row_tiles * AMX_TILE_WORDS);
    if (!x) return NO_MEMORY;
#pragma omp parallel num_threads(args.threads)
    {
        const AmxTileShapes shapes = whole_tiles();
        AmxTiles tiles(shapes);
#pragma omp for schedule(static) collapse(2)
        for (int64_t pass = 0; pass < panels.passes(); pass++)
            for (int64_t step = 0; step < panels.steps; step++)
                pack_step(args, panels, pass, step, x.get());
        for (const Linear* matmul = &args; matmul; matmul = matmul->next) {
            const int64_t blocks = (matmul->outputs + panels.outputs - 1) / panels.outputs;
#pragma omp for schedule(static) nowait
            for (int64_t block = 0; block < blocks; block++) {
                const int64_t output = block * panels.outputs;
                for (int64_t pass = 0; pass < panels.passes(); pass++) {
                    const auto compute = [&](auto height, auto width) {
                        compute_output_tiles<decltype(height)::value, decltype(width)::value>(
                            tiles, *matmul, panels, x.get(), output, pass);
                    };
                    switch (panels.tiles_of(pass)) {
                        case 1: compute(Constant<2>{}, Constant<1>{}); break;
                        case 2: compute(Constant<2>{}, Constant<2>{}); break;
                        case 3: compute(Constant<1>{}, Constant<3>{}); break;
                        default: compute(Constant<1>{}, Constant<4>{});
                    }
                }
            }
        }
    }
    return DONE;
}

// Weights in place, for matmuls of many rows.
struct PlainPanels {
    const Linear& args;

    explicit PlainPanels(const Linear& args) : args(args) {}
    int64_t outputs() const { return args.outputs; }

    void unpack(const WeightPanel& panel, uint32_t* to) const {
        const bf16* from =
            static_cast<const bf16*>(args.weight) + panel.output * args.weight_row + panel.input;
        for (int64_t first = 0; first < panel.pairs() * AMX_BLOCK; first += AMX_BLOCK)
            for (int64_t step = 0; step < panel.steps(); step++, to += AMX_PAIRS * AMX_BLOCK)
                for (int64_t side = 0; side < AMX_BLOCK; side += AMX_ROWS) {
                    const int64_t output = first + side, input = step * AMX_DEPTH;
                    const bf16* source = from + output * args.weight_row + input;
                    for (int64_t row = 0; row < AMX_ROWS; row++)
                        prefetch(source + row * args.weight_row + PREFETCH_TILES * AMX_DEPTH, L1);
                    pack_right_tile(source, args.weight_row, panel.outputs - output,
                                    panel.inputs - input, to + side, AMX_BLOCK);
                }
    }
};

}  // namespace ISA

#endif
