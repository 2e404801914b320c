// What a position module is. A rotary module says by what angle (and gain, and shear) a position turns each pair
// of channels of q and k; a lag-bias module says what a lag adds to the score. Attention sees only the two tables
// that the backend fills from these formulas (kernels/ops.h: rotary_table, lag_bias_table).
//
// A module is one header, which holds its formulas as inline functions that compile for the host and for a device
// (those that its struct below marks "device"), and one source file, which lists its options and parameters. registry.h
// names the modules.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#ifdef __CUDACC__
#define JETLAG_DEVICE __host__ __device__
#else
#define JETLAG_DEVICE
#endif

namespace jetlag {

// An option of a module, as `model.position.rotary.NAME` or `model.position.lag_bias.NAME` sets it. Its value is
// kept as a double: a flag as 0 or 1, a choice as the index of its name, a set as the sum of 1 << index.
struct Option {
    enum Kind { real, integer, flag, choice, set };
    const char* name;
    Kind kind;
    double value;  // the default
    double min, max;
    std::vector<std::string> names;  // of a choice or a set
    const char* meaning;
};
inline constexpr int kMaxOptions = 16;

struct RotaryModule;
struct LagBiasModule;

// A rotary module with everything its formula depends on besides position and pair.
struct RotarySpec {
    const RotaryModule* module = nullptr;  // nullptr: no rotation
    int64_t head_dim = 0;
    int64_t train_len = 0;             // L
    double options[kMaxOptions] = {};  // in the order of module->options()
};

// How one position turns one pair of channels (2p, 2p+1).
struct Rotation {
    double angle;       // radians
    double query_gain;  // the rotated pair of q is multiplied by this
    double key_gain;    // the same for k
};

struct RotaryModule {
    const char* name;
    const char* formula;  // one line for tables and --help
    std::vector<Option> (*options)();
    int64_t head_dim_multiple;  // the head dim must be a multiple of this
    // Device. Positions run from 0 to T - 1; pairs from 0 to D/2 - 1.
    Rotation (*rotation)(const RotarySpec& spec, int64_t T, int64_t position, int64_t pair);
    // Device. The shear coordinate c of a position, or nullptr. Before the rotation, in each group of four channels
    // z0 = (4b, 4b+1), z1 = (4b+2, 4b+3): query z0 += c z1, key z1 -= c z0.
    double (*shear)(const RotarySpec& spec, int64_t T, int64_t position);
};

struct LagBiasSpec {
    const LagBiasModule* module = nullptr;  // nullptr: no lag bias
    int64_t heads = 0;                      // H
    int64_t train_len = 0;                  // L
    double options[kMaxOptions] = {};       // in the order of module->options()
    bool strict_mask = false;               // lag 0 is masked: no position attends itself
};

// A learned tensor of a lag bias. The tensors of one instance lie back to back in the order of parameters().
struct BiasParameter {
    std::string name;
    std::vector<int64_t> shape;  // the first dimension is H
    bool takes_part;             // false: saved with the model, but never updated
    std::vector<float> initial;  // row-major; empty: drawn as normal_std * normal(0, 1)
    double normal_std = 0;
};

// The formula works on coefficients: for each head a short array of doubles that is computed once from the
// head's raw parameters (softmax and softplus are applied there), so that a lag costs no more than it must.
struct LagBiasModule {
    const char* name;
    const char* formula;
    const char* state_name;  // tensors are saved as blocks.N.attn.STATE_NAME.*
    std::vector<Option> (*options)();
    std::vector<BiasParameter> (*parameters)(const LagBiasSpec& spec);
    int64_t (*coefficient_count)(const LagBiasSpec& spec);
    // From here to coefficients_gradient: device.
    void (*coefficients)(const LagBiasSpec& spec, const float* parameters, int64_t head, double* c);
    // The bias of lag d >= 0; may be -infinity (the pair is masked).
    double (*bias)(const LagBiasSpec& spec, const double* c, double d);
    // dc += dbias * d bias(d) / dc.
    void (*bias_gradient)(const LagBiasSpec& spec, const double* c, double d, double dbias, double* dc);
    // dparameters += the gradient that dc means for the raw parameters of this head.
    void (*coefficients_gradient)(const LagBiasSpec& spec, const float* parameters, int64_t head, const double* c,
                                  const double* dc, float* dparameters);
    // Named figures for reports, averaged over the heads.
    std::vector<std::pair<std::string, double>> (*summary)(const LagBiasSpec& spec, const float* parameters);
};

// The number of floats of all parameters of one instance.
int64_t bias_parameter_count(const LagBiasSpec& spec);

}  // namespace jetlag
