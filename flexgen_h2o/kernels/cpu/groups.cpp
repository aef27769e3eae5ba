// quantize_groups and dequantize_groups.
#include "groups.h"
#include "memory.h"

namespace ISA {

template <class T>
static int quantize(const QuantizeGroups& args) {
    Buffer<uint8_t> quantized = allocate<uint8_t>(args.threads * args.length);
    if (!quantized) return NO_MEMORY;
#pragma omp parallel for schedule(static) num_threads(args.threads)
    for (int64_t row = 0; row < args.rows; row++)
        quantize_row(static_cast<const T*>(args.x) + row * args.x_row,
                     static_cast<uint8_t*>(args.packed) + row * args.packed_row, args.layout,
                     quantized.get() + thread_index() * args.length);
    return DONE;
}

int quantize_groups(const QuantizeGroups& args) { BY_DTYPE(quantize) }

int dequantize_groups(const QuantizeGroups& args) {
#pragma omp parallel for schedule(static) num_threads(args.threads)
    for (int64_t row = 0; row < args.rows; row++)
        dequantize_row(static_cast<const uint8_t*>(args.packed) + row * args.packed_row,
                       static_cast<float*>(args.x) + row * args.x_row, args.layout);
    return DONE;
}

}  // namespace ISA
