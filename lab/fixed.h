// Least-squares fits of target kernels by fixed bases of lag functions plus an intercept: what a basis can say of a
// target within the training length, and what the fit is worth beyond it. A fit is made on lags 0..L-1 with columns
// standardised there, and evaluated on lags 0..T-1.
#pragma once

#include "lab/jets.h"
#include "lab/output.h"

namespace jetlag {

// The functions in a basis, x = d/L, eta = asinh(x).
struct LagBasis {
    std::string name, label;
    int fj_order = -1;       // x^r cos(omega d), x^r sin(omega d) for r = 0..fj_order; -1: none
    bool is_damped = false;  // these times e^(-damping x)
    int lc_order = -1;       // beta^r cos(omega phi), beta^r sin(omega phi)
    bool x = false, eta = false;
};

struct FixedSettings {
    int64_t train_len = 1024;                                  // L
    std::vector<int64_t> contexts = {1024, 2048, 4096, 8192};  // T
    std::vector<double> cycles = {5, 17, 61};                  // omega = 2 pi cycles / L
    double damping = 0.1;                                      // of the scaled bases
    std::vector<std::string> targets, bases;                   // names
};

FixedSettings fixed_defaults();
FixedSettings projection_defaults();

// A basis by its name: rope, alibi, alibi_lc, rope_alibi, jordan_Rk, scaled_Rk, scaled_Rk_affine, lc_Rk, lc_Rk_affine
// with k from 0 to kPjMaxOrder; grape_m_rope, grape_a_alibi, grape_ma_rope_alibi, pj_fj_Rk, pj_lc_Rk.
// Errors (exit code 2) name the option.
LagBasis parse_basis(const std::string& option, const std::string& name);

// The targets of `lab projection` (Table 9), whose second jet has no damping.
const std::vector<LagTarget>& projection_targets();

struct FixedRow {
    double cycles;
    std::string target, basis;
    int64_t context;
    double train_mse, mse, r2;
    double condition;  // of the standardised design with its intercept
};

// Rows in the order cycles, targets, bases, contexts. R^2 = 1 - MSE / variance of the target over the same lags.
std::vector<FixedRow> fit_fixed(const FixedSettings& settings, const std::vector<LagTarget>& targets,
                                const std::vector<LagBasis>& bases);

LabResult run_fixed(const FixedSettings& settings);
LabResult run_projection(const FixedSettings& settings);

}  // namespace jetlag
