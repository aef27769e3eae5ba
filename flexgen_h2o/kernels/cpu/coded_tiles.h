// Products by the codes of quantized matrices in AMX tiles: each group's sums are scaled in float32.
//
// A group of inputs of two tiles of outputs takes three turns: its codes are taken apart, they are
// multiplied, and what comes of that is scaled. So three groups are under way. The first two parts
// alternate tile by tile, since a CPU does not look far enough ahead to find the one while it is at
// the other.
#pragma once

#include "panel.h"
#include "tile_matmul.h"

#if defined(TILES)

namespace ISA {

constexpr int64_t STRIPE = 16;        // chunks of outputs that share slabs of inputs
constexpr int64_t SLAB_INPUTS = 128;  // whose x stay in the nearest cache for a stripe
static_assert(COLUMNS == TILE_COLUMNS, "two tiles are a chunk");

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

// Where a thread is among the groups of its chunks. It goes stripe by stripe, in each slab by slab,
// in that chunk by chunk, and in that group by group.
struct Place {
    int64_t groups, slab, end;  // how many groups there are, and in a slab; behind the last chunk
    int64_t stripe, chunk;      // the stripe's first chunk, and this one
    int64_t first = 0, g = 0;   // the slab's first group, and this one

    Place(const Blocks& m, int64_t begin, int64_t end)
        : groups(m.groups), slab(m.group < SLAB_INPUTS ? SLAB_INPUTS / m.group : 1), end(end),
          stripe(begin), chunk(begin) {}

    int64_t chunks() const { return end - stripe < STRIPE ? end - stripe : STRIPE; }

    INLINE void next() {
        if (++g < first + slab && g < groups) return;
        if (++chunk < stripe + chunks()) {
            g = first;
        } else if (g < groups) {
            chunk = stripe, first = g;
        } else {
            stripe = chunk, first = g = 0;
        }
    }
};

// A group on its way; there is none where it has no codes.
struct CodedGroup {
    uint32_t* codes = nullptr;  // [steps, COLUMNS]
    float* products = nullptr;  // [rows, COLUMNS]
    float* scales = nullptr;    // [2, COLUMNS], with what sums of x are to be multiplied with
    float* totals = nullptr;    // [rows, COLUMNS]
    int64_t g = 0;              // of the panel
};

// What groups on their way need of memory. Zeros where they fill no whole tiles.
struct CodedRoom {
    static constexpr int64_t SCALES = 4;  // groups whose scales are there: a power of two
    uint32_t* codes;                      // of two groups
    float *products, *scales;             // of two, and of SCALES

    static int64_t size(const Panel& p) { return 2 * COLUMNS * (p.steps + p.rows + SCALES); }
    CodedRoom(const Panel& p, float* from)
        : codes(reinterpret_cast<uint32_t*>(from)), products(from + 2 * p.steps * COLUMNS),
          scales(products + 2 * p.rows * COLUMNS) {
        std::memset(from, 0, static_cast<size_t>(size(p)) * sizeof *from);
    }
};

template <class C>
INLINE void unpack_scales(const uint8_t* block, float* to) {
    for (int64_t i = 0; i < MATRIX_TILE; i += WIDTH) {
        const Floats scale = C::scales(block, i), zero = C::zeros(block, i);
        store(to + i, scale);
        store(to + COLUMNS + i, fma(scale, broadcast(-Pairs::shift<C>()), zero));
    }
}

// The codes of a block that one step of tiles takes.
template <class C>
INLINE void unpack_codes(const CodedBlock<C>& from, int64_t words, int64_t step, uint32_t* to) {
    constexpr int PAIRS = C::unit_inputs / 2, UNITS = TILE_PAIRS / PAIRS;
    const int64_t first = step * UNITS, left = words / C::unit_words - first;
    for (int64_t i = 0; i < MATRIX_TILE; i += WIDTH) {
        const CodedWords mine = from.words(i, true);
        const auto unpack = [&](int64_t n) ALWAYS_INLINE {
            const Coded<C> unit = mine.unit<C, false>(n);
#pragma GCC unroll 4
            for (int s = 0; s < PAIRS; s++)
                store_words(to + (n * PAIRS + s) * COLUMNS + i, Pairs::codes<C>(unit, s));
        };
        if (left >= UNITS) {
#pragma GCC unroll 8
            for (int64_t n = 0; n < UNITS; n++) unpack(first + n);
        } else {
            for (int64_t n = 0; n < left; n++) unpack(first + n);
        }
    }
}

// The groups of one thread, one after the other.
template <class C>
class CodedGroups {
public:
    CodedGroups(Tiles& tiles, const Panel& p, int64_t rows, const CodedRoom& room)
        : tiles(tiles), p(p), rows(rows), room(room) {}

    // Begins with group g, of two tiles; two turns later it adds to its totals.
    INLINE void add(const CodedBlock<C> (&blocks)[2], int64_t words, int64_t g, float* totals) {
        CodedGroup mine{room.codes + turn % 2 * p.steps * COLUMNS,
                        room.products + turn % 2 * p.rows * COLUMNS,
                        room.scales + turn % CodedRoom::SCALES * 2 * COLUMNS,
                        totals,
                        g};
        for (int64_t t = 0; t < 2; t++)
            unpack_scales<C>(blocks[t].block, mine.scales + t * MATRIX_TILE);
        const auto unpack = [&](int64_t step, int64_t t) ALWAYS_INLINE {
            unpack_codes(blocks[t], words, step, mine.codes + t * MATRIX_TILE);
        };
        if (last.codes) {
            multiply(unpack);
        } else {
            for (int64_t step = 0; step < p.steps / TILE_PAIRS; step++)
                for (int64_t t = 0; t < 2; t++) unpack(step, t);
        }
        go_on(mine);
    }

    // Ends with those that are on their way.
    INLINE void finish() {
        while (last.codes || before.codes) {
            if (last.codes) multiply([](int64_t, int64_t) {});
            go_on({});
        }
    }

private:
    Tiles& tiles;
    const Panel p;
    const int64_t rows;
    const CodedRoom room;
    CodedGroup last, before;
    uint64_t turn = 0;

    // The last group's products. Between those of the first rows' tiles, unpack(step, t) is called.
    template <class F>
    INLINE void multiply(const F& unpack) {
        const int64_t steps = p.steps / TILE_PAIRS;
        by_tiles(rows, [&](auto height, int64_t row) ALWAYS_INLINE {
            constexpr int H = decltype(height)::value;
            LeftRows x[H];
            for (int h = 0; h < H; h++)
                x[h] = {p.x + (last.g * p.rows + row + h * SIDE) * p.steps, p.steps * 4};
            zero_sums<H>(tiles);
            if (row == 0)
                add_products<H>(tiles, x, last.codes, steps, unpack);
            else
                add_products<H>(tiles, x, last.codes, steps, [](int64_t, int64_t) {});
            store_sums<H>(tiles, last.products + row * COLUMNS);
        });
    }

    // Scales the one before, both tiles of a row at once: the fewer instructions, the more of the
    // other parts are under way.
    INLINE void add_scaled() const {
        constexpr int PARTS = COLUMNS / WIDTH;
        const float *products = before.products, *sums = p.sums + before.g * p.rows;
        float* totals = before.totals;
        Floats scale[PARTS], zero[PARTS];
        for (int v = 0; v < PARTS; v++) {
            scale[v] = load(before.scales + v * WIDTH);
            zero[v] = load(before.scales + COLUMNS + v * WIDTH);
        }
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

    INLINE void go_on(const CodedGroup& mine) {
        if (before.codes) add_scaled();
        before = last, last = mine;
        turn++;
    }
};

// The chunks of a product from `begin` to `end`. Totals are [STRIPE, rows, COLUMNS].
template <class C>
void coded_chunks(Tiles& tiles, const Product& a, const Panel& p, const CodedRoom& room,
                  float* totals, int64_t begin, int64_t end) {
    const Blocks m(a.matrix);
    const int64_t last_tile = tiles_of(a.matrix) - 1, size = a.rows * COLUMNS;
    CodedGroups<C> groups(tiles, p, a.rows, room);
    Place here(m, begin, end), ahead = here;
    for (int64_t i = 0; i < BLOCKS_AHEAD; i++) ahead.next();
    while (here.stripe < end) {
        const int64_t stripe = here.stripe, chunks = here.chunks();
        std::memset(totals, 0, static_cast<size_t>(chunks * size) * sizeof *totals);
        for (; here.stripe == stripe; here.next(), ahead.next()) {
            // Of a tile that is not there, the other one's.
            const auto block = [&](int64_t t) ALWAYS_INLINE {
                const int64_t tile = 2 * here.chunk + t;
                const uint8_t* later = m.at(2 * ahead.chunk + t, ahead.g);
                prefetch(later, NEAREST);
                const uint8_t* mine = m.at(tile < last_tile ? tile : last_tile, here.g);
                return CodedBlock<C>{mine, later, later, NEAREST};
            };
            const CodedBlock<C> blocks[2] = {block(0), block(1)};
            groups.add(blocks, m.words, here.g, totals + (here.chunk - stripe) * size);
        }
        groups.finish();
        for (int64_t i = 0; i < chunks; i++)
            put_columns<bf16>(a, (stripe + i) * COLUMNS, COLUMNS, 0, a.rows, totals + i * size);
    }
}

// Every product of the chain, which share x: by their codes.
template <class C>
int coded_product(const Product& a) {
    const Blocks m(a.matrix);
    const int64_t rows = a.rows > 2 * SIDE ? up_to(SIDE, a.rows) : a.rows;
    Panel p{nullptr, nullptr, rows, up_to(TILE_PAIRS, m.group / 2)};
    const int64_t totals = STRIPE * a.rows * COLUMNS, size = totals + CodedRoom::size(p);
    const Memory<uint32_t> x = memory<uint32_t>(m.groups * rows * (p.steps + 1));
    const Memory<float> everyone = memory<float>(a.threads * size);
    if (!x || !everyone) return NO_MEMORY;
    p.x = x.get(), p.sums = reinterpret_cast<float*>(p.x + m.groups * rows * p.steps);
    pack_panel<Pairs, bf16, 1>(a, m, 0, a.rows, p);
#pragma omp parallel num_threads(a.threads)
    {
        float* const mine = everyone.get() + thread_number() * size;
        const CodedRoom room(p, mine + totals);
        const TileShapes shapes = shapes_of(a.rows);
        Tiles tiles(shapes);
        for (const Product* each = &a; each; each = each->next) {
            const int64_t chunks = (tiles_of(each->matrix) + 1) / 2;
#pragma omp for schedule(static) nowait
            for (int64_t part = 0; part < a.threads; part++)
                coded_chunks<C>(tiles, *each, p, room, mine, chunks * part / a.threads,
                                chunks * (part + 1) / a.threads);
        }
    }
    return DONE;
}

}  // namespace ISA

#endif
