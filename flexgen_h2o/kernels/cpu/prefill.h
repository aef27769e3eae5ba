// Code that all versions of prefill_attention share: blocks of queries and the keys they attend to.
#pragma once

#include <math.h>

#include "kernels.h"
#include "simd.h"

// The symbol version of glibc 2.29 differs only in errno, and a manylinux_2_28 wheel must not need it.
#if defined(__GLIBC__) && defined(__x86_64__)
__asm__(".symver pow, pow@GLIBC_2.2.5");
#elif defined(__GLIBC__) && defined(__aarch64__)
__asm__(".symver pow, pow@GLIBC_2.17");
#endif

namespace ISA {

struct Sequence {
    int64_t row, key_row, rows, tokens;
};

// A block of queries of one KV head of a sequence. A lane is a flat index of (row, query head of the
// group), because the query heads of a group are handled as additional queries.
struct Lanes {
    const PrefillAttention& a;
    const Sequence& sequence;
    int64_t kv_head, first, count;

    const int64_t queries = a.heads / a.kv_heads;  // query heads per KV head

    int64_t group() const { return queries; }
    int64_t row(int64_t lane) const { return queries == 1 ? first + lane : (first + lane) / queries; }
    int64_t head(int64_t lane) const {
        return queries == 1 ? kv_head : kv_head * queries + (first + lane) % queries;
    }
    // Return the last key that a lane attends to.
    int64_t limit(int64_t lane) const { return sequence.tokens - sequence.rows + row(lane); }
    int64_t seen() const { return limit(count - 1) + 1; }
    // Return the first key that a lane attends to, or the first one of all lanes of the block.
    int64_t start(int64_t lane) const {
        const int64_t start = a.form.window ? limit(lane) + 1 - a.form.window : 0;
        return start > 0 ? start : 0;
    }
    int64_t begin() const { return start(0); }

    float scale() const {
        return a.form.scale > 0 ? static_cast<float>(a.form.scale)
                                : 1.0f / sqrtf(static_cast<float>(a.head_dim));
    }

    template <class T>
    const T* query(int64_t lane) const {
        return static_cast<const T*>(a.q) + (sequence.row + row(lane)) * a.q_row +
               head(lane) * a.q_head;
    }
    template <class T>
    const T* key(int64_t token) const {
        return static_cast<const T*>(a.k) + (sequence.key_row + token) * a.k_row +
               kv_head * a.k_head;
    }
    template <class T>
    const T* value(int64_t token) const {
        return static_cast<const T*>(a.v) + (sequence.key_row + token) * a.v_row +
               kv_head * a.v_head;
    }
    template <class T>
    T* output(int64_t lane) const {
        return static_cast<T*>(a.out) +
               ((sequence.row + row(lane)) * a.heads + head(lane)) * a.head_dim;
    }
    // Return the fraction of a lane's weights that remains in the attention score after all rows.
    float decay_factor(int64_t lane) const {
        const double age = static_cast<double>(sequence.rows - 1 - row(lane));
        return a.decay == 1.0 ? 1.0f : static_cast<float>(pow(a.decay, age));
    }
};

}  // namespace ISA
