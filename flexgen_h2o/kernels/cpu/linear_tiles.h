// linear_skinny in AMX tiles: weights [outputs, inputs] are left operands as they lie, x is packed
// into right ones, and results come transposed.
#pragma once

#include "amx.h"
#include "kernels.h"
#include "memory.h"
#include "outputs.h"

#if defined(TILES)

namespace ISA {

constexpr int64_t VECTOR_ROWS = 2;  // so few go by vectors
constexpr int64_t SIDE = TILE_ROWS;
constexpr int64_t DEPTH = 2 * TILE_PAIRS;
constexpr int64_t TILE = SIDE * TILE_PAIRS;  // words
constexpr int64_t TILES_AHEAD = 4;           // tiles of weights that are asked for beforehand
static_assert(SKINNY_ROWS <= 4 * SIDE, "sums of 4 tiles of rows");

// A step of x as right operands [steps, tiles of rows, pairs, rows], filled up with zeros.
inline void pack_step(const Linear& a, int64_t step, int64_t row_tiles, uint32_t* to) {
    alignas(64) bf16 rest[DEPTH] = {};
    const int64_t first = step * DEPTH, left = a.inputs - first;
    for (int64_t row = 0; row < row_tiles * SIDE; row += WIDTH)
        for (int64_t pair = 0; pair < TILE_PAIRS; pair += WIDTH) {
            Floats words[WIDTH];  // which stand for pairs
            for (int64_t i = 0; i < WIDTH; i++) {
                words[i] = Floats{};
                if (row + i >= a.rows) continue;
                const bf16* from = static_cast<const bf16*>(a.x) + (row + i) * a.x_row + first;
                if (left < DEPTH) {
                    std::memcpy(rest, from, static_cast<size_t>(left) * sizeof *rest);
                    from = rest;
                }
                words[i] = load_raw<Floats>(from + 2 * pair);
            }
            transpose(words);
            uint32_t* mine = to + (step * row_tiles + row / SIDE) * TILE + pair * SIDE + row % SIDE;
            for (int64_t i = 0; i < WIDTH; i++)
                store(reinterpret_cast<float*>(mine + i * SIDE), words[i]);
        }
}

// 16 rows of weights by 32 inputs: where they lie, or a copy of what is there, filled up with zeros.
struct LeftTile {
    const bf16* from;
    int64_t bytes;  // from one row to the next
};
INLINE LeftTile left_tile(const Linear& a, int64_t output, int64_t input, bf16* copy) {
    const bf16* from = static_cast<const bf16*>(a.weight) + output * a.weight_row + input;
    const int64_t outputs = a.outputs - output, inputs = a.inputs - input;
    if (outputs >= SIDE && inputs >= DEPTH)
        return {from, a.weight_row * static_cast<int64_t>(sizeof(bf16))};
    std::memset(copy, 0, SIDE * DEPTH * sizeof *copy);
    for (int64_t row = 0; row < SIDE && row < outputs; row++)
        std::memcpy(copy + row * DEPTH, from + row * a.weight_row,
                    static_cast<size_t>(inputs < DEPTH ? inputs : DEPTH) * sizeof *copy);
    return {copy, TILE_BYTES};
}

// Asks for `height` rows of weights from `output` on, by 32 inputs; behind the rows' end for those
// of the rows after them.
INLINE void prefetch_weights(const Linear& a, int64_t output, int64_t height, int64_t step,
                             int64_t steps) {
    if (step >= steps) output += height, step -= steps;
    const bf16* from = static_cast<const bf16*>(a.weight) + output * a.weight_row + step * DEPTH;
    for (int64_t row = 0; row < height; row++)
        __builtin_prefetch(from + row * a.weight_row, 0, 3);
}

enum { C0, C1, C2, C3, A0, A1, B0, B1 };

// O tiles of outputs by R tiles of rows, at most 4 in all, to products [16 O, 64] float32.
template <int O, int R>
void multiply(Tiles& tiles, const Linear& a, const uint32_t* x, int64_t steps, int64_t output,
              float* products) {
    alignas(64) bf16 copies[2][SIDE * DEPTH];
    tiles.zero<C0>();
    tiles.zero<C1>();
    tiles.zero<C2>();
    tiles.zero<C3>();
    for (int64_t k = 0; k < steps; k++, x += R * TILE) {
        prefetch_weights(a, output, O * SIDE, k + TILES_AHEAD, steps);
        const LeftTile first = left_tile(a, output, k * DEPTH, copies[0]);
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
            const LeftTile second = left_tile(a, output + SIDE, k * DEPTH, copies[1]);
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

// 16 outputs of all rows, out of products [16, 64].
inline void put_transposed(const Linear& a, int64_t output, const float* products) {
    const int64_t left = a.outputs - output, count = left < SIDE ? left : SIDE;
    const bf16* bias = a.bias ? static_cast<const bf16*>(a.bias) + output : nullptr;
    for (int64_t row = 0; row < a.rows; row += WIDTH) {
        alignas(64) float sums[WIDTH * SIDE];
        for (int64_t i = 0; i < SIDE; i += WIDTH) {
            Floats some[WIDTH];
            for (int64_t k = 0; k < WIDTH; k++) some[k] = load(products + (i + k) * 4 * SIDE + row);
            transpose(some);
            for (int64_t k = 0; k < WIDTH; k++) store(sums + k * SIDE + i, some[k]);
        }
        for (int64_t k = 0; k < WIDTH && row + k < a.rows; k++)
            put_outputs(sums + k * SIDE, bias,
                        static_cast<bf16*>(a.out) + (row + k) * a.out_row + output, count, a.add);
    }
}

template <int O, int R>
void outputs_of(Tiles& tiles, const Linear& a, const uint32_t* x, int64_t steps, int64_t output) {
    alignas(64) float products[O * SIDE * 4 * SIDE];
    if (output + (O - 1) * SIDE >= a.outputs)  // the last of an odd number
        return outputs_of<1, R>(tiles, a, x, steps, output);
    multiply<O, R>(tiles, a, x, steps, output, products);
    for (int o = 0; o < O; o++)
        put_transposed(a, output + o * SIDE, products + o * SIDE * 4 * SIDE);
}

// Every product of the chain, which share x.
inline int tiled_linear(const Linear& a) {
    const int64_t steps = (a.inputs + DEPTH - 1) / DEPTH, row_tiles = (a.rows + SIDE - 1) / SIDE;
    const Memory<uint32_t> x = memory<uint32_t>(steps * row_tiles * TILE);
    if (!x) return NO_MEMORY;
    const int64_t height = row_tiles > 2 ? SIDE : 2 * SIDE;  // outputs that go together
#pragma omp parallel num_threads(a.threads)
    {
        TileShapes shapes;
        for (int tile = 0; tile < 8; tile++) shapes.set(tile, TILE_ROWS, TILE_BYTES);
        Tiles tiles(shapes);
#pragma omp for schedule(static)
        for (int64_t step = 0; step < steps; step++) pack_step(a, step, row_tiles, x.get());
        for (const Linear* each = &a; each; each = each->next) {
            const int64_t blocks = (each->outputs + height - 1) / height;
#pragma omp for schedule(static) nowait
            for (int64_t block = 0; block < blocks; block++) {
                const int64_t output = block * height;
                switch (row_tiles) {
                    case 1: outputs_of<2, 1>(tiles, *each, x.get(), steps, output); break;
                    case 2: outputs_of<2, 2>(tiles, *each, x.get(), steps, output); break;
                    case 3: outputs_of<1, 3>(tiles, *each, x.get(), steps, output); break;
                    default: outputs_of<1, 4>(tiles, *each, x.get(), steps, output);
                }
            }
        }
    }
    return DONE;
}

}  // namespace ISA

#endif
