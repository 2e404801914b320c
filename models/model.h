// The Transformer: parameters, activations, forward, backward. Written against kernels/ops.h alone, so that any
// backend serves.
//
//     x = embedding[tokens]
//     per block:  x += out_proj(attention(qkv(norm1(x))));  x += mlp.2(gelu(mlp.0(norm2(x))))
//     logits = head(norm(x))
//
// Options of ModelShape: a strict mask (lag_bias.strict_mask: no position attends itself, and the first attends
// nothing), frozen queries and keys, and a classifier's head, which reads the last position of each sequence. Of a
// classifier's last block only that position is computed once attention is done; rows R are B for a classifier, N = B T
// otherwise.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kernels/ops.h"
#include "models/config.h"
#include "src/random.h"

namespace jetlag {

// One parameter tensor, at `offset` of the model's parameters. The names are those of the published state dict.
struct ParameterInfo {
    std::string name;
    std::vector<int64_t> shape;
    int64_t offset = 0;
    int64_t size = 0;
    bool takes_part = true;  // false: saved, never updated (a sector of the lag bias that is off)
    bool is_lag_bias = false;
    int64_t frozen = 0;          // so many leading values are zero and never updated
    int64_t rounded_at = -1;     // of a dense layer: the place in the copy that RoundedWeights describes
    std::vector<float> initial;  // or drawn:
    double normal_std = 0;       // normal_std * normal(0, 1), if not 0
    double uniform_bound = 0;    // uniform(-bound, bound), if not 0
};

struct Model {
    ModelShape shape;
    std::vector<ParameterInfo> layout;  // in the order of the state dict, back to back
    DeviceArray<float> parameters;      // all of them
    DeviceArray<uint8_t> takes_part;    // one byte per parameter
};

// What matrix products read: the weights and biases of the dense layers, as they are, or where `real` is not float as
// rounded copies. Training and evaluation make them anew for each batch, a small part of its work; a growing sequence,
// of whose work they would be the larger part, keeps them.
struct RoundedWeights {
    DeviceArray<real> memory;  // empty where `real` is float
};

// A model with all parameters zero. Errors: no memory, saying how much was wanted.
Model make_model(const ModelShape& shape);

// Draws the initial parameters as the published PyTorch code does, tensor by tensor in the order of the layout, or with
// each block's lag bias before its qkv.
void initialize_model(Model& model, TorchGenerator& generator);

// Named figures of the lag biases (gates, slopes, order masses), averaged over heads, then layers.
std::vector<std::pair<std::string, double>> lag_bias_summary(const Model& model);

// In training every block keeps what backward needs. Recomputing keeps only the residual stream before each block, and
// runs a block forward once more before its backward: the same numbers, bit for bit, in less memory.
enum class Mode { inference, training, recomputing };

// What one block keeps. In training every block has its own; otherwise all share one.
struct BlockActivations {
    real* norm1 = nullptr;        // (N, C); inference: (chunk, C)
    float* norm1_mean = nullptr;  // (N)
    float* norm1_rstd = nullptr;  // (N)
    real* qkv = nullptr;          // (N, 3, H, D)
    real* attention = nullptr;    // (N, C)
    float* lse = nullptr;         // (B, H, T)
    real* middle = nullptr;       // (N, C): the residual stream after attention
    real* norm2 = nullptr;        // (N, C); inference: norm1
    float* norm2_mean = nullptr;  // (N)
    float* norm2_rstd = nullptr;  // (N)
    real* hidden = nullptr;       // (N, mlp_dim), before GELU; inference: (chunk, mlp_dim)
    real* gelu = nullptr;         // (N, mlp_dim); inference: hidden
    float* lag_bias = nullptr;    // (H, T)
};

// Where the time of a batch goes: seconds of each op since they were last cleared, in the order of first use.
struct OpTimes {
    std::vector<std::pair<const char*, double>> seconds;
    std::chrono::steady_clock::time_point last;
};
// Adds the time since the last lap to `op`; nullptr: does nothing.
void lap(OpTimes* times, const char* op);

// Forward and backward as a graph, and what it was captured for.
struct TrainingGraph {
    Graph graph;
    const float *parameters = nullptr, *gradients = nullptr;
    int64_t B = 0, T = 0;
    double loss_scale = 0;
};

// Memory for batches of up to B sequences of up to T tokens. Between two attentions the forward pass takes a chunk of
// rows through all ops before the next chunk; a buffer that is not read again holds one chunk.
struct Activations {
    Mode mode = Mode::inference;
    int64_t B = 0, T = 0;
    int64_t chunk = 0;            // rows of a chunk of the forward pass; results do not depend on it
    DeviceArray<float> memory;    // what the pointers below and the blocks' point into
    std::vector<real*> residual;  // (N, C) before each block and after the last; inference: all one
    std::vector<BlockActivations> blocks;
    real* projection = nullptr;      // (chunk, C): output of out_proj or mlp.2
    real* last_residual = nullptr;   // (B, C), a classifier's: the stream before the last block, at the last positions
    real* last_attention = nullptr;  // (B, C), a classifier's: attention of the last block, at the last positions
    real* norm = nullptr;            // (kHeadRows, C): the final LayerNorm, a chunk of rows at a time
    float* norm_mean = nullptr;      // (R)
    float* norm_rstd = nullptr;      // (R)
    real* logits = nullptr;          // (kHeadRows, V or classes): a chunk of rows at a time
    float* losses = nullptr;         // (R)
    float* entropy = nullptr;        // (B, H, T), inference with statistics
    float* mean_lag = nullptr;       // (B, H, T), inference with statistics
    real* dresidual = nullptr;       // (N, C), training, as the next ones
    real* dnorm = nullptr;           // (N, C)
    real* dhidden = nullptr;         // (kBackwardRows, mlp_dim)
    real* dqkv = nullptr;            // (N, 3, H, D)
    float* dlag_bias = nullptr;      // (H, T)
    float* workspace = nullptr;
    DeviceArray<int32_t> tokens, targets;  // (N), (R)
    bool reads_last = false;               // of a classifier
    DeviceArray<float> rotary_memory;
    RoundedWeights weights;
    RotaryTable rotary;
    int64_t rotary_T = 0;                     // the length that the rotary table is made for; 0: none yet
    OpTimes* op_times = nullptr;              // if not nullptr, each op's time is added there, and every op waited for
    DeviceArray<AttentionSkipping> skipping;  // one: of all attention calls since evaluate_batch began, added up
    TrainingGraph training;
};

// The tiles of attention since the last evaluate_batch began.
AttentionSkipping attention_skipping(const Activations& acts);

struct ActivationSizes {
    int64_t activation_floats = 0, workspace_floats = 0, table_floats = 0;
};
ActivationSizes activation_sizes(const ModelShape& shape, int64_t B, int64_t T, Mode mode, bool with_stats);

// The rotary table of a model for T positions, in rotary_floats(shape, T) floats of device memory.
int64_t rotary_floats(const ModelShape& shape, int64_t T);
RotaryTable make_rotary_table(const ModelShape& shape, float* memory, int64_t T);

// The arithmetic of a batch of B sequences of T tokens, a multiply-add counted as two operations: 2 per weight and
// token in the dense layers and 4 D per pair of tokens in attention; in training, forward and backward, 6 and 14 D.
double forward_flops(const ModelShape& shape, int64_t B, int64_t T);
double training_flops(const ModelShape& shape, int64_t B, int64_t T);

// Errors: no memory, saying how much was wanted.
Activations make_activations(const ModelShape& shape, int64_t B, int64_t T, Mode mode, bool with_stats);

// What a forward pass over one batch says. Means are over all rows of the batch.
struct BatchResult {
    double loss = 0;            // mean cross-entropy in nats over the scored targets
    std::vector<float> losses;  // (B, T), every position, scored or not; of a classifier (B)
    std::vector<float> logits;  // (B, classes), of a classifier only
    double logit_std = 0;       // sample standard deviation (n - 1) of all logits of the scored rows
    double logit_abs_max = 0;   // their largest magnitude
    // The last block's attention rows (over all heads; of a classifier those of the last positions), if the activations
    // were made with statistics:
    std::optional<double> entropy;            // in nats
    std::optional<double> effective_support;  // mean of exp(entropy), in tokens
    std::optional<double> mean_lag;           // in tokens
    double skipped = 0;                       // share of attention's tiles that were skipped, over all blocks
};

// tokens, targets: (B, T). Scores the last `scored` targets of each sequence (T: all of them). Of a classifier targets
// are (B), and `scored` does not count.
BatchResult evaluate_batch(const Model& model, Activations& acts, std::span<const int32_t> tokens,
                           std::span<const int32_t> targets, int64_t B, int64_t T, int64_t scored);

// Forward and backward; gradients += loss_scale * d(mean loss of this batch) / d parameters. Returns the mean loss.
// tokens: (B, T); targets: (B, T), of a classifier (B).
double train_batch(const Model& model, Activations& acts, DeviceArray<float>& gradients,
                   std::span<const int32_t> tokens, std::span<const int32_t> targets, int64_t B, int64_t T,
                   double loss_scale);
// The same in two parts: the first only tells the device what to do, the second waits for it and returns the loss.
void start_train_batch(const Model& model, Activations& acts, DeviceArray<float>& gradients,
                       std::span<const int32_t> tokens, std::span<const int32_t> targets, int64_t B, int64_t T,
                       double loss_scale);
double finish_train_batch(const Activations& acts, int64_t B, int64_t T);

// The keys and values of one sequence that grows, so that a new token costs one row of the model. The total length is
// fixed ahead, because rotary tables depend on it: those of pi, ntk and yarn stretch with it.
struct KeyValueCache {
    int64_t T = 0;       // the total length
    int64_t length = 0;  // tokens so far
    DeviceArray<float> memory, workspace;
    RoundedWeights weights;
    std::vector<real*> keys, values;  // of each block, attention_cache_size(T, H, D) values
    std::vector<float*> lag_bias;     // of each block, (H, T); nullptr without a lag bias
    RotaryTable rotary;               // of T positions
    Activations acts;                 // of the tokens that came last
};

// An empty cache, its tables made. The model is no classifier. Errors: no memory, saying how much was wanted.
KeyValueCache make_key_value_cache(const Model& model, int64_t T);

// Appends tokens (at least 1, at most T - length) and returns the logits (V) of the last one. They are those of a
// forward pass over the whole sequence with the tables of length T. The first tokens of a sequence go through the
// model together; later ones one row of attention at a time. Errors: no memory, saying how much was wanted.
std::vector<float> extend_sequence(const Model& model, KeyValueCache& cache, std::span<const int32_t> tokens);

// The first tensor, in the order of computation, that holds a NaN or an infinity after train_batch on a batch of
// B x T: "parameter NAME", "activation NAME" or "gradient NAME"; "" if there is none.
std::string first_nonfinite_tensor(const Model& model, const Activations& acts, const DeviceArray<float>* gradients,
                                   int64_t B, int64_t T);

}  // namespace jetlag
