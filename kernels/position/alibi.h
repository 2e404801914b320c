// ALiBi (Press et al. 2022): a fixed bias -m_h d. For H a power of two m_h = 2^(-8(h+1)/H); for another H the slopes
// of the power of two below come first, then every second slope of the power of two above.
#pragma once

#include <cmath>

#include "kernels/position/module.h"

namespace jetlag {

JETLAG_DEVICE inline double alibi_slope(int64_t heads, int64_t head) {
    int64_t power = 1;
    while (2 * power <= heads) power *= 2;
    if (head < power) return exp2(-8.0 * static_cast<double>(head + 1) / static_cast<double>(power));
    const int64_t odd = 2 * (head - power) + 1;
    return exp2(-8.0 * static_cast<double>(odd) / static_cast<double>(2 * power));
}

JETLAG_DEVICE inline void alibi_coefficients(const LagBiasSpec& spec, const float*, int64_t head, double* c) {
    c[0] = alibi_slope(spec.heads, head);
}

JETLAG_DEVICE inline double alibi_bias(const LagBiasSpec&, const double* c, double d) {
    return -c[0] * d;
}

JETLAG_DEVICE inline void alibi_bias_gradient(const LagBiasSpec&, const double*, double, double, double*) {}

JETLAG_DEVICE inline void alibi_coefficients_gradient(const LagBiasSpec&, const float*, int64_t, const double*,
                                                      const double*, float*) {}

std::vector<Option> alibi_options();
std::vector<BiasParameter> alibi_parameters(const LagBiasSpec& spec);
int64_t alibi_coefficient_count(const LagBiasSpec& spec);
std::vector<std::pair<std::string, double>> alibi_summary(const LagBiasSpec& spec, const float* parameters);

inline constexpr LagBiasModule alibi_module = {
    .name = "alibi",
    .formula = "bias = -2^(-8(h+1)/H) d, fixed",
    .state_name = "alibi",
    .options = alibi_options,
    .parameters = alibi_parameters,
    .coefficient_count = alibi_coefficient_count,
    .coefficients = alibi_coefficients,
    .bias = alibi_bias,
    .bias_gradient = alibi_bias_gradient,
    .coefficients_gradient = alibi_coefficients_gradient,
    .summary = alibi_summary,
};

}  // namespace jetlag
