// Matmuls of tiles of outputs with instructions for dot products of four bytes, which accumulate in 32
// bits.
#pragma once

#include "int8_input.h"

namespace ISA {

// Tiles whose vectors share each load of x. 16 registers do not suffice for two.
constexpr int TILES_TOGETHER = WIDTH == MATRIX_TILE ? 2 : 1;
constexpr int64_t TOGETHER = TILES_TOGETHER * MATRIX_TILE;  // outputs

using TileWords = PrefetchedWords[TILES_TOGETHER];

// sums += `count` units by R rows.
template <class C, int R>
INLINE void add_whole(const TileWords& words, int64_t count, const uint32_t* x,
                      Ints (&sums)[TILES_TOGETHER][R]) {
    constexpr int PARTS = parts<C>();
    constexpr bool APART = R * TILES_TOGETHER < 8;  // separate chains hide the latency of a sum
    Ints others[TILES_TOGETHER][R] = {};
    for (int64_t n = 0; n < count; n++) {
        Words bytes[PARTS][TILES_TOGETHER];
        for (int v = 0; v < TILES_TOGETHER; v++) {
            const PackedUnit<C> unit = words[v].template unit<C, R <= MEMORY_BOUND_ROWS>(n);
            for (int part = 0; part < PARTS; part++) bytes[part][v] = bytes_of(unit, part);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int part = 0; part < PARTS; part++) {
                const Words four = x[(PARTS * n + part) * R + r] + Words{};
                for (int v = 0; v < TILES_TOGETHER; v++) {
                    Ints& to = APART && part % 2 ? others[v][r] : sums[v][r];
                    to = add_int8_dot(to, bytes[part][v], four);
                }
            }
    }
    if (APART)
        for (int v = 0; v < TILES_TOGETHER; v++)
            for (int r = 0; r < R; r++) sums[v][r] += others[v][r];
}

// Multiply R rows from `row` on by a vector of outputs of each block, and add to their totals.
template <class C, int R>
INLINE void add_block(const Blocks& m, const PrefetchedBlock<C>* blocks, int64_t lane, int64_t g,
                      const QuantizedInput& p, int64_t row, float* totals) {
    TileWords words;
    for (int v = 0; v < TILES_TOGETHER; v++) words[v] = blocks[v].words(lane, row == 0);
    Ints whole[TILES_TOGETHER][R] = {};
    add_whole<C, R>(words, m.words / C::unit_words, p.block(g, row), whole);
    const float *steps = p.steps + g * p.rows + row, *sums = p.sums + g * p.rows + row;
#pragma GCC unroll 2  // otherwise the sums spill to memory
    for (int v = 0; v < TILES_TOGETHER; v++) {
        const Floats scale = C::scales(blocks[v].block, lane);
        const Floats zero = fma(scale, broadcast(-UnsignedBytes<C>::shift),
                                C::zeros(blocks[v].block, lane));
        float* to = totals + row * TOGETHER + v * MATRIX_TILE + lane;
#pragma GCC unroll 8
        for (int r = 0; r < R; r++, to += TOGETHER) {
            const Floats products = __builtin_convertvector(whole[v][r], Floats) * broadcast(steps[r]);
            store(to, fma(products, scale, fma(zero, broadcast(sums[r]), load(to))));
        }
    }
}

// Compute tiles of outputs from `tile` on, to totals [rows, TOGETHER]. Positions past the last tile
// repeat it.
template <class C>
void multiply_tiles(const Blocks& m, int64_t tile, int64_t tiles, const QuantizedInput& p,
                    float* totals) {
    std::memset(totals, 0, static_cast<size_t>(p.rows * TOGETHER) * sizeof *totals);
    const CacheLevel to = cache_of_weights(p.rows <= ROWS);
    for (int64_t g = 0; g < m.groups; g++) {
        PrefetchedBlock<C> blocks[TILES_TOGETHER];
        for (int v = 0; v < TILES_TOGETHER; v++) {
            const int64_t source_tile = tile + v < tiles ? tile + v : tile;
            blocks[v] = PrefetchedBlock<C>::of(m, source_tile, g, TILES_TOGETHER, to);
        }
        for (int64_t lane = 0; lane < MATRIX_TILE; lane += WIDTH)
            by_rows(p.rows, [&](auto count, int64_t row) ALWAYS_INLINE {
                add_block<C, decltype(count)::value>(m, blocks, lane, g, p, row, totals);
            });
    }
}

}  // namespace ISA
