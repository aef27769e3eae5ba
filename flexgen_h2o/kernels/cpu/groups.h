// Quantized groups of KV entries. config/cache_layout.py defines the layout.
// kernels/reference/attention.py defines the arithmetic, and the bytes here match it bit for bit.
#pragma once

#include <math.h>

#include "kernels.h"
#include "simd.h"

namespace ISA {

constexpr float HALF_MAX = 65504.0f, TINY = 0x1p-24f;

// Return the largest float16 that is not larger than x.
inline uint16_t half_below(float x) {
#if defined(__F16C__)
    return _cvtss_sh(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#else
    uint16_t nearest = to_half(x);
    if (from_half(nearest) > x) nearest += x < 0 ? 1 : -1;
    return nearest;
#endif
}

// Return x / step, rounded once, for a step that is exact in float16. `inverse` is 1 / step. The
// residual of the first quotient is exact and corrects its last bits (P. Markstein, Computation of
// elementary functions on the IBM RISC System/6000 processor, 1990). With a divisor of 11 bits no
// quotient is close enough to a tie to be rounded incorrectly.
INLINE Floats quotient(Floats x, Floats step, Floats inverse) {
#if defined(__FMA__)
    const Floats nearly = x * inverse;
    return fma(fma(-nearly, step, x), inverse, nearly);
#else
    (void)inverse;
    return x / step;
#endif
}

INLINE Floats clamped(Floats x) {
    x = x > HALF_MAX ? broadcast(HALF_MAX) : x;
    return x < -HALF_MAX ? broadcast(-HALF_MAX) : x;
}

template <class T>
INLINE float clamped_one(const T* x) {
    return fminf(fmaxf(load_one(x), -HALF_MAX), HALF_MAX);
}

template <class T>
inline void bounds(const T* x, int64_t count, float& low, float& high) {
    int64_t i = 0;
    low = HALF_MAX, high = -HALF_MAX;
    if (count >= WIDTH) {
        Floats lows = broadcast(low), highs = broadcast(high);
        for (; i + WIDTH <= count; i += WIDTH) {
            Floats x_i = clamped(load(x + i));
            lows = x_i < lows ? x_i : lows;
            highs = max(x_i, highs);
        }
        low = -reduce_max(-lows), high = reduce_max(highs);
    }
    // fminf and fmaxf are avoided: GCC 12 fails to compile vectors of them for aarch64.
    for (; i < count; i++) {
        const float x_i = clamped_one(x + i);
        low = x_i < low ? x_i : low;
        high = x_i > high ? x_i : high;
    }
}

// Quantize one vector to its KV entry. `quantized` is scratch of layout.groups * layout.group bytes.
template <class T>
inline void quantize_row(const T* x, uint8_t* entry, const GroupLayout& layout, uint8_t* quantized) {
    const float levels = layout.bits == 8 ? 255.0f : 15.0f;
    const int64_t length = layout.groups * layout.group;
    uint8_t* to = layout.bits == 8 ? entry : quantized;
    for (int64_t g = 0; g < layout.groups; g++) {
        const T* values = x + g * layout.group;
        float low, high;
        bounds(values, layout.group, low, high);
        const uint16_t zero_bits = half_below(low + 0.0f);  // turns -0 into +0
        const float zero = from_half(zero_bits);
        const uint16_t scale_bits = half_below((zero - high) / levels) & 0x7fff;  // rounded up
        const float scale = from_half(scale_bits), step = scale < TINY ? TINY : scale;
        std::memcpy(entry + layout.code_bytes + 2 * g, &scale_bits, 2);
        std::memcpy(entry + layout.code_bytes + 2 * (layout.groups + g), &zero_bits, 2);
        const Floats steps = broadcast(step), inverse = broadcast(1 / step);
        uint8_t* out = to + g * layout.group;
        int64_t i = 0;
        for (; i + WIDTH <= layout.group; i += WIDTH) {
            Floats code = rounded(quotient(clamped(load(values + i)) - zero, steps, inverse));
            narrow(out + i, __builtin_convertvector(code, Ints));
        }
        for (; i < layout.group; i++)
            out[i] = static_cast<uint8_t>(nearbyintf((clamped_one(values + i) - zero) / step));
    }
    int64_t used = length;
    if (layout.bits == 4) {
        used = length / 2;
        for (int64_t i = 0; i < used; i++)
            entry[i] = static_cast<uint8_t>(quantized[i] | quantized[used + i] << 4);
    }
    if (used < layout.code_bytes) entry[used] = 0;
}

// Return the offset of a cache slot in elements of its keys (kind 0) or values (kind 1). A is the
// argument struct of an operation and has `slots`.
template <class Args>
INLINE int64_t slot_start(const Args& args, int64_t kind, int64_t sequence, int64_t head, int64_t slot) {
    return kind * args.slots_kind + sequence * args.slots_sequence + head * args.slots_head +
           slot * args.slots_slot;
}

// Return the layout of the keys (kind 0) or values (kind 1) of a slot.
template <class Args>
INLINE const GroupLayout& layout_of(const Args& args, int64_t kind) {
    return kind == 0 ? args.key_layout : args.value_layout;
}

// Write one vector to the slot at `start`. `quantized` is scratch as in `quantize_row`. It is not
// inlined, because inlining slows down the loops of the callers.
template <class T, class Args>
NOINLINE void write_slot(const Args& args, const GroupLayout& layout, int64_t start, const T* x,
                         uint8_t* quantized) {
    if (layout.bits == 16)
        std::memcpy(static_cast<T*>(args.slots) + start, x,
                    static_cast<size_t>(args.head_dim) * sizeof(T));
    else
        quantize_row(x, static_cast<uint8_t*>(args.slots) + start, layout, quantized);
}

INLINE float half_at(const uint8_t* from) {
    uint16_t bits;
    std::memcpy(&bits, from, 2);
    return from_half(bits);
}

// Extract `count` quantized values from `count` bytes: whole bytes, low nibbles or high nibbles.
enum Part { WHOLE, LOW, HIGH };

template <Part part>
INLINE Floats code(Ints bytes) {
#if defined(__AVX512F__)
    if (part != WHOLE) {  // a table lookup, which uses only the low nibble of its index
        const Floats table = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        return _mm512_permutexvar_ps(__m512i(part == LOW ? bytes : bytes >> 4), table);
    }
#endif
    if (part == LOW) bytes &= 15;
    if (part == HIGH) bytes >>= 4;
    return __builtin_convertvector(bytes, Floats);
}

template <Part part>
INLINE void dequantize_span(const uint8_t* bytes, float* x, int64_t count, float scale, float zero) {
    int64_t i = 0;
    for (; i + WIDTH <= count; i += WIDTH)
        store(x + i, zero + scale * code<part>(widen(bytes + i)));
    for (; i < count; i++) {
        int code = part == LOW ? bytes[i] & 15 : part == HIGH ? bytes[i] >> 4 : bytes[i];
        x[i] = zero + scale * static_cast<float>(code);
    }
}

// Dequantize one KV entry to a vector of floats.
inline void dequantize_row(const uint8_t* entry, float* x, const GroupLayout& layout) {
    const int64_t half = layout.groups * layout.group / 2;
    for (int64_t g = 0; g < layout.groups; g++) {
        const uint8_t* scales = entry + layout.code_bytes + 2 * g;
        const float scale = half_at(scales), zero = half_at(scales + 2 * layout.groups);
        const int64_t start = g * layout.group, end = start + layout.group;
        if (layout.bits == 8) {
            dequantize_span<WHOLE>(entry + start, x + start, layout.group, scale, zero);
            continue;
        }
        const int64_t low_end = end < half ? end : half, high_start = start > half ? start : half;
        if (start < low_end)
            dequantize_span<LOW>(entry + start, x + start, low_end - start, scale, zero);
        if (high_start < end)
            dequantize_span<HIGH>(entry + high_start - half, x + high_start, end - high_start, scale,
                                  zero);
    }
}

}  // namespace ISA
