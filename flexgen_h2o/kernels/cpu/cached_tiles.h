// Cached vectors in decode: their addresses, and tiles of up to SLOT_TILE of them.
#pragma once

#include "groups.h"
#include "prefetch.h"
#include "vector_math.h"

namespace ISA {

constexpr int64_t LINE_BYTES = 64;        // of a cache line
constexpr int64_t PREFETCH_BYTES = 4096;  // prefetch distance, in bytes
constexpr int64_t PREFETCH_ROWS = 16;     // prefetch distance for rows at arbitrary addresses
constexpr int64_t VALUE_ROWS = 16;  // rows whose values are accumulated before the next rows

// Return the default group size: elements of a vector of 64 or 128 that share a scale.
constexpr int64_t default_group(int bits, int64_t dim) { return bits == 4 && dim == 64 ? 32 : 64; }

// Return the rows of keys, or the vectors of a value, in a register block with `queries` queries.
constexpr int register_vectors(int queries) { return WIDTH == 8 && queries == 4 ? 2 : 4; }

// A tile of up to SLOT_TILE rows of cached vectors: plain, or converted to floats in scratch memory.
template <class T>
struct PlainTile {
    const T* base;
    int64_t stride;
    static constexpr int register_rows(int queries) { return register_vectors(queries); }
    INLINE Floats at(int64_t row, int64_t i) const { return load(base + row * stride + i); }
    // Prefetch data ahead of element `i` of R rows at each possible line start, and again at half a
    // line. Each line is prefetched while another is used. Prefetching several rows at once would fill
    // the miss buffers and stall the computation.
    template <int R>
    INLINE void prefetch(int64_t row, int64_t i) const {
        if (i * static_cast<int64_t>(sizeof(T)) % LINE_BYTES) return;
        for (int64_t r = row; r < row + R; r++) {
            const char* address = reinterpret_cast<const char*>(base + r * stride + i);
            ISA::prefetch(address + 2 * PREFETCH_BYTES, L2);
            ISA::prefetch(address + PREFETCH_BYTES, L2);
        }
    }
};

// A tile of rows at arbitrary slots, with the slot list that it is a part of.
template <class T>
struct GatheredTile {
    const T* const* rows;
    const T* base;
    int64_t stride, dim;
    const int32_t* slots;  // of this tile's rows and the following ones
    int64_t left;          // remaining slots in the list
    static constexpr int register_rows(int queries) { return register_vectors(queries); }
    INLINE Floats at(int64_t row, int64_t i) const { return load(rows[row] + i); }
    template <int R>
    INLINE void prefetch(int64_t row, int64_t i) const {
        if (i * static_cast<int64_t>(sizeof(T)) % LINE_BYTES) return;
        prefetch_rows(row + 2 * PREFETCH_ROWS, R, i);
        prefetch_rows(row + PREFETCH_ROWS, R, i);
    }
    // Prefetch the first rows.
    INLINE void prefetch_first() const {
        for (int64_t i = 0; i < dim; i += LINE_BYTES / static_cast<int64_t>(sizeof(T)))
            prefetch_rows(0, PREFETCH_ROWS, i);
    }
    INLINE void prefetch_rows(int64_t first, int64_t count, int64_t i) const {
        for (int64_t r = first; r < first + count && r < left; r++)
            ISA::prefetch(base + slots[r] * stride + i, nearest_cache());
    }
};

// A tile of quantized groups whose groups are whole vectors. It computes with the quantized values.
// Scales are applied once per group and zero points once per query, not per element.
template <int bits>
struct QuantizedTile {
    const uint8_t* base;
    int64_t stride;
    const GroupLayout& layout;
    float* scratch;

    static bool supports(const GroupLayout& layout) {
        // With 4 bits, elements i and i + half share a byte. Both halves must consist of whole groups,
        // or of one group.
        const int64_t half = layout.groups * layout.group / 2;
        // Groups of fewer than 8 elements need more scratch memory than there is.
        return layout.group % WIDTH == 0 && layout.group >= 8 &&
               (bits == 8 || (half % WIDTH == 0 && (layout.groups == 1 || layout.groups % 2 == 0)));
    }
    static constexpr int register_rows(int queries) { return register_vectors(queries); }
    // Return the bytes of quantized values that share a scale, out of `bytes`.
    int64_t group_bytes(int64_t bytes) const { return layout.group < bytes ? layout.group : bytes; }
    // Prefetch data ahead of byte `i` of R rows at every half line, because entries are not aligned.
    // The scales of the next tile are all read at its start.
    template <int R>
    INLINE void prefetch(int64_t row, int64_t i) const {
        if (i % (LINE_BYTES / 2)) return;
        for (int64_t r = row + SLOT_TILE; r < row + SLOT_TILE + R; r++)
            ISA::prefetch(base + r * stride + i + PREFETCH_BYTES, L2);
    }
    // Each is [groups, SLOT_TILE].
    INLINE float* scales() const { return scratch; }
    INLINE float* zeros() const { return scratch + layout.groups * SLOT_TILE; }
    // Weights times scales [queries, groups, SLOT_TILE].
    INLINE float* scaled() const { return scratch + 2 * layout.groups * SLOT_TILE; }
};

// The rows of a cache, and their conversion to tiles.
template <class T>
struct PlainRows {
    const T* base;
    int64_t stride;
    INLINE PlainTile<T> tile(int64_t first, int64_t) const {
        return {base + first * stride, stride};
    }
};

template <int bits>
struct QuantizedRows {
    const uint8_t* base;
    int64_t stride;
    const GroupLayout& layout;
    float* scratch;
    NOINLINE QuantizedTile<bits> tile(int64_t first, int64_t count) const {
        uint32_t raw[SLOT_TILE];  // two scales or zero points each
        for (int64_t i = 0; i < layout.groups; i++) {
            const uint8_t* from = base + first * stride + layout.code_bytes + 4 * i;
#pragma GCC unroll 8
            for (int64_t t = 0; t < count; t++) std::memcpy(raw + t, from + t * stride, 4);
            for (int64_t t = count; t % WIDTH; t++) raw[t] = 0;
            float* to = scratch + 2 * i * SLOT_TILE;
            for (int64_t t = 0; t < count; t += WIDTH) {
                const Words both = load_raw<Words>(raw + t);
                store(to + t, from_halves(both & 0xffff));
                store(to + SLOT_TILE + t, from_halves(both >> 16));
            }
        }
        return {base + first * stride, stride, layout, scratch};
    }
};

// The general path converts rows to floats: rotation by rank, unusual head sizes and groups.
template <class T>
struct ConvertedRows {
    const T* base;
    int64_t stride, dim, width;
    const GroupLayout& layout;
    const int32_t* ranks;  // null if there is no rotation
    const float *cos, *sin;
    int64_t half_rotary;
    const float *factor, *shift;  // inverse smoothing of the keys of this head, or null
    float* scratch;  // [SLOT_TILE, width]
    NOINLINE PlainTile<float> tile(int64_t first, int64_t count) const {
        for (int64_t t = 0; t < count; t++) {
            float* to = scratch + t * width;
            const T* from = base + (first + t) * stride;
            if constexpr (sizeof(T) == 1)
                dequantize_row(from, to, layout);
            else
                to_floats(from, dim, to);
            for (int64_t i = dim; i < width; i++) to[i] = 0;
            if (factor) restore(to);
            if (ranks) rotate(to, ranks[first + t]);
        }
        return {scratch, width};
    }
    void restore(float* x) const {
        hadamard(x, dim);
        for (int64_t i = 0; i < dim; i++) x[i] = (x[i] - shift[i]) / factor[i];
    }
    INLINE void rotate(float* x, int64_t position) const {
        const float *c = cos + position * half_rotary, *s = sin + position * half_rotary;
        for (int64_t i = 0; i < half_rotary; i++) {
            float a = x[i], b = x[i + half_rotary];
            x[i] = a * c[i] - b * s[i];
            x[i + half_rotary] = b * c[i] + a * s[i];
        }
    }
};

}  // namespace ISA
