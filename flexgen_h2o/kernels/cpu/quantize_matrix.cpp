// quantize_matrix: weights to blocks of codes, scales and zero points.
#include "matrix.h"
#include "memory.h"

namespace ISA {

namespace {

constexpr int STEPS = 20;  // scales that a search tries

// A group of one output: its values and, filled up to whole vectors, which of them count.
struct Group {
    const float *x, *counts;
    int64_t size, padded;
    float levels;
};

struct Fit {
    uint16_t scale, zero;
};

INLINE float step_of(uint16_t scale) {
    const float step = from_half(scale);
    return step < TINY ? TINY : step;
}

INLINE Floats codes_of(Floats x, float zero, float step, float levels) {
    const Floats code = rounded((x - zero) / step);
    const Floats raised = larger(code, Floats{});
    return raised > levels ? spread(levels) : raised;
}

inline float error_of(const Group& g, Fit fit) {
    const float scale = from_half(fit.scale), zero = from_half(fit.zero), step = step_of(fit.scale);
    Floats all{};
    for (int64_t i = 0; i < g.padded; i += WIDTH) {
        const Floats x = load(g.x + i);
        const Floats off = zero + scale * codes_of(x, zero, step, g.levels) - x;
        all = fma(off * off, load(g.counts + i), all);
    }
    return sum(all);
}

// As wide as the values are: as quantize_row of groups.h.
inline Fit spanning(float low, float high, float levels) {
    Fit fit;
    fit.zero = half_below(low + 0.0f);  // of two zeros the positive one
    fit.scale = half_below((from_half(fit.zero) - high) / levels) & 0x7fff;  // rounded up
    return fit;
}

// The scale and zero point that fit the codes best which a division by `width` gives.
inline bool refit(const Group& g, float low, float wide, Fit& fit) {
    Floats codes{}, squares{}, products{}, values{};
    for (int64_t i = 0; i < g.padded; i += WIDTH) {
        const Floats x = load(g.x + i), counts = load(g.counts + i);
        Floats code = larger(rounded((x - low) * wide), Floats{});
        code = (code > g.levels ? spread(g.levels) : code) * counts;
        codes += code;
        squares = fma(code, code, squares);
        products = fma(code, x, products);
        values = fma(x, counts, values);
    }
    const float count = static_cast<float>(g.size), n = sum(codes), total = sum(values);
    const float apart = count * sum(squares) - n * n;
    if (!(apart > 0)) return false;
    const float scale = (count * sum(products) - n * total) / (apart < 1 ? 1 : apart);
    fit.scale = to_half(std::fmin(std::fmax(scale, 0.0f), HALF_MAX));
    const float zero = (total - from_half(fit.scale) * n) / count;
    fit.zero = to_half(std::fmin(std::fmax(zero, -HALF_MAX), HALF_MAX));
    return true;
}

inline Fit searched(const Group& g, float low, float high, Fit best) {
    float least = error_of(g, best);
    const float width = high - low < TINY ? TINY : high - low;
    for (int step = 0; step < STEPS; step++) {
        Fit fit;
        if (!refit(g, low, (g.levels - 1.0f + 0.1f * static_cast<float>(step)) / width, fit))
            continue;
        const float error = error_of(g, fit);
        if (error < least) least = error, best = fit;
    }
    return best;
}

template <class T>
void quantize_block(const Quantize& a, const Blocks& m, int64_t tile, int64_t g, float* buffer) {
    uint8_t* block = static_cast<uint8_t*>(a.matrix.data) + (tile * m.groups + g) * m.block_bytes;
    std::memset(block, 0, static_cast<size_t>(m.block_bytes));
    const int64_t left = a.matrix.inputs - g * m.group, size = left < m.group ? left : m.group;
    const int64_t padded = (m.group + WIDTH - 1) / WIDTH * WIDTH, pairs = 16 / m.bits;
    float *values = buffer, *counts = buffer + padded, *codes = buffer + 2 * padded;
    for (int64_t i = 0; i < padded; i++) counts[i] = i < size ? 1.0f : 0.0f;
    const Group group{values, counts, size, padded, m.bits == 8 ? 255.0f : 15.0f};
    for (int64_t lane = 0; lane < TILE && tile * TILE + lane < a.matrix.outputs; lane++) {
        const T* x = static_cast<const T*>(a.weight) + (tile * TILE + lane) * a.weight_row
                     + g * m.group;
        for (int64_t i = 0; i < padded; i++) values[i] = i < size ? clamped_one(x + i) : 0.0f;
        float low = HALF_MAX, high = -HALF_MAX;
        bounds(values, size, low, high);
        Fit fit = spanning(low, high, group.levels);
        if (a.search) fit = searched(group, low, high, fit);
        std::memcpy(block + 2 * lane, &fit.scale, 2);
        std::memcpy(block + 2 * (TILE + lane), &fit.zero, 2);
        const float zero = from_half(fit.zero), step = step_of(fit.scale);
        for (int64_t i = 0; i < padded; i += WIDTH)
            store(codes + i, codes_of(load(values + i), zero, step, group.levels));
        for (int64_t i = size; i < padded; i++) codes[i] = 0.0f;
        for (int64_t n = 0; n < m.words; n++) {
            uint32_t word = 0;
            for (int64_t t = 0; t < 2 * pairs; t++)
                word |= static_cast<uint32_t>(codes[n * 2 * pairs + t])
                        << (16 * (t % 2) + m.bits * (t / 2));
            std::memcpy(block + 4 * TILE + 4 * (n * TILE + lane), &word, 4);
        }
    }
}

template <class T>
int quantize(const Quantize& a) {
    const Blocks m(a.matrix);
    const int64_t size = 3 * ((m.group + WIDTH - 1) / WIDTH * WIDTH) + 16;
    const Memory<float> buffers = memory<float>(a.threads * size);
    if (!buffers) return NO_MEMORY;
    const int64_t tiles = tiles_of(a.matrix);
#pragma omp parallel for schedule(static) num_threads(a.threads)
    for (int64_t tile = 0; tile < tiles; tile++)
        for (int64_t g = 0; g < m.groups; g++)
            quantize_block<T>(a, m, tile, g, buffers.get() + thread_number() * size);
    return DONE;
}

}  // namespace

int quantize_matrix(const Quantize& a) {
    switch (a.dtype) {
        case BFLOAT16: return quantize<bf16>(a);
        case FLOAT16: return quantize<fp16>(a);
        default: return quantize<float>(a);
    }
}

}  // namespace ISA
