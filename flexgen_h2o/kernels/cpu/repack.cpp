// repack: convert blocks of a GGUF file to blocks of a quantized matrix. The quantized values do not
// change.
//
// kernels/reference/blocks.py documents the arithmetic and the positions of values in a block.
#include <type_traits>

#include "matrix.h"

namespace ISA {
namespace {

// Split bytes into BITS-bit values. Each run of RUN bytes holds RUN values in its lowest bits, then
// RUN values in the next bits.
template <int BITS, int RUN>
INLINE void split(const uint8_t* from, int bytes, uint8_t* to) {
    for (int run = 0; run < bytes; run += RUN)
        for (int shift = 0; shift < 8; shift += BITS, to += RUN)
            for (int i = 0; i < RUN; i++)
                to[i] = static_cast<uint8_t>(from[run + i] >> shift & ((1 << BITS) - 1));
}

// The same, but insert the bits above the BELOW low bits that are already stored.
template <int BITS, int RUN, int BELOW>
INLINE void split_above(const uint8_t* from, int bytes, uint8_t* to) {
    for (int run = 0; run < bytes; run += RUN)
        for (int shift = 0; shift < 8; shift += BITS, to += RUN)
            for (int i = 0; i < RUN; i++)
                to[i] = static_cast<uint8_t>(
                    to[i] | (from[run + i] >> shift & ((1 << BITS) - 1)) << BELOW);
}

// Output of a decoder for one row of a block: quantized values and a scale per group. The zero points
// are optional, because the middle value may imply them. Lanes are rows.
struct Row {
    uint8_t* codes;
    float *scales, *zeros;

    void scale(int g, float x) const { scales[g * MATRIX_TILE] = x; }
    void zero(int g, float x) const { zeros[g * MATRIX_TILE] = x; }
};

// Parameters of a block type: ELEMENTS and BYTES per block, BITS per value, GROUP size. MIDDLE is the
// quantized value of 0, or -1 if there are zero points.
template <int ELEMENTS, int BYTES, int BITS, int GROUP, int MIDDLE>
struct Type {
    static constexpr int elements = ELEMENTS, bytes = BYTES, bits = BITS, group = GROUP;
    static constexpr int middle = MIDDLE, groups = ELEMENTS / GROUP;
};

struct Q4_0 : Type<32, 18, 4, 32, 8> {
    static INLINE void decode(const uint8_t* b, const Row& to) {
        to.scale(0, half_at(b));
        split<4, 16>(b + 2, 16, to.codes);
    }
};
struct Q4_1 : Type<32, 20, 4, 32, -1> {
    static INLINE void decode(const uint8_t* b, const Row& to) {
        to.scale(0, half_at(b));
        to.zero(0, half_at(b + 2));
        split<4, 16>(b + 4, 16, to.codes);
    }
};
// Insert the fifth bits of 32 values.
INLINE void fifth_bits(const uint8_t* from, uint8_t* codes) {
    constexpr uint64_t EVERY = 0x0101010101010101, BITS = 0x8040201008040201;
    for (int i = 0; i < 4; i++) {  // expands bit k of a byte to byte k of eight bytes, with value 16
        uint64_t eight, bits = (from[i] * EVERY) & BITS;
        bits = (bits + 0x7f7f7f7f7f7f7f7f) | bits;  // sets the top bit of each byte that is not 0
        std::memcpy(&eight, codes + 8 * i, sizeof eight);
        eight |= bits >> 3 & 0x1010101010101010;
        std::memcpy(codes + 8 * i, &eight, sizeof eight);
    }
}
struct Q5_0 : Type<32, 22, 6, 32, 16> {
    static INLINE void decode(const uint8_t* b, const Row& to) {
        to.scale(0, half_at(b));
        split<4, 16>(b + 6, 16, to.codes);
        fifth_bits(b + 2, to.codes);
    }
};
struct Q5_1 : Type<32, 24, 6, 32, -1> {
    static INLINE void decode(const uint8_t* b, const Row& to) {
        to.scale(0, half_at(b));
        to.zero(0, half_at(b + 2));
        split<4, 16>(b + 8, 16, to.codes);
        fifth_bits(b + 4, to.codes);
    }
};
struct Q8_0 : Type<32, 34, 8, 32, 128> {
    static INLINE void decode(const uint8_t* b, const Row& to) {
        to.scale(0, half_at(b));
        for (int i = 0; i < 32; i++) to.codes[i] = b[2 + i] ^ 0x80;
    }
};
struct Q2_K : Type<256, 84, 4, 16, -1> {
    static INLINE void decode(const uint8_t* b, const Row& to) {
        const float d = half_at(b + 80), least = half_at(b + 82);
        for (int g = 0; g < groups; g++) {
            to.scale(g, d * static_cast<float>(b[g] & 15));
            to.zero(g, -(least * static_cast<float>(b[g] >> 4)));
        }
        split<2, 32>(b + 16, 64, to.codes);
    }
};
struct Q3_K : Type<256, 110, 4, 16, 4> {
    static INLINE void decode(const uint8_t* b, const Row& to) {
        const float d = half_at(b + 108);
        uint8_t small[groups];
        split<4, 8>(b + 96, 8, small);
        split_above<2, 4, 4>(b + 104, 4, small);
        for (int g = 0; g < groups; g++) to.scale(g, d * static_cast<float>(small[g] - 32));
        split<2, 32>(b + 32, 64, to.codes);
        split_above<1, 32, 2>(b, 32, to.codes);
    }
};
// Decode the scales and minima of Q4_K and Q5_K: 6 bits each, packed in 12 bytes.
INLINE void scales_and_zeros(const uint8_t* b, const Row& to) {
    const float d = half_at(b), least = half_at(b + 2);
    const uint8_t *first = b + 4, *second = b + 8, *last = b + 12;
    for (int g = 0; g < 4; g++) {
        to.scale(g, d * static_cast<float>(first[g] & 63));
        to.zero(g, -(least * static_cast<float>(second[g] & 63)));
        to.scale(g + 4, d * static_cast<float>((last[g] & 15) | (first[g] >> 2 & 48)));
        to.zero(g + 4, -(least * static_cast<float>((last[g] >> 4) | (second[g] >> 2 & 48))));
    }
}
struct Q4_K : Type<256, 144, 4, 32, -1> {
    static INLINE void decode(const uint8_t* b, const Row& to) {
        scales_and_zeros(b, to);
        split<4, 32>(b + 16, 128, to.codes);
    }
};
struct Q5_K : Type<256, 176, 6, 32, -1> {
    static INLINE void decode(const uint8_t* b, const Row& to) {
        scales_and_zeros(b, to);
        split<4, 32>(b + 48, 128, to.codes);
        split_above<1, 32, 4>(b + 16, 32, to.codes);
    }
};
struct Q6_K : Type<256, 210, 6, 16, 32> {
    static INLINE void decode(const uint8_t* b, const Row& to) {
        const float d = half_at(b + 208);
        for (int g = 0; g < groups; g++)
            to.scale(g, d * static_cast<float>(static_cast<int8_t>(b[192 + g])));
        split<4, 64>(b, 128, to.codes);
        split_above<2, 32, 4>(b + 128, 64, to.codes);
    }
};
// Map IQ4 codes to their values plus 128.
INLINE void look_up(uint8_t* codes, int count) {
    static constexpr uint8_t NUMBERS[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                            129, 141, 153, 166, 181, 197, 217, 241};
    for (int i = 0; i < count; i++) codes[i] = NUMBERS[codes[i]];
}
struct IQ4_NL : Type<32, 18, 8, 32, 128> {
    static INLINE void decode(const uint8_t* b, const Row& to) {
        to.scale(0, half_at(b));
        split<4, 16>(b + 2, 16, to.codes);
        look_up(to.codes, elements);
    }
};
struct IQ4_XS : Type<256, 136, 8, 32, 128> {
    static INLINE void decode(const uint8_t* b, const Row& to) {
        const float d = half_at(b);
        for (int g = 0; g < groups; g++) {
            const int low = b[4 + g / 2] >> 4 * (g % 2) & 15, high = b[2 + g / 4] >> 2 * (g % 4) & 3;
            to.scale(g, d * static_cast<float>((low | high << 4) - 32));
        }
        split<4, 16>(b + 8, 128, to.codes);
        look_up(to.codes, elements);
    }
};
// The scale is the exponent.
struct Mxfp4Block : Type<32, 17, 4, 32, 0> {
    static INLINE void decode(const uint8_t* b, const Row& to) {
        to.scale(0, static_cast<float>(b[0]));
        split<4, 16>(b + 1, 16, to.codes);
    }
};

// Pack the quantized values of a block into words. See config/weight_layout.py (MatrixLayout).
template <int BITS>
INLINE void join(const uint8_t* codes, int elements, uint32_t* words) {
    if constexpr (BITS == 6) {
        for (int unit = 0; unit < elements / 16; unit++) {
            uint32_t wide[4];
            join<8>(codes + 16 * unit, 16, wide);
            Codes<6>::join(wide, words + 3 * unit);
        }
        return;
    }
    for (int n = 0; n < elements * BITS / 32; n++) {
        if (BITS == 8) {
            uint32_t x;
            std::memcpy(&x, codes + 4 * n, sizeof x);
            words[n] = (x & 0xff0000ff) | (x >> 8 & 0xff00) | (x & 0xff00) << 8;
        } else {
            constexpr uint64_t PAIRS = 0x000000ff000000ff, EVEN = 0x00ff00ff00ff00ff;
            uint64_t x;
            std::memcpy(&x, codes + 8 * n, sizeof x);
            uint64_t low = x & EVEN, high = x >> 8 & EVEN;
            low = (low | low >> 12) & PAIRS, high = (high | high >> 12) & PAIRS;
            low |= low >> 24, high |= high >> 24;
            words[n] = static_cast<uint32_t>((low & 0xffff) | (high & 0xffff) << 16);
        }
    }
}

INLINE bool finite(const uint16_t* halves) {
    bool all = true;
    for (int i = 0; i < MATRIX_TILE; i++) all &= (halves[i] & 0x7c00) != 0x7c00;
    return all;
}

// Store the scales and zero points of a group of `rows` rows. Return false if one is not finite.
template <class T>
INLINE bool store_scales(const float* scales, const float* zeros, int64_t rows, uint8_t* block) {
    if (std::is_same_v<T, Mxfp4Block>) {
        bool all = true;
        for (int i = 0; i < MATRIX_TILE; i++) {
            block[i] = static_cast<uint8_t>(scales[i]);
            all &= block[i] != 255;
        }
        return all;
    }
    fp16* const halves = reinterpret_cast<fp16*>(block);
    for (int i = 0; i < MATRIX_TILE; i += WIDTH) {
        store(halves + i, load(scales + i));
        const Floats zero = T::middle < 0 ? load(zeros + i)
                                          : broadcast(static_cast<float>(-T::middle)) * load(halves + i);
        store(halves + MATRIX_TILE + i, zero);
    }
    for (int64_t i = rows; i < MATRIX_TILE; i++) halves[MATRIX_TILE + i] = {0};  // +0, not -0
    return finite(&halves->bits) && finite(&halves[MATRIX_TILE].bits);
}

template <class T>
bool repack_tile(const Repack& args, const MatrixBlocks& m, int64_t tile) {
    // Process several short blocks together, so that one vector instruction packs words of all of
    // them.
    constexpr int RUN = 256 / T::elements, GROUPS = RUN * T::groups;
    constexpr int WORDS = 256 * T::bits / 32, EACH = WORDS / GROUPS;
    alignas(64) uint8_t codes[256] = {};
    alignas(64) float scales[GROUPS * MATRIX_TILE] = {}, zeros[GROUPS * MATRIX_TILE] = {};
    alignas(64) uint32_t words[MATRIX_TILE][WORDS] = {};
    const int64_t first = tile * MATRIX_TILE, left = args.matrix.outputs - first;
    const int64_t rows = left < MATRIX_TILE ? left : MATRIX_TILE;
    const int64_t blocks = args.matrix.inputs / T::elements;
    bool all = true;
    for (int64_t start = 0; start < blocks; start += RUN) {
        const int64_t run = blocks - start < RUN ? blocks - start : RUN;
        for (int64_t lane = 0; lane < rows; lane++) {
            const int64_t row = args.rows ? args.rows[first + lane] : first + lane;
            const uint8_t* from = static_cast<const uint8_t*>(args.blocks) + row * args.row_bytes;
            for (int64_t b = 0; b < run; b++) {
                const int64_t head = b * T::groups * MATRIX_TILE + lane;
                T::decode(from + (start + b) * T::bytes,
                          {codes + b * T::elements, scales + head, zeros + head});
            }
            join<T::bits>(codes, 256, words[lane]);
        }
        for (int64_t g = 0; g < run * T::groups; g++) {
            uint8_t* block = static_cast<uint8_t*>(args.matrix.data) +
                             (tile * m.groups + start * T::groups + g) * m.block_bytes;
            all &= store_scales<T>(scales + g * MATRIX_TILE, zeros + g * MATRIX_TILE, rows, block);
            uint8_t* to = block + m.block_bytes - 4 * MATRIX_TILE * EACH;
            for (int64_t n = 0; n < EACH; n++) {
                uint32_t lanes[MATRIX_TILE];
                for (int64_t lane = 0; lane < MATRIX_TILE; lane++)
                    lanes[lane] = words[lane][g * EACH + n];
                std::memcpy(to + 4 * MATRIX_TILE * n, lanes, sizeof lanes);
            }
        }
    }
    return all;
}

template <class T>
int repack_tiles(const Repack& args) {
    const MatrixBlocks m(args.matrix);
    if (m.bits != T::bits || m.group != T::group) return INVALID;
    int64_t non_finite = 0;
#pragma omp parallel for schedule(static) num_threads(args.threads) reduction(+ : non_finite)
    for (int64_t tile = 0; tile < tiles_of(args.matrix); tile++)
        if (!repack_tile<T>(args, m, tile)) non_finite++;
    *args.non_finite = non_finite;
    return DONE;
}

}  // namespace

int repack(const Repack& args) {
    switch (args.ggml_type) {  // GGUF type ids, see config/weight_layout.py
        case 2: return repack_tiles<Q4_0>(args);
        case 3: return repack_tiles<Q4_1>(args);
        case 6: return repack_tiles<Q5_0>(args);
        case 7: return repack_tiles<Q5_1>(args);
        case 8: return repack_tiles<Q8_0>(args);
        case 10: return repack_tiles<Q2_K>(args);
        case 11: return repack_tiles<Q3_K>(args);
        case 12: return repack_tiles<Q4_K>(args);
        case 13: return repack_tiles<Q5_K>(args);
        case 14: return repack_tiles<Q6_K>(args);
        case 20: return repack_tiles<IQ4_NL>(args);
        case 23: return repack_tiles<IQ4_XS>(args);
        case 39: return repack_tiles<Mxfp4Block>(args);
        default: return INVALID;
    }
}

}  // namespace ISA
