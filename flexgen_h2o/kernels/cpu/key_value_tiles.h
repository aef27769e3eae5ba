// Keys and values of a head as right operands of AMX tiles, shared by all its queries.
//
// A tile of keys has pairs of elements in its rows and one key per column. A tile of values has pairs
// of keys in its rows and one element per column. Tiles are stored in the order in which
// prefill_tiles.h reads them, in pairs: keys [tokens / PAIR, dim / DEPTH, 2], values [chunks, dim /
// PAIR, KEY_CHUNK / DEPTH, 2].
#pragma once

#include "amx.h"
#include "memory.h"
#include "prefill.h"

#if defined(TILES)

namespace ISA {

constexpr int64_t SIDE = TILE_ROWS;          // rows of a tile, and its columns in words
constexpr int64_t DEPTH = 2 * TILE_PAIRS;    // reduction depth of one tile matmul
constexpr int64_t TILE = SIDE * TILE_PAIRS;  // words
constexpr int64_t PAIR = 2 * SIDE;           // queries, keys or dimensions of 2 x 2 tiles
constexpr int64_t KEY_CHUNK = 128;           // keys whose logits fit in the L1 cache
static_assert(KEY_CHUNK % PAIR == 0 && PAIR == DEPTH, "whole pairs of tiles");

INLINE int64_t up_to(int64_t multiple, int64_t x) {
    return (x + multiple - 1) / multiple * multiple;
}

class KeyValueTiles {
public:
    bool make(int64_t head_dim, int64_t longest) {
        dim = up_to(PAIR, head_dim);
        const int64_t words = up_to(KEY_CHUNK, longest) * dim / 2;
        keys = memory<uint32_t>(words);
        values = memory<uint32_t>(words);
        return keys && values;
    }

    // Start another head.
    void start() { packed = 0; }

    // Pack keys and values from `begin` to `seen`, padded to whole tiles. Packed tokens are kept.
    // Tokens before `begin` are not read again.
    void pack(const Lanes& of, int64_t begin, int64_t seen) {
        begin = begin / PAIR * PAIR;
        if (packed < begin) packed = begin;
        const PrefillAttention& a = of.a;
        for (; packed < seen; packed += PAIR) {
            const int64_t left = of.sequence.tokens - packed;
            const bf16 *k = of.key<bf16>(packed), *v = of.value<bf16>(packed);
            for (int64_t t = 0; t < PAIR; t += SIDE)
                pack_keys(k + t * a.k_row, a.k_row, left - t, a.head_dim,
                          keys.get() + packed * dim / 2 + t / SIDE * TILE);
            for (int64_t t = 0; t < PAIR; t += 2) {
                const bf16* low = v + t * a.v_row;
                pack_values(t < left ? low : nullptr, t + 1 < left ? low + a.v_row : nullptr,
                            a.head_dim, values_at(packed) + t / 2 * TILE_PAIRS);
            }
        }
    }

    int64_t count() const { return packed; }
    int64_t width() const { return dim; }  // head_dim rounded up to whole tiles

    // Return the key tiles from `token` on: two for each DEPTH elements of PAIR keys.
    const uint32_t* keys_at(int64_t token) const { return keys.get() + token * dim / 2; }
    // Return the value tiles of a chunk from `token` on and PAIR elements from `element` on: two for
    // each DEPTH tokens.
    const uint32_t* values_at(int64_t token, int64_t element) const {
        return values_at(token) + element / PAIR * CHUNK_WORDS;
    }

private:
    static constexpr int64_t CHUNK_WORDS = KEY_CHUNK / DEPTH * 2 * TILE;  // of PAIR elements

    uint32_t* values_at(int64_t token) const {
        const int64_t inside = token % KEY_CHUNK;
        return values.get() + (token - inside) * dim / 2 + inside / DEPTH * 2 * TILE;
    }

    // Transpose rows of keys to columns of tiles, in pairs of elements.
    void pack_keys(const bf16* from, int64_t row, int64_t left, int64_t head_dim,
                   uint32_t* to) const {
        const int64_t count = left > SIDE ? SIDE : left;
        typedef uint32_t Line __attribute__((vector_size(TILE_BYTES)));
        for (int64_t i = 0; i < dim; i += DEPTH, to += 2 * TILE) {
            Line rows[SIDE];
            if (count == SIDE && head_dim - i >= DEPTH) {
                for (int64_t t = 0; t < SIDE; t++) rows[t] = load_raw<Line>(from + t * row + i);
            } else {
                const int64_t valid = head_dim - i < DEPTH ? head_dim - i : DEPTH;
                std::memset(rows, 0, sizeof rows);
                for (int64_t t = 0; t < count; t++)
                    if (valid > 0)
                        std::memcpy(rows + t, from + t * row + i, static_cast<size_t>(valid) * 2);
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

    // Interleave two values into a row of tiles, element by element. Null means zeros.
    void pack_values(const bf16* low, const bf16* high, int64_t head_dim, uint32_t* first) const {
        for (int64_t i = 0; i < dim; i += SIDE) {
            const int64_t left = head_dim - i;
            uint32_t* to = first + i / PAIR * CHUNK_WORDS + i % PAIR / SIDE * TILE;
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

    Memory<uint32_t> keys, values;
    int64_t dim = 0, packed = 0;
};

}  // namespace ISA

#endif
