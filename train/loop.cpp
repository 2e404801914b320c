#include "train/loop.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "models/checkpoint.h"
#include "src/error.h"
#include "src/interrupt.h"
#include "src/progress.h"

namespace jetlag {

static double seconds_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double learning_rate(const TrainSettings& train, int64_t step) {
    if (step <= train.warmup_steps)
        return train.lr * static_cast<double>(step) / static_cast<double>(train.warmup_steps);
    if (train.schedule == "constant") return train.lr;
    const double length = static_cast<double>(std::max<int64_t>(1, train.steps - train.warmup_steps));
    const double way = std::min(1.0, static_cast<double>(step - train.warmup_steps) / length);
    return train.final_lr + (train.lr - train.final_lr) * 0.5 * (1 + std::cos(3.14159265358979323846 * way));
}

std::string machine_text(double peak) {
    return fmt::format("machine      {} threads, {} {} ({}), {:.0f} GFLOP/s at most\n", thread_count(), backend_name(),
                       kPrecision, simd_target_name(), peak * 1e-9);
}

std::string mebibytes(int64_t floats) {
    return fmt::format("{:.1f} MiB", static_cast<double>(floats) * 4 / 1048576);
}

static void print_row(const LogRow& row, const TrainSettings& train, double seconds_left) {
    fmt::print(
        "step {:>{}}/{}  loss {:.4f}  held-out {}  |grad| {:.3f}  {:>6.0f} tokens/s  {:>2.0f}% of peak  left {}\n",
        row.step, std::to_string(train.steps).size(), train.steps, row.loss,
        row.heldout_loss ? fmt::format("{:.4f}", *row.heldout_loss) : "-", row.grad_norm, row.tokens_per_second,
        row.percent_of_peak, duration_text(seconds_left));
    std::fflush(stdout);
}

static std::string last_good(const std::filesystem::path& folder) {
    const int64_t step = saved_step(folder);
    return step >= 0
               ? fmt::format("the last good checkpoint, of step {}, is {}", step, checkpoint_file(folder).string())
               : "no checkpoint was saved before";
}

LoopResult run_training_loop(const TrainSettings& t, Model& model, TrainingState& state,
                             const std::filesystem::path& folder, const RunIdentity& identity, const TrainingTask& task,
                             bool was_saved, double seconds_before, double peak) {
    DeviceArray<float> gradients(model.parameters.size);
    const DeviceArray<double> norm(1);  // of the gradients
    Progress progress = make_progress();
    const int64_t first_step = state.step;
    LoopResult result;
    double other_seconds = 0, window_seconds = 0, window_tokens = 0,
           window_flops = 0;  // of evaluations and saves; of training since the last row
    int64_t saved = was_saved ? state.step : -1;
    const auto save = [&]() {
        save_run(folder, model, state, identity);
        saved = state.step;
    };
    // Callers take the magnitude of what they found: the sign of a NaN means nothing.
    const auto diverged = [&](int64_t step, const std::string& what, const BatchMemory& in,
                              const DeviceArray<float>* with_gradients) {
        clear_progress(progress);
        const std::string tensor = first_nonfinite_tensor(model, *in.acts, with_gradients, in.B, in.T);
        fail("step {}: {}; the first tensor with a NaN or infinity is {}; {}", step, what,
             tensor.empty() ? "none (the sum overflowed)" : tensor, last_good(folder));
    };

    while (state.step < t.steps && caught_signal == 0) {
        const auto start = std::chrono::steady_clock::now();
        const int64_t step = state.step + 1;
        device_zero(gradients.data, gradients.bytes());
        LogRow row;
        row.step = step;
        const auto add_loss = [&](double loss, double share) {
            if (!std::isfinite(loss))
                diverged(step, fmt::format("the loss is {}", std::fabs(loss)), task.batch_memory(), nullptr);
            row.loss += loss * share;
        };
        task.start_batch(step, gradients, add_loss);
        // Nothing is waited for before the update, which does nothing if the gradients are not finite.
        row.lr = learning_rate(t, step);
        euclidean_norm(norm.data, gradients.data, gradients.size);
        adamw(model.parameters.data, state.m.data, state.v.data, gradients.data, model.takes_part.data,
              {row.lr, t.beta1, t.beta2, t.eps, t.weight_decay, 1, norm.data, t.grad_clip}, step,
              model.parameters.size);
        const auto [loss, share] = task.finish_batch();
        add_loss(loss, share);
        copy_to_host(&row.grad_norm, norm.data, sizeof(row.grad_norm));
        if (!std::isfinite(row.grad_norm))
            diverged(step, fmt::format("the gradient norm is {}", std::fabs(row.grad_norm)), task.batch_memory(),
                     &gradients);
        state.step = step;
        device_wait();
        const double elapsed = seconds_since(start);
        result.seconds += elapsed;
        result.tokens += task.tokens(step);
        window_seconds += elapsed;
        window_tokens += task.tokens(step);
        window_flops += task.flops(step);

        const auto after = std::chrono::steady_clock::now();
        const bool last = step == t.steps,
                   evaluates = task.held_out_loss && t.eval_every > 0 && (step % t.eval_every == 0 || last);
        if (evaluates) {
            row.heldout_loss = task.held_out_loss();
            if (!std::isfinite(*row.heldout_loss))
                diverged(step, fmt::format("the held-out loss after its update is {}", std::fabs(*row.heldout_loss)),
                         task.held_out_memory, nullptr);
        }
        const double done = static_cast<double>(step - first_step);
        const double left = (result.seconds + other_seconds) / done * static_cast<double>(t.steps - step);
        if (step % t.log_every == 0 || step == 1 || last || evaluates) {
            row.tokens_per_second = window_tokens / window_seconds;
            row.percent_of_peak = 100 * window_flops / window_seconds / peak;
            row.seconds = seconds_before + result.seconds;
            clear_progress(progress);
            print_row(row, t, left);
            append_log(folder, row);
            window_seconds = window_tokens = window_flops = 0;
        }
        if (last || caught_signal != 0 || (t.save_every > 0 && step % t.save_every == 0)) {
            if (!std::isfinite(moments(model.parameters.data, model.parameters.size).sum_of_squares))
                diverged(step, "the update made a parameter NaN or infinite", task.batch_memory(), nullptr);
            save();
        }
        other_seconds += seconds_since(after);
        draw_progress(progress, fmt::format("step {}/{}", step, t.steps),
                      static_cast<double>(step) / static_cast<double>(t.steps),
                      fmt::format("loss {:.4f}, left {}", row.loss, duration_text(left)));
    }
    clear_progress(progress);
    if (saved != state.step) save();
    if (caught_signal != 0 && state.step < t.steps)
        fail("interrupted by {} after step {}; saved in {}; go on with --resume", strsignal(caught_signal), state.step,
             state_path(folder).string());
    result.steps = state.step - first_step;
    return result;
}

}  // namespace jetlag
