// index_keys, choose_keys and attend_recalled: an index of keys in 4 or 2 bits, the choice of the
// cached tokens that one new token attends to, and attention over exactly these.
//
// A task is one KV head of one sequence; all query heads of the group share its one read of the
// index, of the keys and of the values. In the index the lanes of a vector are tokens, so that
// nothing is added up across lanes, and codes meet queries without going through memory. Nothing is
// sorted: a radix selection finds the least weight that is chosen.
#include <math.h>
#include <type_traits>

#include "groups.h"
#include "memory.h"

namespace ISA {
namespace {

constexpr int BINS = 2048;
constexpr int PARTS = INDEX_TILE / WIDTH;  // vectors of a row of a tile
constexpr int FEW_ROWS = 256;              // that one thread indexes sooner than it wakes others
constexpr int ROWS_AHEAD = 12;             // rows that memory sends while others are computed with

int64_t padded(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// Calls f(G, g) so that blocks of G query heads from g on make up the group.
template <class F>
INLINE void by_queries(int64_t group, F f) {
    int64_t g = 0;
    for (; g + 4 <= group; g += 4) f(std::integral_constant<int, 4>{}, g);
    if (g + 2 <= group) f(std::integral_constant<int, 2>{}, g), g += 2;
    if (g < group) f(std::integral_constant<int, 1>{}, g);
}

// The sum of a vector, through memory: where GCC 12 inlines `sum`, -Wuninitialized finds an
// undefined vector in its own header.
INLINE float lanes_sum(Floats x) {
    float lanes[WIDTH], total = 0;
    store(lanes, x);
    for (const float lane : lanes) total += lane;
    return total;
}

// What a tile consists of: see config/index_layout.py.
struct TileShape {
    int64_t dim, bits, groups, group, per_byte, code_rows, bytes;

    TileShape(int64_t dim, int64_t bits, int64_t groups)
        : dim(dim), bits(bits), groups(groups), group(dim / groups), per_byte(8 / bits),
          code_rows(dim / per_byte), bytes(INDEX_TILE * (code_rows + 4 * groups)) {}
};

// ---- index_keys

INLINE void group_codes(const float* x, int64_t count, float levels, uint8_t* codes,
                        uint16_t& scale_bits, uint16_t& zero_bits) {
    float low, high;
    bounds(x, count, low, high);
    zero_bits = to_half(low);
    const float zero = from_half(zero_bits);
    float scale = (high - zero) / levels;
    scale = scale < 0 ? 0 : scale > HALF_MAX ? HALF_MAX : scale;
    scale_bits = to_half(scale);
    scale = from_half(scale_bits);
    const float step = scale < TINY ? TINY : scale;
    for (int64_t i = 0; i < count; i++) {
        const float code = nearbyintf((clamped_one(x + i) - zero) / step);
        codes[i] = static_cast<uint8_t>(code < 0 ? 0 : code > levels ? levels : code);
    }
}

template <class T>
void index_one(const IndexKeys& a, const TileShape& shape, const void* keys, int64_t row,
               uint8_t* index, int64_t token, float* x, uint8_t* codes) {
    if (a.layout.bits == 16) {
        const T* from = static_cast<const T*>(keys) + row * a.keys_slot;
        for (int64_t i = 0; i < a.head_dim; i++) x[i] = one(from + i);
    } else {
        dequantize_row(static_cast<const uint8_t*>(keys) + row * a.keys_slot, x, a.layout);
    }
    const int64_t lane = token % INDEX_TILE;
    uint8_t* tile = index + token / INDEX_TILE * shape.bytes + lane;
    uint8_t* scales = tile - lane + INDEX_TILE * shape.code_rows + 2 * lane;
    uint8_t* zeros = scales + 2 * INDEX_TILE * shape.groups;
    const float levels = shape.bits == 4 ? 15.0f : 3.0f;
    for (int64_t k = 0; k < shape.groups; k++) {
        uint16_t scale, zero;
        group_codes(x + k * shape.group, shape.group, levels, codes + k * shape.group, scale, zero);
        std::memcpy(scales + 2 * INDEX_TILE * k, &scale, 2);
        std::memcpy(zeros + 2 * INDEX_TILE * k, &zero, 2);
    }
    for (int64_t r = 0; r < shape.code_rows; r++) {
        const uint8_t* some = codes + r * shape.per_byte;
        tile[r * INDEX_TILE] = static_cast<uint8_t>(
            shape.bits == 4 ? some[0] | some[1] << 4
                            : some[0] | some[1] << 2 | some[2] << 4 | some[3] << 6);
    }
}

template <class T>
int index_all(const IndexKeys& a) {
    const TileShape shape(a.head_dim, a.bits, a.groups);
    for (int64_t s = 0; s < a.sequences; s++) {
        const int64_t first = a.spans[s], token = a.spans[a.sequences + s],
                      count = a.spans[2 * a.sequences + s];
        if (first < 0 || token < 0 || count < 0 || first + count > a.num_keys ||
            token + count > a.num_tiles * INDEX_TILE)
            return INVALID;
    }
    const Memory<float> floats = memory<float>(a.threads * a.head_dim);
    const Memory<uint8_t> codes = memory<uint8_t>(a.threads * a.head_dim);
    if (!floats || !codes) return NO_MEMORY;
    int64_t rows = 0;
    for (int64_t s = 0; s < a.sequences; s++) rows += a.kv_heads * a.spans[2 * a.sequences + s];
#pragma omp parallel for schedule(dynamic) num_threads(a.threads) if (rows > FEW_ROWS)
    for (int64_t task = 0; task < a.sequences * a.kv_heads; task++) {
        const int64_t s = task / a.kv_heads, head = task % a.kv_heads, thread = thread_number();
        const int64_t first = a.spans[s], token = a.spans[a.sequences + s],
                      count = a.spans[2 * a.sequences + s];
        const int64_t at = s * a.keys_sequence + head * a.keys_head;
        const void* keys = a.layout.bits == 16
                               ? static_cast<const void*>(static_cast<const T*>(a.keys) + at)
                               : static_cast<const uint8_t*>(a.keys) + at;
        uint8_t* index =
            static_cast<uint8_t*>(a.index) + s * a.index_sequence + head * a.index_head;
        for (int64_t i = 0; i < count; i++)
            index_one<T>(a, shape, keys, first + i, index, token + i,
                         floats.get() + thread * a.head_dim, codes.get() + thread * a.head_dim);
    }
    return DONE;
}

// ---- choose_keys

// Queries of a head, scaled [group, dim], and the sums of their groups of elements [group, groups].
template <class T, class A>
void queries(const A& a, int64_t sequence, int64_t head, int64_t width, float* q) {
    const int64_t group = a.heads / a.kv_heads;
    const float scale = a.form.scale > 0 ? static_cast<float>(a.form.scale)
                                         : 1.0f / sqrtf(static_cast<float>(a.head_dim));
    const T* from = static_cast<const T*>(a.q) + sequence * a.q_row + head * group * a.q_head;
    for (int64_t g = 0; g < group; g++) {
        float* to = q + g * width;
        for (int64_t i = 0; i < a.head_dim; i++) to[i] = one(from + g * a.q_head + i) * scale;
        for (int64_t i = a.head_dim; i < width; i++) to[i] = 0;
    }
}

template <int BITS, int part>
INLINE Floats code_of(Ints bytes) {
    if constexpr (BITS == 4) return part == 0 ? code<LOW>(bytes) : code<HIGH>(bytes);
    return __builtin_convertvector(bytes >> (2 * part) & 3, Floats);
}

// `f(part)` for each code of a byte.
template <int BITS, class F>
INLINE void by_parts(F f) {
    f(std::integral_constant<int, 0>{});
    f(std::integral_constant<int, 1>{});
    if constexpr (BITS == 2) {
        f(std::integral_constant<int, 2>{});
        f(std::integral_constant<int, 3>{});
    }
}

// Logits of N tiles for G queries.
template <int G, int N, int BITS>
INLINE void scan_tiles(const uint8_t* tile, const TileShape& shape, const float* q,
                       const float* sums, float* logits, int64_t stride) {
    constexpr int PER_BYTE = 8 / BITS, VECTORS = N * PARTS;
    Floats total[G][VECTORS];
    for (int g = 0; g < G; g++)
        for (int n = 0; n < VECTORS; n++) total[g][n] = Floats{};
    const int64_t rows = shape.group / PER_BYTE;
    const uint8_t* halves = tile + INDEX_TILE * shape.code_rows;
    for (int64_t k = 0; k < shape.groups; k++) {
        Floats some[G][VECTORS];
        for (int g = 0; g < G; g++)
            for (int n = 0; n < VECTORS; n++) some[g][n] = Floats{};
        for (int64_t r = k * rows; r < (k + 1) * rows; r++) {
            Ints bytes[VECTORS];
            for (int n = 0; n < VECTORS; n++)
                bytes[n] = widen(tile + n / PARTS * shape.bytes + r * INDEX_TILE +
                                 n % PARTS * WIDTH);
            by_parts<BITS>([&](auto part) {
                constexpr int PART = part();
                Floats x[VECTORS];
                for (int n = 0; n < VECTORS; n++) x[n] = code_of<BITS, PART>(bytes[n]);
                for (int g = 0; g < G; g++) {
                    const Floats y = broadcast(q[g * shape.dim + r * PER_BYTE + PART]);
                    for (int n = 0; n < VECTORS; n++) some[g][n] = fma(x[n], y, some[g][n]);
                }
            });
        }
        for (int n = 0; n < VECTORS; n++) {
            const uint8_t* mine = halves + n / PARTS * shape.bytes +
                                  2 * (k * INDEX_TILE + n % PARTS * WIDTH);
            const Floats scale = load(reinterpret_cast<const fp16*>(mine));
            const Floats zero =
                load(reinterpret_cast<const fp16*>(mine + 2 * INDEX_TILE * shape.groups));
            for (int g = 0; g < G; g++)
                total[g][n] = fma(broadcast(sums[g * shape.groups + k]), zero,
                                  fma(some[g][n], scale, total[g][n]));
        }
    }
    for (int g = 0; g < G; g++)
        for (int n = 0; n < VECTORS; n++) store(logits + g * stride + n * WIDTH, total[g][n]);
}

// Logits [group, stride] of all tiles.
template <int BITS>
void scan(const uint8_t* index, const TileShape& shape, int64_t tiles, int64_t group,
          const float* q, const float* sums, float* logits, int64_t stride) {
    constexpr int N = WIDTH == 16 ? 2 : 1;
    for (int64_t t = 0; t < tiles;) {
        const int64_t n = t + N <= tiles ? N : 1;
        const uint8_t* tile = index + t * shape.bytes;
        for (int64_t i = 0; i < n * shape.bytes; i += 64)
            __builtin_prefetch(tile + 2 * N * shape.bytes + i, 0, 2);
        by_queries(group, [&](auto G, int64_t g) {
            const float *mine = q + g * shape.dim, *sum = sums + g * shape.groups;
            float* to = logits + g * stride + t * INDEX_TILE;
            if (n == N)
                scan_tiles<G(), N, BITS>(tile, shape, mine, sum, to, stride);
            else
                scan_tiles<G(), 1, BITS>(tile, shape, mine, sum, to, stride);
        });
        t += n;
    }
}

// weights [stride] += the softmax of a row of logits, of which the first `count` are some, beside
// the logits `own` and `sink`. The row is overwritten.
void add_softmax(float* row, int64_t count, int64_t stride, float cap, float own, float sink,
                 float* weights) {
    for (int64_t t = count; t < stride; t++) row[t] = NONE;
    Floats most = broadcast(own > sink ? own : sink);
    for (int64_t t = 0; t < stride; t += WIDTH) {
        if (cap > 0 && t < count) {
            store(row + t, soft_capped(load(row + t), cap));
            for (int64_t i = count; i < t + WIDTH; i++) row[i] = NONE;
        }
        most = larger(load(row + t), most);
    }
    const float top = widest(most);
    Floats total{};
    for (int64_t t = 0; t < stride; t += WIDTH) {
        const Floats e = exp(load(row + t) - top);
        store(row + t, e);
        total += e;
    }
    const float factor = 1.0f / (lanes_sum(total) + expf(own - top) + expf(sink - top));
    for (int64_t t = 0; t < stride; t += WIDTH)
        store(weights + t, fma(load(row + t), broadcast(factor), load(weights + t)));
}

// The numbers of the `wanted` largest of `count` weights, ascending; of equals the last. Weights
// are not negative, and in the order of their bits.
void select(const float* weights, int64_t count, int64_t wanted, uint32_t* bins, int32_t* chosen) {
    const auto key = [&](int64_t i) { return bits_of<uint32_t>(weights[i]) & 0x7fffffff; };
    uint32_t prefix = 0, known = 0;  // the digits of the threshold found so far, and which bits
    int64_t left = wanted, surplus = 0;
    const int shifts[] = {21, 10, 0};
    for (const int shift : shifts) {
        const uint32_t digit = shift == 0 ? 0x3ff : BINS - 1;
        std::memset(bins, 0, BINS * sizeof *bins);
        for (int64_t i = 0; i < count; i++)
            if ((key(i) & known) == prefix) bins[key(i) >> shift & digit]++;
        uint32_t bin = digit;
        while (bins[bin] < left) left -= bins[bin--];
        prefix |= bin << shift;
        known |= digit << shift;
        surplus = bins[bin] - left;
    }
    for (int64_t i = 0; i < count; i++) {
        if (key(i) < prefix) continue;
        if (key(i) == prefix && surplus > 0)
            surplus--;
        else
            *chosen++ = static_cast<int32_t>(i);
    }
}

template <class T>
int choose(const Choose& a) {
    for (int64_t s = 0; s < a.sequences; s++) {
        const int64_t cached = a.metadata[s], count = a.metadata[a.sequences + s];
        if (count < 0 || count > cached || count > a.most || cached > a.num_tiles * INDEX_TILE)
            return INVALID;
    }
    const TileShape shape(a.head_dim, a.bits, a.groups);
    const int64_t group = a.heads / a.kv_heads, longest = a.num_tiles * INDEX_TILE;
    const int64_t each = padded(group * (a.head_dim + a.groups), 16) + (group + 1) * longest;
    const Memory<float> scratch = memory<float>(a.threads * each);
    const Memory<uint32_t> bins = memory<uint32_t>(a.threads * BINS);
    if (!scratch || !bins) return NO_MEMORY;
#pragma omp parallel for schedule(dynamic) num_threads(a.threads)
    for (int64_t task = 0; task < a.sequences * a.kv_heads; task++) {
        const int64_t s = task / a.kv_heads, head = task % a.kv_heads, thread = thread_number();
        const int64_t cached = a.metadata[s], count = a.metadata[a.sequences + s];
        float *q = scratch.get() + thread * each, *sums = q + group * a.head_dim;
        float* logits = q + padded(group * (a.head_dim + a.groups), 16);
        const int64_t stride = padded(cached, INDEX_TILE);
        float* weights = logits + group * stride;
        queries<T>(a, s, head, a.head_dim, q);
        for (int64_t g = 0; g < group; g++)
            for (int64_t k = 0; k < a.groups; k++) {
                float total = 0;
                for (int64_t i = 0; i < shape.group; i++)
                    total += q[g * a.head_dim + k * shape.group + i];
                sums[g * a.groups + k] = total;
            }
        const uint8_t* index =
            static_cast<const uint8_t*>(a.index) + s * a.index_sequence + head * a.index_head;
        (a.bits == 4 ? scan<4> : scan<2>)(index, shape, stride / INDEX_TILE, group, q, sums,
                                          logits, stride);
        const T* key = static_cast<const T*>(a.k) + s * a.k_row + head * a.k_head;
        for (int64_t t = 0; t < stride; t++) weights[t] = 0;
        for (int64_t g = 0; g < group; g++) {
            float own = 0;
            for (int64_t i = 0; i < a.head_dim; i++) own += q[g * a.head_dim + i] * one(key + i);
            const float cap = static_cast<float>(a.form.softcap);
            if (cap > 0) own = cap * tanhf(own / cap);
            add_softmax(logits + g * stride, cached, stride, cap, own,
                        a.form.sinks ? a.form.sinks[head * group + g] : NONE, weights);
        }
        int32_t* chosen = a.chosen + task * a.most;
        select(weights, cached, count, bins.get() + thread * BINS, chosen);
        for (int64_t i = count; i < a.most; i++) chosen[i] = -1;
    }
    return DONE;
}

// ---- attend_recalled

// Rows that lie anywhere: their logits for G queries.
template <int R, int G, class E>
INLINE void key_rows(const E* const* rows, const float* q, int64_t width, float* to,
                     int64_t stride) {
    Floats total[G][4];
    for (int g = 0; g < G; g++)
        for (int r = 0; r < 4; r++) total[g][r] = Floats{};
    for (int64_t i = 0; i < width; i += WIDTH)
        for (int r = 0; r < R; r++) {
            const Floats x = load(rows[r] + i);
            for (int g = 0; g < G; g++)
                total[g][r] = fma(x, load(q + g * width + i), total[g][r]);
        }
    for (int g = 0; g < G; g++)
        if constexpr (R == 4)
            sums(total[g], to + g * stride);
        else
            to[g * stride] = sum(total[g][0]);
}

// out[g] += weight[g][t] times row t, for N vectors from `column` on.
template <int G, int N, class E>
INLINE void value_rows(const E* const* rows, int64_t count, const float* weights, int64_t stride,
                       int64_t column, float* out, int64_t width) {
    Floats sums[G][N];
    for (int g = 0; g < G; g++)
        for (int n = 0; n < N; n++) sums[g][n] = load(out + g * width + column + n * WIDTH);
    for (int64_t t = 0; t < count; t++)
        for (int n = 0; n < N; n++) {
            const Floats x = load(rows[t] + column + n * WIDTH);
            for (int g = 0; g < G; g++)
                sums[g][n] = fma(broadcast(weights[g * stride + t]), x, sums[g][n]);
        }
    for (int g = 0; g < G; g++)
        for (int n = 0; n < N; n++) store(out + g * width + column + n * WIDTH, sums[g][n]);
}

// Where the chosen rows of a head's keys (kind 0) or values are, some of them at a time.
template <class T>
struct Chosen {
    const Recalled& a;
    int64_t sequence, head, width;
    const int32_t* slots;
    float* scratch;  // [SLOT_TILE, width]: rows that are no whole vectors of T

    static bool plain(const Recalled& a) { return a.layout.bits == 16 && a.head_dim % WIDTH == 0; }

    INLINE int64_t start(int kind) const {
        return kind * a.slots_kind + sequence * a.slots_sequence + head * a.slots_head;
    }
    INLINE void lying(int kind, int64_t first, int64_t count, const T** to) const {
        const T* base = static_cast<const T*>(a.slots) + start(kind);
        for (int64_t i = 0; i < count; i++) to[i] = base + slots[first + i] * a.slots_slot;
    }
    void expanded(int kind, int64_t first, int64_t count, const float** to) const {
        for (int64_t i = 0; i < count; i++) {
            float* row = scratch + i * width;
            const int64_t at = start(kind) + slots[first + i] * a.slots_slot;
            if (a.layout.bits == 16) {
                const T* from = static_cast<const T*>(a.slots) + at;
                for (int64_t n = 0; n < a.head_dim; n++) row[n] = one(from + n);
            } else {
                dequantize_row(static_cast<const uint8_t*>(a.slots) + at, row, a.layout);
            }
            for (int64_t n = a.head_dim; n < width; n++) row[n] = 0;
            to[i] = row;
        }
    }
};

template <class E, class T>
INLINE void rows_of(const Chosen<T>& chosen, bool plain, int kind, int64_t first, int64_t count,
                    const E** to) {
    if constexpr (std::is_same<E, T>::value)
        if (plain || !std::is_same<T, float>::value)
            return chosen.lying(kind, first, count, to);
    if constexpr (std::is_same<E, float>::value) chosen.expanded(kind, first, count, to);
}

template <class E>
INLINE void ask(const E* row, int64_t width) {
    const char* from = reinterpret_cast<const char*>(row);
    for (int64_t i = 0; i < width * static_cast<int64_t>(sizeof(E)); i += 64)
        __builtin_prefetch(from + i, 0, 3);
}

// Logits of `count` rows for all queries.
template <class E>
void key_tile(const E* const* rows, int64_t count, int64_t group, const float* q, int64_t width,
              float* logits, int64_t stride) {
    for (int64_t t = 0; t < count && t < ROWS_AHEAD; t++) ask(rows[t], width);
    for (int64_t t = 0; t < count;) {
        const bool four = t + 4 <= count;
        for (int64_t i = t + ROWS_AHEAD; i < count && i < t + ROWS_AHEAD + (four ? 4 : 1); i++)
            ask(rows[i], width);
        by_queries(group, [&](auto G, int64_t g) {
            float* to = logits + g * stride + t;
            if (four)
                key_rows<4, G()>(rows + t, q + g * width, width, to, stride);
            else
                key_rows<1, G()>(rows + t, q + g * width, width, to, stride);
        });
        t += four ? 4 : 1;
    }
}

// out [group, width] += weights by `count` rows.
template <class E>
void value_tile(const E* const* rows, int64_t count, int64_t group, const float* weights,
                int64_t stride, float* out, int64_t width) {
    constexpr int64_t SOME = 16;
    for (int64_t t = 0; t < count && t < SOME; t++) ask(rows[t], width);
    for (int64_t t = 0; t < count; t += SOME) {
        const int64_t n = t + SOME < count ? SOME : count - t;
        for (int64_t i = t + SOME; i < count && i < t + 2 * SOME; i++) ask(rows[i], width);
        by_queries(group, [&](auto G, int64_t g) {
            int64_t column = 0;
            for (; column + 4 * WIDTH <= width; column += 4 * WIDTH)
                value_rows<G(), 4>(rows + t, n, weights + g * stride + t, stride, column,
                                   out + g * width, width);
            for (; column < width; column += WIDTH)
                value_rows<G(), 1>(rows + t, n, weights + g * stride + t, stride, column,
                                   out + g * width, width);
        });
    }
}

// Softmax over a row of logits, the last of which is the new token's, and a sink; in place.
void normalize(float* row, int64_t count, float sink) {
    const int64_t stop = padded(count, WIDTH);
    for (int64_t t = count; t < stop; t++) row[t] = NONE;
    Floats most = broadcast(sink), total{};
    for (int64_t t = 0; t < stop; t += WIDTH) most = larger(load(row + t), most);
    const float top = widest(most);
    for (int64_t t = 0; t < stop; t += WIDTH) {
        const Floats e = exp(load(row + t) - top);
        store(row + t, e);
        total += e;
    }
    const float factor = 1.0f / (lanes_sum(total) + expf(sink - top));
    for (int64_t t = 0; t < stop; t += WIDTH) store(row + t, load(row + t) * factor);
}

template <class T, class E>
void attend_head(const Recalled& a, int64_t task, float* scratch, int64_t width, int64_t stride) {
    const int64_t s = task / a.kv_heads, head = task % a.kv_heads, group = a.heads / a.kv_heads;
    const int64_t place = a.metadata[s], count = a.metadata[a.sequences + s];
    float *q = scratch, *out = q + group * width, *own = out + group * width;
    float *tile = own + width, *logits = tile + SLOT_TILE * width;
    const Chosen<T> chosen{a, s, head, width, a.chosen + task * a.most, tile};
    const T* key = static_cast<const T*>(a.k) + s * a.k_row + head * a.k_head;
    const T* value = static_cast<const T*>(a.v) + s * a.v_row + head * a.v_head;
    queries<T>(a, s, head, width, q);
    const bool plain = Chosen<T>::plain(a);
    const E* rows[SLOT_TILE];
    for (int64_t t = 0; t < count; t += SLOT_TILE) {
        const int64_t n = t + SLOT_TILE < count ? SLOT_TILE : count - t;
        rows_of(chosen, plain, 0, t, n, rows);
        key_tile(rows, n, group, q, width, logits + t, stride);
    }
    for (int64_t g = 0; g < group; g++) {
        float *row = logits + g * stride, last = 0;
        for (int64_t i = 0; i < a.head_dim; i++) last += q[g * width + i] * one(key + i);
        row[count] = last;
        const float cap = static_cast<float>(a.form.softcap);
        if (cap > 0)
            for (int64_t t = 0; t <= count; t += WIDTH)
                store(row + t, soft_capped(load(row + t), cap));
        normalize(row, count + 1, a.form.sinks ? a.form.sinks[head * group + g] : NONE);
        for (int64_t i = 0; i < width; i++) out[g * width + i] = 0;
    }
    for (int64_t t = 0; t < count; t += SLOT_TILE) {
        const int64_t n = t + SLOT_TILE < count ? SLOT_TILE : count - t;
        rows_of(chosen, plain, 1, t, n, rows);
        value_tile(rows, n, group, logits + t, stride, out, width);
    }
    for (int64_t g = 0; g < group; g++) {
        T* to = static_cast<T*>(a.out) + (s * a.heads + head * group + g) * a.head_dim;
        for (int64_t i = 0; i < a.head_dim; i++)
            put(to + i, out[g * width + i] + logits[g * stride + count] * one(value + i));
    }
    for (int kind = 0; kind < 2; kind++) {
        const T* from = kind ? value : key;
        const int64_t at = chosen.start(kind) + place * a.slots_slot;
        if (a.layout.bits == 16)
            std::memcpy(static_cast<T*>(a.slots) + at, from,
                        static_cast<size_t>(a.head_dim) * sizeof(T));
        else
            quantize_row(from, static_cast<uint8_t*>(a.slots) + at, a.layout,
                         reinterpret_cast<uint8_t*>(own));
    }
    a.taken[task] = place;
}

template <class T>
int attend(const Recalled& a) {
    for (int64_t s = 0; s < a.sequences; s++) {
        const int64_t place = a.metadata[s], count = a.metadata[a.sequences + s];
        if (place < 0 || place >= a.num_slots || count < 0 || count > a.most) return INVALID;
        for (int64_t head = 0; head < a.kv_heads; head++)
            for (int64_t i = 0; i < count; i++) {
                const int32_t slot = a.chosen[(s * a.kv_heads + head) * a.most + i];
                if (slot < 0 || slot >= a.num_slots) return INVALID;
            }
    }
    const int64_t group = a.heads / a.kv_heads, width = padded(a.head_dim, WIDTH);
    const int64_t stride = padded(a.most + 1, 16);
    const int64_t each = (2 * group + 1 + SLOT_TILE) * width + group * stride;
    const Memory<float> scratch = memory<float>(a.threads * each);
    if (!scratch) return NO_MEMORY;
    const bool plain = Chosen<T>::plain(a);
#pragma omp parallel for schedule(dynamic) num_threads(a.threads)
    for (int64_t task = 0; task < a.sequences * a.kv_heads; task++) {
        float* mine = scratch.get() + thread_number() * each;
        if (plain)
            attend_head<T, T>(a, task, mine, width, stride);
        else
            attend_head<T, float>(a, task, mine, width, stride);
    }
    return DONE;
}

}  // namespace

#define BY_DTYPE(function)                           \
    switch (a.dtype) {                               \
        case BFLOAT16: return function<bf16>(a);     \
        case FLOAT16: return function<fp16>(a);      \
        default: return function<float>(a);          \
    }

int index_keys(const IndexKeys& a) { BY_DTYPE(index_all) }

int choose_keys(const Choose& a) { BY_DTYPE(choose) }

int attend_recalled(const Recalled& a) { BY_DTYPE(attend) }

}  // namespace ISA
