// linear_quantized: matmuls with quantized matrices.
//
// Outputs are the lanes of vectors. So blocks are read sequentially in their layout, without sums
// across lanes. Sums of quantized values by x are scaled group by group. Conversion to pairs of
// bfloat16 takes place in registers, next to the matmul. Conversion to floats costs more, so it is
// done once per panel of rows, into a buffer in L1.
#include "float_matmul.h"
#include "packed_input.h"
#include "quantized_amx.h"

namespace ISA {
namespace {

constexpr int64_t MIN_FLOAT_MATMUL_ROWS = 64;  // minimum rows for dequantized float matmuls
static_assert(CHUNK_OUTPUTS == 2 * MATRIX_TILE && CHUNK_OUTPUTS % (2 * WIDTH) == 0, "two tiles");

// A group of two tiles. An odd last tile is paired with itself.
template <class Format>
struct TilePair {
    PrefetchedBlock<Format> tiles[2];
    INLINE PrefetchedWords words(int64_t column, bool first) const {
        return tiles[column / MATRIX_TILE].words(column % MATRIX_TILE, first);
    }
};

// Return a group and convert its scales and zero points to floats.
template <class Operands, class Format>
INLINE TilePair<Format> load_group(const MatrixBlocks& m, int64_t tile, int64_t tiles, int64_t g,
                                   CacheLevel to, const Workspace& w) {
    TilePair<Format> pair;
    for (int64_t t = 0; t < 2; t++) {
        const int64_t source_tile = t < tiles ? tile + t : tile;
        pair.tiles[t] = PrefetchedBlock<Format>::of(m, source_tile, g, 2, to);
        const uint8_t* block = pair.tiles[t].block;
        for (int64_t i = 0; i < MATRIX_TILE; i += WIDTH) {
            const Floats scale = Format::scales(block, i), zero = Format::zeros(block, i);
            store(w.scales + t * MATRIX_TILE + i, scale);
            store(w.zeros + t * MATRIX_TILE + i,
                  fma(scale, broadcast(-Operands::template offset<Format>()), zero));
        }
    }
    return pair;
}

// Unpack the quantized values of a group to the buffer.
template <class Operands, class Format>
INLINE void unpack(const TilePair<Format>& pair, int64_t words, const Workspace& w) {
    constexpr int STEPS = Format::unit_inputs / Operands::inputs;
    for (int64_t column = 0; column < CHUNK_OUTPUTS; column += WIDTH) {
        const PrefetchedWords source = pair.words(column, true);
        for (int64_t n = 0; n < words / Format::unit_words; n++) {
            const PackedUnit<Format> unit = source.unit<Format, false>(n);
#pragma GCC unroll 8
            for (int s = 0; s < STEPS; s++)
                store(w.values + (n * STEPS + s) * CHUNK_OUTPUTS + column,
                      Operands::template values<Format>(unit, s));
        }
    }
}

// Maximum rows for which quantized values are unpacked in registers. More rows read them from the
// buffer.
template <class Operands, class Format>
constexpr int64_t max_register_rows() {
    if (Operands::inputs == 1) return REGISTER_ROWS;
    return has_bf16_offset<Format>() ? 8 * REGISTER_ROWS : 2 * REGISTER_ROWS;
}

// Return the vectors of outputs in the register block for R rows. With one chain of sums, more vectors
// hide the add latency.
constexpr int register_vectors(int rows, bool invariant) {
    return invariant && rows <= 2 && CHUNK_OUTPUTS % (4 * WIDTH) == 0 ? 4 : 2;
}

// Return the number of accumulator chains that hide the add latency for R rows. Their sums are added
// at the end, so that the order of a row's sums depends on the number of rows unless `invariant` is
// set.
constexpr int chains(int rows, int steps, bool invariant) {
    const int count = invariant || rows >= 4 ? 1 : rows >= 2 ? 2 : 4;
    return count < steps ? count : steps;
}

// Scale the sums of R rows and add them to their totals.
template <int CHAINS, int R, int VECTORS>
INLINE void add_scaled(const Floats (&parts)[CHAINS][R][VECTORS], const float* sums, int64_t column,
                       float* totals, const Workspace& w) {
    const float *scales = w.scales, *zeros = w.zeros;
#pragma GCC unroll 16  // otherwise the sums spill to memory
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            const int64_t at = column + v * WIDTH;
            float* total = totals + r * CHUNK_OUTPUTS + at;
            Floats all = parts[0][r][v];
#pragma GCC unroll 4
            for (int c = 1; c < CHAINS; c++) all += parts[c][r][v];
            all = fma(all, load(scales + at), load(total));
            store(total, fma(load(zeros + at), broadcast(sums[r]), all));
        }
}

// Multiply R rows from `row` on of the panel by a group, unpacking in registers.
template <class Operands, class Format, int R, bool INVARIANT>
INLINE void add_packed(const PackedInput& p, const TilePair<Format>& pair, int64_t words, int64_t g,
                       int64_t row, const Workspace& w) {
    constexpr int STEPS = Format::unit_inputs / Operands::inputs, CHAINS = chains(R, STEPS, INVARIANT);
    constexpr int VECTORS = register_vectors(R, INVARIANT);
    for (int64_t column = 0; column < CHUNK_OUTPUTS; column += VECTORS * WIDTH) {
        const uint32_t* x = p.x + (g * p.rows + row) * p.steps;
        PrefetchedWords from[VECTORS];
        for (int v = 0; v < VECTORS; v++) from[v] = pair.words(column + v * WIDTH, row == 0);
        Floats parts[CHAINS][R][VECTORS] = {};
        for (int64_t n = 0; n < words / Format::unit_words; n++, x += STEPS * R) {
            PackedUnit<Format> unit[VECTORS];
            for (int v = 0; v < VECTORS; v++)
                unit[v] = from[v].template unit<Format, R <= MEMORY_BOUND_ROWS>(n);
#pragma GCC unroll 8  // shares the common work of a unit's steps
            for (int s = 0; s < STEPS; s++) {
                Words values[VECTORS];
                for (int v = 0; v < VECTORS; v++)
                    values[v] = Operands::template values<Format>(unit[v], s);
                for (int r = 0; r < R; r++) {
                    const auto element = Operands::broadcast_x(x[s * R + r]);
                    for (int v = 0; v < VECTORS; v++) {
                        Floats& to = parts[s % CHAINS][r][v];
                        to = Operands::multiply_add(to, values[v], element);
                    }
                }
            }
        }
        add_scaled<CHAINS, R, VECTORS>(parts, p.sums + g * p.rows + row, column,
                                       w.totals + row * CHUNK_OUTPUTS, w);
    }
}

// The same with quantized values from the buffer.
template <class Operands, int R, bool INVARIANT>
NOINLINE void add_unpacked(const PackedInput& p, int64_t steps, int64_t g, int64_t row,
                           const Workspace& w) {
    constexpr int CHAINS = chains(R, 2, INVARIANT), VECTORS = register_vectors(R, INVARIANT);
    const uint32_t* x = p.x + (g * p.rows + row) * p.steps;
    for (int64_t column = 0; column < CHUNK_OUTPUTS; column += VECTORS * WIDTH) {
        Floats parts[CHAINS][R][VECTORS] = {};
        for (int64_t step = 0; step < steps; step += CHAINS)
            for (int c = 0; c < CHAINS; c++) {
                Words values[VECTORS];
                for (int v = 0; v < VECTORS; v++)
                    values[v] =
                        load_raw<Words>(w.values + (step + c) * CHUNK_OUTPUTS + column + v * WIDTH);
                for (int r = 0; r < R; r++) {
                    const auto element = Operands::broadcast_x(x[(step + c) * R + r]);
                    for (int v = 0; v < VECTORS; v++)
                        parts[c][r][v] = Operands::multiply_add(parts[c][r][v], values[v], element);
                }
            }
        add_scaled<CHAINS, R, VECTORS>(parts, p.sums + g * p.rows + row, column,
                                       w.totals + row * CHUNK_OUTPUTS, w);
    }
}

using AddGroups = void (*)(const Matrix&, const MatrixBlocks&, int64_t tile, int64_t rows,
                           const PackedInput&, const Workspace&);

// Compute the totals of up to two tiles for a panel with `rows` valid rows.
template <class Operands, class Format, bool INVARIANT>
void add_groups(const Matrix& matrix, const MatrixBlocks& m, int64_t tile, int64_t rows,
                const PackedInput& p, const Workspace& w) {
    const int64_t all = tiles_of(matrix), steps = m.group / Operands::inputs;
    const int64_t tiles = all - tile < 2 ? all - tile : 2;
    const CacheLevel to = cache_of_weights(rows <= REGISTER_ROWS);
    std::memset(w.totals, 0, static_cast<size_t>(rows * CHUNK_OUTPUTS) * sizeof(float));
    for (int64_t g = 0; g < m.groups; g++) {
        const TilePair<Format> pair = load_group<Operands, Format>(m, tile, tiles, g, to, w);
        if (rows <= max_register_rows<Operands, Format>()) {
            for_register_rows(rows, [&](auto count, int64_t row) ALWAYS_INLINE {
                add_packed<Operands, Format, decltype(count)::value, INVARIANT>(p, pair, m.words, g, row,
                                                                                w);
            });
            continue;
        }
        unpack<Operands, Format>(pair, m.words, w);
        for_register_rows(rows, [&](auto count, int64_t row) ALWAYS_INLINE {
            add_unpacked<Operands, decltype(count)::value, INVARIANT>(p, steps, g, row, w);
        });
    }
}

// Dequantize a part to floats [register blocks, MATMUL_DEPTH, FLOAT_BLOCK_OUTPUTS], including the
// padding of the last group.
template <class Format>
void dequantize(const MatrixBlocks& blocks, const PanelExtent& part, float* to) {
    const int64_t first = part.input / blocks.group, end = part.input + part.inputs;
    for (int64_t o = 0; o < part.outputs; o += MATRIX_TILE)
        for (int64_t g = first; g * blocks.group < end; g++) {
            const uint8_t* block = blocks.at((part.output + o) / MATRIX_TILE, g);
            for (int64_t i = 0; i < MATRIX_TILE; i += WIDTH) {
                const int64_t column = o + i;
                float* const target =
                    to + column / FLOAT_BLOCK_OUTPUTS * MATMUL_DEPTH * FLOAT_BLOCK_OUTPUTS +
                    (g - first) * blocks.group * FLOAT_BLOCK_OUTPUTS + column % FLOAT_BLOCK_OUTPUTS;
                const Floats scale = Format::scales(block, i), zero = Format::zeros(block, i);
                for (int64_t n = 0; n < blocks.words / Format::unit_words; n++) {
                    const PackedUnit<Format> unit = load_unit<Format>(block, n, i);
#pragma GCC unroll 8
                    for (int s = 0; s < Format::unit_inputs; s++)
                        store(
                            target + (n * Format::unit_inputs + s) * FLOAT_BLOCK_OUTPUTS,
                            fma(scale, bit_cast<Floats>(FloatOperands::values<Format>(unit, s)), zero));
                }
            }
        }
}

// Dequantized floats of a matrix.
struct QuantizedWeights {
    using Dequantize = void (*)(const MatrixBlocks&, const PanelExtent&, float*);
    const QuantizedLinear& args;
    const MatrixBlocks blocks;
    const Dequantize dequantize_part;

    explicit QuantizedWeights(const QuantizedLinear& args)
        : args(args), blocks(args.matrix),
          dequantize_part(by_format(
              args.matrix, [](auto format) -> Dequantize { return dequantize<decltype(format)>; })) {}
    bool supports() const { return MATMUL_DEPTH % blocks.group == 0; }
    int64_t outputs() const { return args.matrix.outputs; }

    void unpack(const PanelExtent& part, float* to) const { dequantize_part(blocks, part, to); }

    // Prefetch a share of the next part. The hardware prefetcher cannot predict the first blocks of
    // the next outputs.
    INLINE void prefetch(const PanelExtent& part, int64_t share, int64_t shares) const {
        const int64_t next = (part.input + MATMUL_DEPTH) / blocks.group;
        const bool more = next < blocks.groups;
        const int64_t tile = (part.output + (more ? 0 : part.outputs)) / MATRIX_TILE;
        const int64_t tiles = (part.outputs + MATRIX_TILE - 1) / MATRIX_TILE;
        const int64_t bytes = MATMUL_DEPTH / blocks.group * blocks.block_bytes;
        for (int64_t t = tiles * share / shares; t < tiles * (share + 1) / shares; t++)
            for (int64_t byte = 0; byte < bytes; byte += 64)
                ISA::prefetch(blocks.at(tile + t, more ? next : 0) + byte, L2);
    }
};

// Compute all matmuls of a chain that share x.
template <class Operands, class T>
int vector_matmul(const QuantizedLinear& args) {
    const MatrixBlocks m(args.matrix);
    const AddGroups add = by_format(args.matrix, [&](auto format) -> AddGroups {
        return args.invariant ? add_groups<Operands, decltype(format), true>
                              : add_groups<Operands, decltype(format), false>;
    });
    const int64_t max_rows = args.rows < MATMUL_ROWS ? args.rows : MATMUL_ROWS;
    PackedInput p{nullptr, nullptr, max_rows, m.group / Operands::inputs};
    const int64_t size = max_rows * CHUNK_OUTPUTS + p.steps * CHUNK_OUTPUTS + 2 * CHUNK_OUTPUTS;
    const Buffer<uint32_t> x = allocate<uint32_t>(m.groups * max_rows * (p.steps + 1));
    const Buffer<float> workspace = allocate<float>(args.threads * size);
    if (!x || !workspace) return NO_MEMORY;
    p.x = x.get(), p.sums = reinterpret_cast<float*>(p.x + m.groups * max_rows * p.steps);
    for (int64_t first = 0; first < args.rows; first += MATMUL_ROWS) {
        const int64_t rows = args.rows - first < MATMUL_ROWS ? args.rows - first : MATMUL_ROWS;
        p.rows = rows;
        pack_input<Operands, T, REGISTER_ROWS>(args, m, first, rows, p);
#pragma omp parallel num_threads(args.threads)
        {
            Workspace w{};
            w.totals = workspace.get() + thread_index() * size;
            w.values = reinterpret_cast<uint32_t*>(w.totals + max_rows * CHUNK_OUTPUTS);
            w.scales = w.totals + max_rows * CHUNK_OUTPUTS + p.steps * CHUNK_OUTPUTS;
            w.zeros = w.scales + CHUNK_OUTPUTS;
            for (const QuantizedLinear* matmul = &args; matmul; matmul = matmul->next) {
                const MatrixBlocks blocks(matmul->matrix);
                const int64_t chunks = (tiles_of(matmul->matrix) + 1) / 2;
#pragma omp for schedule(static) nowait
                for (int64_t tile = 0; tile < 2 * chunks; tile += 2) {
                    add(matmul->matrix, blocks, tile, rows, p, w);
                    store_columns<T>(*matmul, tile * MATRIX_TILE, CHUNK_OUTPUTS, first, rows, w.totals);
                }
            }
        }
    }
    return DONE;
}

#if defined(__AVX512BF16__)
using NativeOperands = PairOperands;
#else
using NativeOperands = FloatOperands;
#endif

// If `invariant` is set, the arithmetic of a row is the same for all numbers of rows.
template <class T>
int quantized_matmul(const QuantizedLinear& args) {
#if defined(HAS_AMX_TILES)
    if (args.invariant || args.rows > QUANTIZED_VECTOR_ROWS)
        return by_format(args.matrix, [&](auto format) { return tiled_matmul<decltype(format)>(args); });
#endif
    // For many rows, dequantizing once to floats costs less than scaling the sums of each group.
    if constexpr (NativeOperands::inputs == 1)
        if (!args.invariant && args.rows >= MIN_FLOAT_MATMUL_ROWS && QuantizedWeights(args).supports())
            return float_matmul<T, QuantizedWeights>(args, args.matrix.inputs);
    return vector_matmul<NativeOperands, T>(args);
}

}  // namespace

int linear_quantized(const QuantizedLinear& args) {
    if (!same_format(args)) return INVALID;
    BY_DTYPE(quantized_matmul)
}

}  // namespace ISA
