// Ways to let jets of high order reach far lags, and what each does to norms, caches and retrieval (Table 5, Figure 6).
//
// A variant has an amplitude a and a phase coordinate psi at lag d, for x = d/L, eta = asinh(x), phi = L eta,
// beta = d / sqrt(d^2 + L^2); its components are a^r, r = 0..R, for some divided by r! and damped by an envelope; its
// functions at a frequency omega are component_r cos(omega psi) and component_r sin(omega psi).
//
//     variant          a            psi    / r!   envelope
//     raw              d            d      yes
//     scaled           x            d      yes    e^(-damping x)
//     clipped          min(x, 1)    d      yes
//     log              ln(1 + x)    d      yes
//     lc_amp_only      beta         d
//     lc_phase_only    x            phi    yes
//     lc               beta         phi
//     lc_wrong_scale   beta         eta
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lab/float32.h"
#include "lab/output.h"

namespace jetlag {

enum class LagAmplitude { lag, scaled, clipped, log, beta };
enum class LagPhase { lag, phi, eta };

struct LagVariant {
    const char* name;
    LagAmplitude amplitude;
    LagPhase phase;
    bool factorial, envelope;
};

const std::vector<LagVariant>& lag_variants();

// Errors (exit code 2) name the option and list the names there are.
const LagVariant& find_variant(const std::string& option, const std::string& name);

// For all three diagnostics.
struct VariantSettings {
    std::vector<std::string> variants;
    int64_t train_len = 1024;                                                // L
    std::vector<int64_t> contexts = {1024, 2048, 4096, 8192, 16384, 32768};  // T
    std::vector<double> cycles;                                              // omega = 2 pi cycles / L
    int max_order = 3;                                                       // R
    double damping = 0.1;
};

// ---- stability, in double

struct StabilityRow {
    std::string variant;
    int64_t context;
    double cycles;
    // The scalar kernel b(d) = component_R cos(omega psi), d = 0..T-1.
    double bias_abs_max, bias_rms;
    double weighted_logit_std;  // weights T - d: how often a lag occurs in a causal T x T table
    // The softmax of b over all lags (the last row): entropy in nats, exp(entropy), mean lag.
    double entropy, support, mean_distance;
    // sqrt(sum_r component_r^2).
    double norm_max, norm_final, norm_mean;
    double component_abs_max;
    // |q - x| / |x| of the components (T, R + 1) quantised as a whole, or with a scale per order.
    double int8_tensor, int8_per_order, int4_tensor, int4_per_order;
    // psi(d) - psi(d - 1): the last one, and the mean over d > T/2.
    double phase_ratio_final, phase_ratio_far_mean;
    double far_phase_span;  // omega (psi(T-1) - psi(T/2)), radians
    // Of the lags d >= T/2: neighbours d, d + 1 whose phases differ by less than 1e-3 rad; lags whose phase, modulo
    // 2 pi, has another within 1e-3 rad, and the median distance to the nearest (the lower of two middles), among at
    // most 4096 evenly spaced lags.
    double local_collisions, wrapped_collisions, wrapped_nearest_median;
    double far_condition;  // of the functions of all orders at those lags, standardised
    int64_t nonfinite;     // values of b that are not finite
};

VariantSettings stability_defaults();
StabilityRow measure_stability(const LagVariant& variant, const VariantSettings& settings, double cycles, int64_t T);
LabResult run_stability(const VariantSettings& settings);

// ---- cache, in float

struct CacheSettings {
    VariantSettings lags;
    int cache_dim = 128;
    uint64_t seed = 0;
};

CacheSettings cache_defaults();
LabResult run_cache(const CacheSettings& settings);

// Features at lags first..T-1 (one row each): for every cycles in turn, order by order, component_r cos(omega psi) and
// component_r sin(omega psi).
FloatMatrix lag_features(const LagVariant& variant, const VariantSettings& settings, int64_t first, int64_t T);

// ---- retrieval, in float

struct LagBucket {
    const char* name;
    int64_t first, last;  // lags
};
// The buckets of lags that a context of T reaches.
std::vector<LagBucket> lag_buckets(int64_t L, int64_t T);

struct RetrievalSettings {
    VariantSettings lags;
    std::vector<std::string> precisions = {"fp32", "int8", "int4"};
    int queries = 128;
};

RetrievalSettings retrieval_defaults();
// Bits of a value in a precision: 32, 8 or 4. Errors: no such precision.
int precision_bits(const std::string& name);
LabResult run_retrieval(const RetrievalSettings& settings);

}  // namespace jetlag
