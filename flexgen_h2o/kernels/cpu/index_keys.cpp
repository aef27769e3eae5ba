// index_keys: quantize cached keys to an index of 4 or 2 bits, from which recall selects tokens.
#include <math.h>

#include "groups.h"
#include "key_index.h"
#include "memory.h"

namespace ISA {
namespace {

constexpr int SINGLE_THREAD_ROWS = 256;  // maximum rows for one thread; more pay for waking others

INLINE void group_codes(const float* x, int64_t count, float levels, uint8_t* quantized,
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
    const Floats max_code = broadcast(levels);
    int64_t i = 0;
    for (; i + WIDTH <= count; i += WIDTH) {
        Floats code = rounded((clamped(load(x + i)) - zero) / step);
        code = code < 0.0f ? Floats{} : code;
        narrow(quantized + i, __builtin_convertvector(code > max_code ? max_code : code, Ints));
    }
    for (; i < count; i++) {
        const float code = nearbyintf((clamped_one(x + i) - zero) / step);
        quantized[i] = static_cast<uint8_t>(code < 0 ? 0 : code > levels ? levels : code);
    }
}

template <class T>
void index_key(const IndexKeys& args, const IndexTileLayout& layout, const void* keys, int64_t row,
               uint8_t* index, int64_t token, float* x, uint8_t* quantized) {
    if (args.key_layout.bits == 16)
        to_floats(static_cast<const T*>(keys) + row * args.keys_slot, args.head_dim, x);
    else
        dequantize_row(static_cast<const uint8_t*>(keys) + row * args.keys_slot, x, args.key_layout);
    const int64_t lane = token % INDEX_TILE;
    uint8_t* tile = index + token / INDEX_TILE * layout.bytes + lane;
    uint8_t* scales = tile - lane + INDEX_TILE * layout.code_rows + 2 * lane;
    uint8_t* zeros = scales + 2 * INDEX_TILE * layout.groups;
    const float levels = layout.bits == 4 ? 15.0f : 3.0f;
    for (int64_t k = 0; k < layout.groups; k++) {
        uint16_t scale, zero;
        group_codes(x + k * layout.group, layout.group, levels, quantized + k * layout.group, scale,
                    zero);
        std::memcpy(scales + 2 * INDEX_TILE * k, &scale, 2);
        std::memcpy(zeros + 2 * INDEX_TILE * k, &zero, 2);
    }
    for (int64_t r = 0; r < layout.code_rows; r++) {
        const uint8_t* row_values = quantized + r * layout.per_byte;
        tile[r * INDEX_TILE] =
            static_cast<uint8_t>(layout.bits == 4 ? row_values[0] | row_values[1] << 4
                                                  : row_values[0] | row_values[1] << 2 |
                                                        row_values[2] << 4 | row_values[3] << 6);
    }
}

template <class T>
int index_sequences(const IndexKeys& args) {
    const IndexTileLayout layout(args.head_dim, args.bits, args.groups);
    for (int64_t s = 0; s < args.sequences; s++) {
        const int64_t first = args.spans[s], token = args.spans[args.sequences + s],
                      count = args.spans[2 * args.sequences + s];
        if (first < 0 || token < 0 || count < 0 || first + count > args.num_keys ||
            token + count > args.num_tiles * INDEX_TILE)
            return INVALID;
    }
    const Buffer<float> floats = allocate<float>(args.threads * args.head_dim);
    const Buffer<uint8_t> quantized = allocate<uint8_t>(args.threads * args.head_dim);
    if (!floats || !quantized) return NO_MEMORY;
    int64_t rows = 0;
    for (int64_t s = 0; s < args.sequences; s++)
        rows += args.kv_heads * args.spans[2 * args.sequences + s];
#pragma omp parallel for schedule(dynamic) num_threads(args.threads) if (rows > SINGLE_THREAD_ROWS)
    for (int64_t task = 0; task < args.sequences * args.kv_heads; task++) {
        const int64_t s = task / args.kv_heads, head = task % args.kv_heads, thread = thread_index();
        const int64_t first = args.spans[s], token = args.spans[args.sequences + s],
                      count = args.spans[2 * args.sequences + s];
        const int64_t at = s * args.keys_sequence + head * args.keys_head;
        const void* keys = args.key_layout.bits == 16
                               ? static_cast<const void*>(static_cast<const T*>(args.keys) + at)
                               : static_cast<const uint8_t*>(args.keys) + at;
        uint8_t* index =
            static_cast<uint8_t*>(args.index) + s * args.index_sequence + head * args.index_head;
        for (int64_t i = 0; i < count; i++)
            index_key<T>(args, layout, keys, first + i, index, token + i,
                         floats.get() + thread * args.head_dim,
                         quantized.get() + thread * args.head_dim);
    }
    return DONE;
}

}  // namespace

int index_keys(const IndexKeys& args) { BY_DTYPE(index_sequences) }

}  // namespace ISA
