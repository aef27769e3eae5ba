// What the tasks of one call share: how many there are, memory, and which thread asks.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace ISA {

// So many are worth making out of few heads, whatever the number of threads.
constexpr int FEWEST_TASKS = 64;

struct Freed {
    void operator()(void* p) const { std::free(p); }
};
template <class T>
using Memory = std::unique_ptr<T[], Freed>;

// Uninitialised; null if there is none.
template <class T>
Memory<T> memory(int64_t count) {
    size_t bytes = (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    return Memory<T>(static_cast<T*>(std::aligned_alloc(64, bytes ? bytes : 64)));
}

inline int thread_number() {
#if defined(_OPENMP)
    return omp_get_thread_num();
#else
    return 0;
#endif
}

}  // namespace ISA
