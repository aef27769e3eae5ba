// Products in AMX tiles.
//
// With quantized matrices x is the left operand, and codes the right one, as their words lie: pairs
// of inputs by outputs. Up to EXACT_ROWS rows meet the codes themselves, and each group's products are
// scaled in float32. For more rows that would cost more than the products: weights are rounded to
// bfloat16 (by 2^-8 of each at most), once for a panel of rows, and sums stay in tiles.
#pragma once

#include "panel.h"

#if defined(TILES)

namespace ISA {

constexpr int64_t VECTOR_ROWS = 1;  // more go by tiles
constexpr int64_t EXACT_ROWS = 64;
constexpr int64_t SIDE = TILE_ROWS;
static_assert(COLUMNS == 2 * SIDE && TILED_ROWS % (2 * SIDE) == 0 && TILED_OUTPUTS % COLUMNS == 0,
              "two tiles each way");

INLINE int64_t up_to(int64_t multiple, int64_t x) {
    return (x + multiple - 1) / multiple * multiple;
}

// C0 to C3, of H x 2 tiles, += A0, A1 by B0, B1, over some steps. Rows of A are `a_row` words apart,
// those of B COLUMNS.
enum { C0, C1, C2, C3, A0, A1, B0, B1 };
template <int H>
INLINE void add_products(Tiles& tiles, const uint32_t* a, int64_t a_row, const uint32_t* b,
                         int64_t steps) {
    for (int64_t k = 0; k < steps; k += TILE_PAIRS) {
        tiles.load<A0>(a + k, a_row * 4);
        tiles.load<B0>(b + k * COLUMNS, COLUMNS * 4);
        tiles.add_product<C0, A0, B0>();
        tiles.load<B1>(b + k * COLUMNS + SIDE, COLUMNS * 4);
        tiles.add_product<C1, A0, B1>();
        if constexpr (H == 2) {
            tiles.load<A1>(a + SIDE * a_row + k, a_row * 4);
            tiles.add_product<C2, A1, B0>();
            tiles.add_product<C3, A1, B1>();
        }
    }
}

// Calls f(Count<H>, first) for H x 16 rows at a time.
template <class F>
INLINE void by_tiles(int64_t rows, const F& f) {
    int64_t row = 0;
    for (; row + SIDE < rows; row += 2 * SIDE) f(Count<2>{}, row);
    if (row < rows) f(Count<1>{}, row);
}

// Whole tiles, or where `rows` are no more than two tiles have: so many. Fewer rows take less time.
INLINE TileShapes shapes_of(int64_t rows) {
    TileShapes shapes;
    for (int tile = 0; tile < 8; tile++) shapes.set(tile, TILE_ROWS, TILE_BYTES);
    if (rows > 2 * SIDE) return shapes;
    const int64_t upper = rows < SIDE ? rows : SIDE, lower = rows > SIDE ? rows - SIDE : SIDE;
    shapes.set(C0, upper, TILE_BYTES), shapes.set(C1, upper, TILE_BYTES);
    shapes.set(C2, lower, TILE_BYTES), shapes.set(C3, lower, TILE_BYTES);
    shapes.set(A0, upper, TILE_BYTES), shapes.set(A1, lower, TILE_BYTES);
    return shapes;
}

// Sums [16 H, COLUMNS] of float32.
template <int H>
INLINE void load_sums(Tiles& tiles, const float* c) {
    tiles.load<C0>(c, COLUMNS * 4);
    tiles.load<C1>(c + SIDE, COLUMNS * 4);
    if constexpr (H == 2) {
        tiles.load<C2>(c + SIDE * COLUMNS, COLUMNS * 4);
        tiles.load<C3>(c + SIDE * COLUMNS + SIDE, COLUMNS * 4);
    }
}

template <int H>
INLINE void store_sums(Tiles& tiles, float* c) {
    tiles.store<C0>(c, COLUMNS * 4);
    tiles.store<C1>(c + SIDE, COLUMNS * 4);
    if constexpr (H == 2) {
        tiles.store<C2>(c + SIDE * COLUMNS, COLUMNS * 4);
        tiles.store<C3>(c + SIDE * COLUMNS + SIDE, COLUMNS * 4);
    }
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
        tiles.zero<C0>();
        tiles.zero<C1>();
        if constexpr (H == 2) {
            tiles.zero<C2>();
            tiles.zero<C3>();
        }
        add_products<H>(tiles, p.x + (g * p.rows + row) * p.steps, p.steps, group.codes, p.steps);
        store_sums<H>(tiles, group.products + row * COLUMNS);
    });
}

INLINE void add_scaled(const Panel& p, int64_t g, int64_t rows, const GroupOfCodes& group,
                       float* totals) {
    for (int64_t column = 0; column < COLUMNS; column += WIDTH) {
        const Floats scale = load(group.scales + column), zero = load(group.zeros + column);
        for (int64_t r = 0; r < rows; r++) {
            float* total = totals + r * COLUMNS + column;
            const Floats all =
                fma(load(group.products + r * COLUMNS + column), scale, load(total));
            store(total, fma(zero, broadcast(p.sums[g * p.rows + r]), all));
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

// Asks for one of so many equal parts of what the next slab needs: of x, and of `count` tiles.
INLINE void prefetch_slab(const Blocks& m, int64_t tile, int64_t count, int64_t g, int64_t groups,
                          const Panel& p, int64_t part, int64_t parts) {
    const uint32_t* x = p.x + g * p.rows * p.steps;
    const int64_t line = 64 / static_cast<int64_t>(sizeof *x), rows = groups * p.rows * p.steps / line;
    for (int64_t i = rows * part / parts; i < rows * (part + 1) / parts; i++)
        __builtin_prefetch(x + i * line, 0, 2);
    const int64_t lines = groups * m.block_bytes / 64, all = count * lines;
    for (int64_t i = all * part / parts; i < all * (part + 1) / parts; i++)
        __builtin_prefetch(m.at(tile + i / lines, g) + i % lines * 64, 0, 2);
}

// How many groups have their weights rounded together.
INLINE int64_t groups_of_slab(const Panel& p) {
    return TILED_INPUTS / 2 > p.steps ? TILED_INPUTS / 2 / p.steps : 1;
}

// `count` tiles of outputs. Weights of a slab of groups, [pairs of tiles, steps, COLUMNS], meet all
// rows: those of a pair stay in the nearest cache, the others and the slab of x in the next.
template <class C>
void rounded_chunk(Tiles& tiles, const Product& a, const Blocks& m, int64_t tile, int64_t count,
                   int64_t first, int64_t rows, const Panel& p, const Workspace& w) {
    const int64_t most = groups_of_slab(p), weights = most * p.steps * COLUMNS;
    const int64_t pairs = (count + 1) / 2, sums = p.rows * COLUMNS, row_size = p.rows * p.steps;
    const int64_t parts = pairs * ((rows + 2 * SIDE - 1) / (2 * SIDE));
    std::memset(w.totals, 0, static_cast<size_t>(pairs * sums) * sizeof(float));
    for (int64_t begin = 0; begin < m.groups; begin += most) {
        const int64_t next = begin + most;
        const int64_t groups = next < m.groups ? most : m.groups - begin;
        const int64_t later = next + most < m.groups ? most : m.groups - next;  // none: no next one
        for (int64_t t = 0; t < count; t++)
            for (int64_t g = 0; g < groups; g++)
                unpack_rounded<C>(m, m.at(tile + t, begin + g),
                                  w.codes + t / 2 * weights + g * p.steps * COLUMNS +
                                      t % 2 * MATRIX_TILE);
        int64_t part = 0;
        for (int64_t pair = 0; pair < pairs; pair++)
            by_tiles(rows, [&](auto height, int64_t row) {
                constexpr int H = decltype(height)::value;
                if (later > 0) prefetch_slab(m, tile, count, next, later, p, part++, parts);
                float* totals = w.totals + pair * sums + row * COLUMNS;
                load_sums<H>(tiles, totals);
                for (int64_t g = 0; g < groups; g++)
                    add_products<H>(tiles, p.x + (begin + g) * row_size + row * p.steps, p.steps,
                                    w.codes + pair * weights + g * p.steps * COLUMNS, p.steps);
                store_sums<H>(tiles, totals);
            });
    }
    for (int64_t pair = 0; pair < pairs; pair++)
        put_columns<bf16>(a, (tile + 2 * pair) * MATRIX_TILE, COLUMNS, first, rows,
                          w.totals + pair * sums);
}

// Calls f(first tile, tiles) for parts of a matrix that a thread takes: as many each, and an even
// number of tiles but for the last.
template <class F>
INLINE void by_chunks(const Product& a, int64_t most, const F& f) {
    const int64_t all = tiles_of(a.matrix), parts = up_to(a.threads, all / most + 1);
    const int64_t each = up_to(2, (all + parts - 1) / parts);
#pragma omp for schedule(static) nowait
    for (int64_t tile = 0; tile < all; tile += each)
        f(tile, all - tile < each ? all - tile : each);
}

// Every product of the chain, which share x.
template <class C>
int tiled_product(const Product& a) {
    const bool exact = a.rows <= EXACT_ROWS;
    const Blocks m(a.matrix);
    const int64_t most = up_to(SIDE, a.rows < TILED_ROWS ? a.rows : TILED_ROWS);
    Panel p{nullptr, nullptr, most, up_to(TILE_PAIRS, m.group / 2)};
    // Of a thread: two groups on their way, or the weights of a slab.
    const int64_t turns = exact ? 2 : 0, outputs = exact ? COLUMNS : TILED_OUTPUTS;
    const int64_t codes = p.steps * (exact ? 2 * COLUMNS : groups_of_slab(p) * TILED_OUTPUTS);
    const int64_t size = most * outputs + codes + turns * COLUMNS * (most + 2);
    const Memory<uint32_t> x = memory<uint32_t>(m.groups * most * (p.steps + 1));
    const Memory<float> everyone = memory<float>(a.threads * size);
    if (!x || !everyone) return NO_MEMORY;
    p.x = x.get(), p.sums = reinterpret_cast<float*>(p.x + m.groups * most * p.steps);
    for (int64_t first = 0; first < a.rows; first += TILED_ROWS) {
        const int64_t rows = a.rows - first < TILED_ROWS ? a.rows - first : TILED_ROWS;
        pack_panel<Pairs, bf16, 1>(a, m, first, rows, p);
#pragma omp parallel num_threads(a.threads)
        {
            Workspace w{};
            w.totals = everyone.get() + thread_number() * size;
            w.codes = reinterpret_cast<uint32_t*>(w.totals + most * outputs);
            w.products = w.totals + most * outputs + codes;
            w.scales = w.products + turns * COLUMNS * most;
            w.zeros = w.scales + turns * COLUMNS;
            // Zeros where a group fills no whole tiles, and where outputs do not.
            std::memset(w.codes, 0, static_cast<size_t>(codes) * sizeof(uint32_t));
            std::memset(w.scales, 0, static_cast<size_t>(2 * turns * COLUMNS) * sizeof(float));
            const TileShapes shapes = shapes_of(exact ? rows : TILED_ROWS);
            Tiles tiles(shapes);
            for (const Product* each = &a; each; each = each->next) {
                const Blocks blocks(each->matrix);
                by_chunks(*each, outputs / MATRIX_TILE, [&](int64_t tile, int64_t count) {
                    exact ? exact_chunk<C>(tiles, *each, blocks, tile, rows, p, w)
                          : rounded_chunk<C>(tiles, *each, blocks, tile, count, first, rows, p, w);
                });
            }
        }
    }
    return DONE;
}

}  // namespace ISA

#endif
