// Quantized matrices: see storage/quantization.py (MatrixLayout) for how they lie,
// kernels/reference_matrix.py for the arithmetic.
#pragma once

#include "groups.h"

namespace ISA {

// Where the blocks of a matrix are, and what is in them.
struct Blocks {
    const uint8_t* data;
    int64_t bits, group, groups, words, block_bytes;

    explicit Blocks(const Matrix& m)
        : data(static_cast<const uint8_t*>(m.data)), bits(m.bits), group(m.group),
          groups((m.inputs + m.group - 1) / m.group), words(m.group * m.bits / 32),
          block_bytes(4 * MATRIX_TILE + 4 * MATRIX_TILE * words) {}

    const uint8_t* at(int64_t tile, int64_t g) const {
        return data + (tile * groups + g) * block_bytes;
    }
};

inline int64_t tiles_of(const Matrix& m) { return (m.outputs + MATRIX_TILE - 1) / MATRIX_TILE; }

INLINE const uint8_t* scales_of(const uint8_t* block) { return block; }
INLINE const uint8_t* zeros_of(const uint8_t* block) { return block + 2 * MATRIX_TILE; }
INLINE const uint8_t* words_of(const uint8_t* block) { return block + 4 * MATRIX_TILE; }

}  // namespace ISA
