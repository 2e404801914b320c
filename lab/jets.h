// The functions of the lag that a PJ head is made of, one at a time, from the formulas of kernels/position/pj.h; and
// the kernels that the study asks learners to find (its targets).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/position/pj.h"

namespace jetlag {

// 2 pi cycles / L, radians per token.
double lag_frequency(double cycles, int64_t train_len);

// What multiplies the amplitudes zeta_re[r] and -zeta_im[r], r = 0..max_order, in a sector at lag d:
//     kPjFj   x^r / r! e^(-damping x) cos(omega d),   the same with sin;   x = d/L
//     kPjLc   beta^r cos(omega phi),                  the same with sin;   damping is not used
// cosine, sine: (max_order + 1). 0 <= max_order <= kPjMaxOrder.
void jet_functions(PjSector sector, double d, int64_t train_len, double omega, double damping, int max_order,
                   double* cosine, double* sine);

// A kernel with known parts, for x = d/L, eta = asinh(x):
//     sum_r fj[r] x^r e^(-fj_damping x) cos(omega d) + sum_r lc[r] beta^r cos(omega phi) + slope x + eta_slope eta
struct LagTarget {
    const char* name;
    const char* formula;
    std::vector<double> fj;
    double fj_damping;
    std::vector<double> lc;
    double slope, eta_slope;
};

// The eight targets of Table 3 and of the fixed fits.
const std::vector<LagTarget>& lag_targets();

// The target of that name among `list`. Errors (exit code 2) name the option and list the names there are.
const LagTarget& find_target(const std::string& option, const std::vector<LagTarget>& list, const std::string& name);

// Its values at lags 0..T-1.
std::vector<double> target_values(const LagTarget& target, int64_t T, int64_t train_len, double omega);

}  // namespace jetlag
