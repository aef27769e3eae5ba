// recall_attention: attention of one new token over selected slots of a cache, and its write into a
// slot.
//
// A task is one KV head of one sequence. All query heads of the group share one read of the keys and
// values.
#include <math.h>

#include "memory.h"
#include "products.h"

namespace ISA {

FLOAT_PRODUCTS(extern)

namespace {

int64_t padded(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// Load the scaled queries of a head [group, width], padded with zeros.
template <class T>
void queries(const RecallAttention& a, int64_t sequence, int64_t head, int64_t width, float* q) {
    const int64_t group = a.heads / a.kv_heads;
    const float scale = logit_scale(a.form, a.head_dim);
    const T* from = static_cast<const T*>(a.q) + sequence * a.q_row + head * group * a.q_head;
    for (int64_t g = 0; g < group; g++) {
        float* to = q + g * width;
        to_floats(from + g * a.q_head, a.head_dim, to);
        for (int64_t i = a.head_dim; i < width; i++) to[i] = 0;
        for (int64_t i = 0; i < width; i += WIDTH) store(to + i, load(to + i) * scale);
    }
}

// Convert the vector of the slot at `start` to floats [width], padded with zeros.
template <class T>
NOINLINE void convert_slot(const RecallAttention& a, const Layout& layout, int64_t start,
                           int64_t width, float* to) {
    if (layout.bits == 16)
        to_floats(static_cast<const T*>(a.slots) + start, a.head_dim, to);
    else
        dequantize_row(static_cast<const uint8_t*>(a.slots) + start, to, layout);
    for (int64_t i = a.head_dim; i < width; i++) to[i] = 0;
}

// Call f(first, count, tile) for the selected rows of a head's keys (kind 0) or values (kind 1), up to
// SLOT_TILE rows at a time. `scratch` [SLOT_TILE, width] is for rows that need conversion.
template <class T, class F>
void for_each_tile(const RecallAttention& a, int64_t task, int kind, int64_t width, float* scratch,
                   F f) {
    const int64_t s = task / a.kv_heads, head = task % a.kv_heads;
    const int64_t count = a.metadata[a.sequences + s];
    const int32_t* selected = a.selected + task * a.top_k;
    const int64_t start = slot_start(a, kind, s, head, 0);
    const Layout& layout = layout_of(a, kind);
    const T *base = static_cast<const T*>(a.slots) + start, *rows[SLOT_TILE];
    const bool plain = layout.bits == 16 && a.head_dim == width;
    for (int64_t t = 0; t < count; t += SLOT_TILE) {
        const int64_t rows_count = t + SLOT_TILE < count ? SLOT_TILE : count - t;
        if (plain) {
            for (int64_t i = 0; i < rows_count; i++) rows[i] = base + selected[t + i] * a.slots_slot;
            const GatheredTile<T> tile{rows,     base,       a.slots_slot,
                                       a.head_dim, selected + t, count - t};
            if (t == 0) tile.prefetch_first();
            f(t, rows_count, tile);
            continue;
        }
        for (int64_t i = 0; i < rows_count; i++)
            convert_slot<T>(a, layout, start + selected[t + i] * a.slots_slot, width,
                            scratch + i * width);
        f(t, rows_count, PlainTile<float>{scratch, width});
    }
}

// Apply softmax to a row of logits in place. The last logit is the new token's, and `sink` is added to
// the denominator.
void normalize(float* row, int64_t count, float sink) {
    const int64_t stop = padded(count, WIDTH);
    for (int64_t t = count; t < stop; t++) row[t] = MASKED;
    Floats largest = broadcast(sink), total{};
    for (int64_t t = 0; t < stop; t += WIDTH) largest = max(load(row + t), largest);
    const float top = reduce_max(largest);
    for (int64_t t = 0; t < stop; t += WIDTH) {
        const Floats e = exp(load(row + t) - top);
        store(row + t, e);
        total += e;
    }
    const float factor = 1.0f / (sum(total) + expf(sink - top));
    for (int64_t t = 0; t < stop; t += WIDTH) store(row + t, load(row + t) * factor);
}

// Append the logit of the new token to the `count` logits of selected slots of query `head`, then
// replace all of them by weights.
void weigh(const RecallAttention& a, int64_t sequence, int64_t head, const float* q, const float* key,
           float* row, int64_t count) {
    float logit = 0;
    for (int64_t i = 0; i < a.head_dim; i++) logit += q[i] * key[i];
    row[count] = logit;
    if (a.form.offsets) {
        const float offset =
            a.form.offsets[sequence * a.heads + head] * logit_scale(a.form, a.head_dim);
        for (int64_t t = 0; t <= count; t++) row[t] += offset;
    }
    const float cap = static_cast<float>(a.form.softcap);
    if (cap > 0)
        for (int64_t t = 0; t <= count; t += WIDTH)
            store(row + t, soft_capped(load(row + t), cap));
    normalize(row, count + 1, a.form.sinks ? a.form.sinks[head] : MASKED);
}

template <class T>
void attend_head(const RecallAttention& a, int64_t task, float* scratch, int64_t width,
                 int64_t stride) {
    const int64_t s = task / a.kv_heads, head = task % a.kv_heads, group = a.heads / a.kv_heads;
    const int64_t place = a.metadata[s], count = a.metadata[a.sequences + s];
    float *q = scratch, *out = q + group * width, *new_token = out + group * width;
    float *tile = new_token + width, *logits = tile + SLOT_TILE * width;
    const T* key = static_cast<const T*>(a.k) + s * a.k_row + head * a.k_head;
    const T* value = static_cast<const T*>(a.v) + s * a.v_row + head * a.v_head;
    queries<T>(a, s, head, width, q);
    to_floats(key, a.head_dim, new_token);
    for_each_tile<T>(a, task, 0, width, tile, [&](int64_t t, int64_t rows_count, const auto& keys) {
        by_queries(group, [&](auto G, int64_t g) {
            key_products<G()>(keys, {q + g * width, width, logits + g * stride + t, stride}, rows_count);
        });
    });
    for (int64_t g = 0; g < group; g++)
        weigh(a, s, head * group + g, q + g * width, new_token, logits + g * stride, count);
    std::memset(out, 0, static_cast<size_t>(group * width) * sizeof *out);
    for_each_tile<T>(a, task, 1, width, tile, [&](int64_t t, int64_t rows_count, const auto& values) {
        by_queries(group, [&](auto G, int64_t g) {
            value_products<G()>(values, {nullptr, width, logits + g * stride + t, stride}, rows_count,
                                out + g * width, width);
        });
    });
    to_floats(value, a.head_dim, new_token);
    for (int64_t g = 0; g < group; g++) {
        float* row = out + g * width;
        const float weight = logits[g * stride + count];
        for (int64_t i = 0; i < a.head_dim; i++) row[i] += weight * new_token[i];
        from_floats(row, a.head_dim,
                    static_cast<T*>(a.out) + (s * a.heads + head * group + g) * a.head_dim);
    }
    uint8_t* quantized = reinterpret_cast<uint8_t*>(new_token);
    write_slot(a, a.key_layout, slot_start(a, 0, s, head, place), key, quantized);
    write_slot(a, a.value_layout, slot_start(a, 1, s, head, place), value, quantized);
    a.written_slots[task] = place;
}

template <class T>
int attend(const RecallAttention& a) {
    for (int64_t s = 0; s < a.sequences; s++) {
        const int64_t place = a.metadata[s], count = a.metadata[a.sequences + s];
        if (place < 0 || place >= a.num_slots || count < 0 || count > a.top_k) return INVALID;
        for (int64_t head = 0; head < a.kv_heads; head++)
            for (int64_t i = 0; i < count; i++) {
                const int32_t slot = a.selected[(s * a.kv_heads + head) * a.top_k + i];
                if (slot < 0 || slot >= a.num_slots) return INVALID;
            }
    }
    const int64_t group = a.heads / a.kv_heads, width = padded(a.head_dim, WIDTH);
    const int64_t stride = padded(a.top_k + 1, 16);
    const int64_t scratch_size = (2 * group + 1 + SLOT_TILE) * width + group * stride;
    const Memory<float> scratch = memory<float>(a.threads * scratch_size);
    if (!scratch) return NO_MEMORY;
#pragma omp parallel for schedule(dynamic) num_threads(a.threads)
    for (int64_t task = 0; task < a.sequences * a.kv_heads; task++)
        attend_head<T>(a, task, scratch.get() + thread_number() * scratch_size, width, stride);
    return DONE;
}

}  // namespace

int recall_attention(const RecallAttention& a) { BY_DTYPE(attend) }

}  // namespace ISA
