// C entry points. Each one selects the instruction set at run time.
#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

// Instruction sets, in the order of SETS in kernels/cpu/library.py.
enum InstructionSet : int {
    PORTABLE, AVX2, AVX_VNNI, AVX512, AVX512_VNNI, AVX512_BF16, AMX, AMX_EMULATED
};

#if defined(__x86_64__)
// Return whether this process may use AMX tiles. Linux allocates the register state on request, once
// for all threads. Old kernels and seccomp filters refuse the request.
bool permitted() {
#if defined(__linux__)
    constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
#else
    return false;
#endif
}

// Return whether the CPU supports bfloat16 tiles and the OS saves their registers.
bool amx() {
    constexpr unsigned BF16 = 1u << 22, AMX_TILE = 1u << 24, OSXSAVE = 1u << 27, STATE = 3u << 17;
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & OSXSAVE)) return false;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & STATE) == STATE && __get_cpuid_count(7, 0, &a, &b, &c, &d) &&
           (d & (BF16 | AMX_TILE)) == (BF16 | AMX_TILE) && permitted();
}

// Return whether the CPU supports AVX-VNNI. Not all compilers know its feature name.
bool avx_vnni() {
    constexpr unsigned FEATURE = 1u << 4;
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & FEATURE);
}

constexpr int bit(InstructionSet set) { return 1 << set; }

// Return a bit mask of the instruction sets that this CPU runs.
int cpu_sets() {
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

// Call the kernel of a set for the instruction sets of a mask. H2O_SETS is the mask of sets that were
// built: the library has no symbols of others.
#define TRY(set, isas, call)              \
    if constexpr (H2O_SETS & bit(set)) {  \
        if ((isas) >> isa & 1) return call; \
    }
#define CALL(function, ...)                                                         \
    TRY(AVX512, bit(AVX512) | bit(AVX512_VNNI) | bit(AVX512_BF16) | bit(AMX),       \
        avx512::function(__VA_ARGS__))                                              \
    TRY(AVX2, bit(AVX2) | bit(AVX_VNNI) | bit(AMX_EMULATED), avx2::function(__VA_ARGS__)) \
    TRY(PORTABLE, ~0, portable::function(__VA_ARGS__))                              \
    return INVALID;
// The same for integer matmuls of the key index and of weights.
#define CALL_VNNI(function, ...)                                     \
    TRY(AVX512_VNNI, bit(AVX512_VNNI) | bit(AVX512_BF16) | bit(AMX),   \
        avx512vnni::function(__VA_ARGS__))                             \
    CALL(function, __VA_ARGS__)
#define CALL_INT8(function, ...)                                         \
    TRY(AVX_VNNI, bit(AVX_VNNI), avxvnni::function(__VA_ARGS__))            \
    TRY(AMX_EMULATED, bit(AMX_EMULATED), amx_emulated::function(__VA_ARGS__)) \
    CALL_VNNI(function, __VA_ARGS__)
// The same for kernels with tile matmuls or bfloat16 pair matmuls.
#define CALL_AMX(function, ...)                                           \
    TRY(AMX, bit(AMX), amx::function(__VA_ARGS__))                          \
    TRY(AMX_EMULATED, bit(AMX_EMULATED), amx_emulated::function(__VA_ARGS__)) \
    CALL(function, __VA_ARGS__)
#define CALL_PAIRS(function, ...)                                             \
    TRY(AVX512_BF16, bit(AVX512_BF16), avx512bf16::function(__VA_ARGS__))     \
    CALL_AMX(function, __VA_ARGS__)

// Return the instruction set for a dtype. Tiles and pairs support only bfloat16.
int set_for_dtype(int isa, int64_t dtype) {
    if (dtype == BFLOAT16) return isa;
    if (isa == AVX512_BF16 || isa == AMX) return AVX512_VNNI;
    return isa == AMX_EMULATED ? AVX2 : isa;
}
#else
int cpu_sets() { return 1 << PORTABLE; }

#define CALL(function, ...) \
    (void)isa;              \
    return portable::function(__VA_ARGS__);
#define CALL_VNNI CALL
#define CALL_INT8 CALL
#define CALL_AMX CALL
#define CALL_PAIRS CALL

int set_for_dtype(int isa, int64_t) { return isa; }
#endif

}  // namespace

#define EXPORT __attribute__((visibility("default")))

extern "C" {

// Return bit masks of instruction sets: those that this CPU runs, those that were built, and both.
EXPORT int h2o_isa_cpu() {
    static const int sets = cpu_sets();  // CPUID takes microseconds on a VM
    return sets;
}
EXPORT int h2o_isa_built() { return H2O_SETS; }
EXPORT int h2o_isa_available() { return h2o_isa_cpu() & H2O_SETS; }

// Return the fingerprint of the struct definitions, and that of the sources and the compiler.
EXPORT const char* h2o_abi() { return H2O_ABI; }
EXPORT const char* h2o_build() { return H2O_BUILD " " __VERSION__; }

EXPORT int h2o_prefill_attention(int isa, const PrefillAttention* args) {
    isa = set_for_dtype(isa, args->dtype);
    CALL_PAIRS(prefill_attention, *args)
}
EXPORT int h2o_select_heavy_hitters(int isa, const SelectHeavyHitters* args) {
    CALL(select_heavy_hitters, *args)
}
EXPORT int h2o_decode_attention(int isa, const DecodeAttention* args) {
    isa = set_for_dtype(isa, args->dtype);
    CALL_AMX(decode_attention, *args)
}
EXPORT int h2o_index_keys(int isa, const IndexKeys* args) { CALL(index_keys, *args) }
EXPORT int h2o_select_keys(int isa, const SelectKeys* args) { CALL_VNNI(select_keys, *args) }
EXPORT int h2o_recall_attention(int isa, const RecallAttention* args) { CALL(recall_attention, *args) }
EXPORT int h2o_assign_slots(int isa, const AssignSlots* args) { CALL(assign_slots, *args) }
EXPORT int h2o_fetch_tokens(int isa, const FetchTokens* args) { CALL(fetch_tokens, *args) }
EXPORT int h2o_quantize_groups(int isa, const QuantizeGroups* args) { CALL(quantize_groups, *args) }
EXPORT int h2o_dequantize_groups(int isa, const QuantizeGroups* args) { CALL(dequantize_groups, *args) }
EXPORT int h2o_linear_skinny(int isa, const Linear* args) { CALL_PAIRS(linear_skinny, *args) }
EXPORT int h2o_linear_tiled(int isa, const Linear* args) { CALL_PAIRS(linear_tiled, *args) }
EXPORT int h2o_linear_float32(int isa, const Linear* args) { CALL(linear_float32, *args) }
EXPORT int h2o_linear_quantized(int isa, const QuantizedLinear* args) {
    isa = set_for_dtype(isa, args->dtype);
    if (args->matrix.activation_bits == 8) { CALL_INT8(linear_int8, *args) }
    CALL_PAIRS(linear_quantized, *args)
}
EXPORT int h2o_experts(int isa, const Experts* args) { CALL(experts, isa, *args) }
EXPORT int h2o_route(int isa, const Route* args) { CALL(route, *args) }
EXPORT int h2o_unpack_rows(int isa, const UnpackRows* args) { CALL(unpack_rows, *args) }
EXPORT int h2o_quantize_matrix(int isa, const QuantizeMatrix* args) { CALL(quantize_matrix, *args) }
EXPORT int h2o_repack(int isa, const Repack* args) { CALL(repack, *args) }
EXPORT int h2o_norm(int isa, const Norm* args) { CALL(norm, *args) }
EXPORT int h2o_rotate(int isa, const Rotate* args) { CALL(rotate, *args) }
EXPORT int h2o_activate(int isa, const Activate* args) { CALL(activate, *args) }
EXPORT int h2o_gated_delta_net(int isa, const GatedDeltaNet* args) { CALL(gated_delta_net, *args) }

// Run operations in order and stop at the first error. Results of earlier operations remain.
EXPORT int h2o_replay(int isa, const Replay* args) {
#define RUN(operation, function, type) \
    case operation: status = function(isa, static_cast<const type*>(call.arguments)); break;
    for (int64_t i = 0; i < args->count; i++) {
        const CapturedCall& call = args->calls[i];
        int status = INVALID;
        switch (call.operation) {
            RUN(NORM, h2o_norm, Norm)
            RUN(ROTATE, h2o_rotate, Rotate)
            RUN(ACTIVATE, h2o_activate, Activate)
            RUN(DECODE_ATTENTION, h2o_decode_attention, DecodeAttention)
            RUN(INDEX_KEYS, h2o_index_keys, IndexKeys)
            RUN(SELECT_KEYS, h2o_select_keys, SelectKeys)
            RUN(RECALL_ATTENTION, h2o_recall_attention, RecallAttention)
            RUN(LINEAR_SKINNY, h2o_linear_skinny, Linear)
            RUN(LINEAR_TILED, h2o_linear_tiled, Linear)
            RUN(LINEAR_FLOAT32, h2o_linear_float32, Linear)
            RUN(LINEAR_QUANTIZED, h2o_linear_quantized, QuantizedLinear)
        }
        if (status != DONE) return status;
    }
    return DONE;
#undef RUN
}

// Start an idle thread team. It belongs to the calling thread and ends with it.
EXPORT void h2o_idle_team(int64_t threads) {
#pragma omp parallel num_threads(static_cast<int>(threads))
    asm volatile("");  // the compiler would drop an empty region
}
}
