// eval_lm: evaluates checkpoints at several context lengths, side by side.
#include <algorithm>
#include <chrono>
#include <cstdio>

#include "eval/evaluate.h"
#include "eval/report.h"
#include "models/checkpoint.h"
#include "models/windows.h"
#include "src/command_line.h"
#include "src/error.h"
#include "src/files.h"
#include "src/gnuplot.h"
#include "src/progress.h"
#include "src/token_stream.h"
#include "train/run_folder.h"

namespace jetlag {
namespace {

// "all" is 0, "last:256" is 256.
int64_t parse_targets(const std::string& text) {
    if (text == "all") return 0;
    const std::string digits = text.starts_with("last:") ? text.substr(5) : "";
    if (digits.empty() || digits.size() > 9 || digits.find_first_not_of("0123456789") != std::string::npos ||
        std::stoll(digits) == 0)
        fail_usage("--targets {}: wanted all, or last:N with N at least 1", text);
    return std::stoll(digits);
}

int run(int argc, char** argv) {
    CLI::App app{"Evaluates checkpoints at several context lengths, side by side."};
    Config defaults;
    std::vector<std::string> checkpoints, overrides;
    std::string contexts, windows = "random", targets = "all", csv, json, by_position, plot;
    std::string batches, batch, seed;
    bool stats = false;
    app.add_option("RUN_OR_CHECKPOINT", checkpoints, "run folders or safetensors files")->required();
    app.add_option("--contexts", contexts, "context lengths, as 1024,8192 (default: eval.contexts of each checkpoint)")
        ->allow_extra_args(false);
    app.add_option("--batches", batches, "batches at each length (default: eval.batches)")->allow_extra_args(false);
    app.add_option("--batch", batch, "windows per batch (default: eval.batch)")->allow_extra_args(false);
    app.add_option("--seed", seed, "seed of the windows (default: eval.seed)")->allow_extra_args(false);
    app.add_option("--windows", windows,
                   "random, or sequential: the whole held-out part in disjoint windows (default: random)");
    app.add_option("--targets", targets,
                   "all, or last:N: score the same last N tokens under each length (default: all)");
    app.add_flag("--attention-stats", stats,
                 "entropy, effective support and mean lag of the last block's attention rows");
    app.add_option("--csv", csv, "write a CSV file with the study's column names");
    app.add_option("--json", json, "write a JSON file");
    app.add_option("--loss-by-position", by_position, "write a CSV file of mean loss per bucket of positions");
    app.add_option("--plot", plot, "draw loss against context length, as SVG");
    app.add_option(
           "--set", overrides,
           "KEY=VALUE over the checkpoint's configuration; repeatable. A VALUE {...} replaces the whole section KEY")
        ->allow_extra_args(false);
    app.footer("Keys:\n" + help_text(config_keys(defaults)));
    if (!parse_command_line(app, argc, argv)) return kExitGood;
    // The options are the keys of the section eval by shorter names, with the same checks.
    if (!contexts.empty()) overrides.push_back("eval.contexts=" + contexts);
    if (!batches.empty()) overrides.push_back("eval.batches=" + batches);
    if (!batch.empty()) overrides.push_back("eval.batch=" + batch);
    if (!seed.empty()) overrides.push_back("eval.seed=" + seed);
    if (windows != "random" && windows != "sequential")
        fail_usage("--windows {}: wanted random or sequential", windows);
    const int64_t last_targets = parse_targets(targets);
    std::vector<std::string> taken = checkpoints;
    for (const auto& [option, path] : {std::pair("--csv", csv), std::pair("--json", json),
                                       std::pair("--loss-by-position", by_position), std::pair("--plot", plot)}) {
        if (!path.empty()) check_output_not_taken(option, path, taken);
        taken.push_back(path);
    }
    if (!plot.empty()) check_gnuplot(plot);

    // Everything is read and checked before the first batch.
    std::vector<Checkpoint> loaded;
    std::vector<TokenStream> corpora;
    for (const std::string& path : checkpoints) {
        Checkpoint checkpoint = load_checkpoint(path, overrides);
        const std::string& corpus = checkpoint.config.data.corpus;
        if (corpus.empty()) fail_usage("{}: data.corpus: not given (give --set data.corpus=PATH)", path);
        const std::string where = where_set(checkpoint.settings, "data.corpus");
        corpora.push_back(open_corpus(where, corpus));
        const bool is_overridden = where.starts_with("--set");
        if (!checkpoint.corpus_sha256.empty() && checkpoint.corpus_sha256 != corpora.back().sha256) {
            if (!is_overridden)
                fail(
                    "{}: was trained on a corpus with SHA-256 {}, but {} has {} now (to evaluate on another corpus, "
                    "give --set data.corpus=PATH)",
                    path, checkpoint.corpus_sha256, corpus, corpora.back().sha256);
            print_note("eval_lm: note: {} was trained on another corpus than {}\n", path, corpus);
        }
        loaded.push_back(std::move(checkpoint));
    }
    const EvalSettings& first = loaded[0].config.eval;
    for (const Checkpoint& checkpoint : loaded)
        if (const EvalSettings& e = checkpoint.config.eval; e.contexts != first.contexts ||
                                                            e.batches != first.batches || e.batch != first.batch ||
                                                            e.seed != first.seed)
            fail_usage("{} and {} have different eval settings: give --contexts, --batches, --batch and --seed",
                       loaded[0].path.string(), checkpoint.path.string());
    Protocol protocol;
    protocol.contexts = first.contexts;
    protocol.batches = first.batches;
    protocol.batch = first.batch;
    protocol.seed = static_cast<uint64_t>(first.seed);
    protocol.windows = windows == "random" ? Windows::random : Windows::sequential;
    protocol.last_targets = last_targets;
    protocol.attention_stats = stats;
    for (size_t i = 0; i < loaded.size(); i++) protocol.longest = longest_length(loaded[i], corpora[i], protocol);
    for (size_t i = 0; i < loaded.size(); i++) check_protocol(loaded[i], corpora[i], protocol);

    Progress progress = make_progress();
    const auto start = std::chrono::steady_clock::now();
    std::vector<double> work_up_to = {0};  // and including the checkpoints before
    for (size_t i = 0; i < loaded.size(); i++)
        work_up_to.push_back(work_up_to.back() + evaluation_work(loaded[i], corpora[i], protocol));
    std::vector<Evaluation> list;
    const auto write_reports = [&]() {
        fmt::print("{}", evaluation_table(list, protocol));
        if (!csv.empty()) write_file_atomically(csv, evaluation_csv(list, protocol));
        if (!json.empty()) write_file_atomically(json, evaluation_json(list, protocol));
        if (!by_position.empty()) write_file_atomically(by_position, loss_by_position_csv(list, protocol));
        if (!plot.empty()) draw_plot(plot, list, protocol);
    };
    for (size_t i = 0; i < loaded.size(); i++) {
        int64_t announced = 0;
        const auto report = [&](int64_t context, double work) {
            const double share = (work_up_to[i] + work) / work_up_to.back();
            const double elapsed = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
            const std::string left = share > 0 ? duration_text(elapsed / share - elapsed) : "?";
            draw_progress(progress, fmt::format("{} at {}", checkpoints[i], context), share, "left " + left);
            if (!progress.is_terminal && context != announced) {
                print_note("evaluating {} at {}, {:.0f}% done, left {}\n", checkpoints[i], context, 100 * share, left);
                std::fflush(stderr);
            }
            announced = context;
        };
        try {
            for (Evaluation& e : evaluate_checkpoint(loaded[i], corpora[i], protocol, report))
                list.push_back(std::move(e));
        } catch (const Error&) {
            // What the checkpoints before this one gave is not lost.
            clear_progress(progress);
            if (!list.empty()) write_reports();
            throw;
        }
    }
    clear_progress(progress);
    write_reports();
    return kExitGood;
}

}  // namespace
}  // namespace jetlag

int main(int argc, char** argv) {
    return jetlag::run_main("eval_lm", [&] { return jetlag::run(argc, argv); });
}
