// Matmuls of cached keys by queries, and of attention weights by cached values. A register block has R
// rows and G queries, so that each load is reused.
#pragma once

#include <math.h>

#include "cached_tiles.h"

namespace ISA {

// Call f(G, g) for blocks of G query heads from `g` on, which cover the group.
template <class F>
INLINE void for_query_blocks(int64_t group, F f) {
    int64_t g = 0;
#if FEW_VARIANTS
    for (; g < group; g++) f(Constant<1>{}, g);
#else
    for (; g + 4 <= group; g += 4) f(Constant<4>{}, g);
    switch (group - g) {
        case 3: return f(Constant<3>{}, g);
        case 2: return f(Constant<2>{}, g);
        case 1: return f(Constant<1>{}, g);
    }
#endif
}

// Return the factor of attention logits.
inline float logit_scale(const AttentionVariant& variant, int64_t head_dim) {
    return variant.scale > 0 ? static_cast<float>(variant.scale)
                             : 1.0f / sqrtf(static_cast<float>(head_dim));
}

// Queries [G, width] of a block and their logits or weights, whose rows are `stride` apart.
struct Queries {
    const float* q;
    int64_t width;
    float* row;
    int64_t stride;
};

// Reduce the sums of R rows by G queries and store them as logits of rows from `row` on.
template <int R, int G>
INLINE void store_logits(const Floats* total, const Queries& to, int64_t row) {
    float logits[G * R];
    for (int n = 0; n < G * R; n += 4)
        if constexpr (G * R % 4 == 0)
            sums(total + n, logits + n);
        else
            for (int k = n; k < n + 4 && k < G * R; k++) logits[k] = sum(total[k]);
    for (int g = 0; g < G; g++)
        std::memcpy(to.row + g * to.stride + row, logits + g * R, R * sizeof *logits);
}

// Compute the logits of R rows from `row` on for G queries.
template <int R, int G, class Tile>
INLINE void matmul_key_rows(const Tile& tile, const Queries& to, int64_t row) {
    Floats total[G * R];
    for (int n = 0; n < G * R; n++) total[n] = Floats{};
    for (int64_t i = 0; i < to.width; i += WIDTH) {
        tile.template prefetch<R>(row, i);
        for (int r = 0; r < R; r++) {
            const Floats x = tile.at(row + r, i);
            for (int g = 0; g < G; g++)
                total[g * R + r] = fma(x, load(to.q + g * to.width + i), total[g * R + r]);
        }
    }
    store_logits<R, G>(total, to, row);
}

// The same for quantized groups, without their zero points: scaled quantized values by queries. With 4
// bits the high nibbles hold elements `half` elements further.
template <int R, int G, int bits>
INLINE void matmul_key_rows(const QuantizedTile<bits>& tile, const Queries& to, int64_t row) {
    const int64_t half = to.width / 2, bytes = bits == 8 ? to.width : half;
    const int64_t group = tile.group_bytes(bytes);
    // Groups from the low to the high nibbles of the same bytes.
    const int64_t high_group = tile.layout.groups == 1 ? 0 : half / group;
    Floats total[G * R];
    for (int n = 0; n < G * R; n++) total[n] = Floats{};
    const float* scale = tile.scales() + row;
    for (int64_t start = 0; start < bytes; start += group, scale += SLOT_TILE)
        for (int64_t i = start; i < start + group; i += WIDTH) {
            tile.template prefetch<R>(row, i);
            for (int r = 0; r < R; r++) {
                const Ints codes = widen(tile.base + (row + r) * tile.stride + i);
                const Floats x = (bits == 8 ? code<WHOLE>(codes) : code<LOW>(codes)) * scale[r];
                for (int g = 0; g < G; g++)
                    total[g * R + r] = fma(x, load(to.q + g * to.width + i), total[g * R + r]);
                if (bits == 8) continue;
                const Floats y = code<HIGH>(codes) * scale[high_group * SLOT_TILE + r];
                for (int g = 0; g < G; g++)
                    total[g * R + r] =
                        fma(y, load(to.q + g * to.width + half + i), total[g * R + r]);
            }
        }
    store_logits<R, G>(total, to, row);
}

// The same for one query: quantized values by the query, then their sums by the scales. BYTES is the
// size of the quantized values if their groups are the default ones; otherwise the size is read at run
// time.
template <int R, int bits, int BYTES>
INLINE void matmul_key_rows_of_one(const QuantizedTile<bits>& tile, const Queries& to, int64_t row) {
    constexpr int NIBBLES = bits == 4 ? 2 : 1;
    constexpr int64_t DEFAULT_GROUP = default_group(bits, NIBBLES * BYTES);
    constexpr int64_t GROUP = BYTES < DEFAULT_GROUP ? BYTES : DEFAULT_GROUP;
    const int64_t bytes = BYTES ? BYTES : to.width / NIBBLES;
    const int64_t group = BYTES ? GROUP : tile.group_bytes(bytes);
    // Groups from the low to the high nibbles of the same bytes.
    const int64_t high_group = tile.layout.groups == 1 ? 0 : bytes / group;
    const uint8_t* from[R];
    for (int r = 0; r < R; r++) from[r] = tile.base + (row + r) * tile.stride;
    Floats total[R]{};
    const float* scale = tile.scales() + row;
#pragma GCC unroll 2
    for (int64_t start = 0; start < bytes; start += group, scale += SLOT_TILE) {
        Floats group_sums[NIBBLES][R]{};
#pragma GCC unroll 8
        for (int64_t i = start; i < start + group; i += WIDTH) {
            tile.template prefetch<R>(row, i);
            for (int r = 0; r < R; r++) {
                const Ints codes = widen(from[r] + i);
                const Floats x = bits == 8 ? code<WHOLE>(codes) : code<LOW>(codes);
                group_sums[0][r] = fma(x, load(to.q + i), group_sums[0][r]);
                if constexpr (NIBBLES == 2)
                    group_sums[1][r] = fma(code<HIGH>(codes), load(to.q + bytes + i), group_sums[1][r]);
            }
        }
        for (int r = 0; r < R; r++)
            for (int nibble = 0; nibble < NIBBLES; nibble++)
                total[r] = fma(group_sums[nibble][r],
                               broadcast(scale[nibble * high_group * SLOT_TILE + r]), total[r]);
    }
    store_logits<R, 1>(total, to, row);
}

// Compute the logits of the first `count` rows.
template <int G, class Tile>
INLINE void matmul_all_key_rows(const Tile& tile, const Queries& to, int64_t count) {
    constexpr int R = Tile::register_rows(G);
    int64_t row = 0;
    for (; row + R <= count; row += R) matmul_key_rows<R, G>(tile, to, row);
    for (; row < count; row++) matmul_key_rows<1, G>(tile, to, row);
}

template <int G, int bits>
INLINE void matmul_all_key_rows(const QuantizedTile<bits>& tile, const Queries& to, int64_t count) {
    constexpr int R = QuantizedTile<bits>::register_rows(G);
    const auto rows = [&](auto known) ALWAYS_INLINE {
        constexpr int BYTES = decltype(known)::value;
        int64_t row = 0;
        if constexpr (G == 1) {
            for (; row + R <= count; row += R) matmul_key_rows_of_one<R, bits, BYTES>(tile, to, row);
            for (; row < count; row++) matmul_key_rows_of_one<1, bits, 0>(tile, to, row);
        } else {
            for (; row + R <= count; row += R) matmul_key_rows<R, G>(tile, to, row);
            for (; row < count; row++) matmul_key_rows<1, G>(tile, to, row);
        }
    };
    if constexpr (G == 1)  // the usual vector sizes as constants
        if (tile.layout.group == default_group(bits, to.width)) {
            if (to.width == 64) return rows(Constant<64 * bits / 8>{});
            if (to.width == 128) return rows(Constant<128 * bits / 8>{});
            if (bits == 4 && to.width == 256) return rows(Constant<128>{});
        }
    rows(Constant<0>{});
}

template <class Tile>
INLINE void add_zero_points(const Tile&, const Queries&, int64_t, int64_t) {}

// Add the contribution of the zero points of the keys to the logits of query `g`.
template <int bits>
INLINE void add_zero_points(const QuantizedTile<bits>& tile, const Queries& to, int64_t g,
                            int64_t count) {
    const int64_t group = tile.layout.group;
    for (int64_t k = 0; k < tile.layout.groups; k++) {
        const float part = sum_of(to.q + g * to.width + k * group, group);
        const float* zeros = tile.zeros() + k * SLOT_TILE;
        float* row = to.row + g * to.stride;
        for (int64_t t = 0; t < count; t += WIDTH)  // elements past the last row are overwritten later
            store(row + t, fma(broadcast(part), load(zeros + t), load(row + t)));
    }
}

// Compute the logits of the first `count` rows of a tile. The callers of this function and of
// `matmul_values` are compiled for several dtypes, so these are not inlined. They take the tile by
// value: its members stay in registers.
template <int G, class Tile>
NOINLINE void matmul_keys(Tile tile, Queries to, int64_t count) {
    matmul_all_key_rows<G>(tile, to, count);
    for (int g = 0; g < G; g++) add_zero_points(tile, to, g, count);
}

// out[g] += weight[g][t] * row t, for N vectors from `column` on, G queries and rows `first` to `end`.
// Outputs are `out_row` elements apart.
template <int G, int N, class Tile>
INLINE void matmul_value_block(const Tile& tile, const Queries& weights, int64_t first, int64_t end,
                               int64_t column, float* out, int64_t out_row) {
    Floats sums[G][N];
    for (int g = 0; g < G; g++)
        for (int n = 0; n < N; n++) sums[g][n] = load(out + g * out_row + column + n * WIDTH);
    for (int64_t t = first; t < end; t++)
        for (int n = 0; n < N; n++) {
            tile.template prefetch<1>(t, column + n * WIDTH);
            const Floats x = tile.at(t, column + n * WIDTH);
            for (int g = 0; g < G; g++)
                sums[g][n] = fma(broadcast(weights.row[g * weights.stride + t]), x, sums[g][n]);
        }
    for (int g = 0; g < G; g++)
        for (int n = 0; n < N; n++) store(out + g * out_row + column + n * WIDTH, sums[g][n]);
}

// Process all columns of some rows before the next rows, so that cache lines shared by two column
// blocks are still in the cache.
template <int G, class Tile>
NOINLINE void matmul_values(Tile tile, Queries weights, int64_t count, float* out, int64_t out_row) {
    constexpr int N = G == 1 ? 8 : register_vectors(G);
    for (int64_t first = 0; first < count; first += VALUE_ROWS) {
        const int64_t end = first + VALUE_ROWS < count ? first + VALUE_ROWS : count;
        int64_t column = 0;
        for (; column + N * WIDTH <= weights.width; column += N * WIDTH)
            matmul_value_block<G, N>(tile, weights, first, end, column, out, out_row);
        for (; column + 2 * WIDTH <= weights.width; column += 2 * WIDTH)
            matmul_value_block<G, 2>(tile, weights, first, end, column, out, out_row);
        for (; column < weights.width; column += WIDTH)
            matmul_value_block<G, 1>(tile, weights, first, end, column, out, out_row);
    }
}

// The same for N vectors of quantized values of one group. With 4 bits it includes N vectors of high
// nibbles.
template <int G, int N, int bits>
INLINE void matmul_value_block(const QuantizedTile<bits>& tile, int64_t count, int64_t column,
                               float* out, int64_t out_row) {
    const int64_t groups = tile.layout.groups, group = tile.layout.group;
    const int64_t half = groups * group / 2;
    constexpr int NIBBLES = bits == 4 ? 2 : 1;
    Floats sums[G][NIBBLES][N];
    const float* scaled[NIBBLES];
    for (int nibble = 0; nibble < NIBBLES; nibble++) {
        const int64_t at = column + nibble * half;
        scaled[nibble] = tile.scaled() + at / group * SLOT_TILE;
        for (int g = 0; g < G; g++)
            for (int n = 0; n < N; n++) sums[g][nibble][n] = load(out + g * out_row + at + n * WIDTH);
    }
    const uint8_t* from = tile.base + column;
#pragma GCC unroll 2
    for (int64_t t = 0; t < count; t++, from += tile.stride) {
        Floats weights[G][NIBBLES];
        for (int g = 0; g < G; g++)
            for (int nibble = 0; nibble < NIBBLES; nibble++)
                weights[g][nibble] = broadcast(scaled[nibble][g * groups * SLOT_TILE + t]);
        for (int n = 0; n < N * WIDTH; n += LINE_BYTES / 2) tile.template prefetch<1>(t, column + n);
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) {
            const Ints bytes = widen(from + n * WIDTH);
            for (int nibble = 0; nibble < NIBBLES; nibble++) {
                const Floats x = bits == 8     ? code<WHOLE>(bytes)
                                 : nibble == 0 ? code<LOW>(bytes)
                                               : code<HIGH>(bytes);
                for (int g = 0; g < G; g++)
                    sums[g][nibble][n] = fma(x, weights[g][nibble], sums[g][nibble][n]);
            }
        }
    }
    for (int g = 0; g < G; g++)
        for (int nibble = 0; nibble < NIBBLES; nibble++)
            for (int n = 0; n < N; n++)
                store(out + g * out_row + column + nibble * half + n * WIDTH, sums[g][nibble][n]);
}

template <int G, int bits>
NOINLINE void matmul_values(QuantizedTile<bits> tile, Queries weights, int64_t count, float* out,
                            int64_t out_row) {
    const int64_t groups = tile.layout.groups, group = tile.layout.group;
    for (int g = 0; g < G; g++)
        for (int64_t k = 0; k < groups; k++) {
            const float *weight = weights.row + g * weights.stride;
            const float *scales = tile.scales() + k * SLOT_TILE, *zeros = tile.zeros() + k * SLOT_TILE;
            float* scaled = tile.scaled() + (g * groups + k) * SLOT_TILE;
            Floats zero{};
            for (int64_t t = 0; t < count; t += WIDTH) {  // elements past the last row are 0
                const Floats slot_weights = load(weight + t);
                store(scaled + t, slot_weights * load(scales + t));
                zero = fma(slot_weights, load(zeros + t), zero);
            }
            const float shift = sum(zero);
            for (int64_t i = 0; i < group; i += WIDTH) {
                float* to = out + g * out_row + k * group + i;
                store(to, load(to) + shift);
            }
        }
    const int64_t columns = bits == 4 ? weights.width / 2 : weights.width;
    const auto blocks = [&](auto vectors) ALWAYS_INLINE {  // true if they cover all columns
        constexpr int N = decltype(vectors)::value;
        if (group % (N * WIDTH) || columns % (N * WIDTH)) return false;
        for (int64_t column = 0; column < columns; column += N * WIDTH)
            matmul_value_block<G, N>(tile, count, column, out, out_row);
        return true;
    };
    // As many vectors as the registers allow.
    constexpr int MAX_VECTORS = bits == 8               ? register_vectors(G)
                                : G <= 2                ? 4
                                : WIDTH == 16 || G == 3 ? 2
                                                        : 1;
    if constexpr (MAX_VECTORS >= 4)
        if (blocks(Constant<4>{})) return;
    if constexpr (MAX_VECTORS >= 2)
        if (blocks(Constant<2>{})) return;
    blocks(Constant<1>{});
}

// Declare (`extern`) or instantiate the matmuls of rows that were converted to floats.
// recall_attention.cpp uses the instances of decode.cpp.
#if FEW_VARIANTS
#define FLOAT_MATMULS(declare) FLOAT_MATMULS_OF(declare, 1)
#else
#define FLOAT_MATMULS(declare)   \
    FLOAT_MATMULS_OF(declare, 1) \
    FLOAT_MATMULS_OF(declare, 2) FLOAT_MATMULS_OF(declare, 3) FLOAT_MATMULS_OF(declare, 4)
#endif
#define FLOAT_MATMULS_OF(declare, G)                                          \
    declare template void matmul_keys<G>(PlainTile<float>, Queries, int64_t); \
    declare template void matmul_values<G>(PlainTile<float>, Queries, int64_t, float*, int64_t);

}  // namespace ISA
