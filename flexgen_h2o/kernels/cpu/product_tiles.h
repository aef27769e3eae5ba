// Products in AMX tiles.
//
// With quantized matrices x is the left operand, and codes the right one, as their words lie: pairs
// of inputs by outputs. Up to EXACT_ROWS rows meet the codes themselves, and each group's products are
// scaled in float32. For more rows that would cost more than the products: weights are rounded to
// bfloat16 (by 2^-9 of each at most), once for a panel of rows, and sums stay in tiles.
#pragma once

#include "panel.h"

#if defined(TILES)

namespace ISA {

constexpr int64_t VECTOR_ROWS = 4;  // so few go by vectors
constexpr int64_t EXACT_ROWS = 64;
constexpr int64_t SIDE = TILE_ROWS;
constexpr int64_t WIDE = 4 * COLUMNS;   // outputs that are rounded together
constexpr int64_t SLAB = 512;           // and inputs: 2 x 16 outputs of them lie in L1
static_assert(COLUMNS == 2 * SIDE && PANEL % (2 * SIDE) == 0, "two tiles each way");

INLINE int64_t up_to(int64_t multiple, int64_t x) {
    return (x + multiple - 1) / multiple * multiple;
}

// All tiles are whole ones.
INLINE TileShapes whole_tiles() {
    TileShapes shapes;
    for (int tile = 0; tile < 8; tile++) shapes.set(tile, TILE_ROWS, TILE_BYTES);
    return shapes;
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

template <int H>
INLINE void load_sums(Tiles& tiles, const float* c, int64_t row) {
    tiles.load<C0>(c, row * 4);
    tiles.load<C1>(c + SIDE, row * 4);
    if constexpr (H == 2) {
        tiles.load<C2>(c + SIDE * row, row * 4);
        tiles.load<C3>(c + SIDE * row + SIDE, row * 4);
    }
}

template <int H>
INLINE void store_sums(Tiles& tiles, float* c, int64_t row) {
    tiles.store<C0>(c, row * 4);
    tiles.store<C1>(c + SIDE, row * 4);
    if constexpr (H == 2) {
        tiles.store<C2>(c + SIDE * row, row * 4);
        tiles.store<C3>(c + SIDE * row + SIDE, row * 4);
    }
}

// Asks for a block of the group after this one, or of the next chunk's first.
INLINE void prefetch_next(const Blocks& m, int64_t tile, int64_t g, int64_t next_tile) {
    prefetch_block(g + 1 < m.groups ? m.at(tile, g + 1) : m.at(next_tile, 0), m.block_bytes, false);
}

// The codes of a tile's group to a buffer [steps, COLUMNS], and what they are to be scaled with.
template <class C>
INLINE void unpack_codes(const Blocks& m, const uint8_t* block, int64_t column,
                         const Workspace& w) {
    constexpr int STEPS = 16 / C::bits;
    for (int64_t i = 0; i < MATRIX_TILE; i += WIDTH) {
        const Floats scale = C::scales(block, i), zero = C::zeros(block, i);
        store(w.scales + column + i, scale);
        store(w.zeros + column + i, fma(scale, broadcast(-Pairs::shift<C>()), zero));
        for (int64_t n = 0; n < m.words; n++) {
            const Words word = load_words(C::words(block) + 4 * (n * MATRIX_TILE + i));
            for (int s = 0; s < STEPS; s++)
                store_words(w.codes + (n * STEPS + s) * COLUMNS + column + i,
                            Pairs::codes<C>(word, s));
        }
    }
}

// What a group adds to the totals of up to 2 x 16 rows from `row` on.
template <int H>
INLINE void add_group(Tiles& tiles, const Panel& p, int64_t g, int64_t row, int64_t rows,
                      const Workspace& w) {
    tiles.zero<C0>();
    tiles.zero<C1>();
    if constexpr (H == 2) {
        tiles.zero<C2>();
        tiles.zero<C3>();
    }
    add_products<H>(tiles, p.x + (g * p.rows + row) * p.steps, p.steps, w.codes, p.steps);
    store_sums<H>(tiles, w.products, COLUMNS);
    const int64_t count = rows - row < H * SIDE ? rows - row : H * SIDE;
    for (int64_t column = 0; column < COLUMNS; column += WIDTH) {
        const Floats scale = load(w.scales + column), zero = load(w.zeros + column);
        for (int64_t r = 0; r < count; r++) {
            float* total = w.totals + (row + r) * COLUMNS + column;
            const Floats all = fma(load(w.products + r * COLUMNS + column), scale, load(total));
            store(total, fma(zero, broadcast(p.sums[g * p.rows + row + r]), all));
        }
    }
}

template <class C>
void exact_chunk(Tiles& tiles, const Product& a, const Blocks& m, int64_t chunk, int64_t first,
                 int64_t rows, const Panel& p, const Workspace& w) {
    const int64_t all = tiles_of(a.matrix), tile = 2 * chunk;
    std::memset(w.totals, 0, static_cast<size_t>(rows * COLUMNS) * sizeof(float));
    for (int64_t g = 0; g < m.groups; g++) {
        for (int64_t t = tile; t < tile + 2 && t < all; t++) {
            prefetch_next(m, t, g, t + 2);
            unpack_codes<C>(m, m.at(t, g), (t - tile) * MATRIX_TILE, w);
        }
        int64_t row = 0;
        for (; row + SIDE < rows; row += 2 * SIDE) add_group<2>(tiles, p, g, row, rows, w);
        if (row < rows) add_group<1>(tiles, p, g, row, rows, w);
    }
    put_columns<bf16>(a, tile * MATRIX_TILE, COLUMNS, first, rows, w.totals);
}

// Two vectors of inputs to pairs of the nearest bfloat16.
INLINE Words rounded_pairs(Floats first, Floats second) {
    const Words a = bits_of<Words>(first), b = bits_of<Words>(second);
    return (a + 0x7fff + (a >> 16 & 1)) >> 16 | ((b + 0x7fff + (b >> 16 & 1)) & 0xffff0000);
}

// A block's weights, rounded, to steps COLUMNS apart.
template <class C>
INLINE void unpack_rounded(const Blocks& m, const uint8_t* block, uint32_t* to) {
    constexpr int STEPS = 16 / C::bits;
    for (int64_t i = 0; i < MATRIX_TILE; i += WIDTH) {
        const Floats scale = C::scales(block, i), zero = C::zeros(block, i);
        for (int64_t n = 0; n < m.words; n++) {
            const Words word = load_words(C::words(block) + 4 * (n * MATRIX_TILE + i));
            for (int s = 0; s < STEPS; s++) {
                const Floats first = bits_of<Floats>(Single::codes<C>(word, 2 * s));
                const Floats second = bits_of<Floats>(Single::codes<C>(word, 2 * s + 1));
                store_words(to + (n * STEPS + s) * COLUMNS + i,
                            rounded_pairs(fma(scale, first, zero), fma(scale, second, zero)));
            }
        }
    }
}

// Codes are [slab of steps, COLUMNS] for each pair of tiles.
template <class C>
void rounded_chunk(Tiles& tiles, const Product& a, const Blocks& m, int64_t chunk, int64_t first,
                   int64_t rows, const Panel& p, const Workspace& w) {
    const int64_t tile = chunk * (WIDE / MATRIX_TILE), left = tiles_of(a.matrix) - tile;
    const int64_t count = left < WIDE / MATRIX_TILE ? left : WIDE / MATRIX_TILE;
    const int64_t most = SLAB / 2 > p.steps ? SLAB / 2 / p.steps : 1;  // groups of a slab
    const int64_t part = most * p.steps * COLUMNS;
    std::memset(w.totals, 0, static_cast<size_t>(p.rows * WIDE) * sizeof(float));
    for (int64_t begin = 0; begin < m.groups; begin += most) {
        const int64_t groups = m.groups - begin < most ? m.groups - begin : most;
        for (int64_t t = 0; t < count; t++)
            for (int64_t g = 0; g < groups; g++)
                unpack_rounded<C>(m, m.at(tile + t, begin + g),
                                  w.codes + t / 2 * part + g * p.steps * COLUMNS +
                                      t % 2 * MATRIX_TILE);
        for (int64_t pair = 0; 2 * pair < count; pair++) {
            const auto multiply = [&](auto height, int64_t row) {
                constexpr int H = decltype(height)::value;
                float* totals = w.totals + row * WIDE + pair * COLUMNS;
                load_sums<H>(tiles, totals, WIDE);
                for (int64_t g = 0; g < groups; g++)
                    add_products<H>(tiles, p.x + ((begin + g) * p.rows + row) * p.steps, p.steps,
                                    w.codes + pair * part + g * p.steps * COLUMNS, p.steps);
                store_sums<H>(tiles, totals, WIDE);
            };
            int64_t row = 0;
            for (; row + SIDE < rows; row += 2 * SIDE) multiply(Count<2>{}, row);
            if (row < rows) multiply(Count<1>{}, row);
        }
    }
    put_columns<bf16>(a, tile * MATRIX_TILE, WIDE, first, rows, w.totals);
}

// Every product of the chain, which share x.
template <class C>
int tiled_product(const Product& a) {
    const bool exact = a.rows <= EXACT_ROWS;
    const Blocks m(a.matrix);
    const int64_t most = up_to(SIDE, a.rows < PANEL ? a.rows : PANEL);
    const int64_t columns = exact ? COLUMNS : WIDE;
    Panel p{nullptr, nullptr, most, up_to(TILE_PAIRS, m.group / 2)};
    const int64_t slab = exact || SLAB / 2 < p.steps ? p.steps : SLAB / 2;
    const int64_t codes = slab * columns, size = (most + 2) * columns + codes + 2 * SIDE * COLUMNS;
    const Memory<uint32_t> x = memory<uint32_t>(m.groups * most * (p.steps + 1));
    const Memory<float> everyone = memory<float>(a.threads * size);
    if (!x || !everyone) return NO_MEMORY;
    p.x = x.get(), p.sums = reinterpret_cast<float*>(p.x + m.groups * most * p.steps);
    for (int64_t first = 0; first < a.rows; first += PANEL) {
        const int64_t rows = a.rows - first < PANEL ? a.rows - first : PANEL;
        pack_panel<Pairs, bf16, 1>(a, m, first, rows, p);
#pragma omp parallel num_threads(a.threads)
        {
            Workspace w{};
            w.totals = everyone.get() + thread_number() * size;
            w.codes = reinterpret_cast<uint32_t*>(w.totals + most * columns);
            w.products = w.totals + most * columns + codes;
            w.scales = w.products + 2 * SIDE * COLUMNS;
            w.zeros = w.scales + columns;
            // Zeros where a group fills no whole tiles, and where outputs do not.
            std::memset(w.codes, 0, static_cast<size_t>(codes) * sizeof(uint32_t));
            std::memset(w.scales, 0, static_cast<size_t>(2 * columns) * sizeof(float));
            const TileShapes shapes = whole_tiles();
            Tiles tiles(shapes);
            for (const Product* each = &a; each; each = each->next) {
                const Blocks blocks(each->matrix);
                const int64_t outputs = tiles_of(each->matrix) * MATRIX_TILE;
                const int64_t chunks = (outputs + columns - 1) / columns;
#pragma omp for schedule(static) nowait
                for (int64_t chunk = 0; chunk < chunks; chunk++)
                    exact ? exact_chunk<C>(tiles, *each, blocks, chunk, first, rows, p, w)
                          : rounded_chunk<C>(tiles, *each, blocks, chunk, first, rows, p, w);
            }
        }
    }
    return DONE;
}

}  // namespace ISA

#endif
