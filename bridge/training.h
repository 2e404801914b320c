// Training of one student of the bridge, into a run folder as train_lm's (train/run_folder.h) with
//
//     evaluation.json, evaluation.csv   the evaluation after the last step
#pragma once

#include <filesystem>

#include "bridge/evaluate.h"

namespace jetlag {

// Trains up to train.steps and evaluates at eval.contexts. Random numbers are drawn as the published PyTorch code draws
// them: the model, the initial evaluation, for each step its length (if drawn) and its bits, the evaluations. Errors:
// as run_training_loop's and load_run's.
StudentReport train_student(const BridgeConfig& config, const std::filesystem::path& folder, bool resume);

// A student from its run folder or checkpoint; `overrides` are KEY=VALUEs on top of its configuration. Errors (exit
// code 2): nothing there, or overrides that make it another model; (exit code 1) no checkpoint of the bridge.
struct Student {
    BridgeConfig config;
    Model model;
};
Student load_student(const std::filesystem::path& path, const std::vector<std::string>& overrides);

}  // namespace jetlag
