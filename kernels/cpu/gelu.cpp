// Exact GELU and the residual add: one pass over memory, bound by it.
//
// erf has no vector form in our libraries, so it is made here. Up to |x| = 1, erf(x) = x S(x^2); beyond,
// erf(x) = 1 - e^Q(x) with Q fitted to ln erfc(x), up to 4, where erf is 1 to float. S and Q are least-squares fits
// on Chebyshev nodes of our own; the largest error against double precision is 2.4 units in the last place.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/gelu.cpp"
#include <hwy/foreach_target.h>
// clang-format off
#include <hwy/highway.h>
#include "kernels/cpu/exp-inl.h"
// clang-format on

#include <cstdint>

HWY_BEFORE_NAMESPACE();
namespace jetlag {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class D, class V = hn::Vec<D>>
HWY_INLINE V erf_vector(D d, V x) {
    const V size = hn::Min(hn::Abs(x), hn::Set(d, 4.0f));
    const V t = hn::Mul(size, size);
    V s = hn::Set(d, 7.882497448008507e-05f);
    s = hn::MulAdd(s, t, hn::Set(d, -0.0008018855005502701f));
    s = hn::MulAdd(s, t, hn::Set(d, 0.005189312156289816f));
    s = hn::MulAdd(s, t, hn::Set(d, -0.02685432881116867f));
    s = hn::MulAdd(s, t, hn::Set(d, 0.11283597350120544f));
    s = hn::MulAdd(s, t, hn::Set(d, -0.3761262595653534f));
    s = hn::MulAdd(s, t, hn::Set(d, 1.1283791065216064f));
    V q = hn::Set(d, 1.615103542462748e-06f);
    q = hn::MulAdd(q, size, hn::Set(d, -4.56122106697876e-05f));
    q = hn::MulAdd(q, size, hn::Set(d, 0.0005929608014412224f));
    q = hn::MulAdd(q, size, hn::Set(d, -0.0047411671839654446f));
    q = hn::MulAdd(q, size, hn::Set(d, 0.026367560029029846f));
    q = hn::MulAdd(q, size, hn::Set(d, -0.10998356342315674f));
    q = hn::MulAdd(q, size, hn::Set(d, -0.6319310665130615f));
    q = hn::MulAdd(q, size, hn::Set(d, -1.130170464515686f));
    q = hn::MulAdd(q, size, hn::Set(d, 0.0003042190510313958f));
    const V near = hn::Mul(size, s);
    const V far = hn::Sub(hn::Set(d, 1.0f), exp_nonpositive(d, hn::Min(q, hn::Zero(d))));
    return hn::CopySign(hn::IfThenElse(hn::Lt(size, hn::Set(d, 1.0f)), near, far), x);
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE V gelu_vector(D d, V x) {
    const V half = hn::Mul(x, hn::Set(d, 0.5f));
    return hn::MulAdd(half, erf_vector(d, hn::Mul(x, hn::Set(d, 0.70710678118654752f))), half);
}

// gelu'(x) = (1 + erf(x / sqrt 2)) / 2 + x e^(-x^2 / 2) / sqrt(2 pi).
template <class D, class V = hn::Vec<D>>
HWY_INLINE V gelu_derivative_vector(D d, V x) {
    const V half = hn::Set(d, 0.5f);
    const V phi = hn::MulAdd(half, erf_vector(d, hn::Mul(x, hn::Set(d, 0.70710678118654752f))), half);
    const V density =
        hn::Mul(exp_nonpositive(d, hn::Mul(hn::Mul(x, x), hn::Set(d, -0.5f))), hn::Set(d, 0.39894228040143268f));
    return hn::MulAdd(x, density, phi);
}

// The last, partial vector goes through a padded copy, so that every value is computed the same way.
void gelu_range(float* out, const float* inp, int64_t n) {
    const hn::ScalableTag<float> d;
    const int64_t N = static_cast<int64_t>(hn::Lanes(d)), vectors_end = n / N * N;
    for (int64_t i = 0; i < vectors_end; i += N) hn::StoreU(gelu_vector(d, hn::LoadU(d, inp + i)), d, out + i);
    HWY_ALIGN float rest[HWY_MAX_BYTES / sizeof(float)] = {};
    for (int64_t i = vectors_end; i < n; i++) rest[i - vectors_end] = inp[i];
    hn::Store(gelu_vector(d, hn::Load(d, rest)), d, rest);
    for (int64_t i = vectors_end; i < n; i++) out[i] = rest[i - vectors_end];
}

void gelu_backward_range(float* dinp, const float* dout, const float* inp, int64_t n) {
    const hn::ScalableTag<float> d;
    const int64_t N = static_cast<int64_t>(hn::Lanes(d)), vectors_end = n / N * N;
    for (int64_t i = 0; i < vectors_end; i += N)
        hn::StoreU(hn::Mul(hn::LoadU(d, dout + i), gelu_derivative_vector(d, hn::LoadU(d, inp + i))), d, dinp + i);
    HWY_ALIGN float rest[HWY_MAX_BYTES / sizeof(float)] = {};
    for (int64_t i = vectors_end; i < n; i++) rest[i - vectors_end] = inp[i];
    hn::Store(gelu_derivative_vector(d, hn::Load(d, rest)), d, rest);
    for (int64_t i = vectors_end; i < n; i++) dinp[i] = dout[i] * rest[i - vectors_end];
}

}  // namespace HWY_NAMESPACE
}  // namespace jetlag
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "kernels/cpu/parallel.h"
#include "kernels/ops.h"

namespace jetlag {

HWY_EXPORT(gelu_range);
HWY_EXPORT(gelu_backward_range);

static constexpr int64_t kRange = 8192;

void gelu_forward(float* out, const float* inp, int64_t n) {
    const auto range = HWY_DYNAMIC_DISPATCH(gelu_range);
#pragma omp parallel for schedule(static) num_threads(threads_for(static_cast <double>(n)))
    for (int64_t i = 0; i < n; i += kRange) range(out + i, inp + i, std::min(kRange, n - i));
}

void gelu_backward(float* dinp, const float* dout, const float* inp, int64_t n) {
    const auto range = HWY_DYNAMIC_DISPATCH(gelu_backward_range);
#pragma omp parallel for schedule(static) num_threads(threads_for(static_cast <double>(n)))
    for (int64_t i = 0; i < n; i += kRange) range(dinp + i, dout + i, inp + i, std::min(kRange, n - i));
}

void residual_forward(float* out, const float* a, const float* b, int64_t n) {
#pragma omp parallel for simd schedule(static) num_threads(threads_for(static_cast <double>(n)))
    for (int64_t i = 0; i < n; i++) out[i] = a[i] + b[i];
}

}  // namespace jetlag
#endif
