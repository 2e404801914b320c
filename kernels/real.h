// What activations, their gradients and the operands of matrix products are kept in: `real`, which is float, or bf16
// where the Makefile's PRECISION=bf16 defines JETLAG_BF16. Arithmetic is in float either way, and so are parameters,
// their gradients, tables, statistics and everything of the optimizer. With PRECISION=tf32, which defines JETLAG_TF32,
// `real` is float, and products of matrices round their operands to tf32's 11 bits.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/position/module.h"

namespace jetlag {

// The upper half of a float. A type of our own and not CUDA's, which the C++ compiler would have to know.
struct bf16 {
    uint16_t bits;
};

JETLAG_DEVICE inline float to_float(bf16 x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}
JETLAG_DEVICE inline float to_float(float x) {
    return x;
}

// Rounded to nearest, ties to even.
JETLAG_DEVICE inline bf16 to_bf16(float x) {
#ifdef __CUDA_ARCH__
    uint16_t bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return {bits};
#else
    if (x != x) return {0x7fff};  // the instruction's NaN
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
#endif
}

#ifdef JETLAG_BF16
using real = bf16;
inline constexpr bool kHalfPrecision = true;
JETLAG_DEVICE inline real to_real(float x) {
    return to_bf16(x);
}
#else
using real = float;
inline constexpr bool kHalfPrecision = false;
JETLAG_DEVICE inline real to_real(float x) {
    return x;
}
#endif

#ifdef JETLAG_TF32
inline constexpr bool kTf32 = true;
#else
inline constexpr bool kTf32 = false;
#endif

inline constexpr const char* kPrecision = kHalfPrecision ? "bf16" : kTf32 ? "tf32" : "fp32";

}  // namespace jetlag
