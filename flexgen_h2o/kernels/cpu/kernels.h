// The C ABI between Python and the kernels, and what the sources share. native.py mirrors the
// structs field by field. Strides count elements; the last dimension is contiguous.
#pragma once

#include <cstdint>

enum DType : int64_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

// The position of a slot that holds no token.
constexpr int32_t EMPTY = 0x7fffffff;

enum Status : int { DONE = 0, NO_MEMORY = 1, NOT_HERE = 2 };

// A record of storage/quantization.py; bits is 16 for plain vectors.
struct Layout {
    int64_t bits, groups, group, code_bytes, nbytes;
};

// reference.prefill_attention: q [rows, heads, head_dim], k and v [key_rows, kv_heads, head_dim],
// out contiguous as q, mass [kv_heads, key_rows] or null.
struct Prefill {
    const void *q, *k, *v;
    void* out;
    float* mass;
    const int64_t *lengths, *key_lengths;
    int64_t dtype, sequences, heads, kv_heads, head_dim;
    int64_t q_row, q_head, k_row, k_head, v_row, v_head, mass_head;
    int64_t threads;
    double decay;
};

// reference.select_heavy_hitters: k and v [rows, kv_heads, head_dim], mass [kv_heads, rows] or
// null, cuts [sequences, 3], slots [2, sequences, kv_heads, slots, width]; the book's tensors
// [sequences, kv_heads, slots] are contiguous within a sequence.
struct Select {
    const void *k, *v;
    const float* mass;
    const int64_t* cuts;
    void* slots;
    float* kept_mass;
    int32_t *positions, *ranks;
    Layout layout;
    int64_t dtype, sequences, kv_heads, head_dim, num_slots;
    int64_t k_row, k_head, v_row, v_head, mass_head;
    int64_t slots_kind, slots_sequence, slots_head, slots_slot;
    int64_t mean, sinks, threads;
};

// reference.decode_attention: q [sequences, heads, head_dim], k and v [sequences, kv_heads,
// head_dim], out contiguous as q, turn [4, sequences]; mass and positions both or neither null.
struct Decode {
    const void *q, *k, *v;
    void *out, *slots;
    const int32_t* turn;
    float* mass;
    int32_t *positions, *ranks;
    const float *cos, *sin;
    int64_t* taken;
    Layout layout;
    int64_t dtype, sequences, heads, kv_heads, head_dim, num_slots, half_rotary;
    int64_t q_row, q_head, k_row, k_head, v_row, v_head;
    int64_t slots_kind, slots_sequence, slots_head, slots_slot;
    int64_t mean, sinks, threads;
    double decay;
};

// reference.quantize_groups and its inverse: x [rows, length] and records [rows, nbytes], rows
// apart by their strides; x is float32 where it is the output.
struct Groups {
    void *x, *records;
    Layout layout;
    int64_t dtype, rows, length, x_row, record_row, threads;
};

// reference.linear_few_rows: x [rows, inputs], weight [outputs, inputs], bias [outputs] or null, out
// [rows, outputs]; rows apart by their strides.
struct Linear {
    const void *x, *weight, *bias;
    void* out;
    int64_t rows, inputs, outputs, x_row, weight_row, out_row, add, threads;
};

// A matrix of storage/quantization.py (MatrixLayout).
struct Matrix {
    void* data;
    int64_t outputs, inputs, bits, group;
};

// reference_matrix.linear_quantized: x [rows, inputs], bias [outputs] or null, out [rows, outputs];
// rows apart by their strides.
struct Product {
    const void *x, *bias;
    void* out;
    Matrix matrix;
    int64_t dtype, rows, x_row, out_row, add, threads;
};

// reference_matrix.unpack_rows: rows [count], out [count, inputs].
struct Rows {
    const int64_t* rows;
    void* out;
    Matrix matrix;
    int64_t dtype, count, threads;
};

// reference_matrix.quantize_matrix: weight [outputs, inputs], rows apart by their stride.
struct Quantize {
    const void* weight;
    Matrix matrix;
    int64_t dtype, weight_row, search, threads;
};

#define DECLARE(isa)                             \
    namespace isa {                              \
    int prefill_attention(const Prefill&);       \
    int select_heavy_hitters(const Select&);     \
    int decode_attention(const Decode&);         \
    int quantize_groups(const Groups&);          \
    int dequantize_groups(const Groups&);        \
    int linear_few_rows(const Linear&);          \
    int linear_quantized(const Product&);        \
    int unpack_rows(const Rows&);                \
    int quantize_matrix(const Quantize&);        \
    }

DECLARE(portable)
#if defined(__x86_64__)
DECLARE(avx2)
DECLARE(avx512)
DECLARE(avx512bf16)
#endif
#undef DECLARE
