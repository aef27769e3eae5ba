// Matmuls of tiles of outputs with instructions for dot products of four bytes, which accumulate in 32
// bits.
#pragma once

#include "int8_input.h"

namespace ISA {

// Tiles whose vectors share each load of x. 16 registers do not suffice for two.
constexpr int INT8_CHUNK_TILES = WIDTH == MATRIX_TILE ? 2 : 1;
constexpr int64_t INT8_CHUNK_OUTPUTS = INT8_CHUNK_TILES * MATRIX_TILE;  // outputs

using TileWords = PrefetchedWords[INT8_CHUNK_TILES];

// sums += `count` units by R rows.
template <class Format, int R>
INLINE void add_units(const TileWords& words, int64_t count, const uint32_t* x,
                      Ints (&sums)[INT8_CHUNK_TILES][R]) {
    constexpr int PARTS = input_words<Format>();
    constexpr bool SPLIT_SUMS = R * INT8_CHUNK_TILES < 8;  // separate chains hide the latency of a sum
    Ints others[INT8_CHUNK_TILES][R] = {};
    for (int64_t n = 0; n < count; n++) {
        Words bytes[PARTS][INT8_CHUNK_TILES];
        for (int v = 0; v < INT8_CHUNK_TILES; v++) {
            const PackedUnit<Format> unit = words[v].template unit<Format, R <= MEMORY_BOUND_ROWS>(n);
            for (int part = 0; part < PARTS; part++) bytes[part][v] = unit_bytes(unit, part);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int part = 0; part < PARTS; part++) {
                const Words four = x[(PARTS * n + part) * R + r] + Words{};
                for (int v = 0; v < INT8_CHUNK_TILES; v++) {
                    Ints& to = SPLIT_SUMS && part % 2 ? others[v][r] : sums[v][r];
                    to = add_int8_dot(to, bytes[part][v], four);
                }
            }
    }
    if (SPLIT_SUMS)
        for (int v = 0; v < INT8_CHUNK_TILES; v++)
            for (int r = 0; r < R; r++) sums[v][r] += others[v][r];
}

// Multiply R rows from `row` on by a vector of outputs of each block, and add to their totals.
template <class Format, int R>
INLINE void add_block(const MatrixBlocks& m, const PrefetchedBlock<Format>* blocks, int64_t lane,
                      int64_t g, const QuantizedInput& p, int64_t row, float* totals) {
    TileWords words;
    for (int v = 0; v < INT8_CHUNK_TILES; v++) words[v] = blocks[v].words(lane, row == 0);
    Ints whole[INT8_CHUNK_TILES][R] = {};
    add_units<Format, R>(words, m.words / Format::unit_words, p.block(g, row), whole);
    const float *steps = p.steps + g * p.rows + row, *sums = p.sums + g * p.rows + row;
#pragma GCC unroll 2  // otherwise the sums spill to memory
    for (int v = 0; v < INT8_CHUNK_TILES; v++) {
        const Floats scale = Format::scales(blocks[v].block, lane);
        const Floats zero =
            fma(scale, broadcast(-UnsignedBytes<Format>::offset), Format::zeros(blocks[v].block, lane));
        float* to = totals + row * INT8_CHUNK_OUTPUTS + v * MATRIX_TILE + lane;
#pragma GCC unroll 8
        for (int r = 0; r < R; r++, to += INT8_CHUNK_OUTPUTS) {
            const Floats products = __builtin_convertvector(whole[v][r], Floats) * broadcast(steps[r]);
            store(to, fma(products, scale, fma(zero, broadcast(sums[r]), load(to))));
        }
    }
}

// Compute tiles of outputs from `tile` on, to totals [rows, INT8_CHUNK_OUTPUTS]. Positions past the
// last tile repeat it.
template <class Format>
void multiply_chunk(const MatrixBlocks& m, int64_t tile, int64_t tiles, const QuantizedInput& p,
                    float* totals) {
    std::memset(totals, 0, static_cast<size_t>(p.rows * INT8_CHUNK_OUTPUTS) * sizeof *totals);
    const CacheLevel to = cache_of_weights(p.rows <= REGISTER_ROWS);
    for (int64_t g = 0; g < m.groups; g++) {
        PrefetchedBlock<Format> blocks[INT8_CHUNK_TILES];
        for (int v = 0; v < INT8_CHUNK_TILES; v++) {
            const int64_t source_tile = tile + v < tiles ? tile + v : tile;
            blocks[v] = PrefetchedBlock<Format>::of(m, source_tile, g, INT8_CHUNK_TILES, to);
        }
        for (int64_t lane = 0; lane < MATRIX_TILE; lane += WIDTH)
            for_register_rows(p.rows, [&](auto count, int64_t row) ALWAYS_INLINE {
                add_block<Format, decltype(count)::value>(m, blocks, lane, g, p, row, totals);
            });
    }
}

}  // namespace ISA
