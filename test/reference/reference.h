// The yardstick: the whole model in double precision, loops only. Nothing here is fast and nothing is shared with
// kernels/ or models/, so that an error would have to be made twice to go unseen. Arrays are row-major; shapes stand
// beside each argument: B batch, T tokens, C channels, H heads, D head dim, V vocabulary, N rows, L training length,
// R highest jet order, F frequencies per head, P rotary pairs.
//
// Parameter gradients accumulate (+=); gradients with respect to activations are returned. A vector of the wrong size
// is an Error that names the argument.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace jetlag::reference {

using Vector = std::vector<double>;
using Tensors = std::map<std::string, Vector>;

// ---- Ops without position -----------------------------------------------------------------------------------------

// Row tokens[n] of the weight for every n. weight: (V, C), tokens: (N) -> (N, C).
Vector embedding_forward(const Vector& weight, const std::vector<int32_t>& tokens, int64_t C);
// dout: (N, C), dweight: (V, C).
void embedding_backward(const Vector& dout, const std::vector<int32_t>& tokens, int64_t C, Vector& dweight);

inline constexpr double kLayerNormEpsilon = 1e-5;

// (x - mean) / sqrt(variance + eps) * weight + bias over the last dimension, with the biased variance.
// x: (N, C), weight, bias: (C) -> (N, C).
Vector layernorm_forward(const Vector& x, const Vector& weight, const Vector& bias);
// dout: (N, C), x: the input of the forward pass -> dx: (N, C).
Vector layernorm_backward(const Vector& dout, const Vector& x, const Vector& weight, Vector& dweight, Vector& dbias);

// x W^T + bias. x: (N, I), weight: (O, I), bias: (O) -> (N, O).
Vector linear_forward(const Vector& x, const Vector& weight, const Vector& bias);
// dout: (N, O) -> dx: (N, I).
Vector linear_backward(const Vector& dout, const Vector& x, const Vector& weight, Vector& dweight, Vector& dbias);

// x Phi(x), with Phi the normal distribution function (through erf; not the tanh approximation).
Vector gelu_forward(const Vector& x);
Vector gelu_backward(const Vector& dout, const Vector& x);

struct CrossEntropy {
    double loss;     // mean over the rows
    Vector losses;   // (N), -log softmax(logits)[target]
    Vector dlogits;  // (N, V), gradient of the mean
};
// logits: (N, V), targets: (N).
CrossEntropy cross_entropy(const Vector& logits, const std::vector<int32_t>& targets);

// Decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101, Algorithm 2) as torch.optim.AdamW applies it:
// decay by lr * weight_decay first, then the bias-corrected step with eps outside the square root.
struct AdamWSettings {
    double lr = 3e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 1e-4;
};
// step counts from 1. All vectors have the parameter's size.
void adamw_step(const AdamWSettings& settings, int64_t step, Vector& parameter, const Vector& gradient,
                Vector& first_moment, Vector& second_moment);

// ---- Rotary tables ------------------------------------------------------------------------------------------------

enum class Rotary { kNone, kRope, kPi, kNtk, kYarn, kJordan };

struct RotarySettings {
    Rotary kind = Rotary::kNone;
    double base = 10000;
    double jordan_eta = 1;
};

// Position t turns pair p, channels (2p, 2p+1), by the angle whose cosine and sine stand at [t][p], gains multiplied
// in; channels from 2P on are left alone. With a shear (Jordan blocks) pairs 2b and 2b+1 are the complex channels z0
// and z1 of block b; before turning, queries take z0 <- z0 + c z1 and keys z1 <- z1 - c z0 with c = shear[t].
struct RotaryTable {
    int64_t pairs = 0;                // P <= D/2; 0: the identity
    Vector query_cosine, query_sine;  // (T, P)
    Vector key_cosine, key_sine;      // (T, P)
    Vector shear;                     // (T), or empty
};

// The table, with P = D/2, of a sequence of T tokens for a model trained at L. Errors: D odd; Jordan: D no multiple of
// 4; NTK: D = 2.
RotaryTable rotary_table(const RotarySettings& settings, int64_t L, int64_t T, int64_t D);

// q or k of one batch element and head, (T, D) -> (T, D); and the transposed maps, for gradients.
Vector rotate_queries(const RotaryTable& table, const Vector& q, int64_t D);
Vector rotate_keys(const RotaryTable& table, const Vector& k, int64_t D);
Vector rotate_queries_backward(const RotaryTable& table, const Vector& drotated, int64_t D);
Vector rotate_keys_backward(const RotaryTable& table, const Vector& drotated, int64_t D);

// ---- Lag-bias tables ----------------------------------------------------------------------------------------------

// The lag bias of PJ. With u = d/L, g the softmax of the gate logits over the enabled sectors and alpha the softmax
// over jet orders:
//   bias(d)   = g_FJ FJ(d) + g_aff affine(d) + g_LC LC(d) + b0
//   FJ(d)     = e^(-c u) sum_r alpha_r u^r / r! S_r(d)
//   affine(d) = -s u
//   LC(d)     = e^(-lambda asinh u) sum_r alpha_r beta^r S_r(L asinh u),   beta = u / sqrt(u^2 + 1)
//   S_r(x)    = sum_m zeta_re[m][r] cos(omega_m x) - zeta_im[m][r] sin(omega_m x)
// b0, lambda and more than one frequency are the options of the paper's Definition 1; b0 and lambda are 0 without.
struct LagBiasSettings {
    bool fj = false, affine = false, lc = false;  // the enabled sectors
    int64_t max_order = 3;                        // R
    int64_t frequencies = 1;                      // F
    bool constant = false;                        // b0
    bool lc_damping = false;                      // lambda = softplus(raw_lc_damping)
};

bool has_any_sector(const LagBiasSettings& settings);

// Every tensor of one instance and its shape: omega (H, F), gate_logits (H, 3; FJ, affine, LC), fj_alpha_logits and
// lc_alpha_logits (H, R+1), fj_zeta_re, fj_zeta_im, lc_zeta_re, lc_zeta_im (H, F, R+1), raw_fj_damping and
// raw_affine_slope (H); b0 and raw_lc_damping (H) with their options. At F = 1 the dimension F is dropped.
std::map<std::string, std::vector<int64_t>> lag_bias_shapes(const LagBiasSettings& settings, int64_t H);

// Whether the optimizer updates the tensor of that name (without prefix). Gate logits and b0 always take part.
bool lag_bias_takes_part(const LagBiasSettings& settings, const std::string& tensor);

// Initial values; the zetas, which are drawn at random, are 0. gate_init: "affine", "fj" or "lc".
Tensors initial_lag_bias(const LagBiasSettings& settings, int64_t H, int64_t L, double init_affine_slope = 2.0,
                         const std::string& gate_init = "affine");

// -> (H, T): entry [h][d] is added to the scores of head h with i - j = d.
Vector lag_bias_table(const LagBiasSettings& settings, const Tensors& parameters, int64_t H, int64_t L, int64_t T);
// dtable: (H, T). `gradients` holds every tensor of lag_bias_shapes.
void lag_bias_backward(const LagBiasSettings& settings, const Tensors& parameters, int64_t H, int64_t L, int64_t T,
                       const Vector& dtable, Tensors& gradients);

// -slope_h d -> (H, T). Slopes (H): 2^(-8(h+1)/H); for H no power of two, with n the power of two below H, the n slopes
// of n heads and then every other slope of 2n heads, from the first (Press et al., arXiv:2108.12409).
Vector alibi_slopes(int64_t H);
Vector alibi_table(int64_t H, int64_t T);

// ---- Attention ----------------------------------------------------------------------------------------------------

struct Attention {
    Vector out;       // (T, D)
    Vector lse;       // (T), log of the sum of exp(score); -inf for a row without any key
    Vector entropy;   // (T), in nats; its exp is the effective support
    Vector mean_lag;  // (T), sum over j of probability * (i - j)
};
// One batch element and head: row i attends to j <= i with score scale * q_i . k_j + lag_bias[i - j]. q, k, v: (T, D);
// lag_bias: (T) or empty, entries may be -inf. A row whose keys are all masked gives zeros.
Attention attention_forward(const Vector& q, const Vector& k, const Vector& v, const Vector& lag_bias, int64_t D,
                            double scale);

struct AttentionGradients {
    Vector dq, dk, dv;  // (T, D)
    Vector dlag_bias;   // (T), sums of the scores' gradient along diagonals (also without a lag_bias)
};
// dout: (T, D).
AttentionGradients attention_backward(const Vector& dout, const Vector& q, const Vector& k, const Vector& v,
                                      const Vector& lag_bias, int64_t D, double scale);

// All batch elements and heads, queries and keys rotated first, scale 1/sqrt(D).
struct AttentionLayer {
    Vector out;                     // (B, T, H, D)
    Vector lse, entropy, mean_lag;  // (B, H, T), as in Attention
};
// qkv: (B, T, 3, H, D); lag_bias: (H, T) or empty.
AttentionLayer attention_layer_forward(const Vector& qkv, const RotaryTable& rotary, const Vector& lag_bias, int64_t B,
                                       int64_t T, int64_t H, int64_t D);

struct AttentionLayerGradients {
    Vector dqkv;       // (B, T, 3, H, D)
    Vector dlag_bias;  // (H, T), also without a lag_bias
};
// dout: (B, T, H, D).
AttentionLayerGradients attention_layer_backward(const Vector& dout, const Vector& qkv, const RotaryTable& rotary,
                                                 const Vector& lag_bias, int64_t B, int64_t T, int64_t H, int64_t D);

// ---- The model ----------------------------------------------------------------------------------------------------

struct ModelSettings {
    int64_t layers = 2;
    int64_t embed_dim = 96;  // C
    int64_t heads = 4;       // H
    int64_t mlp_ratio = 2;
    int64_t vocab = 256;       // V
    int64_t train_len = 1024;  // L
    RotarySettings rotary = {};
    LagBiasSettings lag_bias = {};
    bool alibi = false;        // the fixed table instead of a learned one
    bool strict_mask = false;  // a position attends earlier ones only; the first attends nothing
    int64_t classes = 0;  // 0: V logits at every position; otherwise so many, at the last position of each sequence
};

// The 18 published names, and the settings with the position method of that name. Errors: a name not among them.
const std::vector<std::string>& method_names();
ModelSettings with_method(ModelSettings settings, const std::string& name);

// Every parameter under its published name, and its shape.
std::map<std::string, std::vector<int64_t>> parameter_shapes(const ModelSettings& settings);

// Whether the optimizer updates the parameter of that full name.
bool parameter_takes_part(const ModelSettings& settings, const std::string& name);

struct ModelOutput {
    Vector logits;      // (B, T, V); with classes (B, classes)
    Vector entropy;     // (B, H, T), of the last layer's attention rows
    Vector mean_lag;    // (B, H, T)
    double loss = 0;    // mean cross-entropy; 0 without targets
    Tensors gradients;  // of the loss, one for each parameter; only from model_gradients
};
// tokens: (B, T).
ModelOutput model_forward(const ModelSettings& settings, const Tensors& parameters, const std::vector<int32_t>& tokens,
                          int64_t B, int64_t T);
// tokens: (B, T); targets: (B, T), with classes (B). model_loss is model_forward with the loss.
ModelOutput model_loss(const ModelSettings& settings, const Tensors& parameters, const std::vector<int32_t>& tokens,
                       const std::vector<int32_t>& targets, int64_t B, int64_t T);
ModelOutput model_gradients(const ModelSettings& settings, const Tensors& parameters,
                            const std::vector<int32_t>& tokens, const std::vector<int32_t>& targets, int64_t B,
                            int64_t T);

// ---- Helpers ------------------------------------------------------------------------------------------------------

int64_t element_count(const std::vector<int64_t>& shape);

// Fails unless the vector has `wanted` elements.
void check_size(const Vector& values, int64_t wanted, const char* name);

}  // namespace jetlag::reference
