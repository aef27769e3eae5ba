// index_keys: quantize cached keys to an index of 4 or 2 bits, from which recall selects tokens.
#include <math.h>

#include "groups.h"
#include "index_tiles.h"
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
void index_one(const IndexKeys& a, const TileShape& shape, const void* keys, int64_t row,
               uint8_t* index, int64_t token, float* x, uint8_t* quantized) {
    if (a.layout.bits == 16)
        to_floats(static_cast<const T*>(keys) + row * a.keys_slot, a.head_dim, x);
    else
        dequantize_row(static_cast<const uint8_t*>(keys) + row * a.keys_slot, x, a.layout);
    const int64_t lane = token % INDEX_TILE;
    uint8_t* tile = index + token / INDEX_TILE * shape.bytes + lane;
    uint8_t* scales = tile - lane + INDEX_TILE * shape.code_rows + 2 * lane;
    uint8_t* zeros = scales + 2 * INDEX_TILE * shape.groups;
    const float levels = shape.bits == 4 ? 15.0f : 3.0f;
    for (int64_t k = 0; k < shape.groups; k++) {
        uint16_t scale, zero;
        group_codes(x + k * shape.group, shape.group, levels, quantized + k * shape.group, scale, zero);
        std::memcpy(scales + 2 * INDEX_TILE * k, &scale, 2);
        std::memcpy(zeros + 2 * INDEX_TILE * k, &zero, 2);
    }
    for (int64_t r = 0; r < shape.code_rows; r++) {
        const uint8_t* row_values = quantized + r * shape.per_byte;
        tile[r * INDEX_TILE] = static_cast<uint8_t>(
            shape.bits == 4 ? row_values[0] | row_values[1] << 4
                            : row_values[0] | row_values[1] << 2 | row_values[2] << 4 |
                                  row_values[3] << 6);
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
    const Memory<uint8_t> quantized = memory<uint8_t>(a.threads * a.head_dim);
    if (!floats || !quantized) return NO_MEMORY;
    int64_t rows = 0;
    for (int64_t s = 0; s < a.sequences; s++) rows += a.kv_heads * a.spans[2 * a.sequences + s];
#pragma omp parallel for schedule(dynamic) num_threads(a.threads) if (rows > SINGLE_THREAD_ROWS)
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
                         floats.get() + thread * a.head_dim, quantized.get() + thread * a.head_dim);
    }
    return DONE;
}

}  // namespace

int index_keys(const IndexKeys& a) { BY_DTYPE(index_all) }

}  // namespace ISA
