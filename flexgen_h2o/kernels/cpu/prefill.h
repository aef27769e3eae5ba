// What the forms of prefill_attention share: which queries make up a block, and what they see.
#pragma once

#include <math.h>

#include "kernels.h"
#include "simd.h"

namespace ISA {

struct Sequence {
    int64_t row, key_row, rows, tokens;
};

// A block of queries of one KV head of a sequence. Its lanes are flat numbers of (row, head of the
// group): the query heads of a group are queries too.
struct Lanes {
    const Prefill& a;
    const Sequence& sequence;
    int64_t kv_head, first, count;

    const int64_t queries = a.heads / a.kv_heads;  // that a KV head has, of each row

    int64_t group() const { return queries; }
    int64_t row(int64_t lane) const { return queries == 1 ? first + lane : (first + lane) / queries; }
    int64_t head(int64_t lane) const {
        return queries == 1 ? kv_head : kv_head * queries + (first + lane) % queries;
    }
    // The last key that a lane sees.
    int64_t limit(int64_t lane) const { return sequence.tokens - sequence.rows + row(lane); }
    int64_t seen() const { return limit(count - 1) + 1; }
    // The first key that a lane sees, and the first that any of the block's does.
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
    // What the attention score keeps of this lane's weights once all rows are added.
    float kept(int64_t lane) const {
        const double age = static_cast<double>(sequence.rows - 1 - row(lane));
        return a.decay == 1.0 ? 1.0f : static_cast<float>(pow(a.decay, age));
    }
};

}  // namespace ISA
