// train_lm: trains a language model on a token stream.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>

#include "models/checkpoint.h"
#include "models/config.h"
#include "models/model.h"
#include "models/windows.h"
#include "src/command_line.h"
#include "src/error.h"
#include "src/files.h"
#include "src/interrupt.h"
#include "src/progress.h"
#include "src/token_stream.h"
#include "train/run_folder.h"

namespace jetlag {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
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

void check_lengths(const Config& config, const std::vector<Setting>& settings, const CorpusParts& parts) {
    const auto check = [&](const char* key, int64_t T, std::span<const uint8_t> part, const char* name) {
        check_fits(where_set(settings, key), key, T, static_cast<int64_t>(part.size()), tokens_to_draw_from(T),
                   fmt::format("{} part of {}", name, config.data.corpus));
    };
    check("train.context", config.train.context, parts.train, "training");
    check("train.context", config.train.context, parts.eval, "held-out");
    for (int64_t context : config.eval.contexts) check("eval.contexts", context, parts.eval, "held-out");
}

// The mean loss of each of `count` held-out batches of the size of a training batch.
std::vector<double> held_out_losses(const Model& model, Activations& acts, const Config& config,
                                    std::span<const uint8_t> part, int64_t count, bool stops_at_signal,
                                    const std::function<TorchGenerator&(int64_t)>& generator_of) {
    std::vector<double> losses;
    const int64_t T = config.train.context, passes = config.train.accumulate, B = config.train.batch / passes;
    for (int64_t n = 0; n < count && !(stops_at_signal && caught_signal != 0); n++) {
        const std::vector<int64_t> starts =
            draw_windows(generator_of(n), static_cast<int64_t>(part.size()), T, config.train.batch);
        double loss = 0;
        for (int64_t pass = 0; pass < passes; pass++) {
            const Batch batch =
                make_batch(part, std::span(starts).subspan(static_cast<size_t>(pass * B), static_cast<size_t>(B)), T);
            loss +=
                evaluate_batch(model, acts, batch.tokens, batch.targets, B, T, T).loss / static_cast<double>(passes);
        }
        losses.push_back(loss);
    }
    return losses;
}

double mean(const std::vector<double>& values) {
    double sum = 0;
    for (double x : values) sum += x;
    return sum / static_cast<double>(values.size());
}

std::string mebibytes(int64_t floats) {
    return fmt::format("{:.1f} MiB", static_cast<double>(floats) * 4 / 1048576);
}

Mode training_mode(const Config& config) {
    return config.train.recompute ? Mode::recomputing : Mode::training;
}

void print_setup(const Config& config, const Model& model, const TokenStream& corpus, const CorpusParts& parts,
                 const std::filesystem::path& folder, double peak) {
    const ModelShape& s = model.shape;
    const int64_t B = config.train.batch / config.train.accumulate, n = model.parameters.size;
    const ActivationSizes sizes = activation_sizes(s, B, config.train.context, training_mode(config), false);
    const ActivationSizes held_out = activation_sizes(s, B, config.train.context, Mode::inference, false);
    fmt::print("run folder   {}\n", folder.string());
    fmt::print("model        position {}, {} layers, C {}, H {}, D {}, {} parameters\n", s.position, s.layers,
               s.embed_dim, s.heads, s.head_dim, n);
    fmt::print("corpus       {}: {} tokens, {} to train on, {} held out\n", corpus.path.string(), corpus.tokens.size(),
               parts.train.size(), parts.eval.size());
    fmt::print("             SHA-256 {}\n", corpus.sha256);
    if (parts.is_halved)
        fmt::print("             half and half: at data.train_fraction {} a part would have under {} tokens\n",
                   config.data.train_fraction, kSmallestPart);
    fmt::print("training     {} steps of {} windows of {} tokens{}, AdamW lr {} ({}), seed {}{}\n", config.train.steps,
               config.train.batch, config.train.context,
               config.train.accumulate > 1 ? fmt::format(" in {} passes", config.train.accumulate) : "",
               config.train.lr, config.train.schedule, config.train.seed,
               config.train.data_seed ? fmt::format(", data seed {}", *config.train.data_seed) : "");
    fmt::print("machine      {} threads, {} {} ({}), {:.0f} GFLOP/s at most\n", thread_count(), backend_name(),
               kPrecision, simd_target_name(), peak * 1e-9);
    fmt::print(
        "memory       parameters {}, gradients {}, AdamW {}, activations {}, tables {}, workspace {}, held-out {}\n",
        mebibytes(n), mebibytes(n), mebibytes(2 * n), mebibytes(sizes.activation_floats), mebibytes(sizes.table_floats),
        mebibytes(sizes.workspace_floats),
        mebibytes(held_out.activation_floats + held_out.table_floats + held_out.workspace_floats));
    std::fflush(stdout);
}

void print_row(const LogRow& row, const Config& config, double seconds_left) {
    fmt::print(
        "step {:>{}}/{}  loss {:.4f}  held-out {}  |grad| {:.3f}  {:>6.0f} tokens/s  {:>2.0f}% of peak  left {}\n",
        row.step, std::to_string(config.train.steps).size(), config.train.steps, row.loss,
        row.heldout_loss ? fmt::format("{:.4f}", *row.heldout_loss) : "-", row.grad_norm, row.tokens_per_second,
        row.percent_of_peak, duration_text(seconds_left));
    std::fflush(stdout);
}

std::string last_good(const std::filesystem::path& folder) {
    const int64_t step = saved_step(folder);
    return step >= 0
               ? fmt::format("the last good checkpoint, of step {}, is {}", step, checkpoint_file(folder).string())
               : "no checkpoint was saved before";
}

int train(const Config& config, const std::vector<Setting>& settings, const std::filesystem::path& folder,
          bool resume) {
    if (config.data.corpus.empty()) fail_usage("data.corpus: not given (wanted the path of a token stream)");
    const TokenStream corpus = open_corpus(where_set(settings, "data.corpus"), config.data.corpus);
    const CorpusParts parts = split_corpus(corpus.tokens, config.data.train_fraction);
    check_lengths(config, settings, parts);

    const TrainSettings& t = config.train;
    const int64_t T = t.context, B = t.batch / t.accumulate;
    Model model = make_model(model_shape(config));
    TrainingState state;
    state.generator = make_generator(static_cast<uint64_t>(t.seed));
    state.m = DeviceArray<float>(model.parameters.size);
    state.v = DeviceArray<float>(model.parameters.size);
    initialize_model(model, state.generator);
    Activations acts = make_activations(model.shape, B, T, training_mode(config), false);
    Activations eval_acts = make_activations(model.shape, B, T, Mode::inference, false);
    DeviceArray<float> gradients(model.parameters.size);
    const DeviceArray<double> norm(1);  // of the gradients

    make_folder(folder);
    const FolderLock lock = lock_folder(folder, false);
    const bool has_state =
        resume && (std::filesystem::exists(state_path(folder)) || std::filesystem::exists(checkpoint_file(folder)));
    if (has_state) load_run(folder, model, state, config, corpus.sha256);
    const double peak = measure_peak_flops();
    print_setup(config, model, corpus, parts, folder, peak);
    write_file_atomically(config_path(folder), config_yaml(config));
    catch_signals();

    const uint64_t own_seed = static_cast<uint64_t>(t.data_seed.value_or(t.seed));
    TorchGenerator indexed;
    // With a data seed, batch n of a stream is a function of that seed and n alone.
    const auto indexed_generator = [&](WindowStream stream, int64_t n) -> TorchGenerator& {
        indexed = make_indexed_generator(own_seed, stream, static_cast<uint64_t>(n));
        return indexed;
    };

    double seconds_before = 0;  // of training, of the processes before this one
    if (has_state) {
        seconds_before = truncate_logs(folder, state.step);
        save_run(folder, model, state, config, corpus.sha256);  // the kill may have come before the checkpoint's turn
        fmt::print("resuming after step {}\n", state.step);
    } else {
        if (resume) fmt::print("no state in {} yet: starting from the beginning\n", folder.string());
        start_logs(folder);
        const std::vector<double> losses = held_out_losses(
            model, eval_acts, config, parts.eval, t.initial_eval_batches, true, [&](int64_t n) -> TorchGenerator& {
                return t.data_seed ? indexed_generator(kInitialEvalWindows, n) : state.generator;
            });
        if (caught_signal != 0)
            fail("interrupted by {} before the first step; nothing to save", strsignal(caught_signal));
        if (!losses.empty()) {
            fmt::print("initial held-out loss {:.4f} over {} batches\n", mean(losses), losses.size());
            write_file_atomically(initial_eval_path(folder),
                                  nlohmann::ordered_json{{"loss", mean(losses)}, {"losses", losses}}.dump() + "\n");
        }
    }

    Progress progress = make_progress();
    const double step_flops = training_flops(model.shape, t.batch, T), step_tokens = static_cast<double>(t.batch * T);
    const int64_t first_step = state.step;
    double seconds = 0, other_seconds = 0,
           window_seconds = 0;  // of training; of evaluations and saves; since the last row
    int64_t window_steps = 0, saved = has_state ? state.step : -1;
    const auto save = [&]() {
        save_run(folder, model, state, config, corpus.sha256);
        saved = state.step;
    };
    // Callers take the magnitude of what they found: the sign of a NaN means nothing.
    const auto diverged = [&](int64_t step, const std::string& what, const Activations& in,
                              const DeviceArray<float>* with_gradients) {
        clear_progress(progress);
        const std::string tensor = first_nonfinite_tensor(model, in, with_gradients, B, T);
        fail("step {}: {}; the first tensor with a NaN or infinity is {}; {}", step, what,
             tensor.empty() ? "none (the sum overflowed)" : tensor, last_good(folder));
    };

    // The loss of the pass that was started last.
    const auto add_loss = [&](LogRow& row) {
        const double loss = finish_train_batch(acts, B, T);
        if (!std::isfinite(loss)) diverged(row.step, fmt::format("the loss is {}", std::fabs(loss)), acts, nullptr);
        row.loss += loss / static_cast<double>(t.accumulate);
    };

    while (state.step < t.steps && caught_signal == 0) {
        const auto start = std::chrono::steady_clock::now();
        const int64_t step = state.step + 1;
        TorchGenerator& generator = t.data_seed ? indexed_generator(kTrainWindows, step - 1) : state.generator;
        const std::vector<int64_t> starts =
            draw_windows(generator, static_cast<int64_t>(parts.train.size()), T, t.batch);
        device_zero(gradients.data, gradients.bytes());
        LogRow row;
        row.step = step;
        for (int64_t pass = 0; pass < t.accumulate; pass++) {
            const Batch batch = make_batch(
                parts.train, std::span(starts).subspan(static_cast<size_t>(pass * B), static_cast<size_t>(B)), T);
            start_train_batch(model, acts, gradients, batch.tokens, batch.targets, B, T,
                              1 / static_cast<double>(t.accumulate));
            if (pass + 1 < t.accumulate) add_loss(row);
        }
        // Nothing is waited for before the update, which does nothing if the gradients are not finite.
        row.lr = learning_rate(t, step);
        euclidean_norm(norm.data, gradients.data, gradients.size);
        adamw(model.parameters.data, state.m.data, state.v.data, gradients.data, model.takes_part.data,
              {row.lr, t.beta1, t.beta2, t.eps, t.weight_decay, 1, norm.data, t.grad_clip}, step,
              model.parameters.size);
        add_loss(row);
        copy_to_host(&row.grad_norm, norm.data, sizeof(row.grad_norm));
        if (!std::isfinite(row.grad_norm))
            diverged(step, fmt::format("the gradient norm is {}", std::fabs(row.grad_norm)), acts, &gradients);
        state.step = step;
        device_wait();
        const double elapsed = seconds_since(start);
        seconds += elapsed;
        window_seconds += elapsed;
        window_steps++;

        const auto after = std::chrono::steady_clock::now();
        const bool last = step == t.steps, evaluates = t.eval_every > 0 && (step % t.eval_every == 0 || last);
        if (evaluates) {
            const std::vector<double> losses =
                held_out_losses(model, eval_acts, config, parts.eval, t.eval_batches, false,
                                [&](int64_t n) -> TorchGenerator& { return indexed_generator(kHeldOutWindows, n); });
            row.heldout_loss = mean(losses);
            if (!std::isfinite(*row.heldout_loss))
                diverged(step, fmt::format("the held-out loss after its update is {}", std::fabs(*row.heldout_loss)),
                         eval_acts, nullptr);
        }
        const double done = static_cast<double>(step - first_step);
        const double left = (seconds + other_seconds) / done * static_cast<double>(t.steps - step);
        if (step % t.log_every == 0 || step == 1 || last || evaluates) {
            row.tokens_per_second = step_tokens * static_cast<double>(window_steps) / window_seconds;
            row.percent_of_peak = 100 * step_flops * static_cast<double>(window_steps) / window_seconds / peak;
            row.seconds = seconds_before + seconds;
            clear_progress(progress);
            print_row(row, config, left);
            append_log(folder, row);
            window_seconds = 0;
            window_steps = 0;
        }
        if (last || caught_signal != 0 || (t.save_every > 0 && step % t.save_every == 0)) {
            if (!std::isfinite(moments(model.parameters.data, model.parameters.size).sum_of_squares))
                diverged(step, "the update made a parameter NaN or infinite", acts, nullptr);
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
    fmt::print("done: {} steps, {:.0f} tokens/s; checkpoint {}\n", state.step - first_step,
               seconds > 0 ? step_tokens * static_cast<double>(state.step - first_step) / seconds : 0.0,
               checkpoint_file(folder).string());
    return kExitGood;
}

int run(int argc, char** argv) {
    Config defaults;
    CLI::App app{"Trains a language model on a token stream."};
    std::string config_file, out;
    std::vector<std::string> overrides;
    bool resume = false;
    app.add_option("CONFIG", config_file, "YAML file; with --resume the run folder's own if not given");
    app.add_option("--set", overrides,
                   "KEY=VALUE over the file's value; repeatable. A VALUE {...} replaces the whole section KEY")
        ->allow_extra_args(false);
    app.add_option("--out", out, "run folder (default: runs/NAME-POSITION, NAME from the name of CONFIG)");
    app.add_flag("--resume", resume, "continue the run in the run folder as if it had never stopped");
    app.footer("Keys:\n" + help_text(config_keys(defaults)));
    if (!parse_command_line(app, argc, argv)) return kExitGood;

    if (config_file.empty()) {
        if (!resume || out.empty())
            fail_usage("no CONFIG given (wanted a YAML file, or --resume with --out; see --help)");
        if (!std::filesystem::exists(config_path(out))) fail_usage("{}: nothing to resume: no config.yaml there", out);
        config_file = config_path(out);
    }
    std::vector<Setting> settings = read_settings(config_file);
    add_overrides(settings, overrides);
    const Config config = make_config(settings);
    if (out.empty())
        out = std::filesystem::path("runs") /
              fmt::format("{}-{}", std::filesystem::path(config_file).stem().string(), model_shape(config).position);
    if (resume && !holds_a_run(out) && !std::filesystem::exists(config_path(out)))
        fail_usage("{}: nothing to resume: no run there", out);
    if (!resume && holds_a_run(out))
        fail_usage("{}: holds a run already; continue it with --resume, or give another folder with --out", out);
    return train(config, settings, out, resume);
}

}  // namespace
}  // namespace jetlag

int main(int argc, char** argv) {
    return jetlag::run_main("train_lm", [&] { return jetlag::run(argc, argv); });
}
