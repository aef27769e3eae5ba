// Products with quantized matrices in AMX tiles.
//
// x is the left operand, and codes the right one, as their words lie: pairs of inputs by outputs. Up
// to EXACT_ROWS rows meet the codes themselves, and each group's products are scaled in float32. For
// more rows that would cost more than the products: weights are rounded to bfloat16 (by 2^-8 of each
// at most), and go the way of tile_matmul.h.
#pragma once

#include "panel.h"
#include "tile_matmul.h"

#if defined(TILES)

namespace ISA {

constexpr int64_t VECTOR_ROWS = 1;  // more go by tiles
constexpr int64_t EXACT_ROWS = 64;
static_assert(COLUMNS == TILE_COLUMNS && TILED_OUTPUTS % COLUMNS == 0, "two tiles");

// Whole tiles, or where `rows` are no more than two tiles have: so many. Fewer rows take less time.
INLINE TileShapes shapes_of(int64_t rows) {
    TileShapes shapes = whole_tiles();
    if (rows > 2 * SIDE) return shapes;
    const int64_t upper = rows < SIDE ? rows : SIDE, lower = rows > SIDE ? rows - SIDE : SIDE;
    shapes.set(C0, upper, TILE_BYTES), shapes.set(C1, upper, TILE_BYTES);
    shapes.set(C2, lower, TILE_BYTES), shapes.set(C3, lower, TILE_BYTES);
    shapes.set(A0, upper, TILE_BYTES), shapes.set(A1, lower, TILE_BYTES);
    return shapes;
}

// A group of two tiles of outputs on its way: codes, what their products are, and what these are to
// be scaled with.
struct GroupOfCodes {
    uint32_t* codes;  // [steps, COLUMNS]
    float* products;  // [rows, COLUMNS]
    float *scales, *zeros;
};

// The codes of a block to the columns from `column` on.
template <class C>
INLINE void unpack_codes(const CodedBlock<C>& from, int64_t words, int64_t column,
                         const GroupOfCodes& to) {
    constexpr int STEPS = C::unit_inputs / 2;
    for (int64_t i = 0; i < MATRIX_TILE; i += WIDTH) {
        const Floats scale = C::scales(from.block, i), zero = C::zeros(from.block, i);
        store(to.scales + column + i, scale);
        store(to.zeros + column + i, fma(scale, broadcast(-Pairs::shift<C>()), zero));
        const CodedWords mine = from.words(i, true);
        for (int64_t n = 0; n < words / C::unit_words; n++) {
            const Coded<C> unit = mine.unit<C, false>(n);
#pragma GCC unroll 4
            for (int s = 0; s < STEPS; s++)
                store_words(to.codes + (n * STEPS + s) * COLUMNS + column + i,
                            Pairs::codes<C>(unit, s));
        }
    }
}

INLINE void multiply_codes(Tiles& tiles, const Panel& p, int64_t g, int64_t rows,
                           const GroupOfCodes& group) {
    by_tiles(rows, [&](auto height, int64_t row) {
        constexpr int H = decltype(height)::value;
        LeftRows x[H];
        for (int h = 0; h < H; h++)
            x[h] = {p.x + (g * p.rows + row + h * SIDE) * p.steps, p.steps * 4};
        zero_sums<H>(tiles);
        add_products<H>(tiles, x, group.codes, p.steps / TILE_PAIRS, [](int64_t) {});
        store_sums<H>(tiles, group.products + row * COLUMNS);
    });
}

// Both tiles of a row at once: the fewer instructions, the more of the other parts are under way.
INLINE void add_scaled(const Panel& p, int64_t g, int64_t rows, const GroupOfCodes& group,
                       float* totals) {
    constexpr int PARTS = COLUMNS / WIDTH;
    const float *sums = p.sums + g * p.rows, *products = group.products;
    Floats scale[PARTS], zero[PARTS];
    for (int v = 0; v < PARTS; v++)
        scale[v] = load(group.scales + v * WIDTH), zero[v] = load(group.zeros + v * WIDTH);
#pragma GCC unroll 4
    for (int64_t r = 0; r < rows; r++, products += COLUMNS, totals += COLUMNS) {
        const Floats sum = broadcast(sums[r]);
        for (int v = 0; v < PARTS; v++) {
            float* total = totals + v * WIDTH;
            const Floats all = fma(load(products + v * WIDTH), scale[v], load(total));
            store(total, fma(zero[v], sum, all));
        }
    }
}

// Two tiles of outputs. While codes of one group are taken apart, those of the last one are in the
// tiles' unit, and what came out of it for the one before is scaled: none waits for another.
template <class C>
void exact_chunk(Tiles& tiles, const Product& a, const Blocks& m, int64_t tile, int64_t rows,
                 const Panel& p, const Workspace& w) {
    const int64_t all = tiles_of(a.matrix), codes = p.steps * COLUMNS, sums = p.rows * COLUMNS;
    GroupOfCodes turns[2];
    for (int64_t i = 0; i < 2; i++)
        turns[i] = {w.codes + i * codes, w.products + i * sums, w.scales + i * COLUMNS,
                    w.zeros + i * COLUMNS};
    std::memset(w.totals, 0, static_cast<size_t>(rows * COLUMNS) * sizeof(float));
    for (int64_t g = 0; g < m.groups + 2; g++) {
        const GroupOfCodes &mine = turns[g % 2], &last = turns[1 - g % 2];
        if (g >= 2) add_scaled(p, g - 2, rows, mine, w.totals);
        if (g >= 1 && g <= m.groups) multiply_codes(tiles, p, g - 1, rows, last);
        for (int64_t t = tile; t < tile + 2 && t < all && g < m.groups; t++)
            unpack_codes(CodedBlock<C>::of(m, t, g, 2, NEAREST), m.words, (t - tile) * MATRIX_TILE,
                         mine);
    }
    put_columns<bf16>(a, tile * MATRIX_TILE, COLUMNS, 0, rows, w.totals);
}

// A block's weights, rounded, to steps COLUMNS apart.
template <class C>
INLINE void unpack_rounded(const Blocks& m, const uint8_t* block, uint32_t* to) {
    constexpr int STEPS = C::unit_inputs / 2;
    for (int64_t i = 0; i < MATRIX_TILE; i += WIDTH) {
        const Floats scale = C::scales(block, i), zero = C::zeros(block, i);
        for (int64_t n = 0; n < m.words / C::unit_words; n++) {
            const Coded<C> unit = load_coded<C>(block, n, i);
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
                    unpack_rounded<C>(blocks, blocks.at(tile + t, first + g),
                                      to + g * words + t * MATRIX_TILE);
        }
    }
};

// Every product of the chain, which share x: by their codes.
template <class C>
int exact_product(const Product& a) {
    const Blocks m(a.matrix);
    const int64_t most = up_to(SIDE, a.rows);
    Panel p{nullptr, nullptr, most, up_to(TILE_PAIRS, m.group / 2)};
    const int64_t codes = 2 * p.steps * COLUMNS, size = COLUMNS * (3 * most + 4) + codes;
    const Memory<uint32_t> x = memory<uint32_t>(m.groups * most * (p.steps + 1));
    const Memory<float> everyone = memory<float>(a.threads * size);
    if (!x || !everyone) return NO_MEMORY;
    p.x = x.get(), p.sums = reinterpret_cast<float*>(p.x + m.groups * most * p.steps);
    pack_panel<Pairs, bf16, 1>(a, m, 0, a.rows, p);
#pragma omp parallel num_threads(a.threads)
    {
        Workspace w{};
        w.totals = everyone.get() + thread_number() * size;
        w.codes = reinterpret_cast<uint32_t*>(w.totals + most * COLUMNS);
        w.products = w.totals + most * COLUMNS + codes;
        w.scales = w.products + 2 * most * COLUMNS;
        w.zeros = w.scales + 2 * COLUMNS;
        // Zeros where a group fills no whole tiles, and where outputs do not.
        std::memset(w.codes, 0, static_cast<size_t>(codes) * sizeof(uint32_t));
        std::memset(w.scales, 0, static_cast<size_t>(4 * COLUMNS) * sizeof(float));
        const TileShapes shapes = shapes_of(a.rows);
        Tiles tiles(shapes);
        for (const Product* each = &a; each; each = each->next) {
            const Blocks blocks(each->matrix);
            const int64_t chunks = (tiles_of(each->matrix) + 1) / 2;
#pragma omp for schedule(static) nowait
            for (int64_t chunk = 0; chunk < chunks; chunk++)
                exact_chunk<C>(tiles, *each, blocks, 2 * chunk, a.rows, p, w);
        }
    }
    return DONE;
}

template <class C>
int tiled_product(const Product& a) {
    return a.rows <= EXACT_ROWS ? exact_product<C>(a)
                                : tile_matmul<CodedSlabs<C>>(a, a.matrix.inputs,
                                                             Blocks(a.matrix).group);
}

}  // namespace ISA

#endif
