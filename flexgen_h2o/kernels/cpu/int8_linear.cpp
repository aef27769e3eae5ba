// linear_int8: integer matmuls of quantized matrices with inputs quantized to 8 bits.
//
// Outputs are the lanes of vectors. Shifts and masks extract bytes of four quantized values of an
// output. They are multiplied with four quantized inputs in the same order: see int8_vnni.h for
// AVX-VNNI and AVX512_VNNI, and int8_maddubs.h for other instruction sets.
#include "int8_input.h"

#if defined(INT8_DOT)
#include "int8_vnni.h"
#else
#include "int8_maddubs.h"
#endif

namespace ISA {
namespace {

constexpr int64_t PANEL_ROWS = 64;  // rows of x that stay in the L1 cache with their totals

using MultiplyChunk = void (*)(const MatrixBlocks&, int64_t tile, int64_t tiles, const QuantizedInput&,
                               float* totals);

// Compute all matmuls of a chain that share x.
template <class T>
int multiply(const QuantizedLinear& args) {
    const MultiplyChunk multiply = by_format(args.matrix, [](auto format) -> MultiplyChunk {
        if constexpr (std::is_same_v<decltype(format), Float12>)
            return nullptr;  // its codes are not integers
        else
            return multiply_chunk<decltype(format)>;
    });
    if (!multiply) return INVALID;
    const MatrixBlocks m(args.matrix);
    const int64_t max_rows = args.rows < PANEL_ROWS ? args.rows : PANEL_ROWS;
    QuantizedInput p{nullptr, nullptr, nullptr, max_rows, m.group / 4};
    const Buffer<uint32_t> quantized = allocate<uint32_t>(m.groups * max_rows * p.words);
    const Buffer<float> floats = allocate<float>(2 * max_rows * m.groups);
    if (!quantized || !floats) return NO_MEMORY;
    p.quantized = quantized.get(), p.steps = floats.get(), p.sums = p.steps + m.groups * max_rows;
    for (int64_t first = 0; first < args.rows; first += PANEL_ROWS) {
        const int64_t left = args.rows - first;
        p.rows = left < max_rows ? left : max_rows;
#pragma omp parallel num_threads(args.threads)
        {
            quantize_rows<T>(args, m, first, p);
            alignas(64) float totals[PANEL_ROWS * INT8_CHUNK_OUTPUTS];
            for (const QuantizedLinear* matmul = &args; matmul; matmul = matmul->next) {
                const MatrixBlocks blocks(matmul->matrix);
                const int64_t tiles = tiles_of(matmul->matrix);
#pragma omp for schedule(static) nowait
                for (int64_t tile = 0; tile < tiles; tile += INT8_CHUNK_TILES) {
                    multiply(blocks, tile, tiles, p, totals);
                    store_columns<T>(*matmul, tile * MATRIX_TILE, INT8_CHUNK_OUTPUTS, first, p.rows,
                                     totals);
                }
            }
        }
    }
    return DONE;
}

}  // namespace

int linear_int8(const QuantizedLinear& args) {
    if (!same_format(args)) return INVALID;
    BY_DTYPE(multiply)
}

}  // namespace ISA
