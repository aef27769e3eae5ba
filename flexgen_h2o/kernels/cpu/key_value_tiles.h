// Keys and values of a head as right operands of AMX tiles, shared by all its queries.
//
// A tile of keys has pairs of elements in its rows and one key per column. A tile of values has pairs
// of keys in its rows and one element per column. Tiles are stored in the order in which prefill_amx.h
// reads them, in pairs: keys [tokens / AMX_BLOCK, dim / AMX_DEPTH, 2], values [chunks, dim /
// AMX_BLOCK, KEY_CHUNK / AMX_DEPTH, 2].
#pragma once

#include "amx.h"
#include "memory.h"
#include "query_block.h"

#if defined(HAS_AMX_TILES)

namespace ISA {

static_assert(KEY_CHUNK % AMX_BLOCK == 0 && AMX_BLOCK == AMX_DEPTH, "whole pairs of tiles");

class KeyValueTiles {
public:
    bool allocate_buffers(int64_t head_dim, int64_t longest) {
        dim = round_up(head_dim, AMX_BLOCK);
        const int64_t words = round_up(longest, KEY_CHUNK) * dim / 2;
        keys = allocate<uint32_t>(words);
        values = allocate<uint32_t>(words);
        return keys && values;
    }

    // Start another head.
    void start() { packed = 0; }

    // Pack keys and values from `begin` to `seen`, padded to whole tiles. Packed tokens are kept.
    // Tokens before `begin` are not read again.
    void pack(const QueryBlock& of, int64_t begin, int64_t seen) {
        begin = begin / AMX_BLOCK * AMX_BLOCK;
        if (packed < begin) packed = begin;
        const PrefillAttention& args = of.args;
        for (; packed < seen; packed += AMX_BLOCK) {
            const int64_t left = of.sequence.tokens - packed;
            const bf16 *k = of.key<bf16>(packed), *v = of.value<bf16>(packed);
            for (int64_t t = 0; t < AMX_BLOCK; t += AMX_ROWS)
                pack_keys(k + t * args.k_row, args.k_row, left - t, args.head_dim,
                          keys.get() + packed * dim / 2 + t / AMX_ROWS * AMX_TILE_WORDS);
            for (int64_t t = 0; t < AMX_BLOCK; t += 2) {
                const bf16* low = v + t * args.v_row;
                pack_values(t < left ? low : nullptr, t + 1 < left ? low + args.v_row : nullptr,
                            args.head_dim, values_at(packed) + t / 2 * AMX_PAIRS);
            }
        }
    }

    int64_t count() const { return packed; }
    int64_t width() const { return dim; }  // head_dim rounded up to whole tiles

    // Return the key tiles from `token` on: two for each AMX_DEPTH elements of AMX_BLOCK keys.
    const uint32_t* keys_at(int64_t token) const { return keys.get() + token * dim / 2; }
    // Return the value tiles of a chunk from `token` on and AMX_BLOCK elements from `element` on: two
    // for each AMX_DEPTH tokens.
    const uint32_t* values_at(int64_t token, int64_t element) const {
        return values_at(token) + element / AMX_BLOCK * CHUNK_WORDS;
    }

private:
    // Of AMX_BLOCK elements.
    static constexpr int64_t CHUNK_WORDS = KEY_CHUNK / AMX_DEPTH * 2 * AMX_TILE_WORDS;

    uint32_t* values_at(int64_t token) const {
        const int64_t inside = token % KEY_CHUNK;
        return values.get() + (token - inside) * dim / 2 + inside / AMX_DEPTH * 2 * AMX_TILE_WORDS;
    }

    // Transpose rows of keys to columns of tiles, in pairs of elements.
    void pack_keys(const bf16* from, int64_t row, int64_t left, int64_t head_dim,
                   uint32_t* to) const {
        const int64_t count = left > AMX_ROWS ? AMX_ROWS : left;
        typedef uint32_t Line __attribute__((vector_size(AMX_ROW_BYTES)));
        for (int64_t i = 0; i < dim; i += AMX_DEPTH, to += 2 * AMX_TILE_WORDS) {
            Line rows[AMX_ROWS];
            if (count == AMX_ROWS && head_dim - i >= AMX_DEPTH) {
                for (int64_t t = 0; t < AMX_ROWS; t++) rows[t] = load_raw<Line>(from + t * row + i);
            } else {
                const int64_t valid = head_dim - i < AMX_DEPTH ? head_dim - i : AMX_DEPTH;
                std::memset(rows, 0, sizeof rows);
                for (int64_t t = 0; t < count; t++)
                    if (valid > 0)
                        std::memcpy(rows + t, from + t * row + i, static_cast<size_t>(valid) * 2);
            }
#if defined(__AVX512F__)
            transpose(reinterpret_cast<Floats*>(rows));
            std::memcpy(to, rows, sizeof rows);
#else
            for (int64_t t = 0; t < AMX_ROWS; t++)
                for (int64_t k = 0; k < AMX_PAIRS; k++) to[k * AMX_ROWS + t] = rows[t][k];
#endif
        }
    }

    // Interleave two values into a row of tiles, element by element. Null means zeros.
    void pack_values(const bf16* low, const bf16* high, int64_t head_dim, uint32_t* first) const {
        for (int64_t i = 0; i < dim; i += AMX_ROWS) {
            const int64_t left = head_dim - i;
            uint32_t* to =
                first + i / AMX_BLOCK * CHUNK_WORDS + i % AMX_BLOCK / AMX_ROWS * AMX_TILE_WORDS;
            if (left >= AMX_ROWS && high) {
                for (int64_t j = 0; j < AMX_ROWS; j += WIDTH)
                    store(to + j, widen(&low[i + j].bits) | widen(&high[i + j].bits) << 16);
                continue;
            }
            for (int64_t j = 0; j < AMX_ROWS; j++)
                to[j] = j >= left || !low
                            ? 0
                            : low[i + j].bits |
                                  (high ? static_cast<uint32_t>(high[i + j].bits) << 16 : 0);
        }
    }

    Buffer<uint32_t> keys, values;
    int64_t dim = 0, packed = 0;
};

}  // namespace ISA

#endif
