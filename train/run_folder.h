// A run folder: the resolved configuration, the log, the checkpoint, and the state from which training resumes.
//
//     config.yaml              the resolved configuration
//     initial_eval.json        the held-out losses before the first step
//     log.csv, log.jsonl       one row, one object per logged step
//     checkpoint.safetensors   parameters (models/checkpoint.h)
//     state.safetensors        parameters, Adam moments, step, generator: all that --resume needs, in one file, so that
//                              a kill between two writes can never leave files that disagree
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "models/config.h"
#include "models/model.h"
#include "src/random.h"

namespace jetlag {

struct TrainingState {
    int64_t step = 0;  // optimizer steps taken
    TorchGenerator generator;
    DeviceArray<float> m, v;  // AdamW's moments, laid out like the parameters
};

// What a run is known by, and what of it may be different when it goes on.
struct RunIdentity {
    std::string config;                 // the resolved configuration as JSON
    std::string corpus, corpus_sha256;  // "" where there is no corpus
    int64_t steps = 0;                  // to be taken in all
    // A saved configuration completed by today's defaults. Errors: it is not one.
    std::function<std::string(const std::string& json, const std::string& file)> resolve;
    // Whether the steps that were taken do not depend on this key, so that it may change.
    std::function<bool(const std::string& key)> may_change;
};

// Keys of the section `train` that the steps taken do not depend on.
bool is_free_training_key(const std::string& key, const TrainSettings& train);

struct LogRow {
    int64_t step = 0;                    // numbered from 1
    double loss = 0;                     // of the step's batch, before its update
    std::optional<double> heldout_loss;  // after its update
    double grad_norm = 0;                // before clipping
    double lr = 0;
    double tokens_per_second = 0;
    double percent_of_peak = 0;
    double seconds = 0;  // of training, over all processes that the run took
};

// For output files that are written after minutes of work: exit code 2, naming the option, if the path cannot be
// written to or is one of `taken`, other outputs and inputs; a run folder stands for the files of the run.
void check_output_not_taken(const std::string& option, const std::filesystem::path& path,
                            const std::vector<std::string>& taken);

std::filesystem::path config_path(const std::filesystem::path& folder);
std::filesystem::path state_path(const std::filesystem::path& folder);
std::filesystem::path initial_eval_path(const std::filesystem::path& folder);
// The evaluation after the last step, of a student of the bridge.
std::filesystem::path evaluation_path(const std::filesystem::path& folder);
std::filesystem::path evaluation_csv_path(const std::filesystem::path& folder);

// True if the folder holds something that a new run would lose: a state, a checkpoint, or rows of a log.
bool holds_a_run(const std::filesystem::path& folder);

// Writes the state, then the checkpoint, each atomically. Errors name the file and say which step the last good
// state is of.
void save_run(const std::filesystem::path& folder, const Model& model, const TrainingState& state,
              const RunIdentity& identity);

// The step of the state on disk, or -1 if there is no readable one.
int64_t saved_step(const std::filesystem::path& folder);

// Reads the state into model and state. Errors (exit code 2) name what differs: a model setting, a training setting
// that would change the trajectory, the corpus.
void load_run(const std::filesystem::path& folder, Model& model, TrainingState& state, const RunIdentity& identity);

// Starts empty logs, or, when resuming, drops the rows after `step` and returns the seconds of the last one kept.
void start_logs(const std::filesystem::path& folder);
double truncate_logs(const std::filesystem::path& folder, int64_t step);

// Appends one row to both logs.
void append_log(const std::filesystem::path& folder, const LogRow& row);

}  // namespace jetlag
