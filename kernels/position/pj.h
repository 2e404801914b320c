// The PJ lag bias of the study: gated Fourier jets (FJ), an affine slope, and log-compressed Fourier jets (LC).
// With x = d/L, beta = d / sqrt(d^2 + L^2), phi = L asinh(x), and m over the F frequencies of a head:
//
//     FJ(d)     = e^(-c x)      sum_r alpha_r x^r / r!  sum_m (re[m][r] cos(omega_m d)   - im[m][r] sin(omega_m d))
//     affine(d) = -s x
//     LC(d)     = e^(-c' phi/L) sum_r alpha'_r beta^r   sum_m (re'[m][r] cos(omega_m phi) - im'[m][r] sin(omega_m phi))
//     bias(d)   = b0 + g_FJ FJ + g_affine affine + g_LC LC
//
// The published code has F = 1, b0 = 0 and c' = 0; the paper's Definition 1 has all three, as options here. Its
// damping of LC acts on the log-compressed lag phi as that of FJ acts on the lag.
#pragma once

#include <cmath>

#include "kernels/position/module.h"

namespace jetlag {

inline constexpr int kPjMaxOrder = 15;
inline constexpr int kPjMaxFrequencies = 16;

// Where the options are in LagBiasSpec::options.
enum PjOption {
    kPjSectors,  // sum of 1 << PjSector
    kPjOrder,    // R
    kPjAffineSlope,
    kPjGateInit,
    kPjFrequencies,  // F
    kPjCyclesMin,
    kPjCyclesMax,
    kPjConstant,
    kPjLcDamping,
};
enum PjSector { kPjFj, kPjAffine, kPjLc, kPjSectorCount };

// Where the coefficients of a head are.
struct PjLayout {
    int sectors, orders, frequencies;  // orders = R + 1
    int gate, slope, fj_damping, lc_damping, constant, omega, fj_alpha, lc_alpha, fj_re, fj_im, lc_re, lc_im, count;
};

JETLAG_DEVICE inline PjLayout pj_layout(const LagBiasSpec& spec) {
    PjLayout l;
    l.sectors = static_cast<int>(spec.options[kPjSectors]);
    l.orders = static_cast<int>(spec.options[kPjOrder]) + 1;
    l.frequencies = static_cast<int>(spec.options[kPjFrequencies]);
    const int amplitudes = l.frequencies * l.orders;
    l.gate = 0;
    l.slope = kPjSectorCount;
    l.fj_damping = l.slope + 1;
    l.lc_damping = l.fj_damping + 1;
    l.constant = l.lc_damping + 1;
    l.omega = l.constant + 1;
    l.fj_alpha = l.omega + l.frequencies;
    l.lc_alpha = l.fj_alpha + l.orders;
    l.fj_re = l.lc_alpha + l.orders;
    l.fj_im = l.fj_re + amplitudes;
    l.lc_re = l.fj_im + amplitudes;
    l.lc_im = l.lc_re + amplitudes;
    l.count = l.lc_im + amplitudes;
    return l;
}

// The coordinates of LC, for a lag d and the training length L, in float or double: the rapidity eta = asinh(d/L), of
// which the phase is phi = L eta, and the compressed amplitude beta = d / sqrt(d^2 + L^2) = tanh(eta).
template <typename Real>
JETLAG_DEVICE inline Real pj_rapidity(Real d, Real L) {
    using std::asinh;
    return asinh(d / L);
}
template <typename Real>
JETLAG_DEVICE inline Real pj_beta(Real d, Real L) {
    using std::sqrt;
    return d / sqrt(d * d + L * L);
}

// Both jet sectors have one form, envelope * sum_r alpha_r basis_r sum_m (re cos - im sin)(omega_m * lag); they
// differ in the lag (d, or phi), in the basis (x^r / r!, or beta^r), and in the coordinate that damps (x, or phi/L).
struct PjJet {
    int alpha, re, im, damping;  // coefficient positions
    double lag;
    double damped;
    double step;  // basis_r = basis_(r-1) * step, divided by r if `factorial`
    bool factorial;
};

JETLAG_DEVICE inline PjJet pj_fj(const PjLayout& l, double d, double L) {
    return {l.fj_alpha, l.fj_re, l.fj_im, l.fj_damping, d, d / L, d / L, true};
}

JETLAG_DEVICE inline PjJet pj_lc(const PjLayout& l, double d, double L) {
    const double rapidity = pj_rapidity(d, L);
    return {l.lc_alpha, l.lc_re, l.lc_im, l.lc_damping, L * rapidity, rapidity, pj_beta(d, L), false};
}

JETLAG_DEVICE inline double pj_jet(const PjLayout& l, const PjJet& jet, const double* c) {
    double sum = 0;
    for (int m = 0; m < l.frequencies; m++) {
        const double angle = c[l.omega + m] * jet.lag;
        const double cosine = cos(angle), sine = sin(angle);
        double basis = 1;
        for (int r = 0; r < l.orders; r++) {
            if (r > 0) basis *= jet.factorial ? jet.step / r : jet.step;
            const int k = m * l.orders + r;
            sum += c[jet.alpha + r] * basis * (c[jet.re + k] * cosine - c[jet.im + k] * sine);
        }
    }
    return exp(-c[jet.damping] * jet.damped) * sum;
}

// dc += djet * d pj_jet / dc; returns pj_jet.
JETLAG_DEVICE inline double pj_jet_gradient(const PjLayout& l, const PjJet& jet, const double* c, double djet,
                                            double* dc) {
    const double envelope = exp(-c[jet.damping] * jet.damped);
    double sum = 0;
    for (int m = 0; m < l.frequencies; m++) {
        const double angle = c[l.omega + m] * jet.lag;
        const double cosine = cos(angle), sine = sin(angle);
        double basis = 1;
        for (int r = 0; r < l.orders; r++) {
            if (r > 0) basis *= jet.factorial ? jet.step / r : jet.step;
            const int k = m * l.orders + r;
            const double wave = c[jet.re + k] * cosine - c[jet.im + k] * sine;
            const double weight = djet * envelope * basis;
            const double alpha = c[jet.alpha + r];
            sum += alpha * basis * wave;
            dc[jet.alpha + r] += weight * wave;
            dc[jet.re + k] += weight * alpha * cosine;
            dc[jet.im + k] -= weight * alpha * sine;
            dc[l.omega + m] -= weight * alpha * jet.lag * (c[jet.re + k] * sine + c[jet.im + k] * cosine);
        }
    }
    dc[jet.damping] -= djet * envelope * sum * jet.damped;
    return envelope * sum;
}

JETLAG_DEVICE inline double pj_bias(const LagBiasSpec& spec, const double* c, double d) {
    const PjLayout l = pj_layout(spec);
    const double L = static_cast<double>(spec.train_len);
    double bias = c[l.constant];
    if (l.sectors & (1 << kPjFj)) bias += c[l.gate + kPjFj] * pj_jet(l, pj_fj(l, d, L), c);
    if (l.sectors & (1 << kPjAffine)) bias -= c[l.gate + kPjAffine] * c[l.slope] * d / L;
    if (l.sectors & (1 << kPjLc)) bias += c[l.gate + kPjLc] * pj_jet(l, pj_lc(l, d, L), c);
    return bias;
}

JETLAG_DEVICE inline void pj_bias_gradient(const LagBiasSpec& spec, const double* c, double d, double dbias,
                                           double* dc) {
    const PjLayout l = pj_layout(spec);
    const double L = static_cast<double>(spec.train_len);
    dc[l.constant] += dbias;
    if (l.sectors & (1 << kPjFj)) {
        const double gate = c[l.gate + kPjFj];
        dc[l.gate + kPjFj] += dbias * pj_jet_gradient(l, pj_fj(l, d, L), c, dbias * gate, dc);
    }
    if (l.sectors & (1 << kPjAffine)) {
        dc[l.gate + kPjAffine] -= dbias * c[l.slope] * d / L;
        dc[l.slope] -= dbias * c[l.gate + kPjAffine] * d / L;
    }
    if (l.sectors & (1 << kPjLc)) {
        const double gate = c[l.gate + kPjLc];
        dc[l.gate + kPjLc] += dbias * pj_jet_gradient(l, pj_lc(l, d, L), c, dbias * gate, dc);
    }
}

// Raw parameters lie back to back in the order omega, gate_logits, fj_alpha_logits, lc_alpha_logits, fj_zeta_re,
// fj_zeta_im, lc_zeta_re, lc_zeta_im, raw_fj_damping, raw_affine_slope, then b0 and raw_lc_damping if those options are
// on.
struct PjParameters {
    int64_t omega, gate_logits, fj_alpha, lc_alpha, fj_re, fj_im, lc_re, lc_im, fj_damping, slope, constant, lc_damping,
        count;
};

JETLAG_DEVICE inline PjParameters pj_parameter_positions(const LagBiasSpec& spec, const PjLayout& l) {
    const int64_t H = spec.heads, amplitudes = H * l.frequencies * l.orders;
    PjParameters p;
    p.omega = 0;
    p.gate_logits = p.omega + H * l.frequencies;
    p.fj_alpha = p.gate_logits + H * kPjSectorCount;
    p.lc_alpha = p.fj_alpha + H * l.orders;
    p.fj_re = p.lc_alpha + H * l.orders;
    p.fj_im = p.fj_re + amplitudes;
    p.lc_re = p.fj_im + amplitudes;
    p.lc_im = p.lc_re + amplitudes;
    p.fj_damping = p.lc_im + amplitudes;
    p.slope = p.fj_damping + H;
    p.constant = p.slope + H;
    p.lc_damping = p.constant + (spec.options[kPjConstant] != 0 ? H : 0);
    p.count = p.lc_damping + (spec.options[kPjLcDamping] != 0 ? H : 0);
    return p;
}

JETLAG_DEVICE inline double pj_softplus(double x) {
    return x > 30 ? x : log1p(exp(x));
}
JETLAG_DEVICE inline double pj_sigmoid(double x) {
    return 1 / (1 + exp(-x));
}

// Softmax of n logits (float or double); those whose bit in `enabled` is 0 get weight 0.
template <typename Real>
JETLAG_DEVICE inline void pj_softmax(const Real* logits, int n, unsigned enabled, double* weights) {
    double largest = -INFINITY;
    for (int i = 0; i < n; i++)
        if ((enabled >> i & 1) && logits[i] > largest) largest = logits[i];
    double sum = 0;
    for (int i = 0; i < n; i++) {
        weights[i] = (enabled >> i & 1) ? exp(logits[i] - largest) : 0;
        sum += weights[i];
    }
    for (int i = 0; i < n; i++) weights[i] /= sum;
}

// dlogits += the gradient of the softmax; a masked logit has weight 0 and so gradient 0.
template <typename Real>
JETLAG_DEVICE inline void pj_softmax_gradient(const double* weights, const double* dweights, int n, Real* dlogits) {
    double mean = 0;
    for (int i = 0; i < n; i++) mean += weights[i] * dweights[i];
    for (int i = 0; i < n; i++) dlogits[i] += static_cast<Real>(weights[i] * (dweights[i] - mean));
}

JETLAG_DEVICE inline void pj_coefficients(const LagBiasSpec& spec, const float* parameters, int64_t head, double* c) {
    const PjLayout l = pj_layout(spec);
    const PjParameters p = pj_parameter_positions(spec, l);
    const unsigned all_orders = (1u << l.orders) - 1;
    const int amplitudes = l.frequencies * l.orders;
    pj_softmax(parameters + p.gate_logits + head * kPjSectorCount, kPjSectorCount, l.sectors, c + l.gate);
    c[l.slope] = pj_softplus(parameters[p.slope + head]);
    c[l.fj_damping] = pj_softplus(parameters[p.fj_damping + head]);
    c[l.lc_damping] = spec.options[kPjLcDamping] != 0 ? pj_softplus(parameters[p.lc_damping + head]) : 0;
    c[l.constant] = spec.options[kPjConstant] != 0 ? parameters[p.constant + head] : 0;
    for (int m = 0; m < l.frequencies; m++) c[l.omega + m] = parameters[p.omega + head * l.frequencies + m];
    pj_softmax(parameters + p.fj_alpha + head * l.orders, l.orders, all_orders, c + l.fj_alpha);
    pj_softmax(parameters + p.lc_alpha + head * l.orders, l.orders, all_orders, c + l.lc_alpha);
    for (int k = 0; k < amplitudes; k++) {
        c[l.fj_re + k] = parameters[p.fj_re + head * amplitudes + k];
        c[l.fj_im + k] = parameters[p.fj_im + head * amplitudes + k];
        c[l.lc_re + k] = parameters[p.lc_re + head * amplitudes + k];
        c[l.lc_im + k] = parameters[p.lc_im + head * amplitudes + k];
    }
}

JETLAG_DEVICE inline void pj_coefficients_gradient(const LagBiasSpec& spec, const float* parameters, int64_t head,
                                                   const double* c, const double* dc, float* dparameters) {
    const PjLayout l = pj_layout(spec);
    const PjParameters p = pj_parameter_positions(spec, l);
    const int amplitudes = l.frequencies * l.orders;
    pj_softmax_gradient(c + l.gate, dc + l.gate, kPjSectorCount, dparameters + p.gate_logits + head * kPjSectorCount);
    dparameters[p.slope + head] += static_cast<float>(dc[l.slope] * pj_sigmoid(parameters[p.slope + head]));
    dparameters[p.fj_damping + head] +=
        static_cast<float>(dc[l.fj_damping] * pj_sigmoid(parameters[p.fj_damping + head]));
    if (spec.options[kPjConstant] != 0) dparameters[p.constant + head] += static_cast<float>(dc[l.constant]);
    if (spec.options[kPjLcDamping] != 0)
        dparameters[p.lc_damping + head] +=
            static_cast<float>(dc[l.lc_damping] * pj_sigmoid(parameters[p.lc_damping + head]));
    for (int m = 0; m < l.frequencies; m++)
        dparameters[p.omega + head * l.frequencies + m] += static_cast<float>(dc[l.omega + m]);
    pj_softmax_gradient(c + l.fj_alpha, dc + l.fj_alpha, l.orders, dparameters + p.fj_alpha + head * l.orders);
    pj_softmax_gradient(c + l.lc_alpha, dc + l.lc_alpha, l.orders, dparameters + p.lc_alpha + head * l.orders);
    for (int k = 0; k < amplitudes; k++) {
        dparameters[p.fj_re + head * amplitudes + k] += static_cast<float>(dc[l.fj_re + k]);
        dparameters[p.fj_im + head * amplitudes + k] += static_cast<float>(dc[l.fj_im + k]);
        dparameters[p.lc_re + head * amplitudes + k] += static_cast<float>(dc[l.lc_re + k]);
        dparameters[p.lc_im + head * amplitudes + k] += static_cast<float>(dc[l.lc_im + k]);
    }
}

std::vector<Option> pj_options();
std::vector<BiasParameter> pj_parameters(const LagBiasSpec& spec);
int64_t pj_coefficient_count(const LagBiasSpec& spec);
std::vector<std::pair<std::string, double>> pj_summary(const LagBiasSpec& spec, const float* parameters);

inline constexpr LagBiasModule pj_module = {
    .name = "pj",
    .formula = "bias = g_FJ FJ(d) + g_affine affine(d) + g_LC LC(d), learned",
    .state_name = "pj_bias",
    .options = pj_options,
    .parameters = pj_parameters,
    .coefficient_count = pj_coefficient_count,
    .coefficients = pj_coefficients,
    .bias = pj_bias,
    .bias_gradient = pj_bias_gradient,
    .coefficients_gradient = pj_coefficients_gradient,
    .summary = pj_summary,
};

}  // namespace jetlag
