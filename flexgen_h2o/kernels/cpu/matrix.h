// Quantized matrices. config/weight_layout.py (MatrixLayout) defines the layout.
// kernels/reference/matrix.py defines the arithmetic.
#pragma once

#include "groups.h"
#include "prefetch.h"

namespace ISA {

constexpr int64_t PREFETCH_BLOCKS = 8;  // prefetch distance in blocks of a tile

// The blocks of a matrix: their addresses and formats.
struct MatrixBlocks {
    const uint8_t* data;
    int64_t bits, group, groups, words, block_bytes;

    explicit MatrixBlocks(const Matrix& m)
        : data(static_cast<const uint8_t*>(m.data)), bits(m.bits), group(m.group < 0 ? -m.group
                                                                         : m.group   ? m.group
                                                                                     : MXFP4_GROUP),
          groups((m.inputs + group - 1) / group), words(group * m.bits / 32),
          block_bytes(MATRIX_TILE * (scale_bytes(m) + 4 * words)) {}

    // Return the bytes per output before its quantized values. A negative group means the compact
    // format, and 0 means MXFP4.
    static int64_t scale_bytes(const Matrix& m) {
        return m.group == 0 || m.bits == 12 ? 1 : m.group < 0 ? 2 : 4;
    }

    const uint8_t* at(int64_t tile, int64_t g) const {
        return data + (tile * groups + g) * block_bytes;
    }

    // Return the block `by` blocks ahead, if `tiles` tiles are computed together. Past the end of a
    // tile, continue in the tiles after them.
    const uint8_t* block_ahead(int64_t tile, int64_t g, int64_t tiles, int64_t by) const {
        const int64_t ahead = g + by;
        return ahead < groups ? at(tile, ahead) : at(tile + tiles, ahead - groups);
    }
};

inline int64_t tiles_of(const Matrix& m) { return (m.outputs + MATRIX_TILE - 1) / MATRIX_TILE; }

// The smallest unit of whole quantized values of an output: its words and its inputs.
template <int WORDS, int INPUTS>
struct Unit {
    static constexpr int unit_words = WORDS, unit_inputs = INPUTS;
};

// Quantized values of BITS bits that do not cross words. Input 2 * t + side of a word has the bits
// from 16 * side + BITS * t on.
template <int BITS>
struct Codes : Unit<1, 32 / BITS> {
    static constexpr int bits = BITS;

    // Extract the value of input `i` from its word.
    static uint32_t code(const uint32_t* word, int64_t i) {
        return word[0] >> (16 * (i % 2) + BITS * (i / 2)) & ((1u << BITS) - 1);
    }
};

// 6-bit values, 16 in three words. `word` returns four words with these values in 8 bits each: three
// words have their values in the lower six bits of the bytes, and the fourth combines the upper two
// bits of all three.
template <>
struct Codes<6> : Unit<3, 16> {
    static constexpr int bits = 6;

    template <class W>
    static INLINE W word(const W* words, int n) {
        if (n < 3) return words[n] & 0x3f3f3f3f;
        return (words[0] >> 6 & 0x03030303) | (words[1] >> 4 & 0x0c0c0c0c) |
               (words[2] >> 2 & 0x30303030);
    }
    // Pack four words into three.
    template <class W>
    static INLINE void join(const W* wide, W* words) {
        words[0] = wide[0] | (wide[3] & 0x03030303) << 6;
        words[1] = wide[1] | (wide[3] & 0x0c0c0c0c) << 4;
        words[2] = wide[2] | (wide[3] & 0x30303030) << 2;
    }

    static uint32_t code(const uint32_t* words, int64_t i) {
        const uint32_t four = word(words, static_cast<int>(i / 4));
        return Codes<8>::code(&four, i % 4);
    }
};

// Affine quantization: scale times quantized value plus zero point.
template <int BITS>
struct Affine : Codes<BITS> {
    static INLINE const uint8_t* words(const uint8_t* block) { return block + 4 * MATRIX_TILE; }

    // Return the scales of WIDTH outputs from `lane` on.
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

// Affine quantization with an 8-bit scale and an 8-bit zero point. A scale has four bits of exponent
// and four of mantissa. A zero point counts sixteenths of the scale and is subtracted.
template <int BITS>
struct CompactAffine : Codes<BITS> {
    static constexpr int MANTISSA = 19;  // bit position of the code in a float
    static constexpr int32_t LOWEST = (127 - 14) << (23 - MANTISSA);  // the exponent of code 0 is -14
    static constexpr float STEP = 1.0f / 16;
    static INLINE Floats max_magnitude() { return broadcast(28.0f); }  // maximum magnitude of an element

    static INLINE const uint8_t* words(const uint8_t* block) { return block + 2 * MATRIX_TILE; }

    static INLINE Floats scale_of(Ints code) { return bit_cast<Floats>((code + LOWEST) << MANTISSA); }
    static INLINE Floats scales(const uint8_t* block, int64_t lane) {
        return scale_of(widen(block + lane));
    }
    static INLINE Floats zeros(const uint8_t* block, int64_t lane) {
        const Floats steps = __builtin_convertvector(widen(block + MATRIX_TILE + lane), Floats);
        return scales(block, lane) * (steps * -STEP);
    }

    static float scale(const uint8_t* block, int64_t lane) {
        return bit_cast<float>((block[lane] + LOWEST) << MANTISSA);
    }
    static float zero(const uint8_t* block, int64_t lane) {
        return scale(block, lane) * (static_cast<float>(block[MATRIX_TILE + lane]) * -STEP);
    }
    static float number(uint32_t code) { return static_cast<float>(code); }
};

// MXFP4 elements: a power of two times an FP4 (E2M1) number. The table holds doubled numbers, which
// are integers, so the scale is halved.
struct Mxfp4 : Codes<4> {
    static constexpr int8_t DOUBLED[16] = {0, 1,  2,  3,  4,  6,  8,  12,
                                           0, -1, -2, -3, -4, -6, -8, -12};

    static INLINE const uint8_t* words(const uint8_t* block) { return block + MATRIX_TILE; }

    // 2^(exponent - 127) / 2. The smallest is a denormal.
    static INLINE Floats scales(const uint8_t* block, int64_t lane) {
        const Ints exponents = widen(block + lane);
        return bit_cast<Floats>(exponents << 23 | ((exponents == 0) & 1 << 22)) * 0.5f;
    }
    static INLINE Floats zeros(const uint8_t*, int64_t) { return Floats{}; }

    static float scale(const uint8_t* block, int64_t lane) {
        const uint32_t exponent = block[lane];
        return bit_cast<float>(exponent ? exponent << 23 : 1u << 22) * 0.5f;
    }
    static float zero(const uint8_t*, int64_t) { return 0.0f; }
    static float number(uint32_t code) { return DOUBLED[code]; }
};

// bfloat16 with four bits of exponent, relative to the largest exponent of the group. A code keeps the
// sign bit and the mantissa of a bfloat16. Bits 7 to 10 hold the exponent, and 15 means the largest
// one. A code of only a sign is 0. Eight inputs are packed in three words: the codes of the first
// three pairs stay in place, and the gaps hold four bits each of the fourth pair.
struct Float12 : Unit<3, 8> {
    static constexpr int bits = 12;
    static constexpr uint32_t SIGN = 0x80008000, MAGNITUDE = 0x07ff07ff, PAIR_MASK = SIGN | MAGNITUDE;
    // 2^-15, the value of exponent code 0, in each half of a word.
    static constexpr uint32_t LOWEST = 0x38003800;

    static INLINE const uint8_t* words(const uint8_t* block) { return block + MATRIX_TILE; }

    // 2^(exponent - 127) of the largest element, or 0 if all elements are 0.
    static INLINE Floats scales(const uint8_t* block, int64_t lane) {
        return bit_cast<Floats>(widen(block + lane) << 23);
    }
    static INLINE Floats zeros(const uint8_t*, int64_t) { return Floats{}; }

    static float scale(const uint8_t* block, int64_t lane) {
        return bit_cast<float>(static_cast<uint32_t>(block[lane]) << 23);
    }
    static float zero(const uint8_t*, int64_t) { return 0.0f; }

    // Return the codes of a pair of inputs, in the halves of words.
    template <class W>
    static INLINE W pair(const W* words, int pair) {
        if (pair < 3) return words[pair] & PAIR_MASK;
        return (words[0] >> 4 & 0x07800780) | (words[1] >> 7 & 0x00700070) |
               (words[2] >> 11 & 0x000f000f) | (words[1] << 1 & SIGN);
    }
    // Pack the codes of four pairs into words.
    template <class W>
    static INLINE void join(const W* pairs, W* words) {
        words[0] = pairs[0] | (pairs[3] & 0x07800780) << 4;
        words[1] = pairs[1] | (pairs[3] & 0x00700070) << 7 | (pairs[3] & SIGN) >> 1;
        words[2] = pairs[2] | (pairs[3] & 0x000f000f) << 11;
    }

    static uint32_t code(const uint32_t* words, int64_t i) {
        return pair(words, static_cast<int>(i / 2)) >> 16 * (i % 2) & 0xffff;
    }
    static float number(uint32_t code) {
        return code & MAGNITUDE ? bit_cast<float>((code | (LOWEST & 0xffff)) << 16) : 0.0f;
    }
};

// Call f(format) with the format of the matrix.
template <class F>
INLINE auto by_format(const Matrix& m, const F& f) {
    if (m.group == 0) return f(Mxfp4{});
    if (m.group < 0) return f(CompactAffine<4>{});
    if (m.bits == 12) return f(Float12{});
    if (m.bits == 6) return f(Affine<6>{});
    return m.bits == 4 ? f(Affine<4>{}) : f(Affine<8>{});
}

}  // namespace ISA
