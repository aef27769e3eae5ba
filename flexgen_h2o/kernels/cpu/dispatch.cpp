// The C entry points: each picks the instruction set at run time.
#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

// Instruction sets, in the order of SETS in kernels/cpu_library.py.
enum Set : int { PORTABLE, AVX2, AVX_VNNI, AVX512, AVX512_VNNI, AVX512_BF16, AMX, AMX_EMULATED };

#if defined(__x86_64__)
// Whether this process may use tiles: Linux keeps room for their registers where it is asked to,
// once for all threads. Older kernels, and filters of system calls, refuse.
bool permitted() {
#if defined(__linux__)
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
#else
    return false;
#endif
}

// Whether the CPU has tiles of bfloat16 and the system saves their registers.
bool amx() {
    constexpr unsigned BF16 = 1u << 22, AMX_TILE = 1u << 24, OSXSAVE = 1u << 27, STATE = 3u << 17;
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & OSXSAVE)) return false;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & STATE) == STATE && __get_cpuid_count(7, 0, &a, &b, &c, &d) &&
           (d & (BF16 | AMX_TILE)) == (BF16 | AMX_TILE) && permitted();
}

// Whether the CPU has AVX-VNNI, whose name not all compilers know here.
bool avx_vnni() {
    constexpr unsigned FEATURE = 1u << 4;
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & FEATURE);
}

constexpr int bit(Set set) { return 1 << set; }

int available() {
    __builtin_cpu_init();
    int sets = bit(PORTABLE);
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
        !__builtin_cpu_supports("f16c"))
        return sets;
    sets |= bit(AVX2) | bit(AMX_EMULATED);
    if (avx_vnni()) sets |= bit(AVX_VNNI);
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
        return sets;
    sets |= bit(AVX512);
    if (!__builtin_cpu_supports("avx512vnni")) return sets;
    sets |= bit(AVX512_VNNI);
    if (!__builtin_cpu_supports("avx512bf16")) return sets;
    return sets | bit(AVX512_BF16) | (amx() ? bit(AMX) : 0);
}

#define CALL(function, arguments)                                           \
    switch (isa) {                                                          \
        case AMX:                                                           \
        case AVX512_BF16:                                                   \
        case AVX512_VNNI:                                                   \
        case AVX512: return avx512::function(*arguments);                   \
        case AMX_EMULATED:                                                  \
        case AVX_VNNI:                                                      \
        case AVX2: return avx2::function(*arguments);                       \
        default: return portable::function(*arguments);                     \
    }
// The same of what multiplies whole numbers, of what multiplies tiles, of what multiplies bfloat16, and
// of what does all of these.
#define CALL_CHOOSE(function, arguments)                                    \
    if (isa == AVX512_VNNI || isa == AVX512_BF16 || isa == AMX)             \
        return avx512vnni::function(*arguments);                            \
    CALL(function, arguments)
#define CALL_DECODE(function, arguments)                                    \
    if (isa == AMX) return amx::function(*arguments);                       \
    if (isa == AMX_EMULATED) return amx_emulated::function(*arguments);     \
    CALL(function, arguments)
#define CALL_PREFILL(function, arguments)                                   \
    if (isa == AVX512_BF16) return avx512bf16::function(*arguments);        \
    CALL_DECODE(function, arguments)
#define CALL_PRODUCT(function, arguments)                                   \
    if (isa == AVX_VNNI) return avxvnni::function(*arguments);              \
    if (isa == AVX512_VNNI) return avx512vnni::function(*arguments);        \
    CALL_PREFILL(function, arguments)
#else
int available() { return 1 << PORTABLE; }

#define CALL(function, arguments) \
    (void)isa;                    \
    return portable::function(*arguments);
#define CALL_CHOOSE CALL
#define CALL_DECODE CALL
#define CALL_PREFILL CALL
#define CALL_PRODUCT CALL
#endif

}  // namespace

#define EXPORT __attribute__((visibility("default")))

extern "C" {

// Which instruction sets there are kernels for that this machine can run: a bit for each.
EXPORT int h2o_isa_available() {
    static const int found = available();  // asking takes microseconds on a virtual machine
    return found;
}

// Which table the structs were made from, and which sources and compiler the kernels.
EXPORT const char* h2o_abi() { return H2O_ABI; }
EXPORT const char* h2o_build() { return H2O_BUILD " " __VERSION__; }

EXPORT int h2o_prefill_attention(int isa, const Prefill* a) { CALL_PREFILL(prefill_attention, a) }
EXPORT int h2o_select_heavy_hitters(int isa, const Select* a) { CALL(select_heavy_hitters, a) }
EXPORT int h2o_decode_attention(int isa, const Decode* a) { CALL_DECODE(decode_attention, a) }
EXPORT int h2o_index_keys(int isa, const IndexKeys* a) { CALL(index_keys, a) }
EXPORT int h2o_choose_keys(int isa, const Choose* a) { CALL_CHOOSE(choose_keys, a) }
EXPORT int h2o_attend_recalled(int isa, const Recalled* a) { CALL(attend_recalled, a) }
EXPORT int h2o_take_slots(int isa, const TakeSlots* a) { CALL(take_slots, a) }
EXPORT int h2o_fetch_tokens(int isa, const FetchTokens* a) { CALL(fetch_tokens, a) }
EXPORT int h2o_quantize_groups(int isa, const Groups* a) { CALL(quantize_groups, a) }
EXPORT int h2o_dequantize_groups(int isa, const Groups* a) { CALL(dequantize_groups, a) }
EXPORT int h2o_linear_skinny(int isa, const Linear* a) { CALL_PRODUCT(linear_skinny, a) }
EXPORT int h2o_linear_tiled(int isa, const Linear* a) { CALL_PRODUCT(linear_tiled, a) }
EXPORT int h2o_linear_float32(int isa, const Linear* a) { CALL(linear_float32, a) }
EXPORT int h2o_linear_quantized(int isa, const Product* a) { CALL_PRODUCT(linear_quantized, a) }
EXPORT int h2o_experts(int isa, const Experts* a) { CALL_PRODUCT(experts, a) }
EXPORT int h2o_route(int isa, const Route* a) { CALL_PRODUCT(route, a) }
EXPORT int h2o_unpack_rows(int isa, const Rows* a) { CALL(unpack_rows, a) }
EXPORT int h2o_quantize_matrix(int isa, const Quantize* a) { CALL(quantize_matrix, a) }
EXPORT int h2o_norm(int isa, const Norm* a) { CALL(norm, a) }
EXPORT int h2o_rotate(int isa, const Rotate* a) { CALL(rotate, a) }
EXPORT int h2o_activate(int isa, const Activate* a) { CALL(activate, a) }

// Carries out operations in order, up to one that fails: what those before it wrote stays.
EXPORT int h2o_program(int isa, const Program* a) {
#define RUN(operation, function, type) \
    case operation: status = function(isa, static_cast<const type*>(step.arguments)); break;
    for (int64_t i = 0; i < a->count; i++) {
        const Step& step = a->steps[i];
        int status = INVALID;
        switch (step.operation) {
            RUN(NORM, h2o_norm, Norm)
            RUN(ROTATE, h2o_rotate, Rotate)
            RUN(ACTIVATE, h2o_activate, Activate)
            RUN(DECODE_ATTENTION, h2o_decode_attention, Decode)
            RUN(INDEX_KEYS, h2o_index_keys, IndexKeys)
            RUN(CHOOSE_KEYS, h2o_choose_keys, Choose)
            RUN(ATTEND_RECALLED, h2o_attend_recalled, Recalled)
            RUN(LINEAR_SKINNY, h2o_linear_skinny, Linear)
            RUN(LINEAR_TILED, h2o_linear_tiled, Linear)
            RUN(LINEAR_FLOAT32, h2o_linear_float32, Linear)
            RUN(LINEAR_QUANTIZED, h2o_linear_quantized, Product)
        }
        if (status != DONE) return status;
    }
    return DONE;
#undef RUN
}

// A team of threads that do nothing. It stays with the thread that calls, and ends with it.
EXPORT void h2o_idle_team(int64_t threads) {
#pragma omp parallel num_threads(static_cast<int>(threads))
    asm volatile("");  // an empty region would be left out
}
}
