// linear_quantized: matmuls with quantized matrices.
//
// Outputs are the lanes of vectors. So blocks are read sequentially in their layout, without sums
// across lanes. Sums of quantized values by x are scaled group by group. Conversion to pairs of
// bfloat16 takes place in registers, next to the matmul. Conversion to floats costs more, so it is done
// once per panel of rows, into a buffer in L1.
#include "float_tiles.h"
#include "outputs.h"
#include "packed_input.h"
#include "product_tiles.h"

namespace ISA {
namespace {

constexpr int64_t FLOAT_MATMUL_ROWS = 64;  // minimum rows for dequantized float matmuls
static_assert(COLUMNS == 2 * MATRIX_TILE && COLUMNS % (2 * WIDTH) == 0, "two tiles");

// A group of two tiles. An odd last tile is paired with itself.
template <class C>
struct Pair {
    PrefetchedBlock<C> tiles[2];
    INLINE PrefetchedWords words(int64_t column, bool first) const {
        return tiles[column / MATRIX_TILE].words(column % MATRIX_TILE, first);
    }
};

// Return a group and convert its scales and zero points to floats.
template <class A, class C>
INLINE Pair<C> group_of(const Blocks& m, int64_t tile, int64_t tiles, int64_t g, CacheLevel to,
                        const Workspace& w) {
    Pair<C> pair;
    for (int64_t t = 0; t < 2; t++) {
        const int64_t source_tile = t < tiles ? tile + t : tile;
        pair.tiles[t] = PrefetchedBlock<C>::of(m, source_tile, g, 2, to);
        const uint8_t* block = pair.tiles[t].block;
        for (int64_t i = 0; i < MATRIX_TILE; i += WIDTH) {
            const Floats scale = C::scales(block, i), zero = C::zeros(block, i);
            store(w.scales + t * MATRIX_TILE + i, scale);
            store(w.zeros + t * MATRIX_TILE + i,
                  fma(scale, broadcast(-A::template shift<C>()), zero));
        }
    }
    return pair;
}

// Unpack the quantized values of a group to the buffer.
template <class A, class C>
INLINE void unpack(const Pair<C>& pair, int64_t words, const Workspace& w) {
    constexpr int STEPS = C::unit_inputs / A::inputs;
    for (int64_t column = 0; column < COLUMNS; column += WIDTH) {
        const PrefetchedWords source = pair.words(column, true);
        for (int64_t n = 0; n < words / C::unit_words; n++) {
            const PackedUnit<C> unit = source.unit<C, false>(n);
#pragma GCC unroll 8
            for (int s = 0; s < STEPS; s++)
                store_words(w.values + (n * STEPS + s) * COLUMNS + column,
                            A::template values<C>(unit, s));
        }
    }
}

// Maximum rows for which quantized values are unpacked in registers. More rows read them from the
// buffer.
template <class A, class C>
constexpr int64_t max_register_rows() {
    if (A::inputs == 1) return ROWS;
    return shifted<C>() ? 8 * ROWS : 2 * ROWS;
}

// Return the vectors of outputs in the register block for R rows. With one chain of sums, more vectors
// hide the add latency.
constexpr int vectors(int rows, bool invariant) {
    return invariant && rows <= 2 && COLUMNS % (4 * WIDTH) == 0 ? 4 : 2;
}

// Return the number of accumulator chains that hide the add latency for R rows. Their sums are added at
// the end, so that the order of a row's sums depends on the number of rows unless `invariant` is set.
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
            float* total = totals + r * COLUMNS + at;
            Floats all = parts[0][r][v];
#pragma GCC unroll 4
            for (int c = 1; c < CHAINS; c++) all += parts[c][r][v];
            all = fma(all, load(scales + at), load(total));
            store(total, fma(load(zeros + at), broadcast(sums[r]), all));
        }
}

// Multiply R rows from `row` on of the panel by a group, unpacking in registers.
template <class A, class C, int R, bool INVARIANT>
INLINE void add_words(const PackedInput& p, const Pair<C>& pair, int64_t words, int64_t g, int64_t row,
                      const Workspace& w) {
    constexpr int STEPS = C::unit_inputs / A::inputs, CHAINS = chains(R, STEPS, INVARIANT);
    constexpr int VECTORS = vectors(R, INVARIANT);
    for (int64_t column = 0; column < COLUMNS; column += VECTORS * WIDTH) {
        const uint32_t* x = p.x + (g * p.rows + row) * p.steps;
        PrefetchedWords from[VECTORS];
        for (int v = 0; v < VECTORS; v++) from[v] = pair.words(column + v * WIDTH, row == 0);
        Floats parts[CHAINS][R][VECTORS] = {};
        for (int64_t n = 0; n < words / C::unit_words; n++, x += STEPS * R) {
            PackedUnit<C> unit[VECTORS];
            for (int v = 0; v < VECTORS; v++)
                unit[v] = from[v].template unit<C, R <= MEMORY_BOUND_ROWS>(n);
#pragma GCC unroll 8  // shares the common work of a unit's steps
            for (int s = 0; s < STEPS; s++) {
                Words values[VECTORS];
                for (int v = 0; v < VECTORS; v++) values[v] = A::template values<C>(unit[v], s);
                for (int r = 0; r < R; r++) {
                    const auto element = A::broadcast_x(x[s * R + r]);
                    for (int v = 0; v < VECTORS; v++) {
                        Floats& to = parts[s % CHAINS][r][v];
                        to = A::add_product(to, values[v], element);
                    }
                }
            }
        }
        add_scaled<CHAINS, R, VECTORS>(parts, p.sums + g * p.rows + row, column,
                                       w.totals + row * COLUMNS, w);
    }
}

// The same with quantized values from the buffer.
template <class A, int R, bool INVARIANT>
NOINLINE void add_values(const PackedInput& p, int64_t steps, int64_t g, int64_t row,
                         const Workspace& w) {
    constexpr int CHAINS = chains(R, 2, INVARIANT), VECTORS = vectors(R, INVARIANT);
    const uint32_t* x = p.x + (g * p.rows + row) * p.steps;
    for (int64_t column = 0; column < COLUMNS; column += VECTORS * WIDTH) {
        Floats parts[CHAINS][R][VECTORS] = {};
        for (int64_t step = 0; step < steps; step += CHAINS)
            for (int c = 0; c < CHAINS; c++) {
                Words values[VECTORS];
                for (int v = 0; v < VECTORS; v++)
                    values[v] = load_words(w.values + (step + c) * COLUMNS + column + v * WIDTH);
                for (int r = 0; r < R; r++) {
                    const auto element = A::broadcast_x(x[(step + c) * R + r]);
                    for (int v = 0; v < VECTORS; v++)
                        parts[c][r][v] = A::add_product(parts[c][r][v], values[v], element);
                }
            }
        add_scaled<CHAINS, R, VECTORS>(parts, p.sums + g * p.rows + row, column,
                                       w.totals + row * COLUMNS, w);
    }
}

using AddGroups = void (*)(const Matrix&, const Blocks&, int64_t tile, int64_t rows, const PackedInput&,
                           const Workspace&);

// Compute the totals of up to two tiles for a panel with `rows` valid rows.
template <class A, class C, bool INVARIANT>
void add_groups(const Matrix& matrix, const Blocks& m, int64_t tile, int64_t rows, const PackedInput& p,
                const Workspace& w) {
    const int64_t all = tiles_of(matrix), steps = m.group / A::inputs;
    const int64_t tiles = all - tile < 2 ? all - tile : 2;
    const CacheLevel to = cache_of_weights(rows <= ROWS);
    std::memset(w.totals, 0, static_cast<size_t>(rows * COLUMNS) * sizeof(float));
    for (int64_t g = 0; g < m.groups; g++) {
        const Pair<C> pair = group_of<A, C>(m, tile, tiles, g, to, w);
        if (rows <= max_register_rows<A, C>()) {
            by_rows(rows, [&](auto count, int64_t row) ALWAYS_INLINE {
                add_words<A, C, decltype(count)::value, INVARIANT>(p, pair, m.words, g, row, w);
            });
            continue;
        }
        unpack<A, C>(pair, m.words, w);
        by_rows(rows, [&](auto count, int64_t row) ALWAYS_INLINE {
            add_values<A, decltype(count)::value, INVARIANT>(p, steps, g, row, w);
        });
    }
}

// Dequantize a part to floats [register blocks, DEPTH, BLOCK_OUTPUTS], including the padding of the last
// group.
template <class C>
void dequantize(const Blocks& blocks, const Extent& part, float* to) {
    const int64_t first = part.input / blocks.group, end = part.input + part.inputs;
    for (int64_t o = 0; o < part.outputs; o += MATRIX_TILE)
        for (int64_t g = first; g * blocks.group < end; g++) {
            const uint8_t* block = blocks.at((part.output + o) / MATRIX_TILE, g);
            for (int64_t i = 0; i < MATRIX_TILE; i += WIDTH) {
                const int64_t column = o + i;
                float* const target = to + column / BLOCK_OUTPUTS * DEPTH * BLOCK_OUTPUTS +
                                    (g - first) * blocks.group * BLOCK_OUTPUTS + column % BLOCK_OUTPUTS;
                const Floats scale = C::scales(block, i), zero = C::zeros(block, i);
                for (int64_t n = 0; n < blocks.words / C::unit_words; n++) {
                    const PackedUnit<C> unit = load_unit<C>(block, n, i);
#pragma GCC unroll 8
                    for (int s = 0; s < C::unit_inputs; s++)
                        store(target + (n * C::unit_inputs + s) * BLOCK_OUTPUTS,
                              fma(scale, bits_of<Floats>(Single::values<C>(unit, s)), zero));
                }
            }
        }
}

// Dequantized floats of a matrix.
struct QuantizedWeights {
    using Dequantize = void (*)(const Blocks&, const Extent&, float*);
    const QuantizedLinear& a;
    const Blocks blocks;
    const Dequantize dequantize_part;

    explicit QuantizedWeights(const QuantizedLinear& a)
        : a(a), blocks(a.matrix), dequantize_part(by_format(a.matrix, [](auto format) -> Dequantize {
              return dequantize<decltype(format)>;
          })) {}
    bool suits() const { return DEPTH % blocks.group == 0; }
    int64_t outputs() const { return a.matrix.outputs; }

    void unpack(const Extent& part, float* to) const { dequantize_part(blocks, part, to); }

    // Prefetch a share of the next part. The hardware prefetcher cannot predict the first blocks of the
    // next outputs.
    INLINE void prefetch(const Extent& part, int64_t share, int64_t shares) const {
        const int64_t next = (part.input + DEPTH) / blocks.group;
        const bool more = next < blocks.groups;
        const int64_t tile = (part.output + (more ? 0 : part.outputs)) / MATRIX_TILE;
        const int64_t tiles = (part.outputs + MATRIX_TILE - 1) / MATRIX_TILE;
        const int64_t bytes = DEPTH / blocks.group * blocks.block_bytes;
        for (int64_t t = tiles * share / shares; t < tiles * (share + 1) / shares; t++)
            for (int64_t byte = 0; byte < bytes; byte += 64)
                ISA::prefetch(blocks.at(tile + t, more ? next : 0) + byte, L2);
    }
};

// Compute all matmuls of a chain that share x.
template <class A, class T>
int product(const QuantizedLinear& a) {
    const Blocks m(a.matrix);
    const AddGroups add = by_format(a.matrix, [&](auto format) -> AddGroups {
        return a.invariant ? add_groups<A, decltype(format), true>
                           : add_groups<A, decltype(format), false>;
    });
    const int64_t max_rows = a.rows < PANEL_ROWS ? a.rows : PANEL_ROWS;
    PackedInput p{nullptr, nullptr, max_rows, m.group / A::inputs};
    const int64_t size = max_rows * COLUMNS + p.steps * COLUMNS + 2 * COLUMNS;
    const Memory<uint32_t> x = memory<uint32_t>(m.groups * max_rows * (p.steps + 1));
    const Memory<float> workspace = memory<float>(a.threads * size);
    if (!x || !workspace) return NO_MEMORY;
    p.x = x.get(), p.sums = reinterpret_cast<float*>(p.x + m.groups * max_rows * p.steps);
    for (int64_t first = 0; first < a.rows; first += PANEL_ROWS) {
        const int64_t rows = a.rows - first < PANEL_ROWS ? a.rows - first : PANEL_ROWS;
        p.rows = rows;
        pack_input<A, T, ROWS>(a, m, first, rows, p);
#pragma omp parallel num_threads(a.threads)
        {
            Workspace w{};
            w.totals = workspace.get() + thread_number() * size;
            w.values = reinterpret_cast<uint32_t*>(w.totals + max_rows * COLUMNS);
            w.scales = w.totals + max_rows * COLUMNS + p.steps * COLUMNS;
            w.zeros = w.scales + COLUMNS;
            for (const QuantizedLinear* matmul = &a; matmul; matmul = matmul->next) {
                const Blocks blocks(matmul->matrix);
                const int64_t chunks = (tiles_of(matmul->matrix) + 1) / 2;
#pragma omp for schedule(static) nowait
                for (int64_t tile = 0; tile < 2 * chunks; tile += 2) {
                    add(matmul->matrix, blocks, tile, rows, p, w);
                    put_columns<T>(*matmul, tile * MATRIX_TILE, COLUMNS, first, rows, w.totals);
                }
            }
        }
    }
    return DONE;
}

#if defined(__AVX512BF16__)
using Arithmetic = Pairs;
#else
using Arithmetic = Single;
#endif

// If `invariant` is set, the arithmetic of a row is the same for all numbers of rows.
template <class T>
int product_of(const QuantizedLinear& a) {
#if defined(TILES)
    if (a.invariant || a.rows > VECTOR_ROWS)
        return by_format(a.matrix, [&](auto format) { return tiled_matmul<decltype(format)>(a); });
#endif
    // For many rows, dequantizing once to floats costs less than scaling the sums of each group.
    if constexpr (Arithmetic::inputs == 1)
        if (!a.invariant && a.rows >= FLOAT_MATMUL_ROWS && QuantizedWeights(a).suits())
            return float_product<T, QuantizedWeights>(a, a.matrix.inputs);
    return product<Arithmetic, T>(a);
}

}  // namespace

int linear_quantized(const QuantizedLinear& a) {
    if (!same_format(a)) return INVALID;
    BY_DTYPE(product_of)
}

}  // namespace ISA
