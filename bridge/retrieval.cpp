#include "bridge/retrieval.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "src/error.h"
#include "src/interrupt.h"
#include "src/progress.h"

namespace jetlag {

ProbeSettings probe_defaults() {
    ProbeSettings settings;
    settings.lags = retrieval_defaults().lags;
    settings.lags.variants = {"raw", "scaled", "lc_phase_only", "lc", "lc_wrong_scale"};
    settings.lags.contexts = {4096, 8192, 16384, 32768};
    return settings;
}

// Where the parameters are.
struct ProbePlaces {
    size_t embedding = 1, head, bias, count;
    explicit ProbePlaces(const ProbeSettings& s) {
        const size_t matrix = static_cast<size_t>(s.values * s.value_dim);
        head = embedding + matrix;
        bias = head + matrix;
        count = bias + static_cast<size_t>(s.values);
    }
};

static constexpr double kLargestTemperature = 1000;

Probe make_probe(const ProbeSettings& settings, TorchGenerator& generator) {
    const ProbePlaces at(settings);
    Probe probe{settings, std::vector<float>(at.count)};
    const std::span<float> all(probe.parameters);
    all[0] = static_cast<float>(std::log(settings.temperature));
    fill_normal(generator, all.subspan(at.embedding, at.head - at.embedding));
    const float bound = static_cast<float>(1 / std::sqrt(static_cast<double>(settings.value_dim)));
    fill_uniform(generator, -bound, bound, all.subspan(at.head, at.bias - at.head));
    fill_uniform(generator, -bound, bound, all.subspan(at.bias));
    return probe;
}

ProbeBatch draw_probe_batch(TorchGenerator& generator, const ProbeSettings& settings, int64_t B, int64_t N, int64_t low,
                            int64_t high) {
    std::vector<int64_t> values(static_cast<size_t>(B * N));
    fill_randint(generator, 0, settings.values, values);
    ProbeBatch batch;
    batch.values.assign(values.begin(), values.end());
    batch.targets.resize(static_cast<size_t>(B));
    fill_randint(generator, low, high + 1, batch.targets);
    return batch;
}

// One sequence of a batch; its gradient (+=) is that of the sum of its losses.
struct ProbeRow {
    double value_loss, attention_loss, target_mass, entropy;
    double score_sum, score_squares, score_abs_max;
    bool value_right, position_right;
};
static ProbeRow run_row(const Probe& probe, const FloatMatrix& rows, const int32_t* values, int64_t target,
                        double* gradients) {
    const ProbeSettings& s = probe.settings;
    const ProbePlaces at(s);
    const size_t N = static_cast<size_t>(rows.rows), F = static_cast<size_t>(rows.columns);
    const size_t V = static_cast<size_t>(s.values), D = static_cast<size_t>(s.value_dim);
    const float* p = probe.parameters.data();
    const double temperature = std::min(std::exp(static_cast<double>(p[0])), kLargestTemperature);
    const float* query = &rows.values[static_cast<size_t>(target) * F];
    std::vector<double> weights(N);
    double largest = -INFINITY, sum = 0;
    ProbeRow row = {};
    for (size_t n = 0; n < N; n++) {
        float dot = 0;
        for (size_t f = 0; f < F; f++) dot += query[f] * rows.values[n * F + f];
        weights[n] = temperature * static_cast<double>(dot);
        largest = std::max(largest, weights[n]);
        row.score_sum += weights[n];
        row.score_squares += weights[n] * weights[n];
        row.score_abs_max = std::max(row.score_abs_max, std::fabs(weights[n]));
    }
    const std::vector<double> scores = gradients != nullptr ? weights : std::vector<double>();
    const size_t top = static_cast<size_t>(std::max_element(weights.begin(), weights.end()) - weights.begin());
    const double target_score = weights[static_cast<size_t>(target)];
    double mean_score = 0;
    for (double& weight : weights) {
        const double above = weight - largest, e = std::exp(above);
        mean_score += e * above;
        sum += e;
        weight = e;
    }
    std::vector<double> mass(V, 0.0), context(D, 0.0), logits(V);
    for (size_t n = 0; n < N; n++) {
        weights[n] /= sum;
        mass[static_cast<size_t>(values[n])] += weights[n];
    }
    for (size_t v = 0; v < V; v++)
        for (size_t c = 0; c < D; c++) context[c] += mass[v] * p[at.embedding + v * D + c];
    for (size_t v = 0; v < V; v++) {
        logits[v] = p[at.bias + v];
        for (size_t c = 0; c < D; c++) logits[v] += context[c] * p[at.head + v * D + c];
    }
    const size_t label = static_cast<size_t>(values[target]);
    const size_t guess = static_cast<size_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
    const double largest_logit = logits[guess];
    double logit_sum = 0;
    for (const double logit : logits) logit_sum += std::exp(logit - largest_logit);
    row.value_loss = largest_logit + std::log(logit_sum) - logits[label];
    row.attention_loss = largest + std::log(sum) - target_score;
    row.target_mass = weights[static_cast<size_t>(target)];
    row.entropy = std::log(sum) - mean_score / sum;
    row.value_right = guess == label;
    row.position_right = top == static_cast<size_t>(target);
    if (gradients == nullptr) return row;

    std::vector<double> dcontext(D, 0.0), dmass(V, 0.0);
    for (size_t v = 0; v < V; v++) {
        const double dlogit = std::exp(logits[v] - largest_logit) / logit_sum - (v == label ? 1 : 0);
        gradients[at.bias + v] += dlogit;
        for (size_t c = 0; c < D; c++) {
            gradients[at.head + v * D + c] += dlogit * context[c];
            dcontext[c] += dlogit * p[at.head + v * D + c];
        }
    }
    double mean_dmass = 0;
    for (size_t v = 0; v < V; v++) {
        for (size_t c = 0; c < D; c++) {
            gradients[at.embedding + v * D + c] += mass[v] * dcontext[c];
            dmass[v] += dcontext[c] * p[at.embedding + v * D + c];
        }
        mean_dmass += mass[v] * dmass[v];
    }
    double dlog_temperature = 0;
    for (size_t n = 0; n < N; n++) {
        const double of_value = weights[n] * (dmass[static_cast<size_t>(values[n])] - mean_dmass);
        const double of_position = weights[n] - (n == static_cast<size_t>(target) ? 1 : 0);
        dlog_temperature += scores[n] * (of_value + s.attention_loss_weight * of_position);
    }
    // At its limit the temperature does not follow its parameter.
    if (std::exp(static_cast<double>(p[0])) <= kLargestTemperature) gradients[0] += dlog_temperature;
    return row;
}

ProbeResult run_probe(const Probe& probe, const FloatMatrix& rows, const ProbeBatch& batch,
                      std::vector<float>* gradients) {
    const int64_t B = std::ssize(batch.targets), N = rows.rows;
    const size_t count = gradients != nullptr ? probe.parameters.size() : 0;
    // Sums of a sequence each, added in order whatever the number of threads is.
    std::vector<std::vector<double>> sums(static_cast<size_t>(B), std::vector<double>(count, 0.0));
    std::vector<ProbeRow> found(static_cast<size_t>(B));
#pragma omp parallel for schedule(static)
    for (int64_t b = 0; b < B; b++)
        found[static_cast<size_t>(b)] =
            run_row(probe, rows, &batch.values[static_cast<size_t>(b * N)], batch.targets[static_cast<size_t>(b)],
                    gradients != nullptr ? sums[static_cast<size_t>(b)].data() : nullptr);
    ProbeResult mean;
    const double share = 1 / static_cast<double>(B);
    int64_t values_right = 0, positions_right = 0;
    double score_sum = 0, score_squares = 0;
    for (const int64_t target : batch.targets) mean.target_lag += share * static_cast<double>(target + 1);
    for (const ProbeRow& row : found) {
        score_sum += row.score_sum;
        score_squares += row.score_squares;
        mean.score_abs_max = std::max(mean.score_abs_max, row.score_abs_max);
        mean.loss += share * (row.value_loss + probe.settings.attention_loss_weight * row.attention_loss);
        values_right += row.value_right;
        positions_right += row.position_right;
        mean.target_mass += share * row.target_mass;
        mean.entropy += share * row.entropy;
        mean.support += share * std::exp(row.entropy);
    }
    const double scores = static_cast<double>(B * N);
    mean.score_std = std::sqrt(std::max(0.0, score_squares - score_sum * score_sum / scores) / (scores - 1));
    mean.value_accuracy = static_cast<double>(values_right) / static_cast<double>(B);
    mean.top_position_accuracy = static_cast<double>(positions_right) / static_cast<double>(B);
    for (size_t i = 0; i < count; i++) {
        double sum = 0;
        for (const std::vector<double>& part : sums) sum += part[i];
        (*gradients)[i] += static_cast<float>(share * sum);
    }
    return mean;
}

// Columns minus their mean, over their sample deviation (at least 1e-6), both of the first `fitted` rows; then rows
// over their norms.
static FloatMatrix standardised(FloatMatrix features, const FloatMatrix& fitted) {
    const size_t columns = static_cast<size_t>(features.columns);
    const double n = static_cast<double>(fitted.rows);
    for (size_t c = 0; c < columns; c++) {
        double mean = 0, squares = 0;
        for (size_t i = c; i < fitted.values.size(); i += columns) mean += fitted.values[i] / n;
        for (size_t i = c; i < fitted.values.size(); i += columns)
            squares += (fitted.values[i] - mean) * (fitted.values[i] - mean);
        const double deviation = std::max(std::sqrt(squares / (n - 1)), 1e-6);
        for (size_t i = c; i < features.values.size(); i += columns)
            features.values[i] = static_cast<float>((features.values[i] - mean) / deviation);
    }
    normalise_rows(features);
    return features;
}

static FloatMatrix features_of(const LagVariant& variant, const ProbeSettings& settings, const std::string& precision,
                               int64_t T) {
    FloatMatrix features = lag_features(variant, settings.lags, 1, T);
    const int bits = precision_bits(precision);
    return bits < 32 ? quantised(features, bits, true) : features;
}

static void check_interrupt() {
    if (caught_signal != 0) fail("interrupted by {}; nothing was written", strsignal(caught_signal));
}

static ProbeResult train_probe(Probe& probe, const FloatMatrix& rows, uint64_t seed) {
    const ProbeSettings& s = probe.settings;
    const int64_t n = std::ssize(probe.parameters);
    DeviceArray<float> parameters(n), m(n), v(n), device_gradients(n);
    DeviceArray<uint8_t> takes_part(n);
    const DeviceArray<double> norm(1);
    copy_to_device(parameters.data, probe.parameters.data(), parameters.bytes());
    const std::vector<uint8_t> all(static_cast<size_t>(n), 1);
    copy_to_device(takes_part.data, all.data(), takes_part.bytes());
    TorchGenerator generator = make_generator(seed);
    ProbeResult last;
    for (int64_t step = 1; step <= s.steps; step++) {
        check_interrupt();
        const ProbeBatch batch = draw_probe_batch(generator, s, s.batch, rows.rows, 0, rows.rows - 1);
        std::vector<float> gradients(probe.parameters.size(), 0.0f);
        last = run_probe(probe, rows, batch, &gradients);
        if (!std::isfinite(last.loss)) fail("step {}: the loss of the probe is {}", step, std::fabs(last.loss));
        copy_to_device(device_gradients.data, gradients.data(), device_gradients.bytes());
        euclidean_norm(norm.data, device_gradients.data, n);
        adamw(parameters.data, m.data, v.data, device_gradients.data, takes_part.data,
              {s.lr, 0.9, 0.999, 1e-8, s.weight_decay, 1, norm.data, s.grad_clip}, step, n);
        copy_to_host(probe.parameters.data(), parameters.data, parameters.bytes());
    }
    return last;
}

static Json settings_json(const ProbeSettings& s) {
    return {{"variants", s.lags.variants},
            {"train_len", s.lags.train_len},
            {"contexts", s.lags.contexts},
            {"cycles", s.lags.cycles},
            {"max_order", s.lags.max_order},
            {"damping", s.lags.damping},
            {"precisions", s.precisions},
            {"values", s.values},
            {"value_dim", s.value_dim},
            {"temperature", s.temperature},
            {"steps", s.steps},
            {"batch", s.batch},
            {"eval_batches", s.eval_batches},
            {"eval_batch", s.eval_batch},
            {"lr", s.lr},
            {"weight_decay", s.weight_decay},
            {"grad_clip", s.grad_clip},
            {"attention_loss_weight", s.attention_loss_weight},
            {"seed", s.seed}};
}

LabResult run_retrieval_probe(const ProbeSettings& s) {
    LabResult result;
    result.name = "trained_retrieval";
    result.title = fmt::format("Trained retrieval: values found at far lags, trained at {}", s.lags.train_len);
    result.settings = settings_json(s);
    result.table.columns = {"variant",
                            "precision",
                            "eval_len",
                            "train_len",
                            "bucket",
                            "min_lag",
                            "max_lag",
                            "train_loss",
                            "train_value_accuracy",
                            "value_accuracy",
                            "top_position_accuracy",
                            "target_attention_mass",
                            "attention_entropy",
                            "effective_support",
                            "mean_target_lag",
                            "score_abs_max",
                            "score_std",
                            "temperature"};
    const int64_t L = s.lags.train_len, longest = *std::max_element(s.lags.contexts.begin(), s.lags.contexts.end());
    const std::vector<LagBucket> last_buckets = lag_buckets(L, longest);
    Progress progress = make_progress();
    double done = 0;
    for (size_t p = 0; p < s.precisions.size(); p++) {
        const std::string& precision = s.precisions[p];
        LabSummary summary;
        summary.title =
            fmt::format("{} at {}: value accuracy, top position, attention on the target", precision, longest);
        summary.table.columns = {"variant"};
        LabPanel panel;
        panel.title = fmt::format("{} at {}", precision, longest);
        panel.x_label = "bucket of lags";
        panel.y_label = "value accuracy";
        for (const LagBucket& bucket : last_buckets) {
            panel.x_names.push_back(bucket.name);
            summary.table.columns.push_back(bucket.name);
        }
        for (size_t v = 0; v < s.lags.variants.size(); v++) {
            const LagVariant& variant = find_variant("--variants", s.lags.variants[v]);
            draw_progress(progress, fmt::format("{} {}", variant.name, precision),
                          done++ / static_cast<double>(s.precisions.size() * s.lags.variants.size()), "");
            // The published seeds: of the model, and again of its batches.
            const uint64_t seed = s.seed + 1009 * v + 9176 * p;
            TorchGenerator generator = make_generator(seed);
            Probe probe = make_probe(s, generator);
            const FloatMatrix fitted = features_of(variant, s, precision, L);
            const ProbeResult trained = train_probe(probe, standardised(fitted, fitted), seed);
            const double temperature =
                std::min(std::exp(static_cast<double>(probe.parameters[0])), kLargestTemperature);
            std::vector<Json> row = {variant.name};
            LabSeries series{variant.name, {}, {}};
            for (const int64_t T : s.lags.contexts) {
                const FloatMatrix rows = standardised(features_of(variant, s, precision, T), fitted);
                for (const LagBucket& bucket : lag_buckets(L, T)) {
                    check_interrupt();
                    const int64_t low = bucket.first - 1, high = std::min(bucket.last, rows.rows);
                    TorchGenerator own = make_generator(static_cast<uint64_t>(T * 1000003 + low * 9176 + high));
                    ProbeResult mean;
                    const double share = 1 / static_cast<double>(s.eval_batches);
                    for (int64_t n = 0; n < s.eval_batches; n++) {
                        const ProbeResult one = run_probe(
                            probe, rows,
                            draw_probe_batch(own, s, s.eval_batch, rows.rows, low, std::min(high, rows.rows - 1)),
                            nullptr);
                        mean.value_accuracy += share * one.value_accuracy;
                        mean.top_position_accuracy += share * one.top_position_accuracy;
                        mean.target_mass += share * one.target_mass;
                        mean.entropy += share * one.entropy;
                        mean.support += share * one.support;
                        mean.target_lag += share * one.target_lag;
                        mean.score_abs_max += share * one.score_abs_max;
                        mean.score_std += share * one.score_std;
                    }
                    result.table.rows.push_back(
                        {variant.name, precision, T, L, bucket.name, bucket.first, bucket.last, trained.loss,
                         trained.value_accuracy, mean.value_accuracy, mean.top_position_accuracy, mean.target_mass,
                         mean.entropy, mean.support, mean.target_lag, mean.score_abs_max, mean.score_std, temperature});
                    if (T != longest) continue;
                    row.push_back(fmt::format("{:.3f} {:.3f} {:.3f}", mean.value_accuracy, mean.top_position_accuracy,
                                              mean.target_mass));
                    series.x.push_back(static_cast<double>(series.x.size()));
                    series.y.push_back(mean.value_accuracy);
                }
            }
            summary.table.rows.push_back(row);
            panel.series.push_back(series);
        }
        result.summaries.push_back(summary);
        result.panels.push_back(panel);
    }
    clear_progress(progress);
    return result;
}

}  // namespace jetlag
