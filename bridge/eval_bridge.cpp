// eval_bridge: evaluates students of the bridge at several lengths, side by side.
#include <cstdio>

#include "bridge/training.h"
#include "src/command_line.h"
#include "src/error.h"
#include "src/files.h"
#include "src/progress.h"
#include "train/run_folder.h"

namespace jetlag {
namespace {

// The stream of make_indexed_generator for these batches; those of a length are the same for every student.
constexpr uint64_t kEvalStream = 17;

int run(int argc, char** argv) {
    CLI::App app{"Evaluates students of the bridge at several lengths, on the same fresh queries, side by side."};
    BridgeConfig defaults;
    std::vector<std::string> students, overrides;
    std::string contexts, batches, seed = "0", csv, json;
    app.add_option("RUN_OR_CHECKPOINT", students, "run folders of train_bridge, or their checkpoints")->required();
    app.add_option("--contexts", contexts, "lengths, as 96,384 (default: eval.contexts of each)")
        ->allow_extra_args(false);
    app.add_option("--batches", batches, "batches at each length (default: eval.batches)")->allow_extra_args(false);
    app.add_option("--seed", seed, "seed of the queries (default: 0)")->allow_extra_args(false);
    app.add_option("--csv", csv, "write a CSV file with the study's column names");
    app.add_option("--json", json, "write a JSON file");
    app.add_option("--set", overrides,
                   "KEY=VALUE over the student's configuration; repeatable: another teacher.target, say")
        ->allow_extra_args(false);
    app.footer("Keys:\n" + help_text(bridge_keys(defaults, false)));
    if (!parse_command_line(app, argc, argv)) return kExitGood;
    if (!contexts.empty()) overrides.push_back("eval.contexts=" + contexts);
    if (!batches.empty()) overrides.push_back("eval.batches=" + batches);
    const uint64_t number = static_cast<uint64_t>(parse_whole("--seed", seed, 0, 4294967295));
    std::vector<std::string> taken = students;
    for (const auto& [option, path] : {std::pair("--csv", csv), std::pair("--json", json)}) {
        if (!path.empty()) check_output_not_taken(option, path, taken);
        taken.push_back(path);
    }
    // Everything is read and checked before the first batch.
    std::vector<Student> loaded;
    for (const std::string& path : students) loaded.push_back(load_student(path, overrides));
    Progress progress = make_progress();
    std::vector<StudentReport> reports;
    for (size_t i = 0; i < loaded.size(); i++) {
        StudentReport report;
        report.name = students[i];
        report.config = loaded[i].config;
        report.lag_bias = lag_bias_summary(loaded[i].model);
        for (const int64_t T : loaded[i].config.eval.contexts) {
            draw_progress(progress, fmt::format("{} at {}", students[i], T),
                          static_cast<double>(i) / static_cast<double>(loaded.size()), "");
            TorchGenerator generator = make_indexed_generator(number, kEvalStream, static_cast<uint64_t>(T));
            report.evaluations.push_back(
                evaluate_student(loaded[i].model, loaded[i].config, T, loaded[i].config.eval.batches, generator));
        }
        reports.push_back(report);
    }
    clear_progress(progress);
    fmt::print("{}", bridge_table(reports));
    if (!csv.empty()) write_file_atomically(csv, bridge_csv(reports));
    if (!json.empty()) {
        std::string list;
        for (const StudentReport& report : reports) list += (list.empty() ? "" : ",\n") + bridge_report_json(report);
        write_file_atomically(json, "[\n" + list + "]\n");
    }
    return kExitGood;
}

}  // namespace
}  // namespace jetlag

int main(int argc, char** argv) {
    return jetlag::run_main("eval_bridge", [&] { return jetlag::run(argc, argv); });
}
