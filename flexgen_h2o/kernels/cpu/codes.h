// Codes of a quantized matrix as operands of products: floats, or pairs of bfloat16.
#pragma once

#include "amx.h"
#include "matrix.h"

namespace ISA {

INLINE Words load_words(const void* from) {
    Words to;
    std::memcpy(&to, from, sizeof to);
    return to;
}

INLINE void store_words(uint32_t* to, Words x) { std::memcpy(to, &x, sizeof x); }

// Products of floats: an element of x by a code, each step one input.
struct Single {
    static constexpr int64_t inputs = 1;  // of a step

    // Of a word of WIDTH outputs, the codes of a step.
    template <int bits>
    static INLINE Words codes(Words word, int step) {
        const Ints field = Ints(word >> (16 * (step % 2) + bits * (step / 2)));
#if defined(__AVX512F__)
        if (bits == 4) return bits_of<Words>(code<LOW>(field));  // looks at four bits alone
#endif
        return bits_of<Words>(__builtin_convertvector(field & ((1 << bits) - 1), Floats));
    }

    static INLINE Floats broadcast_x(uint32_t x) { return broadcast(bits_of<float>(x)); }
    static INLINE Floats add_product(Floats sum, Words codes, Floats x) {
        return fma(bits_of<Floats>(codes), x, sum);
    }

    // What the codes are too large by.
    static constexpr float shift(int) { return 0.0f; }

    template <class T>
    static uint32_t pack(const T* x, int64_t) {
        return bits_of<uint32_t>(one(x));
    }
};

#if defined(__AVX512BF16__) || defined(TILES)
// Products of pairs of bfloat16: two inputs each step, whose sum AVX512_BF16 takes at once.
struct Pairs {
    static constexpr int64_t inputs = 2;

    template <int bits>
    static INLINE Words codes(Words word, int step) {
        const Words field = word >> (bits * step);
        // 128 + code is the bfloat16 whose low bits are the code.
        if (bits == 4) return (field & 0x000f000f) | 0x43004300;
        // A bfloat16 holds 8 bits exactly, and is the upper half of a float.
        const Words first = bits_of<Words>(__builtin_convertvector(Ints(field & 0xff), Floats));
        const Words second =
            bits_of<Words>(__builtin_convertvector(Ints(field >> 16 & 0xff), Floats));
        return first >> 16 | second;
    }

#if defined(__AVX512BF16__)
    static INLINE __m512bh broadcast_x(uint32_t x) {
        return bits_of<__m512bh>(_mm512_set1_epi32(static_cast<int>(x)));
    }
    static INLINE Floats add_product(Floats sum, Words codes, __m512bh x) {
        return Floats(_mm512_dpbf16_ps(__m512(sum), bits_of<__m512bh>(codes), x));
    }
#endif

    static constexpr float shift(int bits) { return bits == 4 ? 128.0f : 0.0f; }

    static uint32_t pack(const bf16* x, int64_t left) {
        return x[0].bits | static_cast<uint32_t>(left > 1 ? x[1].bits : 0) << 16;
    }
};
#endif

}  // namespace ISA
