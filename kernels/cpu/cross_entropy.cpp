// Softmax cross-entropy fused with its gradient: per row a pass for the maximum, one for the exponentials and
// their sum, one for the gradient, all in the first-level cache. The logits are read once from memory and, when
// dlogits is logits, replaced by their gradient.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/cross_entropy.cpp"
#include <hwy/foreach_target.h>
// clang-format off
#include <hwy/highway.h>
#include "kernels/cpu/exp-inl.h"
// clang-format on

#include <algorithm>
#include <cmath>
#include <cstdint>

HWY_BEFORE_NAMESPACE();
namespace jetlag {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

float cross_entropy_row(float* dlogits, const float* logits, int32_t target, float scale, int64_t V) {
    const hn::ScalableTag<float> d;
    const int64_t N = static_cast<int64_t>(hn::Lanes(d)), vectors_end = V / N * N;
    const float target_logit = logits[target];
    float largest = -INFINITY;
    if (vectors_end > 0) {
        auto largest_v = hn::LoadU(d, logits);
        for (int64_t v = N; v < vectors_end; v += N) largest_v = hn::Max(largest_v, hn::LoadU(d, logits + v));
        largest = hn::GetLane(hn::MaxOfLanes(d, largest_v));
    }
    for (int64_t v = vectors_end; v < V; v++) largest = std::max(largest, logits[v]);

    const auto largest_v = hn::Set(d, largest);
    auto sum_v = hn::Zero(d);
    for (int64_t v = 0; v < vectors_end; v += N) {
        const auto e = exp_nonpositive(d, hn::Sub(hn::LoadU(d, logits + v), largest_v));
        sum_v = hn::Add(sum_v, e);
        if (dlogits != nullptr) hn::StoreU(e, d, dlogits + v);
    }
    float sum = hn::GetLane(hn::SumOfLanes(d, sum_v));
    for (int64_t v = vectors_end; v < V; v++) {
        const float e = std::exp(logits[v] - largest);
        sum += e;
        if (dlogits != nullptr) dlogits[v] = e;
    }
    if (dlogits != nullptr) {
        const float factor = scale / sum;
        const auto factor_v = hn::Set(d, factor);
        for (int64_t v = 0; v < vectors_end; v += N)
            hn::StoreU(hn::Mul(hn::LoadU(d, dlogits + v), factor_v), d, dlogits + v);
        for (int64_t v = vectors_end; v < V; v++) dlogits[v] *= factor;
        dlogits[target] -= scale;
    }
    return std::log(sum) + (largest - target_logit);
}

}  // namespace HWY_NAMESPACE
}  // namespace jetlag
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "kernels/cpu/parallel.h"
#include "kernels/ops.h"

namespace jetlag {

HWY_EXPORT(cross_entropy_row);

void cross_entropy(float* losses, float* dlogits, const float* logits, const int32_t* targets, float scale, int64_t N,
                   int64_t V) {
    const auto row = HWY_DYNAMIC_DISPATCH(cross_entropy_row);
#pragma omp parallel for schedule(static) num_threads(threads_for(static_cast <double>(N * V)))
    for (int64_t n = 0; n < N; n++)
        losses[n] = row(dlogits != nullptr ? dlogits + n * V : nullptr, logits + n * V, targets[n], scale, V);
}

}  // namespace jetlag
#endif
