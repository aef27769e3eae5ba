// quantize_matrix: quantize weights to blocks of values, scales and zero points. Outputs are the
// lanes.
#include "matrix.h"
#include "memory.h"

namespace ISA {

namespace {

constexpr int SEARCH_STEPS = 10;  // candidate scales of the search
constexpr int REFINEMENTS = 4;  // least-squares refinements of the best fit
constexpr float MIN_VARIANCE = 1e-3f;  // minimum variance of quantized values for a fit, times count^2

// A group of WIDTH outputs: values [size, WIDTH], and error weights of the same shape with mean 1.
struct Group {
    const float *x, *weights;
    int64_t size;
    float levels;
    bool compact;

    Floats at(int64_t i) const { return load(x + i * WIDTH); }
    Floats weight(int64_t i) const { return load(weights + i * WIDTH); }
};

// Scale and zero point per lane, as stored in blocks.
struct Fit {
    Floats scale, zero;
};

using Compact = CompactAffine<4>;

INLINE Floats min(Floats a, Floats b) { return a < b ? a : b; }

// Round to the nearest float16.
INLINE Floats as_half(Floats x) {
#if defined(__AVX512F__)
    return _mm512_maskz_cvtph_ps(
        0xffff, _mm512_maskz_cvtps_ph(0xffff, x, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int i = 0; i < WIDTH; i++) x[i] = from_half(to_half(x[i]));
    return x;
#endif
}

// Return the code of a compact scale, rounded up or down.
INLINE Ints scale_code(Floats scale, bool up) {
    const Ints bits = bit_cast<Ints>(scale);
    const int rest = (1 << Compact::MANTISSA) - 1;
    const Ints code = ((bits + (up ? rest : 0)) >> Compact::MANTISSA) - Compact::LOWEST;
    return code < 0 ? Ints{} : code > 255 ? Ints{} + 255 : code;
}
INLINE Floats zero_code(const Fit& fit) {
    const Floats steps = rounded(-fit.zero / fit.scale * (1.0f / Compact::STEP));
    return min(max(steps, Floats{}), broadcast(255.0f));
}
// Return a compact scale, rounded up or down, and the nearest zero point for it.
INLINE Fit as_compact(const Fit& fit, bool up) {
    Fit to{Compact::scale_of(scale_code(fit.scale, up)), fit.zero};
    to.zero = to.scale * (zero_code(to) * -Compact::STEP);
    return to;
}

INLINE Floats code_of(Floats x, float levels) {
    return min(max(rounded(x), Floats{}), broadcast(levels));
}

INLINE Floats step_of(const Fit& fit) { return max(fit.scale, broadcast(TINY)); }

INLINE Floats error_of(const Group& g, const Fit& fit) {
    const Floats inverse = 1.0f / step_of(fit);
    Floats all{};
    for (int64_t i = 0; i < g.size; i++) {
        const Floats x = g.at(i);
        const Floats code = code_of((x - fit.zero) * inverse, g.levels);
        const Floats off = fma(fit.scale, code, fit.zero) - x;
        all = fma(g.weight(i) * off, off, all);
    }
    return all;
}

// Fit the range of the values, as quantize_row in groups.h does. A compact zero point is at most 0.
INLINE Fit fit_range(Floats low, Floats high, const Group& g) {
    Fit fit;
    if (g.compact) {
        fit.zero = min(low, Floats{});
        fit.scale = (max(high, Floats{}) - fit.zero) / g.levels;
        return as_compact(fit, true);
    }
    for (int i = 0; i < WIDTH; i++) {
        fit.zero[i] = from_half(half_below(low[i] + 0.0f));  // turns -0 into +0
        fit.scale[i] = from_half(half_below((fit.zero[i] - high[i]) / g.levels) & 0x7fff);
    }
    return fit;
}

// The best fit per lane, and its error.
struct Best {
    Fit fit;
    Floats least_error{};

    INLINE void keep(const Group& g, const Fit& other, Ints possible) {
        const Floats error = error_of(g, other);
        const Ints better = possible & (error < least_error);
        least_error = better ? error : least_error;
        fit.scale = better ? other.scale : fit.scale;
        fit.zero = better ? other.zero : fit.zero;
    }
};

// Quantize with `low` and the inverse scale `wide`, then try the least-squares fit to the quantized
// values. With compact scales, try both neighbours of the optimum.
INLINE void refit(const Group& g, Floats low, Floats wide, Best& best) {
    Floats codes{}, squares{}, products{}, values{};
    for (int64_t i = 0; i < g.size; i++) {
        const Floats x = g.at(i), code = code_of((x - low) * wide, g.levels);
        const Floats weighted_code = g.weight(i) * code;
        codes += weighted_code;
        squares = fma(weighted_code, code, squares);
        products = fma(weighted_code, x, products);
        values = fma(g.weight(i), x, values);
    }
    const Floats count = broadcast(static_cast<float>(g.size)), min_variance = broadcast(MIN_VARIANCE);
    const Floats variance = count * squares - codes * codes;
    const Floats scale = (count * products - codes * values) / max(variance, min_variance);
    const auto keep = [&](Floats rounded_scale) ALWAYS_INLINE {
        Fit fit{rounded_scale, (values - rounded_scale * codes) / count};
        fit.zero =
            g.compact ? fit.scale * (zero_code(fit) * -Compact::STEP) : as_half(clamped(fit.zero));
        best.keep(g, fit, variance > min_variance);
    };
    if (g.compact) {
        keep(Compact::scale_of(scale_code(max(scale, Floats{}), false)));
        keep(Compact::scale_of(scale_code(max(scale, Floats{}), true)));
    } else {
        keep(as_half(min(max(scale, Floats{}), broadcast(HALF_MAX))));
    }
}

// Compute the error weights of a search: the importance of an input times the sum of the element's
// magnitude and the root mean square. The sum keeps small elements relevant.
INLINE void compute_error_weights(const Group& g, const float* shares, float* to) {
    Floats squares{}, all{};
    for (int64_t i = 0; i < g.size; i++) squares = fma(g.at(i), g.at(i), squares);
    Floats rms{};
    for (int i = 0; i < WIDTH; i++) rms[i] = __builtin_sqrtf(squares[i] / static_cast<float>(g.size));
    for (int64_t i = 0; i < g.size; i++) {
        const Floats weight = broadcast(shares[i]) * (rms + max(g.at(i), -g.at(i)));
        store(to + i * WIDTH, weight);
        all += weight;
    }
    const Floats mean = all / static_cast<float>(g.size);
    for (int64_t i = 0; i < g.size; i++) {
        const Floats weight = load(to + i * WIDTH) / max(mean, broadcast(TINY));
        store(to + i * WIDTH, mean > TINY ? weight : broadcast(1.0f));
    }
}

INLINE Fit search_fit(const Group& g, Floats low, Floats high, const Fit& spanned) {
    Best best{spanned, error_of(g, spanned)};
    const Floats width = max(high - low, broadcast(TINY));
    for (int step = 0; step < SEARCH_STEPS; step++)
        refit(g, low, broadcast(g.levels - 1.0f + 0.2f * static_cast<float>(step)) / width, best);
    for (int i = 0; i < REFINEMENTS; i++)
        refit(g, best.fit.zero, 1.0f / step_of(best.fit), best);
    return best.fit;
}

// Store the scales and zero points of WIDTH outputs from `lane` on.
INLINE void store_scales(const Group& g, const Fit& fit, uint8_t* block, int64_t lane) {
    if (g.compact) {
        const Ints scales = scale_code(fit.scale, false);
        const Ints zeros = __builtin_convertvector(zero_code(fit), Ints);
        for (int i = 0; i < WIDTH; i++) {
            block[lane + i] = static_cast<uint8_t>(scales[i]);
            block[MATRIX_TILE + lane + i] = static_cast<uint8_t>(zeros[i]);
        }
        return;
    }
    for (int i = 0; i < WIDTH; i++) {
        const uint16_t scale = to_half(fit.scale[i]), zero = to_half(fit.zero[i]);
        std::memcpy(block + 2 * (lane + i), &scale, 2);
        std::memcpy(block + 2 * (MATRIX_TILE + lane + i), &zero, 2);
    }
}

// Quantize WIDTH outputs of a block from `lane` on. x holds their values.
INLINE void quantize_lanes(const Group& g, const MatrixBlocks& m, bool search, uint8_t* block,
                           int64_t lane) {
    Floats low = broadcast(HALF_MAX), high = broadcast(-HALF_MAX);
    for (int64_t i = 0; i < g.size; i++) {
        low = min(g.at(i), low);
        high = max(g.at(i), high);
    }
    Fit fit = fit_range(low, high, g);
    if (search) fit = search_fit(g, low, high, fit);
    store_scales(g, fit, block, lane);
    uint8_t* const words = block + m.block_bytes - 4 * MATRIX_TILE * m.words;
    const Floats step = step_of(fit);
    const int64_t width = m.bits == 4 ? 4 : 8, per_word = 32 / width;
    const auto word_of = [&](int64_t n) {
        Words word{};
        for (int64_t t = 0; t < per_word && n * per_word + t < g.size; t++) {
            const Floats code = code_of((g.at(n * per_word + t) - fit.zero) / step, g.levels);
            word |= Words(__builtin_convertvector(code, Ints))
                    << static_cast<int>(16 * (t % 2) + width * (t / 2));
        }
        return word;
    };
    const auto put = [&](int64_t n, Words word) {
        std::memcpy(words + 4 * (n * MATRIX_TILE + lane), &word, sizeof word);
    };
    if (m.bits != 6) {
        for (int64_t n = 0; n < m.words; n++) put(n, word_of(n));
        return;
    }
    for (int64_t unit = 0; unit < m.words / 3; unit++) {
        Words wide[4], three[3];
        for (int n = 0; n < 4; n++) wide[n] = word_of(4 * unit + n);
        Codes<6>::join(wide, three);
        for (int n = 0; n < 3; n++) put(3 * unit + n, three[n]);
    }
}

// Round to the nearest finite bfloat16, in the lower halves of words. NaN becomes 0.
INLINE Words as_bfloat16(Floats x) {
    constexpr uint32_t MAX_BF16 = 0x7f7f;
    Words bits = bit_cast<Words>(x == x ? x : Floats{});
    const Words sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    const Words size = (bits + (bits >> 16 & 1) + 0x7fff) >> 16;
    return sign | (size > MAX_BF16 ? Words{} + MAX_BF16 : size);
}

// Return the `Float12` codes of bfloat16 values in the lower halves of words, relative to the largest
// exponent.
INLINE Words float12_codes(Words x, Words exponent) {
    const Ints size = Ints(x & 0x7fff), code = size - ((Ints(exponent) - 15) << 7);
    // Round to 0 if that is nearer than the smallest number. Denormals also become 0.
    const Ints there = (code > -127) & (size > 127);
    return (x & 0x8000) | (Words(code < 1 ? Ints{} + 1 : code) & Words(there));
}

// Encode WIDTH outputs of a block as `Float12`.
INLINE void encode_lanes(const Group& g, const MatrixBlocks& m, uint8_t* block, int64_t lane) {
    Words largest{};
    for (int64_t i = 0; i < g.size; i++) {
        const Words size = as_bfloat16(g.at(i)) & 0x7fff;
        largest = size > largest ? size : largest;
    }
    const Words exponent = largest >> 7;
    for (int i = 0; i < WIDTH; i++) block[lane + i] = static_cast<uint8_t>(exponent[i]);
    for (int64_t unit = 0; unit < m.group / Float12::unit_inputs; unit++) {
        Words pairs[Float12::unit_inputs / 2]{}, words[Float12::unit_words];
        for (int64_t i = 0; i < Float12::unit_inputs; i++) {
            const int64_t input = unit * Float12::unit_inputs + i;
            if (input < g.size)
                pairs[i / 2] |= float12_codes(as_bfloat16(g.at(input)), exponent) << (i % 2 ? 16 : 0);
        }
        Float12::join(pairs, words);
        for (int n = 0; n < Float12::unit_words; n++)
            std::memcpy(block + MATRIX_TILE +
                            4 * ((unit * Float12::unit_words + n) * MATRIX_TILE + lane),
                        words + n, sizeof *words);
    }
}

// Gather values of WIDTH outputs from `output` on to [size, WIDTH]. Missing outputs are zeros, which
// quantize to zeros. WHOLE keeps values beyond the float16 range.
template <bool WHOLE, class T>
INLINE void gather(const QuantizeMatrix& args, int64_t output, int64_t input, int64_t size, float* to) {
    const T* x = static_cast<const T*>(args.weight) + output * args.weight_row + input;
    int64_t k = 0;
#if defined(__AVX512F__)
    for (; k + WIDTH <= size && output + WIDTH <= args.matrix.outputs; k += WIDTH) {
        Floats square[WIDTH];
        for (int64_t i = 0; i < WIDTH; i++) {
            square[i] = load(x + i * args.weight_row + k);
            if (!WHOLE) square[i] = clamped(square[i]);
        }
        transpose(square);
        for (int64_t i = 0; i < WIDTH; i++) store(to + (k + i) * WIDTH, square[i]);
    }
#endif
    for (; k < size; k++)
        for (int64_t i = 0; i < WIDTH; i++)
            to[k * WIDTH + i] = output + i >= args.matrix.outputs ? 0.0f
                                : WHOLE ? load_one(x + i * args.weight_row + k)
                                        : clamped_one(x + i * args.weight_row + k);
}

// Compute the importance of a group's inputs from `input` on, normalized to mean 1. Without importance
// data all are equal.
INLINE void importance_of(const QuantizeMatrix& args, int64_t input, int64_t size, float* to) {
    float all = 0;
    for (int64_t i = 0; args.importance && i < size; i++) all += args.importance[input + i];
    for (int64_t i = 0; i < size; i++)
        to[i] = all > 0 ? args.importance[input + i] / (all / static_cast<float>(size)) : 1.0f;
}

template <class T>
void quantize_block(const QuantizeMatrix& args, const MatrixBlocks& m, int64_t tile, int64_t g,
                    float* values) {
    uint8_t* block = static_cast<uint8_t*>(args.matrix.data) + (tile * m.groups + g) * m.block_bytes;
    const int64_t left = args.matrix.inputs - g * m.group, size = left < m.group ? left : m.group;
    float *const weights = values + m.group * WIDTH, *const shares = weights + m.group * WIDTH;
    importance_of(args, g * m.group, size, shares);
    for (int64_t lane = 0; lane < MATRIX_TILE; lane += WIDTH) {
        const int64_t output = tile * MATRIX_TILE + lane;
        if (m.bits == Float12::bits) {
            gather<true, T>(args, output, g * m.group, size, values);
            encode_lanes({values, weights, size, 0.0f, false}, m, block, lane);
            continue;
        }
        gather<false, T>(args, output, g * m.group, size, values);
        for (int64_t i = 0; args.matrix.group < 0 && i < size * WIDTH; i += WIDTH)
            store(values + i,
                  min(max(load(values + i), -Compact::max_magnitude()), Compact::max_magnitude()));
        const float levels = static_cast<float>((1 << m.bits) - 1);
        const Group group{values, weights, size, levels, args.matrix.group < 0};
        if (args.search) compute_error_weights(group, shares, weights);
        quantize_lanes(group, m, args.search, block, lane);
    }
}

template <class T>
int quantize(const QuantizeMatrix& args) {
    const MatrixBlocks m(args.matrix);
    const int64_t size = m.group * (2 * WIDTH + 1);
    const Buffer<float> values = allocate<float>(args.threads * size);
    if (!values) return NO_MEMORY;
    const int64_t tiles = tiles_of(args.matrix);
#pragma omp parallel for schedule(static) num_threads(args.threads)
    for (int64_t tile = 0; tile < tiles; tile++)
        for (int64_t g = 0; g < m.groups; g++)
            quantize_block<T>(args, m, tile, g, values.get() + thread_index() * size);
    return DONE;
}

}  // namespace

int quantize_matrix(const QuantizeMatrix& args) { BY_DTYPE(quantize) }

}  // namespace ISA
