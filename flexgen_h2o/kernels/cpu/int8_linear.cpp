// linear_int8: integer matmuls of quantized matrices with inputs quantized to 8 bits.
//
// Outputs are the lanes of vectors. Shifts and masks extract bytes of four quantized values of an
// output. They are multiplied with four quantized inputs in the same order and accumulated in 16 bits
// as long as they fit. AVX-VNNI and AVX512_VNNI accumulate in 32 bits with one instruction.
//
// kernels/reference/matrix.py (`quantize_activations`) defines the quantization of the inputs.
#include "activations.h"
#include "packed_input.h"

namespace ISA {
namespace {

constexpr int64_t ROUNDED_ROWS = 64;    // rows of x that stay in the L1 cache with their totals
constexpr float INPUT_LEVELS = 127;     // quantized inputs are in [-127, 127]
constexpr float LARGEST = std::numeric_limits<float>::max();
constexpr float NAN_VALUE = std::numeric_limits<float>::quiet_NaN();

typedef int16_t Shorts __attribute__((vector_size(4 * WIDTH)));
typedef uint8_t Sixteen __attribute__((vector_size(16)));

// Quantized values of a unit as unsigned bytes. `shift` is the offset that makes them non-negative.
// `fitting` is the number of units whose products fit in a 16-bit sum, at two products per unit.
template <class C>
struct UnsignedBytes {
    static constexpr float shift = 0;
    static constexpr int fitting = C::bits == 6 ? 1 : 8;
    static INLINE Words of(Words nibbles) { return nibbles; }
};
template <>
struct UnsignedBytes<Mxfp4> {
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

// Quantized rows of x, one step per group. The rows of a register block are interleaved in blocks of
// ROWS; the last block may have fewer.
struct QuantizedInput {
    uint32_t* quantized;  // [groups, blocks, words, rows of the block], four inputs in matrix order
    float* steps;     // [groups, rows], quantization scales
    float* sums;      // [groups, rows], sums of x
    int64_t rows, words;

    // Return the values of the block that starts at `row`.
    const uint32_t* block(int64_t g, int64_t row) const {
        return quantized + (g * rows + row) * words;
    }
};

// Reorder 16 quantized inputs to match a matrix with `bits` bits.
INLINE Sixteen ordered(Sixteen x, int64_t bits) {
    if (bits == 4)
        return __builtin_shuffle(x, Sixteen{0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15});
    return __builtin_shuffle(x, Sixteen{0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15});
}

template <class T>
INLINE float largest_of(const T* x, int64_t count) {
    Ints largest{};
    for (int64_t i = 0; i < count; i += WIDTH) {
        const Ints size = bits_of<Ints>(magnitude(load_partial(x + i, count - i)));
        largest = size > largest ? size : largest;  // NaN counts as larger than all
    }
    return bits_of<float>(reduce_max(largest));
}

// Quantize `count` inputs of a group of `group` elements to words `apart` apart. Return the sum of the
// quantized values.
template <class T>
INLINE int32_t round_group(const T* x, int64_t count, int64_t group, int64_t bits, float step,
                           uint32_t* to, int64_t apart) {
    const Floats divisor = broadcast(step > 0 ? step : 1), limit = broadcast(INPUT_LEVELS);
    Ints all{};
    for (int64_t i = 0; i < group; i += 16) {
        uint8_t quantized[16];
        for (int64_t k = 0; k < 16; k += WIDTH) {
            Floats x_codes = rounded(load_partial(x + i + k, count - i - k) / divisor);
            x_codes = x_codes > limit ? limit : x_codes;
            x_codes = x_codes < -limit ? -limit : x_codes;
            const Ints whole = __builtin_convertvector(x_codes, Ints);
            all += whole;
            narrow(quantized + k, whole);
        }
        uint32_t words[4];
        const Sixteen bytes = ordered(load_raw<Sixteen>(quantized), bits);
        std::memcpy(words, &bytes, sizeof words);
        for (int64_t n = 0; n < 4 && i + 4 * n < group; n++) to[(i / 4 + n) * apart] = words[n];
    }
    return sum(all);
}

// Quantize the rows of x from `first` on with all threads of a parallel region. The rows of a block
// share cache lines. So few rows are split by groups, and no two threads write to one line.
template <class T>
void quantize_rows(const QuantizedLinear& a, const Blocks& m, int64_t first, const QuantizedInput& p) {
    const auto round_one = [&](int64_t row, int64_t g) {
        const T* x = static_cast<const T*>(a.x) + (first + row) * a.x_row + g * m.group;
        const int64_t at = g * p.rows + row, left = a.matrix.inputs - g * m.group;
        const int64_t count = left < m.group ? left : m.group;
        const float largest = largest_of(x, count);
        const int64_t before = row / ROWS * ROWS, behind = p.rows - before;
        const int64_t apart = behind < ROWS ? behind : ROWS;
        uint32_t* quantized = p.quantized + (g * p.rows + before) * p.words + row - before;
        if (!(largest <= LARGEST)) {
            for (int64_t n = 0; n < p.words; n++) quantized[n * apart] = 0;
            p.steps[at] = p.sums[at] = NAN_VALUE;
            return;
        }
        p.steps[at] = largest / INPUT_LEVELS;
        p.sums[at] = p.steps[at] * static_cast<float>(round_group(x, count, m.group, m.bits,
                                                                  p.steps[at], quantized, apart));
    };
    if (p.rows <= 4 * ROWS) {
#pragma omp for schedule(static) collapse(2)
        for (int64_t g = 0; g < m.groups; g++)
            for (int64_t row = 0; row < p.rows; row++) round_one(row, g);
    } else {  // sequential reads of each row
#pragma omp for schedule(static) collapse(2)
        for (int64_t row = 0; row < p.rows; row++)
            for (int64_t g = 0; g < m.groups; g++) round_one(row, g);
    }
}

// Return the words of x that are multiplied with a unit.
template <class C>
constexpr int parts() {
    return C::unit_inputs / 4;
}

// Return the bytes for word `part` of x.
template <class C>
INLINE Words bytes_of(const PackedUnit<C>& unit, int part) {
    if constexpr (C::bits == 6)
        return C::word(unit.words, part);
    else if constexpr (C::bits == 4)
        return UnsignedBytes<C>::of(unit.words[0] >> 4 * part & 0x0f0f0f0f);
    else
        return unit.words[0];
}

#if defined(INT8_DOT)
// Tiles whose vectors share each load of x. 16 registers do not suffice for two.
constexpr int TILES_TOGETHER = WIDTH == MATRIX_TILE ? 2 : 1;

using TileWords = PrefetchedWords[TILES_TOGETHER];

// sums += `count` units by R rows.
template <class C, int R>
INLINE void add_whole(const TileWords& words, int64_t count, const uint32_t* x,
                      Ints (&sums)[TILES_TOGETHER][R]) {
    constexpr int PARTS = parts<C>();
    constexpr bool APART = R * TILES_TOGETHER < 8;  // separate chains hide the latency of a sum
    Ints others[TILES_TOGETHER][R] = {};
    for (int64_t n = 0; n < count; n++) {
        Words bytes[PARTS][TILES_TOGETHER];
        for (int v = 0; v < TILES_TOGETHER; v++) {
            const PackedUnit<C> unit = words[v].template unit<C, R <= MEMORY_BOUND_ROWS>(n);
            for (int part = 0; part < PARTS; part++) bytes[part][v] = bytes_of(unit, part);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int part = 0; part < PARTS; part++) {
                const Words four = x[(PARTS * n + part) * R + r] + Words{};
                for (int v = 0; v < TILES_TOGETHER; v++) {
                    Ints& to = APART && part % 2 ? others[v][r] : sums[v][r];
                    to = add_int8_dot(to, bytes[part][v], four);
                }
            }
    }
    if (APART)
        for (int v = 0; v < TILES_TOGETHER; v++)
            for (int r = 0; r < R; r++) sums[v][r] += others[v][r];
}
#else
constexpr int TILES_TOGETHER = 1;
using TileWords = PrefetchedWords[TILES_TOGETHER];

// sums += unsigned bytes by signed bytes, added in adjacent pairs.
INLINE Shorts add_pairs(Shorts sums, Words bytes, Words x) {
#if defined(__AVX512F__)
    return sums + Shorts(_mm512_maddubs_epi16(__m512i(bytes), __m512i(x)));
#elif defined(__AVX2__)
    sums += Shorts(_mm256_maddubs_epi16(__m256i(bytes), __m256i(x)));
    asm("" : "+x"(sums));  // prevents a GCC reordering that needs too many registers
    return sums;
#else
    const Shorts low = bits_of<Shorts>(bytes & 0x00ff00ff);
    const Shorts high = bits_of<Shorts>(bytes >> 8 & 0x00ff00ff);
    const Shorts both = bits_of<Shorts>(x);
    return sums + low * (both << 8 >> 8) + high * (both >> 8);
#endif
}

// Add the two sums of each lane.
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

// sums [R] += COUNT units of WIDTH outputs, from unit `from` on, by R rows.
template <class C, int R, int COUNT>
INLINE void add_few(const PrefetchedWords& words, int64_t from, const uint32_t* x, Ints* sums) {
    constexpr int PARTS = parts<C>();
    Shorts low[R] = {}, high[R] = {};
#pragma GCC unroll 8
    for (int n = 0; n < COUNT; n++) {
        const PackedUnit<C> unit = words.template unit<C, R <= MEMORY_BOUND_ROWS>(from + n);
        for (int part = 0; part < PARTS; part++) {
            const Words bytes = bytes_of(unit, part);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const Words four = x[(PARTS * n + part) * R + r] + Words{};
                if (C::bits == 8) {
                    low[r] = add_pairs(low[r], bytes & 0x0f0f0f0f, four);
                    high[r] = add_pairs(high[r], bytes >> 4 & 0x0f0f0f0f, four);
                } else {
                    Shorts& to = part < PARTS / 2 ? low[r] : high[r];
                    to = add_pairs(to, bytes, four);
                }
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)  // 8 bits: the upper nibble has a weight of 16
        sums[r] += joined(low[r]) + (joined(high[r]) << (C::bits == 8 ? 4 : 0));
}

// sums += `count` units by R rows.
template <class C, int R>
INLINE void add_whole(const TileWords& words, int64_t count, const uint32_t* x,
                      Ints (&sums)[TILES_TOGETHER][R]) {
    constexpr int FITTING = UnsignedBytes<C>::fitting, EACH = parts<C>() * R;
    int64_t n = 0;
    for (; n + FITTING <= count; n += FITTING)
        add_few<C, R, FITTING>(words[0], n, x + n * EACH, sums[0]);
    for (; n < count; n++)
        add_few<C, R, 1>(words[0], n, x + n * EACH, sums[0]);
}
#endif

constexpr int64_t TOGETHER = TILES_TOGETHER * MATRIX_TILE;  // outputs

// Multiply R rows from `row` on by a vector of outputs of each block, and add to their totals.
template <class C, int R>
INLINE void add_block(const Blocks& m, const PrefetchedBlock<C>* blocks, int64_t lane, int64_t g,
                      const QuantizedInput& p, int64_t row, float* totals) {
    TileWords words;
    for (int v = 0; v < TILES_TOGETHER; v++) words[v] = blocks[v].words(lane, row == 0);
    Ints whole[TILES_TOGETHER][R] = {};
    add_whole<C, R>(words, m.words / C::unit_words, p.block(g, row), whole);
    const float *steps = p.steps + g * p.rows + row, *sums = p.sums + g * p.rows + row;
#pragma GCC unroll 2  // otherwise the sums spill to memory
    for (int v = 0; v < TILES_TOGETHER; v++) {
        const Floats scale = C::scales(blocks[v].block, lane);
        const Floats zero = fma(scale, broadcast(-UnsignedBytes<C>::shift),
                                C::zeros(blocks[v].block, lane));
        float* to = totals + row * TOGETHER + v * MATRIX_TILE + lane;
#pragma GCC unroll 8
        for (int r = 0; r < R; r++, to += TOGETHER) {
            const Floats products = __builtin_convertvector(whole[v][r], Floats) * broadcast(steps[r]);
            store(to, fma(products, scale, fma(zero, broadcast(sums[r]), load(to))));
        }
    }
}

using RoundedTiles = void (*)(const Blocks&, int64_t tile, int64_t tiles, const QuantizedInput&,
                              float* totals);

// Compute tiles of outputs from `tile` on, to totals [rows, TOGETHER]. Positions past the last tile
// repeat it.
template <class C>
void multiply_tiles(const Blocks& m, int64_t tile, int64_t tiles, const QuantizedInput& p,
                    float* totals) {
    std::memset(totals, 0, static_cast<size_t>(p.rows * TOGETHER) * sizeof *totals);
    const CacheLevel to = cache_of_weights(p.rows <= ROWS);
    for (int64_t g = 0; g < m.groups; g++) {
        PrefetchedBlock<C> blocks[TILES_TOGETHER];
        for (int v = 0; v < TILES_TOGETHER; v++) {
            const int64_t source_tile = tile + v < tiles ? tile + v : tile;
            blocks[v] = PrefetchedBlock<C>::of(m, source_tile, g, TILES_TOGETHER, to);
        }
        for (int64_t lane = 0; lane < MATRIX_TILE; lane += WIDTH)
            by_rows(p.rows, [&](auto count, int64_t row) ALWAYS_INLINE {
                add_block<C, decltype(count)::value>(m, blocks, lane, g, p, row, totals);
            });
    }
}

// Compute all matmuls of a chain that share x.
template <class T>
int multiply(const QuantizedLinear& a) {
    const RoundedTiles multiply = by_format(a.matrix, [](auto format) -> RoundedTiles {
        if constexpr (std::is_same_v<decltype(format), Float12>)
            return nullptr;  // its codes are not integers
        else
            return multiply_tiles<decltype(format)>;
    });
    if (!multiply) return INVALID;
    const Blocks m(a.matrix);
    const int64_t max_rows = a.rows < ROUNDED_ROWS ? a.rows : ROUNDED_ROWS;
    QuantizedInput p{nullptr, nullptr, nullptr, max_rows, m.group / 4};
    const Memory<uint32_t> quantized = memory<uint32_t>(m.groups * max_rows * p.words);
    const Memory<float> floats = memory<float>(2 * max_rows * m.groups);
    if (!quantized || !floats) return NO_MEMORY;
    p.quantized = quantized.get(), p.steps = floats.get(), p.sums = p.steps + m.groups * max_rows;
    for (int64_t first = 0; first < a.rows; first += ROUNDED_ROWS) {
        const int64_t left = a.rows - first;
        p.rows = left < max_rows ? left : max_rows;
#pragma omp parallel num_threads(a.threads)
        {
            quantize_rows<T>(a, m, first, p);
            alignas(64) float totals[ROUNDED_ROWS * TOGETHER];
            for (const QuantizedLinear* matmul = &a; matmul; matmul = matmul->next) {
                const Blocks blocks(matmul->matrix);
                const int64_t tiles = tiles_of(matmul->matrix);
#pragma omp for schedule(static) nowait
                for (int64_t tile = 0; tile < tiles; tile += TILES_TOGETHER) {
                    multiply(blocks, tile, tiles, p, totals);
                    put_columns<T>(*matmul, tile * MATRIX_TILE, TOGETHER, first, p.rows, totals);
                }
            }
        }
    }
    return DONE;
}

}  // namespace

int linear_int8(const QuantizedLinear& a) {
    if (!same_format(a)) return INVALID;
    BY_DTYPE(multiply)
}

}  // namespace ISA
