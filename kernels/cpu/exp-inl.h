// e^x for x <= 0, the only kind that softmax and erf need. Included once per SIMD target (hence the guard).
//
// x = n ln 2 + r with |r| <= ln 2 / 2; e^r = 1 + r G(r), G of degree 4 (a fit of our own to the least relative error,
// 9e-8). Adding 1.5 2^23 + 127 rounds x / ln 2 to the integer n and leaves n + 127 in the low bits, which shifted are
// the float 2^n. ln 2 is taken in two parts, of which the first has few bits, so that targets without a fused
// multiply-add keep them all too. Relative error under 1.7e-7. Below -87 the result is 0: no float beside it in a
// softmax could tell, and no denormal slows the sums down. -infinity gives 0, NaN stays NaN, 0 gives exactly 1.

#if defined(JETLAG_EXP_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef JETLAG_EXP_INL_H
#undef JETLAG_EXP_INL_H
#else
#define JETLAG_EXP_INL_H
#endif

#include <hwy/highway.h>

#include <cstdint>

HWY_BEFORE_NAMESPACE();
namespace jetlag {
namespace HWY_NAMESPACE {

template <class D, class V = hwy::HWY_NAMESPACE::Vec<D>>
HWY_INLINE V exp_nonpositive(D d, V x) {
    namespace hn = hwy::HWY_NAMESPACE;
    const hn::RebindToUnsigned<D> du;
    const V magic = hn::Set(d, 0x1.8p23f + 127);
    const V shifted = hn::MulAdd(x, hn::Set(d, 1.4426950408889634f), magic);
    const V n = hn::Sub(shifted, magic);
    V r = hn::MulAdd(n, hn::Set(d, -0.693359375f), x);
    r = hn::MulAdd(n, hn::Set(d, 0.00021219444170128554f), r);
    V e = hn::Set(d, 0.008290272206068039f);
    e = hn::MulAdd(e, r, hn::Set(d, 0.04189816117286682f));
    e = hn::MulAdd(e, r, hn::Set(d, 0.1666763871908188f));
    e = hn::MulAdd(e, r, hn::Set(d, 0.4999914765357971f));
    e = hn::MulAdd(e, r, hn::Set(d, 0.9999997019767761f));
    e = hn::MulAdd(e, r, hn::Set(d, 1.0f));
    const V scale = hn::BitCast(d, hn::ShiftLeft<23>(hn::BitCast(du, shifted)));
    return hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, -87.0f)), hn::Mul(e, scale));
}

}  // namespace HWY_NAMESPACE
}  // namespace jetlag
HWY_AFTER_NAMESPACE();

#endif
