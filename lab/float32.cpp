#include "lab/float32.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "lab/float32.cpp"
#include <hwy/foreach_target.h>
// clang-format off
#include <hwy/highway.h>
// clang-format on

#include <algorithm>
#include <cmath>

HWY_BEFORE_NAMESPACE();
namespace jetlag {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// out[n] for one row of a, all n.
void product_row(float* out, const float* a, const float* b, int64_t K, int64_t N) {
    int64_t n = 0;
#if HWY_NATIVE_FMA
    const hn::ScalableTag<float> d;
    const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
    for (; n + 4 * lanes <= N; n += 4 * lanes) {
        auto sum0 = hn::Zero(d), sum1 = sum0, sum2 = sum0, sum3 = sum0;
        for (int64_t k = 0; k < K; k++) {
            const auto x = hn::Set(d, a[k]);
            const float* row = b + k * N + n;
            sum0 = hn::MulAdd(x, hn::LoadU(d, row), sum0);
            sum1 = hn::MulAdd(x, hn::LoadU(d, row + lanes), sum1);
            sum2 = hn::MulAdd(x, hn::LoadU(d, row + 2 * lanes), sum2);
            sum3 = hn::MulAdd(x, hn::LoadU(d, row + 3 * lanes), sum3);
        }
        hn::StoreU(sum0, d, out + n);
        hn::StoreU(sum1, d, out + n + lanes);
        hn::StoreU(sum2, d, out + n + 2 * lanes);
        hn::StoreU(sum3, d, out + n + 3 * lanes);
    }
#endif
    for (; n < N; n++) {
        float sum = 0;
        for (int64_t k = 0; k < K; k++) sum = std::fma(a[k], b[k * N + n], sum);
        out[n] = sum;
    }
}

}  // namespace HWY_NAMESPACE
}  // namespace jetlag
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <sleef.h>

// sleef.h shows these only to code that is compiled for FMA as a whole.
extern "C" {
float Sleef_cosf1_u10purecfma(float);
float Sleef_sinf1_u10purecfma(float);
float Sleef_expf1_u10purecfma(float);
float Sleef_log1pf1_u10purecfma(float);
float Sleef_powf1_u10purecfma(float, float);
}

namespace jetlag {

HWY_EXPORT(product_row);

// They are in the library for every CPU, but run only on those with FMA.
#if defined(__x86_64__)
static const bool kHasFma = __builtin_cpu_supports("fma");
#else
static const bool kHasFma = true;
#endif

float float_cos(float x) {
    return kHasFma ? Sleef_cosf1_u10purecfma(x) : Sleef_cosf1_u10purec(x);
}
float float_sin(float x) {
    return kHasFma ? Sleef_sinf1_u10purecfma(x) : Sleef_sinf1_u10purec(x);
}
float float_exp(float x) {
    return kHasFma ? Sleef_expf1_u10purecfma(x) : Sleef_expf1_u10purec(x);
}
float float_log1p(float x) {
    return kHasFma ? Sleef_log1pf1_u10purecfma(x) : Sleef_log1pf1_u10purec(x);
}

float float_power(float x, int r) {
    if (r == 0) return 1;
    if (r == 1) return x;
    if (r == 2) return x * x;
    if (r == 3) return x * x * x;
    const float exponent = static_cast<float>(r);
    return kHasFma ? Sleef_powf1_u10purecfma(x, exponent) : Sleef_powf1_u10purec(x, exponent);
}

FloatMatrix transposed(const FloatMatrix& matrix) {
    FloatMatrix out = make_float_matrix(matrix.columns, matrix.rows);
    for (int64_t i = 0; i < matrix.rows; i++)
        for (int64_t j = 0; j < matrix.columns; j++)
            out.values[static_cast<size_t>(j * matrix.rows + i)] =
                matrix.values[static_cast<size_t>(i * matrix.columns + j)];
    return out;
}

FloatMatrix product(const FloatMatrix& a, const FloatMatrix& b) {
    FloatMatrix out = make_float_matrix(a.rows, b.columns);
    const auto row = HWY_DYNAMIC_DISPATCH(product_row);
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < a.rows; i++)
        row(&out.values[static_cast<size_t>(i * b.columns)], &a.values[static_cast<size_t>(i * a.columns)],
            b.values.data(), a.columns, b.columns);
    return out;
}

int64_t normalise_rows(FloatMatrix& matrix) {
    constexpr int64_t kLanes = 8;
    const int64_t n = matrix.columns, whole = n - n % kLanes;
    int64_t nonfinite = 0;
#pragma omp parallel for schedule(static) reduction(+ : nonfinite)
    for (int64_t i = 0; i < matrix.rows; i++) {
        float* x = &matrix.values[static_cast<size_t>(i * n)];
        float lanes[kLanes] = {};
        for (int64_t j = 0; j < whole; j++) lanes[j % kLanes] = std::fma(x[j], x[j], lanes[j % kLanes]);
        float sum = lanes[0];
        for (int64_t j = 1; j < kLanes; j++) sum += lanes[j];
        for (int64_t j = whole; j < n; j++) sum = std::fma(x[j], x[j], sum);
        nonfinite += !std::isfinite(sum);
        const float norm = std::max(std::sqrt(sum), 1e-12f);  // NaN stays
        for (int64_t j = 0; j < n; j++) x[j] /= norm;
    }
    return nonfinite;
}

// The nearest whole number, halves to even, for |x| < 2^22: at this size the sum keeps no fraction.
static float rounded(float x) {
    constexpr float kWhole = 12582912;  // 1.5 * 2^23
    return (x + kWhole) - kWhole;
}

FloatMatrix quantised(const FloatMatrix& matrix, int bits, bool per_column) {
    const float steps = static_cast<float>((1 << (bits - 1)) - 1);
    std::vector<float> scale(static_cast<size_t>(matrix.columns), 0.0f);
    for (int64_t i = 0; i < matrix.rows; i++)
        for (int64_t j = 0; j < matrix.columns; j++) {
            float& largest = scale[static_cast<size_t>(j)];
            const float x = std::fabs(matrix.values[static_cast<size_t>(i * matrix.columns + j)]);
            largest = x > largest || std::isnan(x) ? x : largest;
        }
    if (!per_column) {
        float largest = 0;
        for (float s : scale) largest = s > largest || std::isnan(s) ? s : largest;
        std::fill(scale.begin(), scale.end(), largest);
    }
    for (float& s : scale) s = std::max(s, 1e-12f) / steps;  // NaN stays
    FloatMatrix out = matrix;
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < matrix.rows; i++)
        for (int64_t j = 0; j < matrix.columns; j++) {
            float& x = out.values[static_cast<size_t>(i * matrix.columns + j)];
            const float s = scale[static_cast<size_t>(j)];
            x = std::clamp(rounded(x / s), -steps, steps) * s;
        }
    return out;
}

}  // namespace jetlag
#endif
