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
constexpr float LARGEST = std::numeric_limits<float>::max();
constexpr float NO_NUMBER = std::numeric_limits<float>::quiet_NaN();

typedef int16_t Shorts __attribute__((vector_size(4 * WIDTH)));
typedef uint8_t Sixteen __attribute__((vector_size(16)));

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

// Rows of x, rounded group by group. Those that meet weights together lie side by side.
struct RoundedRows {
    uint32_t* codes;  // [groups, blocks, words, ROWS]: four inputs each, as those of the matrix come
    float* steps;     // [groups, rows]: between neighbouring codes
    float* sums;      // [groups, rows]: of x
    int64_t rows, blocks, words;

    uint32_t* at(int64_t g, int64_t row) const {
        return codes + (g * blocks + row / ROWS) * words * ROWS + row % ROWS;
    }
};

// 16 inputs' codes in the order in which those of a matrix of so many bits come.
template <int BITS>
INLINE Sixteen ordered(Sixteen codes) {
    if (BITS == 4)
        return __builtin_shuffle(codes, Sixteen{0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15});
    return __builtin_shuffle(codes, Sixteen{0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15});
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

// `count` inputs to the codes of a group of `group`, ROWS apart; returns the sum of these.
template <int BITS, class T>
INLINE int32_t round_group(const T* x, int64_t count, int64_t group, float step, uint32_t* to) {
    const Floats divisor = broadcast(step > 0 ? step : 1), most = broadcast(INPUT_LEVELS);
    Ints all{};
    for (int64_t i = 0; i < group; i += 16) {
        uint8_t codes[16];
        for (int64_t k = 0; k < 16; k += WIDTH) {
            Floats x_codes = rounded(some(x + i + k, count - i - k) / divisor);
            x_codes = x_codes > most ? most : x_codes;
            x_codes = x_codes < -most ? -most : x_codes;
            const Ints whole = __builtin_convertvector(x_codes, Ints);
            all += whole;
            narrow(codes + k, whole);
        }
        uint32_t words[4];
        const Sixteen bytes = ordered<BITS>(load_raw<Sixteen>(codes));
        std::memcpy(words, &bytes, sizeof words);
        for (int64_t n = 0; n < 4 && i + 4 * n < group; n++) to[(i / 4 + n) * ROWS] = words[n];
    }
    int32_t sum = 0;
    for (int i = 0; i < WIDTH; i++) sum += all[i];
    return sum;
}

// `rows` of x from `first` on, shared by the threads of a parallel region.
template <class T, int BITS>
void round_rows(const Product& a, const Blocks& m, int64_t first, int64_t rows,
                const RoundedRows& p) {
#pragma omp for schedule(static) collapse(2)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t g = 0; g < m.groups; g++) {
            const T* x = static_cast<const T*>(a.x) + (first + row) * a.x_row + g * m.group;
            const int64_t at = g * p.rows + row, left = a.matrix.inputs - g * m.group;
            const int64_t count = left < m.group ? left : m.group;
            const float largest = largest_of(x, count);
            uint32_t* codes = p.at(g, row);
            if (!(largest <= LARGEST)) {
                for (int64_t n = 0; n < p.words; n++) codes[n * ROWS] = 0;
                p.steps[at] = p.sums[at] = NO_NUMBER;
                continue;
            }
            p.steps[at] = largest / INPUT_LEVELS;
            p.sums[at] = p.steps[at] * static_cast<float>(round_group<BITS>(
                                           x, count, m.group, p.steps[at], codes));
        }
}

// Words of x that a word of codes meets.
template <class C>
constexpr int parts() {
    return C::bits == 4 ? 2 : 1;
}

// sums [R] += what COUNT words of WIDTH outputs give with R rows.
template <class C, int R, int COUNT>
INLINE void add_whole(const uint8_t* words, const uint32_t* x, Ints* sums) {
    constexpr int PARTS = parts<C>();
    Shorts low[R] = {}, high[R] = {};
#pragma GCC unroll 8
    for (int n = 0; n < COUNT; n++) {
        const Words word = load_words(words + 4 * n * MATRIX_TILE);
        const Words first = ByteCodes<C>::of(word & 0x0f0f0f0f);
        const Words second = ByteCodes<C>::of(word >> 4 & 0x0f0f0f0f);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const uint32_t* mine = x + PARTS * n * ROWS + r;
            low[r] = add_pairs(low[r], first, mine[0] + Words{});
            high[r] = add_pairs(high[r], second, mine[(PARTS - 1) * ROWS] + Words{});
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
    constexpr int FITTING = ByteCodes<C>::fitting, EACH = parts<C>() * ROWS;
    const uint32_t* x = p.at(g, row);
    const uint8_t* words = C::words(block) + 4 * lane;
    Ints whole[R] = {};
    int64_t n = 0;
    for (; n + FITTING <= m.words; n += FITTING)
        add_whole<C, R, FITTING>(words + 4 * n * MATRIX_TILE, x + n * EACH, whole);
    for (; n < m.words; n++)
        add_whole<C, R, 1>(words + 4 * n * MATRIX_TILE, x + n * EACH, whole);
    const Floats scale = C::scales(block, lane);
    const Floats zero = fma(scale, broadcast(-ByteCodes<C>::shift), C::zeros(block, lane));
    const float *steps = p.steps + g * p.rows + row, *sums = p.sums + g * p.rows + row;
    float* to = totals + row * MATRIX_TILE + lane;
#pragma GCC unroll 8
    for (int r = 0; r < R; r++, to += MATRIX_TILE) {
        const Floats products = __builtin_convertvector(whole[r], Floats) * broadcast(steps[r]);
        store(to, fma(products, scale, fma(zero, broadcast(sums[r]), load(to))));
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
        RoundedRows p{nullptr, nullptr, nullptr, most, (most + ROWS - 1) / ROWS, m.group / 4};
        const Memory<uint32_t> codes = memory<uint32_t>(m.groups * p.blocks * p.words * ROWS);
        const Memory<float> floats = memory<float>(2 * most * m.groups);
        if (!codes || !floats) return NO_MEMORY;
        p.codes = codes.get(), p.steps = floats.get(), p.sums = p.steps + m.groups * most;
        for (int64_t first = 0; first < a.rows; first += ROUNDED_ROWS) {
            const int64_t left = a.rows - first, rows = left < most ? left : most;
#pragma omp parallel num_threads(a.threads)
            {
                round_rows<T, C::bits>(a, m, first, rows, p);
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
