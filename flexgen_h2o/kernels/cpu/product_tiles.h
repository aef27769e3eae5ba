// Products with quantized matrices in AMX tiles.
//
// x is the left operand, and codes the right one, as their words lie: pairs of inputs by outputs. Few
// rows meet the codes themselves, and each group's products are scaled in float32. For more rows that
// would cost more than the products: weights are rounded to bfloat16 (by 2^-8 of each at most), and
// go the way of tile_matmul.h.
#pragma once

#include "coded_tiles.h"

#if defined(TILES)

namespace ISA {

constexpr int64_t VECTOR_ROWS = 1;  // more go by tiles
static_assert(TILED_OUTPUTS % COLUMNS == 0, "whole chunks");

// A block's weights, rounded, to steps COLUMNS apart.
template <class C>
INLINE void unpack_rounded(const CodedBlock<C>& from, int64_t words, uint32_t* to) {
    constexpr int STEPS = C::unit_inputs / 2;
    for (int64_t i = 0; i < MATRIX_TILE; i += WIDTH) {
        const Floats scale = C::scales(from.block, i), zero = C::zeros(from.block, i);
        const CodedWords mine = from.words(i, true);
        for (int64_t n = 0; n < words / C::unit_words; n++) {
            const Coded<C> unit = mine.unit<C, false>(n);
#pragma GCC unroll 4
            for (int s = 0; s < STEPS; s++) {
                const Floats first = bits_of<Floats>(Single::codes<C>(unit, 2 * s));
                const Floats second = bits_of<Floats>(Single::codes<C>(unit, 2 * s + 1));
                store_words(to + (n * STEPS + s) * COLUMNS + i,
                            rounded_pairs(fma(scale, first, zero), fma(scale, second, zero)));
            }
        }
    }
}

// Weights rounded to bfloat16, for products of many rows.
template <class C>
struct CodedSlabs {
    const Matrix& matrix;
    const Blocks blocks;

    explicit CodedSlabs(const Product& a) : matrix(a.matrix), blocks(a.matrix) {}
    int64_t outputs() const { return matrix.outputs; }

    void unpack(const Slab& slab, uint32_t* to) const {
        const int64_t first = slab.input / blocks.group, all = tiles_of(matrix);
        const int64_t words = blocks.group / 2 * COLUMNS;
        const int64_t groups = (slab.inputs + blocks.group - 1) / blocks.group;
        for (int64_t pair = 0; pair < slab.pairs(); pair++, to += slab.pair_words()) {
            const int64_t tile = slab.output / MATRIX_TILE + 2 * pair;
            // Zeros where groups fill no whole step, and where outputs fill no two tiles.
            if (groups * words < slab.pair_words() || tile + 1 == all)
                std::memset(to, 0, static_cast<size_t>(slab.pair_words()) * sizeof *to);
            for (int64_t t = 0; t < 2 && tile + t < all; t++)
                for (int64_t g = 0; g < groups; g++)
                    unpack_rounded(CodedBlock<C>::of(blocks, tile + t, first + g, 1, NEAREST),
                                   blocks.words, to + g * words + t * MATRIX_TILE);
        }
    }
};

// The most rows that meet codes. In 4 and 8 bits more would lose exactness. Weights in 12 bits and of
// MXFP4 are bfloat16 as they stand, so that the faster way is taken.
template <class C>
constexpr int64_t coded_rows() {
    return std::is_same_v<C, Mxfp4> ? 32 : std::is_same_v<C, Float12> ? 56 : 64;
}

template <class C>
int tiled_product(const Product& a) {
    return a.rows <= coded_rows<C>() ? coded_product<C>(a)
                                     : tile_matmul<CodedSlabs<C>>(a, a.matrix.inputs,
                                                                  Blocks(a.matrix).group);
}

}  // namespace ISA

#endif
