// LayerNorm. Forward reads each row twice while it is in the first-level cache (mean, then variance and output),
// also where the row is the sum of a residual add just done; backward needs two sums per row for dinp and two per
// channel for the parameters. Bound by memory.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/layernorm.cpp"
#include <hwy/foreach_target.h>
// clang-format off
#include <hwy/highway.h>
// clang-format on

#include <cmath>
#include <cstdint>

HWY_BEFORE_NAMESPACE();
namespace jetlag {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

void layernorm_row(float* out, float* mean_out, float* rstd_out, const float* x, const float* weight, const float* bias,
                   int64_t C) {
    const hn::ScalableTag<float> d;
    const int64_t N = static_cast<int64_t>(hn::Lanes(d)), vectors_end = C / N * N;
    auto sum_v = hn::Zero(d);
    for (int64_t c = 0; c < vectors_end; c += N) sum_v = hn::Add(sum_v, hn::LoadU(d, x + c));
    float sum = hn::GetLane(hn::SumOfLanes(d, sum_v));
    for (int64_t c = vectors_end; c < C; c++) sum += x[c];
    const float mean = sum / static_cast<float>(C);

    const auto mean_v = hn::Set(d, mean);
    auto squares_v = hn::Zero(d);
    for (int64_t c = 0; c < vectors_end; c += N) {
        const auto centred = hn::Sub(hn::LoadU(d, x + c), mean_v);
        squares_v = hn::MulAdd(centred, centred, squares_v);
    }
    float squares = hn::GetLane(hn::SumOfLanes(d, squares_v));
    for (int64_t c = vectors_end; c < C; c++) squares += (x[c] - mean) * (x[c] - mean);
    const float rstd = 1.0f / std::sqrt(squares / static_cast<float>(C) + 1e-5f);

    const auto rstd_v = hn::Set(d, rstd);
    for (int64_t c = 0; c < vectors_end; c += N) {
        const auto normal = hn::Mul(hn::Sub(hn::LoadU(d, x + c), mean_v), rstd_v);
        hn::StoreU(hn::MulAdd(normal, hn::LoadU(d, weight + c), hn::LoadU(d, bias + c)), d, out + c);
    }
    for (int64_t c = vectors_end; c < C; c++) out[c] = (x[c] - mean) * rstd * weight[c] + bias[c];
    *mean_out = mean;
    *rstd_out = rstd;
}

// With n = (x - mean) rstd and g = dout * weight: dx += rstd (g - mean(g) - n mean(g n)).
void layernorm_backward_row(float* dinp, float* dweight, float* dbias, const float* dout, const float* x,
                            const float* weight, float mean, float rstd, int64_t C) {
    const hn::ScalableTag<float> d;
    const int64_t N = static_cast<int64_t>(hn::Lanes(d)), vectors_end = C / N * N;
    const auto mean_v = hn::Set(d, mean), rstd_v = hn::Set(d, rstd);
    auto sum_g_v = hn::Zero(d), sum_gn_v = hn::Zero(d);
    for (int64_t c = 0; c < vectors_end; c += N) {
        const auto dy = hn::LoadU(d, dout + c);
        const auto normal = hn::Mul(hn::Sub(hn::LoadU(d, x + c), mean_v), rstd_v);
        const auto g = hn::Mul(dy, hn::LoadU(d, weight + c));
        sum_g_v = hn::Add(sum_g_v, g);
        sum_gn_v = hn::MulAdd(g, normal, sum_gn_v);
        hn::StoreU(hn::MulAdd(dy, normal, hn::LoadU(d, dweight + c)), d, dweight + c);
        hn::StoreU(hn::Add(dy, hn::LoadU(d, dbias + c)), d, dbias + c);
    }
    float sum_g = hn::GetLane(hn::SumOfLanes(d, sum_g_v)), sum_gn = hn::GetLane(hn::SumOfLanes(d, sum_gn_v));
    for (int64_t c = vectors_end; c < C; c++) {
        const float normal = (x[c] - mean) * rstd, g = dout[c] * weight[c];
        sum_g += g;
        sum_gn += g * normal;
        dweight[c] += dout[c] * normal;
        dbias[c] += dout[c];
    }
    const float mean_g = sum_g / static_cast<float>(C), mean_gn = sum_gn / static_cast<float>(C);
    const auto mean_g_v = hn::Set(d, mean_g), mean_gn_v = hn::Set(d, mean_gn);
    for (int64_t c = 0; c < vectors_end; c += N) {
        const auto normal = hn::Mul(hn::Sub(hn::LoadU(d, x + c), mean_v), rstd_v);
        const auto g = hn::Mul(hn::LoadU(d, dout + c), hn::LoadU(d, weight + c));
        const auto dx = hn::Sub(hn::Sub(g, mean_g_v), hn::Mul(normal, mean_gn_v));
        hn::StoreU(hn::MulAdd(dx, rstd_v, hn::LoadU(d, dinp + c)), d, dinp + c);
    }
    for (int64_t c = vectors_end; c < C; c++) {
        const float normal = (x[c] - mean) * rstd, g = dout[c] * weight[c];
        dinp[c] += (g - mean_g - normal * mean_gn) * rstd;
    }
}

}  // namespace HWY_NAMESPACE
}  // namespace jetlag
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "kernels/cpu/parallel.h"
#include "kernels/ops.h"

namespace jetlag {

HWY_EXPORT(layernorm_row);
HWY_EXPORT(layernorm_backward_row);

void layernorm_forward(float* out, float* mean, float* rstd, const float* inp, const float* weight, const float* bias,
                       int64_t N, int64_t C) {
    const auto row = HWY_DYNAMIC_DISPATCH(layernorm_row);
#pragma omp parallel for schedule(static) num_threads(threads_for(static_cast <double>(N * C)))
    for (int64_t n = 0; n < N; n++) row(out + n * C, mean + n, rstd + n, inp + n * C, weight, bias, C);
}

void residual_layernorm_forward(float* sum, float* out, float* mean, float* rstd, const float* a, const float* b,
                                const float* weight, const float* bias, int64_t N, int64_t C) {
    const auto row = HWY_DYNAMIC_DISPATCH(layernorm_row);
#pragma omp parallel for schedule(static) num_threads(threads_for(static_cast <double>(N * C)))
    for (int64_t n = 0; n < N; n++) {
#pragma omp simd
        for (int64_t c = n * C; c < (n + 1) * C; c++) sum[c] = a[c] + b[c];
        row(out + n * C, mean + n, rstd + n, sum + n * C, weight, bias, C);
    }
}

int64_t layernorm_workspace_floats(int64_t N, int64_t C) {
    return 2 * sum_chunks(N) * C;
}

void layernorm_backward(float* dinp, float* dweight, float* dbias, const float* dout, const float* inp,
                        const float* weight, const float* mean, const float* rstd, float* workspace, int64_t N,
                        int64_t C) {
    const auto row = HWY_DYNAMIC_DISPATCH(layernorm_backward_row);
    const int64_t chunks = sum_chunks(N);
    float* partial = workspace;  // (chunks, 2, C)
#pragma omp parallel for schedule(static) num_threads(threads_for(static_cast <double>(2 * N * C)))
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        float* dweight_chunk = partial + 2 * chunk * C;
        float* dbias_chunk = dweight_chunk + C;
        std::fill(dweight_chunk, dweight_chunk + 2 * C, 0.0f);
        for (int64_t n = chunk_begin(chunk, chunks, N); n < chunk_begin(chunk + 1, chunks, N); n++)
            row(dinp + n * C, dweight_chunk, dbias_chunk, dout + n * C, inp + n * C, weight, mean[n], rstd[n], C);
    }
    for (int64_t chunk = 0; chunk < chunks; chunk++)
        for (int64_t c = 0; c < C; c++) {
            dweight[c] += partial[2 * chunk * C + c];
            dbias[c] += partial[(2 * chunk + 1) * C + c];
        }
}

}  // namespace jetlag
#endif
