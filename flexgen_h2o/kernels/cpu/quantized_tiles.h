// Matmuls of quantized matrices in AMX tiles. The sums of each group are scaled in float32.
//
// Software pipeline of three stages: unpack the quantized values of a group, multiply them, scale the
// results. Three groups of two tiles of outputs are in flight. Unpacking and multiplying alternate tile
// by tile, because the reorder buffer of a CPU is too small to overlap them otherwise.
#pragma once

#include "packed_input.h"
#include "tile_matmul.h"

#if defined(TILES)

namespace ISA {

constexpr int64_t PANEL_CHUNKS = 16;  // chunks of an output panel, which share an L1 tile of x
constexpr int64_t TILE_INPUTS = 128;  // inputs of an L1 tile of x
static_assert(COLUMNS == TILE_COLUMNS, "two tiles are a chunk");

// Return the tile shapes for `rows` rows: whole tiles, or fewer rows if they fit in two tiles. Fewer
// rows take less time.
INLINE TileShapes shapes_of(int64_t rows) {
    TileShapes shapes = whole_tiles();
    if (rows > 2 * SIDE) return shapes;
    const int64_t upper = rows < SIDE ? rows : SIDE, lower = rows > SIDE ? rows - SIDE : SIDE;
    shapes.set(C0, upper, TILE_BYTES), shapes.set(C1, upper, TILE_BYTES);
    shapes.set(C2, lower, TILE_BYTES), shapes.set(C3, lower, TILE_BYTES);
    shapes.set(A0, upper, TILE_BYTES), shapes.set(A1, lower, TILE_BYTES);
    return shapes;
}

// Position of a thread in its groups. Loops from outer to inner: output panel, L1 tile of inputs, chunk
// of outputs, group.
struct Place {
    int64_t groups, tile_groups, end;  // groups in all and per L1 tile; end of the chunks
    int64_t panel, chunk;              // first chunk of the panel, current chunk
    int64_t first = 0, g = 0;          // first group of the L1 tile, current group

    Place(const Blocks& m, int64_t begin, int64_t end)
        : groups(m.groups), tile_groups(m.group < TILE_INPUTS ? TILE_INPUTS / m.group : 1), end(end),
          panel(begin), chunk(begin) {}

    int64_t chunks() const { return end - panel < PANEL_CHUNKS ? end - panel : PANEL_CHUNKS; }

    INLINE void next() {
        if (++g < first + tile_groups && g < groups) return;
        if (++chunk < panel + chunks()) {
            g = first;
        } else if (g < groups) {
            chunk = panel, first = g;
        } else {
            panel = chunk, first = g = 0;
        }
    }
};

// A group in the pipeline. Null `values` mark an empty stage.
struct PipelinedGroup {
    uint32_t* values = nullptr;  // [steps, COLUMNS]
    float* products = nullptr;   // [rows, COLUMNS]
    float* scales = nullptr;     // [2, COLUMNS], factors for the sums of x
    float* totals = nullptr;     // [rows, COLUMNS]
    int64_t g = 0;               // index in the packed input
};

// Scratch memory of the groups in the pipeline. Parts that fill no whole tile stay zero.
struct PipelineScratch {
    static constexpr int64_t SCALES = 4;  // ring buffer of group scales; a power of two
    uint32_t* values;                     // of two groups
    float *products, *scales;             // of two groups, and of SCALES groups

    static int64_t size(const PackedInput& p) { return 2 * COLUMNS * (p.steps + p.rows + SCALES); }
    PipelineScratch(const PackedInput& p, float* from)
        : values(reinterpret_cast<uint32_t*>(from)), products(from + 2 * p.steps * COLUMNS),
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

// Unpack the quantized values of a block for one step of tiles.
template <class C>
INLINE void unpack_values(const PrefetchedBlock<C>& from, int64_t words, int64_t step, uint32_t* to) {
    constexpr int PAIRS = C::unit_inputs / 2, UNITS = TILE_PAIRS / PAIRS;
    const int64_t first = step * UNITS, left = words / C::unit_words - first;
    for (int64_t i = 0; i < MATRIX_TILE; i += WIDTH) {
        const PrefetchedWords source = from.words(i, true);
        const auto unpack = [&](int64_t n) ALWAYS_INLINE {
            const PackedUnit<C> unit = source.unit<C, false>(n);
#pragma GCC unroll 4
            for (int s = 0; s < PAIRS; s++)
                store_words(to + (n * PAIRS + s) * COLUMNS + i, Pairs::values<C>(unit, s));
        };
        if (left >= UNITS) {
#pragma GCC unroll 8
            for (int64_t n = 0; n < UNITS; n++) unpack(first + n);
        } else {
            for (int64_t n = 0; n < left; n++) unpack(first + n);
        }
    }
}

// Pipeline of one thread's groups.
template <class C>
class GroupPipeline {
public:
    GroupPipeline(Tiles& tiles, const PackedInput& p, int64_t rows, const PipelineScratch& scratch)
        : tiles(tiles), p(p), rows(rows), scratch(scratch) {}

    // Start group g of two tiles. Two calls later it is added to its totals.
    INLINE void add(const PrefetchedBlock<C> (&blocks)[2], int64_t words, int64_t g, float* totals) {
        PipelinedGroup current{scratch.values + turn % 2 * p.steps * COLUMNS,
                               scratch.products + turn % 2 * p.rows * COLUMNS,
                               scratch.scales + turn % PipelineScratch::SCALES * 2 * COLUMNS,
                               totals,
                               g};
        for (int64_t t = 0; t < 2; t++)
            unpack_scales<C>(blocks[t].block, current.scales + t * MATRIX_TILE);
        const auto unpack = [&](int64_t step, int64_t t) ALWAYS_INLINE {
            unpack_values(blocks[t], words, step, current.values + t * MATRIX_TILE);
        };
        if (last.values) {
            multiply(unpack);
        } else {
            for (int64_t step = 0; step < p.steps / TILE_PAIRS; step++)
                for (int64_t t = 0; t < 2; t++) unpack(step, t);
        }
        go_on(current);
    }

    // Drain the pipeline.
    INLINE void finish() {
        while (last.values || before.values) {
            if (last.values) multiply([](int64_t, int64_t) {});
            go_on({});
        }
    }

private:
    Tiles& tiles;
    const PackedInput p;
    const int64_t rows;
    const PipelineScratch scratch;
    PipelinedGroup last, before;
    uint64_t turn = 0;

    // Multiply the last group. unpack(step, t) is called between the tile matmuls of the first rows.
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
                add_products<H>(tiles, x, last.values, steps, unpack);
            else
                add_products<H>(tiles, x, last.values, steps, [](int64_t, int64_t) {});
            store_sums<H>(tiles, last.products + row * COLUMNS);
        });
    }

    // Scale and accumulate the group before the last, both tiles of a row at once. Fewer instructions
    // leave more of the reorder buffer to the other stages.
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

    INLINE void go_on(const PipelinedGroup& current) {
        if (before.values) add_scaled();
        before = last, last = current;
        turn++;
    }
};

// Compute chunks `begin` to `end` of a matmul. Totals are [PANEL_CHUNKS, rows, COLUMNS].
template <class C>
void multiply_chunks(Tiles& tiles, const QuantizedLinear& a, const PackedInput& p,
                     const PipelineScratch& scratch, float* totals, int64_t begin, int64_t end) {
    const Blocks m(a.matrix);
    const int64_t last_tile = tiles_of(a.matrix) - 1, size = a.rows * COLUMNS;
    GroupPipeline<C> groups(tiles, p, a.rows, scratch);
    Place current(m, begin, end), prefetched = current;
    for (int64_t i = 0; i < BLOCKS_AHEAD; i++) prefetched.next();
    while (current.panel < end) {
        const int64_t panel = current.panel, chunks = current.chunks();
        std::memset(totals, 0, static_cast<size_t>(chunks * size) * sizeof *totals);
        for (; current.panel == panel; current.next(), prefetched.next()) {
            // An odd last tile is paired with itself.
            const auto block = [&](int64_t t) ALWAYS_INLINE {
                const int64_t tile = 2 * current.chunk + t;
                const uint8_t* later = m.at(2 * prefetched.chunk + t, prefetched.g);
                prefetch(later, L1);
                const uint8_t* block_start = m.at(tile < last_tile ? tile : last_tile, current.g);
                return PrefetchedBlock<C>{block_start, later, later, L1};
            };
            const PrefetchedBlock<C> blocks[2] = {block(0), block(1)};
            groups.add(blocks, m.words, current.g, totals + (current.chunk - panel) * size);
        }
        groups.finish();
        for (int64_t i = 0; i < chunks; i++)
            put_columns<bf16>(a, (panel + i) * COLUMNS, COLUMNS, 0, a.rows, totals + i * size);
    }
}

// Compute all matmuls of a chain that share x, with quantized values as operands.
template <class C>
int group_scaled_matmul(const QuantizedLinear& a) {
    const Blocks m(a.matrix);
    const int64_t rows = a.rows > 2 * SIDE ? up_to(SIDE, a.rows) : a.rows;
    PackedInput p{nullptr, nullptr, rows, up_to(TILE_PAIRS, m.group / 2)};
    const int64_t totals = PANEL_CHUNKS * a.rows * COLUMNS, size = totals + PipelineScratch::size(p);
    const Memory<uint32_t> x = memory<uint32_t>(m.groups * rows * (p.steps + 1));
    const Memory<float> workspace = memory<float>(a.threads * size);
    if (!x || !workspace) return NO_MEMORY;
    p.x = x.get(), p.sums = reinterpret_cast<float*>(p.x + m.groups * rows * p.steps);
    pack_input<Pairs, bf16, 1>(a, m, 0, a.rows, p);
#pragma omp parallel num_threads(a.threads)
    {
        float* const thread_scratch = workspace.get() + thread_number() * size;
        const PipelineScratch scratch(p, thread_scratch + totals);
        const TileShapes shapes = shapes_of(a.rows);
        Tiles tiles(shapes);
        for (const QuantizedLinear* matmul = &a; matmul; matmul = matmul->next) {
            const int64_t chunks = (tiles_of(matmul->matrix) + 1) / 2;
#pragma omp for schedule(static) nowait
            for (int64_t part = 0; part < a.threads; part++)
                multiply_chunks<C>(tiles, *matmul, p, scratch, thread_scratch, chunks * part / a.threads,
                                   chunks * (part + 1) / a.threads);
        }
    }
    return DONE;
}

}  // namespace ISA

#endif
