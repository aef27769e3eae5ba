// linear_float32: matmuls of weights in float32 or 16 bits by any number of rows, in float32. The
// order of a row's sums depends on nothing but the number of inputs.
#include "float_matmul.h"
#include "prefetch.h"

namespace ISA {
namespace {

// Return the lower or the upper halves of words as floats.
INLINE Floats first_of(Words words, bf16) { return bit_cast<Floats>(words << 16); }
INLINE Floats second_of(Words words, bf16) { return bit_cast<Floats>(words & 0xffff0000); }
INLINE Floats first_of(Words words, fp16) { return from_halves(words & 0xffff); }
INLINE Floats second_of(Words words, fp16) { return from_halves(words >> 16); }

// Weights [outputs, inputs] in place.
template <class T>
struct PlainWeights {
    const Linear& args;

    explicit PlainWeights(const Linear& args) : args(args) {}
    int64_t outputs() const { return args.outputs; }
    const T* at(int64_t output, int64_t input) const {
        return static_cast<const T*>(args.weight) + output * args.weight_row + input;
    }

    // Convert a part to floats [register blocks, MATMUL_DEPTH, FLOAT_BLOCK_OUTPUTS].
    void unpack(const PanelExtent& part, float* to) const {
        for (int64_t o = 0; o < part.outputs; o += WIDTH) {
            float* target = to + o / FLOAT_BLOCK_OUTPUTS * MATMUL_DEPTH * FLOAT_BLOCK_OUTPUTS +
                            o % FLOAT_BLOCK_OUTPUTS;
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
                    float* const column = target + (k + i * STEP / WIDTH) * FLOAT_BLOCK_OUTPUTS;
                    if constexpr (sizeof(T) == sizeof(float)) {
                        store(column, square[i]);
                    } else {
                        const Words words = bit_cast<Words>(square[i]);
                        store(column, first_of(words, T{}));
                        store(column + FLOAT_BLOCK_OUTPUTS, second_of(words, T{}));
                    }
                }
            }
            for (; k < part.inputs; k++)
                for (int64_t i = 0; i < count; i++)
                    target[k * FLOAT_BLOCK_OUTPUTS + i] =
                        load_one(at(part.output + o + i, part.input + k));
        }
    }

    // Prefetch a share of the next part: the following inputs, or the first inputs of the next
    // outputs.
    INLINE void prefetch(const PanelExtent& part, int64_t share, int64_t shares) const {
        const int64_t next = part.input + MATMUL_DEPTH;
        const bool more = next < args.inputs;
        const int64_t first = more ? part.output : part.output + part.outputs;
        const int64_t end = part.outputs * (share + 1) / shares;
        constexpr int64_t LINE = 64 / sizeof(T);
        for (int64_t o = part.outputs * share / shares; o < end; o++)
            for (int64_t k = 0; k < MATMUL_DEPTH; k += LINE)
                ISA::prefetch(at(first + o, more ? next + k : k), L2);
    }
};

}  // namespace

int linear_float32(const Linear& args) {
    for (const Linear* matmul = args.next; matmul; matmul = matmul->next)
        if (matmul->rows != args.rows || matmul->inputs != args.inputs || matmul->dtype != args.dtype)
            return INVALID;
    switch (args.dtype) {
        case BFLOAT16: return float_matmul<bf16, PlainWeights<bf16>>(args, args.inputs);
        case FLOAT16: return float_matmul<fp16, PlainWeights<fp16>>(args, args.inputs);
        case FLOAT32: return float_matmul<float, PlainWeights<float>>(args, args.inputs);
        default: return INVALID;
    }
}

}  // namespace ISA
