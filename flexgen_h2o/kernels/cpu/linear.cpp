// linear_skinny: matmuls of bfloat16 weights, read once, by few rows of bfloat16.
//
// Vectors run along the inputs, so weights and x are used in their memory layout. A register block has
// OUTPUTS rows of weights and up to QUADS rows of x. The first pass over a block of outputs reads it
// from memory. Passes for more rows read it from the cache, part by part. All passes prefetch the next
// block. With AMX, more rows use tiles: see linear_tiles.h, which also defines linear_tiled. A row's sums
// have one order for all numbers of rows that use vectors, and one for all that use tiles.
#include "count.h"
#include "kernels.h"
#include "linear_tiles.h"
#include "memory.h"
#include "outputs.h"
#include "prefetch.h"

namespace ISA {
namespace {

constexpr int QUADS = 4;         // maximum rows of x in the register block
constexpr int64_t AHEAD = 8192;  // minimum prefetch distance in elements of weights
#if defined(__AVX512F__)
constexpr int OUTPUTS = 4;
constexpr int64_t PART = 1024;  // inputs whose x, for all rows, stays in the L1 cache
#else
constexpr int OUTPUTS = 2;         // limited by 16 registers
constexpr int64_t PART = 1 << 30;  // all inputs: arithmetic is the bottleneck, not the cache
#endif
constexpr int64_t FEW_PASSES = 2;  // up to this many are memory-bound and not split by inputs

#if defined(__AVX512BF16__)
// Sums of pairs of bfloat16, which AVX512_BF16 multiplies directly. PAIRED rows of x are computed in
// pairs. Up to MEMORY_BOUND_ROWS rows are memory-bound.
struct Operands {
    using Element = bf16;
    using Vector = __m512bh;
    static constexpr int64_t SIZE = 2 * WIDTH, PAIRED = QUADS, MEMORY_BOUND_ROWS = 2 * QUADS;
    static INLINE Vector weights(const bf16* from) { return load_raw<Vector>(from); }
    static INLINE Vector inputs(const bf16* from) { return load_raw<Vector>(from); }
    static INLINE Floats add(Floats sum, Vector a, Vector b) {
        return Floats(_mm512_dpbf16_ps(__m512(sum), a, b));
    }
};
INLINE void copy_row(const bf16* from, int64_t count, bf16* to) {
    std::memcpy(to, from, static_cast<size_t>(count) * sizeof *to);
}
#else
// A bfloat16 is the upper half of a float. x is converted once.
struct Operands {
    using Element = float;
    using Vector = Floats;
    static constexpr int64_t SIZE = WIDTH, PAIRED = 0, MEMORY_BOUND_ROWS = QUADS;
    static INLINE Vector weights(const bf16* from) { return load(from); }
    static INLINE Vector inputs(const float* from) { return load(from); }
    static INLINE Floats add(Floats sum, Vector a, Vector b) { return fma(a, b, sum); }
};
INLINE void copy_row(const bf16* from, int64_t count, float* to) {
    for (int64_t i = 0; i < count; i++) to[i] = load_one(from + i);
}
#endif
using Element = Operands::Element;
constexpr int64_t SIZE = Operands::SIZE;

// sums [R][M] += M rows of weights by R rows of x. Meanwhile prefetch M rows at `later`, each line
// once, or TWICE (prefetch.h).
template <int M, int R, bool TWICE>
INLINE void products(const bf16* weights, int64_t weight_row, const Element* x, int64_t x_row,
                     int64_t inputs, const bf16* const* later, Floats* sums) {
    Floats all[R][M];
#pragma GCC unroll 16
    for (int n = 0; n < R * M; n++) all[n / M][n % M] = sums[n];
    const auto step = [&](const bf16* from, int64_t stride, int64_t k) {
        Operands::Vector weight_vectors[M];
        for (int m = 0; m < M; m++) weight_vectors[m] = Operands::weights(from + m * stride);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const Operands::Vector input = Operands::inputs(x + r * x_row + k);
#pragma GCC unroll 4
            for (int m = 0; m < M; m++) all[r][m] = Operands::add(all[r][m], weight_vectors[m], input);
        }
    };
    int64_t k = 0;
    for (; k + SIZE <= inputs; k += SIZE) {
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) {
            prefetch(later[m] + k, L2);
            if (TWICE) prefetch(later[m] + k + SIZE / 2, L2);
        }
        step(weights + k, weight_row, k);
    }
    if (k < inputs) {
        bf16 rest[M * SIZE] = {};
        for (int m = 0; m < M; m++)
            std::memcpy(rest + m * SIZE, weights + m * weight_row + k,
                        static_cast<size_t>(inputs - k) * sizeof *rest);
        step(rest, SIZE, k);
    }
#pragma GCC unroll 16  // otherwise the sums spill to memory
    for (int n = 0; n < R * M; n++) sums[n] = all[n / M][n % M];
}

// Compute M outputs from `first` on.
template <int M>
void outputs(const Linear& a, const Element* x, int64_t x_row, int64_t first) {
    const bf16* weights = static_cast<const bf16*>(a.weight) + first * a.weight_row;
    const bf16* bias = a.bias ? static_cast<const bf16*>(a.bias) + first : nullptr;
    const int64_t together = a.rows == Operands::PAIRED ? QUADS / 2 : QUADS;
    const int64_t passes = (a.rows + together - 1) / together;
    const int64_t part = passes > FEW_PASSES ? PART : a.inputs;
    // Prefetch distance in rows. A row stride of 0 is valid.
    const int64_t ahead = (1 + AHEAD / (a.weight_row ? M * a.weight_row : AHEAD)) * M;
    Floats all[SKINNY_ROWS * M];
    std::memset(all, 0, static_cast<size_t>(a.rows * M) * sizeof *all);
    for (int64_t begin = 0; begin < a.inputs; begin += part) {
        const int64_t inputs = a.inputs - begin < part ? a.inputs - begin : part;
        for (int64_t pass = 0; pass < passes; pass++) {
            const int64_t row = pass * together, rows = a.rows - row;
            const bf16* later[M];  // each pass prefetches its part of a block
            for (int m = 0; m < M; m++)
                later[m] = weights + (ahead + (pass + m * passes) % M) * a.weight_row + begin;
            const auto multiply = [&](auto count) {
                constexpr int R = decltype(count)::value;
                const auto function = a.rows > Operands::MEMORY_BOUND_ROWS ? products<M, R, false>
                                                                    : products<M, R, true>;
                function(weights + begin, a.weight_row, x + row * x_row + begin, x_row, inputs,
                         later, all + row * M);
            };
            switch (rows < together ? rows : together) {
                case 1: multiply(Count<1>{}); break;
                case 2: multiply(Count<2>{}); break;
                case 3: multiply(Count<3>{}); break;
                default: multiply(Count<QUADS>{});
            }
        }
    }
    for (int64_t row = 0; row < a.rows; row++) {
        float sums[M];
        if constexpr (M == 4)
            ISA::sums(all + row * M, sums);
        else
            for (int m = 0; m < M; m++) sums[m] = sum(all[row * M + m]);
        put_outputs(sums, bias, static_cast<bf16*>(a.out) + row * a.out_row + first, M, a.add);
    }
}

}  // namespace

// Compute all matmuls of a chain that share x.
int linear_skinny(const Linear& a) {
    for (const Linear* matmul = a.next; matmul; matmul = matmul->next)
        if (matmul->rows != a.rows || matmul->inputs != a.inputs) return INVALID;
    if (a.rows > SKINNY_ROWS) return INVALID;
#if defined(TILES)
    if (a.rows > VECTOR_ROWS) return tiled_linear(a);
#endif
    // A row is padded by one cache line to avoid conflicts in L1.
    const int64_t x_row = (a.inputs + SIZE - 1) / SIZE * SIZE + SIZE;
    const Memory<Element> x = memory<Element>(a.rows * x_row);
    if (!x) return NO_MEMORY;
    std::memset(x.get(), 0, static_cast<size_t>(a.rows * x_row) * sizeof(Element));
    for (int64_t row = 0; row < a.rows; row++)
        copy_row(static_cast<const bf16*>(a.x) + row * a.x_row, a.inputs, x.get() + row * x_row);
#pragma omp parallel num_threads(a.threads)
    for (const Linear* matmul = &a; matmul; matmul = matmul->next) {
        const int64_t blocks = matmul->outputs / OUTPUTS;
#pragma omp for schedule(static) nowait
        for (int64_t block = 0; block < blocks; block++)
            outputs<OUTPUTS>(*matmul, x.get(), x_row, block * OUTPUTS);
#pragma omp single nowait
        for (int64_t rest = blocks * OUTPUTS; rest < matmul->outputs; rest++)
            outputs<1>(*matmul, x.get(), x_row, rest);
    }
    return DONE;
}

int linear_tiled(const Linear& a) {
#if defined(TILES)
    for (const Linear* matmul = a.next; matmul; matmul = matmul->next)
        if (matmul->rows != a.rows || matmul->inputs != a.inputs) return INVALID;
    return a.rows > SKINNY_ROWS ? tile_matmul<PlainPanels>(a, a.inputs, 1) : tiled_linear(a);
#else
    (void)a;
    return INVALID;
#endif
}

}  // namespace ISA
