// The configuration of the synthetic bridge: teacher, student, training, evaluation; and sweeps over several of them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bridge/teacher.h"
#include "models/config.h"

namespace jetlag {

// The sectors of the lag bias that a student has. GRAPE-M is FJ of order 0 alone, GRAPE-A the affine sector, GRAPE-M+A
// both.
inline constexpr const char* kBridgeSectors[] = {
    "none", "affine", "fj", "fj_affine", "lc_affine", "full", "grape_m_rope", "grape_a_alibi", "grape_ma_rope_alibi"};

struct StudentSettings {
    std::string sector = "full";
    int64_t layers = 2;
    int64_t embed_dim = 96;
    int64_t heads = 4;
    int64_t mlp_ratio = 2;
    int64_t max_order = 3;
    double init_affine_slope = 0.4;
    std::string gate_init = "uniform";   // or auto: the teacher's sector
    std::string order_init = "uniform";  // or auto: the teacher's order
    bool freeze_qk = false;
};

// One value per run of a sweep; an empty list stands for the value of the configuration.
struct SweepSettings {
    std::vector<std::string> targets, sectors;
    std::vector<int64_t> seeds;
    std::vector<std::string> lambdas;  // numbers
};

struct BridgeConfig {
    TeacherSettings teacher;
    StudentSettings model;
    TrainSettings train;           // context is L
    std::vector<int64_t> lengths;  // of training sequences; none: L
    std::string length_sampling = "cycle";
    EvalSettings eval;
    SweepSettings sweep;

    BridgeConfig();
};

// Every key that a file or --set may hold. Points into `config`. `with_sweep`: the section `sweep` too.
std::vector<Key> bridge_keys(BridgeConfig& config, bool with_sweep);

// Errors (exit code 2) name where the key was set.
BridgeConfig make_bridge_config(const std::vector<Setting>& settings, bool with_sweep);

ModelShape bridge_shape(const BridgeConfig& config);

// Whether a list of the section `sweep` is given.
bool has_sweep(const BridgeConfig& config);

// The lengths of training sequences: train.lengths, or L.
std::vector<int64_t> training_lengths(const BridgeConfig& config);

// The resolved configuration of one run, without the section `sweep`.
std::string bridge_yaml(const BridgeConfig& config);
std::string bridge_json(const BridgeConfig& config);

}  // namespace jetlag
