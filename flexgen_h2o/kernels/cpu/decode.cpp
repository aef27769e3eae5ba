// decode_attention: attention of one new token over the slots of a cache, score update, choice of the
// evicted slot and the write into it.
//
// The slots of a KV head of a sequence are attended to in parts of PART_SLOTS, whose results are combined
// in order. So results depend neither on the number of threads nor on the other sequences. A task is a
// head, or one of its parts if there are few heads. All query heads of the group share one read of the
// keys and values.
#include <math.h>

#include "decode_tiles.h"
#include "memory.h"
#include "products.h"

namespace ISA {
namespace {

static_assert(PART_SLOTS % SLOT_TILE == 0, "whole tiles");
constexpr int TURNS = 16;  // chunks of tasks per thread, if there are enough

int64_t padded(int64_t x) { return (x + WIDTH - 1) / WIDTH * WIDTH; }

struct Head {
    const DecodeAttention& a;
    int64_t index, sequence, kv_head, group, width, cached;

    Head(const DecodeAttention& a, int64_t index)
        : a(a), index(index), sequence(index / a.kv_heads), kv_head(index % a.kv_heads),
          group(a.heads / a.kv_heads), width(padded(a.head_dim)), cached(a.metadata[sequence]) {}

    int64_t parts() const { return (cached + PART_SLOTS - 1) / PART_SLOTS; }

    // Return the offset of the logits of query `g`.
    float offset(int64_t g) const {
        return a.form.offsets ? a.form.offsets[sequence * a.heads + kv_head * group + g] *
                                    logit_scale(a.form, a.head_dim)
                              : 0;
    }
    // Return the constants of this head's keys.
    const float* of_keys(const float* constants) const {
        return constants ? constants + kv_head * a.head_dim : nullptr;
    }
    int64_t metadata(int row) const { return a.metadata[row * a.sequences + sequence]; }
    // Return the offset of this head in the eviction state tensors.
    int64_t first() const { return (sequence * a.kv_heads + kv_head) * a.num_slots; }

    template <class T>
    T* slots(int kind) const {
        return static_cast<T*>(a.slots) + slot_start(a, kind, sequence, kv_head, 0);
    }
};

// Convert a new vector to floats [width]. If positions roll, rotate it to the newest rank.
template <class T>
void unpack(const Head& h, const T* from, float* to, bool rolls) {
    const DecodeAttention& a = h.a;
    to_floats(from, a.head_dim, to);
    for (int64_t i = a.head_dim; i < h.width; i++) to[i] = 0;
    if (!rolls) return;
    const float *c = a.cos + h.cached * a.half_rotary, *s = a.sin + h.cached * a.half_rotary;
    for (int64_t i = 0; i < a.half_rotary; i++) {
        float x = to[i], y = to[i + a.half_rotary];
        to[i] = x * c[i] - y * s[i];
        to[i + a.half_rotary] = y * c[i] + x * s[i];
    }
}

template <class T>
void queries(const Head& h, float* q) {
    const float scale = logit_scale(h.a.form, h.a.head_dim);
    const T* from = static_cast<const T*>(h.a.q) + h.sequence * h.a.q_row +
                    h.kv_head * h.group * h.a.q_head;
    for (int64_t g = 0; g < h.group; g++) {
        float* to = q + g * h.width;
        unpack(h, from + g * h.a.q_head, to, h.a.ranks != nullptr);
        for (int64_t i = 0; i < h.width; i += WIDTH) store(to + i, load(to + i) * scale);
    }
}

// Call f with the reader for the cached keys (kind 0) or values (kind 1) of a head.
template <class T, class F>
void with_rows(const Head& h, int kind, float* scratch, F f) {
    const DecodeAttention& a = h.a;
    const Layout& layout = layout_of(a, kind);
    const int32_t* ranks = kind == 0 && a.ranks ? a.ranks + h.first() : nullptr;
    if (layout.bits == 16) {
        const T* base = h.slots<T>(kind);
        if (!ranks && a.head_dim == h.width) {
            f(PlainRows<T>{base, a.slots_slot});
        } else {
            f(ConvertedRows<T>{base, a.slots_slot, a.head_dim, h.width, layout, ranks, a.cos,
                               a.sin, a.half_rotary, nullptr, nullptr, scratch});
        }
        return;
    }
    const uint8_t* base = h.slots<uint8_t>(kind);
    const bool suits =
        layout.bits == 8 ? QuantizedTile<8>::suits(layout) : QuantizedTile<4>::suits(layout);
    if (ranks || !suits)
        f(ConvertedRows<uint8_t>{base, a.slots_slot, a.head_dim, h.width, layout, ranks, a.cos,
                                 a.sin, a.half_rotary, ranks ? h.of_keys(a.factor) : nullptr,
                                 h.of_keys(a.shift), scratch});
    else if (layout.bits == 8)
        f(QuantizedRows<8>{base, a.slots_slot, layout, scratch});
    else
        f(QuantizedRows<4>{base, a.slots_slot, layout, scratch});
}

// If a head's keys or values can use tiles, call f with their reader and return true.
template <class F>
bool with_tiles(const Head& h, int kind, float* scratch, F f) {
#if defined(TILES)
    const DecodeAttention& a = h.a;
    const Layout& layout = layout_of(a, kind);
    if (layout.bits != 4 || layout.group != default_group(4, a.head_dim) || a.ranks ||
        h.group < MIN_TILED_QUERIES || h.group > MAX_TILED_QUERIES || h.cached < MIN_TILED_SLOTS)
        return false;
    const uint8_t* base = h.slots<uint8_t>(kind);
    switch (a.head_dim) {
        case 64: f(TiledKVHead<64>(base, a.slots_slot, layout, h.group, scratch)); return true;
        case 128: f(TiledKVHead<128>(base, a.slots_slot, layout, h.group, scratch)); return true;
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

// Scratch memory of one call. A place in it is for one head at a time: each thread has one, or each head
// if its parts are tasks.
struct Space {
    int64_t parts, stride, size;  // most parts of a head; stride of logits per query; floats of a Partial
    Memory<float> scratch, logits, partials;
};

Partial partial(const Head& h, const Space& space, int64_t place, int64_t part, int64_t g) {
    float* at = space.partials.get() + ((place * space.parts + part) * h.group + g) * space.size;
    return {at[0], at[1], at + 2};
}

void span(const Head& h, int64_t part, int64_t& begin, int64_t& end) {
    begin = part * PART_SLOTS;
    end = begin + PART_SLOTS < h.cached ? begin + PART_SLOTS : h.cached;
}

// Finish the logits of slots `begin` to `end` for query `g`: add the offset, apply the soft cap, and
// mask slots outside the window.
void form_logits(const Head& h, int64_t g, float* row, int64_t begin, int64_t end) {
    const float cap = static_cast<float>(h.a.form.softcap), offset = h.offset(g);
    if (offset != 0)
        for (int64_t t = begin; t < end; t += WIDTH) store(row + t, load(row + t) + offset);
    if (cap > 0)  // elements past the end are overwritten later
        for (int64_t t = begin; t < end; t += WIDTH) store(row + t, soft_capped(load(row + t), cap));
    if (!h.a.window) return;
    const int32_t* positions = h.a.positions + h.first();
    const int64_t hidden = h.metadata(1) - 1 - h.a.window;  // this position and older ones are masked
    for (int64_t t = begin; t < end; t++)
        if (positions[t] <= hidden) row[t] = MASKED;
}

// Replace the logits of slots `begin` to `end` for query `g` by weights exp(logit - top). Initialize
// the partial attention: top, total and output.
void weigh(const Head& h, int64_t g, float* row, int64_t begin, int64_t end, float* to) {
    const int64_t stop = begin + padded(end - begin);
    form_logits(h, g, row, begin, end);
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
void multiply_keys(const Head& h, const Rows& rows, const Queries& to, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t += SLOT_TILE) {
        const int64_t count = t + SLOT_TILE < end ? SLOT_TILE : end - t;
        const auto tile = rows.tile(t, count);
        by_queries(h.group, [&](auto G, int64_t g) {
            key_products<G()>(tile, {to.q + g * to.width, to.width, to.row + g * to.stride + t,
                                     to.stride}, count);
        });
    }
}

// out [queries, apart] += weights of slots `begin` to `end` @ their values.
template <class Rows>
void multiply_values(const Head& h, const Rows& rows, const Queries& weights, int64_t begin,
                     int64_t end, float* out, int64_t apart) {
    for (int64_t t = begin; t < end; t += SLOT_TILE) {
        const int64_t count = t + SLOT_TILE < end ? SLOT_TILE : end - t;
        const auto tile = rows.tile(t, count);
        by_queries(h.group, [&](auto G, int64_t g) {
            value_products<G()>(tile, {nullptr, weights.width, weights.row + g * weights.stride + t,
                                       weights.stride}, count, out + g * apart, apart);
        });
    }
}

template <class T>
void attend_part(const Head& h, const Space& space, int64_t place, int64_t part, float* scratch,
                 float* logits) {
    float* q = scratch;
    float* space_of_tile = scratch + h.group * h.width;
    int64_t begin, end;
    span(h, part, begin, end);
    queries<T>(h, q);
    const bool tiled = with_tiles(h, 0, space_of_tile, [&](const auto& head_tiles) {
        const auto* raw = static_cast<const bf16*>(h.a.q) + h.sequence * h.a.q_row +
                          h.kv_head * h.group * h.a.q_head;
        head_tiles.keys(raw, h.a.q_head, q, logit_scale(h.a.form, h.a.head_dim), begin, end, logits,
                        space.stride);
    });
    if (!tiled)
        with_rows<T>(h, 0, space_of_tile, [&](const auto& rows) {
            multiply_keys(h, rows, {q, h.width, logits, space.stride}, begin, end);
        });
    for (int64_t g = 0; g < h.group; g++)
        weigh(h, g, logits + g * space.stride, begin, end, partial(h, space, place, part, g).out - 2);
    float* out = partial(h, space, place, part, 0).out;
    const auto add_values = [&](const auto& head_tiles) {
        head_tiles.values(logits, space.stride, begin, end, out, space.size);
    };
    if (with_tiles(h, 1, space_of_tile, add_values)) return;
    with_rows<T>(h, 1, space_of_tile, [&](const auto& rows) {
        multiply_values(h, rows, {nullptr, h.width, logits, space.stride}, begin, end, out,
                        space.size);
    });
}

// Return the evictable slot with the lowest score. Ties go to the oldest slot. Each lane searches
// separately.
int64_t victim(const Head& h) {
    const int64_t first = h.first();
    const int32_t tokens = static_cast<int32_t>(h.metadata(1));
    const int32_t safe = tokens - static_cast<int32_t>(h.metadata(2));
    const int32_t sinks = static_cast<int32_t>(h.a.sinks);
    const int32_t window = static_cast<int32_t>(h.a.window);
    const float* scores = h.a.scores + first;
    const int32_t* positions = h.a.positions + first;
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
        if (h.a.mean) score /= __builtin_convertvector(tokens - position, Floats);
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
    const DecodeAttention& a = h.a;
    const bool full = h.metadata(3);
    const int64_t slot = full ? victim(h) : h.cached, first = h.first();
    a.scores[first + slot] = weight;
    a.positions[first + slot] = static_cast<int32_t>(h.metadata(1) - 1);
    if (a.ranks) {
        int32_t* ranks = a.ranks + first;
        if (full) {
            const int32_t gone = ranks[slot];
            for (int64_t t = 0; t < h.cached; t++) ranks[t] -= ranks[t] > gone;
        }
        ranks[slot] = static_cast<int32_t>(h.cached - full);
    }
    return slot;
}

// Add the attention weights of one query, times `factor`, to the scores of the slots.
INLINE void add_received(float* scores, const float* weights, int64_t begin, int64_t end,
                         float keep, float factor) {
    int64_t t = begin;
    for (; t + WIDTH <= end; t += WIDTH)
        store(scores + t, load(scores + t) * keep + load(weights + t) * factor);
    for (; t < end; t++) scores[t] = scores[t] * keep + weights[t] * factor;
}

// Combine the partial attentions of a query with the new token to an output [width]. Update the scores
// of the slots. Return the attention weight of the new token.
float combine(const Head& h, const Space& space, int64_t place, int64_t g, const float* q,
              const float* key, const float* value, const float* logits, float* out) {
    const DecodeAttention& a = h.a;
    Floats products{};
    for (int64_t i = 0; i < h.width; i += WIDTH)
        products = fma(load(q + g * h.width + i), load(key + i), products);
    float logit = sum(products) + h.offset(g);
    if (a.form.softcap > 0) {
        const float cap = static_cast<float>(a.form.softcap);
        logit = cap * tanhf(logit / cap);
    }
    const float sink = a.form.sinks ? a.form.sinks[h.kv_head * h.group + g] : MASKED;
    float top = fmaxf(logit, sink);
    for (int64_t p = 0; p < h.parts(); p++) top = fmaxf(top, partial(h, space, place, p, g).top);
    const float new_weight = expf(logit - top);
    float total = new_weight;
    if (a.form.sinks) total += expf(sink - top);
    for (int64_t p = 0; p < h.parts(); p++) {
        const Partial part = partial(h, space, place, p, g);
        total += part.total * expf(part.top - top);
    }
    for (int64_t i = 0; i < h.width; i += WIDTH) store(out + i, load(value + i) * new_weight);
    for (int64_t p = 0; p < h.parts(); p++) {
        const Partial part = partial(h, space, place, p, g);
        const float factor = expf(part.top - top);
        for (int64_t i = 0; i < h.width; i += WIDTH)
            store(out + i, load(out + i) + load(part.out + i) * factor);
        if (!a.scores) continue;
        int64_t begin, end;
        span(h, p, begin, end);
        add_received(a.scores + h.first(), logits + g * space.stride, begin, end,
                     g == 0 ? static_cast<float>(a.decay) : 1.0f, factor / total);
    }
    for (int64_t i = 0; i < h.width; i += WIDTH) store(out + i, load(out + i) / total);
    return new_weight / total;
}

template <class T>
void finish(const Head& h, const Space& space, int64_t place, float* scratch,
            const float* logits) {
    const DecodeAttention& a = h.a;
    float *q = scratch, *key = scratch + h.group * h.width, *value = key + h.width;
    float* sums = value + h.width;
    const T* new_key = static_cast<const T*>(a.k) + h.sequence * a.k_row + h.kv_head * a.k_head;
    const T* new_value = static_cast<const T*>(a.v) + h.sequence * a.v_row + h.kv_head * a.v_head;
    queries<T>(h, q);
    unpack(h, new_key, key, a.ranks != nullptr);
    unpack(h, new_value, value, false);
    float new_received = 0;
    for (int64_t g = 0; g < h.group; g++) {
        new_received += combine(h, space, place, g, q, key, value, logits, sums);
        T* out = static_cast<T*>(a.out) +
                 (h.sequence * a.heads + h.kv_head * h.group + g) * a.head_dim;
        from_floats(sums, a.head_dim, out);
    }
    const int64_t slot = a.scores ? assign_slot(h, new_received) : h.cached;
    uint8_t* quantized = reinterpret_cast<uint8_t*>(scratch);
    T* smoothed = reinterpret_cast<T*>(value);
    if (a.factor) {
        const float *factor = h.of_keys(a.factor), *shift = h.of_keys(a.shift);
        to_floats(new_key, a.head_dim, key);
        for (int64_t i = 0; i < a.head_dim; i++) key[i] = key[i] * factor[i] + shift[i];
        hadamard(key, a.head_dim);
        from_floats(key, a.head_dim, smoothed);
    }
    write_slot(a, a.key_layout, slot_start(a, 0, h.sequence, h.kv_head, slot),
               a.factor ? smoothed : new_key, quantized);
    write_slot(a, a.value_layout, slot_start(a, 1, h.sequence, h.kv_head, slot), new_value, quantized);
    a.written_slots[h.index] = slot;
}

// Return whether all slots and positions of the call are in range.
bool valid(const DecodeAttention& a) {
    for (int64_t s = 0; s < a.sequences; s++) {
        const int64_t cached = a.metadata[s];
        const bool evicts = a.scores && a.metadata[3 * a.sequences + s];
        // A new token replaces the evicted slot, or uses the next slot, which must be free.
        if (cached < evicts || cached > a.num_slots - !evicts) return false;
        if (!a.ranks) continue;
        if (cached >= a.rope_rows) return false;
        for (int64_t head = 0; head < a.kv_heads; head++) {
            const int32_t* ranks = a.ranks + (s * a.kv_heads + head) * a.num_slots;
            for (int64_t t = 0; t < cached; t++)
                if (ranks[t] < 0 || ranks[t] >= a.rope_rows) return false;
        }
    }
    return true;
}

template <class T>
int decode(const DecodeAttention& a) {
    if (!valid(a)) return INVALID;
    const int64_t heads = a.sequences * a.kv_heads, group = a.heads / a.kv_heads;
    const int64_t width = padded(a.head_dim), slots = padded(a.num_slots) + SLOT_TILE;
    Space space;
    space.parts = (a.num_slots + PART_SLOTS - 1) / PART_SLOTS;
    space.stride = slots;
    space.size = width + WIDTH;
    const bool split = heads < MIN_TASKS && space.parts > 1;
    const int64_t places = split ? heads : a.threads;
    int64_t scratch_size = (SLOT_TILE + 3) * width;
    if (scratch_size < TILED_KV_SCRATCH) scratch_size = TILED_KV_SCRATCH;
    scratch_size += group * width;
    space.scratch = memory<float>(a.threads * scratch_size);
    space.logits = memory<float>(places * group * slots);
    space.partials = memory<float>(places * space.parts * group * space.size);
    if (!space.scratch || !space.logits || !space.partials) return NO_MEMORY;
    const auto scratch = [&] { return space.scratch.get() + thread_number() * scratch_size; };
    const auto logits = [&](int64_t place) { return space.logits.get() + place * group * slots; };
    // Consecutive tasks run on one thread, so that it soon reads the data that it prefetches.
    const int64_t tasks = split ? heads * space.parts : heads, turn = tasks / (TURNS * a.threads);
#pragma omp parallel for schedule(dynamic, turn > 0 ? turn : 1) num_threads(a.threads)
    for (int64_t task = 0; task < tasks; task++) {
        const Head head(a, split ? task / space.parts : task);
        const int64_t place = split ? head.index : thread_number();
        const int64_t first = split ? task % space.parts : 0, last = split ? first : space.parts - 1;
        for (int64_t part = first; part <= last && part < head.parts(); part++)
            attend_part<T>(head, space, place, part, scratch(), logits(place));
        if (!split) finish<T>(head, space, place, scratch(), logits(place));
    }
    if (!split) return DONE;
#pragma omp parallel for schedule(dynamic) num_threads(a.threads)
    for (int64_t index = 0; index < heads; index++)
        finish<T>(Head(a, index), space, index, scratch(), logits(index));
    return DONE;
}

}  // namespace

FLOAT_PRODUCTS()

int decode_attention(const DecodeAttention& a) { BY_DTYPE(decode) }

}  // namespace ISA
