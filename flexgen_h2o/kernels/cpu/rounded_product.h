// linear_quantized with inputs that are rounded to 8 bits: products of whole numbers.
//
// Outputs are the lanes of vectors. A shift and a mask make bytes of four codes of an output; they
// meet four codes of x in the same order, and products are added up in 16 bits as long as they fit.
// What the rounding is, says kernels/reference_matrix.py (`rounded_activations`).
#pragma once

#include "activations.h"
#include "panel.h"

namespace ISA {

constexpr int64_t ROUNDED_ROWS = 64;    // of x, which stay in the nearest cache with their totals
constexpr int64_t BLOCKS_AHEAD = 8;     // that are asked for beforehand
constexpr float INPUT_LEVELS = 127;     // of a code of x, to either side of 0
constexpr int ROUNDED_TOGETHER = 16;    // inputs
constexpr float LARGEST = std::numeric_limits<float>::max();
constexpr float NO_NUMBER = std::numeric_limits<float>::quiet_NaN();

typedef int16_t Shorts __attribute__((vector_size(4 * WIDTH)));

// The codes of a word as bytes no smaller than 0, four at a time: `shift` by which they are too
// large, and how many words of them by codes of x fit into sums of 16 bits.
template <class C>
struct ByteCodes {
    static constexpr float shift = 0;
    static constexpr int fitting = 8;
    static INLINE Words of(Words nibbles) { return nibbles; }
};
template <>
struct ByteCodes<Mxfp4> {
    static constexpr float shift = 12;
    static constexpr int fitting = 4;
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

// sums += the products of bytes with signed ones, of two neighbours together.
INLINE Shorts add_pairs(Shorts sums, Words bytes, Words x) {
#if defined(__AVX512F__)
    return sums + Shorts(_mm512_maddubs_epi16(__m512i(bytes), __m512i(x)));
#elif defined(__AVX2__)
    sums += Shorts(_mm256_maddubs_epi16(__m256i(bytes), __m256i(x)));
    asm("" : "+x"(sums));  // else GCC adds in another order, for which there are too few registers
    return sums;
#else
    const Shorts low = bits_of<Shorts>(bytes & 0x00ff00ff);
    const Shorts high = bits_of<Shorts>(bytes >> 8 & 0x00ff00ff);
    const Shorts both = bits_of<Shorts>(x);
    return sums + low * (both << 8 >> 8) + high * (both >> 8);
#endif
}

// The two sums of each lane together.
INLINE Ints joined(Shorts sums) {
#if defined(__AVX512F__)
    return Ints(_mm512_madd_epi16(__m512i(sums), _mm512_set1_epi16(1)));
#elif defined(__AVX2__)
    return Ints(_mm256_madd_epi16(__m256i(sums), _mm256_set1_epi16(1)));
#else
    const Ints both = bits_of<Ints>(sums);
    return (both << 16 >> 16) + (both >> 16);
#endif
}

// Rows of x, rounded group by group.
struct RoundedRows {
    uint32_t* codes;  // [groups, rows, words]: four inputs each, as those of the matrix come
    float* steps;     // [groups, rows]: between neighbouring codes
    float* sums;      // [groups, rows]: of x
    int64_t rows, words;
};

// Which of its inputs the bytes of a group's word of x are, `bits` being those of the matrix.
INLINE int64_t input_of(int bits, int64_t word, int64_t byte) {
    return bits == 4 ? word / 2 * 8 + 4 * (byte % 2) + 2 * (word % 2) + byte / 2
                     : word * 4 + 2 * (byte % 2) + byte / 2;
}

template <class T>
INLINE float largest_of(const T* x, int64_t count) {
    Ints most{};
    for (int64_t i = 0; i < count; i += WIDTH) {
        const Ints size = bits_of<Ints>(magnitude(some(x + i, count - i)));
        most = size > most ? size : most;  // NaN is larger than all
    }
    int32_t largest = 0;
    for (int i = 0; i < WIDTH; i++) largest = most[i] > largest ? most[i] : largest;
    return bits_of<float>(largest);
}

// `count` inputs to the codes of a group of `group`; returns the sum of these.
template <int BITS, class T>
INLINE int32_t round_group(const T* x, int64_t count, int64_t group, float step, uint32_t* to) {
    constexpr int64_t WORDS = ROUNDED_TOGETHER / 4;
    const Floats divisor = broadcast(step > 0 ? step : 1), most = broadcast(INPUT_LEVELS);
    Ints all{};
    for (int64_t i = 0; i < group; i += ROUNDED_TOGETHER) {
        int32_t codes[ROUNDED_TOGETHER];
        for (int64_t k = 0; k < ROUNDED_TOGETHER; k += WIDTH) {
            Floats x_codes = rounded(some(x + i + k, count - i - k) / divisor);
            x_codes = x_codes > most ? most : x_codes;
            x_codes = x_codes < -most ? -most : x_codes;
            const Ints whole = __builtin_convertvector(x_codes, Ints);
            all += whole;
            std::memcpy(codes + k, &whole, sizeof whole);
        }
        for (int64_t n = 0; n < WORDS && i + 4 * n < group; n++) {
            uint32_t word = 0;
            for (int byte = 0; byte < 4; byte++)
                word |= static_cast<uint32_t>(codes[input_of(BITS, n, byte)] & 0xff) << 8 * byte;
            to[i / 4 + n] = word;
        }
    }
    int32_t sum = 0;
    for (int i = 0; i < WIDTH; i++) sum += all[i];
    return sum;
}

// `rows` of x from `first` on.
template <class T, int BITS>
void round_rows(const Product& a, const Blocks& m, int64_t first, int64_t rows,
                const RoundedRows& p) {
#pragma omp parallel for schedule(static) num_threads(a.threads) \
    if (rows * a.matrix.inputs > LEAST_PACKED)
    for (int64_t row = 0; row < rows; row++) {
        const T* x = static_cast<const T*>(a.x) + (first + row) * a.x_row;
        for (int64_t g = 0; g < m.groups; g++) {
            const int64_t at = g * p.rows + row, left = a.matrix.inputs - g * m.group;
            const int64_t count = left < m.group ? left : m.group;
            const float largest = largest_of(x + g * m.group, count);
            uint32_t* codes = p.codes + at * p.words;
            if (!(largest <= LARGEST)) {
                std::memset(codes, 0, static_cast<size_t>(p.words) * sizeof *codes);
                p.steps[at] = p.sums[at] = NO_NUMBER;
                continue;
            }
            p.steps[at] = largest / INPUT_LEVELS;
            p.sums[at] = p.steps[at] * static_cast<float>(round_group<BITS>(
                                           x + g * m.group, count, m.group, p.steps[at], codes));
        }
    }
}

// sums [R] += what COUNT words of WIDTH outputs give with R rows.
template <class C, int R, int COUNT>
INLINE void add_whole(const uint8_t* words, const uint32_t* x, int64_t apart, Ints* sums) {
    constexpr int PARTS = C::bits == 4 ? 2 : 1;  // words of x that a word of codes meets
    Shorts low[R] = {}, high[R] = {};
#pragma GCC unroll 8
    for (int n = 0; n < COUNT; n++) {
        const Words word = load_words(words + 4 * n * MATRIX_TILE);
        const Words first = ByteCodes<C>::of(word & 0x0f0f0f0f);
        const Words second = ByteCodes<C>::of(word >> 4 & 0x0f0f0f0f);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const uint32_t* mine = x + r * apart + PARTS * n;
            low[r] = add_pairs(low[r], first, mine[0] + Words{});
            high[r] = add_pairs(high[r], second, mine[PARTS - 1] + Words{});
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)  // 8 bits: the upper four are worth 16 times as much
        sums[r] += joined(low[r]) + (joined(high[r]) << (C::bits == 4 ? 0 : 4));
}

// R rows from `row` on by WIDTH outputs of a group, to their totals.
template <class C, int R>
INLINE void add_rounded(const Blocks& m, const uint8_t* block, int64_t lane, int64_t g,
                        const RoundedRows& p, int64_t row, float* totals) {
    constexpr int FITTING = ByteCodes<C>::fitting;
    const uint32_t* x = p.codes + (g * p.rows + row) * p.words;
    const uint8_t* words = C::words(block) + 4 * lane;
    const int64_t each = p.words / m.words;
    Ints sums[R] = {};
    int64_t n = 0;
    for (; n + FITTING <= m.words; n += FITTING)
        add_whole<C, R, FITTING>(words + 4 * n * MATRIX_TILE, x + n * each, p.words, sums);
    for (; n < m.words; n++)
        add_whole<C, R, 1>(words + 4 * n * MATRIX_TILE, x + n * each, p.words, sums);
    const Floats scale = C::scales(block, lane);
    const Floats zero = fma(scale, broadcast(-ByteCodes<C>::shift), C::zeros(block, lane));
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        const int64_t at = g * p.rows + row + r;
        float* total = totals + (row + r) * MATRIX_TILE + lane;
        const Floats products = __builtin_convertvector(sums[r], Floats) * broadcast(p.steps[at]);
        store(total, fma(products, scale, fma(zero, broadcast(p.sums[at]), load(total))));
    }
}

// A tile of outputs, to totals [rows, MATRIX_TILE].
template <class C>
void rounded_tile(const Blocks& m, int64_t tile, const RoundedRows& p, int64_t rows,
                  float* totals) {
    std::memset(totals, 0, static_cast<size_t>(rows * MATRIX_TILE) * sizeof *totals);
    for (int64_t g = 0; g < m.groups; g++) {
        const uint8_t* block = m.at(tile, g);
        for (int64_t line = 0; line < m.block_bytes; line += 64)
            __builtin_prefetch(block + BLOCKS_AHEAD * m.block_bytes + line, 0, 3);
        for (int64_t lane = 0; lane < MATRIX_TILE; lane += WIDTH)
            by_rows(rows, [&](auto count, int64_t row) {
                add_rounded<C, decltype(count)::value>(m, block, lane, g, p, row, totals);
            });
    }
}

// Every product of the chain, which share x.
template <class T>
int rounded_product(const Product& a) {
    return by_codes(a.matrix, [&](auto kind) -> int {
        using C = decltype(kind);
        const Blocks m(a.matrix);
        const int64_t most = a.rows < ROUNDED_ROWS ? a.rows : ROUNDED_ROWS;
        RoundedRows p{nullptr, nullptr, nullptr, most, m.group / 4};
        const Memory<uint32_t> codes = memory<uint32_t>(m.groups * most * p.words);
        const Memory<float> floats = memory<float>(2 * most * m.groups);
        if (!codes || !floats) return NO_MEMORY;
        p.codes = codes.get(), p.steps = floats.get(), p.sums = p.steps + m.groups * most;
        for (int64_t first = 0; first < a.rows; first += ROUNDED_ROWS) {
            const int64_t left = a.rows - first, rows = left < most ? left : most;
            round_rows<T, C::bits>(a, m, first, rows, p);
#pragma omp parallel num_threads(a.threads)
            {
                alignas(64) float totals[ROUNDED_ROWS * MATRIX_TILE];
                for (const Product* each = &a; each; each = each->next) {
                    const Blocks blocks(each->matrix);
#pragma omp for schedule(static) nowait
                    for (int64_t tile = 0; tile < tiles_of(each->matrix); tile++) {
                        rounded_tile<C>(blocks, tile, p, rows, totals);
                        put_columns<T>(*each, tile * MATRIX_TILE, MATRIX_TILE, first, rows, totals);
                    }
                }
            }
        }
        return DONE;
    });
}

}  // namespace ISA
