// 4-bit quantized values as operands of AMX tiles, and tile results as vectors.
#pragma once

#include "amx.h"

#if defined(TILES)

namespace ISA {

constexpr int64_t STEP = 2 * TILE_PAIRS;  // reduction depth of a tile matmul, or bytes
constexpr int64_t TILE_WORDS = TILE_ROWS * TILE_PAIRS;
constexpr int64_t VALUE_TILES = 4;  // tiles that 32 bytes of values expand to

// Values 0 to 15 as bfloat16. The table is repeated, so that bit 4 of an index is ignored.
alignas(64) constexpr uint16_t NIBBLE_VALUES[32] = {
    0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120,
    0x4130, 0x4140, 0x4150, 0x4160, 0x4170, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
    0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};

// Convert the low and the high nibbles of 32 bytes to bfloat16.
INLINE void unpack_nibbles(const uint8_t* from, uint16_t* low, uint16_t* high) {
#if defined(__AVX512BW__)
    const __m512i table = _mm512_load_si512(NIBBLE_VALUES);
    const __m512i bytes = _mm512_cvtepu8_epi16(load_raw<__m256i>(from));
    _mm512_storeu_si512(low, _mm512_permutexvar_epi16(bytes, table));
    _mm512_storeu_si512(high, _mm512_permutexvar_epi16(_mm512_srli_epi16(bytes, 4), table));
#else
    for (int64_t i = 0; i < STEP; i++)
        low[i] = NIBBLE_VALUES[from[i] & 15], high[i] = NIBBLE_VALUES[from[i] >> 4];
#endif
}

// 32 bytes of two slots expand to one row of pairs in each of VALUE_TILES tiles: two tiles of low
// nibbles and two of high nibbles. `byte_of` maps a column of a tile to its byte.
constexpr int64_t RUN = 8;  // consecutive columns with consecutive bytes
constexpr int64_t byte_of(int64_t tile, int64_t column) {
    return tile % 2 * RUN + column + column / RUN * RUN;
}
INLINE void interleave_nibbles(const uint8_t* first, const uint8_t* second, uint32_t* to) {
#if defined(__AVX512BW__)
    const __m512i table = _mm512_load_si512(NIBBLE_VALUES);
    const __m256i a = load_raw<__m256i>(first), b = load_raw<__m256i>(second);
    const __m256i both[2] = {_mm256_unpacklo_epi8(a, b), _mm256_unpackhi_epi8(a, b)};
    for (int64_t tile = 0; tile < 2; tile++, to += TILE_WORDS) {
        const __m512i bytes = _mm512_cvtepu8_epi16(both[tile]);
        _mm512_storeu_si512(to, _mm512_permutexvar_epi16(bytes, table));
        _mm512_storeu_si512(to + 2 * TILE_WORDS,
                            _mm512_permutexvar_epi16(_mm512_srli_epi16(bytes, 4), table));
    }
#else
    for (int64_t tile = 0; tile < VALUE_TILES; tile++, to += TILE_WORDS)
        for (int64_t n = 0; n < TILE_PAIRS; n++) {
            const int64_t i = byte_of(tile, n), shift = tile < 2 ? 0 : 4;
            to[n] = NIBBLE_VALUES[first[i] >> shift & 15] |
                    static_cast<uint32_t>(NIBBLE_VALUES[second[i] >> shift & 15]) << 16;
        }
#endif
}

// Transpose rows of N floats, contiguous in N vectors, to columns.
template <int N>
INLINE void to_columns(Floats* x) {
    static_assert(N == 4 || N == 8, "a row is half a vector at most");
    Words even, odd;
    for (int i = 0; i < WIDTH; i++) even[i] = static_cast<uint32_t>(2 * i), odd[i] = even[i] + 1;
#pragma GCC unroll 4
    for (int parts = 1; parts < N; parts *= 2) {  // N / parts vectors per part, by column
        Floats next[N];
#pragma GCC unroll 8
        for (int n = 0; n < N / 2; n++) {
            const int stride = N / parts, part = n / (stride / 2), i = n % (stride / 2);
            const Floats* from = x + part * stride + 2 * i;
            next[part * stride + i] = __builtin_shuffle(from[0], from[1], even);
            next[part * stride + i + stride / 2] = __builtin_shuffle(from[0], from[1], odd);
        }
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) x[n] = next[n];
    }
    // The columns come out in bit-reversed order.
    const Floats second = x[1];
    x[1] = x[N / 2], x[N / 2] = second;
    if constexpr (N == 8) {
        const Floats fourth = x[3];
        x[3] = x[6], x[6] = fourth;
    }
}

}  // namespace ISA

#endif
