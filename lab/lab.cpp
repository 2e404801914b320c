// lab: the kernel laboratory. Which functions of the lag a basis contains, whether a learner finds the right sector,
// and what high orders do to norms, caches and retrieval at far lags.
#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <functional>

#include "lab/adaptive.h"
#include "lab/fixed.h"
#include "lab/lags.h"
#include "lab/output.h"
#include "src/command_line.h"
#include "src/error.h"
#include "src/files.h"
#include "src/progress.h"

namespace jetlag {
namespace {

constexpr int64_t kLongest = 1 << 20;  // of L and T

// The options of one subcommand as texts; empty: the default.
struct Options {
    std::string out;
    bool force = false;
    std::string train_len, contexts, cycles, damping, max_order, targets, bases, variants;
    std::string seeds, steps, lr, restarts, select, start, solver, betas, favour, gates, amplitude, raw_damping, slope;
    std::string seed, cache_dim, precisions, queries;
};

void read_names(const std::string& option, const std::string& text, std::vector<std::string>& names) {
    if (text.empty()) return;
    names = split_list(text);
    check_once(option, names);
}

void read_number(const std::string& option, const std::string& text, int64_t min, int64_t max, int64_t& number) {
    if (!text.empty()) number = parse_whole(option, text, min, max);
}
void read_number(const std::string& option, const std::string& text, int64_t min, int64_t max, int& number) {
    if (!text.empty()) number = static_cast<int>(parse_whole(option, text, min, max));
}

uint64_t read_seed(const std::string& option, const std::string& text) {
    uint64_t seed = 0;
    const char* end = text.data() + text.size();
    const auto [rest, error] = std::from_chars(text.data(), end, seed);
    if (error != std::errc() || rest != end)
        fail_usage("{}: found {}, wanted a whole number from 0 to 2^64-1", option, text);
    return seed;
}

double read_cycles(const std::string& text) {
    return parse_real(
        "--cycles", text, [](double x) { return x >= 0 && x <= 1e6; }, "numbers from 0 to 1e6");
}

void read_contexts(const std::string& text, int64_t min, std::vector<int64_t>& contexts) {
    if (!text.empty()) {
        contexts.clear();
        for (const std::string& part : split_list(text))
            contexts.push_back(parse_whole("--contexts", part, min, kLongest));
        check_once("--contexts", contexts);
    }
    std::sort(contexts.begin(), contexts.end());
}

void read_damping(const std::string& text, double& damping) {
    if (!text.empty())
        damping = parse_real(
            "--damping", text, [](double x) { return x >= 0 && x <= 100; }, "a number from 0 to 100");
}

void read_all_cycles(const std::string& text, std::vector<double>& cycles) {
    if (text.empty()) return;
    cycles.clear();
    for (const std::string& part : split_list(text)) cycles.push_back(read_cycles(part));
    check_once("--cycles", cycles);
}

FixedSettings read_fixed(const Options& o, FixedSettings s, const std::vector<LagTarget>& known) {
    read_number("--train-len", o.train_len, 2, kLongest, s.train_len);
    read_contexts(o.contexts, 1, s.contexts);
    read_all_cycles(o.cycles, s.cycles);
    read_damping(o.damping, s.damping);
    read_names("--targets", o.targets, s.targets);
    read_names("--bases", o.bases, s.bases);
    for (const std::string& name : s.targets) find_target("--targets", known, name);
    for (const std::string& name : s.bases) parse_basis("--bases", name);
    return s;
}

double read_finite(const std::string& option, const std::string& text) {
    return parse_real(
        option, text, [](double x) { return std::fabs(x) <= 100; }, "a number from -100 to 100");
}

void read_finite(const std::string& option, const std::string& text, double& number) {
    if (!text.empty()) number = read_finite(option, text);
}

// How Adam starts and goes.
void read_adam(const Options& o, AdaptiveSettings& s) {
    if (!o.seeds.empty()) {
        s.seeds.clear();
        for (const std::string& part : split_list(o.seeds)) s.seeds.push_back(read_seed("--seeds", part));
        check_once("--seeds", s.seeds);
    }
    read_number("--steps", o.steps, 0, 10'000'000, s.steps);
    if (!o.lr.empty())
        s.lr = parse_real(
            "--lr", o.lr, [](double x) { return x > 0 && x <= 10; }, "a number above 0, at most 10");
    if (!o.betas.empty()) {
        const std::vector<std::string> parts = split_list(o.betas);
        if (parts.size() != 2) fail_usage("--betas: found {}, wanted two numbers, as 0.9,0.999", o.betas);
        for (size_t i = 0; i < 2; i++)
            (i == 0 ? s.beta1 : s.beta2) = parse_real(
                "--betas", parts[i], [](double x) { return x >= 0 && x < 1; }, "numbers from 0 to below 1");
    }
    read_number("--restarts", o.restarts, 1, 1000, s.restarts);
    if (!o.select.empty()) {
        if (o.select != "train" && o.select != "eval") fail_usage("--select {}: wanted train or eval", o.select);
        s.select_by_train = o.select == "train";
    }
    if (!o.start.empty()) {
        if (o.start != "favoured" && o.start != "even") fail_usage("--start {}: wanted favoured or even", o.start);
        s.favour_orders = o.start == "favoured";
    }
    if (!s.favour_orders && !o.favour.empty()) fail_usage("--favour: with --start even no order is favoured");
    read_finite("--favour", o.favour, s.favour);
    if (!o.gates.empty()) {
        const std::vector<std::string> parts = split_list(o.gates);
        if (parts.size() != kPjSectorCount)
            fail_usage("--gates: found {}, wanted three logits (FJ, affine, LC), as 0,-0.2,-0.2", o.gates);
        for (size_t i = 0; i < parts.size(); i++) s.start_gates[i] = read_finite("--gates", parts[i]);
    }
    if (!o.amplitude.empty())
        s.start_amplitude = parse_real(
            "--amplitude", o.amplitude, [](double x) { return x >= 0 && x <= 100; }, "a number from 0 to 100");
    read_finite("--raw-damping", o.raw_damping, s.start_damping);
    read_finite("--slope", o.slope, s.start_slope);
}

AdaptiveSettings read_adaptive(const Options& o) {
    AdaptiveSettings s = adaptive_defaults();
    read_names("--targets", o.targets, s.targets);
    for (const std::string& name : s.targets) find_target("--targets", lag_targets(), name);
    read_number("--train-len", o.train_len, 2, kLongest, s.train_len);
    read_number("--context", o.contexts, 1, kLongest, s.context);
    if (!o.cycles.empty()) s.cycles = read_cycles(o.cycles);
    read_number("--max-order", o.max_order, 0, kPjMaxOrder, s.max_order);
    if (!o.solver.empty()) {
        if (o.solver != "adam" && o.solver != "varpro") fail_usage("--solver {}: wanted adam or varpro", o.solver);
        s.solver = o.solver == "adam" ? AdaptiveSolver::adam : AdaptiveSolver::varpro;
    }
    if (s.solver == AdaptiveSolver::adam) {
        read_adam(o, s);
        return s;
    }
    const std::pair<const char*, const std::string&> of_adam[] = {{"--seeds", o.seeds},
                                                                  {"--steps", o.steps},
                                                                  {"--lr", o.lr},
                                                                  {"--betas", o.betas},
                                                                  {"--restarts", o.restarts},
                                                                  {"--select", o.select},
                                                                  {"--start", o.start},
                                                                  {"--favour", o.favour},
                                                                  {"--gates", o.gates},
                                                                  {"--amplitude", o.amplitude},
                                                                  {"--raw-damping", o.raw_damping},
                                                                  {"--slope", o.slope}};
    for (const auto& [option, text] : of_adam)
        if (!text.empty()) fail_usage("{}: is an option of Adam, --solver varpro has none of it", option);
    return s;
}

VariantSettings read_variants(const Options& o, VariantSettings s, int64_t min_context) {
    read_names("--variants", o.variants, s.variants);
    for (const std::string& name : s.variants) find_variant("--variants", name);
    read_number("--train-len", o.train_len, 2, kLongest, s.train_len);
    read_contexts(o.contexts, min_context, s.contexts);
    read_all_cycles(o.cycles, s.cycles);
    read_number("--max-order", o.max_order, 0, kPjMaxOrder, s.max_order);
    read_damping(o.damping, s.damping);
    return s;
}

CacheSettings read_cache(const Options& o) {
    CacheSettings s = cache_defaults();
    s.lags = read_variants(o, s.lags, 2);
    read_number("--cache-dim", o.cache_dim, 1, 4096, s.cache_dim);
    if (!o.seed.empty()) s.seed = read_seed("--seed", o.seed);
    return s;
}

RetrievalSettings read_retrieval(const Options& o) {
    RetrievalSettings s = retrieval_defaults();
    s.lags = read_variants(o, s.lags, 3);
    read_names("--precisions", o.precisions, s.precisions);
    for (const std::string& name : s.precisions) precision_bits(name);
    read_number("--queries", o.queries, 1, 65536, s.queries);
    return s;
}

// Computes a result, prints its summaries, and writes its files.
LabResult report(const std::string& folder, const std::function<LabResult()>& compute) {
    const auto start = std::chrono::steady_clock::now();
    LabResult result = compute();
    write_result(folder, result);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    fmt::print("{}\n{}, .json, .svg ({})\n\n", result_text(result),
               (std::filesystem::path(folder) / (result.name + ".csv")).string(), duration_text(seconds));
    std::fflush(stdout);
    return result;
}

void run_all(const Options& o) {
    AdaptiveSettings varpro = adaptive_defaults();
    varpro.solver = AdaptiveSolver::varpro;
    const std::vector<std::pair<std::string, std::function<LabResult()>>> diagnostics = {
        {"fixed", [] { return run_fixed(fixed_defaults()); }},
        {"projection", [] { return run_projection(projection_defaults()); }},
        {"adaptive", [] { return run_adaptive(adaptive_defaults()); }},
        {"adaptive_varpro", [&] { return run_adaptive(varpro); }},
        {"stability", [] { return run_stability(stability_defaults()); }},
        {"cache", [] { return run_cache(cache_defaults()); }},
        {"retrieval", [] { return run_retrieval(retrieval_defaults()); }},
    };
    const std::filesystem::path page = std::filesystem::path(o.out) / "lab.html";
    check_lab_file(page, o.force);
    std::vector<std::string> names;
    for (const auto& diagnostic : diagnostics) names.push_back(diagnostic.first);
    check_lab_folder(o.out, names, o.force);
    std::vector<LabResult> results;
    for (const auto& diagnostic : diagnostics) results.push_back(report(o.out, diagnostic.second));
    write_file_atomically(page, result_page(o.out, results));
    fmt::print("{}\n", page.string());
}

int run(int argc, char** argv) {
    CLI::App app{
        "The kernel laboratory: which functions of the lag a basis contains, whether a learner finds the right sector, "
        "and "
        "what\nhigh orders do to norms, caches and retrieval at far lags. Every subcommand writes a CSV, a JSON and an "
        "SVG "
        "file."};
    app.require_subcommand(0, 1);
    Options o;
    const auto add = [&](CLI::App* sub, const char* option, std::string& text, const std::string& meaning) {
        const auto check = [](const std::string& value) {
            return std::string(value.empty() ? "found an empty text, wanted a value" : "");
        };
        sub->add_option(option, text, meaning)->allow_extra_args(false)->check(check, "");
    };
    const auto subcommand = [&](const char* name, const char* meaning) {
        CLI::App* sub = app.add_subcommand(name, meaning);
        sub->add_option("--out", o.out, "folder to write to")->required();
        sub->add_flag("--force", o.force, "replace the files of an earlier run");
        return sub;
    };
    const auto add_lags = [&](CLI::App* sub, const char* contexts, const char* cycles) {
        add(sub, "--train-len", o.train_len, "training length L (1024)");
        add(sub, "--contexts", o.contexts, contexts);
        add(sub, "--cycles", o.cycles, cycles);
    };
    const auto add_fits = [&](CLI::App* sub) {
        add(sub, "--damping", o.damping, "of the bases scaled_* (0.1)");
        add(sub, "--targets", o.targets, "names (all)");
        add(sub, "--bases", o.bases, "names (those of the study)");
    };
    const auto add_variants = [&](CLI::App* sub) {
        add(sub, "--variants", o.variants, "names (all)");
        add(sub, "--max-order", o.max_order, "highest order R (3)");
        add(sub, "--damping", o.damping, "of the variant scaled (0.1)");
    };

    CLI::App* fixed = subcommand("fixed", "least-squares fits of target kernels by fixed bases");
    add_lags(fixed, "lengths T of the evaluation (1024,2048,4096,8192)", "cycles per L (5,17,61)");
    add_fits(fixed);
    CLI::App* projection = subcommand("projection", "the same for the published kernels (Table 9)");
    add_lags(projection, "lengths T of the evaluation (1024,4096,32768)", "cycles per L (17)");
    add_fits(projection);
    CLI::App* adaptive =
        subcommand("adaptive", "a PJ head with learned gates, fitted to each target (Table 3, Figure 3)");
    add(adaptive, "--targets", o.targets, "names (all)");
    add(adaptive, "--train-len", o.train_len, "training length L (1024)");
    add(adaptive, "--context", o.contexts, "length T of the evaluation (4096)");
    add(adaptive, "--cycles", o.cycles, "cycles per L, fixed (17)");
    add(adaptive, "--max-order", o.max_order, "highest order R (3)");
    add(adaptive, "--solver", o.solver, "adam, or varpro: least squares at each damping (adam)");
    add(adaptive, "--seeds", o.seeds, "Adam: seeds (0,1,2)");
    add(adaptive, "--steps", o.steps, "Adam: steps (1500)");
    add(adaptive, "--lr", o.lr, "Adam: learning rate (0.03)");
    add(adaptive, "--restarts", o.restarts, "Adam: restarts for each seed (4)");
    add(adaptive, "--start", o.start,
        "Adam: order logits at the start: favoured (one order each restart) or even (favoured)");
    add(adaptive, "--favour", o.favour, "Adam: logit of the favoured order; minus this elsewhere (2)");
    add(adaptive, "--gates", o.gates, "Adam: gate logits at the start, FJ, affine, LC (0,-0.2,-0.2)");
    add(adaptive, "--amplitude", o.amplitude, "Adam: standard deviation of the amplitudes at the start (0.05)");
    add(adaptive, "--raw-damping", o.raw_damping, "Adam: damping at the start, before softplus (-2)");
    add(adaptive, "--slope", o.slope, "Adam: affine slope at the start (0)");
    add(adaptive, "--betas", o.betas, "Adam: decay of the moments (0.9,0.999)");
    add(adaptive, "--select", o.select, "Adam: keep the restart of least MSE on train or eval lags (train)");
    CLI::App* stability = subcommand("stability", "norms, phases and quantisation of jets at far lags (Table 5)");
    add_lags(stability, "lengths T (1024,2048,4096,8192,16384,32768)", "cycles per L (17)");
    add_variants(stability);
    CLI::App* cache = subcommand("cache", "a cache of mixed lag features: norms, logits, quantisation");
    add_lags(cache, "lengths T (1024,2048,4096,8192,16384,32768)", "cycles per L (5,17,61)");
    add_variants(cache);
    add(cache, "--cache-dim", o.cache_dim, "dimension of the keys (128)");
    add(cache, "--seed", o.seed, "of the mixes (0)");
    CLI::App* retrieval = subcommand("retrieval", "which lag a feature points to (Figure 6)");
    add_lags(retrieval, "lengths T (4096,8192,16384,32768)", "cycles per L (5,17,61)");
    add_variants(retrieval);
    add(retrieval, "--precisions", o.precisions, "fp32, int8, int4 (all)");
    add(retrieval, "--queries", o.queries, "queries in each bucket (128)");
    CLI::App* all = subcommand("all", "everything with the settings of the study, and a page lab.html");
    if (!parse_command_line(app, argc, argv)) return kExitGood;

    if (app.get_subcommands().empty())
        fail_usage(
            "no subcommand given, wanted fixed, projection, adaptive, stability, cache, retrieval or all (see --help)");
    if (o.out.empty()) fail_usage("--out: names no folder");
    if (all->parsed()) {
        run_all(o);
        return kExitGood;
    }
    std::string name;
    std::function<LabResult()> compute;
    if (fixed->parsed()) {
        name = "fixed";
        compute = [s = read_fixed(o, fixed_defaults(), lag_targets())] { return run_fixed(s); };
    } else if (projection->parsed()) {
        name = "projection";
        compute = [s = read_fixed(o, projection_defaults(), projection_targets())] { return run_projection(s); };
    } else if (adaptive->parsed()) {
        const AdaptiveSettings s = read_adaptive(o);
        name = s.solver == AdaptiveSolver::adam ? "adaptive" : "adaptive_varpro";
        compute = [s] { return run_adaptive(s); };
    } else if (stability->parsed()) {
        name = "stability";
        compute = [s = read_variants(o, stability_defaults(), 4)] { return run_stability(s); };
    } else if (cache->parsed()) {
        name = "cache";
        compute = [s = read_cache(o)] { return run_cache(s); };
    } else if (retrieval->parsed()) {
        name = "retrieval";
        compute = [s = read_retrieval(o)] { return run_retrieval(s); };
    }
    check_lab_folder(o.out, {name}, o.force);
    report(o.out, compute);
    return kExitGood;
}

}  // namespace
}  // namespace jetlag

int main(int argc, char** argv) {
    return jetlag::run_main("lab", [&] { return jetlag::run(argc, argv); });
}
