// Tiles of cached keys by queries, and weights by tiles of cached values. R rows and G queries go
// together, so that what is loaded of either serves the others too.
#pragma once

#include "tiles.h"

namespace ISA {

// Queries [G, width] of a block and where their logits or weights go, `stride` apart.
struct Queries {
    const float* q;
    int64_t width;
    float* row;
    int64_t stride;
};

// R rows from `row` on: their logits for G queries.
template <int R, int G, class T>
INLINE void key_rows(const PlainTile<T>& tile, const Queries& to, int64_t row) {
    Floats total[G][R];
    for (int g = 0; g < G; g++)
        for (int r = 0; r < R; r++) total[g][r] = Floats{};
    for (int64_t i = 0; i < to.width; i += WIDTH)
        for (int r = 0; r < R; r++) {
            const Floats x = tile.at(row + r, i);
            for (int g = 0; g < G; g++)
                total[g][r] = fma(x, load(to.q + g * to.width + i), total[g][r]);
        }
    for (int g = 0; g < G; g++)
        if constexpr (R == 4)
            sums(total[g], to.row + g * to.stride + row);
        else
            to.row[g * to.stride + row] = sum(total[g][0]);
}

// `size` elements of R rows from `start` on: the sums of codes by queries, times the scales. With 4
// bits those in the high halves are elements `half` further.
template <int R, int G, int bits>
INLINE void key_run(const RecordTile<bits>& tile, const Queries& to, int64_t row, int64_t start,
                    int64_t size, Floats (*total)[R]) {
    const int64_t half = to.width / 2, groups = tile.layout.groups, group = tile.layout.group;
    Floats low[G][R], high[G][R];
    for (int g = 0; g < G; g++)
        for (int r = 0; r < R; r++) low[g][r] = high[g][r] = Floats{};
    for (int64_t i = start; i < start + size; i += WIDTH)
        for (int r = 0; r < R; r++) {
            const Ints bytes = widen(tile.base + (row + r) * tile.stride + i);
            const Floats x = bits == 8 ? code<WHOLE>(bytes) : code<LOW>(bytes);
            for (int g = 0; g < G; g++)
                low[g][r] = fma(x, load(to.q + g * to.width + i), low[g][r]);
            if (bits == 8) continue;
            const Floats y = code<HIGH>(bytes);
            for (int g = 0; g < G; g++) {
                Floats& mine = groups == 1 ? low[g][r] : high[g][r];
                mine = fma(y, load(to.q + g * to.width + half + i), mine);
            }
        }
    const float* scale = tile.scales() + start / group * TILE + row;
    const float* other = tile.scales() + (start + half) / group * TILE + row;
    for (int g = 0; g < G; g++)
        for (int r = 0; r < R; r++) {
            total[g][r] = fma(low[g][r], spread(scale[r]), total[g][r]);
            if (bits == 4 && groups > 1)
                total[g][r] = fma(high[g][r], spread(other[r]), total[g][r]);
        }
}

template <int R, int G, int bits>
INLINE void key_rows(const RecordTile<bits>& tile, const Queries& to, int64_t row) {
    const Layout& layout = tile.layout;
    const int64_t bytes = bits == 8 ? to.width : to.width / 2;
    Floats total[G][R];
    for (int g = 0; g < G; g++)
        for (int r = 0; r < R; r++) total[g][r] = Floats{};
    if (layout.group == 64 && layout.groups > 1)  // as a constant: the loop unrolls
        for (int64_t start = 0; start < bytes; start += 64)
            key_run<R, G>(tile, to, row, start, 64, total);
    else
        for (int64_t start = 0; start < bytes; start += layout.group)
            key_run<R, G>(tile, to, row, start, layout.group < bytes ? layout.group : bytes,
                          total);
    for (int g = 0; g < G; g++)
        if constexpr (R == 4)
            sums(total[g], to.row + g * to.stride + row);
        else
            to.row[g * to.stride + row] = sum(total[g][0]);
}

template <class T>
INLINE void add_zeros(const PlainTile<T>&, const Queries&, int64_t, int64_t) {}

// What the zero points of the keys add to the logits of query g.
template <int bits>
INLINE void add_zeros(const RecordTile<bits>& tile, const Queries& to, int64_t g, int64_t count) {
    const int64_t group = tile.layout.group;
    for (int64_t k = 0; k < tile.layout.groups; k++) {
        Floats all{};
        for (int64_t i = 0; i < group; i += WIDTH)
            all += load(to.q + g * to.width + k * group + i);
        const float part = sum(all), *zeros = tile.zeros() + k * TILE;
        float* row = to.row + g * to.stride;
        for (int64_t t = 0; t < count; t++) row[t] += part * zeros[t];
    }
}

// Logits of the first `count` rows of a tile.
template <int G, class Tile>
INLINE void key_products(const Tile& tile, const Queries& to, int64_t count) {
    int64_t row = 0;
    for (; row + 4 <= count; row += 4) {
        prefetch(tile, row, 4);
        key_rows<4, G>(tile, to, row);
    }
    for (; row < count; row++) key_rows<1, G>(tile, to, row);
    for (int g = 0; g < G; g++) add_zeros(tile, to, g, count);
}

// out[g] += weight[g][t] times row t, for N vectors from `column` on and G queries; outputs lie
// `apart`.
template <int G, int N, class T>
INLINE void value_block(const PlainTile<T>& tile, const Queries& weights, int64_t count,
                        int64_t column, float* out, int64_t apart) {
    Floats sums[G][N];
    for (int g = 0; g < G; g++)
        for (int n = 0; n < N; n++) sums[g][n] = load(out + g * apart + column + n * WIDTH);
    for (int64_t t = 0; t < count; t++) {
        if (column == 0 && t % 4 == 0) prefetch(tile, t, 4);
        for (int n = 0; n < N; n++) {
            const Floats x = tile.at(t, column + n * WIDTH);
            for (int g = 0; g < G; g++)
                sums[g][n] = fma(spread(weights.row[g * weights.stride + t]), x, sums[g][n]);
        }
    }
    for (int g = 0; g < G; g++)
        for (int n = 0; n < N; n++) store(out + g * apart + column + n * WIDTH, sums[g][n]);
}

template <int G, class T>
INLINE void value_products(const PlainTile<T>& tile, const Queries& weights, int64_t count,
                           float* out, int64_t apart) {
    constexpr int N = G == 1 ? 8 : 4;
    int64_t column = 0;
    for (; column + N * WIDTH <= weights.width; column += N * WIDTH)
        value_block<G, N>(tile, weights, count, column, out, apart);
    for (; column + 2 * WIDTH <= weights.width; column += 2 * WIDTH)
        value_block<G, 2>(tile, weights, count, column, out, apart);
    for (; column < weights.width; column += WIDTH)
        value_block<G, 1>(tile, weights, count, column, out, apart);
}

// The same of N vectors of codes and, with 4 bits, of as many in their high halves.
template <int G, int N, int bits>
INLINE void value_block(const RecordTile<bits>& tile, int64_t count, int64_t column, float* out,
                        int64_t apart) {
    const int64_t groups = tile.layout.groups, group = tile.layout.group;
    const int64_t half = groups * group / 2;
    constexpr int SIDES = bits == 4 ? 2 : 1;
    Floats sums[G][SIDES][N];
    const float* scaled[G][SIDES][N];
    for (int g = 0; g < G; g++)
        for (int side = 0; side < SIDES; side++)
            for (int n = 0; n < N; n++) {
                const int64_t at = column + side * half + n * WIDTH;
                sums[g][side][n] = load(out + g * apart + at);
                scaled[g][side][n] = tile.scaled() + (g * groups + at / group) * TILE;
            }
    for (int64_t t = 0; t < count; t++) {
        if (column == 0 && t % 4 == 0) prefetch(tile, t, 4);
        for (int n = 0; n < N; n++) {
            const Ints bytes = widen(tile.base + t * tile.stride + column + n * WIDTH);
            for (int side = 0; side < SIDES; side++) {
                const Floats x = bits == 8   ? code<WHOLE>(bytes)
                                 : side == 0 ? code<LOW>(bytes)
                                             : code<HIGH>(bytes);
                for (int g = 0; g < G; g++)
                    sums[g][side][n] = fma(x, spread(scaled[g][side][n][t]), sums[g][side][n]);
            }
        }
    }
    for (int g = 0; g < G; g++)
        for (int side = 0; side < SIDES; side++)
            for (int n = 0; n < N; n++)
                store(out + g * apart + column + side * half + n * WIDTH, sums[g][side][n]);
}

template <int G, int bits>
INLINE void value_products(const RecordTile<bits>& tile, const Queries& weights, int64_t count,
                           float* out, int64_t apart) {
    const int64_t groups = tile.layout.groups, group = tile.layout.group;
    for (int g = 0; g < G; g++)
        for (int64_t k = 0; k < groups; k++) {
            const float *weight = weights.row + g * weights.stride;
            const float *scales = tile.scales() + k * TILE, *zeros = tile.zeros() + k * TILE;
            float zero = 0, *scaled = tile.scaled() + (g * groups + k) * TILE;
            for (int64_t t = 0; t < count; t++) {
                scaled[t] = weight[t] * scales[t];
                zero += weight[t] * zeros[t];
            }
            for (int64_t i = 0; i < group; i += WIDTH) {
                float* to = out + g * apart + k * group + i;
                store(to, load(to) + zero);
            }
        }
    constexpr int N = (G == 4 ? 4 : 8) / (bits == 4 ? 2 : 1);
    const int64_t columns = bits == 4 ? weights.width / 2 : weights.width;
    int64_t column = 0;
    for (; column + N * WIDTH <= columns; column += N * WIDTH)
        value_block<G, N>(tile, count, column, out, apart);
    for (; column < columns; column += WIDTH)
        value_block<G, 1>(tile, count, column, out, apart);
}

}  // namespace ISA
