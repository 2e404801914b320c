// Reductions to the host, and AdamW. Both pass once over memory and are bound by it.
#include <cmath>
#include <vector>

#include "kernels/cpu/parallel.h"
#include "kernels/ops.h"

namespace jetlag {

static constexpr int64_t kReduceChunk = 16384;

// A partial result for each chunk of fixed length, combined in order.
Moments moments(const float* x, int64_t n) {
    const int64_t chunks = (n + kReduceChunk - 1) / kReduceChunk;
    std::vector<Moments> partial(static_cast<size_t>(chunks));
#pragma omp parallel for schedule(static) num_threads(threads_for(static_cast <double>(n)))
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        Moments sum;
        for (int64_t i = chunk * kReduceChunk; i < std::min(n, (chunk + 1) * kReduceChunk); i++) {
            sum.sum += x[i];
            sum.sum_of_squares += static_cast<double>(x[i]) * x[i];
            sum.largest = std::max(sum.largest, std::fabs(static_cast<double>(x[i])));
        }
        partial[chunk] = sum;
    }
    Moments total;
    for (const Moments& part : partial) {
        total.sum += part.sum;
        total.sum_of_squares += part.sum_of_squares;
        total.largest = std::max(total.largest, part.largest);
    }
    return total;
}

void euclidean_norm(double* norm, const float* x, int64_t n) {
    *norm = std::sqrt(moments(x, n).sum_of_squares);
}

int64_t first_nonfinite(const float* x, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (!std::isfinite(x[i])) return i;
    return -1;
}

// PyTorch's order of operations: decay first, then m and v, then p -= (lr / bias1) m / (sqrt(v) / sqrt(bias2) + eps).
void adamw(float* parameters, float* m, float* v, const float* gradients, const uint8_t* takes_part,
           const AdamW& settings, int64_t step, int64_t n) {
    double grad_scale = settings.grad_scale;
    if (settings.norm != nullptr) {
        if (!std::isfinite(*settings.norm)) return;
        if (settings.max_norm > 0 && *settings.norm > settings.max_norm)
            grad_scale *= settings.max_norm / *settings.norm;
    }
    const double bias1 = 1 - std::pow(settings.beta1, static_cast<double>(step));
    const double bias2 = 1 - std::pow(settings.beta2, static_cast<double>(step));
    // Each constant is computed in double and rounded once, as PyTorch does with its Python scalars.
    const float step_size = static_cast<float>(settings.lr / bias1);
    const float sqrt_bias2 = static_cast<float>(std::sqrt(bias2));
    const float keep = static_cast<float>(1 - settings.lr * settings.weight_decay);
    const float beta1 = static_cast<float>(settings.beta1), rest1 = static_cast<float>(1 - settings.beta1);
    const float beta2 = static_cast<float>(settings.beta2), rest2 = static_cast<float>(1 - settings.beta2);
    const float eps = static_cast<float>(settings.eps), scale = static_cast<float>(grad_scale);
#pragma omp parallel for schedule(static) num_threads(threads_for(static_cast <double>(4 * n)))
    for (int64_t i = 0; i < n; i++) {
        if (!takes_part[i]) continue;
        const float g = scale * gradients[i];
        m[i] = beta1 * m[i] + rest1 * g;
        v[i] = beta2 * v[i] + rest2 * g * g;
        parameters[i] = keep * parameters[i] - step_size * m[i] / (std::sqrt(v[i]) / sqrt_bias2 + eps);
    }
}

}  // namespace jetlag
