// Declarations that all sources share. kernels/abi.py generates and documents the structs of the C
// ABI. config/limits.py defines the size limits. Strides count elements. The last dimension is
// contiguous.
#pragma once

#include <cstdint>

#include "abi.h"

enum DType : int64_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

// Return codes. After any code but DONE, no output has been written.
enum Status : int { DONE = 0, NO_MEMORY = 1, INVALID = 2 };

// Dispatch a function template on the dtype of the arguments `args`. Instruction sets that are
// compiled only for bfloat16 matmuls receive no other dtype (dispatch.cpp).
#if defined(__AVX512BF16__) || defined(H2O_EMULATE)
#define BY_DTYPE(function) return function<bf16>(args);
#else
#define BY_DTYPE(function)                       \
    switch (args.dtype) {                           \
        case BFLOAT16: return function<bf16>(args); \
        case FLOAT16: return function<fp16>(args);  \
        default: return function<float>(args);      \
    }
#endif

// Not every instruction set has its own version of all kernels. setup.py says which sources are
// compiled for which instruction set. dispatch.cpp chooses the fallback for the others.
#define DECLARE(isa)                                     \
    namespace isa {                                      \
    int prefill_attention(const PrefillAttention&);      \
    int select_heavy_hitters(const SelectHeavyHitters&); \
    int decode_attention(const DecodeAttention&);        \
    int index_keys(const IndexKeys&);                    \
    int select_keys(const SelectKeys&);                  \
    int recall_attention(const RecallAttention&);        \
    int assign_slots(const AssignSlots&);                \
    int fetch_tokens(const FetchTokens&);                \
    int linear_skinny(const Linear&);                    \
    int linear_tiled(const Linear&);                     \
    int linear_float32(const Linear&);                   \
    int linear_quantized(const QuantizedLinear&);        \
    int linear_int8(const QuantizedLinear&);             \
    int experts(int isa, const Experts&);                \
    int route(const Route&);                             \
    int quantize_groups(const QuantizeGroups&);                  \
    int dequantize_groups(const QuantizeGroups&);                \
    int quantize_matrix(const QuantizeMatrix&);          \
    int unpack_rows(const UnpackRows&);                  \
    int repack(const Repack&);                           \
    int norm(const Norm&);                               \
    int rotate(const Rotate&);                           \
    int activate(const Activate&);                       \
    int gated_delta_net(const GatedDeltaNet&);           \
    }

DECLARE(portable)
#if defined(__x86_64__)
DECLARE(avx2)
DECLARE(avxvnni)
DECLARE(avx512)
DECLARE(avx512vnni)
DECLARE(avx512bf16)
DECLARE(amx)
DECLARE(amx_emulated)
#endif
#undef DECLARE

// Dispatchers that other kernels call.
extern "C" {
int h2o_linear_skinny(int isa, const Linear*);
int h2o_linear_quantized(int isa, const QuantizedLinear*);
}
