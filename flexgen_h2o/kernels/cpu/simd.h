// Vectors of WIDTH floats for the instruction set of this compilation.
//
// Every source that includes this header is compiled once per instruction set, into namespace ISA (a
// macro of the build). No rounding is implicit: the build disables contraction, and multiply-adds are
// explicit.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__AVX512F__)
// GCC 12 warns about deliberately undefined vectors in its own header (GCC bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#elif defined(__AVX2__)
// The parts of <immintrin.h> up to AVX2. GCC takes a second per source for the whole header.
#define _IMMINTRIN_H_INCLUDED
#include <smmintrin.h>
#include <avxintrin.h>
#include <avx2intrin.h>
#include <avxvnniintrin.h>
#include <f16cintrin.h>
#include <fmaintrin.h>
#endif

namespace ISA {

#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX2__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif

// CPUs from before 2013 run the portable kernels of x86. Register blocks of one row, in a single variant,
// halve the time to compile them.
#if defined(__x86_64__) && !defined(__AVX2__)
#define FEW_VARIANTS 1
#else
#define FEW_VARIANTS 0
#endif

constexpr float MASKED = -std::numeric_limits<float>::infinity();  // logit of a masked key

#define ALWAYS_INLINE __attribute__((always_inline))  // for lambdas, after the parameter list
#define INLINE inline ALWAYS_INLINE
#define NOINLINE __attribute__((noinline))

typedef float Floats __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t Words __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH)));
typedef uint8_t Bytes __attribute__((vector_size(WIDTH)));

// 16-bit elements of caches and weights. float needs no wrapper.
struct bf16 {
    uint16_t bits;
};
struct fp16 {
    uint16_t bits;
};

template <class To, class From>
INLINE To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

template <class V, class P>
INLINE V load_raw(const P* from) {
    V to;
    std::memcpy(&to, from, sizeof to);
    return to;
}

// An integer as a type, for loops with a compile-time trip count.
template <int N>
using Constant = std::integral_constant<int, N>;

INLINE Floats broadcast(float x) { return x - Floats{}; }

INLINE Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

// Return (x & mask) | more.
INLINE Words masked_or(Words x, uint32_t mask, uint32_t more) {
#if defined(__AVX512F__)
    constexpr int AND_OR = 0xea;
    return Words(_mm512_ternarylogic_epi32(__m512i(x), __m512i(Words{} + mask),
                                           __m512i(Words{} + more), AND_OR));
#else
    return (x & mask) | more;
#endif
}

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(H2O_EMULATE)
#define INT8_DOT
// sums += the dot products of four bytes per lane: unsigned `bytes` by signed `x`.
INLINE Ints add_int8_dot(Ints sums, Words bytes, Words x) {
#if defined(__AVX512VNNI__)
    return Ints(_mm512_dpbusd_epi32(__m512i(sums), __m512i(bytes), __m512i(x)));
#elif defined(__AVXVNNI__)
    return Ints(_mm256_dpbusd_avx_epi32(__m256i(sums), __m256i(bytes), __m256i(x)));
#else
    for (int shift = 0; shift < 32; shift += 8)
        sums += Ints(bytes >> shift & 0xff) * (Ints(x << (24 - shift)) >> 24);
    return sums;
#endif
}
#endif

// Return b if either operand is NaN.
INLINE Floats max(Floats a, Floats b) {
#if defined(__AVX512F__)
    return _mm512_maskz_max_ps(0xffff, a, b);
#elif defined(__AVX2__)
    return _mm256_max_ps(a, b);
#else
    return a > b ? a : b;
#endif
}

#if defined(__AVX512F__)
// _mm512_castps512_ps128 is avoided: GCC 12 reports an undefined vector (-Wuninitialized).
INLINE __m128 first_four(Floats x) {
    __m128 four;
    std::memcpy(&four, &x, sizeof four);
    return four;
}
#endif

INLINE float sum(Floats x) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
    x += _mm512_maskz_shuffle_f32x4(0xffff, x, x, 0x4e);  // add the other half
    x += _mm512_maskz_shuffle_f32x4(0xffff, x, x, 0xb1);  // add the other quarter
    __m128 four = first_four(x);
#else
    __m128 four = _mm256_castps256_ps128(x) + _mm256_extractf128_ps(x, 1);
#endif
    four += _mm_movehl_ps(four, four);
    return four[0] + four[1];
#else
    return (x[0] + x[2]) + (x[1] + x[3]);
#endif
}

// Reduce four vectors to four sums.
INLINE void sums(const Floats* x, float* to) {
#if defined(__AVX512F__)
    const Floats a = _mm512_unpacklo_ps(x[0], x[1]) + _mm512_unpackhi_ps(x[0], x[1]);
    const Floats b = _mm512_unpacklo_ps(x[2], x[3]) + _mm512_unpackhi_ps(x[2], x[3]);
    Floats all = _mm512_shuffle_ps(a, b, 0x44) + _mm512_shuffle_ps(a, b, 0xee);
    all += _mm512_maskz_shuffle_f32x4(0xffff, all, all, 0x4e);
    all += _mm512_maskz_shuffle_f32x4(0xffff, all, all, 0xb1);
    _mm_storeu_ps(to, first_four(all));
#elif defined(__AVX2__)
    const Floats all = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
    _mm_storeu_ps(to, _mm256_castps256_ps128(all) + _mm256_extractf128_ps(all, 1));
#else
    for (int i = 0; i < 4; i++) to[i] = sum(x[i]);
#endif
}

INLINE float reduce_max(Floats x) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
    x = max(x, _mm512_maskz_shuffle_f32x4(0xffff, x, x, 0x4e));  // the other half
    x = max(x, _mm512_maskz_shuffle_f32x4(0xffff, x, x, 0xb1));  // the other quarter
    __m128 four = first_four(x);
#else
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
#endif
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return four[0] > four[1] ? four[0] : four[1];
#else
    const float a = x[0] > x[2] ? x[0] : x[2], b = x[1] > x[3] ? x[1] : x[3];
    return a > b ? a : b;
#endif
}

// Reduce four vectors to four maxima.
INLINE void reduce_max(const Floats* x, float* to) {
#if defined(__AVX512F__)
    const Floats a = max(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
    const Floats b = max(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
    Floats all = max(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
    all = max(all, _mm512_maskz_shuffle_f32x4(0xffff, all, all, 0x4e));
    all = max(all, _mm512_maskz_shuffle_f32x4(0xffff, all, all, 0xb1));
    _mm_storeu_ps(to, first_four(all));
#else
    for (int i = 0; i < 4; i++) to[i] = reduce_max(x[i]);
#endif
}

INLINE int32_t sum(Ints x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32(__m512i(x));
#else
    int32_t all = 0;
    for (int i = 0; i < WIDTH; i++) all += x[i];
    return all;
#endif
}

INLINE int32_t reduce_max(Ints x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epi32(__m512i(x));
#else
    int32_t largest = x[0];
    for (int i = 1; i < WIDTH; i++) largest = x[i] > largest ? x[i] : largest;
    return largest;
#endif
}

// Convert the bits of a float16, including denormals, infinities and NaN. For single elements.
inline float from_half(uint16_t half) {
    uint32_t bits = static_cast<uint32_t>(half & 0x7fff) << 13;
    bits = (half & 0x7c00) == 0x7c00 ? bits + (112u << 23) + (112u << 23)
                                     : bit_cast<uint32_t>(bit_cast<float>(bits) * 0x1p112f);
    return bit_cast<float>(bits | static_cast<uint32_t>(half & 0x8000) << 16);
}

// Round to the nearest float16, ties to even.
inline uint16_t to_half(float x) {
    uint32_t bits = bit_cast<uint32_t>(x), sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
    if (bits >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);
    if (bits < 0x38800000) {  // subnormal in float16: adding 0.5 rounds at 2^-24
        uint32_t low = bit_cast<uint32_t>(bit_cast<float>(bits) + 0.5f) - 0x3f000000;
        return static_cast<uint16_t>(sign | low);
    }
    bits += 0xfff + (bits >> 13 & 1);
    return static_cast<uint16_t>(sign | (bits - (112u << 23)) >> 13);
}

INLINE Floats load(const float* from) { return load_raw<Floats>(from); }

// Conversions between integer widths. GCC scalarizes some of them without intrinsics.
INLINE Words widen(const uint16_t* from) {
#if defined(__AVX512F__)
    return Words(_mm512_cvtepu16_epi32(load_raw<__m256i>(from)));
#elif defined(__AVX2__)
    return Words(_mm256_cvtepu16_epi32(load_raw<__m128i>(from)));
#else
    return __builtin_convertvector(load_raw<Halves>(from), Words);
#endif
}

INLINE Ints widen(const uint8_t* from) {
#if defined(__AVX512F__)
    return Ints(_mm512_maskz_cvtepu8_epi32(0xffff, load_raw<__m128i>(from)));
#elif defined(__AVX2__)
    return Ints(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
    return __builtin_convertvector(load_raw<Bytes>(from), Ints);
#endif
}

// Keep the low bytes.
INLINE void narrow(uint8_t* to, Ints x) {
#if defined(__AVX512F__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(__m512i(x)));
#elif defined(__AVX2__)
    const __m256i low = _mm256_shuffle_epi8(__m256i(x), _mm256_set1_epi32(0x0c080400));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to),
                     _mm_unpacklo_epi32(_mm256_castsi256_si128(low),
                                        _mm256_extracti128_si256(low, 1)));
#else
    for (int i = 0; i < WIDTH; i++) to[i] = static_cast<uint8_t>(x[i]);
#endif
}

INLINE Floats load(const bf16* from) { return bit_cast<Floats>(widen(&from->bits) << 16); }

INLINE Floats load(const fp16* from) {
#if defined(__AVX512F__)
    return _mm512_maskz_cvtph_ps(0xffff, load_raw<__m256i>(from));
#elif defined(__F16C__)
    return _mm256_cvtph_ps(load_raw<__m128i>(from));
#else
    Floats to;
    for (int i = 0; i < WIDTH; i++) to[i] = from_half(from[i].bits);
    return to;
#endif
}

// Convert integers that hold the bits of float16.
INLINE Floats from_halves(Words halves) {
#if defined(__AVX512F__)
    return _mm512_maskz_cvtph_ps(0xffff, _mm512_maskz_cvtepi32_epi16(0xffff, __m512i(halves)));
#elif defined(__F16C__)
    return _mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128(__m256i(halves)),
                                            _mm256_extracti128_si256(__m256i(halves), 1)));
#else
    Floats to;
    for (int i = 0; i < WIDTH; i++) to[i] = from_half(static_cast<uint16_t>(halves[i]));
    return to;
#endif
}

INLINE void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }
INLINE void store(uint32_t* to, Words x) { std::memcpy(to, &x, sizeof x); }
INLINE void store(int32_t* to, Ints x) { std::memcpy(to, &x, sizeof x); }

inline float load_one(const float* from) { return *from; }
inline float load_one(const bf16* from) {
    return bit_cast<float>(static_cast<uint32_t>(from->bits) << 16);
}
inline float load_one(const fp16* from) { return from_half(from->bits); }

inline void store_one(float* to, float x) { *to = x; }
inline void store_one(bf16* to, float x) {
    uint32_t bits = bit_cast<uint32_t>(x);
    to->bits = static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000
                                         ? bits >> 16 | 0x40
                                         : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline void store_one(fp16* to, float x) { to->bits = to_half(x); }

// Narrow integers below 2^16.
INLINE void narrow(uint16_t* to, Words x) {
#if defined(__AVX512F__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(__m512i(x)));
#elif defined(__AVX2__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                     _mm_packus_epi32(_mm256_castsi256_si128(__m256i(x)),
                                      _mm256_extracti128_si256(__m256i(x), 1)));
#else
    for (int i = 0; i < WIDTH; i++) to[i] = static_cast<uint16_t>(x[i]);
#endif
}

// Store a vector to elements of the type of `to`.
INLINE void store(bf16* to, Floats x) {
    const Words bits = bit_cast<Words>(x);
    const Words nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    narrow(&to->bits, (bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : nearest);  // NaN
}
INLINE void store(fp16* to, Floats x) {
#if defined(__AVX512F__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                        _mm512_maskz_cvtps_ph(0xffff, x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                     _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int i = 0; i < WIDTH; i++) store_one(to + i, x[i]);
#endif
}

// Convert `count` elements to floats.
template <class T>
void to_floats(const T* from, int64_t count, float* to) {
    int64_t i = 0;
    for (; i + WIDTH <= count; i += WIDTH) store(to + i, load(from + i));
    for (; i < count; i++) to[i] = load_one(from + i);
}

// Convert `count` floats to elements.
template <class T>
void from_floats(const float* from, int64_t count, T* to) {
    int64_t i = 0;
    for (; i + WIDTH <= count; i += WIDTH) store(to + i, load(from + i));
    for (; i < count; i++) store_one(to + i, from[i]);
}

#if defined(__AVX512F__)
// Transpose a 16 x 16 matrix.
INLINE void transpose(Floats* x) {
    __m512 pairs[16], fours[16];
    for (int i = 0; i < 16; i += 2) {
        pairs[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int k = 0; k < 2; k++) {
            const __m512d a = _mm512_castps_pd(pairs[i + k]);
            const __m512d b = _mm512_castps_pd(pairs[i + k + 2]);
            fours[i + 2 * k] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
            fours[i + 2 * k + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        }
    for (int k = 0; k < 4; k++) {  // quarter q of fours[4 i + k]: rows 4 i to 4 i + 3, column 4 q + k
        const __m512 a = _mm512_maskz_shuffle_f32x4(0xffff, fours[k], fours[4 + k], 0x44);
        const __m512 b = _mm512_maskz_shuffle_f32x4(0xffff, fours[k], fours[4 + k], 0xee);
        const __m512 c = _mm512_maskz_shuffle_f32x4(0xffff, fours[8 + k], fours[12 + k], 0x44);
        const __m512 d = _mm512_maskz_shuffle_f32x4(0xffff, fours[8 + k], fours[12 + k], 0xee);
        x[k] = _mm512_maskz_shuffle_f32x4(0xffff, a, c, 0x88);
        x[4 + k] = _mm512_maskz_shuffle_f32x4(0xffff, a, c, 0xdd);
        x[8 + k] = _mm512_maskz_shuffle_f32x4(0xffff, b, d, 0x88);
        x[12 + k] = _mm512_maskz_shuffle_f32x4(0xffff, b, d, 0xdd);
    }
}
#elif defined(__AVX2__)
// Transpose an 8 x 8 matrix.
INLINE void transpose(Floats* x) {
    __m256 fours[8];
    for (int i = 0; i < 8; i += 4)
        for (int k = 0; k < 2; k++) {
            const __m256 a = k ? _mm256_unpackhi_ps(x[i], x[i + 1])
                               : _mm256_unpacklo_ps(x[i], x[i + 1]);
            const __m256 b = k ? _mm256_unpackhi_ps(x[i + 2], x[i + 3])
                               : _mm256_unpacklo_ps(x[i + 2], x[i + 3]);
            fours[i + 2 * k] = _mm256_shuffle_ps(a, b, 0x44);
            fours[i + 2 * k + 1] = _mm256_shuffle_ps(a, b, 0xee);
        }
    for (int k = 0; k < 4; k++) {  // half h of fours[4 i + k]: rows 4 i to 4 i + 3, column 4 h + k
        x[k] = _mm256_permute2f128_ps(fours[k], fours[4 + k], 0x20);
        x[4 + k] = _mm256_permute2f128_ps(fours[k], fours[4 + k], 0x31);
    }
}
#else
// Transpose a WIDTH x WIDTH matrix.
INLINE void transpose(Floats* x) {
    for (int i = 0; i < WIDTH; i++)
        for (int k = 0; k < i; k++) {
            const float swapped = x[i][k];
            x[i][k] = x[k][i];
            x[k][i] = swapped;
        }
}
#endif

template <class T>
INLINE float sum_of(const T* x, int64_t count) {
    Floats all{};
    int64_t i = 0;
    for (; i + WIDTH <= count; i += WIDTH) all += load(x + i);
    float total = sum(all);
    for (; i < count; i++) total += load_one(x + i);
    return total;
}

// Round two vectors to pairs of bfloat16, the first in the low half.
INLINE Words to_bf16_pairs(Floats first, Floats second) {
#if defined(__AVX512BF16__)
    const __m512i halves = bit_cast<__m512i>(_mm512_cvtne2ps_pbh(__m512(second), __m512(first)));
    constexpr uint16_t ORDER[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                    8,  24, 9,  25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return Words(_mm512_permutexvar_epi16(load_raw<__m512i>(ORDER), halves));
#else
    const Words a = bit_cast<Words>(first), b = bit_cast<Words>(second);
    return (a + 0x7fff + (a >> 16 & 1)) >> 16 | ((b + 0x7fff + (b >> 16 & 1)) & 0xffff0000);
#endif
}

// Round to the nearest integer, ties to even, for |x| < 2^22.
INLINE Floats rounded(Floats x) { return (x + 0x1.8p23f) - 0x1.8p23f; }

// Load WIDTH elements. If `count` is smaller, load `count` elements and fill with `rest`.
template <class T>
INLINE Floats load_partial(const T* from, int64_t count, float rest = 0) {
    if (count >= WIDTH) return load(from);
    Floats x = broadcast(rest);
    for (int64_t i = 0; i < count; i++) x[i] = load_one(from + i);
    return x;
}

template <class T>
INLINE void store_partial(T* to, Floats x, int64_t count) {
    if (count >= WIDTH) return store(to, x);
    for (int64_t i = 0; i < count; i++) store_one(to + i, x[i]);
}

// Count the integers, or the floats by their bits as integers, below a limit. `count` is a multiple of
// WIDTH.
template <class P>
int64_t count_below(const P* numbers, int64_t count, int32_t limit) {
    const Ints limits = Ints{} + limit;
    Ints below{};
    for (int64_t i = 0; i < count; i += WIDTH) below -= limits > load_raw<Ints>(numbers + i);
    return sum(below);
}

// out = sums + bias, or out += sums + bias if `add` is set, rounded once. The bias may be null.
template <class T>
INLINE void store_outputs(const float* sums, const T* bias, T* out, int64_t count, bool add) {
    int64_t i = 0;
    for (; i + WIDTH <= count; i += WIDTH) {
        Floats x = load(sums + i);
        if (bias) x += load(bias + i);
        if (add) x += load(out + i);
        store(out + i, x);
    }
    for (; i < count; i++) {
        const float x = sums[i] + (bias ? load_one(bias + i) : 0.0f);
        store_one(out + i, add ? x + load_one(out + i) : x);
    }
}

// Round x up to a multiple.
INLINE int64_t round_up(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

}  // namespace ISA
