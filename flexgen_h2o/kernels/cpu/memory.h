// What the tasks of one call share: how many there are, memory, and which thread asks.
#pragma once

#include <cstdint>
#include <cstdlib>

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace ISA {

// An array that is freed with its owner. Not std::unique_ptr: the linker would keep one instruction
// set's copy of its functions for all.
template <class T>
class Memory {
public:
    Memory() = default;
    explicit Memory(T* first) : first(first) {}
    Memory(Memory&& other) noexcept : first(other.first) { other.first = nullptr; }
    Memory& operator=(Memory&& other) noexcept {
        T* const mine = first;
        first = other.first;
        other.first = mine;
        return *this;
    }
    ~Memory() { std::free(first); }
    T* get() const { return first; }
    T& operator[](int64_t index) const { return first[index]; }
    explicit operator bool() const { return first != nullptr; }

private:
    T* first = nullptr;
};

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
