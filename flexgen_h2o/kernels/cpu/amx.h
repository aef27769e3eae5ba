// AMX tiles of bfloat16, or their emulation in plain C++.
//
// A tile is a register of up to 16 rows of 64 bytes. A source that includes this header is compiled
// once with AMX instructions and once with emulation (H2O_EMULATE). Both give the same bits, so a CPU
// without AMX can test the matmuls. Both define HAS_AMX_TILES.
#pragma once

#include "simd.h"

#if defined(__AMX_BF16__) || defined(H2O_EMULATE)
#define HAS_AMX_TILES 1

#if !defined(H2O_EMULATE)
#include <immintrin.h>
#endif

namespace ISA {

constexpr int64_t AMX_ROWS = 16;       // maximum
constexpr int64_t AMX_ROW_BYTES = 64;  // maximum per row
constexpr int64_t AMX_PAIRS = 16;      // of bfloat16 in a row; also the maximum rows of a right operand
constexpr int64_t AMX_DEPTH = 2 * AMX_PAIRS;  // reduction depth of one tile matmul
constexpr int64_t AMX_TILE_WORDS = AMX_ROWS * AMX_PAIRS;
constexpr int64_t AMX_BLOCK = 2 * AMX_ROWS;  // rows and columns of a register block: 2 x 2 tiles

// The tile registers of a register block: C += A B.
enum AmxRegister { C0, C1, C2, C3, A0, A1, B0, B1 };

// Operand of LDTILECFG: rows of each tile, and bytes per row.
struct alignas(64) AmxTileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};

    void set(int tile, int64_t tile_rows, int64_t row_bytes) {
        rows[tile] = static_cast<uint8_t>(tile_rows);
        bytes[tile] = static_cast<uint16_t>(row_bytes);
    }
};

// Return the shapes of whole tiles for all registers.
INLINE AmxTileShapes whole_tiles() {
    AmxTileShapes shapes;
    for (int tile = 0; tile < 8; tile++) shapes.set(tile, AMX_ROWS, AMX_ROW_BYTES);
    return shapes;
}

#if !defined(H2O_EMULATE)

// RAII guard that configures the tiles of the calling thread. Only one may exist per thread.
//
// Inline assembly replaces the intrinsics for two reasons. GCC's intrinsics need literal register
// numbers. Its tile loads do not declare that they read memory, so the compiler may move an earlier
// store after them.
class AmxTiles {
public:
    explicit AmxTiles(const AmxTileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
    ~AmxTiles() { asm volatile("tilerelease" ::: "memory"); }
    AmxTiles(const AmxTiles&) = delete;
    AmxTiles& operator=(const AmxTiles&) = delete;

    template <int T>
    INLINE void zero() {
        asm volatile("tilezero %%tmm%c0" ::"i"(T));
    }
    // Load rows that are `stride` bytes apart.
    template <int T>
    INLINE void load(const void* from, int64_t stride) {
        asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(from), "r"(stride) : "memory");
    }
    template <int T>
    INLINE void store(void* to, int64_t stride) {
        asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(T), "r"(to), "r"(stride) : "memory");
    }
    // C [rows, columns] float32 += A [rows, pairs] B [pairs, columns], in pairs of bfloat16.
    template <int C, int A, int B>
    INLINE void add_matmul() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
    }
};

#else

// TDPBF16PS treats denormal inputs as zero and flushes denormal results to zero.
inline float flush_to_zero(float x) { return x < 0x1p-126f && x > -0x1p-126f ? 0.0f * x : x; }

// The semantics follow Intel's Software Developer's Manual, volume 2.
class AmxTiles {
public:
    explicit AmxTiles(const AmxTileShapes& shapes) : shapes(shapes) {}
    AmxTiles(const AmxTiles&) = delete;
    AmxTiles& operator=(const AmxTiles&) = delete;

    template <int T>
    void zero() {
        std::memset(data[T], 0, sizeof data[T]);
    }
    template <int T>
    void load(const void* from, int64_t stride) {
        zero<T>();
        for (int64_t row = 0; row < shapes.rows[T]; row++)
            std::memcpy(data[T][row], static_cast<const char*>(from) + row * stride,
                        shapes.bytes[T]);
    }
    template <int T>
    void store(void* to, int64_t stride) {
        for (int64_t row = 0; row < shapes.rows[T]; row++)
            std::memcpy(static_cast<char*>(to) + row * stride, data[T][row], shapes.bytes[T]);
    }
    // The first elements of the pairs are accumulated separately from the second ones. Both sums start
    // at 0 and are rounded after each multiply-add.
    template <int C, int A, int B>
    void add_matmul() {
        if (shapes.rows[A] != shapes.rows[C] || shapes.bytes[A] != 4 * shapes.rows[B] ||
            shapes.bytes[B] != shapes.bytes[C])
            __builtin_trap();  // the hardware instruction is invalid in this case
        float right[2][AMX_PAIRS][AMX_ROWS];
        for (int64_t k = 0; k < shapes.rows[B]; k++)
            for (int64_t n = 0; n < AMX_ROWS; n++) {
                right[0][k][n] = half<0>(data[B][k][n]);
                right[1][k][n] = half<1>(data[B][k][n]);
            }
        for (int64_t m = 0; m < shapes.rows[C]; m++) {
            float even[AMX_ROWS] = {}, odd[AMX_ROWS] = {};
            for (int64_t k = 0; k < shapes.rows[B]; k++) {
                const float first = half<0>(data[A][m][k]), second = half<1>(data[A][m][k]);
                for (int64_t n = 0; n < AMX_ROWS; n++) {
                    even[n] = flush_to_zero(__builtin_fmaf(first, right[0][k][n], even[n]));
                    odd[n] = flush_to_zero(__builtin_fmaf(second, right[1][k][n], odd[n]));
                }
            }
            for (int64_t n = 0; n < shapes.bytes[C] / 4; n++) {
                const float before = flush_to_zero(bit_cast<float>(data[C][m][n]));
                const float added = flush_to_zero(even[n] + odd[n]);
                data[C][m][n] = bit_cast<uint32_t>(flush_to_zero(before + added));
            }
        }
    }

private:
    template <int side>
    static float half(uint32_t pair) {
        return flush_to_zero(bit_cast<float>(side ? pair & 0xffff0000 : pair << 16));
    }

    const AmxTileShapes shapes;
    uint32_t data[8][AMX_ROWS][AMX_PAIRS] = {};
};

#endif

// Zero C0 to C3, or load or store them from a float32 matrix [16 H, AMX_BLOCK] with rows of `row`
// floats.
template <int H>
INLINE void zero_block(AmxTiles& tiles) {
    tiles.zero<C0>();
    tiles.zero<C1>();
    if constexpr (H == 2) {
        tiles.zero<C2>();
        tiles.zero<C3>();
    }
}
template <int H>
INLINE void load_block(AmxTiles& tiles, const float* c, int64_t row) {
    tiles.load<C0>(c, 4 * row);
    tiles.load<C1>(c + AMX_ROWS, 4 * row);
    if constexpr (H == 2) {
        tiles.load<C2>(c + AMX_ROWS * row, 4 * row);
        tiles.load<C3>(c + AMX_ROWS * row + AMX_ROWS, 4 * row);
    }
}
template <int H>
INLINE void store_block(AmxTiles& tiles, float* c, int64_t row) {
    tiles.store<C0>(c, 4 * row);
    tiles.store<C1>(c + AMX_ROWS, 4 * row);
    if constexpr (H == 2) {
        tiles.store<C2>(c + AMX_ROWS * row, 4 * row);
        tiles.store<C3>(c + AMX_ROWS * row + AMX_ROWS, 4 * row);
    }
}

// Round two vectors to the nearest bfloat16. The hardware instruction flushes denormals to zero.
INLINE void narrow(bf16* to, Floats low, Floats high) {
#if defined(__AVX512BF16__)
    const __m512bh both = _mm512_cvtne2ps_pbh(high, low);
    std::memcpy(to, &both, sizeof both);
#else
    for (int i = 0; i < WIDTH; i++) {
        store_one(to + i, low[i]);
        store_one(to + WIDTH + i, high[i]);
    }
#endif
}

}  // namespace ISA

#endif
