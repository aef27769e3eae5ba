// quantize_groups and dequantize_groups.
#include "groups.h"
#include "memory.h"

namespace ISA {

template <class T>
static int quantize(const Groups& a) {
    Memory<uint8_t> quantized = memory<uint8_t>(a.threads * a.length);
    if (!quantized) return NO_MEMORY;
#pragma omp parallel for schedule(static) num_threads(a.threads)
    for (int64_t row = 0; row < a.rows; row++)
        quantize_row(static_cast<const T*>(a.x) + row * a.x_row,
                     static_cast<uint8_t*>(a.packed) + row * a.packed_row, a.layout,
                     quantized.get() + thread_number() * a.length);
    return DONE;
}

int quantize_groups(const Groups& a) { BY_DTYPE(quantize) }

int dequantize_groups(const Groups& a) {
#pragma omp parallel for schedule(static) num_threads(a.threads)
    for (int64_t row = 0; row < a.rows; row++)
        dequantize_row(static_cast<const uint8_t*>(a.packed) + row * a.packed_row,
                       static_cast<float*>(a.x) + row * a.x_row, a.layout);
    return DONE;
}

}  // namespace ISA
