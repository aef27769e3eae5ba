// prefill_attention of bfloat16 in AMX tiles.
//
// Queries are the rows of a tile and keys its columns. A first pass over chunks of keys computes the
// outputs, and the maximum and the sum of each query (the online softmax of FlashAttention, Dao et al.
// 2022). A second pass recomputes the logits for the attention score, which needs the final sums. So
// the weights of the score are float32, and no memory grows with queries times keys.
//
// The matmuls of a chunk and its exponentials run one after the other. Interleaving them gains
// nothing, because a CPU runs vector arithmetic at half rate next to tile matmuls.
#pragma once

#include <float.h>

#include "key_value_tiles.h"
#include "prefetch.h"
#include "vector_math.h"

#if defined(HAS_AMX_TILES)

namespace ISA {

// Row stride in elements of 4 bytes. The padding avoids cache conflicts between 16 rows.
constexpr int64_t LOGITS_STRIDE = KEY_CHUNK + AMX_ROWS;
constexpr int64_t SOFTMAX_LANES = 4;  // lanes whose weights are computed together
// Maximum lanes of a block. Their queries and sums need less memory than the weights of QUERY_LANES
// lanes, which the plan counts.
constexpr int64_t MAX_LANES = 2 * QUERY_LANES;
static_assert(MAX_LANES % AMX_BLOCK == 0 && AMX_BLOCK % SOFTMAX_LANES == 0, "whole pairs of tiles");

// C0 to C3, 2 x 2 tiles, += A0, A1 by B0, B1. Rows of A are `a_row` words apart, and each is `steps`
// tiles long. Tiles of B are contiguous.
INLINE void add_tile_matmuls(AmxTiles& tiles, const uint32_t* a, int64_t a_row, const uint32_t* b,
                             int64_t steps) {
    for (int64_t i = 0; i < steps; i++, b += 2 * AMX_TILE_WORDS) {
        tiles.load<A0>(a + i * AMX_PAIRS, a_row * 4);
        tiles.load<B0>(b, AMX_ROW_BYTES);
        tiles.add_matmul<C0, A0, B0>();
        tiles.load<B1>(b + AMX_TILE_WORDS, AMX_ROW_BYTES);
        tiles.add_matmul<C1, A0, B1>();
        tiles.load<A1>(a + AMX_ROWS * a_row + i * AMX_PAIRS, a_row * 4);
        tiles.add_matmul<C2, A1, B0>();
        tiles.add_matmul<C3, A1, B1>();
    }
}

// Scratch memory of one thread.
struct AmxWorkspace {
    KeyValueTiles cache;
    Buffer<uint32_t> queries;    // [lanes, dim] bfloat16, as left operands
    Buffer<float> logits, sums;  // [AMX_BLOCK, KEY_CHUNK], [lanes, dim]
    // Per lane: the approximate running maximum of the logits; the shift of scaled logits relative to
    // it, and a bit if they are too large for a shift; partial sums of the weights; and the factor of
    // the weights in the attention score.
    float tops[MAX_LANES], shifts[MAX_LANES], factors[MAX_LANES];
    uint32_t large[MAX_LANES / AMX_BLOCK];
    Floats totals[MAX_LANES];
    const AmxTileShapes shapes = whole_tiles();

    bool allocate_buffers(int64_t head_dim, int64_t longest, int64_t lanes) {
        if (!cache.allocate_buffers(head_dim, longest)) return false;
        queries = allocate<uint32_t>(lanes * queries_row());
        logits = allocate<float>(AMX_BLOCK * LOGITS_STRIDE);
        sums = allocate<float>(lanes * sums_row());
        return queries && logits && sums;
    }
    int64_t queries_row() const { return cache.width() / 2 + AMX_PAIRS; }
    int64_t sums_row() const { return cache.width() + AMX_ROWS; }

    void start() { cache.start(); }
};

// Prefetch the rows of the task's next block, a few at a time.
class RowPrefetcher {
public:
    // `packed` keys and values are already in tiles. step() is called `steps` times.
    RowPrefetcher(const QueryBlock& now, const QueryBlock* next, int64_t packed, int64_t steps)
        : next(next), steps(steps) {
        if (!next) return;
        key = next->kv_head == now.kv_head ? packed : next->key_begin();
        keys = next->key_end() - key;
        all = keys > next->count ? keys : next->count;
    }

    INLINE void step() {
        for (due += all; due >= steps; due -= steps, row++) {
            if (row < next->count) prefetch_row(next->query<bf16>(row));
            if (row >= keys) continue;
            prefetch_row(next->key<bf16>(key + row));
            prefetch_row(next->value<bf16>(key + row));
        }
    }

private:
    INLINE void prefetch_row(const bf16* from) const {
        for (int64_t i = 0; i < next->args.head_dim; i += AMX_DEPTH) prefetch(from + i, L2);
    }

    const QueryBlock* const next;
    const int64_t steps;
    int64_t key = 0, keys = 0, all = 0, due = 0, row = 0;
};

struct AmxBlock : QueryBlock {
    using Workspace = AmxWorkspace;
    // If keys and values do not fit in an L2 cache of 2 MB with the other data, a block has more
    // lanes.
    static constexpr int64_t MAX_L2_BYTES = 5 << 18;
    static int64_t max_lanes(int64_t head_dim, int64_t longest) {
        const int64_t bytes =
            2 * longest * round_up(head_dim, AMX_BLOCK) * static_cast<int64_t>(sizeof(bf16));
        return bytes > MAX_L2_BYTES ? MAX_LANES : AMX_BLOCK;
    }
    // Weights are relative to a reference that the maximum exceeds by a factor of at most 2^8, without
    // loss of precision. So sums are rarely rescaled.
    static constexpr float MAX_RAISE = 8;
    // The rounding error of a small shift is a common factor of all weights.
    static constexpr float MAX_SHIFT = 1024;

    Workspace& workspace;
    DenormalsAsZeros denormals{};
    AmxTiles tiles{workspace.shapes};
    // Scale of the logits, which become exponents of 2.
    const float scale = args.variant.softcap > 0 ? LOG2_E
                        : args.variant.scale > 0 ? LOG2_E * QueryBlock::scale()
                                                 : LOG2_E / sqrtf(static_cast<float>(args.head_dim));

    void run(float* scores, const QueryBlock* next) {
        const int64_t key_end = this->key_end(), chunk_begin = key_begin() / KEY_CHUNK * KEY_CHUNK;
        workspace.cache.pack(*this, chunk_begin, key_end);
        load_queries();
        clear();
        const int64_t chunks = (key_end - chunk_begin + KEY_CHUNK - 1) / KEY_CHUNK;
        RowPrefetcher ahead(*this, next, workspace.cache.count(),
                            chunks * round_up(count, AMX_BLOCK) / SOFTMAX_LANES);
        for (int64_t t = chunk_begin; t < key_end; t += KEY_CHUNK)
            for (int64_t pair = 0; pair < count; pair += AMX_BLOCK) {
                const int64_t width = logits(t, pair);
                if (t + KEY_CHUNK >= key_end) prefetch_outputs(pair);
                for (int64_t lane = pair; lane < pair + AMX_BLOCK; lane += SOFTMAX_LANES) {
                    ahead.step();
                    if (lane >= count || width == 0) continue;
                    width == KEY_CHUNK ? compute_weights(lane, KEY_CHUNK) : compute_weights(lane, width);
                }
                add_values(t, pair, width);
            }
        write();
        if (!scores) return;
        for (int64_t t = chunk_begin; t < key_end; t += KEY_CHUNK)
            for (int64_t pair = 0; pair < count; pair += AMX_BLOCK)
                add_scores(t, pair, logits(t, pair), scores);
    }

    int64_t pair_end(int64_t pair) const { return pair + AMX_BLOCK < count ? pair + AMX_BLOCK : count; }

    void load_queries() const {
        const int64_t row = workspace.queries_row();
        if (args.head_dim < workspace.cache.width() || count % AMX_BLOCK)
            std::memset(workspace.queries.get(), 0,
                        static_cast<size_t>(round_up(count, AMX_BLOCK) * row) * 4);
        for (int64_t lane = 0; lane < count; lane++)
            std::memcpy(workspace.queries.get() + lane * row, query<bf16>(lane),
                        static_cast<size_t>(args.head_dim) * 2);
    }

    void clear() const {
        const int64_t lanes = round_up(count, AMX_BLOCK);
        std::memset(workspace.sums.get(), 0, static_cast<size_t>(lanes * workspace.sums_row()) * 4);
        for (int64_t lane = 0; lane < lanes; lane++) {
            // An attention sink acts as a first key with a value of zeros.
            const bool sinks = args.variant.sink_logits;
            set_top(lane, sinks ? args.variant.sink_logits[head(lane)] * LOG2_E / scale : -FLT_MAX);
            workspace.totals[lane] = Floats{};
            if (sinks) workspace.totals[lane][0] = 1;
        }
    }

    void set_top(int64_t lane, float top) const {
        const float shift = top * -scale;
        const bool large = fabsf(shift) > MAX_SHIFT;
        workspace.tops[lane] = top;
        workspace.shifts[lane] = large ? 0 : shift;
        uint32_t& bits = workspace.large[lane / AMX_BLOCK];
        bits = (bits & ~(1u << lane % AMX_BLOCK)) | static_cast<uint32_t>(large) << lane % AMX_BLOCK;
    }

    // For logits that are too large to be shifted after scaling, subtract the maximum first.
    NOINLINE void subtract_tops(int64_t lane, int64_t end, int64_t width) const {
        for (; lane < end; lane++) {
            float* x = logits(lane);
            if (workspace.large[lane / AMX_BLOCK] >> lane % AMX_BLOCK & 1)
                for (int64_t j = 0; j < width; j += WIDTH)
                    store(x + j, load(x + j) - workspace.tops[lane]);
        }
    }

    float* logits(int64_t lane) const {
        return workspace.logits.get() + lane % AMX_BLOCK * LOGITS_STRIDE;
    }

    // Compute the logits of a pair of lane tiles by a chunk of keys, up to the last key that any lane
    // attends to, padded to whole tiles. Return the number of keys. Masked keys get the logit MASKED.
    int64_t logits(int64_t t, int64_t pair) {
        const int64_t row = workspace.queries_row(), end = pair_end(pair);
        const int64_t visible = last_key(end - 1) + 1 - t;
        if (visible <= 0 || first_key(pair) >= t + KEY_CHUNK) return 0;
        const int64_t width = round_up(visible < KEY_CHUNK ? visible : KEY_CHUNK, AMX_BLOCK);
        for (int64_t i = 0; i < width; i += AMX_BLOCK) {
            zero_block<2>(tiles);
            add_tile_matmuls(tiles, workspace.queries.get() + pair * row, row,
                             workspace.cache.keys_at(t + i), workspace.cache.width() / AMX_DEPTH);
            store_block<2>(tiles, workspace.logits.get() + i, LOGITS_STRIDE);
        }
        if (args.variant.softcap > 0) cap(pair, width);
        if (last_key(pair) + 1 < t + width || first_key(end - 1) > t) mask(t, pair, width);
        return width;
    }

    NOINLINE void cap(int64_t pair, int64_t width) const {
        const float scale = QueryBlock::scale(), softcap = static_cast<float>(args.variant.softcap);
        for (int64_t lane = pair; lane < pair_end(pair); lane++) {
            float* x = logits(lane);
            for (int64_t j = 0; j < width; j += WIDTH)
                store(x + j, apply_softcap(load(x + j) * scale, softcap));
        }
    }

    NOINLINE void mask(int64_t t, int64_t pair, int64_t width) const {
        Ints iota{};
        for (int i = 0; i < WIDTH; i++) iota[i] = i;
        for (int64_t lane = pair; lane < pair_end(pair); lane++) {
            float* x = logits(lane);
            const Ints last = Ints{} + static_cast<int32_t>(last_key(lane) - t);
            const Ints first = Ints{} + static_cast<int32_t>(first_key(lane) - t);
            for (int32_t j = 0; j < width; j += WIDTH) {
                const Ints key = iota + j;
                store(x + j, (key <= last) & (key >= first) ? load(x + j) : broadcast(MASKED));
            }
        }
    }

    // Prefetch the output lines, which are written after the last chunk.
    INLINE void prefetch_outputs(int64_t pair) const {
        for (int64_t lane = pair; lane < pair_end(pair); lane++)
            for (int64_t i = 0; i < args.head_dim; i += AMX_DEPTH)
                prefetch_to_write(output<bf16>(lane) + i);
    }

    // Replace the logits of SOFTMAX_LANES lanes by unnormalized weights in bfloat16, in place.
    INLINE void compute_weights(int64_t lane, int64_t width) const {
        float* x = logits(lane);
        Floats largest[SOFTMAX_LANES];
#pragma GCC unroll 4
        for (int n = 0; n < SOFTMAX_LANES; n++) {
            const float* row = x + n * LOGITS_STRIDE;
            largest[n] = max(load(row), load(row + WIDTH));
            for (int64_t j = 2 * WIDTH; j < width; j += 2 * WIDTH)
                largest[n] = max(max(load(row + j), load(row + j + WIDTH)), largest[n]);
        }
        float tops[SOFTMAX_LANES];
        reduce_max(largest, tops);
        for (int n = 0; n < SOFTMAX_LANES; n++)
            if ((tops[n] - workspace.tops[lane + n]) * scale > MAX_RAISE) raise(lane + n, tops[n]);
        if (workspace.large[lane / AMX_BLOCK]) subtract_tops(lane, lane + SOFTMAX_LANES, width);
        const Floats by = broadcast(scale);
#pragma GCC unroll 4
        for (int n = 0; n < SOFTMAX_LANES; n++) {
            const float* row = x + n * LOGITS_STRIDE;
            bf16* to = reinterpret_cast<bf16*>(x + n * LOGITS_STRIDE);
            const Floats shift = broadcast(workspace.shifts[lane + n]);
            Floats total{};
#pragma GCC unroll 4
            for (int64_t j = 0; j < width; j += 2 * WIDTH) {
                const Floats low = exp2_flush_to_zero(fma(load(row + j), by, shift));
                const Floats high = exp2_flush_to_zero(fma(load(row + j + WIDTH), by, shift));
                total += low + high;
                narrow(to + j, low, high);
            }
            workspace.totals[lane + n] += total;
        }
    }

    // Set a larger maximum and rescale the accumulated sums.
    NOINLINE void raise(int64_t lane, float top) const {
        const Floats factor = exp2_flush_to_zero(broadcast((workspace.tops[lane] - top) * scale));
        float* sums = workspace.sums.get() + lane * workspace.sums_row();
        for (int64_t i = 0; i < workspace.cache.width(); i += WIDTH)
            store(sums + i, load(sums + i) * factor);
        workspace.totals[lane] *= factor;
        set_top(lane, top);
    }

    void add_values(int64_t t, int64_t pair, int64_t width) {
        const auto* weights = reinterpret_cast<const uint32_t*>(workspace.logits.get());
        for (int64_t i = 0; width > 0 && i < workspace.cache.width(); i += AMX_BLOCK) {
            float* sums = workspace.sums.get() + pair * workspace.sums_row() + i;
            load_block<2>(tiles, sums, workspace.sums_row());
            add_tile_matmuls(tiles, weights, LOGITS_STRIDE, workspace.cache.values_at(t, i),
                             width / AMX_DEPTH);
            store_block<2>(tiles, sums, workspace.sums_row());
        }
    }

    void write() const {
        for (int64_t lane = 0; lane < count; lane++) {
            const float inverse = 1.0f / sum(workspace.totals[lane]);
            const float* sums = workspace.sums.get() + lane * workspace.sums_row();
            bf16* to = output<bf16>(lane);
            int64_t i = 0;
            for (; i + 2 * WIDTH <= args.head_dim; i += 2 * WIDTH)
                narrow(to + i, load(sums + i) * inverse, load(sums + i + WIDTH) * inverse);
            for (; i < args.head_dim; i++) store_one(to + i, sums[i] * inverse);
            workspace.factors[lane] = inverse * decay_factor(lane);
        }
    }

    // Add the attention weights of the recomputed logits of a chunk to the scores of its keys.
    NOINLINE void add_scores(int64_t t, int64_t pair, int64_t width, float* scores) const {
        if (workspace.large[pair / AMX_BLOCK]) subtract_tops(pair, pair_end(pair), width);
        const Floats by = broadcast(scale);
        const int64_t left = sequence.tokens - t;
        for (int64_t j = 0; j < width; j += 2 * WIDTH) {
            const float* x = workspace.logits.get() + j;
            Floats received[2]{};
#pragma GCC unroll 4
            for (int64_t lane = pair; lane < pair_end(pair); lane++, x += LOGITS_STRIDE) {
                const Floats shift = broadcast(workspace.shifts[lane]);
                const Floats factor = broadcast(workspace.factors[lane]);
                for (int m = 0; m < 2; m++) {
                    const Floats e = exp2_flush_to_zero(fma(load(x + m * WIDTH), by, shift));
                    received[m] = fma(e, factor, received[m]);
                }
            }
            for (int64_t m = 0, i = j; m < 2; m++, i += WIDTH) {
                if (i + WIDTH <= left) {
                    store(scores + t + i, load(scores + t + i) + received[m]);
                } else {
                    for (int64_t n = 0; i + n < left; n++) scores[t + i + n] += received[m][n];
                }
            }
        }
    }
};

}  // namespace ISA

#endif
