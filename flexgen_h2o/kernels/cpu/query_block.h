// Code that all versions of prefill_attention share: blocks of queries and the keys they attend to.
#pragma once

#include <math.h>

#include "kernels.h"
#include "vector_math.h"

// The symbol version of glibc 2.29 differs only in errno, and a manylinux_2_28 wheel must not need it.
#if defined(__GLIBC__) && defined(__x86_64__)
__asm__(".symver pow, pow@GLIBC_2.2.5");
#elif defined(__GLIBC__) && defined(__aarch64__)
__asm__(".symver pow, pow@GLIBC_2.17");
#endif

namespace ISA {

// Keys or values that are converted and multiplied together. Their logits fit in the L1 cache.
constexpr int64_t KEY_CHUNK = 128;

struct Sequence {
    int64_t row, key_row, rows, tokens;
};

// A block of queries of one KV head of a sequence. A lane is a flat index of (row, query head of the
// group), because the query heads of a group are handled as additional queries.
struct QueryBlock {
    const PrefillAttention& args;
    const Sequence& sequence;
    int64_t kv_head, first, count;

    const int64_t queries = args.heads / args.kv_heads;  // query heads per KV head

    int64_t group() const { return queries; }
    int64_t row(int64_t lane) const { return queries == 1 ? first + lane : (first + lane) / queries; }
    int64_t head(int64_t lane) const {
        return queries == 1 ? kv_head : kv_head * queries + (first + lane) % queries;
    }
    // Return the last key that a lane attends to.
    int64_t last_key(int64_t lane) const { return sequence.tokens - sequence.rows + row(lane); }
    int64_t key_end() const { return last_key(count - 1) + 1; }
    // Return the first key that a lane attends to, or the first one of all lanes of the block.
    int64_t first_key(int64_t lane) const {
        const int64_t key = args.variant.window ? last_key(lane) + 1 - args.variant.window : 0;
        return key > 0 ? key : 0;
    }
    int64_t key_begin() const { return first_key(0); }

    float scale() const {
        return args.variant.scale > 0 ? static_cast<float>(args.variant.scale)
                                      : 1.0f / sqrtf(static_cast<float>(args.head_dim));
    }

    template <class T>
    const T* query(int64_t lane) const {
        return static_cast<const T*>(args.q) + (sequence.row + row(lane)) * args.q_row +
               head(lane) * args.q_head;
    }
    template <class T>
    const T* key(int64_t token) const {
        return static_cast<const T*>(args.k) + (sequence.key_row + token) * args.k_row +
               kv_head * args.k_head;
    }
    template <class T>
    const T* value(int64_t token) const {
        return static_cast<const T*>(args.v) + (sequence.key_row + token) * args.v_row +
               kv_head * args.v_head;
    }
    template <class T>
    T* output(int64_t lane) const {
        return static_cast<T*>(args.out) +
               ((sequence.row + row(lane)) * args.heads + head(lane)) * args.head_dim;
    }
    // Return the fraction of a lane's weights that remains in the attention score after all rows.
    float decay_factor(int64_t lane) const {
        const double age = static_cast<double>(sequence.rows - 1 - row(lane));
        return args.decay == 1.0 ? 1.0f : static_cast<float>(pow(args.decay, age));
    }
};

}  // namespace ISA
