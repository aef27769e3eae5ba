// Matmuls of quantized matrices in AMX tiles. x is the left operand. Weights are the right operand in
// the layout of their words: pairs of inputs by outputs.
//
// For few rows, the operands are the quantized values themselves, and the sums of each group are
// scaled in float32. A software pipeline has three stages: unpack the quantized values of a group,
// multiply them, scale the results. Three groups of two tiles of outputs are in flight. Unpacking and
// multiplying alternate tile by tile, because the reorder buffer of a CPU is too small to overlap them
// otherwise.
//
// For more rows, the scaling would cost more than the matmul. So weights are rounded to bfloat16
// (relative error at most 2^-8) and use amx_matmul.h.
#pragma once

#include "amx_matmul.h"
#include "packed_input.h"

#if defined(HAS_AMX_TILES)

namespace ISA {

constexpr int64_t PANEL_CHUNKS = 16;  // chunks of an output panel, which share an L1 tile of x
constexpr int64_t TILE_INPUTS = 128;  // inputs of an L1 tile of x
static_assert(CHUNK_OUTPUTS == AMX_BLOCK, "two tiles are a chunk");

// Return the tile shapes for `rows` rows: whole tiles, or fewer rows if they fit in two tiles. Fewer
// rows take less time.
INLINE AmxTileShapes shapes_of(int64_t rows) {
    AmxTileShapes shapes = whole_tiles();
    if (rows > AMX_BLOCK) return shapes;
    const int64_t upper = rows < AMX_ROWS ? rows : AMX_ROWS,
                  lower = rows > AMX_ROWS ? rows - AMX_ROWS : AMX_ROWS;
    shapes.set(C0, upper, AMX_ROW_BYTES), shapes.set(C1, upper, AMX_ROW_BYTES);
    shapes.set(C2, lower, AMX_ROW_BYTES), shapes.set(C3, lower, AMX_ROW_BYTES);
    shapes.set(A0, upper, AMX_ROW_BYTES), shapes.set(A1, lower, AMX_ROW_BYTES);
    return shapes;
}

// Position of a thread in its groups. Loops from outer to inner: output panel, L1 tile of inputs,
// chunk of outputs, group.
struct GroupPosition {
    int64_t groups, tile_groups, end;  // groups in all and per L1 tile; end of the chunks
    int64_t panel, chunk;              // first chunk of the panel, current chunk
    int64_t first = 0, g = 0;          // first group of the L1 tile, current group

    GroupPosition(const MatrixBlocks& m, int64_t begin, int64_t end)
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
    uint32_t* values = nullptr;  // [steps, CHUNK_OUTPUTS]
    float* products = nullptr;   // [rows, CHUNK_OUTPUTS]
    float* scales = nullptr;     // [2, CHUNK_OUTPUTS], factors for the sums of x
    float* totals = nullptr;     // [rows, CHUNK_OUTPUTS]
    int64_t g = 0;               // index in the packed input
};

// Scratch memory of the groups in the pipeline. Parts that fill no whole tile stay zero.
struct PipelineScratch {
    static constexpr int64_t SCALES = 4;  // ring buffer of group scales; a power of two
    uint32_t* values;                     // of two groups
    float *products, *scales;             // of two groups, and of SCALES groups

    static int64_t size(const PackedInput& p) { return 2 * CHUNK_OUTPUTS * (p.steps + p.rows + SCALES); }
    PipelineScratch(const PackedInput& p, float* from)
        : values(reinterpret_cast<uint32_t*>(from)), products(from + 2 * p.steps * CHUNK_OUTPUTS),
          scales(products + 2 * p.rows * CHUNK_OUTPUTS) {
        std::memset(from, 0, static_cast<size_t>(size(p)) * sizeof *from);
    }
};

template <class Format>
INLINE void unpack_scales(const uint8_t* block, float* to) {
    for (int64_t i = 0; i < MATRIX_TILE; i += WIDTH) {
        const Floats scale = Format::scales(block, i), zero = Format::zeros(block, i);
        store(to + i, scale);
        store(to + CHUNK_OUTPUTS + i, fma(scale, broadcast(-PairOperands::offset<Format>()), zero));
    }
}

// Unpack the quantized values of a block for one step of tiles.
template <class Format>
INLINE void unpack_values(const PrefetchedBlock<Format>& from, int64_t words, int64_t step,
                          uint32_t* to) {
    constexpr int PAIRS = Format::unit_inputs / 2, UNITS = AMX_PAIRS / PAIRS;
    const int64_t first = step * UNITS, left = words / Format::unit_words - first;
    for (int64_t i = 0; i < MATRIX_TILE; i += WIDTH) {
        const PrefetchedWords source = from.words(i, true);
        const auto unpack = [&](int64_t n) ALWAYS_INLINE {
            const PackedUnit<Format> unit = source.unit<Format, false>(n);
#pragma GCC unroll 4
            for (int s = 0; s < PAIRS; s++)
                store(to + (n * PAIRS + s) * CHUNK_OUTPUTS + i, PairOperands::values<Format>(unit, s));
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
template <class Format>
class GroupPipeline {
public:
    GroupPipeline(AmxTiles& tiles, const PackedInput& p, int64_t rows, const PipelineScratch& scratch)
        : tiles(tiles), p(p), rows(rows), scratch(scratch) {}

    // Start group g of two tiles. Two calls later it is added to its totals.
    INLINE void add(const PrefetchedBlock<Format> (&blocks)[2], int64_t words, int64_t g,
                    float* totals) {
        PipelinedGroup current{scratch.values + iteration % 2 * p.steps * CHUNK_OUTPUTS,
                               scratch.products + iteration % 2 * p.rows * CHUNK_OUTPUTS,
                               scratch.scales + iteration % PipelineScratch::SCALES * 2 * CHUNK_OUTPUTS,
                               totals, g};
        for (int64_t t = 0; t < 2; t++)
            unpack_scales<Format>(blocks[t].block, current.scales + t * MATRIX_TILE);
        const auto unpack = [&](int64_t step, int64_t t) ALWAYS_INLINE {
            unpack_values(blocks[t], words, step, current.values + t * MATRIX_TILE);
        };
        if (last.values) {
            multiply(unpack);
        } else {
            for (int64_t step = 0; step < p.steps / AMX_PAIRS; step++)
                for (int64_t t = 0; t < 2; t++) unpack(step, t);
        }
        shift(current);
    }

    // Drain the pipeline.
    INLINE void finish() {
        while (last.values || before.values) {
            if (last.values) multiply([](int64_t, int64_t) {});
            shift({});
        }
    }

private:
    AmxTiles& tiles;
    const PackedInput p;
    const int64_t rows;
    const PipelineScratch scratch;
    PipelinedGroup last, before;
    uint64_t iteration = 0;

    // Multiply the last group. unpack(step, t) is called between the tile matmuls of the first rows.
    template <class F>
    INLINE void multiply(const F& unpack) {
        const int64_t steps = p.steps / AMX_PAIRS;
        for_row_blocks(rows, [&](auto height, int64_t row) ALWAYS_INLINE {
            constexpr int H = decltype(height)::value;
            LeftRows x[H];
            for (int h = 0; h < H; h++)
                x[h] = {p.x + (last.g * p.rows + row + h * AMX_ROWS) * p.steps, p.steps * 4};
            zero_block<H>(tiles);
            if (row == 0)
                add_tile_matmuls<H>(tiles, x, last.values, steps, unpack);
            else
                add_tile_matmuls<H>(tiles, x, last.values, steps, [](int64_t, int64_t) {});
            store_block<H>(tiles, last.products + row * CHUNK_OUTPUTS, AMX_BLOCK);
        });
    }

    // Scale and accumulate the group before the last, both tiles of a row at once. Fewer instructions
    // leave more of the reorder buffer to the other stages.
    INLINE void add_scaled() const {
        constexpr int PARTS = CHUNK_OUTPUTS / WIDTH;
        const float *products = before.products, *sums = p.sums + before.g * p.rows;
        float* totals = before.totals;
        Floats scale[PARTS], zero[PARTS];
        for (int v = 0; v < PARTS; v++) {
            scale[v] = load(before.scales + v * WIDTH);
            zero[v] = load(before.scales + CHUNK_OUTPUTS + v * WIDTH);
        }
#pragma GCC unroll 4
        for (int64_t r = 0; r < rows; r++, products += CHUNK_OUTPUTS, totals += CHUNK_OUTPUTS) {
            const Floats sum = broadcast(sums[r]);
            for (int v = 0; v < PARTS; v++) {
                float* total = totals + v * WIDTH;
                const Floats all = fma(load(products + v * WIDTH), scale[v], load(total));
                store(total, fma(zero[v], sum, all));
            }
        }
    }

    INLINE void shift(const PipelinedGroup& current) {
        if (before.values) add_scaled();
        before = last, last = current;
        iteration++;
    }
};

// Compute chunks `begin` to `end` of a matmul. Totals are [PANEL_CHUNKS, rows, CHUNK_OUTPUTS].
template <class Format>
void multiply_chunks(AmxTiles& tiles, const QuantizedLinear& args, const PackedInput& p,
                     const PipelineScratch& scratch, float* totals, int64_t begin, int64_t end) {
    const MatrixBlocks m(args.matrix);
    const int64_t last_tile = tiles_of(args.matrix) - 1, size = args.rows * CHUNK_OUTPUTS;
    GroupPipeline<Format> groups(tiles, p, args.rows, scratch);
    GroupPosition current(m, begin, end), prefetched = current;
    for (int64_t i = 0; i < PREFETCH_BLOCKS; i++) prefetched.next();
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
                return PrefetchedBlock<Format>{block_start, later, later, L1};
            };
            const PrefetchedBlock<Format> blocks[2] = {block(0), block(1)};
            groups.add(blocks, m.words, current.g, totals + (current.chunk - panel) * size);
        }
        groups.finish();
        for (int64_t i = 0; i < chunks; i++)
            store_columns<bf16>(args, (panel + i) * CHUNK_OUTPUTS, CHUNK_OUTPUTS, 0, args.rows,
                                totals + i * size);
    }
}

// Compute all matmuls of a chain that share x, with quantized values as operands.
template <class Format>
int group_scaled_matmul(const QuantizedLinear& args) {
    const MatrixBlocks m(args.matrix);
    const int64_t rows = args.rows > AMX_BLOCK ? round_up(args.rows, AMX_ROWS) : args.rows;
    PackedInput p{nullptr, nullptr, rows, round_up(m.group / 2, AMX_PAIRS)};
    const int64_t totals = PANEL_CHUNKS * args.rows * CHUNK_OUTPUTS,
                  size = totals + PipelineScratch::size(p);
    const Buffer<uint32_t> x = allocate<uint32_t>(m.groups * rows * (p.steps + 1));
    const Buffer<float> workspace = allocate<float>(args.threads * size);
    if (!x || !workspace) return NO_MEMORY;
    p.x = x.get(), p.sums = reinterpret_cast<float*>(p.x + m.groups * rows * p.steps);
    pack_input<PairOperands, bf16, 1>(args, m, 0, args.rows, p);
#pragma omp parallel num_threads(args.threads)
    {
        float* const thread_scratch = workspace.get() + thread_index() * size;
        const PipelineScratch scratch(p, thread_scratch + totals);
        const AmxTileShapes shapes = shapes_of(args.rows);
        AmxTiles tiles(shapes);
        for (const QuantizedLinear* matmul = &args; matmul; matmul = matmul->next) {
            const int64_t chunks = (tiles_of(matmul->matrix) + 1) / 2;
#pragma omp for schedule(static) nowait
            for (int64_t part = 0; part < args.threads; part++)
                multiply_chunks<Format>(tiles, *matmul, p, scratch, thread_scratch,
                                        chunks * part / args.threads,
                                        chunks * (part + 1) / args.threads);
        }
    }
    return DONE;
}

constexpr int64_t QUANTIZED_VECTOR_ROWS = 1;  // more rows use tiles
static_assert(TILED_OUTPUTS % CHUNK_OUTPUTS == 0, "whole chunks");

// Dequantize the weights of a block, rounded, to steps that are CHUNK_OUTPUTS apart.
template <class Format>
INLINE void unpack_rounded(const PrefetchedBlock<Format>& from, int64_t words, uint32_t* to) {
    constexpr int STEPS = Format::unit_inputs / 2;
    for (int64_t i = 0; i < MATRIX_TILE; i += WIDTH) {
        const Floats scale = Format::scales(from.block, i), zero = Format::zeros(from.block, i);
        const PrefetchedWords source = from.words(i, true);
        for (int64_t n = 0; n < words / Format::unit_words; n++) {
            const PackedUnit<Format> unit = source.unit<Format, false>(n);
#pragma GCC unroll 4
            for (int s = 0; s < STEPS; s++) {
                const Floats first = bit_cast<Floats>(FloatOperands::values<Format>(unit, 2 * s));
                const Floats second = bit_cast<Floats>(FloatOperands::values<Format>(unit, 2 * s + 1));
                store(to + (n * STEPS + s) * CHUNK_OUTPUTS + i,
                      to_bf16_pairs(fma(scale, first, zero), fma(scale, second, zero)));
            }
        }
    }
}

// Weights rounded to bfloat16, for matmuls of many rows.
template <class Format>
struct QuantizedPanels {
    const Matrix& matrix;
    const MatrixBlocks blocks;

    explicit QuantizedPanels(const QuantizedLinear& args) : matrix(args.matrix), blocks(args.matrix) {}
    int64_t outputs() const { return matrix.outputs; }

    void unpack(const WeightPanel& panel, uint32_t* to) const {
        const int64_t first = panel.input / blocks.group, all = tiles_of(matrix);
        const int64_t words = blocks.group / 2 * CHUNK_OUTPUTS;
        const int64_t groups = (panel.inputs + blocks.group - 1) / blocks.group;
        for (int64_t pair = 0; pair < panel.pairs(); pair++, to += panel.pair_words()) {
            const int64_t tile = panel.output / MATRIX_TILE + 2 * pair;
            // Zeros pad groups that fill no whole step, and outputs that fill no two tiles.
            if (groups * words < panel.pair_words() || tile + 1 == all)
                std::memset(to, 0, static_cast<size_t>(panel.pair_words()) * sizeof *to);
            for (int64_t t = 0; t < 2 && tile + t < all; t++)
                for (int64_t g = 0; g < groups; g++)
                    unpack_rounded(PrefetchedBlock<Format>::of(blocks, tile + t, first + g, 1, L1),
                                   blocks.words, to + g * words + t * MATRIX_TILE);
        }
    }
};

// Maximum rows that use quantized values as operands. Rounding 4-bit and 8-bit weights to bfloat16
// loses precision. 12-bit weights and MXFP4 are exact in bfloat16, so they switch to amx_matmul.h
// where that is faster.
template <class Format>
constexpr int64_t max_group_scaled_rows() {
    return std::is_same_v<Format, Mxfp4> ? 32 : std::is_same_v<Format, Float12> ? 56 : 64;
}

template <class Format>
int tiled_matmul(const QuantizedLinear& args) {
    return args.invariant || args.rows <= max_group_scaled_rows<Format>()
               ? group_scaled_matmul<Format>(args)
               : tile_matmul<QuantizedPanels<Format>>(args, args.matrix.inputs,
                                                      MatrixBlocks(args.matrix).group);
}

}  // namespace ISA

#endif
