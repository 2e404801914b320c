#include "kernels/position/pj.h"

namespace jetlag {

std::vector<Option> pj_options() {
    return {
        {"sectors", Option::set, 7, 1, 7, {"fj", "affine", "lc"}, "pj: enabled sectors"},
        {"max_order", Option::integer, 3, 0, kPjMaxOrder, {}, "pj: highest jet order R"},
        {"init_affine_slope", Option::real, 2, 1e-6, 1000, {}, "pj: affine slope s at the start"},
        {"gate_init",
         Option::choice,
         kPjAffine,
         0,
         3,
         {"fj", "affine", "lc", "uniform"},
         "pj: sector that the gates favour at first"},
        {"frequencies", Option::integer, 1, 1, kPjMaxFrequencies, {}, "pj: frequencies F per head (Definition 1)"},
        {"cycles_min", Option::real, 1, 0, 1e6, {}, "pj: cycles per L of the first frequency at the start"},
        {"cycles_max", Option::real, 17, 0, 1e6, {}, "pj: cycles per L of the last frequency at the start"},
        {"constant",
         Option::flag,
         0,
         0,
         1,
         {},
         "pj: add a constant b0 per head (Definition 1); softmax cannot see it, so its value means nothing"},
        {"lc_damping", Option::flag, 0, 0, 1, {}, "pj: learn a damping of the LC sector (Definition 1)"},
        {"order_init",
         Option::integer,
         -1,
         -1,
         kPjMaxOrder,
         {},
         "pj: jet order that the order weights favour at first; -1, or above max_order: none"},
    };
}

std::vector<BiasParameter> pj_parameters(const LagBiasSpec& spec) {
    const PjLayout l = pj_layout(spec);
    const int64_t H = spec.heads, F = l.frequencies, orders = l.orders;
    const size_t heads = static_cast<size_t>(H);
    const bool fj = l.sectors >> kPjFj & 1, affine = l.sectors >> kPjAffine & 1, lc = l.sectors >> kPjLc & 1;
    const double two_pi = 6.283185307179586476925286766559;
    const double first = spec.options[kPjCyclesMin], last = spec.options[kPjCyclesMax];

    std::vector<float> omega(static_cast<size_t>(H * F));
    for (size_t i = 0; i < omega.size(); i++) {
        const double way = omega.size() == 1 ? 1 : static_cast<double>(i) / static_cast<double>(omega.size() - 1);
        omega[i] = static_cast<float>(two_pi * (first + (last - first) * way) / static_cast<double>(spec.train_len));
    }
    const int favoured = static_cast<int>(spec.options[kPjGateInit]);
    std::vector<float> gate_logits(heads * kPjSectorCount, 0.0f);
    if (l.sectors >> favoured & 1)
        for (size_t i = 0; i < gate_logits.size(); i++)
            gate_logits[i] = static_cast<int>(i % kPjSectorCount) == favoured ? 2.0f : -2.0f;
    const std::vector<float> minus_two(heads, -2.0f);
    const int64_t favoured_order = static_cast<int64_t>(spec.options[kPjOrderInit]);
    const std::vector<float> even(heads * static_cast<size_t>(orders), 0.0f);
    std::vector<float> alpha_logits = even;
    if (favoured_order >= 0 && favoured_order < orders)
        for (size_t i = 0; i < alpha_logits.size(); i++)
            alpha_logits[i] = static_cast<int64_t>(i) % orders == favoured_order ? 2.0f : -2.0f;
    // The inverse of softplus, ln(e^s - 1), in a form that does not overflow.
    const double slope = spec.options[kPjAffineSlope];
    const float raw_slope = static_cast<float>(slope + std::log(-std::expm1(-slope)));

    // One frequency per head is the published case and has the published shapes, without a dimension for F.
    const std::vector<int64_t> per_frequency = F == 1 ? std::vector<int64_t>{H} : std::vector<int64_t>{H, F};
    const std::vector<int64_t> amplitudes =
        F == 1 ? std::vector<int64_t>{H, orders} : std::vector<int64_t>{H, F, orders};
    std::vector<BiasParameter> list = {
        {"omega", per_frequency, fj || lc, omega},
        {"gate_logits", {H, kPjSectorCount}, true, gate_logits},
        {"fj_alpha_logits", {H, orders}, fj, fj ? alpha_logits : even},
        {"lc_alpha_logits", {H, orders}, lc, lc ? alpha_logits : even},
        {"fj_zeta_re", amplitudes, fj, {}, 0.02},
        {"fj_zeta_im", amplitudes, fj, {}, 0.02},
        {"lc_zeta_re", amplitudes, lc, {}, 0.02},
        {"lc_zeta_im", amplitudes, lc, {}, 0.02},
        {"raw_fj_damping", {H}, fj, minus_two},
        {"raw_affine_slope", {H}, affine, std::vector<float>(heads, raw_slope)},
    };
    if (spec.options[kPjConstant] != 0) list.push_back({"b0", {H}, true, std::vector<float>(heads, 0.0f)});
    if (spec.options[kPjLcDamping] != 0) list.push_back({"raw_lc_damping", {H}, lc, minus_two});
    return list;
}

int64_t pj_coefficient_count(const LagBiasSpec& spec) {
    return pj_layout(spec).count;
}

// Gates, slope, and the effective mass of each order, M_r = g alpha_r sum_m |zeta[m][r]|.
std::vector<std::pair<std::string, double>> pj_summary(const LagBiasSpec& spec, const float* parameters) {
    const PjLayout l = pj_layout(spec);
    std::vector<double> c(static_cast<size_t>(l.count));
    std::vector<double> gate(kPjSectorCount), fj_mass(static_cast<size_t>(l.orders)), lc_mass(fj_mass);
    double slope = 0;
    const double share = 1.0 / static_cast<double>(spec.heads);
    for (int64_t head = 0; head < spec.heads; head++) {
        pj_coefficients(spec, parameters, head, c.data());
        for (int s = 0; s < kPjSectorCount; s++) gate[s] += share * c[l.gate + s];
        slope += share * c[l.slope];
        for (int m = 0; m < l.frequencies; m++)
            for (int r = 0; r < l.orders; r++) {
                const int k = m * l.orders + r;
                fj_mass[r] +=
                    share * c[l.gate + kPjFj] * c[l.fj_alpha + r] * std::hypot(c[l.fj_re + k], c[l.fj_im + k]);
                lc_mass[r] +=
                    share * c[l.gate + kPjLc] * c[l.lc_alpha + r] * std::hypot(c[l.lc_re + k], c[l.lc_im + k]);
            }
    }
    std::vector<std::pair<std::string, double>> figures = {{"gate_fj", gate[kPjFj]},
                                                           {"gate_affine", gate[kPjAffine]},
                                                           {"gate_lc", gate[kPjLc]},
                                                           {"affine_slope_mean", slope}};
    for (int r = 0; r < l.orders; r++) figures.push_back({"fj_mass_r" + std::to_string(r), fj_mass[r]});
    for (int r = 0; r < l.orders; r++) figures.push_back({"lc_mass_r" + std::to_string(r), lc_mass[r]});
    return figures;
}

}  // namespace jetlag
