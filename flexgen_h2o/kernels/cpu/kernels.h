// What the sources share. The structs of the C ABI come from kernels/abi.py, which says what is in
// them; the sizes beside them from config/limits.py. Strides count elements; the last dimension is
// contiguous.
#pragma once

#include <cstdint>

#include "abi.h"

enum DType : int64_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

// What a call returns. After anything but DONE nothing has been written.
enum Status : int { DONE = 0, NO_MEMORY = 1, INVALID = 2 };

// What a function of elements returns, by the dtype of the arguments `a`.
#define BY_DTYPE(function)                       \
    switch (a.dtype) {                           \
        case BFLOAT16: return function<bf16>(a); \
        case FLOAT16: return function<fp16>(a);  \
        default: return function<float>(a);      \
    }

// What every instruction set has kernels of its own for, and what only some have; setup.py says which
// source is compiled for which, and dispatch.cpp whose kernels the others use.
#define DECLARE_PRODUCTS(isa)                    \
    namespace isa {                              \
    int linear_skinny(const Linear&);            \
    int linear_tiled(const Linear&);             \
    int linear_quantized(const Product&);        \
    int experts(const Experts&);                 \
    int route(const Route&);                     \
    }
#define DECLARE_PREFILL(isa) \
    namespace isa {          \
    int prefill_attention(const Prefill&); \
    }
#define DECLARE_CHOOSE(isa) \
    namespace isa {         \
    int choose_keys(const Choose&); \
    }
#define DECLARE(isa)                             \
    DECLARE_PRODUCTS(isa)                        \
    DECLARE_PREFILL(isa)                         \
    DECLARE_CHOOSE(isa)                          \
    namespace isa {                              \
    int select_heavy_hitters(const Select&);     \
    int decode_attention(const Decode&);         \
    int index_keys(const IndexKeys&);            \
    int attend_recalled(const Recalled&);        \
    int take_slots(const TakeSlots&);            \
    int fetch_tokens(const FetchTokens&);        \
    int linear_float32(const Linear&);           \
    int quantize_groups(const Groups&);          \
    int dequantize_groups(const Groups&);        \
    int quantize_matrix(const Quantize&);        \
    int unpack_rows(const Rows&);                \
    int norm(const Norm&);                       \
    int rotate(const Rotate&);                   \
    int activate(const Activate&);               \
    }

DECLARE(portable)
#if defined(__x86_64__)
DECLARE(avx2)
DECLARE(avx512)
DECLARE_PRODUCTS(avxvnni)
DECLARE_PRODUCTS(avx512vnni)
DECLARE_CHOOSE(avx512vnni)
DECLARE_PRODUCTS(avx512bf16)
DECLARE_PREFILL(avx512bf16)
DECLARE_PRODUCTS(amx)
DECLARE_PREFILL(amx)
DECLARE_PRODUCTS(amx_emulated)
DECLARE_PREFILL(amx_emulated)
#endif
#undef DECLARE
#undef DECLARE_CHOOSE
#undef DECLARE_PREFILL
#undef DECLARE_PRODUCTS
