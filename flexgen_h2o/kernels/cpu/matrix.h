// Quantized matrices: see config/formats.py (MatrixLayout) for how they lie,
// kernels/reference_matrix.py for the arithmetic.
#pragma once

#include "groups.h"

namespace ISA {

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
};

// Whether what is asked for past the outer caches stays in the nearest one until it is read. On AMD's
// CPUs it does; a Xeon had to read most of it twice.
INLINE bool passes_outer_caches() {
#if defined(__x86_64__)
    return __builtin_cpu_is("amd");
#else
    return false;
#endif
}

// Asks for a block. What few rows meet once goes past the outer caches, if these can be passed, and
// leaves in them what the next step needs again; more rows may meet a block when the nearest cache has
// lost it.
INLINE void prefetch_block(const uint8_t* block, int64_t bytes, bool once) {
    if (once && passes_outer_caches())
        for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(block + line, 0, 0);
    else
        for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(block + line, 0, 3);
}

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
