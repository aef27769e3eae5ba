// decode_attention: attention of one new token over the slots of a cache, score update, choice of
// the victim and the write into its slot.
//
// A task is a part of the slots of one KV head of one sequence; all query heads of the group share
// its one read of the keys and of the values. The number of parts depends on shapes alone, so that
// results do not depend on the number of threads.
#include <cmath>
#include <limits>
#include <type_traits>

#include "groups.h"
#include "memory.h"

namespace ISA {
namespace {

constexpr int TILE = 64;             // slots that are expanded together where they have to be
constexpr int FEWEST_TASKS = 64;     // so many are worth making out of few heads
constexpr int PART_SLOTS = 256;      // and a part has at least so many slots
constexpr float NONE = -std::numeric_limits<float>::infinity();
constexpr int32_t EMPTY = 0x7fffffff;

int64_t padded(int64_t x) { return (x + WIDTH - 1) / WIDTH * WIDTH; }

// Up to TILE rows of cached vectors as they are computed with: plain ones, or floats in scratch.
template <class T>
struct PlainTile {
    const T* base;
    int64_t stride;
    INLINE Floats at(int64_t row, int64_t i) const { return load(base + row * stride + i); }
};

// Records whose groups are whole vectors, computed with as codes: scales and zero points come in
// once for a group and once for a query, not with each element.
template <int bits>
struct RecordTile {
    const uint8_t* base;
    int64_t stride;
    const Layout& layout;
    float* scratch;

    static bool suits(const Layout& layout) {
        // With 4 bits elements i and i + half share a byte: both lie in whole groups, or in one.
        const int64_t half = layout.groups * layout.group / 2;
        return layout.group % WIDTH == 0 &&
               (bits == 8 || (half % WIDTH == 0 && (layout.groups == 1 || layout.groups % 2 == 0)));
    }
    // [groups, TILE] each.
    INLINE float* scales() const { return scratch; }
    INLINE float* zeros() const { return scratch + layout.groups * TILE; }
    // Weights by scale [queries, groups, TILE].
    INLINE float* scaled() const { return scratch + 2 * layout.groups * TILE; }
};

// Where rows lie, and how some of them come to be a tile.
template <class T>
struct PlainRows {
    const T* base;
    int64_t stride;
    INLINE PlainTile<T> tile(int64_t first, int64_t) const {
        return {base + first * stride, stride};
    }
};

template <int bits>
struct RecordRows {
    const uint8_t* base;
    int64_t stride;
    const Layout& layout;
    float* scratch;
    INLINE RecordTile<bits> tile(int64_t first, int64_t count) const {
        fp16 raw[TILE];
        for (int64_t i = 0; i < 2 * layout.groups; i++) {
            const uint8_t* from = base + first * stride + layout.code_bytes + 2 * i;
            for (int64_t t = 0; t < count; t++) std::memcpy(raw + t, from + t * stride, 2);
            for (int64_t t = count; t % WIDTH; t++) raw[t].bits = 0;
            for (int64_t t = 0; t < count; t += WIDTH) store(scratch + i * TILE + t, load(raw + t));
        }
        return {base + first * stride, stride, layout, scratch};
    }
};

// Everything else goes through floats: rotation by rank, odd head sizes and groups.
template <class T>
struct ExpandedRows {
    const T* base;
    int64_t stride, dim, width;
    const Layout& layout;
    const int32_t* ranks;  // null: no rotation
    const float *cos, *sin;
    int64_t half_rotary;
    float* scratch;  // [TILE, width]
    INLINE PlainTile<float> tile(int64_t first, int64_t count) const {
        for (int64_t t = 0; t < count; t++) {
            float* to = scratch + t * width;
            const T* from = base + (first + t) * stride;
            if constexpr (sizeof(T) == 1) {
                dequantize_row(from, to, layout);
            } else {
                int64_t i = 0;
                for (; i + WIDTH <= dim; i += WIDTH) store(to + i, load(from + i));
                for (; i < dim; i++) to[i] = one(from + i);
            }
            for (int64_t i = dim; i < width; i++) to[i] = 0;
            if (ranks) turn(to, ranks[first + t]);
        }
        return {scratch, width};
    }
    INLINE void turn(float* x, int64_t position) const {
        const float *c = cos + position * half_rotary, *s = sin + position * half_rotary;
        for (int64_t i = 0; i < half_rotary; i++) {
            float a = x[i], b = x[i + half_rotary];
            x[i] = a * c[i] - b * s[i];
            x[i + half_rotary] = b * c[i] + a * s[i];
        }
    }
};

constexpr int64_t AHEAD = 4096;  // bytes: what memory sends while so much is computed with

// Asks for what lies AHEAD of `count` rows.
template <class Tile>
INLINE void prefetch(const Tile& tile, int64_t row, int64_t count) {
    const char* from = reinterpret_cast<const char*>(tile.base + row * tile.stride) + AHEAD;
    const int64_t bytes = count * tile.stride * static_cast<int64_t>(sizeof *tile.base);
    for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(from + byte, 0, 2);
}

// Queries [G, width] of a block and where their logits or weights go, `stride` apart.
struct Queries {
    const float* q;
    int64_t width;
    float* row;
    int64_t stride;
};

// R rows from `row` on: their logits for G queries.
template <int R, int G, class T>
INLINE void key_rows(const PlainTile<T>& tile, const Queries& to, int64_t row) {
    Floats total[G][R];
    for (int g = 0; g < G; g++)
        for (int r = 0; r < R; r++) total[g][r] = Floats{};
    for (int64_t i = 0; i < to.width; i += WIDTH)
        for (int r = 0; r < R; r++) {
            const Floats x = tile.at(row + r, i);
            for (int g = 0; g < G; g++)
                total[g][r] = fma(x, load(to.q + g * to.width + i), total[g][r]);
        }
    for (int g = 0; g < G; g++)
        if constexpr (R == 4)
            sums(total[g], to.row + g * to.stride + row);
        else
            to.row[g * to.stride + row] = sum(total[g][0]);
}

// `size` elements of R rows from `start` on: the sums of codes by queries, times the scales. With 4
// bits those in the high halves are elements `half` further.
template <int R, int G, int bits>
INLINE void key_run(const RecordTile<bits>& tile, const Queries& to, int64_t row, int64_t start,
                    int64_t size, Floats (*total)[R]) {
    const int64_t half = to.width / 2, groups = tile.layout.groups, group = tile.layout.group;
    Floats low[G][R], high[G][R];
    for (int g = 0; g < G; g++)
        for (int r = 0; r < R; r++) low[g][r] = high[g][r] = Floats{};
    for (int64_t i = start; i < start + size; i += WIDTH)
        for (int r = 0; r < R; r++) {
            const Ints bytes = widen(tile.base + (row + r) * tile.stride + i);
            const Floats x = bits == 8 ? code<WHOLE>(bytes) : code<LOW>(bytes);
            for (int g = 0; g < G; g++)
                low[g][r] = fma(x, load(to.q + g * to.width + i), low[g][r]);
            if (bits == 8) continue;
            const Floats y = code<HIGH>(bytes);
            for (int g = 0; g < G; g++) {
                Floats& mine = groups == 1 ? low[g][r] : high[g][r];
                mine = fma(y, load(to.q + g * to.width + half + i), mine);
            }
        }
    const float* scale = tile.scales() + start / group * TILE + row;
    const float* other = tile.scales() + (start + half) / group * TILE + row;
    for (int g = 0; g < G; g++)
        for (int r = 0; r < R; r++) {
            total[g][r] = fma(low[g][r], spread(scale[r]), total[g][r]);
            if (bits == 4 && groups > 1)
                total[g][r] = fma(high[g][r], spread(other[r]), total[g][r]);
        }
}

template <int R, int G, int bits>
INLINE void key_rows(const RecordTile<bits>& tile, const Queries& to, int64_t row) {
    const Layout& layout = tile.layout;
    const int64_t bytes = bits == 8 ? to.width : to.width / 2;
    Floats total[G][R];
    for (int g = 0; g < G; g++)
        for (int r = 0; r < R; r++) total[g][r] = Floats{};
    if (layout.group == 64 && layout.groups > 1)  // as a constant: the loop unrolls
        for (int64_t start = 0; start < bytes; start += 64)
            key_run<R, G>(tile, to, row, start, 64, total);
    else
        for (int64_t start = 0; start < bytes; start += layout.group)
            key_run<R, G>(tile, to, row, start, layout.group < bytes ? layout.group : bytes,
                          total);
    for (int g = 0; g < G; g++)
        if constexpr (R == 4)
            sums(total[g], to.row + g * to.stride + row);
        else
            to.row[g * to.stride + row] = sum(total[g][0]);
}

template <class T>
INLINE void add_zeros(const PlainTile<T>&, const Queries&, int64_t, int64_t) {}

// What the zero points of the keys add to the logits of query g.
template <int bits>
INLINE void add_zeros(const RecordTile<bits>& tile, const Queries& to, int64_t g, int64_t count) {
    const int64_t group = tile.layout.group;
    for (int64_t k = 0; k < tile.layout.groups; k++) {
        Floats all{};
        for (int64_t i = 0; i < group; i += WIDTH)
            all += load(to.q + g * to.width + k * group + i);
        const float part = sum(all), *zeros = tile.zeros() + k * TILE;
        float* row = to.row + g * to.stride;
        for (int64_t t = 0; t < count; t++) row[t] += part * zeros[t];
    }
}

// Logits of the first `count` rows of a tile.
template <int G, class Tile>
INLINE void key_products(const Tile& tile, const Queries& to, int64_t count) {
    int64_t row = 0;
    for (; row + 4 <= count; row += 4) {
        prefetch(tile, row, 4);
        key_rows<4, G>(tile, to, row);
    }
    for (; row < count; row++) key_rows<1, G>(tile, to, row);
    for (int g = 0; g < G; g++) add_zeros(tile, to, g, count);
}

// out[g] += weight[g][t] times row t, for N vectors from `column` on and G queries; outputs lie
// `apart`.
template <int G, int N, class T>
INLINE void value_block(const PlainTile<T>& tile, const Queries& weights, int64_t count,
                        int64_t column, float* out, int64_t apart) {
    Floats sums[G][N];
    for (int g = 0; g < G; g++)
        for (int n = 0; n < N; n++) sums[g][n] = load(out + g * apart + column + n * WIDTH);
    for (int64_t t = 0; t < count; t++) {
        if (column == 0 && t % 4 == 0) prefetch(tile, t, 4);
        for (int n = 0; n < N; n++) {
            const Floats x = tile.at(t, column + n * WIDTH);
            for (int g = 0; g < G; g++)
                sums[g][n] = fma(spread(weights.row[g * weights.stride + t]), x, sums[g][n]);
        }
    }
    for (int g = 0; g < G; g++)
        for (int n = 0; n < N; n++) store(out + g * apart + column + n * WIDTH, sums[g][n]);
}

template <int G, class T>
INLINE void value_products(const PlainTile<T>& tile, const Queries& weights, int64_t count,
                           float* out, int64_t apart) {
    constexpr int N = G == 1 ? 8 : 4;
    int64_t column = 0;
    for (; column + N * WIDTH <= weights.width; column += N * WIDTH)
        value_block<G, N>(tile, weights, count, column, out, apart);
    for (; column + 2 * WIDTH <= weights.width; column += 2 * WIDTH)
        value_block<G, 2>(tile, weights, count, column, out, apart);
    for (; column < weights.width; column += WIDTH)
        value_block<G, 1>(tile, weights, count, column, out, apart);
}

// The same of N vectors of codes and, with 4 bits, of as many in their high halves.
template <int G, int N, int bits>
INLINE void value_block(const RecordTile<bits>& tile, int64_t count, int64_t column, float* out,
                        int64_t apart) {
    const int64_t groups = tile.layout.groups, group = tile.layout.group;
    const int64_t half = groups * group / 2;
    constexpr int SIDES = bits == 4 ? 2 : 1;
    Floats sums[G][SIDES][N];
    const float* scaled[G][SIDES][N];
    for (int g = 0; g < G; g++)
        for (int side = 0; side < SIDES; side++)
            for (int n = 0; n < N; n++) {
                const int64_t at = column + side * half + n * WIDTH;
                sums[g][side][n] = load(out + g * apart + at);
                scaled[g][side][n] = tile.scaled() + (g * groups + at / group) * TILE;
            }
    for (int64_t t = 0; t < count; t++) {
        if (column == 0 && t % 4 == 0) prefetch(tile, t, 4);
        for (int n = 0; n < N; n++) {
            const Ints bytes = widen(tile.base + t * tile.stride + column + n * WIDTH);
            for (int side = 0; side < SIDES; side++) {
                const Floats x = bits == 8   ? code<WHOLE>(bytes)
                                 : side == 0 ? code<LOW>(bytes)
                                             : code<HIGH>(bytes);
                for (int g = 0; g < G; g++)
                    sums[g][side][n] = fma(x, spread(scaled[g][side][n][t]), sums[g][side][n]);
            }
        }
    }
    for (int g = 0; g < G; g++)
        for (int side = 0; side < SIDES; side++)
            for (int n = 0; n < N; n++)
                store(out + g * apart + column + side * half + n * WIDTH, sums[g][side][n]);
}

template <int G, int bits>
INLINE void value_products(const RecordTile<bits>& tile, const Queries& weights, int64_t count,
                           float* out, int64_t apart) {
    const int64_t groups = tile.layout.groups, group = tile.layout.group;
    for (int g = 0; g < G; g++)
        for (int64_t k = 0; k < groups; k++) {
            const float *weight = weights.row + g * weights.stride;
            const float *scales = tile.scales() + k * TILE, *zeros = tile.zeros() + k * TILE;
            float zero = 0, *scaled = tile.scaled() + (g * groups + k) * TILE;
            for (int64_t t = 0; t < count; t++) {
                scaled[t] = weight[t] * scales[t];
                zero += weight[t] * zeros[t];
            }
            for (int64_t i = 0; i < group; i += WIDTH) {
                float* to = out + g * apart + k * group + i;
                store(to, load(to) + zero);
            }
        }
    constexpr int N = (G == 4 ? 4 : 8) / (bits == 4 ? 2 : 1);
    const int64_t columns = bits == 4 ? weights.width / 2 : weights.width;
    int64_t column = 0;
    for (; column + N * WIDTH <= columns; column += N * WIDTH)
        value_block<G, N>(tile, count, column, out, apart);
    for (; column < columns; column += WIDTH)
        value_block<G, 1>(tile, count, column, out, apart);
}

// Calls f(G, g) so that blocks of G query heads from g on make up the group.
template <class F>
INLINE void by_queries(int64_t group, F f) {
    int64_t g = 0;
    for (; g + 4 <= group; g += 4) f(std::integral_constant<int, 4>{}, g);
    if (g + 2 <= group) f(std::integral_constant<int, 2>{}, g), g += 2;
    if (g < group) f(std::integral_constant<int, 1>{}, g);
}

struct Head {
    const Decode& a;
    int64_t sequence, kv_head, group, width, cached;

    Head(const Decode& a, int64_t index)
        : a(a), sequence(index / a.kv_heads), kv_head(index % a.kv_heads),
          group(a.heads / a.kv_heads), width(padded(a.head_dim)), cached(a.turn[sequence]) {}

    int64_t turn(int row) const { return a.turn[row * a.sequences + sequence]; }
    // Of the book's tensors.
    int64_t first() const { return (sequence * a.kv_heads + kv_head) * a.num_slots; }

    template <class T>
    T* slots(int kind) const {
        return static_cast<T*>(a.slots) + kind * a.slots_kind + sequence * a.slots_sequence +
               kv_head * a.slots_head;
    }
};

// A new vector as floats [width], rotated to the newest rank if positions roll.
template <class T>
void unpack(const Head& h, const T* from, float* to, bool rolls) {
    const Decode& a = h.a;
    for (int64_t i = 0; i < a.head_dim; i++) to[i] = one(from + i);
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
    const float scale = 1.0f / std::sqrt(static_cast<float>(h.a.head_dim));
    const T* from = static_cast<const T*>(h.a.q) + h.sequence * h.a.q_row +
                    h.kv_head * h.group * h.a.q_head;
    for (int64_t g = 0; g < h.group; g++) {
        unpack(h, from + g * h.a.q_head, q + g * h.width, h.a.ranks != nullptr);
        for (int64_t i = 0; i < h.width; i++) q[g * h.width + i] *= scale;
    }
}

// Calls f with the reader that suits the cached keys (kind 0) or values (kind 1) of a head.
template <class T, class F>
void with_rows(const Head& h, int kind, float* scratch, F f) {
    const Decode& a = h.a;
    const Layout& layout = a.layout;
    const int32_t* ranks = kind == 0 && a.ranks ? a.ranks + h.first() : nullptr;
    if (layout.bits == 16) {
        const T* base = h.slots<T>(kind);
        if (!ranks && a.head_dim == h.width) {
            f(PlainRows<T>{base, a.slots_slot});
        } else {
            f(ExpandedRows<T>{base, a.slots_slot, a.head_dim, h.width, layout, ranks, a.cos,
                              a.sin, a.half_rotary, scratch});
        }
        return;
    }
    const uint8_t* base = h.slots<uint8_t>(kind);
    const bool suits =
        layout.bits == 8 ? RecordTile<8>::suits(layout) : RecordTile<4>::suits(layout);
    if (ranks || !suits)
        f(ExpandedRows<uint8_t>{base, a.slots_slot, a.head_dim, h.width, layout, ranks, a.cos,
                                a.sin, a.half_rotary, scratch});
    else if (layout.bits == 8)
        f(RecordRows<8>{base, a.slots_slot, layout, scratch});
    else
        f(RecordRows<4>{base, a.slots_slot, layout, scratch});
}

// What a part of a head's slots gives for one query: with weights exp(logit - top).
struct Partial {
    float top, total;
    float* out;  // [width]: the values by their weights
};

// Memory of one call.
struct Space {
    int64_t parts, stride, size;  // stride: of logits, by query; size: floats of a Partial
    Memory<float> scratch, logits, partials;
};

Partial partial(const Head& h, const Space& space, int64_t index, int64_t part, int64_t g) {
    float* at = space.partials.get() + ((index * space.parts + part) * h.group + g) * space.size;
    return {at[0], at[1], at + 2};
}

void span(const Head& h, const Space& space, int64_t part, int64_t& begin, int64_t& end) {
    const int64_t tiles = (h.cached + TILE - 1) / TILE;
    begin = tiles * part / space.parts * TILE;
    end = tiles * (part + 1) / space.parts * TILE;
    if (end > h.cached) end = h.cached;
}

template <class T>
void attend_part(const Head& h, const Space& space, int64_t index, int64_t part, float* scratch,
                 float* logits) {
    float* q = scratch;
    float* space_of_tile = scratch + h.group * h.width;
    int64_t begin, end;
    span(h, space, part, begin, end);
    queries<T>(h, q);
    with_rows<T>(h, 0, space_of_tile, [&](const auto& rows) {
        for (int64_t t = begin; t < end; t += TILE) {
            const int64_t count = t + TILE < end ? TILE : end - t;
            const auto tile = rows.tile(t, count);
            by_queries(h.group, [&](auto G, int64_t g) {
                key_products<G()>(tile, Queries{q + g * h.width, h.width,
                                                logits + g * space.stride + t, space.stride},
                                  count);
            });
        }
    });
    const int64_t stop = begin + padded(end - begin);
    for (int64_t g = 0; g < h.group; g++) {
        float *row = logits + g * space.stride, *at = partial(h, space, index, part, g).out - 2;
        for (int64_t t = end; t < stop; t++) row[t] = NONE;
        Floats most = spread(NONE), total{};
        for (int64_t t = begin; t < stop; t += WIDTH) most = larger(load(row + t), most);
        at[0] = widest(most);
        for (int64_t t = begin; t < stop; t += WIDTH) {
            const Floats e = exp(load(row + t) - at[0]);
            store(row + t, e);
            total += e;
        }
        at[1] = sum(total);
        for (int64_t i = 0; i < h.width; i++) at[2 + i] = 0;
    }
    float* out = partial(h, space, index, part, 0).out;
    with_rows<T>(h, 1, space_of_tile, [&](const auto& rows) {
        for (int64_t t = begin; t < end; t += TILE) {
            const int64_t count = t + TILE < end ? TILE : end - t;
            const auto tile = rows.tile(t, count);
            by_queries(h.group, [&](auto G, int64_t g) {
                value_products<G()>(tile, Queries{nullptr, h.width,
                                                  logits + g * space.stride + t, space.stride},
                                    count, out + g * space.size, space.size);
            });
        }
    });
}

// The slot with the lowest score that may go; of equals the oldest. Each lane finds its own.
int64_t victim(const Head& h) {
    const int64_t first = h.first();
    const int32_t tokens = static_cast<int32_t>(h.turn(1));
    const int32_t safe = tokens - static_cast<int32_t>(h.turn(2));
    const int32_t sinks = static_cast<int32_t>(h.a.sinks);
    const float* mass = h.a.mass + first;
    const int32_t* positions = h.a.positions + first;
    Floats lowest = spread(std::numeric_limits<float>::infinity());
    Ints oldest = Ints{} + EMPTY, found{}, slot{};
    for (int i = 0; i < WIDTH; i++) slot[i] = i;
    for (int64_t t = 0; t < h.cached; t += WIDTH, slot += WIDTH) {
        Floats score{};
        Ints position = Ints{} + EMPTY;
        if (t + WIDTH <= h.cached) {
            score = load(mass + t);
            position = load_raw<Ints>(positions + t);
        } else {
            const size_t some = static_cast<size_t>(h.cached - t);
            std::memcpy(&score, mass + t, some * sizeof *mass);
            std::memcpy(&position, positions + t, some * sizeof *positions);
        }
        if (h.a.mean) score /= __builtin_convertvector(tokens - position, Floats);
        const Ints better = (position >= sinks) & (position < safe) &
                            ((score < lowest) | ((score == lowest) & (position < oldest)));
        lowest = better ? score : lowest;
        oldest = better ? position : oldest;
        found = better ? slot : found;
    }
    int best = 0;
    for (int i = 1; i < WIDTH; i++)
        if (lowest[i] < lowest[best] || (lowest[i] == lowest[best] && oldest[i] < oldest[best]))
            best = i;
    return found[best];
}

template <class T>
void write_slot(const Head& h, int kind, const T* from, int64_t slot, uint8_t* codes) {
    const Layout& layout = h.a.layout;
    if (layout.bits == 16)
        std::memcpy(h.slots<T>(kind) + slot * h.a.slots_slot, from,
                    static_cast<size_t>(h.a.head_dim) * sizeof(T));
    else
        quantize_row(from, h.slots<uint8_t>(kind) + slot * h.a.slots_slot, layout, codes);
}

// Notes the new token, whose own attention is `own`, and gives it its slot.
int64_t take_slot(const Head& h, float own) {
    const Decode& a = h.a;
    const bool full = h.turn(3);
    const int64_t slot = full ? victim(h) : h.cached, first = h.first();
    a.mass[first + slot] = own;
    a.positions[first + slot] = static_cast<int32_t>(h.turn(1) - 1);
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

// Adds to the scores what one query gave to each slot: its weights times `factor`.
INLINE void add_received(float* mass, const float* weights, int64_t begin, int64_t end,
                         float keep, float factor) {
    int64_t t = begin;
    for (; t + WIDTH <= end; t += WIDTH)
        store(mass + t, load(mass + t) * keep + load(weights + t) * factor);
    for (; t < end; t++) mass[t] = mass[t] * keep + weights[t] * factor;
}

template <class T>
void finish(const Head& h, const Space& space, int64_t index, float* scratch,
            const float* logits) {
    const Decode& a = h.a;
    float *q = scratch, *key = scratch + h.group * h.width, *value = key + h.width;
    float* sums = value + h.width;
    const T* new_key = static_cast<const T*>(a.k) + h.sequence * a.k_row + h.kv_head * a.k_head;
    const T* new_value = static_cast<const T*>(a.v) + h.sequence * a.v_row + h.kv_head * a.v_head;
    queries<T>(h, q);
    unpack(h, new_key, key, a.ranks != nullptr);
    unpack(h, new_value, value, false);
    float own_received = 0;
    for (int64_t g = 0; g < h.group; g++) {
        Floats products{};
        for (int64_t i = 0; i < h.width; i += WIDTH)
            products = fma(load(q + g * h.width + i), load(key + i), products);
        const float own = sum(products);
        float top = own;
        for (int64_t p = 0; p < space.parts; p++)
            top = std::fmax(top, partial(h, space, index, p, g).top);
        const float own_weight = std::exp(own - top);
        float total = own_weight;
        for (int64_t p = 0; p < space.parts; p++) {
            const Partial some = partial(h, space, index, p, g);
            total += some.total * std::exp(some.top - top);
        }
        own_received += own_weight / total;
        for (int64_t i = 0; i < h.width; i++) sums[i] = value[i] * own_weight;
        for (int64_t p = 0; p < space.parts; p++) {
            const Partial some = partial(h, space, index, p, g);
            const float factor = std::exp(some.top - top);
            for (int64_t i = 0; i < h.width; i++) sums[i] += some.out[i] * factor;
        }
        T* out = static_cast<T*>(a.out) +
                 (h.sequence * a.heads + h.kv_head * h.group + g) * a.head_dim;
        for (int64_t i = 0; i < a.head_dim; i++) put(out + i, sums[i] / total);
        for (int64_t p = 0; a.mass && p < space.parts; p++) {
            int64_t begin, end;
            span(h, space, p, begin, end);
            add_received(a.mass + h.first(), logits + g * space.stride, begin, end,
                         g == 0 ? static_cast<float>(a.decay) : 1.0f,
                         std::exp(partial(h, space, index, p, g).top - top) / total);
        }
    }
    const int64_t slot = a.mass ? take_slot(h, own_received) : h.cached;
    uint8_t* codes = reinterpret_cast<uint8_t*>(scratch);
    write_slot(h, 0, new_key, slot, codes);
    write_slot(h, 1, new_value, slot, codes);
    a.taken[index] = slot;
}

template <class T>
int decode(const Decode& a) {
    const int64_t heads = a.sequences * a.kv_heads, group = a.heads / a.kv_heads;
    const int64_t width = padded(a.head_dim), slots = padded(a.num_slots) + TILE;
    Space space;
    space.parts = (FEWEST_TASKS + heads - 1) / (heads ? heads : 1);
    const int64_t most = (a.num_slots + PART_SLOTS - 1) / PART_SLOTS;
    if (space.parts > most) space.parts = most ? most : 1;
    space.stride = slots;
    space.size = width + WIDTH;
    const bool split = space.parts > 1;
    const int64_t each = group * width + (TILE + 3) * width;
    space.scratch = memory<float>(a.threads * each);
    space.logits = memory<float>((split ? heads : a.threads) * group * slots);
    space.partials = memory<float>(heads * space.parts * group * space.size);
    if (!space.scratch || !space.logits || !space.partials) return NO_MEMORY;
    const auto logits = [&](int64_t index, int thread) {
        return space.logits.get() + (split ? index : thread) * group * slots;
    };
#pragma omp parallel for schedule(dynamic) num_threads(a.threads)
    for (int64_t task = 0; task < heads * space.parts; task++) {
        const int64_t index = task / space.parts;
        const int thread = thread_number();
        const Head head(a, index);
        float* scratch = space.scratch.get() + thread * each;
        attend_part<T>(head, space, index, task % space.parts, scratch, logits(index, thread));
        if (!split) finish<T>(head, space, index, scratch, logits(index, thread));
    }
    if (!split) return DONE;
#pragma omp parallel for schedule(dynamic) num_threads(a.threads)
    for (int64_t index = 0; index < heads; index++)
        finish<T>(Head(a, index), space, index,
                  space.scratch.get() + thread_number() * each, logits(index, 0));
    return DONE;
}

}  // namespace

int decode_attention(const Decode& a) {
    switch (a.dtype) {
        case BFLOAT16: return decode<bf16>(a);
        case FLOAT16: return decode<fp16>(a);
        default: return decode<float>(a);
    }
}

}  // namespace ISA
