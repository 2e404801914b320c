// The loop of every training program: optimizer steps, the log, checkpoints, progress, signals, divergence.
#pragma once

#include <functional>
#include <optional>

#include "models/model.h"
#include "train/run_folder.h"

namespace jetlag {

// The learning rate of a step, numbered from 1.
double learning_rate(const TrainSettings& train, int64_t step);

// Memory for a batch of B x T tokens and what is in it: where to look for the first tensor with a NaN.
struct BatchMemory {
    const Activations* acts = nullptr;
    int64_t B = 0, T = 0;
};

// What a program trains on.
struct TrainingTask {
    // Draws the batch of a step and tells the device its forward and backward passes, gradients +=. `add_loss` takes
    // the mean loss of a pass, in nats, that was waited for, and its share of the batch; it throws where that is not
    // finite.
    std::function<void(int64_t step, DeviceArray<float>& gradients,
                       const std::function<void(double loss, double share)>& add_loss)>
        start_batch;
    // Waits for the last pass, and gives its loss and its share of the batch.
    std::function<std::pair<double, double>()> finish_batch;
    // The memory that the batch at hand is in.
    std::function<BatchMemory()> batch_memory;
    // Tokens of a step, and floating-point operations of its forward and backward passes.
    std::function<double(int64_t step)> tokens, flops;
    // The held-out loss, in nats, and the memory that it was computed in; nullptr without.
    std::function<double()> held_out_loss;
    BatchMemory held_out_memory;
};

struct LoopResult {
    int64_t steps = 0;   // that this process took
    double seconds = 0;  // of training
    double tokens = 0;   // in these steps
};

// Takes the steps up to train.steps, from state.step on, and saves the run at the end, every train.save_every steps and
// when a signal came. `was_saved`: the folder holds the state at hand already. `seconds_before`: of training, by the
// processes before this one. `peak`: FLOP/s that the machine has. Errors: a signal before the last step, having saved;
// a loss, gradient norm or parameter that is not finite, naming the step, the tensor and the last good checkpoint.
LoopResult run_training_loop(const TrainSettings& train, Model& model, TrainingState& state,
                             const std::filesystem::path& folder, const RunIdentity& identity, const TrainingTask& task,
                             bool was_saved, double seconds_before, double peak);

// What the programs print about the machine, and about memory: sizes in floats.
std::string machine_text(double peak);
std::string mebibytes(int64_t floats);

}  // namespace jetlag
