// linear_float32: matmuls of weights in float32 or 16 bits by any number of rows, in float32. The order
// of a row's sums depends on nothing but the number of inputs.
#include "float_tiles.h"
#include "prefetch.h"

namespace ISA {
namespace {

// Return the lower or the upper halves of words as floats.
INLINE Floats first_of(Words words, bf16) { return bits_of<Floats>(words << 16); }
INLINE Floats second_of(Words words, bf16) { return bits_of<Floats>(words & 0xffff0000); }
INLINE Floats first_of(Words words, fp16) { return from_halves(words & 0xffff); }
INLINE Floats second_of(Words words, fp16) { return from_halves(words >> 16); }

// Weights [outputs, inputs] in place.
template <class T>
struct PlainWeights {
    const Linear& a;

    explicit PlainWeights(const Linear& a) : a(a) {}
    int64_t outputs() const { return a.outputs; }
    const T* at(int64_t output, int64_t input) const {
        return static_cast<const T*>(a.weight) + output * a.weight_row + input;
    }

    // Convert a part to floats [register blocks, DEPTH, BLOCK_OUTPUTS].
    void unpack(const Extent& part, float* to) const {
        for (int64_t o = 0; o < part.outputs; o += WIDTH) {
            float* target = to + o / BLOCK_OUTPUTS * DEPTH * BLOCK_OUTPUTS + o % BLOCK_OUTPUTS;
            const int64_t left = part.outputs - o, count = left < WIDTH ? left : WIDTH;
            constexpr int64_t STEP = WIDTH * sizeof(float) / sizeof(T);
            int64_t k = 0;
            for (; k + STEP <= part.inputs; k += STEP) {
                Floats square[WIDTH];  // weights, or pairs of 16 bits; each line is read once
                for (int64_t i = 0; i < WIDTH; i++)
                    square[i] = load_raw<Floats>(
                        at(part.output + o + (i < count ? i : 0), part.input + k));
                transpose(square);
#pragma GCC unroll 16
                for (int64_t i = 0; i < WIDTH; i++) {
                    float* const column = target + (k + i * STEP / WIDTH) * BLOCK_OUTPUTS;
                    if constexpr (sizeof(T) == sizeof(float)) {
                        store(column, square[i]);
                    } else {
                        const Words words = bits_of<Words>(square[i]);
                        store(column, first_of(words, T{}));
                        store(column + BLOCK_OUTPUTS, second_of(words, T{}));
                    }
                }
            }
            for (; k < part.inputs; k++)
                for (int64_t i = 0; i < count; i++)
                    target[k * BLOCK_OUTPUTS + i] = load_one(at(part.output + o + i, part.input + k));
        }
    }

    // Prefetch a share of the next part: the following inputs, or the first inputs of the next outputs.
    INLINE void prefetch(const Extent& part, int64_t share, int64_t shares) const {
        const int64_t next = part.input + DEPTH;
        const bool more = next < a.inputs;
        const int64_t first = more ? part.output : part.output + part.outputs;
        const int64_t end = part.outputs * (share + 1) / shares;
        constexpr int64_t LINE = 64 / sizeof(T);
        for (int64_t o = part.outputs * share / shares; o < end; o++)
            for (int64_t k = 0; k < DEPTH; k += LINE)
                ISA::prefetch(at(first + o, more ? next + k : k), L2);
    }
};

}  // namespace

int linear_float32(const Linear& a) {
    for (const Linear* matmul = a.next; matmul; matmul = matmul->next)
        if (matmul->rows != a.rows || matmul->inputs != a.inputs || matmul->dtype != a.dtype)
            return INVALID;
    switch (a.dtype) {
        case BFLOAT16: return float_product<bf16, PlainWeights<bf16>>(a, a.inputs);
        case FLOAT16: return float_product<fp16, PlainWeights<fp16>>(a, a.inputs);
        case FLOAT32: return float_product<float, PlainWeights<float>>(a, a.inputs);
        default: return INVALID;
    }
}

}  // namespace ISA
