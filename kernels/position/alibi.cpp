#include "kernels/position/alibi.h"

namespace jetlag {

static std::vector<Option> alibi_options() {
    return {};
}
static std::vector<BiasParameter> alibi_parameters(const LagBiasSpec&) {
    return {};
}
static int64_t alibi_coefficient_count(const LagBiasSpec&) {
    return 1;
}

static void alibi_coefficients(const LagBiasSpec& spec, const float*, int64_t head, double* c) {
    c[0] = alibi_slope(spec.heads, head);
}
static double alibi_bias(const LagBiasSpec&, const double* c, double d) {
    return -c[0] * d;
}
static void alibi_bias_gradient(const LagBiasSpec&, const double*, double, double, double*) {}
static void alibi_coefficients_gradient(const LagBiasSpec&, const float*, int64_t, const double*, const double*,
                                        float*) {}

static std::vector<std::pair<std::string, double>> alibi_summary(const LagBiasSpec&, const float*) {
    return {};
}

const LagBiasModule alibi_module = {
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
