// decode_attention: attention of one new token over the slots of a cache, score update, choice of the
// evicted slot and the write into it.
//
// The slots of a KV head of a sequence are attended to in parts of PART_SLOTS, whose results are
// combined in order. So results depend neither on the number of threads nor on the other sequences. A
// task is a head, or one of its parts if there are few heads. All query heads of the group share one
// read of the keys and values.
#include <math.h>

#include "cached_matmul.h"
#include "decode_amx.h"
#include "memory.h"

namespace ISA {
namespace {

static_assert(PART_SLOTS % SLOT_TILE == 0, "whole tiles");
constexpr int CHUNKS_PER_THREAD = 16;  // chunks of tasks per thread, if there are enough

// Round up to whole vectors.
int64_t padded(int64_t x) { return round_up(x, WIDTH); }

struct Head {
    const DecodeAttention& args;
    int64_t index, sequence, kv_head, group, width, cached;

    Head(const DecodeAttention& args, int64_t index)
        : args(args), index(index), sequence(index / args.kv_heads), kv_head(index % args.kv_heads),
          group(args.heads / args.kv_heads), width(padded(args.head_dim)),
          cached(args.metadata[sequence]) {}

    int64_t parts() const { return (cached + PART_SLOTS - 1) / PART_SLOTS; }

    // Return the offset of the logits of query `g`.
    float offset(int64_t g) const {
        return args.variant.offsets ? args.variant.offsets[sequence * args.heads + kv_head * group + g] *
                                          logit_scale(args.variant, args.head_dim)
                                    : 0;
    }
    // Return the constants of this head's keys.
    const float* of_keys(const float* constants) const {
        return constants ? constants + kv_head * args.head_dim : nullptr;
    }
    int64_t metadata(int row) const { return args.metadata[row * args.sequences + sequence]; }
    // Return the offset of this head in the eviction state tensors.
    int64_t first() const { return (sequence * args.kv_heads + kv_head) * args.num_slots; }

    template <class T>
    T* slots(int kind) const {
        return static_cast<T*>(args.slots) + slot_start(args, kind, sequence, kv_head, 0);
    }
};

// Convert a new vector to floats [width]. If positions roll, rotate it to the newest rank.
template <class T>
void unpack(const Head& h, const T* from, float* to, bool rolls) {
    const DecodeAttention& args = h.args;
    to_floats(from, args.head_dim, to);
    for (int64_t i = args.head_dim; i < h.width; i++) to[i] = 0;
    if (!rolls) return;
    const float *c = args.cos + h.cached * args.half_rotary, *s = args.sin + h.cached * args.half_rotary;
    for (int64_t i = 0; i < args.half_rotary; i++) {
        float x = to[i], y = to[i + args.half_rotary];
        to[i] = x * c[i] - y * s[i];
        to[i + args.half_rotary] = y * c[i] + x * s[i];
    }
}

template <class T>
void load_queries(const Head& h, float* q) {
    const float scale = logit_scale(h.args.variant, h.args.head_dim);
    const T* from = static_cast<const T*>(h.args.q) + h.sequence * h.args.q_row +
                    h.kv_head * h.group * h.args.q_head;
    for (int64_t g = 0; g < h.group; g++) {
        float* to = q + g * h.width;
        unpack(h, from + g * h.args.q_head, to, h.args.ranks != nullptr);
        for (int64_t i = 0; i < h.width; i += WIDTH) store(to + i, load(to + i) * scale);
    }
}

// Call f with the reader for the cached keys (kind 0) or values (kind 1) of a head.
template <class T, class F>
void with_rows(const Head& h, int kind, float* scratch, F f) {
    const DecodeAttention& args = h.args;
    const GroupLayout& layout = layout_of(args, kind);
    const int32_t* ranks = kind == 0 && args.ranks ? args.ranks + h.first() : nullptr;
    if (layout.bits == 16) {
        const T* base = h.slots<T>(kind);
        if (!ranks && args.head_dim == h.width) {
            f(PlainRows<T>{base, args.slots_slot});
        } else {
            f(ConvertedRows<T>{base, args.slots_slot, args.head_dim, h.width, layout, ranks, args.cos,
                               args.sin, args.half_rotary, nullptr, nullptr, scratch});
        }
        return;
    }
    const uint8_t* base = h.slots<uint8_t>(kind);
    const bool supported =
        layout.bits == 8 ? QuantizedTile<8>::supports(layout) : QuantizedTile<4>::supports(layout);
    if (ranks || !supported)
        f(ConvertedRows<uint8_t>{base, args.slots_slot, args.head_dim, h.width, layout, ranks, args.cos,
                                 args.sin, args.half_rotary, ranks ? h.of_keys(args.factor) : nullptr,
                                 h.of_keys(args.shift), scratch});
    else if (layout.bits == 8)
        f(QuantizedRows<8>{base, args.slots_slot, layout, scratch});
    else
        f(QuantizedRows<4>{base, args.slots_slot, layout, scratch});
}

// If a head's keys or values can use tiles, call f with their reader and return true.
template <class F>
bool with_amx_tiles(const Head& h, int kind, float* scratch, F f) {
#if defined(HAS_AMX_TILES)
    const DecodeAttention& args = h.args;
    const GroupLayout& layout = layout_of(args, kind);
    if (layout.bits != 4 || layout.group != default_group(4, args.head_dim) || args.ranks ||
        h.group < MIN_AMX_QUERIES || h.group > MAX_AMX_QUERIES || h.cached < MIN_AMX_SLOTS)
        return false;
    const uint8_t* base = h.slots<uint8_t>(kind);
    switch (args.head_dim) {
        case 64: f(AmxKVHead<64>(base, args.slots_slot, layout, h.group, scratch)); return true;
        case 128: f(AmxKVHead<128>(base, args.slots_slot, layout, h.group, scratch)); return true;
    }
#else
    (void)h, (void)kind, (void)scratch, (void)f;
#endif
    return false;
}

// Partial attention of a part of a head's slots for one query, with weights exp(logit - top).
struct Partial {
    float top, total;
    float* out;  // [width], weighted sum of the values
};

// Scratch memory of one call. Logits and partials have an owner: a thread, or a head if its parts are
// separate tasks.
struct Workspace {
    int64_t parts;   // of the longest head
    int64_t stride;  // of the logits per query
    int64_t size;    // of a Partial, in floats
    Buffer<float> scratch, logits, partials;
};

Partial partial(const Head& h, const Workspace& workspace, int64_t owner, int64_t part, int64_t g) {
    float* at =
        workspace.partials.get() + ((owner * workspace.parts + part) * h.group + g) * workspace.size;
    return {at[0], at[1], at + 2};
}

void span(const Head& h, int64_t part, int64_t& begin, int64_t& end) {
    begin = part * PART_SLOTS;
    end = begin + PART_SLOTS < h.cached ? begin + PART_SLOTS : h.cached;
}

// Finish the logits of slots `begin` to `end` for query `g`: add the offset, apply the soft cap, and
// mask slots outside the window.
void finish_logits(const Head& h, int64_t g, float* row, int64_t begin, int64_t end) {
    const float cap = static_cast<float>(h.args.variant.softcap), offset = h.offset(g);
    if (offset != 0)
        for (int64_t t = begin; t < end; t += WIDTH) store(row + t, load(row + t) + offset);
    if (cap > 0)  // elements past the end are overwritten later
        for (int64_t t = begin; t < end; t += WIDTH) store(row + t, apply_softcap(load(row + t), cap));
    if (!h.args.window) return;
    const int32_t* positions = h.args.positions + h.first();
    const int64_t hidden = h.metadata(1) - 1 - h.args.window;  // this position and older ones are masked
    for (int64_t t = begin; t < end; t++)
        if (positions[t] <= hidden) row[t] = MASKED;
}

// Replace the logits of slots `begin` to `end` for query `g` by weights exp(logit - top). Initialize
// the partial attention: top, total and output.
void compute_weights(const Head& h, int64_t g, float* row, int64_t begin, int64_t end, float* to) {
    const int64_t stop = begin + padded(end - begin);
    finish_logits(h, g, row, begin, end);
    for (int64_t t = end; t < stop; t++) row[t] = MASKED;
    Floats largest = broadcast(MASKED), total{};
    for (int64_t t = begin; t < stop; t += WIDTH) largest = max(load(row + t), largest);
    to[0] = reduce_max(largest);
    const float top = to[0] > MASKED ? to[0] : 0;  // all slots may be masked by the window
    for (int64_t t = begin; t < stop; t += WIDTH) {
        const Floats e = exp(load(row + t) - top);
        store(row + t, e);
        total += e;
    }
    to[1] = sum(total);
    for (int64_t i = 0; i < h.width; i += WIDTH) store(to + 2 + i, Floats{});
}

// Compute the logits of slots `begin` to `end` for all queries of a head.
template <class Rows>
void compute_logits(const Head& h, const Rows& rows, const Queries& to, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t += SLOT_TILE) {
        const int64_t count = t + SLOT_TILE < end ? SLOT_TILE : end - t;
        const auto tile = rows.tile(t, count);
        for_query_blocks(h.group, [&](auto G, int64_t g) {
            matmul_keys<G()>(
                tile, {to.q + g * to.width, to.width, to.row + g * to.stride + t, to.stride}, count);
        });
    }
}

// out [queries, out_row] += weights of slots `begin` to `end` @ their values.
template <class Rows>
void add_values(const Head& h, const Rows& rows, const Queries& weights, int64_t begin, int64_t end,
                float* out, int64_t out_row) {
    for (int64_t t = begin; t < end; t += SLOT_TILE) {
        const int64_t count = t + SLOT_TILE < end ? SLOT_TILE : end - t;
        const auto tile = rows.tile(t, count);
        for_query_blocks(h.group, [&](auto G, int64_t g) {
            matmul_values<G()>(
                tile, {nullptr, weights.width, weights.row + g * weights.stride + t, weights.stride},
                count, out + g * out_row, out_row);
        });
    }
}

template <class T>
void attend_part(const Head& h, const Workspace& workspace, int64_t owner, int64_t part, float* scratch,
                 float* logits) {
    float* q = scratch;
    float* tile_scratch = scratch + h.group * h.width;
    int64_t begin, end;
    span(h, part, begin, end);
    load_queries<T>(h, q);
    const bool tiled = with_amx_tiles(h, 0, tile_scratch, [&](const auto& head_tiles) {
        const auto* raw = static_cast<const bf16*>(h.args.q) + h.sequence * h.args.q_row +
                          h.kv_head * h.group * h.args.q_head;
        head_tiles.keys(raw, h.args.q_head, q, logit_scale(h.args.variant, h.args.head_dim), begin, end,
                        logits, workspace.stride);
    });
    if (!tiled)
        with_rows<T>(h, 0, tile_scratch, [&](const auto& rows) {
            compute_logits(h, rows, {q, h.width, logits, workspace.stride}, begin, end);
        });
    for (int64_t g = 0; g < h.group; g++)
        compute_weights(h, g, logits + g * workspace.stride, begin, end,
                        partial(h, workspace, owner, part, g).out - 2);
    float* out = partial(h, workspace, owner, part, 0).out;
    const auto add_tile_values = [&](const auto& head_tiles) {
        head_tiles.values(logits, workspace.stride, begin, end, out, workspace.size);
    };
    if (with_amx_tiles(h, 1, tile_scratch, add_tile_values)) return;
    with_rows<T>(h, 1, tile_scratch, [&](const auto& rows) {
        add_values(h, rows, {nullptr, h.width, logits, workspace.stride}, begin, end, out,
                   workspace.size);
    });
}

// Return the evictable slot with the lowest score. Ties go to the oldest slot. Each lane searches
// separately.
int64_t find_victim(const Head& h) {
    const int64_t first = h.first();
    const int32_t tokens = static_cast<int32_t>(h.metadata(1));
    const int32_t safe = tokens - static_cast<int32_t>(h.metadata(2));
    const int32_t sinks = static_cast<int32_t>(h.args.sinks);
    const int32_t window = static_cast<int32_t>(h.args.window);
    const float* scores = h.args.scores + first;
    const int32_t* positions = h.args.positions + first;
    Floats lowest = broadcast(-MASKED);
    Ints oldest = Ints{} + EMPTY, best_slot{}, slot{};
    for (int i = 0; i < WIDTH; i++) slot[i] = i;
    for (int64_t t = 0; t < h.cached; t += WIDTH, slot += WIDTH) {
        Floats score{};
        Ints position = Ints{} + EMPTY;
        if (t + WIDTH <= h.cached) {
            score = load(scores + t);
            position = load_raw<Ints>(positions + t);
        } else {
            const size_t valid = static_cast<size_t>(h.cached - t);
            std::memcpy(&score, scores + t, valid * sizeof *scores);
            std::memcpy(&position, positions + t, valid * sizeof *positions);
        }
        if (h.args.mean) score /= __builtin_convertvector(tokens - position, Floats);
        if (window) score = position <= tokens - window ? broadcast(MASKED) : score;
        const Ints better = (position >= sinks) & (position < safe) &
                            ((score < lowest) | ((score == lowest) & (position < oldest)));
        lowest = better ? score : lowest;
        oldest = better ? position : oldest;
        best_slot = better ? slot : best_slot;
    }
    int best = 0;
    for (int i = 1; i < WIDTH; i++)
        if (lowest[i] < lowest[best] || (lowest[i] == lowest[best] && oldest[i] < oldest[best]))
            best = i;
    return best_slot[best];
}

// Assign a slot to the new token, and set its score to its attention weight.
int64_t assign_slot(const Head& h, float weight) {
    const DecodeAttention& args = h.args;
    const bool full = h.metadata(3);
    const int64_t slot = full ? find_victim(h) : h.cached, first = h.first();
    args.scores[first + slot] = weight;
    args.positions[first + slot] = static_cast<int32_t>(h.metadata(1) - 1);
    if (args.ranks) {
        int32_t* ranks = args.ranks + first;
        if (full) {
            const int32_t gone = ranks[slot];
            for (int64_t t = 0; t < h.cached; t++) ranks[t] -= ranks[t] > gone;
        }
        ranks[slot] = static_cast<int32_t>(h.cached - full);
    }
    return slot;
}

// Add the attention weights of one query, times `factor`, to the scores of the slots.
INLINE void add_scores(float* scores, const float* weights, int64_t begin, int64_t end, float keep,
                       float factor) {
    int64_t t = begin;
    for (; t + WIDTH <= end; t += WIDTH)
        store(scores + t, load(scores + t) * keep + load(weights + t) * factor);
    for (; t < end; t++) scores[t] = scores[t] * keep + weights[t] * factor;
}

// Combine the partial attentions of a query with the new token to an output [width]. Update the scores
// of the slots. Return the attention weight of the new token.
float combine(const Head& h, const Workspace& workspace, int64_t owner, int64_t g, const float* q,
              const float* key, const float* value, const float* logits, float* out) {
    const DecodeAttention& args = h.args;
    Floats products{};
    for (int64_t i = 0; i < h.width; i += WIDTH)
        products = fma(load(q + g * h.width + i), load(key + i), products);
    float logit = sum(products) + h.offset(g);
    if (args.variant.softcap > 0) {
        const float cap = static_cast<float>(args.variant.softcap);
        logit = cap * tanhf(logit / cap);
    }
    const float sink =
        args.variant.sink_logits ? args.variant.sink_logits[h.kv_head * h.group + g] : MASKED;
    float top = fmaxf(logit, sink);
    for (int64_t p = 0; p < h.parts(); p++) top = fmaxf(top, partial(h, workspace, owner, p, g).top);
    const float new_weight = expf(logit - top);
    float total = new_weight;
    if (args.variant.sink_logits) total += expf(sink - top);
    for (int64_t p = 0; p < h.parts(); p++) {
        const Partial part = partial(h, workspace, owner, p, g);
        total += part.total * expf(part.top - top);
    }
    for (int64_t i = 0; i < h.width; i += WIDTH) store(out + i, load(value + i) * new_weight);
    for (int64_t p = 0; p < h.parts(); p++) {
        const Partial part = partial(h, workspace, owner, p, g);
        const float factor = expf(part.top - top);
        for (int64_t i = 0; i < h.width; i += WIDTH)
            store(out + i, load(out + i) + load(part.out + i) * factor);
        if (!args.scores) continue;
        int64_t begin, end;
        span(h, p, begin, end);
        add_scores(args.scores + h.first(), logits + g * workspace.stride, begin, end,
                   g == 0 ? static_cast<float>(args.decay) : 1.0f, factor / total);
    }
    for (int64_t i = 0; i < h.width; i += WIDTH) store(out + i, load(out + i) / total);
    return new_weight / total;
}

template <class T>
void finish(const Head& h, const Workspace& workspace, int64_t owner, float* scratch,
            const float* logits) {
    const DecodeAttention& args = h.args;
    float *q = scratch, *key = scratch + h.group * h.width, *value = key + h.width;
    float* sums = value + h.width;
    const T* new_key = static_cast<const T*>(args.k) + h.sequence * args.k_row + h.kv_head * args.k_head;
    const T* new_value =
        static_cast<const T*>(args.v) + h.sequence * args.v_row + h.kv_head * args.v_head;
    load_queries<T>(h, q);
    unpack(h, new_key, key, args.ranks != nullptr);
    unpack(h, new_value, value, false);
    float new_received = 0;
    for (int64_t g = 0; g < h.group; g++) {
        new_received += combine(h, workspace, owner, g, q, key, value, logits, sums);
        T* out = static_cast<T*>(args.out) +
                 (h.sequence * args.heads + h.kv_head * h.group + g) * args.head_dim;
        from_floats(sums, args.head_dim, out);
    }
    const int64_t slot = args.scores ? assign_slot(h, new_received) : h.cached;
    uint8_t* quantized = reinterpret_cast<uint8_t*>(scratch);
    T* smoothed = reinterpret_cast<T*>(value);
    if (args.factor) {
        const float *factor = h.of_keys(args.factor), *shift = h.of_keys(args.shift);
        to_floats(new_key, args.head_dim, key);
        for (int64_t i = 0; i < args.head_dim; i++) key[i] = key[i] * factor[i] + shift[i];
        hadamard(key, args.head_dim);
        from_floats(key, args.head_dim, smoothed);
    }
    write_slot(args, args.key_layout, slot_start(args, 0, h.sequence, h.kv_head, slot),
               args.factor ? smoothed : new_key, quantized);
    write_slot(args, args.value_layout, slot_start(args, 1, h.sequence, h.kv_head, slot), new_value,
               quantized);
    args.written_slots[h.index] = slot;
}

// Return whether all slots and positions of the call are in range.
bool valid(const DecodeAttention& args) {
    for (int64_t s = 0; s < args.sequences; s++) {
        const int64_t cached = args.metadata[s];
        const bool evicts = args.scores && args.metadata[3 * args.sequences + s];
        // A new token replaces the evicted slot, or uses the next slot, which must be free.
        if (cached < evicts || cached > args.num_slots - !evicts) return false;
        if (!args.ranks) continue;
        if (cached >= args.rope_rows) return false;
        for (int64_t head = 0; head < args.kv_heads; head++) {
            const int32_t* ranks = args.ranks + (s * args.kv_heads + head) * args.num_slots;
            for (int64_t t = 0; t < cached; t++)
                if (ranks[t] < 0 || ranks[t] >= args.rope_rows) return false;
        }
    }
    return true;
}

template <class T>
int decode(const DecodeAttention& args) {
    if (!valid(args)) return INVALID;
    const int64_t heads = args.sequences * args.kv_heads, group = args.heads / args.kv_heads;
    const int64_t width = padded(args.head_dim), slots = padded(args.num_slots) + SLOT_TILE;
    Workspace workspace;
    workspace.parts = (args.num_slots + PART_SLOTS - 1) / PART_SLOTS;
    workspace.stride = slots;
    workspace.size = width + WIDTH;
    const bool split = heads < MIN_TASKS && workspace.parts > 1;
    const int64_t owners = split ? heads : args.threads;
    int64_t scratch_size = (SLOT_TILE + 3) * width;
    if (scratch_size < AMX_KV_SCRATCH) scratch_size = AMX_KV_SCRATCH;
    scratch_size += group * width;
    workspace.scratch = allocate<float>(args.threads * scratch_size);
    workspace.logits = allocate<float>(owners * group * slots);
    workspace.partials = allocate<float>(owners * workspace.parts * group * workspace.size);
    if (!workspace.scratch || !workspace.logits || !workspace.partials) return NO_MEMORY;
    const auto scratch = [&] { return workspace.scratch.get() + thread_index() * scratch_size; };
    const auto logits = [&](int64_t owner) { return workspace.logits.get() + owner * group * slots; };
    // Consecutive tasks run on one thread, so that it soon reads the data that it prefetches.
    const int64_t tasks = split ? heads * workspace.parts : heads,
                  chunk = tasks / (CHUNKS_PER_THREAD * args.threads);
#pragma omp parallel for schedule(dynamic, chunk > 0 ? chunk : 1) num_threads(args.threads)
    for (int64_t task = 0; task < tasks; task++) {
        const Head head(args, split ? task / workspace.parts : task);
        const int64_t owner = split ? head.index : thread_index();
        const int64_t first = split ? task % workspace.parts : 0,
                      last = split ? first : workspace.parts - 1;
        for (int64_t part = first; part <= last && part < head.parts(); part++)
            attend_part<T>(head, workspace, owner, part, scratch(), logits(owner));
        if (!split) finish<T>(head, workspace, owner, scratch(), logits(owner));
    }
    if (!split) return DONE;
#pragma omp parallel for schedule(dynamic) num_threads(args.threads)
    for (int64_t index = 0; index < heads; index++)
        finish<T>(Head(args, index), workspace, index, scratch(), logits(index));
    return DONE;
}

}  // namespace

FLOAT_MATMULS()

int decode_attention(const DecodeAttention& args) { BY_DTYPE(decode) }

}  // namespace ISA
