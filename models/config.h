// The configuration of jetlag's language-model programs: one struct, one table of keys, and the position method
// that it means.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "kernels/position/registry.h"
#include "src/config.h"

namespace jetlag {

struct DataSettings {
    std::string corpus;
    double train_fraction = 0.9;
};

// The value of one option of a position module, in the form that its kind wants.
struct OptionValue {
    Option option;
    double real = 0;
    int64_t integer = 0;
    bool flag = false;
    std::string choice;
    std::vector<std::string> set;
};

// `model.position`: the name of a method, or (method empty) a rotary kind and a lag-bias kind with options.
struct PositionSettings {
    std::string method = "full";
    std::string rotary_kind = "none";
    std::string lag_bias_kind = "none";
    std::vector<OptionValue> rotary;    // the options of all rotary modules, each once
    std::vector<OptionValue> lag_bias;  // the options of all lag-bias modules, each once

    PositionSettings();
};

struct ModelSettings {
    PositionSettings position;
    int64_t layers = 2;
    int64_t embed_dim = 96;
    int64_t heads = 4;
    int64_t mlp_ratio = 2;
    bool exact_skipping = true;
    std::string attention = "fused";
    // Options of the position modules under the study's names: for named methods, and where a composed form does not
    // give its own.
    OptionValue max_order, rope_base, init_affine_slope, gate_init;

    ModelSettings();
};

struct TrainSettings {
    int64_t context = 1024;
    int64_t batch = 32;
    int64_t accumulate = 1;
    bool recompute = false;
    int64_t steps = 300;
    double lr = 0.003;
    std::string schedule = "constant";
    int64_t warmup_steps = 0;
    double final_lr = 0;
    double weight_decay = 0.0001;
    double beta1 = 0.9;
    double beta2 = 0.999;
    double eps = 1e-8;
    double grad_clip = 0;
    int64_t seed = 0;
    std::optional<int64_t> data_seed;
    int64_t log_every = 10;
    int64_t initial_eval_batches = 8;
    int64_t eval_every = 0;
    int64_t eval_batches = 2;
    int64_t save_every = 100;
};

struct EvalSettings {
    std::vector<int64_t> contexts = {1024, 8192, 32768};
    int64_t batches = 8;
    int64_t batch = 1;
    int64_t seed = 0;
};

struct Config {
    DataSettings data;
    ModelSettings model;
    TrainSettings train;
    EvalSettings eval;
};

// The keys from train.steps to train.seed: what any training program has.
std::vector<Key> optimizer_keys(TrainSettings& train);

// Every key that a file or --set may hold, both forms of model.position included. Points into `config`.
std::vector<Key> config_keys(Config& config);

// The keys of the resolved configuration: of model.position the form that is in use, with the options that its
// modules have.
std::vector<Key> resolved_keys(Config& config);

// Applies the settings to the defaults and checks what involves several keys. Options of a composed position that are
// not given take the values of model.rope_base, model.max_order, model.init_affine_slope and model.gate_init where
// they have the same meaning. Errors (exit code 2) name where the key was set.
Config make_config(const std::vector<Setting>& settings);

// The size of a model and its position method.
struct ModelShape {
    int64_t vocab = 256;
    int64_t layers = 0;
    int64_t embed_dim = 0;  // C
    int64_t heads = 0;      // H
    int64_t head_dim = 0;   // D = C / H
    int64_t mlp_dim = 0;    // mlp_ratio * C
    int64_t train_len = 0;  // L
    bool exact_skipping = true;
    bool cudnn_attention = false;
    int64_t classes = 0;  // 0: logits over the vocabulary at every position; else so many, at the last one only
    bool lag_bias_drawn_first = false;  // of a block's initial values, those of the lag bias come before qkv
    bool freeze_qk = false;             // query and key rows of qkv are 0 and stay: scores are the lag bias alone
    std::string position;               // the method's name, or what it is composed of
    RotarySpec rotary;
    LagBiasSpec lag_bias;
};
ModelShape model_shape(const Config& config);

// The checkpoints' and run folders' forms of a configuration.
std::string config_yaml(const Config& config);
std::string config_json(const Config& config);

}  // namespace jetlag
