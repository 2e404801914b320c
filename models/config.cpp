#include "models/config.h"

#include <algorithm>
#include <cmath>

#include "kernels/ops.h"
#include "src/error.h"

namespace jetlag {

static std::vector<std::string> module_names(const auto& modules) {
    std::vector<std::string> names = {"none"};
    for (const auto* module : modules) names.push_back(module->name);
    return names;
}

static OptionValue default_value(const Option& option) {
    OptionValue value;
    value.option = option;
    value.real = option.value;
    value.integer = static_cast<int64_t>(option.value);
    value.flag = option.value != 0;
    if (option.kind == Option::choice) value.choice = option.names[static_cast<size_t>(option.value)];
    if (option.kind == Option::set)
        for (size_t i = 0; i < option.names.size(); i++)
            if (static_cast<unsigned>(option.value) >> i & 1) value.set.push_back(option.names[i]);
    return value;
}

static OptionValue* find_option(std::vector<OptionValue>& values, const std::string& name) {
    for (OptionValue& value : values)
        if (value.option.name == name) return &value;
    return nullptr;
}

static std::vector<OptionValue> options_of_modules(const auto& modules) {
    std::vector<OptionValue> values;
    for (const auto* module : modules)
        for (const Option& option : module->options())
            if (find_option(values, option.name) == nullptr) values.push_back(default_value(option));
    return values;
}

PositionSettings::PositionSettings()
    : rotary(options_of_modules(rotary_modules())), lag_bias(options_of_modules(lag_bias_modules())) {}

// The keys of the section `model` that stand for an option of a module.
struct Shorthand {
    const char* key;
    const char* section;  // of model.position
    const char* option;
    std::vector<OptionValue> PositionSettings::*options;
    OptionValue ModelSettings::*value;
};
static const Shorthand kShorthands[] = {
    {"model.max_order", "lag_bias", "max_order", &PositionSettings::lag_bias, &ModelSettings::max_order},
    {"model.rope_base", "rotary", "base", &PositionSettings::rotary, &ModelSettings::rope_base},
    {"model.init_affine_slope", "lag_bias", "init_affine_slope", &PositionSettings::lag_bias,
     &ModelSettings::init_affine_slope},
    {"model.gate_init", "lag_bias", "gate_init", &PositionSettings::lag_bias, &ModelSettings::gate_init},
};

ModelSettings::ModelSettings() {
    for (const Shorthand& s : kShorthands) this->*s.value = *find_option(position.*s.options, s.option);
}

static Key option_key(const std::string& path, OptionValue& value) {
    const Option& option = value.option;
    Key key{path, &value.real, option.meaning};
    if (option.kind == Option::real || option.kind == Option::integer) {
        key.min = option.min;
        key.max = option.max;
    }
    if (option.kind == Option::integer) key.target = &value.integer;
    if (option.kind == Option::flag) key.target = &value.flag;
    if (option.kind == Option::choice) key.target = &value.choice;
    if (option.kind == Option::set) key.target = &value.set;
    if (option.kind == Option::choice || option.kind == Option::set) key.choices = option.names;
    return key;
}

// The value as a number, for the array that a module's spec holds.
static double number_of(const OptionValue& value) {
    const Option& option = value.option;
    const auto index = [&option](const std::string& name) {
        return std::find(option.names.begin(), option.names.end(), name) - option.names.begin();
    };
    switch (option.kind) {
        case Option::real:
            return value.real;
        case Option::integer:
            return static_cast<double>(value.integer);
        case Option::flag:
            return value.flag ? 1 : 0;
        case Option::choice:
            return static_cast<double>(index(value.choice));
        case Option::set: {
            unsigned bits = 0;
            for (const std::string& name : value.set) bits |= 1u << index(name);
            return bits;
        }
    }
    return 0;
}

static Key text_key(const std::string& path, std::string* target, const std::string& meaning,
                    const std::vector<std::string>& choices) {
    Key key{path, target, meaning};
    key.choices = choices;
    return key;
}

static constexpr double kMostSteps = 1e9;

std::vector<Key> optimizer_keys(TrainSettings& train) {
    return {
        {"train.steps", &train.steps, "optimizer steps", 0, kMostSteps},
        {"train.lr", &train.lr, "learning rate of AdamW", 0, 1000},
        text_key("train.schedule", &train.schedule, "learning rate after the warm-up", {"constant", "cosine"}),
        {"train.warmup_steps", &train.warmup_steps, "steps of linear warm-up", 0, kMostSteps},
        {"train.final_lr", &train.final_lr, "learning rate at the last step of the cosine", 0, 1000},
        {"train.weight_decay", &train.weight_decay, "decoupled weight decay, on every parameter that takes part", 0,
         1000},
        {"train.beta1", &train.beta1, "decay of AdamW's first moment", 0, 0.999999},
        {"train.beta2", &train.beta2, "decay of AdamW's second moment", 0, 0.99999999},
        {"train.eps", &train.eps, "AdamW's epsilon", 0, 1, true},
        {"train.grad_clip", &train.grad_clip, "largest global gradient norm; 0: no clipping", 0,
         std::numeric_limits<double>::infinity()},
        {"train.seed", &train.seed, "seed of weights and batches, as torch.manual_seed", 0, 4294967295.0},
    };
}

enum class Form { all, resolved };

static std::vector<Key> make_keys(Config& c, Form form) {
    const double most = kMostSteps;
    PositionSettings& position = c.model.position;
    std::vector<std::string> names;
    for (const Method& method : methods()) names.push_back(method.name);

    Key corpus{"data.corpus", &c.data.corpus, "file whose bytes are the tokens"};
    corpus.default_text = "(required)";
    std::vector<Key> keys = {
        corpus,
        {"data.train_fraction", &c.data.train_fraction,
         "leading share of the corpus that is trained on; the rest is held out", 0.0, 1.0},
    };
    const bool composed = position.method.empty();
    if (form == Form::all || !composed)
        keys.push_back(
            text_key("model.position", &position.method, "position method, or a composed form: the next keys", names));
    const auto add_options = [&](const std::string& prefix, std::vector<OptionValue>& values, const auto& modules,
                                 const std::string& kind) {
        for (OptionValue& value : values) {
            bool used = form == Form::all;
            for (const auto* module : modules)
                if (kind == module->name)
                    for (const Option& option : module->options())
                        used = used || value.option.name == std::string(option.name);
            if (used) keys.push_back(option_key(prefix + value.option.name, value));
        }
    };
    if (form == Form::all || composed) {
        keys.push_back(text_key("model.position.rotary.kind", &position.rotary_kind, "composed: rotary module",
                                module_names(rotary_modules())));
        add_options("model.position.rotary.", position.rotary, rotary_modules(), position.rotary_kind);
        keys.push_back(text_key("model.position.lag_bias.kind", &position.lag_bias_kind, "composed: lag-bias module",
                                module_names(lag_bias_modules())));
        add_options("model.position.lag_bias.", position.lag_bias, lag_bias_modules(), position.lag_bias_kind);
    }
    const std::vector<Key> sizes = {
        {"model.layers", &c.model.layers, "Transformer blocks", 1, 1000},
        {"model.embed_dim", &c.model.embed_dim, "channels C", 1, 65536},
        {"model.heads", &c.model.heads, "attention heads H; C/H is at most 256", 1, 65536},
        {"model.mlp_ratio", &c.model.mlp_ratio, "hidden channels of the MLP over C", 1, 64},
        {"model.exact_skipping", &c.model.exact_skipping,
         "leave out tiles of attention whose weights the lag bias makes too small to count in float"},
        text_key("model.attention", &c.model.attention,
                 "whose attention kernels: ours, or, without a lag bias, cuDNN's (BACKEND=cuda PRECISION=bf16)",
                 {"fused", "cudnn"}),
    };
    keys.insert(keys.end(), sizes.begin(), sizes.end());
    for (const Shorthand& s : kShorthands) keys.push_back(option_key(s.key, c.model.*s.value));
    const std::vector<Key> rest = {
        {"train.context", &c.train.context, "training length L in tokens", 1, most},
        {"train.batch", &c.train.batch, "windows per step", 1, most},
        {"train.accumulate", &c.train.accumulate, "passes that a batch is split into, to save memory; divides batch", 1,
         most},
        {"train.recompute", &c.train.recompute,
         "compute each block's activations again in backward instead of keeping them: less memory, more time"},
    };
    keys.insert(keys.end(), rest.begin(), rest.end());
    const std::vector<Key> optimizer = optimizer_keys(c.train);
    keys.insert(keys.end(), optimizer.begin(), optimizer.end());
    const std::vector<Key> last = {
        {"train.data_seed", &c.train.data_seed,
         "if given, batch n depends on this seed and n alone (paired comparisons)", 0, 4294967295.0},
        {"train.log_every", &c.train.log_every, "steps between lines of the log", 1, most},
        {"train.initial_eval_batches", &c.train.initial_eval_batches, "held-out batches before the first step", 0,
         most},
        {"train.eval_every", &c.train.eval_every, "steps between held-out evaluations; 0: none", 0, most},
        {"train.eval_batches", &c.train.eval_batches, "batches of such an evaluation", 1, most},
        {"train.save_every", &c.train.save_every, "steps between checkpoints; 0: only at the end", 0, most},
        {"eval.contexts", &c.eval.contexts, "context lengths in tokens", 1, most},
        {"eval.batches", &c.eval.batches, "batches at each length", 1, most},
        {"eval.batch", &c.eval.batch, "windows per batch", 1, most},
        {"eval.seed", &c.eval.seed, "seed of the evaluation windows", 0, 4294967295.0},
    };
    keys.insert(keys.end(), last.begin(), last.end());
    return keys;
}

std::vector<Key> config_keys(Config& config) {
    return make_keys(config, Form::all);
}
std::vector<Key> resolved_keys(Config& config) {
    return make_keys(config, Form::resolved);
}

static bool is_set(const std::vector<Setting>& settings, const std::string& path) {
    return where_set(settings, path) != "default";
}

// Composed positions: the kinds that are implied, options that their module does not have, values from above.
static void complete_position(Config& c, const std::vector<Setting>& settings) {
    PositionSettings& position = c.model.position;
    const std::string prefix = "model.position.";
    bool composed = false, rotary_given = false, lag_bias_given = false;
    for (const Setting& setting : settings) {
        composed = composed || setting.path.starts_with(prefix);
        rotary_given = rotary_given || setting.path.starts_with(prefix + "rotary.");
        lag_bias_given = lag_bias_given || setting.path.starts_with(prefix + "lag_bias.");
    }
    if (!composed) return;
    position.method.clear();
    if (rotary_given && !is_set(settings, prefix + "rotary.kind"))
        position.rotary_kind = rotary_modules().front()->name;
    if (lag_bias_given && !is_set(settings, prefix + "lag_bias.kind"))
        position.lag_bias_kind = lag_bias_modules().front()->name;

    const auto check = [&](const std::string& part, const std::vector<OptionValue>& values, const auto& modules,
                           const std::string& kind) {
        std::vector<std::string> known;
        for (const auto* module : modules)
            if (kind == module->name)
                for (const Option& option : module->options()) known.push_back(option.name);
        for (const OptionValue& value : values) {
            const std::string path = prefix + part + "." + value.option.name;
            if (value.option.kind == Option::set && number_of(value) < value.option.min)
                fail_usage("{}: {}: is empty (wanted at least one of {})", where_set(settings, path), path,
                           fmt::join(value.option.names, ", "));
            if (is_set(settings, path) && std::find(known.begin(), known.end(), value.option.name) == known.end())
                fail_usage("{}: {}: the {} kind {} has no such option{}", where_set(settings, path), path, part, kind,
                           known.empty() ? "" : fmt::format(" (it has {})", fmt::join(known, ", ")));
        }
    };
    check("rotary", position.rotary, rotary_modules(), position.rotary_kind);
    check("lag_bias", position.lag_bias, lag_bias_modules(), position.lag_bias_kind);

    for (const Shorthand& s : kShorthands)
        if (!is_set(settings, prefix + s.section + "." + s.option))
            *find_option(position.*s.options, s.option) = c.model.*s.value;
}

// cuDNN's attention is there for one build, and knows no lag bias.
static void check_cudnn(const std::string& where, const ModelShape& shape) {
    if (!kHasCudnn) {
        const char* why = std::string(backend_name()) != "cuda" || !kHalfPrecision ? "" : " without cuDNN";
        fail_usage(
            "{}: model.attention: cudnn in a program built with BACKEND={} PRECISION={}{} (wanted BACKEND=cuda "
            "PRECISION=bf16 and cuDNN 9.16 or later when it was built; or fused)",
            where, backend_name(), kPrecision, why);
    }
    if (shape.lag_bias.module != nullptr)
        fail_usage("{}: model.attention: cudnn with position {}, which has a lag bias (wanted one without; or fused)",
                   where, shape.position);
    if (shape.head_dim % 8 != 0 || shape.head_dim > kMaxCudnnHeadDim)
        fail_usage("{}: model.attention: cudnn with a head dim of {} (wanted a multiple of 8 up to {}; or fused)",
                   where, shape.head_dim, kMaxCudnnHeadDim);
}

Config make_config(const std::vector<Setting>& settings) {
    Config c;
    apply_settings(settings, config_keys(c));
    complete_position(c, settings);
    const auto where = [&settings](const char* key) { return where_set(settings, key); };

    if (c.model.embed_dim % c.model.heads != 0)
        fail_usage("{}: model.heads: {} heads do not divide model.embed_dim {}", where("model.heads"), c.model.heads,
                   c.model.embed_dim);
    const int64_t head_dim = c.model.embed_dim / c.model.heads;
    if (head_dim > kMaxHeadDim)
        fail_usage("{}: model.embed_dim: {} over {} heads is a head dim of {} (wanted at most {})",
                   where("model.embed_dim"), c.model.embed_dim, c.model.heads, head_dim, kMaxHeadDim);
    const ModelShape shape = model_shape(c);
    if (shape.rotary.module != nullptr && head_dim % shape.rotary.module->head_dim_multiple != 0)
        fail_usage(
            "{}: model.position: {} wants a head dim that is a multiple of {}, but {} channels over {} heads is {}",
            where("model.position"), shape.position, shape.rotary.module->head_dim_multiple, c.model.embed_dim,
            c.model.heads, head_dim);
    if (shape.cudnn_attention) check_cudnn(where("model.attention"), shape);
    if (c.train.batch % c.train.accumulate != 0)
        fail_usage("{}: train.accumulate: {} passes do not divide train.batch {}", where("train.accumulate"),
                   c.train.accumulate, c.train.batch);
    if (c.eval.contexts.empty()) fail_usage("{}: eval.contexts: no length given", where("eval.contexts"));
    return c;
}

ModelShape model_shape(const Config& config) {
    const ModelSettings& model = config.model;
    PositionSettings position = model.position;
    ModelShape shape;
    shape.layers = model.layers;
    shape.embed_dim = model.embed_dim;
    shape.heads = model.heads;
    shape.head_dim = model.embed_dim / model.heads;
    shape.mlp_dim = model.mlp_ratio * model.embed_dim;
    shape.train_len = config.train.context;
    shape.exact_skipping = model.exact_skipping;
    shape.cudnn_attention = model.attention == "cudnn";
    shape.rotary.head_dim = shape.head_dim;
    shape.rotary.train_len = shape.lag_bias.train_len = shape.train_len;
    shape.lag_bias.heads = shape.heads;

    // A named method is its modules with the options of the section `model`.
    if (position.method.empty()) {
        for (const RotaryModule* module : rotary_modules())
            if (position.rotary_kind == module->name) shape.rotary.module = module;
        for (const LagBiasModule* module : lag_bias_modules())
            if (position.lag_bias_kind == module->name) shape.lag_bias.module = module;
        shape.position = position.rotary_kind;
        if (shape.lag_bias.module != nullptr) {
            shape.position = (shape.rotary.module != nullptr ? shape.position + "+" : "") + position.lag_bias_kind;
            if (const OptionValue* sectors = find_option(position.lag_bias, "sectors"); position.lag_bias_kind == "pj")
                shape.position += fmt::format("({})", fmt::join(sectors->set, ","));
        }
    } else {
        const Method* method = find_method(position.method);
        shape.rotary.module = method->rotary;
        shape.lag_bias.module = method->lag_bias;
        shape.position = method->name;
        for (const Shorthand& s : kShorthands) *find_option(position.*s.options, s.option) = model.*s.value;
        if (OptionValue* sectors = find_option(position.lag_bias, "sectors")) {
            sectors->set.clear();
            for (const char* name : method->sectors)
                if (name != nullptr) sectors->set.push_back(name);
        }
    }
    const auto fill = [](double* options, const auto* module, std::vector<OptionValue>& values) {
        if (module == nullptr) return;
        for (const Option& option : module->options()) *options++ = number_of(*find_option(values, option.name));
    };
    fill(shape.rotary.options, shape.rotary.module, position.rotary);
    fill(shape.lag_bias.options, shape.lag_bias.module, position.lag_bias);
    return shape;
}

std::string config_yaml(const Config& config) {
    Config copy = config;
    return to_yaml(resolved_keys(copy));
}

std::string config_json(const Config& config) {
    Config copy = config;
    return to_json(resolved_keys(copy));
}

}  // namespace jetlag
