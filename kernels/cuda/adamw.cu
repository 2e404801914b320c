// AdamW on all parameters in one launch: 16 bytes read and 12 written for each, bound by memory. The arithmetic is the
// CPU's, operation by operation: constants in double, rounded once as PyTorch does with its Python scalars; then decay,
// m and v, and p -= (lr / bias1) m / (sqrt(v) / sqrt(bias2) + eps).
#include <cmath>

#include "kernels/cuda/runtime.h"
#include "kernels/ops.h"

namespace jetlag {

struct AdamWConstants {
    float step_size, sqrt_bias2, keep, beta1, rest1, beta2, rest2, eps;
    double scale, max_norm;
};

__global__ void __launch_bounds__(kThreads)
    adamw_kernel(float* parameters, float* m, float* v, const float* gradients, const uint8_t* takes_part,
                 AdamWConstants k, const double* norm, int64_t n) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (i >= n || !takes_part[i]) return;
    double scale = k.scale;
    if (norm != nullptr) {
        if (!isfinite(*norm)) return;
        if (k.max_norm > 0 && *norm > k.max_norm) scale *= k.max_norm / *norm;
    }
    const float g = static_cast<float>(scale) * gradients[i];
    const float m_i = k.beta1 * m[i] + k.rest1 * g;
    const float v_i = k.beta2 * v[i] + k.rest2 * g * g;
    m[i] = m_i;
    v[i] = v_i;
    parameters[i] = k.keep * parameters[i] - k.step_size * m_i / (sqrtf(v_i) / k.sqrt_bias2 + k.eps);
}

void adamw(float* parameters, float* m, float* v, const float* gradients, const uint8_t* takes_part,
           const AdamW& settings, int64_t step, int64_t n) {
    const double bias1 = 1 - std::pow(settings.beta1, static_cast<double>(step));
    const double bias2 = 1 - std::pow(settings.beta2, static_cast<double>(step));
    const AdamWConstants constants = {
        .step_size = static_cast<float>(settings.lr / bias1),
        .sqrt_bias2 = static_cast<float>(std::sqrt(bias2)),
        .keep = static_cast<float>(1 - settings.lr * settings.weight_decay),
        .beta1 = static_cast<float>(settings.beta1),
        .rest1 = static_cast<float>(1 - settings.beta1),
        .beta2 = static_cast<float>(settings.beta2),
        .rest2 = static_cast<float>(1 - settings.beta2),
        .eps = static_cast<float>(settings.eps),
        .scale = settings.grad_scale,
        .max_norm = settings.max_norm,
    };
    launch(adamw_kernel, blocks_for(n, kThreads), kThreads, 0, device_stream(), parameters, m, v, gradients, takes_part,
           constants, settings.norm, n);
}

}  // namespace jetlag
