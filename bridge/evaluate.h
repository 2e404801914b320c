// Evaluation of a student of the bridge on fresh queries of a teacher.
#pragma once

#include <string>
#include <vector>

#include "bridge/config.h"
#include "models/model.h"

namespace jetlag {

// Means over batches of means over sequences; the attention is the last block's, of the query, over heads too.
struct BridgeEvaluation {
    int64_t context = 0;  // tokens, the query among them
    int64_t batches = 0;
    double loss = 0;  // nats
    double accuracy = 0;
    double label_balance = 0;                // share of label 1
    double mean_confidence = 0;              // the larger of the two probabilities
    double attention_entropy = 0;            // nats
    double attention_effective_support = 0;  // exp of a row's entropy, in keys
};

// Draws train.batch queries of length T for each of so many batches. Errors: a loss that is not finite.
BridgeEvaluation evaluate_student(const Model& model, const BridgeConfig& config, int64_t T, int64_t batches,
                                  TorchGenerator& generator);

// A student with what is reported of it. `initial`: before training, batches = 0 if that was not evaluated.
struct StudentReport {
    std::string name;
    BridgeConfig config;
    BridgeEvaluation initial;
    std::vector<BridgeEvaluation> evaluations;
    std::vector<std::pair<std::string, double>> lag_bias;  // gates, slope, order masses
};

// An aligned table for the terminal; a CSV with the study's column names, one row per student and length; JSON.
std::string bridge_table(const std::vector<StudentReport>& list);
std::string bridge_csv(const std::vector<StudentReport>& list);
std::string bridge_report_json(const StudentReport& report);
// The inverse of the latter. Errors name the file.
StudentReport parse_bridge_report(const std::string& json, const std::string& file);

}  // namespace jetlag
