// select_keys: select, with the quantized key index, the cached tokens that a new token attends to.
//
// A task is one KV head of one sequence. All query heads of the group share one read of the index. The
// selection does not sort. It finds the smallest selected weight bit by bit.
#include <math.h>

#include "key_index.h"
#include "memory.h"
#include "simd.h"

namespace ISA {
namespace {

// Add `offset` to the first `count` logits of a row and replace them by exp(logit - max). The rest
// become 0. Return the factor that normalizes them to softmax weights. `new_logit` and `sink` are
// further logits of the softmax.
float exponentiate(float* row, int64_t count, int64_t stride, float offset, float cap, float new_logit,
                   float sink) {
    if (offset != 0)
        for (int64_t t = 0; t < stride; t += WIDTH) store(row + t, load(row + t) + offset);
    if (cap > 0)
        for (int64_t t = 0; t < stride; t += WIDTH) store(row + t, apply_softcap(load(row + t), cap));
    for (int64_t t = count; t < stride; t++) row[t] = MASKED;
    Floats largest = broadcast(new_logit > sink ? new_logit : sink);
    for (int64_t t = 0; t < stride; t += WIDTH) largest = max(load(row + t), largest);
    const float top = reduce_max(largest);
    Floats total{};
    for (int64_t t = 0; t < stride; t += WIDTH) {
        const Floats e = exp(load(row + t) - top);
        store(row + t, e);
        total += e;
    }
    return 1.0f / (sum(total) + expf(new_logit - top) + expf(sink - top));
}

// weights [stride] = the sums over the queries of a group of exponentials times factors. Elements past
// `count` are 0. No weight is negative or NaN.
void sum_queries(const float* rows, const float* factors, int64_t group, int64_t count, int64_t stride,
                 float* weights) {
    for (int64_t t = 0; t < stride; t += WIDTH) {
        Floats total{};
        for (int64_t g = 0; g < group; g++)
            total = fma(load(rows + g * stride + t), broadcast(factors[g]), total);
        store(weights + t, max(total, Floats{}));
    }
    for (int64_t t = count; t < stride; t++) weights[t] = 0;
}

// Find the indices of the `top_k` largest of `count` weights, in ascending order. Ties go to the later
// index. The bits of non-negative floats have the order of their values. `selected` has capacity for
// one more index.
void select(const float* weights, int64_t count, int64_t stride, int64_t top_k, int32_t* selected) {
    int32_t least = 0;
    int64_t at_least = count;  // number of weights that are at least `least`
    for (int bit = 30; bit >= 0 && at_least != top_k; bit--) {
        const int64_t reached = stride - count_below(weights, stride, least | 1 << bit);
        if (reached >= top_k) least |= 1 << bit, at_least = reached;
    }
    const auto key = [&](int64_t i) { return bit_cast<int32_t>(weights[i]); };
    int64_t i = 0;
    for (int64_t surplus = at_least - top_k; surplus > 0; i++) {
        *selected = static_cast<int32_t>(i);
        selected += key(i) > least;
        surplus -= key(i) == least;
    }
    for (; i < count; i++) {
        *selected = static_cast<int32_t>(i);
        selected += key(i) >= least;
    }
}

// Update the running means of the logarithms of a head's weights.
void update_log_weights(const float* weights, int64_t count, int32_t* means) {
    const auto updated = [](auto mean, auto bits) {
        return mean == 0 ? bits : mean + ((bits - mean) >> MEAN_SHIFT);
    };
    int64_t t = 0;
    for (; t + WIDTH <= count; t += WIDTH) {
        store(means + t, updated(load_raw<Ints>(means + t), load_raw<Ints>(weights + t)));
    }
    for (; t < count; t++) means[t] = updated(means[t], bit_cast<int32_t>(weights[t]));
}

// Scratch memory of a thread.
struct Workspace {
    float *q, *key;         // [group, dim], [dim]
    float *new_logit, *factors;   // [group]
    float* offsets;         // [group]
    float *logits, *weights;  // [group, tokens], [tokens]
    QuantizedQueries quantized;
    int32_t* selected;  // [top_k + 1]
};

// Return the logit of a query and the key of the same token.
float new_token_logit(const SelectKeys& args, const float* q, const float* key, float scale,
                      float offset) {
    float new_logit = 0;
    for (int64_t i = 0; i < args.head_dim; i++) new_logit += q[i] * key[i];
    new_logit = new_logit * scale + offset;
    const float cap = static_cast<float>(args.variant.softcap);
    return cap > 0 ? cap * tanhf(new_logit / cap) : new_logit;
}

template <class T>
void select_head(const SelectKeys& args, const IndexTileLayout& layout, int64_t task,
                 const Workspace& workspace) {
    const int64_t s = task / args.kv_heads, head = task % args.kv_heads,
                  group = args.heads / args.kv_heads;
    const int64_t cached = args.metadata[s], count = args.metadata[args.sequences + s];
    const int64_t tiles = (cached + INDEX_TILE - 1) / INDEX_TILE, stride = tiles * INDEX_TILE;
    const float scale = logit_scale(args.variant, args.head_dim);
    const T* q = static_cast<const T*>(args.q) + s * args.q_row + head * group * args.q_head;
    const T* key = static_cast<const T*>(args.k) + s * args.k_row + head * args.k_head;
    to_floats(key, args.head_dim, workspace.key);
    for (int64_t g = 0; g < group; g++) {
        float* to = workspace.q + g * args.head_dim;
        to_floats(q + g * args.q_head, args.head_dim, to);
        workspace.offsets[g] =
            args.variant.offsets ? args.variant.offsets[s * args.heads + head * group + g] * scale : 0;
        workspace.new_logit[g] = new_token_logit(args, to, workspace.key, scale, workspace.offsets[g]);
        quantize_query(to, scale, layout, g, workspace.quantized);
    }
    const uint8_t* index =
        static_cast<const uint8_t*>(args.index) + s * args.index_sequence + head * args.index_head;
    (args.bits == 4 ? scan<4> : scan<2>)(index, layout, tiles, group, workspace.quantized,
                                         workspace.logits, stride);
    for (int64_t g = 0; g < group; g++)
        workspace.factors[g] =
            exponentiate(workspace.logits + g * stride, cached, stride, workspace.offsets[g],
                         static_cast<float>(args.variant.softcap), workspace.new_logit[g],
                         args.variant.sink_logits ? args.variant.sink_logits[head * group + g] : MASKED);
    sum_queries(workspace.logits, workspace.factors, group, cached, stride, workspace.weights);
    select(workspace.weights, cached, stride, count, workspace.selected);
    if (args.log_weights)
        update_log_weights(workspace.weights, cached, args.log_weights + task * args.tokens);
    int32_t* selected = args.selected + task * args.top_k;
    std::memcpy(selected, workspace.selected, static_cast<size_t>(count) * sizeof *selected);
    for (int64_t i = count; i < args.top_k; i++) selected[i] = -1;
}

template <class T>
int run(const SelectKeys& args) {
    for (int64_t s = 0; s < args.sequences; s++) {
        const int64_t cached = args.metadata[s], count = args.metadata[args.sequences + s];
        if (count < 0 || count > cached || count > args.top_k || cached > args.num_tiles * INDEX_TILE ||
            (args.log_weights && cached > args.tokens))
            return INVALID;
    }
    const IndexTileLayout layout(args.head_dim, args.bits, args.groups);
    const int64_t group = args.heads / args.kv_heads, tokens = args.num_tiles * INDEX_TILE;
    const auto lines = [](int64_t floats) { return (floats + 15) / 16 * 16; };
    const int64_t small = lines((group + 1) * args.head_dim + group * (3 + 2 * args.groups));
    const int64_t scratch_size = small + (group + 1) * tokens, quantized = group * query_size(layout);
    const Buffer<float> floats = allocate<float>(args.threads * scratch_size);
    const Buffer<QueryValue> queries = allocate<QueryValue>(args.threads * quantized);
    const Buffer<int32_t> numbers = allocate<int32_t>(args.threads * lines(args.top_k + 1));
    if (!floats || !queries || !numbers) return NO_MEMORY;
#pragma omp parallel for schedule(dynamic) num_threads(args.threads)
    for (int64_t task = 0; task < args.sequences * args.kv_heads; task++) {
        const int64_t thread = thread_index();
        float *q = floats.get() + thread * scratch_size, *key = q + group * args.head_dim;
        float *new_logit = key + args.head_dim, *factors = new_logit + group;
        float *offsets = factors + group, *steps = offsets + group;
        float* logits = q + small;
        select_head<T>(args, layout, task,
                       {q,
                        key,
                        new_logit,
                        factors,
                        offsets,
                        logits,
                        logits + group * tokens,
                        {queries.get() + thread * quantized, steps, steps + group * args.groups},
                        numbers.get() + thread * lines(args.top_k + 1)});
    }
    return DONE;
}

}  // namespace

int select_keys(const SelectKeys& args) { BY_DTYPE(run) }

}  // namespace ISA
