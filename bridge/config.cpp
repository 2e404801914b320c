#include "bridge/config.h"

#include <algorithm>
#include <cmath>

#include "kernels/ops.h"
#include "src/command_line.h"
#include "src/error.h"

namespace jetlag {

BridgeConfig::BridgeConfig() {
    train.context = 96;
    train.batch = 96;
    train.steps = 350;
    train.initial_eval_batches = 4;
    train.log_every = 50;
    train.save_every = 0;
    lengths = {48, 96};
    eval.contexts = {96, 192, 384};
    eval.batches = 8;
}

static std::vector<std::string> target_names() {
    std::vector<std::string> names;
    for (const LagTarget& target : bridge_targets()) names.push_back(target.name);
    return names;
}

static Key choice(const std::string& path, KeyTarget target, const std::string& meaning,
                  std::vector<std::string> choices) {
    Key key{path, target, meaning};
    key.choices = std::move(choices);
    return key;
}

std::vector<Key> bridge_keys(BridgeConfig& c, bool with_sweep) {
    const double most = 1e9, longest = 1e6;
    const std::vector<std::string> sectors(std::begin(kBridgeSectors), std::end(kBridgeSectors));
    std::vector<Key> keys = {
        choice("teacher.target", &c.teacher.target, "kernel K of the lag", target_names()),
        choice("teacher.kind", &c.teacher.kind, "coefficients: K / |K|, or softmax(lambda K)", {"signed", "attention"}),
        {"teacher.attention_lambda", &c.teacher.attention_lambda, "lambda of an attention teacher", 0, 1000},
        {"teacher.omega_cycles", &c.teacher.omega_cycles, "cycles of K per L; also of the last head at the start", 0,
         1e6},
        {"teacher.median_threshold", &c.teacher.median_threshold,
         "labels compare a score with the batch's median, not with 0"},
        choice("model.sector", &c.model.sector, "sectors of the student's lag bias", sectors),
        {"model.layers", &c.model.layers, "Transformer blocks", 1, 1000},
        {"model.embed_dim", &c.model.embed_dim, "channels C", 1, 65536},
        {"model.heads", &c.model.heads, "attention heads H; C/H is at most 256", 1, 65536},
        {"model.mlp_ratio", &c.model.mlp_ratio, "hidden channels of the MLP over C", 1, 64},
        {"model.max_order", &c.model.max_order, "highest jet order R", 0, kPjMaxOrder},
        {"model.init_affine_slope", &c.model.init_affine_slope, "affine slope s at the start", 1e-6, 1000},
        choice("model.gate_init", &c.model.gate_init, "gates at the start; auto favours the teacher's sector",
               {"uniform", "auto"}),
        choice("model.order_init", &c.model.order_init, "order weights at the start; auto favours the teacher's order",
               {"uniform", "auto"}),
        {"model.freeze_qk", &c.model.freeze_qk, "query and key weights are 0 and stay: scores are the lag bias alone"},
        {"train.context", &c.train.context, "training length L in tokens, the unit of the teacher's lags", 3, longest},
        {"train.lengths", &c.lengths, "lengths of training sequences; empty: L", 3, longest},
        choice("train.length_sampling", &c.length_sampling, "how a step gets its length: in turn, or drawn",
               {"cycle", "random"}),
        {"train.batch", &c.train.batch, "sequences per step", 1, most},
    };
    const std::vector<Key> optimizer = optimizer_keys(c.train);
    keys.insert(keys.end(), optimizer.begin(), optimizer.end());
    const std::vector<Key> rest = {
        {"train.log_every", &c.train.log_every, "steps between lines of the log", 1, most},
        {"train.initial_eval_batches", &c.train.initial_eval_batches, "batches of length L before the first step", 0,
         most},
        {"train.eval_every", &c.train.eval_every, "steps between evaluations on batches of their own; 0: none", 0,
         most},
        {"train.eval_batches", &c.train.eval_batches, "batches of such an evaluation", 1, most},
        {"train.save_every", &c.train.save_every, "steps between checkpoints; 0: only at the end", 0, most},
        {"eval.contexts", &c.eval.contexts, "lengths of the evaluation", 3, longest},
        {"eval.batches", &c.eval.batches, "batches at each length", 1, most},
    };
    keys.insert(keys.end(), rest.begin(), rest.end());
    if (!with_sweep) return keys;
    keys.push_back(choice("sweep.targets", &c.sweep.targets, "a run for each teacher.target", target_names()));
    keys.push_back(choice("sweep.sectors", &c.sweep.sectors, "a run for each model.sector", sectors));
    keys.push_back({"sweep.seeds", &c.sweep.seeds, "a run for each train.seed", 0, 4294967295.0});
    keys.push_back({"sweep.lambdas", &c.sweep.lambdas, "a run for each teacher.attention_lambda"});
    return keys;
}

BridgeConfig make_bridge_config(const std::vector<Setting>& settings, bool with_sweep) {
    BridgeConfig c;
    apply_settings(settings, bridge_keys(c, with_sweep));
    const auto where = [&settings](const char* key) { return where_set(settings, key); };
    if (c.model.embed_dim % c.model.heads != 0)
        fail_usage("{}: model.heads: {} heads do not divide model.embed_dim {}", where("model.heads"), c.model.heads,
                   c.model.embed_dim);
    if (c.model.embed_dim / c.model.heads > kMaxHeadDim)
        fail_usage("{}: model.embed_dim: {} over {} heads is a head dim of {} (wanted at most {})",
                   where("model.embed_dim"), c.model.embed_dim, c.model.heads, c.model.embed_dim / c.model.heads,
                   kMaxHeadDim);
    if (c.teacher.median_threshold && c.train.batch < 2)
        fail_usage("{}: train.batch: {} has no median to compare with (wanted 2 or more)", where("train.batch"),
                   c.train.batch);
    if (c.eval.contexts.empty()) fail_usage("{}: eval.contexts: no length given", where("eval.contexts"));
    if (!c.sweep.lambdas.empty() && c.teacher.kind == "signed")
        fail_usage("{}: sweep.lambdas: a signed teacher has no lambda (wanted teacher.kind attention)",
                   where("sweep.lambdas"));
    check_once(where("sweep.targets") + ": sweep.targets", c.sweep.targets);
    check_once(where("sweep.sectors") + ": sweep.sectors", c.sweep.sectors);
    check_once(where("sweep.seeds") + ": sweep.seeds", c.sweep.seeds);
    check_once(where("eval.contexts") + ": eval.contexts", c.eval.contexts);
    std::vector<double> lambdas;
    for (const std::string& lambda : c.sweep.lambdas)
        lambdas.push_back(parse_real(
            where("sweep.lambdas") + ": sweep.lambdas", lambda, [](double x) { return x >= 0 && x <= 1000; },
            "a number from 0 to 1000"));
    check_once(where("sweep.lambdas") + ": sweep.lambdas", lambdas);
    return c;
}

static double index_of(const std::string& name, const std::vector<std::string>& names) {
    return static_cast<double>(std::find(names.begin(), names.end(), name) - names.begin());
}

ModelShape bridge_shape(const BridgeConfig& config) {
    const StudentSettings& model = config.model;
    const std::string& sector = model.sector;
    ModelShape shape;
    shape.vocab = kBridgeVocab;
    shape.classes = 2;
    shape.freeze_qk = model.freeze_qk;
    shape.lag_bias_drawn_first = true;
    shape.layers = model.layers;
    shape.embed_dim = model.embed_dim;
    shape.heads = model.heads;
    shape.head_dim = model.embed_dim / model.heads;
    shape.mlp_dim = model.mlp_ratio * model.embed_dim;
    shape.train_len = config.train.context;
    shape.position = sector;
    shape.rotary.head_dim = shape.head_dim;
    shape.rotary.train_len = shape.lag_bias.train_len = shape.train_len;
    shape.lag_bias.heads = shape.heads;
    shape.lag_bias.strict_mask = true;
    if (sector == "none") return shape;

    const bool order_zero = sector == "grape_m_rope" || sector == "grape_ma_rope_alibi";
    const bool fj = order_zero || sector == "fj" || sector == "fj_affine" || sector == "full";
    const bool affine = sector.ends_with("affine") || sector.ends_with("alibi") || sector == "full";
    const bool lc = sector == "lc_affine" || sector == "full";
    shape.lag_bias.module = &pj_module;
    const std::vector<Option> options = pj_options();
    double* values = shape.lag_bias.options;
    for (size_t i = 0; i < options.size(); i++) values[i] = options[i].value;
    values[kPjSectors] = (fj ? 1 << kPjFj : 0) + (affine ? 1 << kPjAffine : 0) + (lc ? 1 << kPjLc : 0);
    values[kPjOrder] = order_zero ? 0 : static_cast<double>(model.max_order);
    values[kPjAffineSlope] = model.init_affine_slope;
    values[kPjCyclesMax] = config.teacher.omega_cycles;
    values[kPjGateInit] =
        index_of(model.gate_init == "auto" ? teacher_sector(config.teacher) : "uniform", options[kPjGateInit].names);
    if (model.order_init == "auto") values[kPjOrderInit] = static_cast<double>(teacher_order(config.teacher));
    return shape;
}

bool has_sweep(const BridgeConfig& config) {
    const SweepSettings& s = config.sweep;
    return !s.targets.empty() || !s.sectors.empty() || !s.seeds.empty() || !s.lambdas.empty();
}

std::vector<int64_t> training_lengths(const BridgeConfig& config) {
    return config.lengths.empty() ? std::vector<int64_t>{config.train.context} : config.lengths;
}

std::string bridge_yaml(const BridgeConfig& config) {
    BridgeConfig copy = config;
    return to_yaml(bridge_keys(copy, false));
}

std::string bridge_json(const BridgeConfig& config) {
    BridgeConfig copy = config;
    return to_json(bridge_keys(copy, false));
}

}  // namespace jetlag
