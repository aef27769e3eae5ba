// prefill_attention of bfloat16 in AMX tiles.
//
// Queries are the rows of a tile and keys its columns. A first pass over chunks of keys computes the
// outputs, and the maximum and the sum of each query (the online softmax of FlashAttention, Dao et al.
// 2022). A second pass recomputes the logits for the attention score, which needs the final sums. So
// the weights of the score are float32, and no memory grows with queries times keys.
//
// The matmuls of a chunk and its exponentials run one after the other. Interleaving them gains nothing,
// because a CPU runs vector arithmetic at half rate next to tile matmuls.
#pragma once

#include <float.h>

#include "flush_to_zero.h"
#include "key_value_tiles.h"
#include "prefetch.h"

#if defined(TILES)

namespace ISA {

// Row stride in elements of 4 bytes. The padding avoids cache conflicts between 16 rows.
constexpr int64_t LOGITS_ROW = KEY_CHUNK + SIDE;
constexpr int64_t TOGETHER = 4;  // lanes whose weights are computed together
// Maximum lanes of a block. Their queries and sums need less memory than the weights of QUERY_LANES
// lanes, which the plan counts.
constexpr int64_t MAX_LANES = 2 * QUERY_LANES;
static_assert(MAX_LANES % PAIR == 0 && PAIR % TOGETHER == 0, "whole pairs of tiles");

// C0 to C3, 2 x 2 tiles, += A0, A1 by B0, B1. Rows of A are `a_row` words apart, and each is `steps`
// tiles long. Tiles of B are contiguous.
enum { C0, C1, C2, C3, A0, A1, B0, B1 };
INLINE void add_products(Tiles& tiles, const uint32_t* a, int64_t a_row, const uint32_t* b,
                         int64_t steps) {
    for (int64_t i = 0; i < steps; i++, b += 2 * TILE) {
        tiles.load<A0>(a + i * TILE_PAIRS, a_row * 4);
        tiles.load<B0>(b, TILE_BYTES);
        tiles.add_product<C0, A0, B0>();
        tiles.load<B1>(b + TILE, TILE_BYTES);
        tiles.add_product<C1, A0, B1>();
        tiles.load<A1>(a + SIDE * a_row + i * TILE_PAIRS, a_row * 4);
        tiles.add_product<C2, A1, B0>();
        tiles.add_product<C3, A1, B1>();
    }
}

// Load C0 to C3 from a float32 matrix at `c` with a row stride of `row` floats.
INLINE void load_pair(Tiles& tiles, const float* c, int64_t row) {
    tiles.load<C0>(c, row * 4);
    tiles.load<C1>(c + SIDE, row * 4);
    tiles.load<C2>(c + SIDE * row, row * 4);
    tiles.load<C3>(c + SIDE * row + SIDE, row * 4);
}
INLINE void store_pair(Tiles& tiles, float* c, int64_t row) {
    tiles.store<C0>(c, row * 4);
    tiles.store<C1>(c + SIDE, row * 4);
    tiles.store<C2>(c + SIDE * row, row * 4);
    tiles.store<C3>(c + SIDE * row + SIDE, row * 4);
}

// Scratch memory of one thread.
struct TileSpace {
    KeyValueTiles cache;
    Memory<uint32_t> queries;    // [lanes, dim] bfloat16, as left operands
    Memory<float> logits, sums;  // [PAIR, KEY_CHUNK], [lanes, dim]
    // Per lane: the approximate running maximum of the logits; the shift of scaled logits relative to
    // it, and a bit if they are too large for a shift; partial sums of the weights; and the factor of
    // the weights in the attention score.
    float tops[MAX_LANES], shifts[MAX_LANES], factors[MAX_LANES];
    uint32_t far[MAX_LANES / PAIR];
    Floats totals[MAX_LANES];
    TileShapes shapes;

    bool make(int64_t head_dim, int64_t longest, int64_t lanes) {
        for (int tile = C0; tile <= B1; tile++) shapes.set(tile, SIDE, TILE_BYTES);
        if (!cache.make(head_dim, longest)) return false;
        queries = memory<uint32_t>(lanes * queries_row());
        logits = memory<float>(PAIR * LOGITS_ROW);
        sums = memory<float>(lanes * sums_row());
        return queries && logits && sums;
    }
    int64_t queries_row() const { return cache.width() / 2 + TILE_PAIRS; }
    int64_t sums_row() const { return cache.width() + SIDE; }

    void start() { cache.start(); }
};

// Prefetch the rows of the task's next block, a few at a time.
class RowsAhead {
public:
    // `packed` keys and values are already in tiles. step() is called `steps` times.
    RowsAhead(const Lanes& now, const Lanes* next, int64_t packed, int64_t steps)
        : next(next), steps(steps) {
        if (!next) return;
        key = next->kv_head == now.kv_head ? packed : next->begin();
        keys = next->seen() - key;
        all = keys > next->count ? keys : next->count;
    }

    INLINE void step() {
        for (due += all; due >= steps; due -= steps, row++) {
            if (row < next->count) ask(next->query<bf16>(row));
            if (row >= keys) continue;
            ask(next->key<bf16>(key + row));
            ask(next->value<bf16>(key + row));
        }
    }

private:
    INLINE void ask(const bf16* from) const {
        for (int64_t i = 0; i < next->a.head_dim; i += DEPTH) prefetch(from + i, L2);
    }

    const Lanes* const next;
    const int64_t steps;
    int64_t key = 0, keys = 0, all = 0, due = 0, row = 0;
};

struct TileBlock : Lanes {
    using Space = TileSpace;
    // If keys and values do not fit in an L2 cache of 2 MB with the other data, a block has more lanes.
    static constexpr int64_t NEAR_BYTES = 5 << 18;
    static int64_t most_lanes(int64_t head_dim, int64_t longest) {
        const int64_t bytes = 2 * longest * up_to(PAIR, head_dim) * static_cast<int64_t>(sizeof(bf16));
        return bytes > NEAR_BYTES ? MAX_LANES : PAIR;
    }
    // Weights are relative to a reference that the maximum exceeds by a factor of at most 2^8, without
    // loss of precision. So sums are rarely rescaled.
    static constexpr float MAX_RAISE = 8;
    // The rounding error of a small shift is a common factor of all weights.
    static constexpr float MAX_SHIFT = 1024;

    Space& space;
    DenormalsAsZeros denormals{};
    Tiles tiles{space.shapes};
    // Scale of the logits, which become exponents of 2.
    const float scale = a.form.softcap > 0   ? LOG2_E
                        : a.form.scale > 0 ? LOG2_E * Lanes::scale()
                                           : LOG2_E / sqrtf(static_cast<float>(a.head_dim));

    void run(float* scores, const Lanes* next) {
        const int64_t seen = this->seen(), first_key = begin() / KEY_CHUNK * KEY_CHUNK;
        space.cache.pack(*this, first_key, seen);
        load_queries();
        clear();
        const int64_t chunks = (seen - first_key + KEY_CHUNK - 1) / KEY_CHUNK;
        RowsAhead ahead(*this, next, space.cache.count(), chunks * up_to(PAIR, count) / TOGETHER);
        for (int64_t t = first_key; t < seen; t += KEY_CHUNK)
            for (int64_t pair = 0; pair < count; pair += PAIR) {
                const int64_t width = logits(t, pair);
                if (t + KEY_CHUNK >= seen) ask_for_outputs(pair);
                for (int64_t lane = pair; lane < pair + PAIR; lane += TOGETHER) {
                    ahead.step();
                    if (lane >= count || width == 0) continue;
                    width == KEY_CHUNK ? weigh(lane, KEY_CHUNK) : weigh(lane, width);
                }
                add_values(t, pair, width);
            }
        write();
        if (!scores) return;
        for (int64_t t = first_key; t < seen; t += KEY_CHUNK)
            for (int64_t pair = 0; pair < count; pair += PAIR)
                add_received(t, pair, logits(t, pair), scores);
    }

    int64_t pair_end(int64_t pair) const { return pair + PAIR < count ? pair + PAIR : count; }

    void load_queries() const {
        const int64_t row = space.queries_row();
        if (a.head_dim < space.cache.width() || count % PAIR)
            std::memset(space.queries.get(), 0, static_cast<size_t>(up_to(PAIR, count) * row) * 4);
        for (int64_t lane = 0; lane < count; lane++)
            std::memcpy(space.queries.get() + lane * row, query<bf16>(lane),
                        static_cast<size_t>(a.head_dim) * 2);
    }

    void clear() const {
        const int64_t lanes = up_to(PAIR, count);
        std::memset(space.sums.get(), 0, static_cast<size_t>(lanes * space.sums_row()) * 4);
        for (int64_t lane = 0; lane < lanes; lane++) {
            // An attention sink acts as a first key with a value of zeros.
            const bool sinks = a.form.sinks;
            set_top(lane, sinks ? a.form.sinks[head(lane)] * LOG2_E / scale : -FLT_MAX);
            space.totals[lane] = Floats{};
            if (sinks) space.totals[lane][0] = 1;
        }
    }

    void set_top(int64_t lane, float top) const {
        const float shift = top * -scale;
        const bool far = fabsf(shift) > MAX_SHIFT;
        space.tops[lane] = top;
        space.shifts[lane] = far ? 0 : shift;
        uint32_t& bits = space.far[lane / PAIR];
        bits = (bits & ~(1u << lane % PAIR)) | static_cast<uint32_t>(far) << lane % PAIR;
    }

    // For logits that are too large to be shifted after scaling, subtract the maximum first.
    __attribute__((noinline)) void subtract_tops(int64_t lane, int64_t end, int64_t width) const {
        for (; lane < end; lane++) {
            float* x = logits(lane);
            if (space.far[lane / PAIR] >> lane % PAIR & 1)
                for (int64_t j = 0; j < width; j += WIDTH)
                    store(x + j, load(x + j) - space.tops[lane]);
        }
    }

    float* logits(int64_t lane) const {
        return space.logits.get() + lane % PAIR * LOGITS_ROW;
    }

    // Compute the logits of a pair of lane tiles by a chunk of keys, up to the last key that any lane
    // attends to, padded to whole tiles. Return the number of keys. Masked keys get the logit MASKED.
    int64_t logits(int64_t t, int64_t pair) {
        const int64_t row = space.queries_row(), end = pair_end(pair);
        const int64_t visible = limit(end - 1) + 1 - t;
        if (visible <= 0 || start(pair) >= t + KEY_CHUNK) return 0;
        const int64_t width = up_to(PAIR, visible < KEY_CHUNK ? visible : KEY_CHUNK);
        for (int64_t i = 0; i < width; i += PAIR) {
            tiles.zero<C0>();
            tiles.zero<C1>();
            tiles.zero<C2>();
            tiles.zero<C3>();
            add_products(tiles, space.queries.get() + pair * row, row, space.cache.keys_at(t + i),
                         space.cache.width() / DEPTH);
            store_pair(tiles, space.logits.get() + i, LOGITS_ROW);
        }
        if (a.form.softcap > 0) cap(pair, width);
        if (limit(pair) + 1 < t + width || start(end - 1) > t) mask(t, pair, width);
        return width;
    }

    __attribute__((noinline)) void cap(int64_t pair, int64_t width) const {
        const float scale = Lanes::scale(), softcap = static_cast<float>(a.form.softcap);
        for (int64_t lane = pair; lane < pair_end(pair); lane++) {
            float* x = logits(lane);
            for (int64_t j = 0; j < width; j += WIDTH)
                store(x + j, soft_capped(load(x + j) * scale, softcap));
        }
    }

    __attribute__((noinline)) void mask(int64_t t, int64_t pair, int64_t width) const {
        Ints place{};
        for (int i = 0; i < WIDTH; i++) place[i] = i;
        for (int64_t lane = pair; lane < pair_end(pair); lane++) {
            float* x = logits(lane);
            const Ints last = Ints{} + static_cast<int32_t>(limit(lane) - t);
            const Ints first = Ints{} + static_cast<int32_t>(start(lane) - t);
            for (int32_t j = 0; j < width; j += WIDTH) {
                const Ints key = place + j;
                store(x + j, (key <= last) & (key >= first) ? load(x + j) : broadcast(MASKED));
            }
        }
    }

    // Prefetch the output lines, which are written after the last chunk.
    INLINE void ask_for_outputs(int64_t pair) const {
        for (int64_t lane = pair; lane < pair_end(pair); lane++)
            for (int64_t i = 0; i < a.head_dim; i += DEPTH)
                prefetch_to_write(output<bf16>(lane) + i);
    }

    // Replace the logits of TOGETHER lanes by unnormalized weights in bfloat16, in place.
    INLINE void weigh(int64_t lane, int64_t width) const {
        float* x = logits(lane);
        Floats largest[TOGETHER];
#pragma GCC unroll 4
        for (int n = 0; n < TOGETHER; n++) {
            const float* row = x + n * LOGITS_ROW;
            largest[n] = max(load(row), load(row + WIDTH));
            for (int64_t j = 2 * WIDTH; j < width; j += 2 * WIDTH)
                largest[n] = max(max(load(row + j), load(row + j + WIDTH)), largest[n]);
        }
        float tops[TOGETHER];
        reduce_max(largest, tops);
        for (int n = 0; n < TOGETHER; n++)
            if ((tops[n] - space.tops[lane + n]) * scale > MAX_RAISE) raise(lane + n, tops[n]);
        if (space.far[lane / PAIR]) subtract_tops(lane, lane + TOGETHER, width);
        const Floats by = broadcast(scale);
#pragma GCC unroll 4
        for (int n = 0; n < TOGETHER; n++) {
            const float* row = x + n * LOGITS_ROW;
            bf16* to = reinterpret_cast<bf16*>(x + n * LOGITS_ROW);
            const Floats shift = broadcast(space.shifts[lane + n]);
            Floats total{};
#pragma GCC unroll 4
            for (int64_t j = 0; j < width; j += 2 * WIDTH) {
                const Floats low = exp2_flush_to_zero(fma(load(row + j), by, shift));
                const Floats high = exp2_flush_to_zero(fma(load(row + j + WIDTH), by, shift));
                total += low + high;
                narrow(to + j, low, high);
            }
            space.totals[lane + n] += total;
        }
    }

    // Set a larger maximum and rescale the accumulated sums.
    __attribute__((noinline)) void raise(int64_t lane, float top) const {
        const Floats factor = exp2_flush_to_zero(broadcast((space.tops[lane] - top) * scale));
        float* sums = space.sums.get() + lane * space.sums_row();
        for (int64_t i = 0; i < space.cache.width(); i += WIDTH)
            store(sums + i, load(sums + i) * factor);
        space.totals[lane] *= factor;
        set_top(lane, top);
    }

    void add_values(int64_t t, int64_t pair, int64_t width) {
        const auto* weights = reinterpret_cast<const uint32_t*>(space.logits.get());
        for (int64_t i = 0; width > 0 && i < space.cache.width(); i += PAIR) {
            float* sums = space.sums.get() + pair * space.sums_row() + i;
            load_pair(tiles, sums, space.sums_row());
            add_products(tiles, weights, LOGITS_ROW, space.cache.values_at(t, i), width / DEPTH);
            store_pair(tiles, sums, space.sums_row());
        }
    }

    void write() const {
        for (int64_t lane = 0; lane < count; lane++) {
            const float inverse = 1.0f / sum(space.totals[lane]);
            const float* sums = space.sums.get() + lane * space.sums_row();
            bf16* to = output<bf16>(lane);
            int64_t i = 0;
            for (; i + 2 * WIDTH <= a.head_dim; i += 2 * WIDTH)
                narrow(to + i, load(sums + i) * inverse, load(sums + i + WIDTH) * inverse);
            for (; i < a.head_dim; i++) put(to + i, sums[i] * inverse);
            space.factors[lane] = inverse * decay_factor(lane);
        }
    }

    // Add the attention weights of the recomputed logits of a chunk to the scores of its keys.
    __attribute__((noinline)) void add_received(int64_t t, int64_t pair, int64_t width,
                                                float* scores) const {
        if (space.far[pair / PAIR]) subtract_tops(pair, pair_end(pair), width);
        const Floats by = broadcast(scale);
        const int64_t left = sequence.tokens - t;
        for (int64_t j = 0; j < width; j += 2 * WIDTH) {
            const float* x = space.logits.get() + j;
            Floats received[2]{};
#pragma GCC unroll 4
            for (int64_t lane = pair; lane < pair_end(pair); lane++, x += LOGITS_ROW) {
                const Floats shift = broadcast(space.shifts[lane]);
                const Floats factor = broadcast(space.factors[lane]);
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
