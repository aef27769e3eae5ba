// Quantized matmuls in AMX tiles.
//
// x is the left operand. Weights are the right operand in the layout of their words: pairs of inputs by
// outputs. For few rows, the operands are the quantized values themselves, and the results of each
// group are scaled in float32. For more rows, the scaling would cost more than the matmul. So weights
// are rounded to bfloat16 (relative error at most 2^-8) and use tile_matmul.h.
#pragma once

#include "quantized_tiles.h"

#if defined(TILES)

namespace ISA {

constexpr int64_t VECTOR_ROWS = 1;  // more rows use tiles
static_assert(TILED_OUTPUTS % COLUMNS == 0, "whole chunks");

// Dequantize the weights of a block, rounded, to steps that are COLUMNS apart.
template <class C>
INLINE void unpack_rounded(const PrefetchedBlock<C>& from, int64_t words, uint32_t* to) {
    constexpr int STEPS = C::unit_inputs / 2;
    for (int64_t i = 0; i < MATRIX_TILE; i += WIDTH) {
        const Floats scale = C::scales(from.block, i), zero = C::zeros(from.block, i);
        const PrefetchedWords source = from.words(i, true);
        for (int64_t n = 0; n < words / C::unit_words; n++) {
            const PackedUnit<C> unit = source.unit<C, false>(n);
#pragma GCC unroll 4
            for (int s = 0; s < STEPS; s++) {
                const Floats first = bits_of<Floats>(Single::values<C>(unit, 2 * s));
                const Floats second = bits_of<Floats>(Single::values<C>(unit, 2 * s + 1));
                store_words(to + (n * STEPS + s) * COLUMNS + i,
                            rounded_pairs(fma(scale, first, zero), fma(scale, second, zero)));
            }
        }
    }
}

// Weights rounded to bfloat16, for matmuls of many rows.
template <class C>
struct QuantizedPanels {
    const Matrix& matrix;
    const Blocks blocks;

    explicit QuantizedPanels(const QuantizedLinear& a) : matrix(a.matrix), blocks(a.matrix) {}
    int64_t outputs() const { return matrix.outputs; }

    void unpack(const WeightPanel& panel, uint32_t* to) const {
        const int64_t first = panel.input / blocks.group, all = tiles_of(matrix);
        const int64_t words = blocks.group / 2 * COLUMNS;
        const int64_t groups = (panel.inputs + blocks.group - 1) / blocks.group;
        for (int64_t pair = 0; pair < panel.pairs(); pair++, to += panel.pair_words()) {
            const int64_t tile = panel.output / MATRIX_TILE + 2 * pair;
            // Zeros pad groups that fill no whole step, and outputs that fill no two tiles.
            if (groups * words < panel.pair_words() || tile + 1 == all)
                std::memset(to, 0, static_cast<size_t>(panel.pair_words()) * sizeof *to);
            for (int64_t t = 0; t < 2 && tile + t < all; t++)
                for (int64_t g = 0; g < groups; g++)
                    unpack_rounded(PrefetchedBlock<C>::of(blocks, tile + t, first + g, 1, L1),
                                   blocks.words, to + g * words + t * MATRIX_TILE);
        }
    }
};

// Maximum rows that use quantized values as operands. Rounding 4-bit and 8-bit weights to bfloat16
// loses precision. 12-bit weights and MXFP4 are exact in bfloat16, so they switch to tile_matmul.h
// where that is faster.
template <class C>
constexpr int64_t max_group_scaled_rows() {
    return std::is_same_v<C, Mxfp4> ? 32 : std::is_same_v<C, Float12> ? 56 : 64;
}

template <class C>
int tiled_matmul(const QuantizedLinear& a) {
    return a.invariant || a.rows <= max_group_scaled_rows<C>()
               ? group_scaled_matmul<C>(a)
               : tile_matmul<QuantizedPanels<C>>(a, a.matrix.inputs, Blocks(a.matrix).group);
}

}  // namespace ISA

#endif
