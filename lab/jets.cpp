#include "lab/jets.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <numbers>

#include "src/error.h"

namespace jetlag {

double lag_frequency(double cycles, int64_t train_len) {
    return 2 * std::numbers::pi * cycles / static_cast<double>(train_len);
}

void jet_functions(PjSector sector, double d, int64_t train_len, double omega, double damping, int max_order,
                   double* cosine, double* sine) {
    LagBiasSpec spec;
    spec.heads = 1;
    spec.train_len = train_len;
    spec.options[kPjSectors] = 1 << sector;
    spec.options[kPjOrder] = max_order;
    spec.options[kPjFrequencies] = 1;
    const PjLayout l = pj_layout(spec);
    const double L = static_cast<double>(train_len);
    const PjJet jet = sector == kPjFj ? pj_fj(l, d, L) : pj_lc(l, d, L);
    // The jet is linear in its amplitudes: its functions are its gradient, here with every order weight 1.
    double c[5 + 1 + kPjSectorCount + 6 * (kPjMaxOrder + 1)] = {}, dc[std::size(c)] = {};
    c[l.omega] = omega;
    if (sector == kPjFj) c[l.fj_damping] = damping;
    for (int r = 0; r <= max_order; r++) c[jet.alpha + r] = 1;
    pj_jet_gradient(l, jet, c, 1, dc);
    for (int r = 0; r <= max_order; r++) {
        cosine[r] = dc[jet.re + r];
        sine[r] = -dc[jet.im + r];
    }
}

const std::vector<LagTarget>& lag_targets() {
    static const std::vector<LagTarget> list = {
        {"phase", "cos(omega d)", {1}, 0, {}, 0, 0},
        {"linear", "x", {}, 0, {}, 1, 0},
        {"first_jet", "x cos(omega d)", {0, 1}, 0, {}, 0, 0},
        {"second_jet", "x^2 e^(-0.1 x) cos(omega d)", {0, 0, 1}, 0.1, {}, 0, 0},
        {"third_jet", "x^3 e^(-0.1 x) cos(omega d)", {0, 0, 0, 1}, 0.1, {}, 0, 0},
        {"recency_weak_jet", "-0.4 x + 0.15 x^2 cos(omega d)", {0, 0, 0.15}, 0, {}, -0.4, 0},
        {"lc_core", "cos(omega phi) (1 + 0.4 beta + 0.2 beta^2)", {}, 0, {1, 0.4, 0.2}, 0, 0},
        {"lc_affine", "cos(omega phi) (1 + 0.4 beta + 0.2 beta^2) - 0.25 eta", {}, 0, {1, 0.4, 0.2}, 0, -0.25},
    };
    return list;
}

const LagTarget& find_target(const std::string& option, const std::vector<LagTarget>& list, const std::string& name) {
    std::vector<std::string> names;
    for (const LagTarget& target : list) {
        if (name == target.name) return target;
        names.push_back(target.name);
    }
    fail_usage("{}: there is no target {}, wanted some of {}", option, name, fmt::join(names, ", "));
}

std::vector<double> target_values(const LagTarget& target, int64_t T, int64_t train_len, double omega) {
    std::vector<double> values(static_cast<size_t>(T));
    double cosine[kPjMaxOrder + 1], sine[kPjMaxOrder + 1];
    for (int64_t t = 0; t < T; t++) {
        const double d = static_cast<double>(t), L = static_cast<double>(train_len);
        double value = target.slope * (d / L) + target.eta_slope * pj_rapidity(d, L);
        if (!target.fj.empty()) {
            jet_functions(kPjFj, d, train_len, omega, target.fj_damping, static_cast<int>(target.fj.size()) - 1, cosine,
                          sine);
            double factorial = 1;
            for (size_t r = 0; r < target.fj.size(); r++) {
                if (r > 0) factorial *= static_cast<double>(r);
                value += target.fj[r] * factorial * cosine[r];
            }
        }
        if (!target.lc.empty()) {
            jet_functions(kPjLc, d, train_len, omega, 0, static_cast<int>(target.lc.size()) - 1, cosine, sine);
            for (size_t r = 0; r < target.lc.size(); r++) value += target.lc[r] * cosine[r];
        }
        values[static_cast<size_t>(t)] = value;
    }
    return values;
}

}  // namespace jetlag
