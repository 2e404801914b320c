// The trained retrieval probe: can a reader of lag features, trained at L, find a value at a far lag?
//
// One attention step. A context holds a random value (of 64) at each lag 1..T-1; the key of a lag is its feature row
// (lab/lags.h) divided by its norm, the query the row of the lag that is asked for, and the score their product times a
// learned temperature. Values are embedded, their weighted mean goes through a dense head to 64 classes. The loss is
// the cross-entropy of the value plus that of the lag itself under the attention. The features are quantised per
// column, then standardised with the mean and deviation that they have up to L.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/ops.h"
#include "lab/lags.h"
#include "src/random.h"

namespace jetlag {

struct ProbeSettings {
    VariantSettings lags;  // contexts: at which it is evaluated
    std::vector<std::string> precisions = {"fp32", "int8", "int4"};
    int64_t values = 64, value_dim = 64;
    double temperature = 32;  // at the start
    int64_t steps = 360, batch = 96;
    int64_t eval_batches = 4, eval_batch = 48;
    double lr = 0.002, weight_decay = 0.01, grad_clip = 1;
    double attention_loss_weight = 1;
    uint64_t seed = 0;
};
ProbeSettings probe_defaults();

// The parameters, back to back: log temperature, embedding (values, value_dim), head weight (values, value_dim), head
// bias (values).
struct Probe {
    ProbeSettings settings;
    std::vector<float> parameters;
};
// Drawn as the published PyTorch code draws them.
Probe make_probe(const ProbeSettings& settings, TorchGenerator& generator);

struct ProbeBatch {
    std::vector<int32_t> values;   // (B, N), of the candidates 0..N-1
    std::vector<int64_t> targets;  // (B), candidates
};
// Targets are uniform in [low, high].
ProbeBatch draw_probe_batch(TorchGenerator& generator, const ProbeSettings& settings, int64_t B, int64_t N, int64_t low,
                            int64_t high);

// Means over a batch.
struct ProbeResult {
    double loss = 0;
    double value_accuracy = 0, top_position_accuracy = 0, target_mass = 0;  // of 1
    double entropy = 0, support = 0;                                        // nats, lags
    double target_lag = 0;
    double score_abs_max = 0, score_std = 0;  // over all scores of the batch: largest magnitude, sample deviation
};
// rows: (N, F), the standardised features divided by their norms. gradients: as the parameters, +=; nullptr: none.
ProbeResult run_probe(const Probe& probe, const FloatMatrix& rows, const ProbeBatch& batch,
                      std::vector<float>* gradients);

// Trains a probe per variant and precision and evaluates it in every bucket of every context.
LabResult run_retrieval_probe(const ProbeSettings& settings);

}  // namespace jetlag
