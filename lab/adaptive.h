// One PJ head with learned gates, orders, amplitudes and damping, fitted to a target kernel: does a learner find the
// sector and the order that the target was made of (Table 3)?
//
//     kernel(d) = g_FJ e^(-c x) sum_r alpha_r x^r / r! (re_r cos(omega d) - im_r sin(omega d))
//               + g_affine s x
//               + g_LC sum_r alpha'_r beta^r (re'_r cos(omega phi) - im'_r sin(omega phi))
//
// with g = softmax of three gate logits, alpha and alpha' softmaxes over the orders, c = softplus of a raw damping, all
// learned, s a slope of either sign, and omega fixed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lab/jets.h"
#include "lab/output.h"

namespace jetlag {

enum class AdaptiveSolver { adam, varpro };

struct AdaptiveSettings {
    std::vector<std::string> targets;
    int64_t train_len = 1024;  // L; fitted on lags 0..L-1
    int64_t context = 4096;    // evaluated on lags 0..context-1
    double cycles = 17;
    int max_order = 3;  // R
    std::vector<uint64_t> seeds = {0, 1, 2};
    int64_t steps = 1500;
    double lr = 0.03;
    int restarts = 4;           // restart k draws its amplitudes from seed + 7919 k
    bool favour_orders = true;  // restart k starts with order logits `favour` at order k mod (R + 1), -favour elsewhere
    bool select_by_train = true;  // of the restarts the one of least training MSE is kept; false: evaluation MSE
    // Of Adam and its start.
    double beta1 = 0.9, beta2 = 0.999;
    double start_gates[kPjSectorCount] = {0, -0.2, -0.2};  // logits
    double start_amplitude = 0.05;                         // standard deviation
    double start_damping = -2;                             // before softplus
    double start_slope = 0;
    double favour = 2;
    AdaptiveSolver solver = AdaptiveSolver::adam;
};

AdaptiveSettings adaptive_defaults();

// What a fitted head is made of. Everything but train_mse, train_r2 is measured on lags 0..context-1.
struct AdaptiveFit {
    int restart;
    double train_mse, train_r2, eval_mse, eval_r2;
    double gate[kPjSectorCount];
    double slope, damping;
    std::vector<double> fj_mass, lc_mass;  // M_r = g alpha_r |zeta_r|
    std::vector<double> order_mass;        // FJ and LC together, as shares of their sum
    // With o_r(d) the part of order r, FJ and LC together: RMS of o_r over that of sum_r o_r; and the MSE without o_r
    // minus that with it.
    std::vector<double> functional_energy, leave_one_out;
    int dominant_order;                    // of the largest mass; -1 if no jet is used
    double sector_energy[kPjSectorCount];  // mean square of each sector's part, as shares of their sum
};

// The best of the restarts with Adam.
AdaptiveFit fit_adam(const LagTarget& target, const AdaptiveSettings& settings, uint64_t seed);

// Variable projection: with the damping fixed, the kernel is linear in the products of gate, order weight and
// amplitude, so these come from least squares, and only the damping is searched for, in [0, 4]. Of the combinations of
// sectors and orders 0..r it keeps the one with the fewest functions whose training MSE is within rounding (1e-24 of
// the target's mean square), and the whole space if there is none: functions that are not needed would make the damping
// uncertain. Gates, which the products do not determine, are reported as 1 for a sector that is used and 0 for one that
// is not; masses are those of the products.
AdaptiveFit fit_varpro(const LagTarget& target, const AdaptiveSettings& settings);

LabResult run_adaptive(const AdaptiveSettings& settings);

}  // namespace jetlag
