// e^x for x <= 0, the only kind that softmax and erf need. Included once per SIMD target (hence the guard).
//
// x = n ln 2 + r with |r| <= ln 2 / 2; e^r = 1 + r + r^2 G(r), G of degree 4 (a least-squares fit of our own on
// Chebyshev nodes); the exponent n is added as an integer. Relative error under 1e-7. Below -87 the result is 0: no
// float beside it in a softmax could tell, and no denormal slows the sums down. -infinity gives 0, NaN stays NaN.

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
    const hn::RebindToSigned<D> di;
    const V n = hn::Round(hn::Mul(x, hn::Set(d, 1.4426950408889634f)));
    V r = hn::MulAdd(n, hn::Set(d, -0.693359375f), x);
    r = hn::MulAdd(n, hn::Set(d, 0.00021219444170128554f), r);
    V g = hn::Set(d, 0.0013933733571320772f);
    g = hn::MulAdd(g, r, hn::Set(d, 0.008363235741853714f));
    g = hn::MulAdd(g, r, hn::Set(d, 0.041666463017463684f));
    g = hn::MulAdd(g, r, hn::Set(d, 0.16666576266288757f));
    g = hn::MulAdd(g, r, hn::Set(d, 0.5f));
    const V e = hn::Add(hn::MulAdd(hn::Mul(r, r), g, r), hn::Set(d, 1.0f));
    const V scaled = hn::BitCast(d, hn::Add(hn::BitCast(di, e), hn::ShiftLeft<23>(hn::ConvertTo(di, n))));
    // NaN is not less than -87, and comes through as x itself.
    const V finite = hn::IfThenElse(hn::Eq(x, x), scaled, x);
    return hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, -87.0f)), finite);
}

}  // namespace HWY_NAMESPACE
}  // namespace jetlag
HWY_AFTER_NAMESPACE();

#endif
