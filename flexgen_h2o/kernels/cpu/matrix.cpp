// unpack_rows: dequantize rows of a matrix.
#include "quantized_operands.h"
#include "memory.h"

namespace ISA {
namespace {

// Dequantize row `row` of the matrix to floats.
template <class C>
NOINLINE void unpack_row(const Matrix& matrix, const Blocks& m, int64_t row, float* to) {
    const int64_t lane = row % MATRIX_TILE;
    for (int64_t g = 0; g < m.groups; g++) {
        const uint8_t* block = m.at(row / MATRIX_TILE, g);
        const float scale = C::scale(block, lane), zero = C::zero(block, lane);
        const int64_t left = matrix.inputs - g * m.group;
        const int64_t size = left < m.group ? left : m.group;
        for (int64_t i = 0; i < size; i++) {
            uint32_t unit[C::unit_words];
            for (int n = 0; n < C::unit_words; n++)
                std::memcpy(unit + n, C::words(block) + 4 * ((i / C::unit_inputs * C::unit_words + n) *
                                                             MATRIX_TILE + lane), 4);
            const uint32_t code = C::code(unit, i % C::unit_inputs);
            to[g * m.group + i] = zero + scale * C::number(code);
        }
    }
}

// Dequantize a block to floats [group, TILE].
template <class C>
NOINLINE void unpack_block(const Blocks& m, const uint8_t* block, float* to) {
    constexpr int STEPS = C::unit_inputs;
    for (int64_t i = 0; i < MATRIX_TILE; i += WIDTH) {
        const Floats scale = C::scales(block, i), zero = C::zeros(block, i);
        for (int64_t n = 0; n < m.words / C::unit_words; n++) {
            const PackedUnit<C> unit = load_unit<C>(block, n, i);
            for (int t = 0; t < STEPS; t++) {
                const Floats x = bits_of<Floats>(Single::values<C>(unit, t));
                store(to + (n * STEPS + t) * MATRIX_TILE + i, zero + scale * x);
            }
        }
    }
}

// Dequantize the rows of a whole tile and transpose its blocks, with vectors if a tile is one vector.
template <class T, class C>
void unpack_tile(const Matrix& matrix, const Blocks& m, int64_t tile, T* out, float* block) {
    for (int64_t g = 0; g < m.groups; g++) {
        unpack_block<C>(m, m.at(tile, g), block);
        const int64_t left = matrix.inputs - g * m.group;
        const int64_t size = left < m.group ? left : m.group;
        int64_t i = 0;
#if defined(__AVX512F__)
        for (; i + MATRIX_TILE <= size; i += MATRIX_TILE) {
            Floats square[MATRIX_TILE];
            for (int k = 0; k < MATRIX_TILE; k++) square[k] = load(block + (i + k) * MATRIX_TILE);
            transpose(square);
            for (int lane = 0; lane < MATRIX_TILE; lane++)
                put_all(out + lane * matrix.inputs + g * m.group + i, square[lane]);
        }
#endif
        for (int64_t lane = 0; lane < MATRIX_TILE; lane++)
            for (int64_t k = i; k < size; k++)
                put(out + lane * matrix.inputs + g * m.group + k, block[k * MATRIX_TILE + lane]);
    }
}

INLINE bool whole_tile(const UnpackRows& a, int64_t i) {
    if (i + MATRIX_TILE > a.count || a.rows[i] % MATRIX_TILE) return false;
    for (int64_t k = 1; k < MATRIX_TILE; k++)
        if (a.rows[i + k] != a.rows[i] + k) return false;
    return true;
}

template <class T, class C>
int rows_as(const UnpackRows& a) {
    for (int64_t i = 0; i < a.count; i++)
        if (a.rows[i] < 0 || a.rows[i] >= a.matrix.outputs) return INVALID;
    const Blocks m(a.matrix);
    const int64_t inputs = a.matrix.inputs, size = inputs + MATRIX_TILE * m.group;
    const Memory<float> floats = memory<float>(a.threads * size);
    if (!floats) return NO_MEMORY;
#pragma omp parallel for schedule(static) num_threads(a.threads)
    for (int64_t i = 0; i < (a.count + MATRIX_TILE - 1) / MATRIX_TILE; i++) {
        float* scratch = floats.get() + thread_number() * size;
        const int64_t first = i * MATRIX_TILE, left = a.count - first;
        T* out = static_cast<T*>(a.out) + first * inputs;
        if (whole_tile(a, first)) {
            const int64_t tile = a.rows[first] / MATRIX_TILE;
            unpack_tile<T, C>(a.matrix, m, tile, out, scratch);
            continue;
        }
        for (int64_t row = 0; row < (left < MATRIX_TILE ? left : MATRIX_TILE); row++, out += inputs) {
            unpack_row<C>(a.matrix, m, a.rows[first + row], scratch);
            for (int64_t k = 0; k < inputs; k++) put(out + k, scratch[k]);
        }
    }
    return DONE;
}

template <class T>
int rows_of(const UnpackRows& a) {
    return by_format(a.matrix, [&](auto format) { return rows_as<T, decltype(format)>(a); });
}

}  // namespace

int unpack_rows(const UnpackRows& a) { BY_DTYPE(rows_of) }

}  // namespace ISA
