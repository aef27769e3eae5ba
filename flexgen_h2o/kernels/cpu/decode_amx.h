// Grouped-query decode attention over 4-bit KV entries in AMX tiles. Each tile of keys or values is
// multiplied with all query heads of its KV head at once.
//
// Quantized values are integers that bfloat16 represents exactly. Scales are applied to the logits and
// to the attention weights. Keys are left operands, 16 slots per tile, and queries are right operands.
// Attention weights are left operands, split into two bfloat16 parts whose sum has a relative error of
// at most 2^-17. Values are right operands, two slots per pair. Unpacked data is multiplied one
// iteration later, because a tile load waits until the stores to its lines have left the store buffer.
#pragma once

#include "amx.h"
#include "cached_matmul.h"

#if defined(HAS_AMX_TILES)

namespace ISA {

constexpr int64_t VALUE_TILES = 4;  // tiles that 32 bytes of values expand to

// Values 0 to 15 as bfloat16. The table is repeated, so that bit 4 of an index is ignored.
alignas(64) constexpr uint16_t NIBBLE_VALUES[32] = {
    0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120,
    0x4130, 0x4140, 0x4150, 0x4160, 0x4170, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
    0x40c0, 0x40e0, 0x4100, 0x4110, 0x4120, 0x4130, 0x4140, 0x4150, 0x4160, 0x4170};

// Convert the low and the high nibbles of 32 bytes to bfloat16.
INLINE void unpack_nibbles(const uint8_t* from, uint16_t* low, uint16_t* high) {
#if defined(__AVX512BW__)
    const __m512i table = _mm512_load_si512(NIBBLE_VALUES);
    const __m512i bytes = _mm512_cvtepu8_epi16(load_raw<__m256i>(from));
    _mm512_storeu_si512(low, _mm512_permutexvar_epi16(bytes, table));
    _mm512_storeu_si512(high, _mm512_permutexvar_epi16(_mm512_srli_epi16(bytes, 4), table));
#else
    for (int64_t i = 0; i < AMX_DEPTH; i++)
        low[i] = NIBBLE_VALUES[from[i] & 15], high[i] = NIBBLE_VALUES[from[i] >> 4];
#endif
}

// 32 bytes of two slots expand to one row of pairs in each of VALUE_TILES tiles: two tiles of low
// nibbles and two of high nibbles. `byte_of` maps a column of a tile to its byte.
constexpr int64_t RUN = 8;  // consecutive columns with consecutive bytes
constexpr int64_t byte_of(int64_t tile, int64_t column) {
    return tile % 2 * RUN + column + column / RUN * RUN;
}
INLINE void interleave_nibbles(const uint8_t* first, const uint8_t* second, uint32_t* to) {
#if defined(__AVX512BW__)
    const __m512i table = _mm512_load_si512(NIBBLE_VALUES);
    const __m256i a = load_raw<__m256i>(first), b = load_raw<__m256i>(second);
    const __m256i both[2] = {_mm256_unpacklo_epi8(a, b), _mm256_unpackhi_epi8(a, b)};
    for (int64_t tile = 0; tile < 2; tile++, to += AMX_TILE_WORDS) {
        const __m512i bytes = _mm512_cvtepu8_epi16(both[tile]);
        _mm512_storeu_si512(to, _mm512_permutexvar_epi16(bytes, table));
        _mm512_storeu_si512(to + 2 * AMX_TILE_WORDS,
                            _mm512_permutexvar_epi16(_mm512_srli_epi16(bytes, 4), table));
    }
#else
    for (int64_t tile = 0; tile < VALUE_TILES; tile++, to += AMX_TILE_WORDS)
        for (int64_t n = 0; n < AMX_PAIRS; n++) {
            const int64_t i = byte_of(tile, n), shift = tile < 2 ? 0 : 4;
            to[n] = NIBBLE_VALUES[first[i] >> shift & 15] |
                    static_cast<uint32_t>(NIBBLE_VALUES[second[i] >> shift & 15]) << 16;
        }
#endif
}

// Transpose rows of N floats, contiguous in N vectors, to columns.
template <int N>
INLINE void to_columns(Floats* x) {
    static_assert(N == 4 || N == 8, "a row is half a vector at most");
    Words even, odd;
    for (int i = 0; i < WIDTH; i++) even[i] = static_cast<uint32_t>(2 * i), odd[i] = even[i] + 1;
#pragma GCC unroll 4
    for (int parts = 1; parts < N; parts *= 2) {  // N / parts vectors per part, by column
        Floats next[N];
#pragma GCC unroll 8
        for (int n = 0; n < N / 2; n++) {
            const int stride = N / parts, part = n / (stride / 2), i = n % (stride / 2);
            const Floats* from = x + part * stride + 2 * i;
            next[part * stride + i] = __builtin_shuffle(from[0], from[1], even);
            next[part * stride + i + stride / 2] = __builtin_shuffle(from[0], from[1], odd);
        }
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) x[n] = next[n];
    }
    // The columns come out in bit-reversed order.
    const Floats second = x[1];
    x[1] = x[N / 2], x[N / 2] = second;
    if constexpr (N == 8) {
        const Floats fourth = x[3];
        x[3] = x[6], x[6] = fourth;
    }
}

// With fewer queries the vector kernels are faster. With more, a tile has too few rows for both parts
// of the attention weights.
constexpr int64_t MIN_AMX_QUERIES = 4, MAX_AMX_QUERIES = AMX_ROWS / 2;
constexpr int64_t MIN_AMX_SLOTS = 3 * SLOT_TILE;  // minimum that pays for the setup of tiles
constexpr int64_t CHUNK_SLOTS = 4 * SLOT_TILE;   // slots whose values are accumulated in tiles together
static_assert(SLOT_TILE == 4 * AMX_ROWS, "four tiles of keys");

// The cached keys or values of a KV head with DIM elements in the default groups, and scratch memory
// of the thread.
template <int DIM>
class AmxKVHead {
    static constexpr int64_t GROUP = default_group(4, DIM);
    static_assert(GROUP == AMX_DEPTH || GROUP == 2 * AMX_DEPTH,
                  "one or two products of tiles sum over a group");
    static constexpr int64_t GROUPS = DIM / GROUP, HALF = DIM / 2, BLOCKS = HALF / AMX_DEPTH;
    static constexpr int64_t SCALES = 2 * GROUPS * SLOT_TILE;  // per tile
    static constexpr int64_t TILES_IN_FLIGHT = 3;  // tiles of keys: unpacked, multiplied, scaled

public:
    // Return the size of the scratch memory in floats.
    static constexpr int64_t scratch_size() {
        const int64_t keys = SLOT_TILE * DIM + (GROUPS * SLOT_TILE + HALF) * MAX_AMX_QUERIES;
        const int64_t values =
            GROUPS * MAX_AMX_QUERIES * CHUNK_SLOTS + 2 * VALUE_TILES * AMX_TILE_WORDS + DIM * AMX_ROWS;
        return TILES_IN_FLIGHT * SCALES + (keys > values ? keys : values);
    }

    // The slots are `stride` bytes apart.
    AmxKVHead(const uint8_t* base, int64_t stride, const GroupLayout& layout, int64_t queries,
              float* scratch)
        : base(base), stride(stride), layout(layout), queries(queries), columns(queries > 4 ? 8 : 4),
          scales(scratch), scratch(scratch + TILES_IN_FLIGHT * SCALES) {}

    // Compute logits [queries, row] of slots `begin` to `end`, padded to a whole tile. The bfloat16
    // queries are `q_head` elements apart and are multiplied by `scale`. `scaled` holds the scaled
    // queries in float32 [queries, DIM].
    void keys(const bf16* q, int64_t q_head, const float* scaled, float scale, int64_t begin,
              int64_t end, float* logits, int64_t row) const {
        auto* const buffers = reinterpret_cast<uint16_t*>(scratch);  // [2, SLOT_TILE, DIM]
        float* const products = scratch + SLOT_TILE * DIM;           // [GROUPS, SLOT_TILE, columns]
        auto* const right = reinterpret_cast<uint32_t*>(products + GROUPS * SLOT_TILE * columns);
        for (int64_t i = 0; i < HALF; i++)
            for (int64_t g = 0; g < columns; g++)
                std::memcpy(right + i * columns + g, q + (g < queries ? g : 0) * q_head + 2 * i,
                            sizeof *right);
        float zero_sums[MAX_AMX_QUERIES * GROUPS];  // factors of the zero points
        for (int64_t n = 0; n < queries * GROUPS; n++)
            zero_sums[n] = sum_of(scaled + n * GROUP, GROUP);
        AmxTileShapes shapes;
        for (int tile = 0; tile < 4; tile++) shapes.set(tile, AMX_ROWS, 4 * columns);
        shapes.set(4, AMX_ROWS, AMX_ROW_BYTES), shapes.set(5, AMX_ROWS, AMX_ROW_BYTES);
        shapes.set(6, AMX_PAIRS, 4 * columns), shapes.set(7, AMX_PAIRS, 4 * columns);
        AmxTiles tiles(shapes);
        const auto put = [&](const KeyTile& done) ALWAYS_INLINE {
            float* to = logits + done.first;
            columns == 4 ? store_logits<4>(products, done.scales, scale, zero_sums, to, row)
                         : store_logits<8>(products, done.scales, scale, zero_sums, to, row);
        };
        KeyTile last, before;
        for (int64_t t = begin, iteration = 0; t < end; t += SLOT_TILE, iteration++) {
            const int64_t count = t + SLOT_TILE < end ? SLOT_TILE : end - t;
            const KeyTile current{buffers + iteration % 2 * SLOT_TILE * DIM, load_scales(t, count), t};
            const auto unpack = [&](int64_t first) ALWAYS_INLINE { unpack_keys(current, count, first); };
            if (last.quantized)
                multiply(tiles, last, 0, right, unpack);
            else
                for (int64_t first = 0; first < SLOT_TILE; first += AMX_ROWS) unpack(first);
            if (before.quantized) put(before);
            if (last.quantized) finish(tiles, last, right, products);
            before = last, last = current;
        }
        if (!last.quantized) return;
        multiply(tiles, last, 0, right, [](int64_t) {});
        if (before.quantized) put(before);
        finish(tiles, last, right, products);
        put(last);
    }

    // out [queries, out_row] += weights [queries, row] of slots `begin` to `end` @ their values.
    void values(const float* weights, int64_t row, int64_t begin, int64_t end, float* out,
                int64_t out_row) const {
        const int64_t rows = 2 * queries, size = rows * AMX_PAIRS;
        auto* const left = reinterpret_cast<uint16_t*>(scratch);  // [GROUPS, rows, CHUNK_SLOTS]
        auto* const buffers = reinterpret_cast<uint32_t*>(scratch + GROUPS * queries * CHUNK_SLOTS);
        // [BLOCKS, VALUE_TILES, rows, columns]
        float* const sums = reinterpret_cast<float*>(buffers) + 2 * VALUE_TILES * AMX_TILE_WORDS;
        std::memset(sums, 0, static_cast<size_t>(BLOCKS * VALUE_TILES * size) * sizeof *sums);
        AmxTileShapes shapes;
        for (int tile = 0; tile < 6; tile++) shapes.set(tile, rows, AMX_ROW_BYTES);
        shapes.set(6, AMX_PAIRS, AMX_ROW_BYTES), shapes.set(7, AMX_PAIRS, AMX_ROW_BYTES);
        AmxTiles tiles(shapes);
        for (int64_t t = begin; t < end; t += CHUNK_SLOTS) {
            const int64_t count = t + CHUNK_SLOTS < end ? CHUNK_SLOTS : end - t;
            scale_weights(t, count, weights + t, row, left, out, out_row);
            for (int64_t block = 0; block < BLOCKS; block++) {
                const uint8_t* from = base + t * stride + block * AMX_DEPTH;
                float* const block_sums = sums + block * VALUE_TILES * size;
                const uint16_t* low = left + element(block, 0, 0) / GROUP * rows * CHUNK_SLOTS;
                const uint16_t* high = left + element(block, 2, 0) / GROUP * rows * CHUNK_SLOTS;
                tiles.load<0>(block_sums, AMX_ROW_BYTES);
                tiles.load<1>(block_sums + size, AMX_ROW_BYTES);
                tiles.load<2>(block_sums + 2 * size, AMX_ROW_BYTES);
                tiles.load<3>(block_sums + 3 * size, AMX_ROW_BYTES);
                unpack_values(from, count, buffers);
                for (int64_t first = 0, iteration = 0; first < count;
                     first += AMX_DEPTH, iteration = !iteration) {
                    const int64_t next = first + AMX_DEPTH;
                    if (next < count)
                        unpack_values(from + next * stride, count - next,
                                      buffers + !iteration * VALUE_TILES * AMX_TILE_WORDS);
                    add_values(tiles, low + first, high + first,
                               buffers + iteration * VALUE_TILES * AMX_TILE_WORDS);
                }
                tiles.store<0>(block_sums, AMX_ROW_BYTES);
                tiles.store<1>(block_sums + size, AMX_ROW_BYTES);
                tiles.store<2>(block_sums + 2 * size, AMX_ROW_BYTES);
                tiles.store<3>(block_sums + 3 * size, AMX_ROW_BYTES);
            }
        }
        for (int64_t g = 0; g < queries; g++)
            for (int64_t n = 0; n < BLOCKS * VALUE_TILES * AMX_PAIRS; n += RUN) {
                const int64_t tile = n / AMX_PAIRS, column = n % AMX_PAIRS;
                const float* from = sums + tile * size + g * AMX_PAIRS + column;
                float* to = out + g * out_row +
                            element(tile / VALUE_TILES, tile % VALUE_TILES, column);
                for (int64_t i = 0; i < RUN; i++) to[i] += from[i] + from[queries * AMX_PAIRS + i];
            }
    }

private:
    // Keys of SLOT_TILE slots as bfloat16 integers [SLOT_TILE, DIM]. Null `quantized` mean no tile.
    struct KeyTile {
        uint16_t* quantized = nullptr;
        const float* scales = nullptr;
        int64_t first = 0;
    };

    // Map a column of a block's tile of values to its element.
    static constexpr int64_t element(int64_t block, int64_t tile, int64_t column) {
        return tile / 2 * HALF + block * AMX_DEPTH + byte_of(tile, column);
    }

    const float* load_scales(int64_t first, int64_t count) const {
        float* tile_scales = scales + first / SLOT_TILE % TILES_IN_FLIGHT * SCALES;
        QuantizedRows<4>{base, stride, layout, tile_scales}.tile(first, count);
        return tile_scales;
    }

    // Unpack up to 16 slots of a tile and prefetch the data ahead.
    INLINE void unpack_keys(const KeyTile& tile, int64_t count, int64_t first) const {
        const int64_t end = first + AMX_ROWS < count ? first + AMX_ROWS : count;
        const uint8_t* from = base + (tile.first + first) * stride;
        uint16_t* to = tile.quantized + first * DIM;
        for (int64_t i = first; i < end; i++, from += stride, to += DIM) {
            for (int64_t n = 0; n < HALF; n += AMX_DEPTH) {
                prefetch(from + SLOT_TILE * stride + PREFETCH_BYTES + n, L2);
                unpack_nibbles(from + n, to + n, to + HALF + n);
            }
        }
    }

    // C0 to C3 = the quantized keys of a group by the queries. unpack(first) is called before each 16
    // slots.
    template <class F>
    INLINE void multiply(AmxTiles& tiles, const KeyTile& keys, int64_t group, const uint32_t* right,
                         const F& unpack) const {
        const uint32_t* group_queries = right + group * GROUP / 2 * columns;
        tiles.load<6>(group_queries, 4 * columns);
        if constexpr (GROUP > AMX_DEPTH) tiles.load<7>(group_queries + AMX_PAIRS * columns, 4 * columns);
        const uint16_t* quantized = keys.quantized + group * GROUP;
        multiply_slots<0>(tiles, quantized, unpack);
        multiply_slots<1>(tiles, quantized, unpack);
        multiply_slots<2>(tiles, quantized, unpack);
        multiply_slots<3>(tiles, quantized, unpack);
    }
    template <int C, class F>
    INLINE void multiply_slots(AmxTiles& tiles, const uint16_t* quantized, const F& unpack) const {
        constexpr int64_t ROW = DIM * sizeof *quantized;
        constexpr int LEFT = GROUP > AMX_DEPTH ? 4 : 4 + C % 2;  // alternates, so loads do not wait
        unpack(C * AMX_ROWS);
        quantized += C * AMX_ROWS * DIM;
        tiles.zero<C>();
        tiles.load<LEFT>(quantized, ROW);
        tiles.add_matmul<C, LEFT, 6>();
        if constexpr (GROUP > AMX_DEPTH) {
            tiles.load<5>(quantized + AMX_DEPTH, ROW);
            tiles.add_matmul<C, 5, 7>();
        }
    }

    // Store the matmuls of a tile's first group, then compute and store the other groups.
    INLINE void finish(AmxTiles& tiles, const KeyTile& keys, const uint32_t* right,
                       float* products) const {
        store(tiles, products);
        for (int64_t group = 1; group < GROUPS; group++) {
            multiply(tiles, keys, group, right, [](int64_t) {});
            store(tiles, products + group * SLOT_TILE * columns);
        }
    }
    INLINE void store(AmxTiles& tiles, float* to) const {
        const int64_t size = AMX_ROWS * columns;
        tiles.store<0>(to, 4 * columns);
        tiles.store<1>(to + size, 4 * columns);
        tiles.store<2>(to + 2 * size, 4 * columns);
        tiles.store<3>(to + 3 * size, 4 * columns);
    }

    template <int COLUMNS>
    INLINE void store_logits(const float* products, const float* scales, float scale,
                             const float* zero_sums, float* to, int64_t row) const {
        for (int64_t i = 0; i < SLOT_TILE; i += WIDTH) {
            Floats all[COLUMNS]{};
            for (int64_t k = 0; k < GROUPS; k++) {
                Floats columns_of_group[COLUMNS];
                for (int64_t n = 0; n < COLUMNS; n++)
                    columns_of_group[n] = load(products + (k * SLOT_TILE + i) * COLUMNS + n * WIDTH);
                to_columns<COLUMNS>(columns_of_group);
                const float* group_scales = scales + k * SLOT_TILE + i;
                const Floats by = load(group_scales) * scale;
                const Floats zero = load(group_scales + GROUPS * SLOT_TILE);
#pragma GCC unroll 8
                for (int64_t g = 0; g < COLUMNS; g++) {
                    if (g >= queries) continue;
                    all[g] = fma(columns_of_group[g], by, all[g]);
                    all[g] = fma(broadcast(zero_sums[g * GROUPS + k]), zero, all[g]);
                }
            }
#pragma GCC unroll 8
            for (int64_t g = 0; g < COLUMNS; g++)
                if (g < queries) ISA::store(to + g * row + i, all[g]);
        }
    }

    // Multiply attention weights by scales and store them as left operands [GROUPS, 2 queries,
    // CHUNK_SLOTS]: first the bfloat16 part of all queries, then the remainders. Padding slots are 0.
    // The contribution of zero points is added to the outputs.
    INLINE void scale_weights(int64_t first, int64_t slots, const float* weights, int64_t row,
                              uint16_t* left, float* out, int64_t out_row) const {
        for (int64_t t = 0; t < slots; t += SLOT_TILE) {
            const int64_t count = t + SLOT_TILE < slots ? SLOT_TILE : slots - t;
            const float* slot_scales = load_scales(first + t, count);
            for (int64_t g = 0; g < queries; g++)
                for (int64_t k = 0; k < GROUPS; k++) {
                    auto* high = reinterpret_cast<bf16*>(left) +
                                 (k * 2 * queries + g) * CHUNK_SLOTS + t;
                    bf16* low = high + queries * CHUNK_SLOTS;
                    const float *scale = slot_scales + k * SLOT_TILE, *zero = scale + GROUPS * SLOT_TILE;
                    Floats shift{};
                    for (int64_t i = 0; i < count; i += 2 * WIDTH) {
                        Floats x[2]{};
                        for (int64_t n = 0, at = i; n < 2 && at < count; n++, at += WIDTH) {
                            const Floats weight = load(weights + g * row + t + at);
                            x[n] = weight * load(scale + at);
                            shift = fma(weight, load(zero + at), shift);
                        }
                        narrow(high + i, x[0], x[1]);
                        narrow(low + i, x[0] - load(high + i), x[1] - load(high + i + WIDTH));
                    }
                    for (int64_t i = (count + 2 * WIDTH - 1) / (2 * WIDTH) * 2 * WIDTH; i % AMX_DEPTH;
                         i += 2 * WIDTH) {
                        narrow(high + i, Floats{}, Floats{});
                        narrow(low + i, Floats{}, Floats{});
                    }
                    const float all = sum(shift);
                    for (int64_t i = 0; i < GROUP; i += WIDTH) {
                        float* to = out + g * out_row + k * GROUP + i;
                        ISA::store(to, load(to) + all);
                    }
                }
        }
    }

    // Unpack 32 bytes of up to 32 slots to right operands and prefetch the data ahead.
    INLINE void unpack_values(const uint8_t* from, int64_t count, uint32_t* to) const {
        alignas(64) static constexpr uint8_t ZEROS[AMX_DEPTH] = {};
        const int64_t ahead = CHUNK_SLOTS * stride + PREFETCH_BYTES;
        for (int64_t i = 0; i < AMX_DEPTH; i += 2, from += 2 * stride, to += AMX_PAIRS) {
            prefetch(from + ahead, L2);
            prefetch(from + stride + ahead, L2);
            interleave_nibbles(i < count ? from : ZEROS, i + 1 < count ? from + stride : ZEROS, to);
        }
    }

    INLINE void add_values(AmxTiles& tiles, const uint16_t* low, const uint16_t* high,
                           const uint32_t* right) const {
        constexpr int64_t ROW = CHUNK_SLOTS * sizeof *low;
        tiles.load<4>(low, ROW);
        tiles.load<6>(right, AMX_ROW_BYTES);
        tiles.add_matmul<0, 4, 6>();
        tiles.load<7>(right + AMX_TILE_WORDS, AMX_ROW_BYTES);
        tiles.add_matmul<1, 4, 7>();
        tiles.load<5>(high, ROW);
        tiles.load<6>(right + 2 * AMX_TILE_WORDS, AMX_ROW_BYTES);
        tiles.add_matmul<2, 5, 6>();
        tiles.load<7>(right + 3 * AMX_TILE_WORDS, AMX_ROW_BYTES);
        tiles.add_matmul<3, 5, 7>();
    }

    const uint8_t* const base;
    const int64_t stride;
    const GroupLayout& layout;
    const int64_t queries, columns;  // columns of the key matmuls: 4 or 8
    float *const scales, *const scratch;
};

constexpr int64_t AMX_KV_SCRATCH = AmxKVHead<128>::scratch_size();  // the maximum of all head sizes

}  // namespace ISA

#else

namespace ISA {
constexpr int64_t AMX_KV_SCRATCH = 0;
}

#endif
