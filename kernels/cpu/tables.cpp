// The position tables. Angles and biases are computed in double and stored as float: at position 32768 an angle
// in float is wrong by 1e-3. The work is O(T) per head or pair, small beside attention's O(T^2).
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/cpu/parallel.h"
#include "kernels/ops.h"

namespace jetlag {

void rotary_table(const RotaryTable& table, const RotarySpec& spec, int64_t T) {
    const int64_t P = table.pairs;
#pragma omp parallel for schedule(static) num_threads(threads_for(static_cast <double>(T * (P + 1)) * 50))
    for (int64_t t = 0; t < T; t++) {
        for (int64_t p = 0; p < P; p++) {
            const Rotation rotation = spec.module->rotation(spec, T, t, p);
            const double cosine = std::cos(rotation.angle), sine = std::sin(rotation.angle);
            table.query_cos[t * P + p] = static_cast<float>(rotation.query_gain * cosine);
            table.query_sin[t * P + p] = static_cast<float>(rotation.query_gain * sine);
            table.key_cos[t * P + p] = static_cast<float>(rotation.key_gain * cosine);
            table.key_sin[t * P + p] = static_cast<float>(rotation.key_gain * sine);
        }
        if (table.shear != nullptr) table.shear[t] = static_cast<float>(spec.module->shear(spec, T, t));
    }
}

static std::vector<double> coefficients_of_heads(const LagBiasSpec& spec, const float* parameters) {
    const int64_t n = spec.module->coefficient_count(spec);
    std::vector<double> c(static_cast<size_t>(spec.heads * n));
    for (int64_t h = 0; h < spec.heads; h++) spec.module->coefficients(spec, parameters, h, c.data() + h * n);
    return c;
}

static void bias_of_lags(float* table, const LagBiasSpec& spec, const float* parameters, int64_t T) {
    const int64_t n = spec.module->coefficient_count(spec);
    const std::vector<double> c = coefficients_of_heads(spec, parameters);
#pragma omp parallel for collapse(2) schedule(static) \
    num_threads(threads_for(static_cast <double>(spec.heads * T) * 200))
    for (int64_t h = 0; h < spec.heads; h++)
        for (int64_t d = 0; d < T; d++)
            table[h * T + d] = static_cast<float>(spec.module->bias(spec, c.data() + h * n, static_cast<double>(d)));
}

void lag_bias_table(float* table, const LagBiasSpec& spec, const float* parameters, int64_t T) {
    if (spec.module == nullptr) std::fill_n(table, spec.heads * T, 0.0f);
    if (spec.module != nullptr) bias_of_lags(table, spec, parameters, T);
    for (int64_t h = 0; spec.strict_mask && h < spec.heads; h++) table[h * T] = -INFINITY;
}

// Each (head, chunk of lags) sums into coefficients of its own; the chunks are then added in order.
void lag_bias_table_backward(float* dparameters, const float* dtable, const LagBiasSpec& spec, const float* parameters,
                             int64_t T) {
    const int64_t H = spec.heads, n = spec.module->coefficient_count(spec);
    const int64_t chunks = std::clamp<int64_t>(T / 128, 1, 64);
    const std::vector<double> c = coefficients_of_heads(spec, parameters);
    std::vector<double> partial(static_cast<size_t>(H * chunks * n), 0.0);
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads_for(static_cast <double>(H * T) * 300))
    for (int64_t h = 0; h < H; h++)
        for (int64_t chunk = 0; chunk < chunks; chunk++) {
            std::vector<double> sum(static_cast<size_t>(n), 0.0);
            const int64_t first = std::max<int64_t>(chunk_begin(chunk, chunks, T), spec.strict_mask ? 1 : 0);
            for (int64_t d = first; d < chunk_begin(chunk + 1, chunks, T); d++)
                spec.module->bias_gradient(spec, c.data() + h * n, static_cast<double>(d), dtable[h * T + d],
                                           sum.data());
            std::copy(sum.begin(), sum.end(), partial.begin() + (h * chunks + chunk) * n);
        }
    for (int64_t h = 0; h < H; h++) {
        std::vector<double> dc(static_cast<size_t>(n), 0.0);
        for (int64_t chunk = 0; chunk < chunks; chunk++)
            for (int64_t i = 0; i < n; i++) dc[i] += partial[(h * chunks + chunk) * n + i];
        spec.module->coefficients_gradient(spec, parameters, h, c.data() + h * n, dc.data(), dparameters);
    }
}

}  // namespace jetlag
