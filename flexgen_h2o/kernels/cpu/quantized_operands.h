// Quantized values of a matrix as matmul operands: floats, or pairs of bfloat16.
#pragma once

#include <type_traits>

#include "amx.h"
#include "matrix.h"

namespace ISA {

// Words of WIDTH outputs that hold whole quantized values.
template <class Format>
struct PackedUnit {
    Words words[Format::unit_words];
};
// Load unit `n` of a block, for WIDTH outputs from `lane` on.
template <class Format>
INLINE PackedUnit<Format> load_unit(const uint8_t* block, int64_t n, int64_t lane) {
    PackedUnit<Format> to;
    for (int i = 0; i < Format::unit_words; i++)
        to.words[i] = load_raw<Words>(Format::words(block) +
                                      4 * ((n * Format::unit_words + i) * MATRIX_TILE + lane));
    return to;
}

constexpr int64_t MEMORY_BOUND_ROWS = 4;  // maximum rows of x for which the matmul is memory-bound

// Words of WIDTH outputs of a block. Each access prefetches a line of a later block. If AGAIN is set
// (memory-bound), it also prefetches a line of a nearer block.
struct PrefetchedWords {
    const uint8_t *words, *later, *sooner;
    CacheLevel to;

    // Prefetch LINES lines from line `first` on, with one branch for all of them.
    template <int LINES, bool AGAIN>
    INLINE void prefetch_lines(int64_t first) const {
        const auto lines = [&](CacheLevel level) ALWAYS_INLINE {
#pragma GCC unroll 8
            for (int64_t n = first; n < first + LINES; n++) {
                prefetch(later + 4 * MATRIX_TILE * n, level);
                if (AGAIN) prefetch(sooner + 4 * MATRIX_TILE * n, level);
            }
        };
        if (to == L2) lines(L2);
        else if (to == L1) lines(L1);
        else if (to == NON_TEMPORAL) lines(NON_TEMPORAL);
    }

    template <bool AGAIN>
    INLINE Words read(int64_t n) const {
        prefetch(later + 4 * MATRIX_TILE * n, to);
        if (AGAIN) prefetch(sooner + 4 * MATRIX_TILE * n, to);
        return load_raw<Words>(words + 4 * MATRIX_TILE * n);
    }

    // Return the words of unit `n`.
    template <class Format, bool AGAIN>
    INLINE PackedUnit<Format> unit(int64_t n) const {
        PackedUnit<Format> to;
        for (int i = 0; i < Format::unit_words; i++)
            to.words[i] = read<AGAIN>(n * Format::unit_words + i);
        return to;
    }
};

// A block of a tile; `tiles` tiles are computed together. The first reader of a block prefetches a
// later block line by line. A burst of prefetches would fill the miss buffers of the core and stall
// the computation.
template <class Format>
struct PrefetchedBlock {
    const uint8_t *block, *later, *sooner;
    CacheLevel to;

    static INLINE PrefetchedBlock of(const MatrixBlocks& m, int64_t tile, int64_t g, int64_t tiles,
                                     CacheLevel to) {
        const PrefetchedBlock prefetched{m.at(tile, g), m.block_ahead(tile, g, tiles, PREFETCH_BLOCKS),
                                         m.block_ahead(tile, g, tiles, PREFETCH_BLOCKS / 2), to};
        prefetch(prefetched.later, to);
        return prefetched;
    }

    INLINE PrefetchedWords words(int64_t lane, bool first) const {
        return {Format::words(block) + 4 * lane, later + 4 * MATRIX_TILE, sooner + 4 * MATRIX_TILE,
                first && lane == 0 ? to : NO_CACHE};
    }
};

// True if the bits of a quantized value are read as bfloat16, which adds 128 to it.
template <class Format>
constexpr bool has_bf16_offset() {
    return std::is_same_v<Format, Affine<4>> || std::is_same_v<Format, Affine<6>> ||
           std::is_same_v<Format, CompactAffine<4>>;
}

// Float operands: one element of x by one quantized value, one input per step.
struct FloatOperands {
    static constexpr int64_t inputs = 1;  // per step

    // Extract the quantized values of a step from the words of WIDTH outputs.
    template <class Format>
    static INLINE Words values(const PackedUnit<Format>& from, int step) {
        constexpr int bits = Format::bits;
        if constexpr (bits == 6)
            return FloatOperands::values<Affine<8>>({{Format::word(from.words, step / 4)}}, step % 4);
        const Words word = from.words[0];
        if constexpr (std::is_same_v<Format, Mxfp4>) return bit_cast<Words>(decode_mxfp4(word, step));
        if constexpr (std::is_same_v<Format, Float12>) {
            const Words pair = Float12::pair(from.words, step / 2);
            const Words code = step % 2 ? pair & 0xffff0000 : pair << 16;
            return code | (Words((code & Float12::MAGNITUDE) != 0) & (Float12::LOWEST & 0xffff0000));
        }
        const Ints field = Ints(word >> (16 * (step % 2) + bits * (step / 2)));
#if defined(__AVX512F__)
        if (bits == 4) return bit_cast<Words>(code<LOW>(field));  // uses only four index bits
#endif
        return bit_cast<Words>(__builtin_convertvector(field & ((1 << bits) - 1), Floats));
    }

    // Return the decoded values of `Mxfp4`.
    static INLINE Floats decode_mxfp4(Words word, int step) {
        const int shift = 16 * (step % 2) + 4 * (step / 2);
#if defined(__AVX512F__)
        const Floats table = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
        return _mm512_permutexvar_ps(__m512i(word >> shift), table);  // uses only four index bits
#elif defined(__AVX2__)
        // Look up bytes for every other code, then select the wanted one and sign-extend it.
        const __m256i table = _mm256_broadcastsi128_si256(
            _mm_loadu_si128(reinterpret_cast<const __m128i*>(Mxfp4::DOUBLED)));
        const Words low = word >> (shift & 4) & 0x0f0f0f0f;
        const Words bytes = Words(_mm256_shuffle_epi8(table, __m256i(low)));
        return __builtin_convertvector(Ints(bytes << (24 - (shift & 24))) >> 24, Floats);
#else
        Floats to;
        for (int i = 0; i < WIDTH; i++) to[i] = Mxfp4::number(word[i] >> shift & 15);
        return to;
#endif
    }

    static INLINE Floats broadcast_x(uint32_t x) { return broadcast(bit_cast<float>(x)); }
    static INLINE Floats multiply_add(Floats sum, Words values, Floats x) {
        return fma(bit_cast<Floats>(values), x, sum);
    }

    // Offset that packing adds to each quantized value.
    template <class Format>
    static constexpr float offset() {
        return 0.0f;
    }

    template <class T>
    static uint32_t pack(const T* x, int64_t) {
        return bit_cast<uint32_t>(load_one(x));
    }

    // Pack the x of WIDTH steps.
    template <class T>
    static INLINE Words pack_all(const T* x) {
        return bit_cast<Words>(load(x));
    }
};

#if defined(__AVX512BF16__) || defined(HAS_AMX_TILES)
// Pairs of bfloat16: two inputs per step, which AVX512_BF16 multiplies and adds at once.
struct PairOperands {
    static constexpr int64_t inputs = 2;

    template <class Format>
    static INLINE Words values(const PackedUnit<Format>& from, int step) {
        if constexpr (std::is_same_v<Format, Float12>)
            return decode_float12(Float12::pair(from.words, step));
        // The bfloat16 value 128 + q has q in its low bits.
        if constexpr (Format::bits == 6)
            return masked_or(Format::word(from.words, step / 2) >> (8 * (step % 2)), 0x003f003f,
                             0x43004300);
        const Words field = from.words[0] >> (Format::bits * step);
        if constexpr (std::is_same_v<Format, Mxfp4>) return decode_mxfp4(field);
        if (Format::bits == 4) return masked_or(field, 0x000f000f, 0x43004300);
        // A bfloat16 holds 8-bit integers exactly, and is the upper half of a float.
        const Words first = bit_cast<Words>(__builtin_convertvector(Ints(field & 0xff), Floats));
        const Words second = bit_cast<Words>(__builtin_convertvector(Ints(field >> 16 & 0xff), Floats));
        return first >> 16 | second;
    }

    // Decode `Mxfp4` codes in the low bits of each half of a word.
    static INLINE Words decode_mxfp4(Words field) {
#if defined(__AVX512F__)
        // The permute uses five index bits. The table is repeated, so that the fifth is ignored.
        constexpr uint16_t TABLE[16] = {0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40c0,
                                        0x4100, 0x4140, 0,      0xbf80, 0xc000, 0xc040,
                                        0xc080, 0xc0c0, 0xc100, 0xc140};
        const __m512i table = _mm512_broadcast_i64x4(load_raw<__m256i>(TABLE));
        return Words(_mm512_permutexvar_epi16(__m512i(field), table));
#else
        return bit_cast<Words>(FloatOperands::decode_mxfp4(field, 0)) >> 16 |
               bit_cast<Words>(FloatOperands::decode_mxfp4(field, 1));
#endif
    }

    // Convert pairs of `Float12` codes to the bfloat16 values that they encode.
    static INLINE Words decode_float12(Words values) {
#if defined(__AVX512F__)
        const __mmask32 nonzero =
            _mm512_test_epi16_mask(__m512i(values), __m512i(Words{} + Float12::MAGNITUDE));
        return Words(_mm512_maskz_mov_epi16(nonzero, __m512i(values | Float12::LOWEST)));
#else
        // 0x800 in each half that is not zero. 7 times that is the lowest exponent.
        const Words nonzero = ((values & Float12::MAGNITUDE) + Float12::MAGNITUDE) & 0x08000800;
        return values | ((nonzero << 3) - nonzero);
#endif
    }

#if defined(__AVX512BF16__)
    static INLINE __m512bh broadcast_x(uint32_t x) {
        return bit_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(x)));
    }
    static INLINE Floats multiply_add(Floats sum, Words values, __m512bh x) {
        return Floats(_mm512_dpbf16_ps(__m512(sum), bit_cast<__m512bh>(values), x));
    }
#endif

    template <class Format>
    static constexpr float offset() {
        return has_bf16_offset<Format>() ? 128.0f : 0.0f;
    }

    static uint32_t pack(const bf16* x, int64_t left) {
        return x[0].bits | static_cast<uint32_t>(left > 1 ? x[1].bits : 0) << 16;
    }

    static INLINE Words pack_all(const bf16* x) { return load_raw<Words>(x); }
};
#endif

}  // namespace ISA
