// Helpers for the threads of one call: thread count, thread index and scratch memory.
#pragma once

#include <cstdint>
#include <cstdlib>

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace ISA {

// An array that is freed with its owner. std::unique_ptr is avoided, because the linker would keep the
// copy of its functions of one instruction set for all.
template <class T>
class Buffer {
public:
    Buffer() = default;
    explicit Buffer(T* first) : first(first) {}
    Buffer(Buffer&& other) noexcept : first(other.first) { other.first = nullptr; }
    Buffer& operator=(Buffer&& other) noexcept {
        T* const other_first = first;
        first = other.first;
        other.first = other_first;
        return *this;
    }
    ~Buffer() { std::free(first); }
    T* get() const { return first; }
    T& operator[](int64_t index) const { return first[index]; }
    explicit operator bool() const { return first != nullptr; }

private:
    T* first = nullptr;
};

// Allocate uninitialized memory. Return null on failure.
template <class T>
Buffer<T> allocate(int64_t count) {
    size_t bytes = (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    return Buffer<T>(static_cast<T*>(std::aligned_alloc(64, bytes ? bytes : 64)));
}

inline int thread_index() {
#if defined(_OPENMP)
    return omp_get_thread_num();
#else
    return 0;
#endif
}

}  // namespace ISA
