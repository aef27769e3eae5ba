// recall_attention: attention of one new token over selected slots of a cache, and its write into a
// slot.
//
// A task is one KV head of one sequence. All query heads of the group share one read of the keys and
// values.
#include <math.h>

#include "cached_matmul.h"
#include "memory.h"

namespace ISA {

FLOAT_MATMULS(extern)

namespace {

int64_t padded(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// Load the scaled queries of a head [group, width], padded with zeros.
template <class T>
void load_queries(const RecallAttention& args, int64_t sequence, int64_t head, int64_t width, float* q) {
    const int64_t group = args.heads / args.kv_heads;
    const float scale = logit_scale(args.variant, args.head_dim);
    const T* from = static_cast<const T*>(args.q) + sequence * args.q_row + head * group * args.q_head;
    for (int64_t g = 0; g < group; g++) {
        float* to = q + g * width;
        to_floats(from + g * args.q_head, args.head_dim, to);
        for (int64_t i = args.head_dim; i < width; i++) to[i] = 0;
        for (int64_t i = 0; i < width; i += WIDTH) store(to + i, load(to + i) * scale);
    }
}

// Convert the vector of the slot at `start` to floats [width], padded with zeros.
template <class T>
NOINLINE void convert_slot(const RecallAttention& args, const GroupLayout& layout, int64_t start,
                           int64_t width, float* to) {
    if (layout.bits == 16)
        to_floats(static_cast<const T*>(args.slots) + start, args.head_dim, to);
    else
        dequantize_row(static_cast<const uint8_t*>(args.slots) + start, to, layout);
    for (int64_t i = args.head_dim; i < width; i++) to[i] = 0;
}

// Call f(first, count, tile) for the selected rows of a head's keys (kind 0) or values (kind 1), up to
// SLOT_TILE rows at a time. `scratch` [SLOT_TILE, width] is for rows that need conversion.
template <class T, class F>
void for_each_tile(const RecallAttention& args, int64_t task, int kind, int64_t width, float* scratch,
                   F f) {
    const int64_t s = task / args.kv_heads, head = task % args.kv_heads;
    const int64_t count = args.metadata[args.sequences + s];
    const int32_t* selected = args.selected + task * args.top_k;
    const int64_t start = slot_start(args, kind, s, head, 0);
    const GroupLayout& layout = layout_of(args, kind);
    const T *base = static_cast<const T*>(args.slots) + start, *rows[SLOT_TILE];
    const bool plain = layout.bits == 16 && args.head_dim == width;
    for (int64_t t = 0; t < count; t += SLOT_TILE) {
        const int64_t rows_count = t + SLOT_TILE < count ? SLOT_TILE : count - t;
        if (plain) {
            for (int64_t i = 0; i < rows_count; i++) rows[i] = base + selected[t + i] * args.slots_slot;
            const GatheredTile<T> tile{rows,          base,         args.slots_slot,
                                       args.head_dim, selected + t, count - t};
            if (t == 0) tile.prefetch_first();
            f(t, rows_count, tile);
            continue;
        }
        for (int64_t i = 0; i < rows_count; i++)
            convert_slot<T>(args, layout, start + selected[t + i] * args.slots_slot, width,
                            scratch + i * width);
        f(t, rows_count, PlainTile<float>{scratch, width});
    }
}

// Apply softmax to a row of logits in place. The last logit is the new token's, and `sink` is added to
// the denominator.
void softmax(float* row, int64_t count, float sink) {
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
void compute_weights(const RecallAttention& args, int64_t sequence, int64_t head, const float* q,
                     const float* key, float* row, int64_t count) {
    float logit = 0;
    for (int64_t i = 0; i < args.head_dim; i++) logit += q[i] * key[i];
    row[count] = logit;
    if (args.variant.offsets) {
        const float offset = args.variant.offsets[sequence * args.heads + head] *
                             logit_scale(args.variant, args.head_dim);
        for (int64_t t = 0; t <= count; t++) row[t] += offset;
    }
    const float cap = static_cast<float>(args.variant.softcap);
    if (cap > 0)
        for (int64_t t = 0; t <= count; t += WIDTH) store(row + t, apply_softcap(load(row + t), cap));
    softmax(row, count + 1, args.variant.sink_logits ? args.variant.sink_logits[head] : MASKED);
}

template <class T>
void attend_head(const RecallAttention& args, int64_t task, float* scratch, int64_t width,
                 int64_t stride) {
    const int64_t s = task / args.kv_heads, head = task % args.kv_heads,
                  group = args.heads / args.kv_heads;
    const int64_t new_slot = args.metadata[s], count = args.metadata[args.sequences + s];
    float *q = scratch, *out = q + group * width, *new_token = out + group * width;
    float *tile = new_token + width, *logits = tile + SLOT_TILE * width;
    const T* key = static_cast<const T*>(args.k) + s * args.k_row + head * args.k_head;
    const T* value = static_cast<const T*>(args.v) + s * args.v_row + head * args.v_head;
    load_queries<T>(args, s, head, width, q);
    to_floats(key, args.head_dim, new_token);
    for_each_tile<T>(args, task, 0, width, tile, [&](int64_t t, int64_t rows_count, const auto& keys) {
        for_query_blocks(group, [&](auto G, int64_t g) {
            matmul_keys<G()>(keys, {q + g * width, width, logits + g * stride + t, stride}, rows_count);
        });
    });
    for (int64_t g = 0; g < group; g++)
        compute_weights(args, s, head * group + g, q + g * width, new_token, logits + g * stride, count);
    std::memset(out, 0, static_cast<size_t>(group * width) * sizeof *out);
    for_each_tile<T>(args, task, 1, width, tile, [&](int64_t t, int64_t rows_count, const auto& values) {
        for_query_blocks(group, [&](auto G, int64_t g) {
            matmul_values<G()>(values, {nullptr, width, logits + g * stride + t, stride}, rows_count,
                               out + g * width, width);
        });
    });
    to_floats(value, args.head_dim, new_token);
    for (int64_t g = 0; g < group; g++) {
        float* row = out + g * width;
        const float weight = logits[g * stride + count];
        for (int64_t i = 0; i < args.head_dim; i++) row[i] += weight * new_token[i];
        from_floats(row, args.head_dim,
                    static_cast<T*>(args.out) + (s * args.heads + head * group + g) * args.head_dim);
    }
    uint8_t* quantized = reinterpret_cast<uint8_t*>(new_token);
    write_slot(args, args.key_layout, slot_start(args, 0, s, head, new_slot), key, quantized);
    write_slot(args, args.value_layout, slot_start(args, 1, s, head, new_slot), value, quantized);
    args.written_slots[task] = new_slot;
}

template <class T>
int attend(const RecallAttention& args) {
    for (int64_t s = 0; s < args.sequences; s++) {
        const int64_t new_slot = args.metadata[s], count = args.metadata[args.sequences + s];
        if (new_slot < 0 || new_slot >= args.num_slots || count < 0 || count > args.top_k)
            return INVALID;
        for (int64_t head = 0; head < args.kv_heads; head++)
            for (int64_t i = 0; i < count; i++) {
                const int32_t slot = args.selected[(s * args.kv_heads + head) * args.top_k + i];
                if (slot < 0 || slot >= args.num_slots) return INVALID;
            }
    }
    const int64_t group = args.heads / args.kv_heads, width = padded(args.head_dim, WIDTH);
    const int64_t stride = padded(args.top_k + 1, 16);
    const int64_t scratch_size = (2 * group + 1 + SLOT_TILE) * width + group * stride;
    const Buffer<float> scratch = allocate<float>(args.threads * scratch_size);
    if (!scratch) return NO_MEMORY;
#pragma omp parallel for schedule(dynamic) num_threads(args.threads)
    for (int64_t task = 0; task < args.sequences * args.kv_heads; task++)
        attend_head<T>(args, task, scratch.get() + thread_index() * scratch_size, width, stride);
    return DONE;
}

}  // namespace

int recall_attention(const RecallAttention& args) { BY_DTYPE(attend) }

}  // namespace ISA
