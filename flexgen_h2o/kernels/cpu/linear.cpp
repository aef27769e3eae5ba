// linear_skinny: matmuls of bfloat16 weights, read once, by few rows of bfloat16.
//
// Vectors run along the inputs, so weights and x are used in their memory layout. A register block has
// REGISTER_OUTPUTS rows of weights and up to REGISTER_ROWS rows of x. The first pass over a block of
// outputs reads it from memory. Passes for more rows read it from the cache, part by part. All passes
// prefetch the next block. With AMX, more rows use tiles: see linear_amx.h, which also defines
// linear_tiled. A row's sums have one order for all numbers of rows that use vectors, and one for all
// that use tiles.
#include "kernels.h"
#include "linear_amx.h"
#include "memory.h"
#include "prefetch.h"

namespace ISA {
namespace {

constexpr int REGISTER_ROWS = 4;             // maximum rows of x in the register block
constexpr int64_t PREFETCH_ELEMENTS = 8192;  // minimum prefetch distance in elements of weights
#if defined(__AVX512F__)
constexpr int REGISTER_OUTPUTS = 4;
constexpr int64_t L1_INPUTS = 1024;  // inputs whose x, for all rows, stays in the L1 cache
#else
constexpr int REGISTER_OUTPUTS = 2;     // limited by 16 registers
constexpr int64_t L1_INPUTS = 1 << 30;  // all inputs: arithmetic is the bottleneck, not the cache
#endif
constexpr int64_t FEW_PASSES = 2;  // up to this many are memory-bound and not split by inputs

#if defined(__AVX512BF16__)
// Sums of pairs of bfloat16, which AVX512_BF16 multiplies directly. PAIRED_ROWS rows of x are computed
// in pairs. Up to MEMORY_BOUND_ROWS rows are memory-bound.
struct Operands {
    using Element = bf16;
    using Vector = __m512bh;
    static constexpr int64_t VECTOR_INPUTS = 2 * WIDTH, PAIRED_ROWS = REGISTER_ROWS,
                             MEMORY_BOUND_ROWS = 2 * REGISTER_ROWS;
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
    static constexpr int64_t VECTOR_INPUTS = WIDTH, PAIRED_ROWS = 0, MEMORY_BOUND_ROWS = REGISTER_ROWS;
    static INLINE Vector weights(const bf16* from) { return load(from); }
    static INLINE Vector inputs(const float* from) { return load(from); }
    static INLINE Floats add(Floats sum, Vector a, Vector b) { return fma(a, b, sum); }
};
INLINE void copy_row(const bf16* from, int64_t count, float* to) {
    for (int64_t i = 0; i < count; i++) to[i] = load_one(from + i);
}
#endif
using Element = Operands::Element;
constexpr int64_t VECTOR_INPUTS = Operands::VECTOR_INPUTS;

// sums [R][M] += M rows of weights by R rows of x. Meanwhile prefetch M rows at `prefetched`, each
// line once, or TWICE (prefetch.h).
template <int M, int R, bool TWICE>
INLINE void matmul_block(const bf16* weights, int64_t weight_row, const Element* x, int64_t x_row,
                         int64_t inputs, const bf16* const* prefetched, Floats* sums) {
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
    for (; k + VECTOR_INPUTS <= inputs; k += VECTOR_INPUTS) {
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) {
            prefetch(prefetched[m] + k, L2);
            if (TWICE) prefetch(prefetched[m] + k + VECTOR_INPUTS / 2, L2);
        }
        step(weights + k, weight_row, k);
    }
    if (k < inputs) {
        bf16 rest[M * VECTOR_INPUTS] = {};
        for (int m = 0; m < M; m++)
            std::memcpy(rest + m * VECTOR_INPUTS, weights + m * weight_row + k,
                        static_cast<size_t>(inputs - k) * sizeof *rest);
        step(rest, VECTOR_INPUTS, k);
    }
#pragma GCC unroll 16  // otherwise the sums spill to memory
    for (int n = 0; n < R * M; n++) sums[n] = all[n / M][n % M];
}

// Compute M outputs from `first` on.
template <int M>
void compute_outputs(const Linear& args, const Element* x, int64_t x_row, int64_t first) {
    const bf16* weights = static_cast<const bf16*>(args.weight) + first * args.weight_row;
    const bf16* bias = args.bias ? static_cast<const bf16*>(args.bias) + first : nullptr;
    const int64_t rows_per_pass = args.rows == Operands::PAIRED_ROWS ? REGISTER_ROWS / 2 : REGISTER_ROWS;
    const int64_t passes = (args.rows + rows_per_pass - 1) / rows_per_pass;
    const int64_t part = passes > FEW_PASSES ? L1_INPUTS : args.inputs;
    // Prefetch distance in rows. A row stride of 0 is valid.
    const int64_t ahead =
        (1 + PREFETCH_ELEMENTS / (args.weight_row ? M * args.weight_row : PREFETCH_ELEMENTS)) * M;
    Floats all[SKINNY_ROWS * M];
    std::memset(all, 0, static_cast<size_t>(args.rows * M) * sizeof *all);
    for (int64_t begin = 0; begin < args.inputs; begin += part) {
        const int64_t inputs = args.inputs - begin < part ? args.inputs - begin : part;
        for (int64_t pass = 0; pass < passes; pass++) {
            const int64_t row = pass * rows_per_pass, rows = args.rows - row;
            const bf16* prefetched[M];  // each pass prefetches its part of a block
            for (int m = 0; m < M; m++)
                prefetched[m] = weights + (ahead + (pass + m * passes) % M) * args.weight_row + begin;
            const auto multiply = [&](auto count) {
                constexpr int R = decltype(count)::value;
                const auto function = args.rows > Operands::MEMORY_BOUND_ROWS ? matmul_block<M, R, false>
                                                                              : matmul_block<M, R, true>;
                function(weights + begin, args.weight_row, x + row * x_row + begin, x_row, inputs,
                         prefetched, all + row * M);
            };
            switch (rows < rows_per_pass ? rows : rows_per_pass) {
                case 1: multiply(Constant<1>{}); break;
                case 2: multiply(Constant<2>{}); break;
                case 3: multiply(Constant<3>{}); break;
                default: multiply(Constant<REGISTER_ROWS>{});
            }
        }
    }
    for (int64_t row = 0; row < args.rows; row++) {
        float sums[M];
        if constexpr (M == 4)
            ISA::sums(all + row * M, sums);
        else
            for (int m = 0; m < M; m++) sums[m] = sum(all[row * M + m]);
        store_outputs(sums, bias, static_cast<bf16*>(args.out) + row * args.out_row + first, M,
                      args.add);
    }
}

}  // namespace

// Compute all matmuls of a chain that share x.
int linear_skinny(const Linear& args) {
    for (const Linear* matmul = args.next; matmul; matmul = matmul->next)
        if (matmul->rows != args.rows || matmul->inputs != args.inputs) return INVALID;
    if (args.rows > SKINNY_ROWS) return INVALID;
#if defined(HAS_AMX_TILES)
    if (args.rows > LINEAR_VECTOR_ROWS) return tiled_linear(args);
#endif
    // A row is padded by one cache line to avoid conflicts in L1.
    const int64_t x_row = round_up(args.inputs, VECTOR_INPUTS) + VECTOR_INPUTS;
    const Buffer<Element> x = allocate<Element>(args.rows * x_row);
    if (!x) return NO_MEMORY;
    std::memset(x.get(), 0, static_cast<size_t>(args.rows * x_row) * sizeof(Element));
    for (int64_t row = 0; row < args.rows; row++)
        copy_row(static_cast<const bf16*>(args.x) + row * args.x_row, args.inputs,
                 x.get() + row * x_row);
#pragma omp parallel num_threads(args.threads)
    for (const Linear* matmul = &args; matmul; matmul = matmul->next) {
        const int64_t blocks = matmul->outputs / REGISTER_OUTPUTS;
#pragma omp for schedule(static) nowait
        for (int64_t block = 0; block < blocks; block++)
            compute_outputs<REGISTER_OUTPUTS>(*matmul, x.get(), x_row, block * REGISTER_OUTPUTS);
#pragma omp single nowait
        for (int64_t rest = blocks * REGISTER_OUTPUTS; rest < matmul->outputs; rest++)
            compute_outputs<1>(*matmul, x.get(), x_row, rest);
    }
    return DONE;
}

int linear_tiled(const Linear& args) {
#if defined(HAS_AMX_TILES)
    for (const Linear* matmul = args.next; matmul; matmul = matmul->next)
        if (matmul->rows != args.rows || matmul->inputs != args.inputs) return INVALID;
    return args.rows > SKINNY_ROWS ? tile_matmul<PlainPanels>(args, args.inputs, 1) : tiled_linear(args);
#else
    (void)args;
    return INVALID;
#endif
}

}  // namespace ISA
