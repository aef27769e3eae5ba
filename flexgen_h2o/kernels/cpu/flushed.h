// Arithmetic in which denormals are zeros, as they are to AMX tiles.
#pragma once

#include "simd.h"

namespace ISA {

// While this lives, the calling thread's vectors take denormals for zeros, and make none: with one, an
// instruction takes hundreds of times as long.
class DenormalsAsZeros {
public:
#if defined(__AVX512DQ__)
    DenormalsAsZeros() { _mm_setcsr(before | FLUSH_RESULTS | TAKE_AS_ZEROS); }
    ~DenormalsAsZeros() { _mm_setcsr(before); }
    DenormalsAsZeros(const DenormalsAsZeros&) = delete;
    DenormalsAsZeros& operator=(const DenormalsAsZeros&) = delete;

private:
    static constexpr unsigned FLUSH_RESULTS = 1u << 15, TAKE_AS_ZEROS = 1u << 6;
    const unsigned before = _mm_getcsr();
#else
    DenormalsAsZeros() {}  // exp2 makes none
#endif
};

// 2^x where denormals are zeros, to 2.3 units in the last place; 0 below -126, and of -inf. NaN stays.
// In 7 instructions with AVX512DQ, where exp2 takes 11.
INLINE Floats exp2_flushed(Floats x) {
#if defined(__AVX512DQ__)
    constexpr int LESS_ITS_FLOOR = 9;  // and no exception for what is rounded
    const Floats r = _mm512_maskz_reduce_ps(0xffff, x, LESS_ITS_FLOOR);  // from 0 to 1
    // Minimax for the relative error, 1.4e-7, of 1 at 0.
    Floats p = broadcast(0x1.e974fep-10f);
    p = fma(p, r, broadcast(0x1.27785ap-7f));
    p = fma(p, r, broadcast(0x1.c91cf4p-5f));
    p = fma(p, r, broadcast(0x1.ebdb58p-3f));
    p = fma(p, r, broadcast(0x1.62e4bap-1f));
    p = fma(p, r, broadcast(1.0f));
    return _mm512_maskz_scalef_ps(0xffff, p, x);  // by 2^floor(x)
#else
    return exp2(x);
#endif
}

}  // namespace ISA
