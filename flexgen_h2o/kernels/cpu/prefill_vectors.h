// Matmuls whose right operand has LANES columns: blocks of queries. Operands are float32, or pairs of
// bfloat16 if the CPU can multiply them.
#pragma once

#include "query_block.h"

namespace ISA {

constexpr int LANE_VECTORS = WIDTH == 16 ? 4 : 2;
constexpr int LANES = LANE_VECTORS * WIDTH;
static_assert(LANES <= QUERY_LANES, "the memory plan counts fewer");
constexpr int REGISTER_ROWS = 4;  // rows of the register block

// out [count, LANES] (+)= a [count, depth] @ b [depth, LANES]. Element (m, k) of a is at a + m * row +
// k * column.
template <int M, bool ADD>
INLINE void matmul_lane_rows(const float* a, int64_t row, int64_t column, const float* b, int64_t depth,
                             float* out) {
    Floats sums[M][LANE_VECTORS];
    for (int m = 0; m < M; m++)
        for (int n = 0; n < LANE_VECTORS; n++)
            sums[m][n] = ADD ? load(out + m * LANES + n * WIDTH) : Floats{};
    for (int64_t k = 0; k < depth; k++) {
        Floats lanes[LANE_VECTORS];
        for (int n = 0; n < LANE_VECTORS; n++) lanes[n] = load(b + k * LANES + n * WIDTH);
        for (int m = 0; m < M; m++) {
            const Floats x = broadcast(a[m * row + k * column]);
            for (int n = 0; n < LANE_VECTORS; n++) sums[m][n] = fma(x, lanes[n], sums[m][n]);
        }
    }
    for (int m = 0; m < M; m++)
        for (int n = 0; n < LANE_VECTORS; n++) store(out + m * LANES + n * WIDTH, sums[m][n]);
}

#if defined(__AVX512BF16__)
// The same for pairs of bfloat16. depth, row and column count pairs.
template <int M, bool ADD>
INLINE void matmul_lane_rows(const uint32_t* a, int64_t row, int64_t column, const uint32_t* b,
                             int64_t depth, float* out) {
    __m512 sums[M][LANE_VECTORS];
    for (int m = 0; m < M; m++)
        for (int n = 0; n < LANE_VECTORS; n++)
            sums[m][n] = ADD ? load(out + m * LANES + n * WIDTH) : Floats{};
    for (int64_t k = 0; k < depth; k++) {
        __m512bh lanes[LANE_VECTORS];
        for (int n = 0; n < LANE_VECTORS; n++) lanes[n] = load_raw<__m512bh>(b + k * LANES + n * WIDTH);
        for (int m = 0; m < M; m++) {
            uint32_t pair;
            std::memcpy(&pair, a + m * row + k * column, sizeof pair);
            const __m512bh x = bit_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(pair)));
            for (int n = 0; n < LANE_VECTORS; n++)
                sums[m][n] = _mm512_dpbf16_ps(sums[m][n], lanes[n], x);
        }
    }
    for (int m = 0; m < M; m++)
        for (int n = 0; n < LANE_VECTORS; n++) store(out + m * LANES + n * WIDTH, Floats(sums[m][n]));
}
#endif

// Not inlined: next to the softmax, register pressure makes GCC reload b for each row.
template <bool ADD, class E>
NOINLINE void matmul_lanes(const E* a, int64_t row, int64_t column, int64_t count, const E* b,
                           int64_t depth, float* out) {
    int64_t m = 0;
    for (; m + REGISTER_ROWS <= count; m += REGISTER_ROWS)
        matmul_lane_rows<REGISTER_ROWS, ADD>(a + m * row, row, column, b, depth, out + m * LANES);
    for (; m < count; m++) matmul_lane_rows<1, ADD>(a + m * row, row, column, b, depth, out + m * LANES);
}

// Conversion of operands to the form that is multiplied: float32.
template <class T>
struct ConvertToFloats {
    using Element = float;
    static constexpr int64_t PACKED = 1;  // elements of T per Element

    static void query(const T* q, int64_t dim, Element* to) {
        for (int64_t i = 0; i < dim; i++) to[i * LANES] = load_one(q + i);
    }
    // Return the rows of keys or values to read, and set `stride` to their distance.
    static const Element* rows(const T* x, int64_t& stride, int64_t count, int64_t dim,
                               Element* tile) {
        if constexpr (sizeof(T) == sizeof(float)) return x;
        for (int64_t t = 0; t < count; t++) to_floats(x + t * stride, dim, tile + t * dim);
        stride = dim;
        return tile;
    }
    static const Element* keys(const T* x, int64_t& stride, int64_t count, int64_t dim,
                               Element* tile) {
        return rows(x, stride, count, dim, tile);
    }
    static const Element* values(const T* x, int64_t& stride, int64_t count, int64_t dim,
                                 Element* tile) {
        return rows(x, stride, count, dim, tile);
    }
    static const Element* weights(const float* e, int64_t, Element*) { return e; }
    // Store `sums` [dim, LANES] to the outputs of the lanes.
    static void outputs(float* sums, int64_t dim, T* const* to, int64_t count) {
        for (int64_t lane = 0; lane < count; lane++)
            for (int64_t i = 0; i < dim; i++) store_one(to[lane] + i, sums[i * LANES + lane]);
    }
};

#if defined(__AVX512BF16__)
// Conversion to pairs of bfloat16 along the reduction dimension, the first in the low half.
struct ConvertToPairs {
    using Element = uint32_t;
    static constexpr int64_t PACKED = 2;

    static void query(const bf16* q, int64_t dim, Element* to) {
        for (int64_t i = 0; i < dim / 2; i++) std::memcpy(to + i * LANES, q + 2 * i, 4);
    }
    static const Element* keys(const bf16* x, int64_t& stride, int64_t count, int64_t dim,
                               Element* tile) {
        if (stride % 2 == 0 && reinterpret_cast<uintptr_t>(x) % 4 == 0) {
            stride /= 2;
            return reinterpret_cast<const Element*>(x);
        }
        for (int64_t t = 0; t < count; t++)
            std::memcpy(tile + t * (dim / 2), x + t * stride, static_cast<size_t>(dim) * 2);
        stride = dim / 2;
        return tile;
    }
    static const Element* values(const bf16* x, int64_t& stride, int64_t count, int64_t dim,
                                 Element* tile) {
        for (int64_t t = 0; t < count; t += 2) {
            const bf16 *low = x + t * stride, *high = low + stride;
            Element* to = tile + t / 2 * dim;
            const bool both = t + 1 < count;
            int64_t i = 0;
            for (; i + WIDTH <= dim; i += WIDTH) {
                Words pairs = widen(&low[i].bits);
                if (both)
                    pairs |= widen(&high[i].bits) << 16;
                store(to + i, pairs);
            }
            for (; i < dim; i++)
                to[i] = low[i].bits | (both ? static_cast<uint32_t>(high[i].bits) << 16 : 0);
        }
        stride = dim;
        return tile;
    }
    static const Element* weights(const float* e, int64_t count, Element* tile) {
        for (int64_t t = 0; t < count; t += 2)
            for (int n = 0; n < LANES; n += WIDTH)
                store(tile + t / 2 * LANES + n,
                      to_bf16_pairs(load(e + t * LANES + n),
                                    t + 1 < count ? load(e + (t + 1) * LANES + n) : Floats{}));
        return tile;
    }
    static void outputs(float* sums, int64_t dim, bf16* const* to, int64_t count) {
        // Round in place, then copy lane by lane. The rows of the outputs are so far apart that
        // writing them in parallel would cause cache conflicts.
        uint32_t* pairs = reinterpret_cast<uint32_t*>(sums);
        for (int64_t i = 0; i < dim; i += 2)
            for (int n = 0; n < LANES; n += WIDTH)
                store(pairs + i / 2 * LANES + n,
                      to_bf16_pairs(load(sums + i * LANES + n), load(sums + (i + 1) * LANES + n)));
        for (int64_t lane = 0; lane < count; lane++)
            for (int64_t i = 0; i < dim / 2; i++)
                std::memcpy(to[lane] + 2 * i, pairs + i * LANES + lane, 4);
    }
};
#endif

}  // namespace ISA
