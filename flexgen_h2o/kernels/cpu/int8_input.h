// Inputs of integer matmuls, quantized to 8 bits, and quantized values of matrices as bytes.
//
// kernels/reference/matrix.py (`quantize_activations`) defines the quantization.
#pragma once

#include "packed_input.h"
#include "vector_math.h"

namespace ISA {

constexpr float INPUT_LEVELS = 127;  // quantized inputs are in [-127, 127]
constexpr float MAX_FLOAT = std::numeric_limits<float>::max();
constexpr float NAN_VALUE = std::numeric_limits<float>::quiet_NaN();

typedef uint8_t Bytes16 __attribute__((vector_size(16)));

// Quantized values of a unit as unsigned bytes. `offset` makes them non-negative.
template <class Format>
struct UnsignedBytes {
    static constexpr float offset = 0;
    static INLINE Words of(Words nibbles) { return nibbles; }
};
template <>
struct UnsignedBytes<Mxfp4> {
    static constexpr float offset = 12;
    static INLINE Words of(Words nibbles) {
        constexpr int8_t TABLE[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
#if defined(__AVX2__)
        const __m128i table = load_raw<__m128i>(TABLE);
#if defined(__AVX512F__)
        const __m512i tables = _mm512_maskz_broadcast_i32x4(0xffff, table);
        return Words(_mm512_shuffle_epi8(tables, __m512i(nibbles)));
#else
        return Words(_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), __m256i(nibbles)));
#endif
#else
        Words bytes{};
        for (int shift = 0; shift < 32; shift += 8)
            for (int i = 0; i < WIDTH; i++)
                bytes[i] |= static_cast<uint32_t>(TABLE[nibbles[i] >> shift & 15]) << shift;
        return bytes;
#endif
    }
};

// Quantized rows of x, one step per group. The rows of a register block are interleaved in blocks of
// REGISTER_ROWS; the last block may have fewer.
struct QuantizedInput {
    uint32_t* quantized;  // [groups, blocks, words, rows of the block], four inputs in matrix order
    float* steps;         // [groups, rows], quantization scales
    float* sums;          // [groups, rows], sums of x
    int64_t rows, words;

    // Return the values of the block that starts at `row`.
    const uint32_t* block(int64_t g, int64_t row) const {
        return quantized + (g * rows + row) * words;
    }
};

// Reorder 16 quantized inputs to match a matrix with `bits` bits.
INLINE Bytes16 reorder_inputs(Bytes16 x, int64_t bits) {
    if (bits == 4)
        return __builtin_shuffle(x, Bytes16{0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15});
    return __builtin_shuffle(x, Bytes16{0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15});
}

template <class T>
INLINE float max_magnitude(const T* x, int64_t count) {
    Ints largest{};
    for (int64_t i = 0; i < count; i += WIDTH) {
        const Ints size = bit_cast<Ints>(magnitude(load_partial(x + i, count - i)));
        largest = size > largest ? size : largest;  // NaN counts as larger than all
    }
    return bit_cast<float>(reduce_max(largest));
}

// Quantize `count` inputs of a group of `group` elements to words `stride` apart. Return the sum of
// the quantized values.
template <class T>
INLINE int32_t quantize_group(const T* x, int64_t count, int64_t group, int64_t bits, float step,
                              uint32_t* to, int64_t stride) {
    const Floats divisor = broadcast(step > 0 ? step : 1), limit = broadcast(INPUT_LEVELS);
    Ints all{};
    for (int64_t i = 0; i < group; i += 16) {
        uint8_t quantized[16];
        for (int64_t k = 0; k < 16; k += WIDTH) {
            Floats quantized_x = rounded(load_partial(x + i + k, count - i - k) / divisor);
            quantized_x = quantized_x > limit ? limit : quantized_x;
            quantized_x = quantized_x < -limit ? -limit : quantized_x;
            const Ints whole = __builtin_convertvector(quantized_x, Ints);
            all += whole;
            narrow(quantized + k, whole);
        }
        uint32_t words[4];
        const Bytes16 bytes = reorder_inputs(load_raw<Bytes16>(quantized), bits);
        std::memcpy(words, &bytes, sizeof words);
        for (int64_t n = 0; n < 4 && i + 4 * n < group; n++) to[(i / 4 + n) * stride] = words[n];
    }
    return sum(all);
}

// Quantize the rows of x from `first` on with all threads of a parallel region. The rows of a block
// share cache lines. So few rows are split by groups, and no two threads write to one line.
template <class T>
void quantize_rows(const QuantizedLinear& args, const MatrixBlocks& m, int64_t first,
                   const QuantizedInput& p) {
    const auto quantize_one = [&](int64_t row, int64_t g) {
        const T* x = static_cast<const T*>(args.x) + (first + row) * args.x_row + g * m.group;
        const int64_t at = g * p.rows + row, left = args.matrix.inputs - g * m.group;
        const int64_t count = left < m.group ? left : m.group;
        const float largest = max_magnitude(x, count);
        const int64_t before = row / REGISTER_ROWS * REGISTER_ROWS, rows_left = p.rows - before;
        const int64_t stride = rows_left < REGISTER_ROWS ? rows_left : REGISTER_ROWS;
        uint32_t* quantized = p.quantized + (g * p.rows + before) * p.words + row - before;
        if (!(largest <= MAX_FLOAT)) {
            for (int64_t n = 0; n < p.words; n++) quantized[n * stride] = 0;
            p.steps[at] = p.sums[at] = NAN_VALUE;
            return;
        }
        p.steps[at] = largest / INPUT_LEVELS;
        p.sums[at] = p.steps[at] * static_cast<float>(quantize_group(x, count, m.group, m.bits,
                                                                     p.steps[at], quantized, stride));
    };
    if (p.rows <= 4 * REGISTER_ROWS) {
#pragma omp for schedule(static) collapse(2)
        for (int64_t g = 0; g < m.groups; g++)
            for (int64_t row = 0; row < p.rows; row++) quantize_one(row, g);
    } else {  // sequential reads of each row
#pragma omp for schedule(static) collapse(2)
        for (int64_t row = 0; row < p.rows; row++)
            for (int64_t g = 0; g < m.groups; g++) quantize_one(row, g);
    }
}

// Return the words of x that are multiplied with a unit.
template <class Format>
constexpr int input_words() {
    return Format::unit_inputs / 4;
}

// Return the bytes for word `part` of x.
template <class Format>
INLINE Words unit_bytes(const PackedUnit<Format>& unit, int part) {
    if constexpr (Format::bits == 6)
        return Format::word(unit.words, part);
    else if constexpr (Format::bits == 4)
        return UnsignedBytes<Format>::of(unit.words[0] >> 4 * part & 0x0f0f0f0f);
    else
        return unit.words[0];
}

}  // namespace ISA
