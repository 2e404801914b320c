// train_retrieval: the trained retrieval probe (docs/bridge.md).
#include <algorithm>

#include "bridge/retrieval.h"
#include "src/command_line.h"
#include "src/error.h"
#include "src/interrupt.h"

namespace jetlag {
namespace {

int run(int argc, char** argv) {
    CLI::App app{"Trains a reader of lag features at one length and asks it for values at far lags."};
    ProbeSettings settings = probe_defaults();
    std::string out, variants, precisions, train_len, contexts, steps, seed;
    bool force = false;
    app.add_option("--out", out, "folder of trained_retrieval.csv, .json and .svg")->required();
    app.add_flag("--force", force, "replace what the folder has of it");
    app.add_option("--variants", variants, "as lab's (default: raw,scaled,lc_phase_only,lc,lc_wrong_scale)");
    app.add_option("--precisions", precisions, "of the features: fp32, int8, int4 (default: all)");
    app.add_option("--train-len", train_len, "training length L (default: 1024)");
    app.add_option("--contexts", contexts, "lengths of evaluation (default: 4096,8192,16384,32768)");
    app.add_option("--steps", steps, "optimizer steps (default: 360)");
    app.add_option("--seed", seed, "seed (default: 0)");
    if (!parse_command_line(app, argc, argv)) return kExitGood;
    const int64_t longest = 1 << 20;
    if (!variants.empty()) settings.lags.variants = split_list(variants);
    check_once("--variants", settings.lags.variants);
    for (const std::string& name : settings.lags.variants) find_variant("--variants", name);
    if (!precisions.empty()) settings.precisions = split_list(precisions);
    check_once("--precisions", settings.precisions);
    for (const std::string& precision : settings.precisions) precision_bits(precision);
    if (!train_len.empty()) settings.lags.train_len = parse_whole("--train-len", train_len, 8, longest);
    if (!contexts.empty()) {
        settings.lags.contexts.clear();
        for (const std::string& text : split_list(contexts))
            settings.lags.contexts.push_back(parse_whole("--contexts", text, 8, longest));
        check_once("--contexts", settings.lags.contexts);
    }
    if (!steps.empty()) settings.steps = parse_whole("--steps", steps, 1, 1000000);
    if (!seed.empty()) settings.seed = static_cast<uint64_t>(parse_whole("--seed", seed, 0, 4294967295));
    check_lab_folder(out, {"trained_retrieval"}, force);
    catch_signals();
    const LabResult result = run_retrieval_probe(settings);
    write_result(out, result);
    fmt::print("{}", result_text(result));
    return kExitGood;
}

}  // namespace
}  // namespace jetlag

int main(int argc, char** argv) {
    return jetlag::run_main("train_retrieval", [&] { return jetlag::run(argc, argv); });
}
