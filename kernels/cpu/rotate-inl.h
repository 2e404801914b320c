// Shearing and rotating a row of q or k by its position, forward and back: what attention does to its rows before it
// multiplies them, whether it works on a whole sequence or on one new row. Included once per SIMD target (hence the
// guard).

#if defined(JETLAG_ROTATE_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef JETLAG_ROTATE_INL_H
#undef JETLAG_ROTATE_INL_H
#else
#define JETLAG_ROTATE_INL_H
#endif

#include <hwy/highway.h>

#include <cstdint>

#include "kernels/ops.h"

HWY_BEFORE_NAMESPACE();
namespace jetlag {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Turns each pair of a row by the angles of a position, or with direction -1 back (with the same gain); four pairs at a
// time.
HWY_INLINE void turn_pairs(float* row, int64_t P, const float* cosines, const float* sines, float direction) {
    const hn::CappedTag<float, 4> d;
    const int64_t N = static_cast<int64_t>(hn::Lanes(d));
    int64_t p = 0;
    for (; p + N <= P; p += N) {
        hn::Vec<decltype(d)> x, y;
        hn::LoadInterleaved2(d, row + 2 * p, x, y);
        const auto cosine = hn::LoadU(d, cosines + p);
        const auto sine = hn::Mul(hn::LoadU(d, sines + p), hn::Set(d, direction));
        hn::StoreInterleaved2(hn::NegMulAdd(y, sine, hn::Mul(x, cosine)), hn::MulAdd(x, sine, hn::Mul(y, cosine)), d,
                              row + 2 * p);
    }
    for (; p < P; p++) {
        const float x = row[2 * p], y = row[2 * p + 1], sine = direction * sines[p];
        row[2 * p] = x * cosines[p] - y * sine;
        row[2 * p + 1] = x * sine + y * cosines[p];
    }
}

// In each group of four channels (z0, z1): z[to] += c z[1 - to].
HWY_INLINE void add_shear(float* row, int64_t P, float c, int64_t to) {
    for (int64_t b = 0; b < P / 2; b++)
        for (int64_t part = 0; part < 2; part++) row[4 * b + 2 * to + part] += c * row[4 * b + 2 * (1 - to) + part];
}

// Shears and rotates one row of q or k in place: z0 += c z1 in a query, z1 -= c z0 in a key.
HWY_INLINE void rotate_row(float* row, const RotaryTable& table, const float* cosines, const float* sines, int64_t t,
                           bool is_key) {
    const int64_t P = table.pairs;
    if (table.shear != nullptr) add_shear(row, P, is_key ? -table.shear[t] : table.shear[t], is_key ? 1 : 0);
    turn_pairs(row, P, cosines + t * P, sines + t * P, 1);
}

// The transpose of rotate_row, for gradients.
HWY_INLINE void rotate_row_backward(float* row, const RotaryTable& table, const float* cosines, const float* sines,
                                    int64_t t, bool is_key) {
    const int64_t P = table.pairs;
    turn_pairs(row, P, cosines + t * P, sines + t * P, -1);
    if (table.shear != nullptr) add_shear(row, P, is_key ? -table.shear[t] : table.shear[t], is_key ? 0 : 1);
}

}  // namespace HWY_NAMESPACE
}  // namespace jetlag
HWY_AFTER_NAMESPACE();

#endif
