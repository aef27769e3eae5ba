// choose_keys: select, with the quantized key index, the cached tokens that a new token attends to.
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
// become 0. Return the factor that normalizes them to softmax weights, next to the logits `own` and
// `sink`.
float exponentials(float* row, int64_t count, int64_t stride, float offset, float cap, float own,
                   float sink) {
    if (offset != 0)
        for (int64_t t = 0; t < stride; t += WIDTH) store(row + t, load(row + t) + offset);
    if (cap > 0)
        for (int64_t t = 0; t < stride; t += WIDTH) store(row + t, soft_capped(load(row + t), cap));
    for (int64_t t = count; t < stride; t++) row[t] = MASKED;
    Floats most = broadcast(own > sink ? own : sink);
    for (int64_t t = 0; t < stride; t += WIDTH) most = max(load(row + t), most);
    const float top = reduce_max(most);
    Floats total{};
    for (int64_t t = 0; t < stride; t += WIDTH) {
        const Floats e = exp(load(row + t) - top);
        store(row + t, e);
        total += e;
    }
    return 1.0f / (sum(total) + expf(own - top) + expf(sink - top));
}

// weights [stride] = the sums over the queries of a group of exponentials times factors. Elements past
// `count` are 0. No weight is negative or NaN.
void add_up(const float* rows, const float* factors, int64_t group, int64_t count, int64_t stride,
            float* weights) {
    for (int64_t t = 0; t < stride; t += WIDTH) {
        Floats total{};
        for (int64_t g = 0; g < group; g++)
            total = fma(load(rows + g * stride + t), broadcast(factors[g]), total);
        store(weights + t, max(total, Floats{}));
    }
    for (int64_t t = count; t < stride; t++) weights[t] = 0;
}

// Find the indices of the `wanted` largest of `count` weights, in ascending order. Ties go to the later
// index. The bits of non-negative floats have the order of their values. `chosen` has capacity for one
// more index.
void select(const float* weights, int64_t count, int64_t stride, int64_t wanted, int32_t* chosen) {
    int32_t least = 0;
    int64_t found = count;  // number of weights that are at least `least`
    for (int bit = 30; bit >= 0 && found != wanted; bit--) {
        const int64_t reached = stride - count_below(weights, stride, least | 1 << bit);
        if (reached >= wanted) least |= 1 << bit, found = reached;
    }
    const auto key = [&](int64_t i) { return bits_of<int32_t>(weights[i]); };
    int64_t i = 0;
    for (int64_t surplus = found - wanted; surplus > 0; i++) {
        *chosen = static_cast<int32_t>(i);
        chosen += key(i) > least;
        surplus -= key(i) == least;
    }
    for (; i < count; i++) {
        *chosen = static_cast<int32_t>(i);
        chosen += key(i) >= least;
    }
}

// Update the running means of the logarithms of a head's weights.
void note_weights(const float* weights, int64_t count, int32_t* means) {
    const auto note = [](auto mean, auto bits) {
        return mean == 0 ? bits : mean + ((bits - mean) >> MEAN_SHIFT);
    };
    int64_t t = 0;
    for (; t + WIDTH <= count; t += WIDTH) {
        const Ints mean = note(load_raw<Ints>(means + t), load_raw<Ints>(weights + t));
        std::memcpy(means + t, &mean, sizeof mean);
    }
    for (; t < count; t++) means[t] = note(means[t], bits_of<int32_t>(weights[t]));
}

// Scratch memory of a thread.
struct Space {
    float *q, *key;         // [group, dim], [dim]
    float *own, *factors;   // [group]
    float* offsets;         // [group]
    float *logits, *weights;  // [group, tokens], [tokens]
    RoundedQueries rounded;
    int32_t* chosen;  // [most + 1]
};

// Return the logit of a query and the new token's own key.
float own_logit(const Choose& a, const float* q, const float* key, float scale, float offset) {
    float own = 0;
    for (int64_t i = 0; i < a.head_dim; i++) own += q[i] * key[i];
    own = own * scale + offset;
    const float cap = static_cast<float>(a.form.softcap);
    return cap > 0 ? cap * tanhf(own / cap) : own;
}

template <class T>
void choose_head(const Choose& a, const TileShape& shape, int64_t task, const Space& space) {
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
        space.own[g] = own_logit(a, to, space.key, scale, space.offsets[g]);
        round_query(to, scale, shape, g, space.rounded);
    }
    const uint8_t* index =
        static_cast<const uint8_t*>(a.index) + s * a.index_sequence + head * a.index_head;
    (a.bits == 4 ? scan<4> : scan<2>)(index, shape, tiles, group, space.rounded, space.logits,
                                      stride);
    for (int64_t g = 0; g < group; g++)
        space.factors[g] = exponentials(
            space.logits + g * stride, cached, stride, space.offsets[g],
            static_cast<float>(a.form.softcap), space.own[g],
            a.form.sinks ? a.form.sinks[head * group + g] : MASKED);
    add_up(space.logits, space.factors, group, cached, stride, space.weights);
    select(space.weights, cached, stride, count, space.chosen);
    if (a.log_weights) note_weights(space.weights, cached, a.log_weights + task * a.tokens);
    int32_t* chosen = a.chosen + task * a.most;
    std::memcpy(chosen, space.chosen, static_cast<size_t>(count) * sizeof *chosen);
    for (int64_t i = count; i < a.most; i++) chosen[i] = -1;
}

template <class T>
int choose(const Choose& a) {
    for (int64_t s = 0; s < a.sequences; s++) {
        const int64_t cached = a.metadata[s], count = a.metadata[a.sequences + s];
        if (count < 0 || count > cached || count > a.most || cached > a.num_tiles * INDEX_TILE ||
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
    const Memory<int32_t> numbers = memory<int32_t>(a.threads * lines(a.most + 1));
    if (!floats || !queries || !numbers) return NO_MEMORY;
#pragma omp parallel for schedule(dynamic) num_threads(a.threads)
    for (int64_t task = 0; task < a.sequences * a.kv_heads; task++) {
        const int64_t thread = thread_number();
        float *q = floats.get() + thread * scratch_size, *key = q + group * a.head_dim;
        float *own = key + a.head_dim, *factors = own + group;
        float *offsets = factors + group, *steps = offsets + group;
        float* logits = q + small;
        choose_head<T>(a, shape, task,
                       {q, key, own, factors, offsets, logits, logits + group * tokens,
                        {queries.get() + thread * quantized, steps, steps + group * a.groups},
                        numbers.get() + thread * lines(a.most + 1)});
    }
    return DONE;
}

}  // namespace

int choose_keys(const Choose& a) { BY_DTYPE(choose) }

}  // namespace ISA
