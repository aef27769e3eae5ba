// prefill_attention: causal attention and, optionally, the attention that each key receives. One pass
// over blocks of queries keeps their complete rows of weights in the caches.
//
// A block has LANES queries, one per lane (the query heads of a group are additional queries). So
// maxima and sums over the keys need no horizontal arithmetic, and keys are read in place. With
// AVX512_BF16, bfloat16 inputs are multiplied in pairs. Everything else is float32. With AMX, bfloat16
// uses prefill_tiles.h.
//
// A task is a share of the blocks of one KV head of one sequence. Shares and blocks depend only on the
// shape of the sequence, so results depend neither on the number of threads nor on the other sequences.
// With few threads, a task has several shares of a head.
#include "lanes.h"
#include "memory.h"
#include "prefill_tiles.h"

namespace ISA {
namespace {

// Scratch memory of one thread.
template <class E>
struct LaneSpace {
    Memory<E> queries, keys, values, weights;
    Memory<float> logits, sums;

    bool make(int64_t dim, int64_t longest, int64_t) {
        queries = memory<E>(dim * LANES);
        keys = memory<E>(CHUNK * dim);
        values = memory<E>(CHUNK * dim);
        weights = memory<E>(CHUNK * LANES);
        logits = memory<float>(longest * LANES);
        sums = memory<float>(dim * LANES);
        return queries && keys && values && weights && logits && sums;
    }
    void start() {}
};

template <class T, class As>
struct Block : Lanes {
    using Space = LaneSpace<typename As::Element>;
    static int64_t most_lanes(int64_t, int64_t) { return LANES; }
    Space& space;

    void run(float* scores, const Lanes*) {
        load_queries();
        Floats top[VECTORS], total[VECTORS];
        key_products(top);
        add_sinks(top, total);
        value_products(top, total);
        for (int n = 0; n < VECTORS; n++) total[n] = 1.0f / total[n];
        write(total);
        if (scores) add_received(scores, total);
    }

    void load_queries() const {
        auto* to = space.queries.get();
        if (count < LANES)
            std::memset(to, 0, static_cast<size_t>(a.head_dim / As::DEPTH) * LANES * sizeof *to);
        for (int64_t lane = 0; lane < count; lane++)
            As::query(query<T>(lane), a.head_dim, to + lane);
    }

    // Return the first chunk with a key that any lane attends to.
    int64_t first_chunk() const { return begin() / CHUNK * CHUNK; }

    // Return the remaining factor that turns logits into exponents of 2. Soft-capped logits are already
    // scaled.
    float rest_of_scale() const { return LOG2_E * (a.form.softcap > 0 ? 1.0f : scale()); }

    // Compute the logits of all keys that any lane attends to, and the maximum of each lane. Logits are
    // scaled only if they are soft-capped.
    void key_products(Floats* top) const {
        int32_t limits[LANES], starts[LANES];
        for (int64_t lane = 0; lane < LANES; lane++) {
            const int64_t valid_lane = lane < count ? lane : count - 1;
            limits[lane] = static_cast<int32_t>(limit(valid_lane));
            starts[lane] = static_cast<int32_t>(start(valid_lane));
        }
        for (int n = 0; n < VECTORS; n++) top[n] = broadcast(MASKED);
        const T* k = key<T>(0);
        const int64_t seen = this->seen(), open = limit(0), closed = start(count - 1);
        for (int64_t t = first_chunk(); t < seen; t += CHUNK) {
            const int64_t chunk = t + CHUNK < seen ? CHUNK : seen - t;
            int64_t stride = a.k_row;
            const auto* rows = As::keys(k + t * stride, stride, chunk, a.head_dim,
                                        space.keys.get());
            float* logits = space.logits.get() + t * LANES;
            product<false>(rows, stride, 1, chunk, space.queries.get(), a.head_dim / As::DEPTH,
                           logits);
            if (a.form.softcap > 0) cap(logits, chunk);
            for (int64_t i = 0; i < chunk; i++) {
                float* row = logits + i * LANES;
                for (int n = 0; n < VECTORS; n++) {
                    Floats x = load(row + n * WIDTH);
                    if (t + i > open) {
                        x = load_raw<Ints>(limits + n * WIDTH) < static_cast<int32_t>(t + i)
                                ? broadcast(MASKED)
                                : x;
                        store(row + n * WIDTH, x);
                    }
                    if (t + i < closed) {
                        x = load_raw<Ints>(starts + n * WIDTH) > static_cast<int32_t>(t + i)
                                ? broadcast(MASKED)
                                : x;
                        store(row + n * WIDTH, x);
                    }
                    top[n] = max(x, top[n]);
                }
            }
        }
    }

    void cap(float* logits, int64_t chunk) const {
        const float scale = this->scale(), softcap = static_cast<float>(a.form.softcap);
        for (int64_t i = 0; i < chunk * LANES; i += WIDTH)
            store(logits + i, soft_capped(load(logits + i) * scale, softcap));
    }

    // Initialize the denominators with the attention sinks, which may be the largest logits.
    void add_sinks(Floats* top, Floats* total) const {
        for (int n = 0; n < VECTORS; n++) total[n] = Floats{};
        if (!a.form.sinks) return;
        const float scale = rest_of_scale();
        Floats sinks[VECTORS]{};
        for (int64_t lane = 0; lane < LANES; lane++)
            sinks[lane / WIDTH][lane % WIDTH] = a.form.sinks[head(lane)] * LOG2_E / scale;
        for (int n = 0; n < VECTORS; n++) {
            top[n] = max(sinks[n], top[n]);
            total[n] = exp2((sinks[n] - top[n]) * scale);
        }
    }

    // Replace logits by weights exp(logit - top), sum them, and multiply them by the values.
    void value_products(const Floats* top, Floats* total) const {
        const float scale = rest_of_scale();
        const int64_t dim = a.head_dim, seen = this->seen();
        std::memset(space.sums.get(), 0, static_cast<size_t>(dim) * LANES * sizeof(float));
        const T* v = value<T>(0);
        for (int64_t t = first_chunk(); t < seen; t += CHUNK) {
            const int64_t chunk = t + CHUNK < seen ? CHUNK : seen - t;
            float* logits = space.logits.get() + t * LANES;
            for (int64_t i = 0; i < chunk * LANES; i += LANES)
                for (int n = 0; n < VECTORS; n++) {
                    const Floats e = exp2((load(logits + i + n * WIDTH) - top[n]) * scale);
                    store(logits + i + n * WIDTH, e);
                    total[n] += e;
                }
            int64_t stride = a.v_row;
            const auto* rows = As::values(v + t * stride, stride, chunk, dim, space.values.get());
            const auto* weights = As::weights(logits, chunk, space.weights.get());
            product<true>(rows, 1, stride, dim, weights, (chunk + As::DEPTH - 1) / As::DEPTH,
                          space.sums.get());
        }
    }

    void write(const Floats* inverse) const {
        float* sums = space.sums.get();
        for (int64_t i = 0; i < a.head_dim * LANES; i += LANES)
            for (int n = 0; n < VECTORS; n++)
                store(sums + i + n * WIDTH, load(sums + i + n * WIDTH) * inverse[n]);
        T* to[LANES];
        for (int64_t lane = 0; lane < count; lane++) to[lane] = output<T>(lane);
        As::outputs(sums, a.head_dim, to, count);
    }

    void add_received(float* scores, const Floats* inverse) const {
        Floats factors[VECTORS]{};
        for (int64_t lane = 0; lane < count; lane++)
            factors[lane / WIDTH][lane % WIDTH] = decay_factor(lane);
        for (int n = 0; n < VECTORS; n++) factors[n] *= inverse[n];
        const int64_t seen = this->seen();
        for (int64_t t = begin(); t < seen; t++) {
            const float* weights = space.logits.get() + t * LANES;
            Floats received{};
            for (int n = 0; n < VECTORS; n++)
                received = fma(load(weights + n * WIDTH), factors[n], received);
            scores[t] += sum(received);
        }
    }
};

// Return the blocks of each KV head of a sequence.
template <class Block>
int64_t blocks_of(const PrefillAttention& a, const Sequence& sequence) {
    const int64_t lanes = Block::most_lanes(a.head_dim, sequence.tokens);
    return (sequence.rows * (a.heads / a.kv_heads) + lanes - 1) / lanes;
}

struct Work {
    Memory<Sequence> sequences;
    int64_t longest = 0, key_rows = 0;
    // Split of each head's blocks: shares, each with its own attention scores, and tasks.
    int64_t shares = 1, tasks = 1;

    template <class Block>
    bool make(const PrefillAttention& a) {
        sequences = memory<Sequence>(a.sequences);
        if (!sequences) return false;
        int64_t row = 0, most_blocks = 1;
        for (int64_t s = 0; s < a.sequences; s++) {
            sequences[s] = {row, key_rows, a.lengths[s], a.key_lengths[s]};
            row += a.lengths[s];
            key_rows += a.key_lengths[s];
            if (a.key_lengths[s] > longest) longest = a.key_lengths[s];
            const int64_t blocks = blocks_of<Block>(a, sequences[s]);
            if (blocks > most_blocks) most_blocks = blocks;
        }
        shares = (MIN_TASKS + a.kv_heads - 1) / a.kv_heads;
        if (shares > most_blocks) shares = most_blocks;  // a share of no blocks changes no sum
        const int64_t heads = a.sequences * a.kv_heads;
        tasks = shares;
        for (int64_t few = shares - 1; few > 0; few--)
            if (even(heads * few, a.threads)) tasks = few;
        return true;
    }

    // Return whether the load of the threads is balanced to within a sixteenth.
    static bool even(int64_t tasks, int64_t threads) {
        const int64_t turns = (tasks + threads - 1) / threads;
        return turns >= 4 && (turns * threads - tasks) * 16 <= tasks;
    }
};

// Compute the shares `task`, `task` + tasks, ... of the blocks of a KV head. Block b belongs to share b
// % shares. The scores [tokens] of consecutive shares are `scores_share` floats apart.
template <class Block>
void attend(const PrefillAttention& a, const Work& work, const Sequence& sequence, int64_t kv_head,
            int64_t task, typename Block::Space& space, float* scores, int64_t scores_share) {
    for (int64_t share = task; scores && share < work.shares; share += work.tasks)
        std::memset(scores + share * scores_share, 0,
                    static_cast<size_t>(sequence.tokens) * sizeof *scores);
    space.start();
    const int64_t lanes = sequence.rows * (a.heads / a.kv_heads);
    const int64_t most = Block::most_lanes(a.head_dim, sequence.tokens);
    const int64_t blocks = blocks_of<Block>(a, sequence);
    const auto block = [&](int64_t head, int64_t b) {
        const int64_t left = lanes - b * most;
        return Lanes{a, sequence, head, b * most, left < most ? left : most};
    };
    for (int64_t b = task, next; b < blocks; b = next) {
        next = b + 1;
        while (next % work.shares % work.tasks != task) next++;
        // The next block of the thread: in this head, or probably in the head `threads` heads later.
        const bool on = next < blocks, probable = work.tasks == 1 && kv_head + a.threads < a.kv_heads;
        const Lanes then = on ? block(kv_head, next) : block(kv_head + a.threads, 0);
        Block{block(kv_head, b), space}.run(
            scores ? scores + b % work.shares * scores_share : nullptr,
            on || probable ? &then : nullptr);
    }
}

// Sum the attention scores of the shares in a fixed order.
void gather_scores(const PrefillAttention& a, const Work& work, const float* shares) {
#pragma omp parallel for schedule(static) num_threads(a.threads)
    for (int64_t index = 0; index < a.sequences * a.kv_heads; index++) {
        const Sequence& sequence = work.sequences[index / a.kv_heads];
        const int64_t head = index % a.kv_heads;
        const double decay_factor = pow(a.decay, static_cast<double>(sequence.rows));
        float* scores = a.scores + head * a.scores_head + sequence.key_row;
        for (int64_t t = 0; t < sequence.tokens; t++) {
            float received = 0;
            for (int64_t share = 0; share < work.shares; share++)
                received += shares[(share * a.kv_heads + head) * work.key_rows +
                                   sequence.key_row + t];
            scores[t] = scores[t] * static_cast<float>(decay_factor) + received;
        }
    }
}

template <class Block>
int prefill(const PrefillAttention& a) {
    Work work;
    if (!work.make<Block>(a)) return NO_MEMORY;
    Memory<float> shares;
    if (a.scores) {
        shares = memory<float>(work.shares * a.kv_heads * work.key_rows);
        if (!shares) return NO_MEMORY;
    }
    bool short_of_memory = false;
#pragma omp parallel num_threads(a.threads)
    {
        typename Block::Space space;
        const bool ready =
            space.make(a.head_dim, work.longest, Block::most_lanes(a.head_dim, work.longest));
        if (!ready) {
#pragma omp atomic write
            short_of_memory = true;
        }
#pragma omp for schedule(dynamic)
        for (int64_t turn = 0; turn < a.sequences * a.kv_heads * work.tasks; turn++) {
            const int64_t task = turn % work.tasks, index = turn / work.tasks;
            const Sequence& sequence = work.sequences[index / a.kv_heads];
            const int64_t head = index % a.kv_heads;
            float* scores = a.scores ? shares.get() + head * work.key_rows + sequence.key_row : nullptr;
            if (ready)
                attend<Block>(a, work, sequence, head, task, space, scores,
                              a.kv_heads * work.key_rows);
        }
    }
    if (short_of_memory) return NO_MEMORY;
    if (a.scores) gather_scores(a, work, shares.get());
    return DONE;
}

template <class T>
int prefill_of(const PrefillAttention& a) {
#if defined(TILES)
    return prefill<TileBlock>(a);
#else
#if defined(__AVX512BF16__)
    if (a.head_dim % 2 == 0) return prefill<Block<bf16, AsPairs>>(a);
#endif
    return prefill<Block<T, AsFloats<T>>>(a);
#endif
}

}  // namespace

int prefill_attention(const PrefillAttention& a) { BY_DTYPE(prefill_of) }

}  // namespace ISA
