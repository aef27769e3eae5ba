// unpack_rows: dequantize rows of a matrix.
#include "memory.h"
#include "quantized_operands.h"

namespace ISA {
namespace {

// Dequantize row `row` of the matrix to floats.
template <class Format>
NOINLINE void unpack_row(const Matrix& matrix, const MatrixBlocks& m, int64_t row, float* to) {
    const int64_t lane = row % MATRIX_TILE;
    for (int64_t g = 0; g < m.groups; g++) {
        const uint8_t* block = m.at(row / MATRIX_TILE, g);
        const float scale = Format::scale(block, lane), zero = Format::zero(block, lane);
        const int64_t left = matrix.inputs - g * m.group;
        const int64_t size = left < m.group ? left : m.group;
        for (int64_t i = 0; i < size; i++) {
            uint32_t unit[Format::unit_words];
            for (int n = 0; n < Format::unit_words; n++)
                std::memcpy(
                    unit + n,
                    Format::words(block) +
                        4 * ((i / Format::unit_inputs * Format::unit_words + n) * MATRIX_TILE + lane),
                    4);
            const uint32_t code = Format::code(unit, i % Format::unit_inputs);
            to[g * m.group + i] = zero + scale * Format::number(code);
        }
    }
}

// Dequantize a block to floats [group, TILE].
template <class Format>
NOINLINE void unpack_block(const MatrixBlocks& m, const uint8_t* block, float* to) {
    constexpr int STEPS = Format::unit_inputs;
    for (int64_t i = 0; i < MATRIX_TILE; i += WIDTH) {
        const Floats scale = Format::scales(block, i), zero = Format::zeros(block, i);
        for (int64_t n = 0; n < m.words / Format::unit_words; n++) {
            const PackedUnit<Format> unit = load_unit<Format>(block, n, i);
            for (int t = 0; t < STEPS; t++) {
                const Floats x = bit_cast<Floats>(FloatOperands::values<Format>(unit, t));
                store(to + (n * STEPS + t) * MATRIX_TILE + i, zero + scale * x);
            }
        }
    }
}

// Dequantize the rows of a whole tile and transpose its blocks, with vectors if a tile is one vector.
template <class T, class Format>
void unpack_tile(const Matrix& matrix, const MatrixBlocks& m, int64_t tile, T* out, float* block) {
    for (int64_t g = 0; g < m.groups; g++) {
        unpack_block<Format>(m, m.at(tile, g), block);
        const int64_t left = matrix.inputs - g * m.group;
        const int64_t size = left < m.group ? left : m.group;
        int64_t i = 0;
#if defined(__AVX512F__)
        for (; i + MATRIX_TILE <= size; i += MATRIX_TILE) {
            Floats square[MATRIX_TILE];
            for (int k = 0; k < MATRIX_TILE; k++) square[k] = load(block + (i + k) * MATRIX_TILE);
            transpose(square);
            for (int lane = 0; lane < MATRIX_TILE; lane++)
                store(out + lane * matrix.inputs + g * m.group + i, square[lane]);
        }
#endif
        for (int64_t lane = 0; lane < MATRIX_TILE; lane++)
            for (int64_t k = i; k < size; k++)
                store_one(out + lane * matrix.inputs + g * m.group + k, block[k * MATRIX_TILE + lane]);
    }
}

INLINE bool whole_tile(const UnpackRows& args, int64_t i) {
    if (i + MATRIX_TILE > args.count || args.rows[i] % MATRIX_TILE) return false;
    for (int64_t k = 1; k < MATRIX_TILE; k++)
        if (args.rows[i + k] != args.rows[i] + k) return false;
    return true;
}

template <class T, class Format>
int rows_as(const UnpackRows& args) {
    for (int64_t i = 0; i < args.count; i++)
        if (args.rows[i] < 0 || args.rows[i] >= args.matrix.outputs) return INVALID;
    const MatrixBlocks m(args.matrix);
    const int64_t inputs = args.matrix.inputs, size = inputs + MATRIX_TILE * m.group;
    const Buffer<float> floats = allocate<float>(args.threads * size);
    if (!floats) return NO_MEMORY;
#pragma omp parallel for schedule(static) num_threads(args.threads)
    for (int64_t i = 0; i < (args.count + MATRIX_TILE - 1) / MATRIX_TILE; i++) {
        float* scratch = floats.get() + thread_index() * size;
        const int64_t first = i * MATRIX_TILE, left = args.count - first;
        T* out = static_cast<T*>(args.out) + first * inputs;
        if (whole_tile(args, first)) {
            const int64_t tile = args.rows[first] / MATRIX_TILE;
            unpack_tile<T, Format>(args.matrix, m, tile, out, scratch);
            continue;
        }
        for (int64_t row = 0; row < (left < MATRIX_TILE ? left : MATRIX_TILE); row++, out += inputs) {
            unpack_row<Format>(args.matrix, m, args.rows[first + row], scratch);
            for (int64_t k = 0; k < inputs; k++) store_one(out + k, scratch[k]);
        }
    }
    return DONE;
}

template <class T>
int rows_of(const UnpackRows& args) {
    return by_format(args.matrix, [&](auto format) { return rows_as<T, decltype(format)>(args); });
}

}  // namespace

int unpack_rows(const UnpackRows& args) { BY_DTYPE(rows_of) }

}  // namespace ISA
