// What the sources share. The structs of the C ABI come from kernels/abi.py, which says what is in
// them; the sizes beside them from config/limits.py. Strides count elements; the last dimension is
// contiguous.
#pragma once

#include <cstdint>

#include "abi.h"

enum DType : int64_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

// What a call returns. After anything but DONE nothing has been written.
enum Status : int { DONE = 0, NO_MEMORY = 1, INVALID = 2 };

// What a function of elements returns, by the dtype of the arguments `a`. Those of an instruction set
// that adds products of bfloat16 alone never meet another dtype (dispatch.cpp).
#if defined(__AVX512BF16__) || defined(H2O_EMULATE)
#define BY_DTYPE(function) return function<bf16>(a);
#else
#define BY_DTYPE(function)                       \
    switch (a.dtype) {                           \
        case BFLOAT16: return function<bf16>(a); \
        case FLOAT16: return function<fp16>(a);  \
        default: return function<float>(a);      \
    }
#endif

// Not every instruction set has kernels of its own for all of these: setup.py says which source is
// compiled for which, and dispatch.cpp whose kernels the others use.
#define DECLARE(isa)                             \
    namespace isa {                              \
    int prefill_attention(const Prefill&);       \
    int select_heavy_hitters(const Select&);     \
    int decode_attention(const Decode&);         \
    int index_keys(const IndexKeys&);            \
    int choose_keys(const Choose&);              \
    int attend_recalled(const Recalled&);        \
    int take_slots(const TakeSlots&);            \
    int fetch_tokens(const FetchTokens&);        \
    int linear_skinny(const Linear&);            \
    int linear_tiled(const Linear&);             \
    int linear_float32(const Linear&);           \
    int linear_quantized(const Product&);        \
    int linear_rounded(const Product&);          \
    int experts(int isa, const Experts&);        \
    int route(const Route&);                     \
    int quantize_groups(const Groups&);          \
    int dequantize_groups(const Groups&);        \
    int quantize_matrix(const Quantize&);        \
    int unpack_rows(const Rows&);                \
    int repack(const Repack&);                   \
    int norm(const Norm&);                       \
    int rotate(const Rotate&);                   \
    int activate(const Activate&);               \
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

// Of dispatch.cpp, for kernels that are made of others.
extern "C" {
int h2o_linear_skinny(int isa, const Linear*);
int h2o_linear_quantized(int isa, const Product*);
}
