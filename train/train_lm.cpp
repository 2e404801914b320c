// train_lm: trains a language model on a token stream.
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>

#include "models/checkpoint.h"
#include "models/config.h"
#include "models/model.h"
#include "models/windows.h"
#include "src/error.h"
#include "src/files.h"
#include "src/interrupt.h"
#include "src/token_stream.h"
#include "train/command.h"
#include "train/loop.h"
#include "train/run_folder.h"

namespace jetlag {
namespace {

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
    fmt::print("{}", machine_text(peak));
    fmt::print(
        "memory       parameters {}, gradients {}, AdamW {}, activations {}, tables {}, workspace {}, held-out {}\n",
        mebibytes(n), mebibytes(n), mebibytes(2 * n), mebibytes(sizes.activation_floats), mebibytes(sizes.table_floats),
        mebibytes(sizes.workspace_floats),
        mebibytes(held_out.activation_floats + held_out.table_floats + held_out.workspace_floats));
    std::fflush(stdout);
}

RunIdentity run_identity(const Config& config, const std::string& corpus_sha256) {
    RunIdentity identity;
    identity.config = config_json(config);
    identity.corpus = config.data.corpus;
    identity.corpus_sha256 = corpus_sha256;
    identity.steps = config.train.steps;
    identity.resolve = [](const std::string& json, const std::string& file) {
        return config_json(make_config(settings_from_json(json, file)));
    };
    identity.may_change = [train = config.train](const std::string& key) {
        return key == "data.corpus" || key.starts_with("eval.") || is_free_training_key(key, train);
    };
    return identity;
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
    const RunIdentity identity = run_identity(config, corpus.sha256);

    make_folder(folder);
    const FolderLock lock = lock_folder(folder, false);
    const bool has_state =
        resume && (std::filesystem::exists(state_path(folder)) || std::filesystem::exists(checkpoint_file(folder)));
    if (has_state) load_run(folder, model, state, identity);
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
        save_run(folder, model, state, identity);  // the kill may have come before the checkpoint's turn
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

    TrainingTask task;
    task.start_batch = [&](int64_t step, DeviceArray<float>& gradients, const auto& add_loss) {
        TorchGenerator& generator = t.data_seed ? indexed_generator(kTrainWindows, step - 1) : state.generator;
        const std::vector<int64_t> starts =
            draw_windows(generator, static_cast<int64_t>(parts.train.size()), T, t.batch);
        const double share = 1 / static_cast<double>(t.accumulate);
        for (int64_t pass = 0; pass < t.accumulate; pass++) {
            const Batch batch = make_batch(
                parts.train, std::span(starts).subspan(static_cast<size_t>(pass * B), static_cast<size_t>(B)), T);
            start_train_batch(model, acts, gradients, batch.tokens, batch.targets, B, T, share);
            if (pass + 1 < t.accumulate) add_loss(finish_train_batch(acts, B, T), share);
        }
    };
    task.finish_batch = [&] {
        return std::pair(finish_train_batch(acts, B, T), 1 / static_cast<double>(t.accumulate));
    };
    task.batch_memory = [&] { return BatchMemory{&acts, B, T}; };
    task.tokens = [&](int64_t) { return static_cast<double>(t.batch * T); };
    task.flops = [&](int64_t) { return training_flops(model.shape, t.batch, T); };
    task.held_out_loss = [&] {
        return mean(
            held_out_losses(model, eval_acts, config, parts.eval, t.eval_batches, false,
                            [&](int64_t n) -> TorchGenerator& { return indexed_generator(kHeldOutWindows, n); }));
    };
    task.held_out_memory = {&eval_acts, B, T};
    const LoopResult result =
        run_training_loop(t, model, state, folder, identity, task, has_state, seconds_before, peak);
    fmt::print("done: {} steps, {:.0f} tokens/s; checkpoint {}\n", result.steps,
               result.seconds > 0 ? result.tokens / result.seconds : 0.0, checkpoint_file(folder).string());
    return kExitGood;
}

int run(int argc, char** argv) {
    Config defaults;
    TrainingCommand command;
    if (!read_training_command(command, "Trains a language model on a token stream.", config_keys(defaults), argc,
                               argv))
        return kExitGood;
    const Config config = make_config(command.settings);
    return train(config, command.settings, checked_run_folder(command, model_shape(config).position), command.resume);
}

}  // namespace
}  // namespace jetlag

int main(int argc, char** argv) {
    return jetlag::run_main("train_lm", [&] { return jetlag::run(argc, argv); });
}
