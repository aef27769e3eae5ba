// The C entry points: each picks the instruction set at run time.
#include <cstddef>
#include <initializer_list>

#include "kernels.h"

namespace {

#if defined(__x86_64__)
constexpr int SETS = 4;

int best() {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
        !__builtin_cpu_supports("f16c"))
        return 0;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
        return 1;
    return __builtin_cpu_supports("avx512bf16") ? 3 : 2;
}

#define CALL(function, arguments)                                    \
    switch (isa) {                                                   \
        case 3: return avx512bf16::function(*arguments);             \
        case 2: return avx512::function(*arguments);                 \
        case 1: return avx2::function(*arguments);                   \
        default: return portable::function(*arguments);              \
    }
#else
constexpr int SETS = 1;

int best() { return 0; }

#define CALL(function, arguments) \
    (void)isa;                    \
    return portable::function(*arguments);
#endif

}  // namespace

#define EXPORT __attribute__((visibility("default")))

extern "C" {

// Instruction sets there are kernels for, and the best that this machine has, counted from 0.
EXPORT int h2o_isa_count() { return SETS; }
EXPORT int h2o_isa_best() { return best(); }

// Sizes of the structs: the caller's have to be the same.
EXPORT int64_t h2o_sizes() {
    int64_t sizes = 0;
    for (size_t size : {sizeof(Prefill), sizeof(Select), sizeof(Decode), sizeof(Groups),
                        sizeof(Linear), sizeof(Product), sizeof(Rows), sizeof(Quantize)})
        sizes = sizes * 31 + static_cast<int64_t>(size);
    return sizes;
}

EXPORT int h2o_prefill_attention(int isa, const Prefill* a) { CALL(prefill_attention, a) }
EXPORT int h2o_select_heavy_hitters(int isa, const Select* a) { CALL(select_heavy_hitters, a) }
EXPORT int h2o_decode_attention(int isa, const Decode* a) { CALL(decode_attention, a) }
EXPORT int h2o_quantize_groups(int isa, const Groups* a) { CALL(quantize_groups, a) }
EXPORT int h2o_dequantize_groups(int isa, const Groups* a) { CALL(dequantize_groups, a) }
EXPORT int h2o_linear_few_rows(int isa, const Linear* a) { CALL(linear_few_rows, a) }
EXPORT int h2o_linear_quantized(int isa, const Product* a) { CALL(linear_quantized, a) }
EXPORT int h2o_unpack_rows(int isa, const Rows* a) { CALL(unpack_rows, a) }
EXPORT int h2o_quantize_matrix(int isa, const Quantize* a) { CALL(quantize_matrix, a) }
}
