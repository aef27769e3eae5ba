// linear_int8: integer matmuls of quantized matrices with inputs quantized to 8 bits.
//
// Outputs are the lanes of vectors. Shifts and masks extract bytes of four quantized values of an
// output. They are multiplied with four quantized inputs in the same order: see int8_dots.h for
// AVX-VNNI and AVX512_VNNI, and int8_pairs.h for other instruction sets.
#include "int8_input.h"

#if defined(INT8_DOT)
#include "int8_dots.h"
#else
#include "int8_pairs.h"
#endif

namespace ISA {
namespace {

constexpr int64_t ROUNDED_ROWS = 64;  // rows of x that stay in the L1 cache with their totals

using RoundedTiles = void (*)(const Blocks&, int64_t tile, int64_t tiles, const QuantizedInput&,
                              float* totals);

// Compute all matmuls of a chain that share x.
template <class T>
int multiply(const QuantizedLinear& a) {
    const RoundedTiles multiply = by_format(a.matrix, [](auto format) -> RoundedTiles {
        if constexpr (std::is_same_v<decltype(format), Float12>)
            return nullptr;  // its codes are not integers
        else
            return multiply_tiles<decltype(format)>;
    });
    if (!multiply) return INVALID;
    const Blocks m(a.matrix);
    const int64_t max_rows = a.rows < ROUNDED_ROWS ? a.rows : ROUNDED_ROWS;
    QuantizedInput p{nullptr, nullptr, nullptr, max_rows, m.group / 4};
    const Memory<uint32_t> quantized = memory<uint32_t>(m.groups * max_rows * p.words);
    const Memory<float> floats = memory<float>(2 * max_rows * m.groups);
    if (!quantized || !floats) return NO_MEMORY;
    p.quantized = quantized.get(), p.steps = floats.get(), p.sums = p.steps + m.groups * max_rows;
    for (int64_t first = 0; first < a.rows; first += ROUNDED_ROWS) {
        const int64_t left = a.rows - first;
        p.rows = left < max_rows ? left : max_rows;
#pragma omp parallel num_threads(a.threads)
        {
            quantize_rows<T>(a, m, first, p);
            alignas(64) float totals[ROUNDED_ROWS * TOGETHER];
            for (const QuantizedLinear* matmul = &a; matmul; matmul = matmul->next) {
                const Blocks blocks(matmul->matrix);
                const int64_t tiles = tiles_of(matmul->matrix);
#pragma omp for schedule(static) nowait
                for (int64_t tile = 0; tile < tiles; tile += TILES_TOGETHER) {
                    multiply(blocks, tile, tiles, p, totals);
                    put_columns<T>(*matmul, tile * MATRIX_TILE, TOGETHER, first, p.rows, totals);
                }
            }
        }
    }
    return DONE;
}

}  // namespace

int linear_int8(const QuantizedLinear& a) {
    if (!same_format(a)) return INVALID;
    BY_DTYPE(multiply)
}

}  // namespace ISA
