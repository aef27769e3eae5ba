// The quantized key index: the layout of its tiles, and approximate logits for queries quantized to 8
// bits, with integer arithmetic.
//
// A tile stores tokens side by side. Quantized values of two elements of a token are multiplied with a
// pair of quantized query values and accumulated in 16 bits as long as they fit. AVX512_VNNI
// multiplies four elements and accumulates in 32 bits.
#pragma once

#include <math.h>

#include "cached_matmul.h"
#include "prefetch.h"

namespace ISA {

// A tile of INDEX_TILE tokens: see IndexLayout in config/cache_layout.py.
struct IndexTileLayout {
    int64_t dim, bits, groups, group, per_byte, code_rows, bytes;

    IndexTileLayout(int64_t dim, int64_t bits, int64_t groups)
        : dim(dim), bits(bits), groups(groups), group(dim / groups), per_byte(8 / bits),
          code_rows(dim / per_byte), bytes(INDEX_TILE * (code_rows + 4 * groups)) {}

    int64_t rows_of_group() const { return group / per_byte; }
};

constexpr float QUERY_LEVELS = 127;  // quantized query values are in [-127, 127]

#if defined(__AVX512VNNI__)
constexpr int64_t DOT_ROWS = 4;  // rows of bytes multiplied with a query at once
static_assert(INDEX_TILE == WIDTH, "a tile's tokens are a vector");
typedef int8_t QueryValue;

// Return the number of QueryValue elements of a query.
inline int64_t query_size(const IndexTileLayout& layout) {
    return layout.groups * ((layout.rows_of_group() + DOT_ROWS - 1) / DOT_ROWS) * layout.per_byte *
           DOT_ROWS;
}
#elif defined(__AVX2__)
constexpr int64_t PAIR_BYTES = 32;  // quantized query values for two rows of bytes
typedef int8_t QueryValue;

// Return the number of QueryValue elements of a query.
inline int64_t query_size(const IndexTileLayout& layout) {
    return layout.groups * ((layout.rows_of_group() + 1) / 2) * (layout.per_byte / 2) * PAIR_BYTES;
}
#else
typedef float QueryValue;

inline int64_t query_size(const IndexTileLayout& layout) { return layout.dim; }
#endif

// Quantized queries of a head, in the order of the tiles. Each group has a step (quantization scale)
// and the step times the sum of its quantized values.
struct QuantizedQueries {
    QueryValue* quantized;  // [queries, query_size]
    float *steps, *sums;  // [queries, groups]
};

// Store the quantized values of a group in the order of the tiles. Return the address of the next
// group.
inline QueryValue* store_query(const float* quantized, const IndexTileLayout& layout, QueryValue* to) {
#if defined(__AVX512VNNI__)
    // For each four rows of bytes and each value of a byte: the query values of these rows.
    const int64_t rows = layout.rows_of_group();
    for (int64_t row = 0; row < rows; row += DOT_ROWS)
        for (int64_t part = 0; part < layout.per_byte; part++)
            for (int64_t i = row; i < row + DOT_ROWS; i++)
                *to++ = static_cast<int8_t>(i < rows ? quantized[i * layout.per_byte + part] : 0);
    return to;
#elif defined(__AVX2__)
    // For each two rows of bytes and each two values of a byte: the pair of the first row, repeated
    // eight times, then the pair of the second row.
    const int64_t rows = layout.rows_of_group();
    for (int64_t row = 0; row < rows; row += 2)
        for (int64_t part = 0; part < layout.per_byte; part += 2)
            for (int64_t i = row; i < row + 2; i++, to += PAIR_BYTES / 2) {
                const float* values = quantized + i * layout.per_byte + part;
                const int8_t pair[2] = {static_cast<int8_t>(i < rows ? values[0] : 0),
                                        static_cast<int8_t>(i < rows ? values[1] : 0)};
                for (int64_t n = 0; n < PAIR_BYTES / 2; n += 2) std::memcpy(to + n, pair, 2);
            }
    return to;
#else
    std::memcpy(to, quantized, static_cast<size_t>(layout.group) * sizeof *quantized);
    return to + layout.group;
#endif
}

// Quantize a query of `dim` floats, which are overwritten, and multiply its steps by `factor`. See
// `rounded_queries` in h2o/recall.py.
inline void quantize_query(float* q, float factor, const IndexTileLayout& layout, int64_t number,
                           const QuantizedQueries& to) {
    QueryValue* quantized = to.quantized + number * query_size(layout);
    for (int64_t k = 0; k < layout.groups; k++) {
        float* values = q + k * layout.group;
        float largest = 0, sum = 0;
        for (int64_t i = 0; i < layout.group; i++)
            largest = fabsf(values[i]) > largest ? fabsf(values[i]) : largest;
        const float step = largest / QUERY_LEVELS, divisor = step > 0 ? step : 1;
        for (int64_t i = 0; i < layout.group; i++) {
            const float x = nearbyintf(values[i] / divisor);
            // Clamping also maps NaN to an integer.
            values[i] = x >= -QUERY_LEVELS ? x <= QUERY_LEVELS ? x : QUERY_LEVELS : -QUERY_LEVELS;
            sum += values[i];
        }
        quantized = store_query(values, layout, quantized);
        to.steps[number * layout.groups + k] = step * factor;
        to.sums[number * layout.groups + k] = step * factor * sum;
    }
}

#if defined(__AVX512VNNI__)
// Transpose four rows of bytes of 16 tokens to four bytes per token.
INLINE Words by_token(const uint8_t* rows) {
    constexpr uint32_t LANES[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    constexpr uint8_t BYTES[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    const __m512i bytes = _mm512_maskz_broadcast_i32x4(0xffff, load_raw<__m128i>(BYTES));
    const __m512i lanes = _mm512_maskz_permutexvar_epi32(0xffff, load_raw<__m512i>(LANES),
                                                         load_raw<__m512i>(rows));
    return Words(_mm512_shuffle_epi8(lanes, bytes));
}

// Compute the logits of a tile for G queries from `number` on. If the rows of a group are not a
// multiple of four, the padding is multiplied by zeros.
template <int G, int BITS>
INLINE void scan_tile(const uint8_t* tile, const IndexTileLayout& layout,
                      const QuantizedQueries& queries, int64_t number, float* logits, int64_t stride) {
    constexpr int PARTS = 8 / BITS;
    const int64_t query_stride = query_size(layout), rows = layout.rows_of_group();
    const QueryValue* quantized = queries.quantized + number * query_stride;
    const float *steps = queries.steps + number * layout.groups,
                *zeros = queries.sums + number * layout.groups;
    const uint8_t* halves = tile + INDEX_TILE * layout.code_rows;
    Floats total[G]{};
    for (int64_t k = 0; k < layout.groups; k++) {
        Ints sums[2][G]{};  // separate chains, because a sum waits for the last one
        const uint8_t* group_rows = tile + k * rows * INDEX_TILE;
        for (int64_t row = 0; row < rows; row += DOT_ROWS) {
            const Words words = by_token(group_rows + row * INDEX_TILE);
#pragma GCC unroll 4
            for (int part = 0; part < PARTS; part++, quantized += DOT_ROWS) {
                const Words bytes = words >> (BITS * part) & 0x01010101u * ((1 << BITS) - 1);
#pragma GCC unroll 4
                for (int g = 0; g < G; g++) {
                    const Words four = load_raw<uint32_t>(quantized + g * query_stride) + Words{};
                    sums[part % 2][g] = add_int8_dot(sums[part % 2][g], bytes, four);
                }
            }
        }
        const Floats scale = load(reinterpret_cast<const fp16*>(halves) + k * INDEX_TILE);
        const Floats zero =
            load(reinterpret_cast<const fp16*>(halves) + (layout.groups + k) * INDEX_TILE);
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) {
            const Floats products = __builtin_convertvector(sums[0][g] + sums[1][g], Floats) *
                                    broadcast(steps[g * layout.groups + k]);
            total[g] =
                fma(broadcast(zeros[g * layout.groups + k]), zero, fma(products, scale, total[g]));
        }
    }
#pragma GCC unroll 4
    for (int g = 0; g < G; g++) store(logits + g * stride, total[g]);
}
#elif defined(__AVX2__)
INLINE __m256i load_bytes(const void* from) { return load_raw<__m256i>(from); }

// Add 16-bit sums, eight of each of two rows, to 32-bit sums of eight tokens.
INLINE __m256i widen_sums(__m256i x) {
    return _mm256_add_epi32(_mm256_cvtepi16_epi32(_mm256_castsi256_si128(x)),
                            _mm256_cvtepi16_epi32(_mm256_extracti128_si256(x, 1)));
}

// sums [G][8 tokens each] += COUNT pairs of rows of bytes by quantized values of G queries.
template <int G, int BITS, int COUNT>
INLINE void add_rows(const uint8_t* rows, const QueryValue* quantized, int64_t query_stride,
                     __m256i (*sums)[2]) {
    constexpr int PAIRS = 4 / BITS, LEVELS = (1 << BITS) - 1;
    static_assert(COUNT * PAIRS * 2 * LEVELS * 127 < 1 << 15, "sums of 16 bits");
    const __m256i mask = _mm256_set1_epi8(LEVELS);
    __m256i partial[G][2];
    for (int g = 0; g < G; g++) partial[g][0] = partial[g][1] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int two = 0; two < COUNT; two++) {
        const __m256i bytes = load_bytes(rows + two * 2 * INDEX_TILE);
#pragma GCC unroll 2
        for (int part = 0; part < PAIRS; part++) {
            const __m256i one = _mm256_srli_epi16(bytes, 2 * BITS * part) & mask;
            const __m256i other = _mm256_srli_epi16(bytes, 2 * BITS * part + BITS) & mask;
            const __m256i low = _mm256_unpacklo_epi8(one, other);
            const __m256i high = _mm256_unpackhi_epi8(one, other);
            const QueryValue* query_pair = quantized + (two * PAIRS + part) * PAIR_BYTES;
            for (int g = 0; g < G; g++) {
                const __m256i query = load_bytes(query_pair + g * query_stride);
                partial[g][0] = _mm256_add_epi16(partial[g][0], _mm256_maddubs_epi16(low, query));
                partial[g][1] = _mm256_add_epi16(partial[g][1], _mm256_maddubs_epi16(high, query));
                // Prevents a GCC reordering that needs too many registers.
                asm("" : "+x"(partial[g][0]), "+x"(partial[g][1]));
            }
        }
    }
    for (int g = 0; g < G; g++)
        for (int half = 0; half < 2; half++)
            sums[g][half] = _mm256_add_epi32(sums[g][half], widen_sums(partial[g][half]));
}

// Compute the logits of a tile for G queries from `number` on.
template <int G, int BITS>
INLINE void scan_tile(const uint8_t* tile, const IndexTileLayout& layout,
                      const QuantizedQueries& queries, int64_t number, float* logits, int64_t stride) {
    constexpr int64_t TWO = 2 * INDEX_TILE, CODES = 4 / BITS * PAIR_BYTES;  // bytes of two rows
    const int64_t query_stride = query_size(layout), twos = (layout.rows_of_group() + 1) / 2;
    const QueryValue* quantized = queries.quantized + number * query_stride;
    const float *steps = queries.steps + number * layout.groups,
                *zeros = queries.sums + number * layout.groups;
    const uint8_t* halves = tile + INDEX_TILE * layout.code_rows;
    __m256 total[G][2];
    for (int g = 0; g < G; g++) total[g][0] = total[g][1] = _mm256_setzero_ps();
    for (int64_t k = 0; k < layout.groups; k++) {
        __m256i sums[G][2];
        for (int g = 0; g < G; g++) sums[g][0] = sums[g][1] = _mm256_setzero_si256();
        const uint8_t* rows = tile + k * layout.rows_of_group() * INDEX_TILE;
        int64_t two = 0;
        for (; two + 8 <= twos; two += 8, quantized += 8 * CODES)
            add_rows<G, BITS, 8>(rows + two * TWO, quantized, query_stride, sums);
        for (; two < twos; two++, quantized += CODES)
            add_rows<G, BITS, 1>(rows + two * TWO, quantized, query_stride, sums);
        for (int half = 0; half < 2; half++) {
            const uint8_t* group_halves = halves + 2 * (k * INDEX_TILE + half * INDEX_TILE / 2);
            const __m256 scale = _mm256_cvtph_ps(load_raw<__m128i>(group_halves));
            const __m256 zero =
                _mm256_cvtph_ps(load_raw<__m128i>(group_halves + 2 * INDEX_TILE * layout.groups));
            for (int g = 0; g < G; g++) {
                const __m256 products =
                    _mm256_cvtepi32_ps(sums[g][half]) * _mm256_set1_ps(steps[g * layout.groups + k]);
                total[g][half] = _mm256_fmadd_ps(_mm256_set1_ps(zeros[g * layout.groups + k]), zero,
                                                 _mm256_fmadd_ps(products, scale, total[g][half]));
            }
        }
    }
    for (int g = 0; g < G; g++)
        for (int half = 0; half < 2; half++)
            _mm256_storeu_ps(logits + g * stride + half * INDEX_TILE / 2, total[g][half]);
}
#else
// The same in floats, which represent the integer sums of a group exactly.
template <int G, int BITS>
INLINE void scan_tile(const uint8_t* tile, const IndexTileLayout& layout,
                      const QuantizedQueries& queries, int64_t number, float* logits, int64_t stride) {
    const float *quantized = queries.quantized + number * layout.dim,
                *steps = queries.steps + number * layout.groups,
                *zeros = queries.sums + number * layout.groups;
    const uint8_t* halves = tile + INDEX_TILE * layout.code_rows;
    for (int64_t lane = 0; lane < INDEX_TILE; lane += WIDTH) {
        Floats total[G]{};
        for (int64_t k = 0; k < layout.groups; k++) {
            Floats sums[G]{};
            for (int64_t i = k * layout.group; i < (k + 1) * layout.group; i++) {
                const int shift = static_cast<int>(i % layout.per_byte) * BITS;
                const Ints bytes = widen(tile + i / layout.per_byte * INDEX_TILE + lane);
                const Floats x =
                    __builtin_convertvector(bytes >> shift & ((1 << BITS) - 1), Floats);
                for (int g = 0; g < G; g++)
                    sums[g] = fma(x, broadcast(quantized[g * layout.dim + i]), sums[g]);
            }
            const uint8_t* group_halves = halves + 2 * (k * INDEX_TILE + lane);
            const Floats scale = load(reinterpret_cast<const fp16*>(group_halves));
            const Floats zero =
                load(reinterpret_cast<const fp16*>(group_halves + 2 * INDEX_TILE * layout.groups));
            for (int g = 0; g < G; g++)
                total[g] = fma(broadcast(zeros[g * layout.groups + k]), zero,
                               fma(sums[g] * steps[g * layout.groups + k], scale, total[g]));
        }
        for (int g = 0; g < G; g++) store(logits + g * stride + lane, total[g]);
    }
}
#endif

// Compute logits [group, stride] of all tiles.
template <int BITS>
void scan(const uint8_t* index, const IndexTileLayout& layout, int64_t tiles, int64_t group,
          const QuantizedQueries& queries, float* logits, int64_t stride) {
    for (int64_t t = 0; t < tiles; t++) {
        const uint8_t* tile = index + t * layout.bytes;
        for (int64_t i = 0; i < layout.bytes; i += 64) prefetch(tile + PREFETCH_BYTES + i, L1);
        for_query_blocks(group, [&](auto G, int64_t g) {
            scan_tile<G(), BITS>(tile, layout, queries, g, logits + g * stride + t * INDEX_TILE, stride);
        });
    }
}

}  // namespace ISA
