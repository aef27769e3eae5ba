// select_keys: select, with the quantized key index, the cached tokens that a new token attends to.
//
// A task is one KV head of one sequence. All query heads of the group share one read of the index. The
// selection does not sort. It finds the smallest selected weight bit by bit.
#include <math.h>

#include "memory.h"
#include "order.h"
#include "scan.h"

namespace ISA {
namespace {

// Add `offset` to the first `count` logits of a row and replace them by exp(logit - max). The rest
// become 0. Return the factor that normalizes them to softmax weights. `new_logit` and `sink` are
// further logits of the softmax.
float exponentials(float* row, int64_t count, int64_t stride, float offset, float cap, float new_logit,
                   float sink) {
    if (offset != 0)
        for (int64_t t = 0; t < stride; t += WIDTH) store(row + t, load(row + t) + offset);
    if (cap > 0)
        for (int64_t t = 0; t < stride; t += WIDTH) store(row + t, soft_capped(load(row + t), cap));
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
// index. The bits of non-negative floats have the order of their values. `selected` has capacity for one
// more index.
void select(const float* weights, int64_t count, int64_t stride, int64_t top_k, int32_t* selected) {
    int32_t least = 0;
    int64_t at_least = count;  // number of weights that are at least `least`
    for (int bit = 30; bit >= 0 && at_least != top_k; bit--) {
        const int64_t reached = stride - count_below(weights, stride, least | 1 << bit);
        if (reached >= top_k) least |= 1 << bit, at_least = reached;
    }
    const auto key = [&](int64_t i) { return bits_of<int32_t>(weights[i]); };
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
        const Ints mean = updated(load_raw<Ints>(means + t), load_raw<Ints>(weights + t));
        std::memcpy(means + t, &mean, sizeof mean);
    }
    for (; t < count; t++) means[t] = updated(means[t], bits_of<int32_t>(weights[t]));
}

// Scratch memory of a thread.
struct Space {
    float *q, *key;         // [group, dim], [dim]
    float *new_logit, *factors;   // [group]
    float* offsets;         // [group]
    float *logits, *weights;  // [group, tokens], [tokens]
    QuantizedQueries quantized;
    int32_t* selected;  // [top_k + 1]
};

// Return the logit of a query and the key of the same token.
float new_token_logit(const SelectKeys& a, const float* q, const float* key, float scale,
                      float offset) {
    float new_logit = 0;
    for (int64_t i = 0; i < a.head_dim; i++) new_logit += q[i] * key[i];
    new_logit = new_logit * scale + offset;
    const float cap = static_cast<float>(a.form.softcap);
    return cap > 0 ? cap * tanhf(new_logit / cap) : new_logit;
}

template <class T>
void select_head(const SelectKeys& a, const TileShape& shape, int64_t task, const Space& space) {
    const int64_t s = task / a.kv_heads, head = task % a.kv_heads, group = a.heads / a.kv_heads;
    const int64_t cached = a.metadata[s], count = a.metadata[a.sequences + s];
    const int64_t tiles = (cached + INDEX_TILE - 1) / INDEX_TILE, stride = tiles * INDEX_TILE;
    const float scale = logit_scale(a.form, a.head_dim);
    const T* q = static_cast<const T*>(a.q) + s * a.q_row + head * group * a.q_head;
    const T* key = static_cast<const T*>(a.k) + s * a.k_row + head * a.k_head;
    to_floats(key, a.head_dim, space.key);
    for (int64_t g = 0; g < group; g++) {
        float* to = space.q + g * a.head_dim;
        to_floats(q + g * a.q_head, a.head_dim, to);
        space.offsets[g] = a.form.offsets ? a.form.offsets[s * a.heads + head * group + g] * scale : 0;
        space.new_logit[g] = new_token_logit(a, to, space.key, scale, space.offsets[g]);
        quantize_query(to, scale, shape, g, space.quantized);
    }
    const uint8_t* index =
        static_cast<const uint8_t*>(a.index) + s * a.index_sequence + head * a.index_head;
    (a.bits == 4 ? scan<4> : scan<2>)(index, shape, tiles, group, space.quantized, space.logits,
                                      stride);
    for (int64_t g = 0; g < group; g++)
        space.factors[g] = exponentials(
            space.logits + g * stride, cached, stride, space.offsets[g],
            static_cast<float>(a.form.softcap), space.new_logit[g],
            a.form.sinks ? a.form.sinks[head * group + g] : MASKED);
    sum_queries(space.logits, space.factors, group, cached, stride, space.weights);
    select(space.weights, cached, stride, count, space.selected);
    if (a.log_weights) update_log_weights(space.weights, cached, a.log_weights + task * a.tokens);
    int32_t* selected = a.selected + task * a.top_k;
    std::memcpy(selected, space.selected, static_cast<size_t>(count) * sizeof *selected);
    for (int64_t i = count; i < a.top_k; i++) selected[i] = -1;
}

template <class T>
int run(const SelectKeys& a) {
    for (int64_t s = 0; s < a.sequences; s++) {
        const int64_t cached = a.metadata[s], count = a.metadata[a.sequences + s];
        if (count < 0 || count > cached || count > a.top_k || cached > a.num_tiles * INDEX_TILE ||
            (a.log_weights && cached > a.tokens))
            return INVALID;
    }
    const TileShape shape(a.head_dim, a.bits, a.groups);
    const int64_t group = a.heads / a.kv_heads, tokens = a.num_tiles * INDEX_TILE;
    const auto lines = [](int64_t floats) { return (floats + 15) / 16 * 16; };
    const int64_t small = lines((group + 1) * a.head_dim + group * (3 + 2 * a.groups));
    const int64_t scratch_size = small + (group + 1) * tokens, quantized = group * query_size(shape);
    const Memory<float> floats = memory<float>(a.threads * scratch_size);
    const Memory<QueryValue> queries = memory<QueryValue>(a.threads * quantized);
    const Memory<int32_t> numbers = memory<int32_t>(a.threads * lines(a.top_k + 1));
    if (!floats || !queries || !numbers) return NO_MEMORY;
#pragma omp parallel for schedule(dynamic) num_threads(a.threads)
    for (int64_t task = 0; task < a.sequences * a.kv_heads; task++) {
        const int64_t thread = thread_number();
        float *q = floats.get() + thread * scratch_size, *key = q + group * a.head_dim;
        float *new_logit = key + a.head_dim, *factors = new_logit + group;
        float *offsets = factors + group, *steps = offsets + group;
        float* logits = q + small;
        select_head<T>(a, shape, task,
                       {q, key, new_logit, factors, offsets, logits, logits + group * tokens,
                        {queries.get() + thread * quantized, steps, steps + group * a.groups},
                        numbers.get() + thread * lines(a.top_k + 1)});
    }
    return DONE;
}

}  // namespace

int select_keys(const SelectKeys& a) { BY_DTYPE(run) }

}  // namespace ISA
