// Matmuls of a tile of outputs without dot products of bytes as instructions.
//
// Bytes are multiplied and added in adjacent pairs, and accumulated in 16 bits as long as they fit.
// All vectors of the tile share each load of x. A block of rows keeps its totals from group to group;
// the next rows find the tile in a cache.
#pragma once

#include "int8_input.h"

namespace ISA {

constexpr int INT8_CHUNK_TILES = 1;
constexpr int64_t INT8_CHUNK_OUTPUTS = MATRIX_TILE;  // outputs
constexpr int TILE_VECTORS = MATRIX_TILE / WIDTH;

typedef int16_t Shorts __attribute__((vector_size(4 * WIDTH)));

// sums += unsigned bytes by signed bytes, added in adjacent pairs.
INLINE Shorts add_int8_pairs(Shorts sums, Words bytes, Words x) {
#if defined(__AVX512F__)
    return sums + Shorts(_mm512_maddubs_epi16(__m512i(bytes), __m512i(x)));
#elif defined(__AVX2__)
    sums += Shorts(_mm256_maddubs_epi16(__m256i(bytes), __m256i(x)));
    asm("" : "+x"(sums));  // prevents a GCC reordering that needs too many registers
    return sums;
#else
    const Shorts low = bit_cast<Shorts>(bytes & 0x00ff00ff);
    const Shorts high = bit_cast<Shorts>(bytes >> 8 & 0x00ff00ff);
    const Shorts both = bit_cast<Shorts>(x);
    return sums + low * (both << 8 >> 8) + high * (both >> 8);
#endif
}

// Add the two sums of each lane.
INLINE Ints widen_sums(Shorts sums) {
#if defined(__AVX512F__)
    return Ints(_mm512_madd_epi16(__m512i(sums), _mm512_set1_epi16(1)));
#elif defined(__AVX2__)
    return Ints(_mm256_madd_epi16(__m256i(sums), _mm256_set1_epi16(1)));
#else
    const Ints both = bit_cast<Ints>(sums);
    return (both << 16 >> 16) + (both >> 16);
#endif
}

// Vectors of bytes whose products, added in pairs, fit in 16 bits. 8 bits are multiplied by nibbles.
template <class Format>
constexpr int terms_in_int16() {
    if (std::is_same_v<Format, Mxfp4>) return 4;
    return Format::bits == 6 ? 2 : 8;
}

// sums (+)= COUNT units from unit `first` on by R rows of x. With 8 bits, `shift` selects the nibbles.
template <bool ADD, class Format, int R, int COUNT>
INLINE void add_units(const PrefetchedWords& words, int64_t first, int shift, const uint32_t* x,
                      Ints (&sums)[R][TILE_VECTORS]) {
    constexpr int PARTS = input_words<Format>(), TERMS = terms_in_int16<Format>();
    if (shift == 0)
        words.template prefetch_lines<COUNT * Format::unit_words, R <= MEMORY_BOUND_ROWS>(
            first * Format::unit_words);
    Shorts pairs[R][TILE_VECTORS];
#pragma GCC unroll 8
    for (int n = 0; n < COUNT; n++) {
        PackedUnit<Format> units[TILE_VECTORS];
        for (int i = 0; i < Format::unit_words; i++)
            for (int v = 0; v < TILE_VECTORS; v++)
                units[v].words[i] = load_raw<Words>(
                    words.words +
                    4 * (((first + n) * Format::unit_words + i) * MATRIX_TILE + v * WIDTH));
#pragma GCC unroll 4
        for (int part = 0; part < PARTS; part++) {
            const int at = PARTS * n + part;
            const bool last = at % TERMS == TERMS - 1 || at == PARTS * COUNT - 1;
            Words bytes[TILE_VECTORS];
            for (int v = 0; v < TILE_VECTORS; v++)
                bytes[v] = Format::bits == 8 ? units[v].words[0] >> shift & 0x0f0f0f0f
                                             : unit_bytes(units[v], part);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const Words four = x[(PARTS * first + at) * R + r] + Words{};
#pragma GCC unroll 4
                for (int v = 0; v < TILE_VECTORS; v++) {
                    Shorts& to = pairs[r][v];
                    to = add_int8_pairs(at % TERMS ? to : Shorts{}, bytes[v], four);
                    if (last)
                        sums[r][v] = ADD || at >= TERMS ? sums[r][v] + widen_sums(to) : widen_sums(to);
                }
            }
        }
    }
}

// sums = `count` units by R rows of x. With 8 bits, `shift` selects the nibbles.
template <class Format, int R>
INLINE void multiply_units(const PrefetchedWords& words, int64_t count, int shift, const uint32_t* x,
                           Ints (&sums)[R][TILE_VECTORS]) {
    constexpr int COUNT = terms_in_int16<Format>() > input_words<Format>()
                              ? terms_in_int16<Format>() / input_words<Format>()
                              : 1;
    int64_t n = 0;
    if (count < COUNT) {
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int v = 0; v < TILE_VECTORS; v++) sums[r][v] = Ints{};
    } else {
        add_units<false, Format, R, COUNT>(words, 0, shift, x, sums);
        n = COUNT;
    }
    for (; n + COUNT <= count; n += COUNT) add_units<true, Format, R, COUNT>(words, n, shift, x, sums);
    for (; COUNT > 1 && n < count; n++) add_units<true, Format, R, 1>(words, n, shift, x, sums);
}

// Multiply R rows from `row` on by a tile, to totals [R, MATRIX_TILE]. A group has UNITS units, or any
// number of them if it is 0. With a constant, the sums of a group stay in registers.
template <class Format, int R, int UNITS>
NOINLINE void multiply_rows(const MatrixBlocks& m, int64_t tile, const QuantizedInput& p, int64_t row,
                            CacheLevel to, float* out) {
    const int64_t units = UNITS ? UNITS : m.words / Format::unit_words;
    const uint32_t* x = p.block(0, row);
    const float *steps = p.steps + row, *x_sums = p.sums + row;
    const int64_t x_group = p.rows * p.words, rows = p.rows, groups = m.groups;
    Floats totals[R][TILE_VECTORS] = {};
    for (int64_t g = 0; g < groups; g++, x += x_group, steps += rows, x_sums += rows) {
        const PrefetchedBlock<Format> block = PrefetchedBlock<Format>::of(m, tile, g, 1, to);
        const PrefetchedWords words = block.words(0, row == 0);
        Ints sums[R][TILE_VECTORS];
        multiply_units<Format, R>(words, units, 0, x, sums);
        if constexpr (Format::bits == 8) {  // upper nibbles have a weight of 16
            Ints upper[R][TILE_VECTORS];
            multiply_units<Format, R>(words, units, 4, x, upper);
            for (int r = 0; r < R; r++)
                for (int v = 0; v < TILE_VECTORS; v++) sums[r][v] += upper[r][v] << 4;
        }
#pragma GCC unroll 4
        for (int v = 0; v < TILE_VECTORS; v++) {
            const Floats scale = Format::scales(block.block, v * WIDTH);
            Floats zero = Format::zeros(block.block, v * WIDTH);
            if (UnsignedBytes<Format>::offset > 0)
                zero = fma(scale, broadcast(-UnsignedBytes<Format>::offset), zero);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const Floats products =
                    __builtin_convertvector(sums[r][v], Floats) * broadcast(steps[r]);
                totals[r][v] = fma(products, scale, fma(zero, broadcast(x_sums[r]), totals[r][v]));
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < TILE_VECTORS; v++) store(out + r * MATRIX_TILE + v * WIDTH, totals[r][v]);
}

// Compute a tile of outputs, to totals [rows, MATRIX_TILE].
template <class Format>
void multiply_chunk(const MatrixBlocks& m, int64_t tile, int64_t, const QuantizedInput& p,
                    float* totals) {
    constexpr int UNITS = (Format::bits == 4 ? 32 : 64) / Format::unit_inputs;  // by default
    const CacheLevel to = cache_of_weights(p.rows <= REGISTER_ROWS);
    for_register_rows(p.rows, [&](auto count, int64_t row) {
        constexpr int R = decltype(count)::value;
        const auto multiply = FEW_VARIANTS || m.words != UNITS * Format::unit_words
                                  ? multiply_rows<Format, R, 0>
                                  : multiply_rows<Format, R, FEW_VARIANTS ? 0 : UNITS>;
        multiply(m, tile, p, row, to, totals + row * MATRIX_TILE);
    });
}

}  // namespace ISA
