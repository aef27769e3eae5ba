// prefill_attention of bfloat16 in AMX tiles.
//
// Queries are rows of a tile and keys its columns. A first pass over chunks of keys has the
// outputs, and each query's maximum and sum (the online softmax of FlashAttention, Dao et al.
// 2022). A second one computes the logits again for the attention score, which needs the sums
// first: so its weights are float32, and no memory grows with queries times keys. Keys and values
// of a KV head are packed into tiles once for all of a task's blocks of queries.
#pragma once

#include "amx.h"
#include "memory.h"
#include "prefill.h"

#if defined(TILES)

namespace ISA {

constexpr int64_t SIDE = TILE_ROWS;          // rows of all tiles, and their columns in words
constexpr int64_t DEPTH = 2 * TILE_PAIRS;    // what one product of tiles sums over
constexpr int64_t TILE = SIDE * TILE_PAIRS;  // words
constexpr int64_t PAIR = 2 * SIDE;           // queries, keys, dimensions of 2 x 2 tiles
constexpr int64_t KEY_CHUNK = 128;           // whose logits lie in the nearest cache
// Elements of 4 bytes from one row to the next: none of 16 rows push each other out of the cache.
constexpr int64_t LOGITS_ROW = KEY_CHUNK + SIDE, WEIGHTS_ROW = (KEY_CHUNK + DEPTH) / 2;
static_assert(QUERY_LANES % PAIR == 0 && KEY_CHUNK % PAIR == 0, "whole pairs of tiles");

INLINE int64_t up_to(int64_t multiple, int64_t x) {
    return (x + multiple - 1) / multiple * multiple;
}

// C0 to C3, of 2 x 2 tiles, += A0, A1 by B0, B1. Rows of A are so many words apart, each `steps`
// tiles long; so are the steps of B.
enum { C0, C1, C2, C3, A0, A1, B0, B1 };
INLINE void add_products(Tiles& tiles, const uint32_t* a, int64_t a_row, const uint32_t* b0,
                         const uint32_t* b1, int64_t b_step, int64_t steps) {
    for (int64_t i = 0; i < steps; i++) {
        tiles.load<A0>(a + i * TILE_PAIRS, a_row * 4);
        tiles.load<B0>(b0 + i * b_step, TILE_BYTES);
        tiles.add_product<C0, A0, B0>();
        tiles.load<B1>(b1 + i * b_step, TILE_BYTES);
        tiles.add_product<C1, A0, B1>();
        tiles.load<A1>(a + SIDE * a_row + i * TILE_PAIRS, a_row * 4);
        tiles.add_product<C2, A1, B0>();
        tiles.add_product<C3, A1, B1>();
    }
}

// The same of a float32 matrix's rows at `c`, so many floats apart.
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

// Memory of one thread, and its tiles.
struct TileSpace {
    // Tiles, as right operands: keys [tokens / SIDE, dim / DEPTH], values [tokens / DEPTH, dim /
    // SIDE]. Rows, as left ones: queries [QUERY_LANES, dim], weights [QUERY_LANES, KEY_CHUNK].
    Memory<uint32_t> keys, values, queries, weights;
    Memory<float> logits, sums;  // [QUERY_LANES, KEY_CHUNK], [QUERY_LANES, dim]
    // Of each lane: the last key that it sees, the first, its largest logit so far, parts of the sum of its
    // weights relative to that one, and what they are multiplied by to be added to the score.
    int64_t limits[QUERY_LANES], starts[QUERY_LANES];
    float top[QUERY_LANES], factors[QUERY_LANES];
    Floats totals[QUERY_LANES];
    int64_t dim = 0, packed = 0;  // head_dim up to whole tiles; keys and values in tiles by now
    TileShapes shapes;

    bool make(int64_t head_dim, int64_t longest) {
        dim = up_to(PAIR, head_dim);
        for (int tile = C0; tile <= B1; tile++) shapes.set(tile, SIDE, TILE_BYTES);
        const int64_t tokens = up_to(PAIR, longest);
        keys = memory<uint32_t>(tokens * dim / 2);
        values = memory<uint32_t>(tokens * dim / 2);
        queries = memory<uint32_t>(QUERY_LANES * queries_row());
        weights = memory<uint32_t>(QUERY_LANES * WEIGHTS_ROW);
        logits = memory<float>(QUERY_LANES * LOGITS_ROW);
        sums = memory<float>(QUERY_LANES * sums_row());
        return keys && values && queries && weights && logits && sums;
    }
    int64_t steps() const { return dim / DEPTH; }
    int64_t queries_row() const { return dim / 2 + TILE_PAIRS; }
    int64_t sums_row() const { return dim + SIDE; }

    void start() { packed = 0; }

    // Keys and values of a head from `begin`, where a pair of tiles begins, up to the first `seen`,
    // and on to whole tiles. What is before `begin` will not be asked for again.
    void pack(const Prefill& a, const Sequence& sequence, int64_t kv_head, int64_t begin,
              int64_t seen) {
        if (packed < begin) packed = begin;
        const auto* k = cached<bf16>(sequence, a.k, a.k_row, kv_head * a.k_head);
        const auto* v = cached<bf16>(sequence, a.v, a.v_row, kv_head * a.v_head);
        for (; packed < seen; packed += PAIR) {
            const int64_t left = sequence.tokens - packed;
            for (int64_t t = 0; t < PAIR; t += SIDE)
                pack_keys(k + (packed + t) * a.k_row, a.k_row, left - t, a.head_dim,
                          keys.get() + (packed + t) * dim / 2);
            for (int64_t t = 0; t < PAIR; t += 2) {
                const bf16* low = v + (packed + t) * a.v_row;
                pack_values(t < left ? low : nullptr, t + 1 < left ? low + a.v_row : nullptr,
                            a.head_dim, values.get() + packed * dim / 2 + t / 2 * TILE_PAIRS);
            }
        }
    }

private:
    // Rows of keys to columns of tiles, by pairs of elements.
    void pack_keys(const bf16* from, int64_t row, int64_t left, int64_t head_dim,
                   uint32_t* to) const {
        const int64_t count = left > SIDE ? SIDE : left;
        typedef uint32_t Line __attribute__((vector_size(TILE_BYTES)));
        for (int64_t i = 0; i < dim; i += DEPTH, to += TILE) {
            Line rows[SIDE];
            if (count == SIDE && head_dim - i >= DEPTH) {
                for (int64_t t = 0; t < SIDE; t++) rows[t] = load_raw<Line>(from + t * row + i);
            } else {
                const int64_t some = head_dim - i < DEPTH ? head_dim - i : DEPTH;
                std::memset(rows, 0, sizeof rows);
                for (int64_t t = 0; t < count; t++)
                    if (some > 0)
                        std::memcpy(rows + t, from + t * row + i, static_cast<size_t>(some) * 2);
            }
#if defined(__AVX512F__)
            transpose(reinterpret_cast<Floats*>(rows));
            std::memcpy(to, rows, sizeof rows);
#else
            for (int64_t t = 0; t < SIDE; t++)
                for (int64_t k = 0; k < TILE_PAIRS; k++) to[k * SIDE + t] = rows[t][k];
#endif
        }
    }
    // Two values to a row of tiles, element by element; null stands for zeros.
    void pack_values(const bf16* low, const bf16* high, int64_t head_dim, uint32_t* to) const {
        for (int64_t i = 0; i < dim; i += SIDE, to += TILE) {
            const int64_t left = head_dim - i;
            if (left >= SIDE && high) {
                for (int64_t j = 0; j < SIDE; j += WIDTH) {
                    const Words pairs = widen(&low[i + j].bits) | widen(&high[i + j].bits) << 16;
                    std::memcpy(to + j, &pairs, sizeof pairs);
                }
                continue;
            }
            for (int64_t j = 0; j < SIDE; j++)
                to[j] = j >= left || !low
                            ? 0
                            : low[i + j].bits |
                                  (high ? static_cast<uint32_t>(high[i + j].bits) << 16 : 0);
        }
    }
};

struct TileBlock : Lanes {
    using Space = TileSpace;
    static constexpr int64_t QUERIES = QUERY_LANES;
    Space& space;
    Tiles tiles{space.shapes};
    // Of logits, that are exponents of 2 then.
    const float scale = a.form.softcap > 0   ? LOG2_E
                        : a.form.scale > 0 ? LOG2_E * Lanes::scale()
                                           : LOG2_E / sqrtf(static_cast<float>(a.head_dim));

    void run(float* scores) {
        load_queries();
        const int64_t lanes = up_to(PAIR, count);
        std::memset(space.sums.get(), 0, static_cast<size_t>(lanes * space.sums_row()) * 4);
        for (int64_t lane = 0; lane < lanes; lane++) {
            space.top[lane] = NONE;
            space.totals[lane] = Floats{};
            space.limits[lane] = limit(lane);
            space.starts[lane] = start(lane);
            if (a.form.sinks) {  // as if it were the first key, with a value of zeros
                space.top[lane] = a.form.sinks[head(lane)] * LOG2_E / scale;
                space.totals[lane][0] = 1;
            }
        }
        const int64_t seen = this->seen(), begin = this->begin() / KEY_CHUNK * KEY_CHUNK;
        space.pack(a, sequence, kv_head, begin, seen);
        const int64_t chunks = (seen - begin + KEY_CHUNK - 1) / KEY_CHUNK;
        const int64_t each = chunks < QUERIES / 8 ? (QUERIES + chunks - 1) / chunks : 8;
        int64_t fetched = 0;
        for (int64_t t = begin; t < seen; t += KEY_CHUNK) {
            logits(t);
            for (int64_t lane = 0; lane < count; lane++) {
                if (lane < each) fetch(fetched++);
                weigh(t, lane);
            }
            add_values(t);
        }
        write();
        if (!scores) return;
        for (int64_t t = begin; t < seen; t += KEY_CHUNK) {
            logits(t);
            add_received(t, scores);
        }
    }

    // Keys of a chunk that any of a lane's tiles sees, up to whole tiles.
    int64_t width(int64_t t, int64_t lane) const {
        const int64_t last = lane / PAIR * PAIR + PAIR;
        const int64_t some = space.limits[(last < count ? last : count) - 1] + 1 - t;
        return some <= 0 ? 0 : up_to(PAIR, some < KEY_CHUNK ? some : KEY_CHUNK);
    }

    // Asks for what the task's next block begins with, row by row; behind the last one for the first
    // of the head that the thread probably has next.
    void fetch(int64_t row) const {
        const int64_t lanes = sequence.rows * group(), heads = a.threads;
        if (row >= QUERIES) return;
        if (first + stride < lanes) {
            if (first + stride + row < lanes)
                fetch(query<bf16>(stride + row), space.packed + row, limit(stride + row), kv_head);
        } else if (stride == QUERIES && row < lanes && kv_head + heads < a.kv_heads) {
            const bf16* mine = static_cast<const bf16*>(a.q) + (sequence.row + row / group()) * a.q_row;
            fetch(mine + ((kv_head + heads) * group() + row % group()) * a.q_head, row,
                  sequence.tokens - 1, kv_head + heads);
        }
    }
    void fetch(const bf16* query, int64_t key, int64_t limit, int64_t head) const {
        prefetch(query);
        if (key > limit) return;
        prefetch(cached<bf16>(sequence, a.k, a.k_row, head * a.k_head) + key * a.k_row);
        prefetch(cached<bf16>(sequence, a.v, a.v_row, head * a.v_head) + key * a.v_row);
    }
    void prefetch(const bf16* row) const {
        for (int64_t i = 0; i < a.head_dim; i += DEPTH) __builtin_prefetch(row + i, 0, 2);
    }

    void load_queries() const {
        const int64_t row = space.queries_row();
        if (a.head_dim < space.dim || count % PAIR)
            std::memset(space.queries.get(), 0, static_cast<size_t>(up_to(PAIR, count) * row) * 4);
        for (int64_t lane = 0; lane < count; lane++)
            std::memcpy(space.queries.get() + lane * row, query<bf16>(lane),
                        static_cast<size_t>(a.head_dim) * 2);
    }

    void logits(int64_t t) {
        const int64_t steps = space.steps(), row = space.queries_row();
        for (int64_t i = 0; i < KEY_CHUNK; i += PAIR)
            for (int64_t lane = 0; lane < count; lane += PAIR) {
                if (i >= width(t, lane)) continue;
                const uint32_t* k = space.keys.get() + (t + i) * space.dim / 2;
                tiles.zero<C0>();
                tiles.zero<C1>();
                tiles.zero<C2>();
                tiles.zero<C3>();
                add_products(tiles, space.queries.get() + lane * row, row, k, k + steps * TILE, TILE,
                             steps);
                store_pair(tiles, space.logits.get() + lane * LOGITS_ROW + i, LOGITS_ROW);
            }
        if (a.form.softcap > 0) cap(t);
    }

    __attribute__((noinline)) void cap(int64_t t) const {
        const float scale = Lanes::scale(), most = static_cast<float>(a.form.softcap);
        for (int64_t lane = 0; lane < count; lane++) {
            float* x = space.logits.get() + lane * LOGITS_ROW;
            for (int64_t j = 0; j < width(t, lane); j += WIDTH)
                store(x + j, soft_capped(load(x + j) * scale, most));
        }
    }

    // Logits become weights, unnormalized, in bfloat16.
    __attribute__((noinline)) void weigh(int64_t t, int64_t lane) const {
        const int64_t width = this->width(t, lane), sees = space.limits[lane] + 1 - t;
        const int64_t start = space.starts[lane] - t;
        float* x = space.logits.get() + lane * LOGITS_ROW;
        int64_t some = 0;
        if (sees > 0 && start < KEY_CHUNK) {
            some = sees < width ? up_to(WIDTH, sees) : width;
            if (sees < some) {
                float* tail = x + some - WIDTH;
                store(tail, masked(load(tail), sees - (some - WIDTH)));
            }
            for (int64_t j = 0; j < start; j += WIDTH)
                store(x + j, masked_before(load(x + j), start - j));
            Floats most = load(x);
            for (int64_t j = WIDTH; j < some; j += WIDTH) most = larger(load(x + j), most);
            raise(lane, widest(most));
        }
        const Floats top = broadcast(space.top[lane]);
        Floats total{};
        bf16* to = reinterpret_cast<bf16*>(space.weights.get() + lane * WEIGHTS_ROW);
        for (int64_t j = 0; j < width; j += 2 * WIDTH) {
            Floats e[2]{};
            for (int m = 0; m < 2; m++)
                if (j + m * WIDTH < some) {
                    e[m] = exp2((load(x + j + m * WIDTH) - top) * scale);
                    total += e[m];
                }
            narrow(to + j, e[0], e[1]);
        }
        space.totals[lane] += total;
    }

    INLINE static Floats masked(Floats x, int64_t sees) {
        Ints place{};
        for (int i = 0; i < WIDTH; i++) place[i] = i;
        return place < static_cast<int32_t>(sees) ? x : broadcast(NONE);
    }

    INLINE static Floats masked_before(Floats x, int64_t start) {
        Ints place{};
        for (int i = 0; i < WIDTH; i++) place[i] = i;
        return place < static_cast<int32_t>(start) ? broadcast(NONE) : x;
    }

    // A larger maximum: what was summed up becomes smaller.
    void raise(int64_t lane, float top) const {
        const float before = space.top[lane];
        if (!(top > before)) return;
        const Floats factor = exp2(broadcast((before - top) * scale));
        float* sums = space.sums.get() + lane * space.sums_row();
        for (int64_t i = 0; i < space.dim; i += WIDTH) store(sums + i, load(sums + i) * factor);
        space.totals[lane] *= factor;
        space.top[lane] = top;
    }

    void add_values(int64_t t) {
        const int64_t row = space.sums_row();
        for (int64_t i = 0; i < space.dim; i += PAIR)
            for (int64_t lane = 0; lane < count; lane += PAIR) {
                const uint32_t* v = space.values.get() + t * space.dim / 2 + i / SIDE * TILE;
                float* sums = space.sums.get() + lane * row + i;
                load_pair(tiles, sums, row);
                add_products(tiles, space.weights.get() + lane * WEIGHTS_ROW, WEIGHTS_ROW, v,
                             v + TILE, space.dim / SIDE * TILE, width(t, lane) / DEPTH);
                store_pair(tiles, sums, row);
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
            space.factors[lane] = inverse * kept(lane);
        }
    }

    // The chunk's logits, again, to what its keys receive.
    __attribute__((noinline)) void add_received(int64_t t, float* scores) const {
        int64_t lane = 0;
        for (int64_t j = t; j < t + KEY_CHUNK; j += WIDTH) {
            while (lane < count && space.limits[lane] < j) lane++;  // sees none from here on
            if (lane == count) return;
            Floats received{};
            for (int64_t i = lane; i < count; i++) {
                Floats x = load(space.logits.get() + i * LOGITS_ROW + j - t);
                const int64_t sees = space.limits[i] + 1 - j;
                if (sees < WIDTH) x = masked(x, sees);
                if (space.starts[i] > j) x = masked_before(x, space.starts[i] - j);
                const Floats e = exp2((x - space.top[i]) * scale);
                received = fma(e, broadcast(space.factors[i]), received);
            }
            if (j + WIDTH <= sequence.tokens) {
                store(scores + j, load(scores + j) + received);
            } else {
                for (int64_t i = 0; j + i < sequence.tokens; i++) scores[j + i] += received[i];
            }
        }
    }
};

}  // namespace ISA

#endif
