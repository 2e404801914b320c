// Lag-bias tables: PJ with its gradient, and ALiBi.
#include <algorithm>
#include <cmath>
#include <numbers>

#include "src/error.h"
#include "test/reference/reference.h"

namespace jetlag::reference {

static double softplus(double x) {
    return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x)));
}

static double sigmoid(double x) {  // the derivative of softplus
    return 1 / (1 + std::exp(-x));
}

// Softmax over the enabled entries; the others are 0.
static Vector softmax(const double* logits, const std::vector<bool>& enabled) {
    Vector out(enabled.size(), 0.0);
    double max = -INFINITY, sum = 0;
    for (size_t i = 0; i < enabled.size(); i++) {
        if (enabled[i]) max = std::max(max, logits[i]);
    }
    for (size_t i = 0; i < enabled.size(); i++) {
        if (enabled[i]) sum += out[i] = std::exp(logits[i] - max);
    }
    for (double& value : out) value = sum > 0 ? value / sum : 0;
    return out;
}

// Adds the gradient with respect to the logits. An entry of probability 0 gets none.
static void softmax_backward(const Vector& probabilities, const Vector& dprobabilities, double* dlogits) {
    double mean = 0;
    for (size_t i = 0; i < probabilities.size(); i++) mean += probabilities[i] * dprobabilities[i];
    for (size_t i = 0; i < probabilities.size(); i++) dlogits[i] += probabilities[i] * (dprobabilities[i] - mean);
}

bool has_any_sector(const LagBiasSettings& settings) {
    return settings.fj || settings.affine || settings.lc;
}

std::map<std::string, std::vector<int64_t>> lag_bias_shapes(const LagBiasSettings& settings, int64_t H) {
    const int64_t F = settings.frequencies, orders = settings.max_order + 1;
    const std::vector<int64_t> omega = F == 1 ? std::vector<int64_t>{H} : std::vector<int64_t>{H, F};
    const std::vector<int64_t> zeta = F == 1 ? std::vector<int64_t>{H, orders} : std::vector<int64_t>{H, F, orders};
    std::map<std::string, std::vector<int64_t>> shapes = {
        {"omega", omega},
        {"gate_logits", {H, 3}},
        {"fj_alpha_logits", {H, orders}},
        {"lc_alpha_logits", {H, orders}},
        {"fj_zeta_re", zeta},
        {"fj_zeta_im", zeta},
        {"lc_zeta_re", zeta},
        {"lc_zeta_im", zeta},
        {"raw_fj_damping", {H}},
        {"raw_affine_slope", {H}},
    };
    if (settings.constant) shapes["b0"] = {H};
    if (settings.lc_damping) shapes["raw_lc_damping"] = {H};
    return shapes;
}

bool lag_bias_takes_part(const LagBiasSettings& settings, const std::string& tensor) {
    if (tensor == "gate_logits" || tensor == "b0") return true;
    if (tensor == "omega") return settings.fj || settings.lc;
    if (tensor == "raw_fj_damping" || tensor.starts_with("fj_")) return settings.fj;
    if (tensor == "raw_lc_damping" || tensor.starts_with("lc_")) return settings.lc;
    if (tensor == "raw_affine_slope") return settings.affine;
    fail("reference: {} is no tensor of a lag bias", tensor);
}

Tensors initial_lag_bias(const LagBiasSettings& settings, int64_t H, int64_t L, double init_affine_slope,
                         const std::string& gate_init) {
    Tensors parameters;
    for (const auto& [name, shape] : lag_bias_shapes(settings, H)) parameters[name] = Vector(element_count(shape), 0.0);
    Vector& omega = parameters["omega"];
    const int64_t count = std::ssize(omega);
    for (int64_t i = 0; i < count; i++) {
        const double cycles = count == 1 ? 17 : 1 + 16.0 * i / (count - 1);
        omega[i] = 2 * std::numbers::pi * cycles / L;
    }
    const std::vector<std::string> sectors = {"fj", "affine", "lc"};
    const std::vector<bool> enabled = {settings.fj, settings.affine, settings.lc};
    const auto favoured = std::find(sectors.begin(), sectors.end(), gate_init) - sectors.begin();
    if (favoured == std::ssize(sectors)) fail("reference: gate_init is {}, wanted fj, affine or lc", gate_init);
    if (enabled[favoured]) {
        for (int64_t h = 0; h < H; h++) {
            for (int64_t s = 0; s < 3; s++) parameters["gate_logits"][h * 3 + s] = s == favoured ? 2 : -2;
        }
    }
    for (int64_t h = 0; h < H; h++) {
        parameters["raw_fj_damping"][h] = -2;
        parameters["raw_affine_slope"][h] = std::log(std::expm1(init_affine_slope));
        if (settings.lc_damping) parameters["raw_lc_damping"][h] = -2;
    }
    return parameters;
}

// One jet sector of one head: sum_r alpha[r] envelope[r] S_r(phase). FJ and LC differ in envelope and phase only.
struct JetSector {
    Vector alpha;  // (R+1)
    const double *omega, *zeta_re, *zeta_im;
    int64_t F;
};

static JetSector jet_sector(const LagBiasSettings& settings, const Tensors& parameters, const std::string& prefix,
                            int64_t h) {
    const int64_t F = settings.frequencies, orders = settings.max_order + 1;
    return {softmax(&parameters.at(prefix + "alpha_logits")[h * orders], std::vector<bool>(orders, true)),
            &parameters.at("omega")[h * F], &parameters.at(prefix + "zeta_re")[h * F * orders],
            &parameters.at(prefix + "zeta_im")[h * F * orders], F};
}

static double jet_sum(const JetSector& jet, const Vector& envelope, double phase) {
    const int64_t orders = std::ssize(jet.alpha);
    double sum = 0;
    for (int64_t r = 0; r < orders; r++) {
        for (int64_t m = 0; m < jet.F; m++) {
            const double angle = jet.omega[m] * phase;
            const double wave =
                jet.zeta_re[m * orders + r] * std::cos(angle) - jet.zeta_im[m * orders + r] * std::sin(angle);
            sum += jet.alpha[r] * envelope[r] * wave;
        }
    }
    return sum;
}

// dalpha: (R+1), domega: (F), dzeta_re, dzeta_im: (F, R+1).
static void jet_sum_backward(const JetSector& jet, const Vector& envelope, double phase, double dsum, Vector& dalpha,
                             double* domega, double* dzeta_re, double* dzeta_im) {
    const int64_t orders = std::ssize(jet.alpha);
    for (int64_t r = 0; r < orders; r++) {
        for (int64_t m = 0; m < jet.F; m++) {
            const double angle = jet.omega[m] * phase, cosine = std::cos(angle), sine = std::sin(angle);
            const double re = jet.zeta_re[m * orders + r], im = jet.zeta_im[m * orders + r];
            const double weight = jet.alpha[r] * envelope[r];
            dalpha[r] += dsum * envelope[r] * (re * cosine - im * sine);
            dzeta_re[m * orders + r] += dsum * weight * cosine;
            dzeta_im[m * orders + r] -= dsum * weight * sine;
            domega[m] += dsum * weight * phase * (-re * sine - im * cosine);
        }
    }
}

// u^r / r! e^(-damping u), with u = d/L.
static Vector fj_envelope(double u, double damping, int64_t orders) {
    Vector envelope(orders);
    double power = std::exp(-damping * u);
    for (int64_t r = 0; r < orders; r++) {
        envelope[r] = power;
        power *= u / (r + 1.0);
    }
    return envelope;
}

// beta^r e^(-damping asinh u).
static Vector lc_envelope(double u, double damping, int64_t orders) {
    Vector envelope(orders);
    const double beta = u / std::sqrt(u * u + 1);
    double power = std::exp(-damping * std::asinh(u));
    for (int64_t r = 0; r < orders; r++) {
        envelope[r] = power;
        power *= beta;
    }
    return envelope;
}

static void check_parameters(const LagBiasSettings& settings, const Tensors& parameters, int64_t H) {
    for (const auto& [name, shape] : lag_bias_shapes(settings, H)) {
        const auto found = parameters.find(name);
        if (found == parameters.end()) fail("reference: the lag bias has no tensor {}", name);
        check_size(found->second, element_count(shape), name.c_str());
    }
}

static double lc_damping_of(const LagBiasSettings& settings, const Tensors& parameters, int64_t h) {
    return settings.lc_damping ? softplus(parameters.at("raw_lc_damping")[h]) : 0;
}

Vector lag_bias_table(const LagBiasSettings& settings, const Tensors& parameters, int64_t H, int64_t L, int64_t T) {
    check_parameters(settings, parameters, H);
    const int64_t orders = settings.max_order + 1;
    Vector table(H * T);
    for (int64_t h = 0; h < H; h++) {
        const Vector gate = softmax(&parameters.at("gate_logits")[h * 3], {settings.fj, settings.affine, settings.lc});
        const JetSector fj = jet_sector(settings, parameters, "fj_", h),
                        lc = jet_sector(settings, parameters, "lc_", h);
        const double fj_damping = softplus(parameters.at("raw_fj_damping")[h]);
        const double slope = softplus(parameters.at("raw_affine_slope")[h]);
        const double lc_damping = lc_damping_of(settings, parameters, h);
        for (int64_t d = 0; d < T; d++) {
            const double u = static_cast<double>(d) / L;
            double bias = settings.constant ? parameters.at("b0")[h] : 0;
            if (settings.fj) bias += gate[0] * jet_sum(fj, fj_envelope(u, fj_damping, orders), d);
            if (settings.affine) bias += gate[1] * -slope * u;
            if (settings.lc) bias += gate[2] * jet_sum(lc, lc_envelope(u, lc_damping, orders), L * std::asinh(u));
            table[h * T + d] = bias;
        }
    }
    return table;
}

void lag_bias_backward(const LagBiasSettings& settings, const Tensors& parameters, int64_t H, int64_t L, int64_t T,
                       const Vector& dtable, Tensors& gradients) {
    check_parameters(settings, parameters, H);
    check_parameters(settings, gradients, H);
    check_size(dtable, H * T, "dtable");
    const int64_t F = settings.frequencies, orders = settings.max_order + 1;
    for (int64_t h = 0; h < H; h++) {
        const Vector gate = softmax(&parameters.at("gate_logits")[h * 3], {settings.fj, settings.affine, settings.lc});
        const JetSector fj = jet_sector(settings, parameters, "fj_", h),
                        lc = jet_sector(settings, parameters, "lc_", h);
        const double raw_fj_damping = parameters.at("raw_fj_damping")[h];
        const double raw_slope = parameters.at("raw_affine_slope")[h];
        const double lc_damping = lc_damping_of(settings, parameters, h);
        double* domega = &gradients.at("omega")[h * F];
        Vector dgate(3, 0.0), dfj_alpha(orders, 0.0), dlc_alpha(orders, 0.0);
        double dfj_damping = 0, dslope = 0, dlc_damping = 0;
        for (int64_t d = 0; d < T; d++) {
            const double u = static_cast<double>(d) / L, dbias = dtable[h * T + d];
            if (settings.constant) gradients.at("b0")[h] += dbias;
            if (settings.fj) {
                const Vector envelope = fj_envelope(u, softplus(raw_fj_damping), orders);
                const double value = jet_sum(fj, envelope, d), dvalue = dbias * gate[0];
                jet_sum_backward(fj, envelope, d, dvalue, dfj_alpha, domega,
                                 &gradients.at("fj_zeta_re")[h * F * orders],
                                 &gradients.at("fj_zeta_im")[h * F * orders]);
                dgate[0] += dbias * value;
                dfj_damping += dvalue * -u * value;
            }
            if (settings.affine) {
                dgate[1] += dbias * -softplus(raw_slope) * u;
                dslope += dbias * gate[1] * -u;
            }
            if (settings.lc) {
                const Vector envelope = lc_envelope(u, lc_damping, orders);
                const double rapidity = std::asinh(u);
                const double value = jet_sum(lc, envelope, L * rapidity), dvalue = dbias * gate[2];
                jet_sum_backward(lc, envelope, L * rapidity, dvalue, dlc_alpha, domega,
                                 &gradients.at("lc_zeta_re")[h * F * orders],
                                 &gradients.at("lc_zeta_im")[h * F * orders]);
                dgate[2] += dbias * value;
                dlc_damping += dvalue * -rapidity * value;
            }
        }
        softmax_backward(gate, dgate, &gradients.at("gate_logits")[h * 3]);
        softmax_backward(fj.alpha, dfj_alpha, &gradients.at("fj_alpha_logits")[h * orders]);
        softmax_backward(lc.alpha, dlc_alpha, &gradients.at("lc_alpha_logits")[h * orders]);
        gradients.at("raw_fj_damping")[h] += dfj_damping * sigmoid(raw_fj_damping);
        gradients.at("raw_affine_slope")[h] += dslope * sigmoid(raw_slope);
        if (settings.lc_damping) {
            gradients.at("raw_lc_damping")[h] += dlc_damping * sigmoid(parameters.at("raw_lc_damping")[h]);
        }
    }
}

static Vector geometric_slopes(int64_t heads) {
    Vector slopes(heads);
    for (int64_t h = 0; h < heads; h++) slopes[h] = std::pow(2, -8.0 * (h + 1) / heads);
    return slopes;
}

Vector alibi_slopes(int64_t H) {
    int64_t power = 1;
    while (power * 2 <= H) power *= 2;
    Vector slopes = geometric_slopes(power);
    const Vector finer = geometric_slopes(2 * power);
    for (int64_t h = power; h < H; h++) slopes.push_back(finer[2 * (h - power)]);
    return slopes;
}

Vector alibi_table(int64_t H, int64_t T) {
    const Vector slopes = alibi_slopes(H);
    Vector table(H * T);
    for (int64_t h = 0; h < H; h++) {
        for (int64_t d = 0; d < T; d++) table[h * T + d] = -slopes[h] * d;
    }
    return table;
}

}  // namespace jetlag::reference
