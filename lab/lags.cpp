#include "lab/lags.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>
#include <span>

#include "lab/float32.h"
#include "lab/jets.h"
#include "lab/least_squares.h"
#include "lab/parallel.h"
#include "src/error.h"
#include "src/random.h"

namespace jetlag {

const std::vector<LagVariant>& lag_variants() {
    static const std::vector<LagVariant> list = {
        {"raw", LagAmplitude::lag, LagPhase::lag, true, false},
        {"scaled", LagAmplitude::scaled, LagPhase::lag, true, true},
        {"clipped", LagAmplitude::clipped, LagPhase::lag, true, false},
        {"log", LagAmplitude::log, LagPhase::lag, true, false},
        {"lc_amp_only", LagAmplitude::beta, LagPhase::lag, false, false},
        {"lc_phase_only", LagAmplitude::scaled, LagPhase::phi, true, false},
        {"lc", LagAmplitude::beta, LagPhase::phi, false, false},
        {"lc_wrong_scale", LagAmplitude::beta, LagPhase::eta, false, false},
    };
    return list;
}

const LagVariant& find_variant(const std::string& option, const std::string& name) {
    std::vector<std::string> names;
    for (const LagVariant& variant : lag_variants()) {
        if (name == variant.name) return variant;
        names.push_back(variant.name);
    }
    fail_usage("{}: there is no variant {}, wanted some of {}", option, name, fmt::join(names, ", "));
}

// The arithmetic of a variant, in double for stability and in float for cache and retrieval.
static double log1p_of(double x) {
    return std::log1p(x);
}
static float log1p_of(float x) {
    return float_log1p(x);
}
static double exp_of(double x) {
    return std::exp(x);
}
static float exp_of(float x) {
    return float_exp(x);
}
static double power_of(double x, int r) {
    return std::pow(x, r);
}
static float power_of(float x, int r) {
    return float_power(x, r);
}

template <typename Real>
static Real phase_coordinate(const LagVariant& variant, Real d, Real L) {
    if (variant.phase == LagPhase::lag) return d;
    const Real eta = pj_rapidity(d, L);
    return variant.phase == LagPhase::eta ? eta : L * eta;
}

// components: (R + 1).
template <typename Real>
static void lag_components(const LagVariant& variant, Real d, Real L, int max_order, Real damping, Real* components) {
    const Real x = d / L;
    Real a = 0;
    switch (variant.amplitude) {
        case LagAmplitude::lag:
            a = d;
            break;
        case LagAmplitude::scaled:
            a = x;
            break;
        case LagAmplitude::clipped:
            a = std::min(x, Real(1));
            break;
        case LagAmplitude::log:
            a = log1p_of(x);
            break;
        case LagAmplitude::beta:
            a = pj_beta(d, L);
            break;
    }
    Real factorial = 1;
    for (int r = 0; r <= max_order; r++) {
        if (r > 0) factorial *= static_cast<Real>(r);
        components[r] = power_of(a, r);
        if (variant.factorial) components[r] /= factorial;
        if (variant.envelope) components[r] *= exp_of(-damping * x);
    }
}

// The larger and the smaller of two, NaN if one of them is: std::max and std::min would lose it.
static double larger(double a, double b) {
    return b > a || std::isnan(b) ? b : a;
}
static double smaller(double a, double b) {
    return b < a || std::isnan(b) ? b : a;
}

static std::vector<std::string> all_variants() {
    std::vector<std::string> names;
    for (const LagVariant& variant : lag_variants()) names.push_back(variant.name);
    return names;
}

static Json settings_json(const VariantSettings& settings) {
    return {{"variants", settings.variants}, {"train_len", settings.train_len}, {"contexts", settings.contexts},
            {"cycles", settings.cycles},     {"max_order", settings.max_order}, {"damping", settings.damping}};
}

// A line per variant over the contexts.
template <typename Row, typename Value>
static LabPanel context_panel(const std::vector<Row>& rows, const VariantSettings& settings, const std::string& title,
                              const std::string& y_label, bool log_y, Value value) {
    LabPanel panel;
    panel.title = title;
    panel.x_label = "context length (tokens)";
    panel.y_label = y_label;
    panel.log_x = true;
    panel.log_y = log_y;
    for (const std::string& name : settings.variants) {
        LabSeries series;
        series.name = name;
        for (const Row& row : rows)
            if (row.variant == name) {
                series.x.push_back(static_cast<double>(row.context));
                series.y.push_back(value(row));
            }
        panel.series.push_back(series);
    }
    return panel;
}

// ---------------------------------------------------------------------------------------------------------------

VariantSettings stability_defaults() {
    VariantSettings settings;
    settings.variants = all_variants();
    settings.cycles = {17};
    return settings;
}

// |quantised - x| / |x| for values of several groups, each with a scale of its own: x[i * groups + g].
static double quantisation_error(const std::vector<double>& x, size_t groups, int bits) {
    const double steps = (1 << (bits - 1)) - 1;
    std::vector<double> largest(groups, 0.0);
    for (size_t i = 0; i < x.size(); i++) largest[i % groups] = larger(largest[i % groups], std::fabs(x[i]));
    double error = 0, size = 0;
    for (size_t i = 0; i < x.size(); i++) {
        const double scale = largest[i % groups] / steps;
        const double rounded = scale == 0 ? 0 : std::clamp(std::nearbyint(x[i] / scale), -steps, steps) * scale;
        error += (rounded - x[i]) * (rounded - x[i]);
        size += x[i] * x[i];
    }
    return size == 0 ? 0 : std::sqrt(error / size);
}

constexpr double kCollision = 1e-3;   // radians
constexpr int64_t kFarSample = 4096;  // lags

// For angles on the circle: the share that has another within kCollision, and the median distance to the nearest.
static void wrapped_distances(std::vector<double> angles, double& collisions, double& median) {
    const double circle = 2 * std::numbers::pi;
    for (double& angle : angles) {
        angle = std::fmod(angle, circle);
        if (angle < 0) angle += circle;
    }
    std::sort(angles.begin(), angles.end());
    const size_t n = angles.size();
    std::vector<double> gap(n), nearest(n);
    for (size_t i = 0; i + 1 < n; i++) gap[i] = angles[i + 1] - angles[i];
    gap[n - 1] = angles[0] + circle - angles[n - 1];
    size_t close = 0;
    for (size_t i = 0; i < n; i++) {
        nearest[i] = std::min(gap[i], gap[(i + n - 1) % n]);
        close += nearest[i] < kCollision;
    }
    collisions = static_cast<double>(close) / static_cast<double>(n);
    std::nth_element(nearest.begin(), nearest.begin() + static_cast<int64_t>((n - 1) / 2), nearest.end());
    median = nearest[(n - 1) / 2];
}

// `count` whole numbers evenly spaced from first to last, rounded, halves to even.
static std::vector<int64_t> evenly_spaced(int64_t first, int64_t last, int64_t count) {
    std::vector<int64_t> points(static_cast<size_t>(count), first);
    const double step = count > 1 ? static_cast<double>(last - first) / static_cast<double>(count - 1) : 0;
    for (int64_t i = 0; i < count; i++)
        points[static_cast<size_t>(i)] =
            static_cast<int64_t>(std::nearbyint(static_cast<double>(first) + step * static_cast<double>(i)));
    return points;
}

StabilityRow measure_stability(const LagVariant& variant, const VariantSettings& settings, double cycles, int64_t T) {
    const double L = static_cast<double>(settings.train_len), n = static_cast<double>(T);
    const double omega = lag_frequency(cycles, settings.train_len);
    const int R = settings.max_order;
    const size_t orders = static_cast<size_t>(R) + 1, lags = static_cast<size_t>(T), half = lags / 2;
    std::vector<double> components(lags * orders), psi(lags), bias(lags);
    StabilityRow row = {};
    row.variant = variant.name;
    row.context = T;
    row.cycles = cycles;
    for (size_t t = 0; t < lags; t++) {
        const double d = static_cast<double>(t);
        lag_components(variant, d, L, R, settings.damping, &components[t * orders]);
        psi[t] = phase_coordinate(variant, d, L);
        bias[t] = components[t * orders + orders - 1] * std::cos(omega * psi[t]);
        if (!std::isfinite(bias[t])) row.nonfinite++;
    }

    double largest = -INFINITY, squares = 0, weight = 0, weighted = 0;
    for (size_t t = 0; t < lags; t++) {
        row.bias_abs_max = larger(row.bias_abs_max, std::fabs(bias[t]));
        largest = larger(largest, bias[t]);
        squares += bias[t] * bias[t];
        const double count = n - static_cast<double>(t);
        weight += count;
        weighted += count * bias[t];
    }
    row.bias_rms = std::sqrt(squares / n);
    const double mean = weighted / weight;
    double deviation = 0, total = 0;
    for (size_t t = 0; t < lags; t++) {
        deviation += (n - static_cast<double>(t)) * (bias[t] - mean) * (bias[t] - mean);
        total += std::exp(bias[t] - largest);
    }
    row.weighted_logit_std = std::sqrt(deviation / weight);
    for (size_t t = 0; t < lags; t++) {
        const double p = std::exp(bias[t] - largest) / total;
        if (p != 0) row.entropy -= p * std::log(p);
        row.mean_distance += p * static_cast<double>(t);
    }
    row.support = std::exp(row.entropy);

    for (size_t t = 0; t < lags; t++) {
        double sum = 0;
        for (size_t r = 0; r < orders; r++) {
            const double value = components[t * orders + r];
            sum += value * value;
            row.component_abs_max = larger(row.component_abs_max, std::fabs(value));
        }
        row.norm_final = std::sqrt(sum);
        row.norm_max = larger(row.norm_max, row.norm_final);
        row.norm_mean += row.norm_final / n;
    }
    row.int8_tensor = quantisation_error(components, 1, 8);
    row.int8_per_order = quantisation_error(components, orders, 8);
    row.int4_tensor = quantisation_error(components, 1, 4);
    row.int4_per_order = quantisation_error(components, orders, 4);

    row.phase_ratio_final = psi[lags - 1] - psi[lags - 2];
    size_t close = 0;
    for (size_t t = half; t + 1 < lags; t++) {
        row.phase_ratio_far_mean += psi[t + 1] - psi[t];
        close += std::fabs(omega * (psi[t + 1] - psi[t])) < kCollision;
    }
    const double far_steps = static_cast<double>(lags - 1 - half);
    row.phase_ratio_far_mean /= far_steps;
    row.local_collisions = static_cast<double>(close) / far_steps;
    row.far_phase_span = omega * (psi[lags - 1] - psi[half]);

    const int64_t far = T - static_cast<int64_t>(half), sample = std::min<int64_t>(far, kFarSample);
    std::vector<double> angles;
    Matrix functions = make_matrix(sample, 2 * static_cast<int64_t>(orders));
    for (int64_t at : evenly_spaced(0, far - 1, sample)) {
        const size_t t = half + static_cast<size_t>(at), i = angles.size();
        angles.push_back(omega * psi[t]);
        const double cosine = std::cos(angles.back()), sine = std::sin(angles.back());
        for (size_t r = 0; r < orders; r++) {
            functions.values[r * static_cast<size_t>(sample) + i] = components[t * orders + r] * cosine;
            functions.values[(orders + r) * static_cast<size_t>(sample) + i] = components[t * orders + r] * sine;
        }
    }
    wrapped_distances(angles, row.wrapped_collisions, row.wrapped_nearest_median);
    row.far_condition = condition_number(standardised(functions, column_statistics(functions), false));
    return row;
}

LabResult run_stability(const VariantSettings& settings) {
    struct Job {
        const LagVariant* variant;
        double cycles;
        int64_t context;
    };
    std::vector<Job> jobs;
    for (const std::string& name : settings.variants)
        for (double cycles : settings.cycles)
            for (int64_t context : settings.contexts)
                jobs.push_back({&find_variant("--variants", name), cycles, context});
    std::vector<StabilityRow> rows(jobs.size());
    run_jobs(jobs.size(), fmt::format("the components of {} lags", settings.contexts.back()), [&](size_t i) {
        rows[i] = measure_stability(*jobs[i].variant, settings, jobs[i].cycles, jobs[i].context);
    });

    LabResult result;
    result.name = "stability";
    result.title = "Norms, phases and quantisation of jets at far lags (Table 5)";
    result.settings = settings_json(settings);
    result.settings["collision_radians"] = kCollision;
    result.settings["far_sample"] = kFarSample;
    result.settings["singular_value_floor"] = kSingularValueFloor;
    result.table.columns = {"variant",
                            "eval_len",
                            "train_len",
                            "max_order",
                            "omega_cycles",
                            "damping",
                            "bias_abs_max",
                            "bias_rms",
                            "weighted_logit_std",
                            "final_attention_entropy",
                            "final_effective_support",
                            "final_average_distance",
                            "qk_norm_proxy_max",
                            "qk_norm_proxy_final",
                            "qk_norm_proxy_mean",
                            "feature_abs_max",
                            "int8_quant_error_tensor",
                            "int8_quant_error_per_order",
                            "int4_quant_error_tensor",
                            "int4_quant_error_per_order",
                            "local_phase_ratio_final",
                            "local_phase_ratio_far_mean",
                            "far_phase_span_radians",
                            "far_local_collision_rate",
                            "wrapped_phase_collision_rate",
                            "wrapped_phase_nearest_median",
                            "far_gram_condition_number",
                            "nonfinite_count"};
    for (const StabilityRow& row : rows)
        if (row.nonfinite > 0)
            result.notes.push_back(fmt::format("{} at context {}, {} cycles: {} values of the kernel are not finite",
                                               row.variant, row.context, row.cycles, row.nonfinite));
    for (const StabilityRow& row : rows)
        result.table.rows.push_back({row.variant,
                                     row.context,
                                     settings.train_len,
                                     settings.max_order,
                                     row.cycles,
                                     settings.damping,
                                     row.bias_abs_max,
                                     row.bias_rms,
                                     row.weighted_logit_std,
                                     row.entropy,
                                     row.support,
                                     row.mean_distance,
                                     row.norm_max,
                                     row.norm_final,
                                     row.norm_mean,
                                     row.component_abs_max,
                                     row.int8_tensor,
                                     row.int8_per_order,
                                     row.int4_tensor,
                                     row.int4_per_order,
                                     row.phase_ratio_final,
                                     row.phase_ratio_far_mean,
                                     row.far_phase_span,
                                     row.local_collisions,
                                     row.wrapped_collisions,
                                     row.wrapped_nearest_median,
                                     row.far_condition,
                                     row.nonfinite});
    for (double cycles : settings.cycles) {
        LabSummary summary;
        summary.title = fmt::format("Context {} at {} cycles", settings.contexts.back(), cycles);
        summary.table.columns = {"variant", "norm", "phase ratio", "far span", "int8", "int4", "entropy", "condition"};
        for (const StabilityRow& row : rows)
            if (row.context == settings.contexts.back() && row.cycles == cycles)
                summary.table.rows.push_back({row.variant, row.norm_final, row.phase_ratio_final, row.far_phase_span,
                                              row.int8_tensor, row.int4_tensor, row.entropy, row.far_condition});
        result.summaries.push_back(summary);
    }
    std::vector<StabilityRow> first;
    for (const StabilityRow& row : rows)
        if (row.cycles == settings.cycles.front()) first.push_back(row);
    // The norms do not depend on the cycles; the phases do.
    const std::string of = settings.cycles.size() > 1 ? fmt::format(", {} cycles", settings.cycles.front()) : "";
    result.panels = {
        context_panel(first, settings, "Norm of the components", "norm at the last lag", true,
                      [](const StabilityRow& row) { return row.norm_final; }),
        context_panel(first, settings, "Phase that one token adds at the end", "psi(T-1) - psi(T-2)", true,
                      [](const StabilityRow& row) { return row.phase_ratio_final; }),
        context_panel(first, settings, "Phase of the far half" + of, "radians", true,
                      [](const StabilityRow& row) { return row.far_phase_span; }),
        context_panel(first, settings, "int4 error, one scale", "relative error", true,
                      [](const StabilityRow& row) { return row.int4_tensor; }),
    };
    return result;
}

// ---------------------------------------------------------------------------------------------------------------

FloatMatrix lag_features(const LagVariant& variant, const VariantSettings& settings, int64_t first, int64_t T) {
    const int R = settings.max_order;
    const int64_t columns = static_cast<int64_t>(settings.cycles.size()) * 2 * (R + 1);
    FloatMatrix features = make_float_matrix(T - first, columns);
    const float L = static_cast<float>(settings.train_len);
#pragma omp parallel for schedule(static)
    for (int64_t t = first; t < T; t++) {
        float components[kPjMaxOrder + 1];
        float* out = &features.values[static_cast<size_t>((t - first) * columns)];
        const float d = static_cast<float>(t);
        lag_components(variant, d, L, R, static_cast<float>(settings.damping), components);
        const float psi = phase_coordinate(variant, d, L);
        for (double cycles : settings.cycles) {
            const float angle = static_cast<float>(lag_frequency(cycles, settings.train_len)) * psi;
            const float cosine = float_cos(angle), sine = float_sin(angle);
            for (int r = 0; r <= R; r++) {
                *out++ = components[r] * cosine;
                *out++ = components[r] * sine;
            }
        }
    }
    return features;
}

static FloatMatrix first_rows(const FloatMatrix& matrix, int64_t rows) {
    return {rows, matrix.columns,
            std::vector<float>(matrix.values.begin(), matrix.values.begin() + rows * matrix.columns)};
}

static double norm_of(std::span<const float> values) {
    double sum = 0;
    for (float x : values) sum += static_cast<double>(x) * static_cast<double>(x);
    return std::sqrt(sum);
}

static double relative_error(std::span<const float> found, std::span<const float> wanted) {
    double error = 0, size = 0;
    for (size_t i = 0; i < wanted.size(); i++) {
        const double w = wanted[i], e = found[i] - w;
        error += e * e;
        size += w * w;
    }
    return size == 0 ? 0 : std::sqrt(error / size);
}

static double relative_error(const std::vector<double>& found, const std::vector<double>& wanted) {
    double error = 0, size = 0;
    for (size_t i = 0; i < wanted.size(); i++) {
        error += (found[i] - wanted[i]) * (found[i] - wanted[i]);
        size += wanted[i] * wanted[i];
    }
    return size == 0 ? 0 : std::sqrt(error / size);
}

CacheSettings cache_defaults() {
    CacheSettings settings;
    settings.lags.variants = all_variants();
    settings.lags.cycles = {5, 17, 61};
    return settings;
}

// A mix (F, columns) / sqrt(F) of standard normal draws.
static FloatMatrix draw_mix(TorchGenerator& generator, int64_t F, int64_t columns) {
    FloatMatrix mix = make_float_matrix(F, columns);
    fill_normal(generator, mix.values);
    const float root = static_cast<float>(std::sqrt(static_cast<double>(F)));
    for (float& x : mix.values) x /= root;
    return mix;
}

// key . query / sqrt(dim) for every row, in double.
static std::vector<double> cache_logits(const FloatMatrix& keys, const FloatMatrix& query) {
    std::vector<double> logits(static_cast<size_t>(keys.rows));
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < keys.rows; i++) {
        double sum = 0;
        for (int64_t j = 0; j < keys.columns; j++)
            sum += static_cast<double>(keys.values[static_cast<size_t>(i * keys.columns + j)]) *
                   static_cast<double>(query.values[static_cast<size_t>(j)]);
        logits[static_cast<size_t>(i)] = sum / std::sqrt(static_cast<double>(keys.columns));
    }
    return logits;
}

struct CacheRow {
    std::string variant;
    int64_t context;
    double norm_max, norm_final, norm_mean, norm_far_mean, abs_max, logit_abs_max, logit_std;
    // Relative errors, int8 then int4: keys with one scale, with one per channel, the far half with one scale; logits
    // with one scale, with one per channel.
    double errors[2][5];
    int64_t nonfinite;
};

// features: (T or more, F) from lag 0 on; all_keys: (T or more, dim), the same through the mix of the keys.
static CacheRow measure_cache(const std::string& variant, const FloatMatrix& features, const FloatMatrix& all_keys,
                              const FloatMatrix& query_mix, int64_t T) {
    const FloatMatrix keys = first_rows(all_keys, T);
    const int64_t F = features.columns;
    const size_t dim = static_cast<size_t>(keys.columns), half = static_cast<size_t>(T / 2);
    const double n = static_cast<double>(T);
    FloatMatrix last = make_float_matrix(1, F);
    std::copy_n(features.values.begin() + (T - 1) * F, F, last.values.begin());
    const FloatMatrix query = product(last, query_mix);
    const std::vector<double> logits = cache_logits(keys, query);

    CacheRow row = {};
    row.variant = variant;
    row.context = T;
    for (size_t t = 0; t < static_cast<size_t>(T); t++) {
        row.norm_final = norm_of(std::span(keys.values).subspan(t * dim, dim));
        row.norm_max = larger(row.norm_max, row.norm_final);
        row.norm_mean += row.norm_final / n;
        if (t >= half) row.norm_far_mean += row.norm_final / (n - static_cast<double>(half));
    }
    for (float x : keys.values) {
        row.abs_max = larger(row.abs_max, static_cast<double>(std::fabs(x)));
        row.nonfinite += !std::isfinite(x);
    }
    double mean = 0, squares = 0;
    for (double x : logits) {
        row.logit_abs_max = larger(row.logit_abs_max, std::fabs(x));
        mean += x / n;
    }
    for (double x : logits) squares += (x - mean) * (x - mean);
    row.logit_std = std::sqrt(squares / (n - 1));
    for (int i = 0; i < 2; i++) {
        const int bits = i == 0 ? 8 : 4;
        const FloatMatrix tensor = quantised(keys, bits, false);
        row.errors[i][0] = relative_error(tensor.values, keys.values);
        row.errors[i][2] =
            relative_error(std::span(tensor.values).subspan(half * dim), std::span(keys.values).subspan(half * dim));
        row.errors[i][3] = relative_error(cache_logits(tensor, query), logits);
        const FloatMatrix channel = quantised(keys, bits, true);
        row.errors[i][1] = relative_error(channel.values, keys.values);
        row.errors[i][4] = relative_error(cache_logits(channel, query), logits);
    }
    return row;
}

LabResult run_cache(const CacheSettings& settings) {
    const VariantSettings& s = settings.lags;
    const int64_t F = static_cast<int64_t>(s.cycles.size()) * 2 * (s.max_order + 1);
    TorchGenerator generator = make_generator(settings.seed);
    const FloatMatrix key_mix = draw_mix(generator, F, settings.cache_dim);
    const FloatMatrix query_mix = draw_mix(generator, F, settings.cache_dim);
    const int64_t longest = *std::max_element(s.contexts.begin(), s.contexts.end());

    LabResult result;
    result.name = "cache";
    result.title = "A cache of mixed lag features: norms, logits, quantisation";
    result.settings = settings_json(s);
    result.settings["cache_dim"] = settings.cache_dim;
    result.settings["seed"] = settings.seed;
    result.table.columns = {"variant",       "eval_len",          "train_len",     "max_order",     "cache_dim",
                            "feature_dim",   "omega_cycles",      "seed",          "key_norm_max",  "key_norm_final",
                            "key_norm_mean", "key_norm_far_mean", "cache_abs_max", "logit_abs_max", "logit_std"};
    for (const char* bits : {"int8", "int4"})
        for (const char* column : {"cache_error_tensor", "cache_error_channel", "cache_error_far_tensor",
                                   "logit_rel_error_tensor", "logit_rel_error_channel"})
            result.table.columns.push_back(fmt::format("{}_{}", bits, column));
    result.table.columns.push_back("nonfinite_count");

    std::vector<const LagVariant*> variants;
    for (const std::string& name : s.variants) variants.push_back(&find_variant("--variants", name));
    std::vector<CacheRow> rows(variants.size() * s.contexts.size());
    run_jobs(variants.size(), fmt::format("keys of {} numbers at {} lags", settings.cache_dim, longest), [&](size_t v) {
        const FloatMatrix features = lag_features(*variants[v], s, 0, longest);
        const FloatMatrix keys = product(features, key_mix);
        for (size_t c = 0; c < s.contexts.size(); c++)
            rows[v * s.contexts.size() + c] =
                measure_cache(variants[v]->name, features, keys, query_mix, s.contexts[c]);
    });
    LabSummary summary;
    summary.title = fmt::format("Context {}", s.contexts.back());
    summary.table.columns = {"variant",    "key norm",   "logit std", "int8 cache",
                             "int8 logit", "int4 cache", "int4 logit"};
    for (const CacheRow& row : rows) {
        std::vector<Json> line = {row.variant,
                                  row.context,
                                  s.train_len,
                                  s.max_order,
                                  settings.cache_dim,
                                  F,
                                  fmt::format("{}", fmt::join(s.cycles, ",")),
                                  settings.seed,
                                  row.norm_max,
                                  row.norm_final,
                                  row.norm_mean,
                                  row.norm_far_mean,
                                  row.abs_max,
                                  row.logit_abs_max,
                                  row.logit_std};
        for (const auto& errors : row.errors) line.insert(line.end(), std::begin(errors), std::end(errors));
        line.push_back(row.nonfinite);
        if (row.nonfinite > 0 || !std::isfinite(row.logit_std))
            result.notes.push_back(fmt::format(
                "{} at context {}: {} values of the keys are not finite in float32, logits have a deviation of {}",
                row.variant, row.context, row.nonfinite, short_number(row.logit_std)));
        result.table.rows.push_back(line);
        if (row.context == s.contexts.back())
            summary.table.rows.push_back({row.variant, row.norm_final, row.logit_std, row.errors[0][0],
                                          row.errors[0][3], row.errors[1][0], row.errors[1][3]});
    }
    result.summaries = {summary};
    result.panels = {context_panel(rows, s, "Norm of the last key", "norm", true,
                                   [](const CacheRow& row) { return row.norm_final; }),
                     context_panel(rows, s, "int4 error of the logits, one scale", "relative error", true,
                                   [](const CacheRow& row) { return row.errors[1][3]; })};
    return result;
}

// ---------------------------------------------------------------------------------------------------------------

RetrievalSettings retrieval_defaults() {
    RetrievalSettings settings;
    settings.lags.variants = all_variants();
    settings.lags.contexts = {4096, 8192, 16384, 32768};
    settings.lags.cycles = {5, 17, 61};
    return settings;
}

std::vector<LagBucket> lag_buckets(int64_t L, int64_t T) {
    std::vector<LagBucket> list = {
        {"train", 1, L - 1}, {"x1_4", L, 4 * L - 1}, {"x4_16", 4 * L, 16 * L - 1}, {"x16_32", 16 * L, 32 * L - 1}};
    for (LagBucket& bucket : list) bucket.last = std::min(bucket.last, T - 1);
    std::erase_if(list, [](const LagBucket& bucket) { return bucket.first > bucket.last; });
    return list;
}

// What came of the queries of one bucket.
struct Retrieved {
    size_t precision;  // index in the settings
    int64_t context;
    LagBucket bucket;
    double top1, within_1, within_8, within_64, in_bucket, mean_error, median_error;
    double target_score, other_score, margin, min_margin, ties;
    int64_t nonfinite_rows;  // of all candidates: features whose norm is beyond float
};

// keys: (F, T - 1), unit columns at lags 1..T-1; rows: the same transposed. The first of equal scores wins; a tie is a
// score of at least the target's minus 1e-6, the target's own among them. A query whose own score is not a number finds
// nothing, at an error of NaN.
static Retrieved retrieve(const FloatMatrix& rows, const FloatMatrix& keys, const LagBucket& bucket, int queries) {
    const std::vector<int64_t> lags = evenly_spaced(bucket.first, bucket.last, queries);
    std::vector<int64_t> found(lags.size()), ties(lags.size());
    std::vector<float> target(lags.size()), other(lags.size());
    // So many queries at a time that their scores stay below 64 MiB.
    const int64_t block = std::clamp<int64_t>((int64_t{1} << 24) / keys.columns, 1, queries);
    FloatMatrix scores;
    for (int64_t first = 0; first < queries; first += block) {
        FloatMatrix asked = make_float_matrix(std::min(block, queries - first), rows.columns);
        for (int64_t i = 0; i < asked.rows; i++)
            std::copy_n(rows.values.begin() + (lags[static_cast<size_t>(first + i)] - 1) * rows.columns, rows.columns,
                        asked.values.begin() + i * rows.columns);
        scores = product(asked, keys);
#pragma omp parallel for schedule(static)
        for (int64_t j = 0; j < asked.rows; j++) {
            const size_t q = static_cast<size_t>(first + j);
            const float* row = &scores.values[static_cast<size_t>(j * scores.columns)];
            const int64_t own = lags[q] - 1;
            target[q] = row[own];
            const float threshold = target[q] - 1e-6f;
            int64_t best = 0, count = 0;
            float second = -INFINITY;
            for (int64_t i = 0; i < scores.columns; i++) {
                // NaN counts as larger than every number.
                if (!(row[i] <= row[best]) && !std::isnan(row[best])) best = i;
                if (!(row[i] <= second) && !std::isnan(second) && i != own) second = row[i];
                count += row[i] >= threshold;
            }
            found[q] = best + 1;
            other[q] = second;
            ties[q] = count;
        }
    }
    Retrieved out = {};
    out.bucket = bucket;
    std::vector<double> errors;
    const double share = 1.0 / static_cast<double>(lags.size());
    for (size_t q = 0; q < lags.size(); q++) {
        const bool finds = !std::isnan(target[q]);
        const double error = finds ? static_cast<double>(std::abs(found[q] - lags[q])) : NAN;
        errors.push_back(error);
        out.top1 += share * (error == 0);
        out.within_1 += share * (error <= 1);
        out.within_8 += share * (error <= 8);
        out.within_64 += share * (error <= 64);
        out.in_bucket += share * (finds && found[q] >= bucket.first && found[q] <= bucket.last);
        out.mean_error += share * error;
        out.target_score += share * static_cast<double>(target[q]);
        out.other_score += share * static_cast<double>(other[q]);
        const double margin = static_cast<double>(target[q] - other[q]);
        out.margin += share * margin;
        out.min_margin = q == 0 ? margin : smaller(out.min_margin, margin);
        out.ties += share * static_cast<double>(ties[q]);
    }
    std::sort(errors.begin(), errors.end(),
              [](double a, double b) { return a < b || (std::isnan(b) && !std::isnan(a)); });
    out.median_error = errors[(errors.size() - 1) / 2];
    return out;
}

int precision_bits(const std::string& name) {
    if (name == "fp32") return 32;
    if (name == "int8") return 8;
    if (name == "int4") return 4;
    fail_usage("--precisions: there is no precision {}, wanted some of fp32, int8, int4", name);
}

LabResult run_retrieval(const RetrievalSettings& settings) {
    const VariantSettings& s = settings.lags;
    const int64_t longest = *std::max_element(s.contexts.begin(), s.contexts.end());
    LabResult result;
    result.name = "retrieval";
    result.title = "Which lag a feature points to (Figure 6)";
    result.settings = settings_json(s);
    result.settings["precisions"] = settings.precisions;
    result.settings["queries"] = settings.queries;
    result.settings["tie_margin"] = 1e-6;
    result.settings["bucket_starts"] = Json::object();
    for (const LagBucket& bucket : lag_buckets(s.train_len, longest))
        result.settings["bucket_starts"][bucket.name] = bucket.first;
    result.table.columns = {"variant",
                            "precision",
                            "eval_len",
                            "train_len",
                            "bucket",
                            "min_lag",
                            "max_lag",
                            "n_queries",
                            "candidate_count",
                            "feature_dim",
                            "top1_exact",
                            "within_1",
                            "within_8",
                            "within_64",
                            "bucket_accuracy",
                            "mean_abs_error",
                            "median_abs_error",
                            "mean_target_score",
                            "mean_best_nonself_score",
                            "mean_margin",
                            "min_margin",
                            "mean_tie_count",
                            "nonfinite_rows"};
    // Top-1 at the last context, by precision, variant and bucket.
    const std::vector<LagBucket> last_buckets = lag_buckets(s.train_len, s.contexts.back());
    for (const std::string& precision : settings.precisions) {
        LabSummary summary;
        summary.title = fmt::format("Top-1 at context {}, {}", s.contexts.back(), precision);
        summary.table.columns = {"variant"};
        LabPanel panel;
        panel.title = summary.title;
        panel.x_label = "bucket of lags";
        panel.y_label = "exact top-1";
        for (const LagBucket& bucket : last_buckets) {
            summary.table.columns.push_back(bucket.name);
            panel.x_names.push_back(bucket.name);
        }
        result.summaries.push_back(summary);
        result.panels.push_back(panel);
    }
    std::vector<const LagVariant*> variants;
    std::vector<int> bits;
    for (const std::string& name : s.variants) variants.push_back(&find_variant("--variants", name));
    for (const std::string& name : settings.precisions) bits.push_back(precision_bits(name));
    std::vector<std::vector<Retrieved>> found(variants.size());
    const int64_t F = static_cast<int64_t>(s.cycles.size()) * 2 * (s.max_order + 1);
    run_jobs(variants.size(), fmt::format("{} features at {} lags", F, longest), [&](size_t v) {
        const FloatMatrix all = lag_features(*variants[v], s, 1, longest);
        for (size_t p = 0; p < bits.size(); p++)
            for (int64_t T : s.contexts) {
                FloatMatrix rows = first_rows(all, T - 1);
                if (bits[p] < 32) rows = quantised(rows, bits[p], true);
                const int64_t nonfinite_rows = normalise_rows(rows);
                const FloatMatrix keys = transposed(rows);
                for (const LagBucket& bucket : lag_buckets(s.train_len, T)) {
                    found[v].push_back(retrieve(rows, keys, bucket, settings.queries));
                    found[v].back().precision = p;
                    found[v].back().context = T;
                    found[v].back().nonfinite_rows = nonfinite_rows;
                }
            }
    });
    for (size_t v = 0; v < variants.size(); v++) {
        const std::string name = variants[v]->name;
        for (size_t p = 0; p < bits.size(); p++) {
            result.summaries[p].table.rows.push_back({name});
            result.panels[p].series.push_back({name, {}, {}});
        }
        for (const Retrieved& r : found[v]) {
            result.table.rows.push_back({name,
                                         settings.precisions[r.precision],
                                         r.context,
                                         s.train_len,
                                         r.bucket.name,
                                         r.bucket.first,
                                         r.bucket.last,
                                         settings.queries,
                                         r.context - 1,
                                         F,
                                         r.top1,
                                         r.within_1,
                                         r.within_8,
                                         r.within_64,
                                         r.in_bucket,
                                         r.mean_error,
                                         r.median_error,
                                         r.target_score,
                                         r.other_score,
                                         r.margin,
                                         r.min_margin,
                                         r.ties,
                                         r.nonfinite_rows});
            if (r.nonfinite_rows > 0 && r.bucket.first == 1)
                result.notes.push_back(fmt::format("{} at context {}, {}: {} of {} rows are not finite in float32",
                                                   name, r.context, settings.precisions[r.precision], r.nonfinite_rows,
                                                   r.context - 1));
            if (r.context != s.contexts.back()) continue;
            result.summaries[r.precision].table.rows.back().push_back(r.top1);
            LabSeries& series = result.panels[r.precision].series.back();
            series.x.push_back(static_cast<double>(series.x.size()));
            series.y.push_back(r.top1);
        }
    }
    return result;
}

}  // namespace jetlag
