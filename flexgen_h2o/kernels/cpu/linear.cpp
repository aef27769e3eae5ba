// linear_skinny: a matrix of bfloat16 weights, read once, times few rows of bfloat16.
//
// The rows of x stand in lanes, so that weights are used as they lie in memory, pair by pair, and
// at the speed at which they come: the weights of OUTPUTS outputs flow through as so many streams.
// Only with AVX512_BF16; the caller asks first.
#include "kernels.h"
#include "memory.h"
#include "simd.h"

namespace ISA {

#if defined(__AVX512BF16__)
namespace {

static_assert(SKINNY_ROWS <= WIDTH, "rows are lanes of one vector");
constexpr int OUTPUTS = 8;   // that are computed together: more streams push each other out of L1
constexpr int64_t LINE = 16; // pairs of a cache line
constexpr int64_t AHEAD = 8; // lines of a stream that are asked for beforehand

// sums[m] = weights of output m by the WIDTH rows of x. Two sums each, as one must wait for itself.
template <int M>
INLINE void products(const bf16* weights, int64_t stride, const uint32_t* x, int64_t pairs,
                     __m512* sums) {
    __m512 odd[M];
    for (int m = 0; m < M; m++) sums[m] = odd[m] = Floats{};
    const auto step = [&](int64_t k, __m512* to) {
        const __m512bh lanes = load_raw<__m512bh>(x + k * WIDTH);
        for (int m = 0; m < M; m++) {
            int pair;
            std::memcpy(&pair, weights + m * stride + 2 * k, sizeof pair);
            to[m] = _mm512_dpbf16_ps(to[m], lanes, bits_of<__m512bh>(_mm512_set1_epi32(pair)));
        }
    };
    int64_t k = 0;
    for (; k + LINE <= pairs; k += LINE) {
        for (int m = 0; m < M; m++)
            __builtin_prefetch(weights + m * stride + 2 * (k + AHEAD * LINE), 0, 3);
        for (int64_t i = 0; i < LINE; i += 2) {
            step(k + i, sums);
            step(k + i + 1, odd);
        }
    }
    for (; k < pairs; k++) step(k, sums);
    for (int m = 0; m < M; m++) sums[m] = Floats(sums[m]) + Floats(odd[m]);
}

template <int M>
void outputs(const Linear& a, const uint32_t* x, int64_t first) {
    __m512 sums[M];
    products<M>(static_cast<const bf16*>(a.weight) + first * a.weight_row, a.weight_row, x,
                a.inputs / 2, sums);
    const bf16* bias = static_cast<const bf16*>(a.bias);
    for (int m = 0; m < M; m++) {
        const Floats mine = Floats(sums[m]) + (bias ? one(bias + first + m) : 0.0f);
        bf16* out = static_cast<bf16*>(a.out) + first + m;
        for (int64_t row = 0; row < a.rows; row++) {
            bf16* to = out + row * a.out_row;
            put(to, a.add ? mine[row] + one(to) : mine[row]);
        }
    }
}

}  // namespace

int linear_skinny(const Linear& a) {
    const int64_t pairs = a.inputs / 2;
    const Memory<uint32_t> x = memory<uint32_t>(pairs * WIDTH);
    if (!x) return NO_MEMORY;
    std::memset(x.get(), 0, static_cast<size_t>(pairs) * WIDTH * sizeof(uint32_t));
    for (int64_t row = 0; row < a.rows; row++)
        for (int64_t k = 0; k < pairs; k++)
            std::memcpy(x.get() + k * WIDTH + row,
                        static_cast<const bf16*>(a.x) + row * a.x_row + 2 * k, 4);
    const int64_t blocks = a.outputs / OUTPUTS;
#pragma omp parallel for schedule(static) num_threads(a.threads)
    for (int64_t block = 0; block < blocks; block++)
        outputs<OUTPUTS>(a, x.get(), block * OUTPUTS);
    for (int64_t rest = blocks * OUTPUTS; rest < a.outputs; rest++) outputs<1>(a, x.get(), rest);
    return DONE;
}
#else
int linear_skinny(const Linear&) { return NOT_HERE; }
#endif

}  // namespace ISA
