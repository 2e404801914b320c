#include "bridge/training.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "models/checkpoint.h"
#include "src/error.h"
#include "src/files.h"
#include "src/interrupt.h"
#include "train/loop.h"

namespace jetlag {

// The stream of make_indexed_generator for evaluations between steps, which draw nothing from the run's own generator.
static constexpr uint64_t kBetweenStepsStream = 16;

static RunIdentity run_identity(const BridgeConfig& config) {
    RunIdentity identity;
    identity.config = bridge_json(config);
    identity.steps = config.train.steps;
    identity.resolve = [](const std::string& json, const std::string& file) {
        return bridge_json(make_bridge_config(settings_from_json(json, file), false));
    };
    identity.may_change = [train = config.train](const std::string& key) {
        // The initial evaluation draws from the generator of the run.
        return key != "train.initial_eval_batches" && (key.starts_with("eval.") || is_free_training_key(key, train));
    };
    return identity;
}

static void print_setup(const BridgeConfig& config, const Model& model, const std::filesystem::path& folder,
                        double peak) {
    const ModelShape& s = model.shape;
    const TeacherSettings& teacher = config.teacher;
    fmt::print("run folder   {}\n", folder.string());
    fmt::print("teacher      {} {}{}, {} cycles per {} tokens, threshold {}\n", teacher.kind, teacher.target,
               teacher.kind == "attention" ? fmt::format(", lambda {}", teacher.attention_lambda) : "",
               teacher.omega_cycles, config.train.context, teacher.median_threshold ? "median" : "0");
    fmt::print("model        sector {}, {} layers, C {}, H {}, D {}, {} parameters{}\n", s.position, s.layers,
               s.embed_dim, s.heads, s.head_dim, model.parameters.size, s.freeze_qk ? ", queries and keys frozen" : "");
    fmt::print("training     {} steps of {} sequences of {} tokens ({}), AdamW lr {} ({}), seed {}\n",
               config.train.steps, config.train.batch, fmt::join(training_lengths(config), ", "),
               config.length_sampling, config.train.lr, config.train.schedule, config.train.seed);
    fmt::print("{}", machine_text(peak));
    std::fflush(stdout);
}

// Every length of training has memory of its own: a GPU keeps the passes of one length as one graph.
struct LengthMemory {
    int64_t T;
    Activations acts;
};

StudentReport train_student(const BridgeConfig& config, const std::filesystem::path& folder, bool resume) {
    const TrainSettings& t = config.train;
    const int64_t B = t.batch, L = t.context;
    Model model = make_model(bridge_shape(config));
    TrainingState state;
    state.generator = make_generator(static_cast<uint64_t>(t.seed));
    state.m = DeviceArray<float>(model.parameters.size);
    state.v = DeviceArray<float>(model.parameters.size);
    initialize_model(model, state.generator);
    const std::vector<int64_t> lengths = training_lengths(config);
    std::vector<LengthMemory> memory;
    for (const int64_t T : lengths)
        if (std::none_of(memory.begin(), memory.end(), [T](const LengthMemory& m) { return m.T == T; }))
            memory.push_back({T, make_activations(model.shape, B, T, Mode::training, false)});
    const RunIdentity identity = run_identity(config);

    make_folder(folder);
    const FolderLock lock = lock_folder(folder, false);
    const bool has_state =
        resume && (std::filesystem::exists(state_path(folder)) || std::filesystem::exists(checkpoint_file(folder)));
    StudentReport report;
    report.name = folder.string();
    report.config = config;
    const std::filesystem::path initial_path = initial_eval_path(folder);
    const auto evaluate_initially = [&] {
        if (t.initial_eval_batches > 0)
            report.initial = evaluate_student(model, config, L, t.initial_eval_batches, state.generator);
    };
    if (has_state) {
        if (std::filesystem::exists(initial_path))
            report.initial = parse_bridge_report(read_file(initial_path), initial_path.string()).initial;
        else
            evaluate_initially();  // as it was: the model is still the one of the seed
        load_run(folder, model, state, identity);
    }
    const double peak = measure_peak_flops();
    print_setup(config, model, folder, peak);
    write_file_atomically(config_path(folder), bridge_yaml(config));
    catch_signals();

    double seconds_before = 0;  // of training, of the processes before this one
    if (has_state) {
        seconds_before = truncate_logs(folder, state.step);
        save_run(folder, model, state, identity);  // the kill may have come before the checkpoint's turn
        fmt::print("resuming after step {}\n", state.step);
    } else {
        if (resume) fmt::print("no state in {} yet: starting from the beginning\n", folder.string());
        start_logs(folder);
        evaluate_initially();
        if (t.initial_eval_batches > 0)
            fmt::print("initial loss {:.4f}, accuracy {:.4f} over {} batches of length {}\n", report.initial.loss,
                       report.initial.accuracy, t.initial_eval_batches, L);
        if (caught_signal != 0)
            fail("interrupted by {} before the first step; nothing to save", strsignal(caught_signal));
    }
    write_file_atomically(initial_path, bridge_report_json(report));

    // What a step's batch is in, and of what length.
    LengthMemory* at = nullptr;
    const auto mean_over_lengths = [&](const auto& of) {
        double sum = 0;
        for (const int64_t T : lengths) sum += of(T);
        return sum / static_cast<double>(lengths.size());
    };
    TrainingTask task;
    task.start_batch = [&](int64_t step, DeviceArray<float>& gradients, const auto&) {
        size_t index = static_cast<size_t>(step - 1) % lengths.size();
        if (config.length_sampling == "random" && lengths.size() > 1) {
            std::vector<int64_t> drawn(1);
            fill_randint(state.generator, 0, std::ssize(lengths), drawn);
            index = static_cast<size_t>(drawn[0]);
        }
        at = &*std::find_if(memory.begin(), memory.end(), [&](const LengthMemory& m) { return m.T == lengths[index]; });
        const QueryBatch batch = draw_queries(state.generator, config.teacher, L, B, at->T);
        start_train_batch(model, at->acts, gradients, batch.tokens, batch.labels, B, at->T, 1);
    };
    task.finish_batch = [&] { return std::pair(finish_train_batch(at->acts, B, at->T), 1.0); };
    task.batch_memory = [&] { return BatchMemory{&at->acts, B, at->T}; };
    task.tokens = [&](int64_t) { return mean_over_lengths([&](int64_t T) { return static_cast<double>(B * T); }); };
    task.flops = [&](int64_t) {
        return mean_over_lengths([&](int64_t T) { return training_flops(model.shape, B, T); });
    };
    task.held_out_loss = [&] {
        TorchGenerator generator = make_indexed_generator(static_cast<uint64_t>(t.seed), kBetweenStepsStream, 0);
        return evaluate_student(model, config, L, t.eval_batches, generator).loss;
    };
    const LoopResult result =
        run_training_loop(t, model, state, folder, identity, task, has_state, seconds_before, peak);
    fmt::print("done: {} steps, {:.0f} tokens/s; checkpoint {}\n", result.steps,
               result.seconds > 0 ? result.tokens / result.seconds : 0.0, checkpoint_file(folder).string());
    std::fflush(stdout);

    // The state that was saved is the one before these draws, so that a run with more steps goes on as if there were
    // none.
    TorchGenerator generator = state.generator;
    report.lag_bias = lag_bias_summary(model);
    for (const int64_t T : config.eval.contexts) {
        if (caught_signal != 0)
            fail("interrupted by {} during the evaluation; trained and saved in {}; evaluate with --resume",
                 strsignal(caught_signal), state_path(folder).string());
        report.evaluations.push_back(evaluate_student(model, config, T, config.eval.batches, generator));
    }
    write_file_atomically(evaluation_csv_path(folder), bridge_csv({report}));
    write_file_atomically(evaluation_path(folder), bridge_report_json(report));
    fmt::print("{}", bridge_table({report}));
    return report;
}

// What decides which student a checkpoint holds.
static std::string student_json(const BridgeConfig& config) {
    BridgeConfig student;
    student.model = config.model;
    student.train.context = config.train.context;
    return bridge_json(student);
}

Student load_student(const std::filesystem::path& given, const std::vector<std::string>& overrides) {
    const std::filesystem::path path = std::filesystem::is_directory(given) ? checkpoint_file(given) : given;
    const std::string name = path.string();
    if (!std::filesystem::exists(path))
        fail_usage("{}: {} (wanted a run folder, or a safetensors file)", given.string(),
                   path == given ? "no such file or folder" : "a folder without checkpoint.safetensors");
    const SafetensorsFile file = read_safetensors(path);
    const auto found = file.metadata.find(kMetadataConfig);
    if (found == file.metadata.end()) fail("{}: no jetlag checkpoint: no {} in its metadata", name, kMetadataConfig);
    std::vector<Setting> settings;
    Student student;
    try {
        settings = settings_from_json(found->second, name);
        student.config = make_bridge_config(settings, false);
    } catch (const Error& e) {
        fail("{}: not a student of the bridge: {}", name, e.what());
    }
    const std::string trained = student_json(student.config);
    add_overrides(settings, overrides);
    student.config = make_bridge_config(settings, false);
    if (student_json(student.config) != trained)
        fail_usage(
            "{}: with these --set it would be another student than the one that was trained: its section model and "
            "train.context stay as they are",
            name);
    student.model = make_model(bridge_shape(student.config));
    read_parameter_tensors(student.model, student.model.parameters.data, file, "", name);
    return student;
}

}  // namespace jetlag
