// prefill_attention: causal attention and, optionally, the attention that each key receives. One pass
// over blocks of queries keeps their complete rows of weights in the caches.
//
// A block has LANES queries, one per lane (the query heads of a group are additional queries). So
// maxima and sums over the keys need no horizontal arithmetic, and keys are read in place. With
// AVX512_BF16, bfloat16 inputs are multiplied in pairs. Everything else is float32. With AMX, bfloat16
// uses prefill_amx.h.
//
// A task is a share of the blocks of one KV head of one sequence. Shares and blocks depend only on the
// shape of the sequence, so results depend neither on the number of threads nor on the other
// sequences. With few threads, a task has several shares of a head.
#include "memory.h"
#include "prefill_amx.h"
#include "prefill_vectors.h"

namespace ISA {
namespace {

// Scratch memory of one thread.
template <class E>
struct VectorWorkspace {
    Buffer<E> queries, keys, values, weights;
    Buffer<float> logits, sums;

    bool allocate_buffers(int64_t dim, int64_t longest, int64_t) {
        queries = allocate<E>(dim * LANES);
        keys = allocate<E>(KEY_CHUNK * dim);
        values = allocate<E>(KEY_CHUNK * dim);
        weights = allocate<E>(KEY_CHUNK * LANES);
        logits = allocate<float>(longest * LANES);
        sums = allocate<float>(dim * LANES);
        return queries && keys && values && weights && logits && sums;
    }
    void start() {}
};

template <class T, class Convert>
struct VectorBlock : QueryBlock {
    using Workspace = VectorWorkspace<typename Convert::Element>;
    static int64_t max_lanes(int64_t, int64_t) { return LANES; }
    Workspace& workspace;

    void run(float* scores, const QueryBlock*) {
        load_queries();
        Floats top[LANE_VECTORS], total[LANE_VECTORS];
        matmul_keys(top);
        add_sinks(top, total);
        matmul_values(top, total);
        for (int n = 0; n < LANE_VECTORS; n++) total[n] = 1.0f / total[n];
        write(total);
        if (scores) add_scores(scores, total);
    }

    void load_queries() const {
        auto* to = workspace.queries.get();
        if (count < LANES)
            std::memset(to, 0,
                        static_cast<size_t>(args.head_dim / Convert::PACKED) * LANES * sizeof *to);
        for (int64_t lane = 0; lane < count; lane++)
            Convert::query(query<T>(lane), args.head_dim, to + lane);
    }

    // Return the first chunk with a key that any lane attends to.
    int64_t first_chunk() const { return key_begin() / KEY_CHUNK * KEY_CHUNK; }

    // Return the remaining factor that turns logits into exponents of 2. Soft-capped logits are
    // already scaled.
    float remaining_scale() const { return LOG2_E * (args.variant.softcap > 0 ? 1.0f : scale()); }

    // Compute the logits of all keys that any lane attends to, and the maximum of each lane. Logits
    // are scaled only if they are soft-capped.
    void matmul_keys(Floats* top) const {
        int32_t limits[LANES], starts[LANES];
        for (int64_t lane = 0; lane < LANES; lane++) {
            const int64_t valid_lane = lane < count ? lane : count - 1;
            limits[lane] = static_cast<int32_t>(last_key(valid_lane));
            starts[lane] = static_cast<int32_t>(first_key(valid_lane));
        }
        for (int n = 0; n < LANE_VECTORS; n++) top[n] = broadcast(MASKED);
        const T* k = key<T>(0);
        const int64_t key_end = this->key_end(), open = last_key(0), closed = first_key(count - 1);
        for (int64_t t = first_chunk(); t < key_end; t += KEY_CHUNK) {
            const int64_t chunk = t + KEY_CHUNK < key_end ? KEY_CHUNK : key_end - t;
            int64_t stride = args.k_row;
            const auto* rows =
                Convert::keys(k + t * stride, stride, chunk, args.head_dim, workspace.keys.get());
            float* logits = workspace.logits.get() + t * LANES;
            matmul_lanes<false>(rows, stride, 1, chunk, workspace.queries.get(),
                                args.head_dim / Convert::PACKED, logits);
            if (args.variant.softcap > 0) cap(logits, chunk);
            for (int64_t i = 0; i < chunk; i++) {
                float* row = logits + i * LANES;
                for (int n = 0; n < LANE_VECTORS; n++) {
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
        const float scale = this->scale(), softcap = static_cast<float>(args.variant.softcap);
        for (int64_t i = 0; i < chunk * LANES; i += WIDTH)
            store(logits + i, apply_softcap(load(logits + i) * scale, softcap));
    }

    // Initialize the denominators with the attention sinks, which may be the largest logits.
    void add_sinks(Floats* top, Floats* total) const {
        for (int n = 0; n < LANE_VECTORS; n++) total[n] = Floats{};
        if (!args.variant.sink_logits) return;
        const float scale = remaining_scale();
        Floats sinks[LANE_VECTORS]{};
        for (int64_t lane = 0; lane < LANES; lane++)
            sinks[lane / WIDTH][lane % WIDTH] = args.variant.sink_logits[head(lane)] * LOG2_E / scale;
        for (int n = 0; n < LANE_VECTORS; n++) {
            top[n] = max(sinks[n], top[n]);
            total[n] = exp2((sinks[n] - top[n]) * scale);
        }
    }

    // Replace logits by weights exp(logit - top), sum them, and multiply them by the values.
    void matmul_values(const Floats* top, Floats* total) const {
        const float scale = remaining_scale();
        const int64_t dim = args.head_dim, key_end = this->key_end();
        std::memset(workspace.sums.get(), 0, static_cast<size_t>(dim) * LANES * sizeof(float));
        const T* v = value<T>(0);
        for (int64_t t = first_chunk(); t < key_end; t += KEY_CHUNK) {
            const int64_t chunk = t + KEY_CHUNK < key_end ? KEY_CHUNK : key_end - t;
            float* logits = workspace.logits.get() + t * LANES;
            for (int64_t i = 0; i < chunk * LANES; i += LANES)
                for (int n = 0; n < LANE_VECTORS; n++) {
                    const Floats e = exp2((load(logits + i + n * WIDTH) - top[n]) * scale);
                    store(logits + i + n * WIDTH, e);
                    total[n] += e;
                }
            int64_t stride = args.v_row;
            const auto* rows =
                Convert::values(v + t * stride, stride, chunk, dim, workspace.values.get());
            const auto* weights = Convert::weights(logits, chunk, workspace.weights.get());
            matmul_lanes<true>(rows, 1, stride, dim, weights,
                               (chunk + Convert::PACKED - 1) / Convert::PACKED, workspace.sums.get());
        }
    }

    void write(const Floats* inverse) const {
        float* sums = workspace.sums.get();
        for (int64_t i = 0; i < args.head_dim * LANES; i += LANES)
            for (int n = 0; n < LANE_VECTORS; n++)
                store(sums + i + n * WIDTH, load(sums + i + n * WIDTH) * inverse[n]);
        T* to[LANES];
        for (int64_t lane = 0; lane < count; lane++) to[lane] = output<T>(lane);
        Convert::outputs(sums, args.head_dim, to, count);
    }

    void add_scores(float* scores, const Floats* inverse) const {
        Floats factors[LANE_VECTORS]{};
        for (int64_t lane = 0; lane < count; lane++)
            factors[lane / WIDTH][lane % WIDTH] = decay_factor(lane);
        for (int n = 0; n < LANE_VECTORS; n++) factors[n] *= inverse[n];
        const int64_t key_end = this->key_end();
        for (int64_t t = key_begin(); t < key_end; t++) {
            const float* weights = workspace.logits.get() + t * LANES;
            Floats received{};
            for (int n = 0; n < LANE_VECTORS; n++)
                received = fma(load(weights + n * WIDTH), factors[n], received);
            scores[t] += sum(received);
        }
    }
};

// Return the blocks of each KV head of a sequence.
template <class Block>
int64_t blocks_of(const PrefillAttention& args, const Sequence& sequence) {
    const int64_t lanes = Block::max_lanes(args.head_dim, sequence.tokens);
    return (sequence.rows * (args.heads / args.kv_heads) + lanes - 1) / lanes;
}

struct TaskSplit {
    Buffer<Sequence> sequences;
    int64_t longest = 0, key_rows = 0;
    // Split of each head's blocks: shares, each with its own attention scores, and tasks.
    int64_t shares = 1, tasks = 1;

    template <class Block>
    bool plan(const PrefillAttention& args) {
        sequences = allocate<Sequence>(args.sequences);
        if (!sequences) return false;
        int64_t row = 0, most_blocks = 1;
        for (int64_t s = 0; s < args.sequences; s++) {
            sequences[s] = {row, key_rows, args.lengths[s], args.key_lengths[s]};
            row += args.lengths[s];
            key_rows += args.key_lengths[s];
            if (args.key_lengths[s] > longest) longest = args.key_lengths[s];
            const int64_t blocks = blocks_of<Block>(args, sequences[s]);
            if (blocks > most_blocks) most_blocks = blocks;
        }
        shares = (MIN_TASKS + args.kv_heads - 1) / args.kv_heads;
        if (shares > most_blocks) shares = most_blocks;  // a share of no blocks changes no sum
        const int64_t heads = args.sequences * args.kv_heads;
        tasks = shares;
        for (int64_t few = shares - 1; few > 0; few--)
            if (balanced(heads * few, args.threads)) tasks = few;
        return true;
    }

    // Return whether the load of the threads is balanced to within a sixteenth.
    static bool balanced(int64_t tasks, int64_t threads) {
        const int64_t rounds = (tasks + threads - 1) / threads;
        return rounds >= 4 && (rounds * threads - tasks) * 16 <= tasks;
    }
};

// Compute the shares `task`, `task` + tasks, ... of the blocks of a KV head. Block b belongs to share
// b % shares. The scores [tokens] of consecutive shares are `scores_share` floats apart.
template <class Block>
void attend(const PrefillAttention& args, const TaskSplit& split, const Sequence& sequence,
            int64_t kv_head, int64_t task, typename Block::Workspace& workspace, float* scores,
            int64_t scores_share) {
    for (int64_t share = task; scores && share < split.shares; share += split.tasks)
        std::memset(scores + share * scores_share, 0,
                    static_cast<size_t>(sequence.tokens) * sizeof *scores);
    workspace.start();
    const int64_t lanes = sequence.rows * (args.heads / args.kv_heads);
    const int64_t max_lanes = Block::max_lanes(args.head_dim, sequence.tokens);
    const int64_t blocks = blocks_of<Block>(args, sequence);
    const auto block = [&](int64_t head, int64_t b) {
        const int64_t left = lanes - b * max_lanes;
        return QueryBlock{args, sequence, head, b * max_lanes, left < max_lanes ? left : max_lanes};
    };
    for (int64_t b = task, next; b < blocks; b = next) {
        next = b + 1;
        while (next % split.shares % split.tasks != task) next++;
        // The next block of the thread: in this head, or probably in the head `threads` heads later.
        const bool has_next = next < blocks,
                   probable = split.tasks == 1 && kv_head + args.threads < args.kv_heads;
        const QueryBlock next_block = has_next ? block(kv_head, next) : block(kv_head + args.threads, 0);
        Block{block(kv_head, b), workspace}.run(
            scores ? scores + b % split.shares * scores_share : nullptr,
            has_next || probable ? &next_block : nullptr);
    }
}

// Sum the attention scores of the shares in a fixed order.
void gather_scores(const PrefillAttention& args, const TaskSplit& split, const float* shares) {
#pragma omp parallel for schedule(static) num_threads(args.threads)
    for (int64_t index = 0; index < args.sequences * args.kv_heads; index++) {
        const Sequence& sequence = split.sequences[index / args.kv_heads];
        const int64_t head = index % args.kv_heads;
        const double decay_factor = pow(args.decay, static_cast<double>(sequence.rows));
        float* scores = args.scores + head * args.scores_head + sequence.key_row;
        for (int64_t t = 0; t < sequence.tokens; t++) {
            float received = 0;
            for (int64_t share = 0; share < split.shares; share++)
                received +=
                    shares[(share * args.kv_heads + head) * split.key_rows + sequence.key_row + t];
            scores[t] = scores[t] * static_cast<float>(decay_factor) + received;
        }
    }
}

template <class Block>
int prefill(const PrefillAttention& args) {
    TaskSplit split;
    if (!split.plan<Block>(args)) return NO_MEMORY;
    Buffer<float> shares;
    if (args.scores) {
        shares = allocate<float>(split.shares * args.kv_heads * split.key_rows);
        if (!shares) return NO_MEMORY;
    }
    bool short_of_memory = false;
#pragma omp parallel num_threads(args.threads)
    {
        typename Block::Workspace workspace;
        const bool ready = workspace.allocate_buffers(args.head_dim, split.longest,
                                                      Block::max_lanes(args.head_dim, split.longest));
        if (!ready) {
#pragma omp atomic write
            short_of_memory = true;
        }
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < args.sequences * args.kv_heads * split.tasks; item++) {
            const int64_t task = item % split.tasks, index = item / split.tasks;
            const Sequence& sequence = split.sequences[index / args.kv_heads];
            const int64_t head = index % args.kv_heads;
            float* scores =
                args.scores ? shares.get() + head * split.key_rows + sequence.key_row : nullptr;
            if (ready)
                attend<Block>(args, split, sequence, head, task, workspace, scores,
                              args.kv_heads * split.key_rows);
        }
    }
    if (short_of_memory) return NO_MEMORY;
    if (args.scores) gather_scores(args, split, shares.get());
    return DONE;
}

template <class T>
int prefill_of(const PrefillAttention& args) {
#if defined(HAS_AMX_TILES)
    return prefill<AmxBlock>(args);
#else
#if defined(__AVX512BF16__)
    if (args.head_dim % 2 == 0) return prefill<VectorBlock<bf16, ConvertToPairs> >(args);
#endif
    return prefill<VectorBlock<T, ConvertToFloats<T> > >(args);
#endif
}

}  // namespace

int prefill_attention(const PrefillAttention& args) { BY_DTYPE(prefill_of) }

}  // namespace ISA
