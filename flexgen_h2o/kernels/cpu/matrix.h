// Quantized matrices: see config/formats.py (MatrixLayout) for how they lie,
// kernels/reference_matrix.py for the arithmetic.
#pragma once

#include "groups.h"
#include "prefetch.h"

namespace ISA {

constexpr int64_t BLOCKS_AHEAD = 8;  // of a tile, whose memory is asked for beforehand

// Where the blocks of a matrix are, and what is in them.
struct Blocks {
    const uint8_t* data;
    int64_t bits, group, groups, words, block_bytes;

    explicit Blocks(const Matrix& m)
        : data(static_cast<const uint8_t*>(m.data)), bits(m.bits),
          group(m.group ? m.group : MXFP4_GROUP), groups((m.inputs + group - 1) / group),
          words(group * m.bits / 32),
          block_bytes(MATRIX_TILE * ((m.group ? 4 : 1) + 4 * words)) {}

    const uint8_t* at(int64_t tile, int64_t g) const {
        return data + (tile * groups + g) * block_bytes;
    }

    // The block `by` further than one of `tiles` tiles that are computed with; behind the tile's end
    // of the one after them.
    const uint8_t* later(int64_t tile, int64_t g, int64_t tiles, int64_t by) const {
        const int64_t ahead = g + by;
        return ahead < groups ? at(tile, ahead) : at(tile + tiles, ahead - groups);
    }
};

inline int64_t tiles_of(const Matrix& m) { return (m.outputs + MATRIX_TILE - 1) / MATRIX_TILE; }

// Elements that are evenly spaced: a scale times a code of so many bits, and a zero point.
template <int BITS>
struct Spaced {
    static constexpr int bits = BITS;

    static INLINE const uint8_t* words(const uint8_t* block) { return block + 4 * MATRIX_TILE; }

    // Of WIDTH outputs from `lane` on.
    static INLINE Floats scales(const uint8_t* block, int64_t lane) {
        return load(reinterpret_cast<const fp16*>(block) + lane);
    }
    static INLINE Floats zeros(const uint8_t* block, int64_t lane) {
        return load(reinterpret_cast<const fp16*>(block) + MATRIX_TILE + lane);
    }

    static float scale(const uint8_t* block, int64_t lane) { return half_at(block + 2 * lane); }
    static float zero(const uint8_t* block, int64_t lane) {
        return half_at(block + 2 * (MATRIX_TILE + lane));
    }
    static float number(uint32_t code) { return static_cast<float>(code); }
};

// Elements of MXFP4: a power of two times what a code stands for. Here that is twice the number,
// which is whole, and so the scale is half of it.
struct Mxfp4 {
    static constexpr int bits = 4;
    static constexpr int8_t DOUBLED[16] = {0, 1,  2,  3,  4,  6,  8,  12,
                                           0, -1, -2, -3, -4, -6, -8, -12};

    static INLINE const uint8_t* words(const uint8_t* block) { return block + MATRIX_TILE; }

    // Half of 2^(exponent - 127), of which the lowest is a denormal.
    static INLINE Floats scales(const uint8_t* block, int64_t lane) {
        const Ints exponents = widen(block + lane);
        return bits_of<Floats>(exponents << 23 | ((exponents == 0) & 1 << 22)) * 0.5f;
    }
    static INLINE Floats zeros(const uint8_t*, int64_t) { return Floats{}; }

    static float scale(const uint8_t* block, int64_t lane) {
        const uint32_t exponent = block[lane];
        return bits_of<float>(exponent ? exponent << 23 : 1u << 22) * 0.5f;
    }
    static float zero(const uint8_t*, int64_t) { return 0.0f; }
    static float number(uint32_t code) { return DOUBLED[code]; }
};

// f(codes), where these are what the elements of a matrix are.
template <class F>
INLINE int by_codes(const Matrix& m, const F& f) {
    if (m.group == 0) return f(Mxfp4{});
    return m.bits == 4 ? f(Spaced<4>{}) : f(Spaced<8>{});
}

}  // namespace ISA
