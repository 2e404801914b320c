// The contract of every op. A backend (kernels/cpu/, kernels/cuda/) implements all of them; which one a program has is
// decided when linking.
//
// Pointers are device memory of the backend (for the CPU: plain memory), contiguous, float32 or `real` (real.h: what
// activations and the operands of matrix products are kept in; float32 on the CPU); sums are in float32 or better.
// Workspaces are aligned as device_alloc aligns. Shapes:
// B batch, T tokens, N = B T rows, C channels, OC output channels, H heads, D = C / H head dim, V vocabulary, P rotary
// pairs.
//
// Gradients of parameters accumulate (+=). Gradients of activations are assigned (=), except into the residual
// stream, where an op says so. Every op is deterministic: the result is a function of its inputs, the build and
// the SIMD target, not of the number of threads. Sizes are checked by the models; an op does not check them again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/position/module.h"
#include "kernels/real.h"

namespace jetlag {

// ---------------------------------------------------------------------------------------------------------------
// Memory and machine

void* device_alloc(size_t bytes);  // zeroed, aligned for any vector; throws std::bad_alloc
void device_free(void* memory);
void device_zero(void* memory, size_t bytes);
void copy_to_device(void* device, const void* host, size_t bytes);
void copy_to_host(void* host, const void* device, size_t bytes);  // waits for the ops that come before
void device_wait();  // until all ops are done that were called; those of a CPU are done when they return

// Owned device memory. Empty arrays have data == nullptr.
template <typename T>
struct DeviceArray {
    T* data = nullptr;
    int64_t size = 0;

    DeviceArray() = default;
    explicit DeviceArray(int64_t n) : size(n) {
        if (n > 0) data = static_cast<T*>(device_alloc(static_cast<size_t>(n) * sizeof(T)));
    }
    DeviceArray(DeviceArray&& other) noexcept
        : data(std::exchange(other.data, nullptr)), size(std::exchange(other.size, 0)) {}
    DeviceArray& operator=(DeviceArray&& other) noexcept {
        std::swap(data, other.data);
        std::swap(size, other.size);
        return *this;
    }
    ~DeviceArray() {
        if (data != nullptr) device_free(data);
    }
    size_t bytes() const { return static_cast<size_t>(size) * sizeof(T); }
};

// Ops that are called again and again with the same arguments. A GPU gets them as one graph, instead of hundreds of
// launches for each of which it might wait.
struct Graph {
    int64_t runs = 0;
    std::shared_ptr<void> captured;  // the backend's own
};
// Does what `ops` does, which is the same each time, waits for nothing and reads nothing on the host. It is called the
// first time (when the ops get their scratch memory), and to capture the graph; later the graph is replayed. A CPU
// calls it every time.
void run_graph(Graph& graph, const std::function<void()>& ops);

const char* backend_name();        // "cpu", "cuda", "emu"
const char* simd_target_name();    // "AVX3", "AVX2", "NEON", ...: what run-time dispatch chose; of a GPU its name
int thread_count();                // threads of the host that a large op uses
double measure_peak_flops();       // float32 multiply-adds on all threads, in FLOP/s; takes about 50 ms
void set_thread_count(int count);  // at least 1

// The rows of a batch that a forward pass takes through all ops at a time. A CPU takes 1024 for each thread: what a row
// needs between two attentions, nine times C floats, then stays in the second-level cache, and results do not depend on
// it. The sums of a GPU's matrix products may, so that there it is constant.
int64_t forward_rows();

// The same for each vector width that the CPU has, widest first: the SIMD target's name and FLOP/s. A GPU has one.
std::vector<std::pair<const char*, double>> measure_peaks();
// Bytes read and written per second when all threads copy arrays of `bytes` bytes each way.
double measure_copy_bandwidth(size_t bytes);

// ---------------------------------------------------------------------------------------------------------------
// Position tables

// Cosines and sines of each position and pair, with the gains multiplied in, and the shear coordinate of each
// position. Pair p holds the channels (2p, 2p+1) of a head; channels from 2P on are left alone.
struct RotaryTable {
    int64_t pairs = 0;           // P <= D/2; 0: no rotation, all pointers null
    float* query_cos = nullptr;  // (T, P)
    float* query_sin = nullptr;  // (T, P)
    float* key_cos = nullptr;    // (T, P)
    float* key_sin = nullptr;    // (T, P)
    float* shear = nullptr;      // (T) or nullptr
};

// Fills a table of T positions, computed in double. table.shear is filled if it is not nullptr.
void rotary_table(const RotaryTable& table, const RotarySpec& spec, int64_t T);

// table: (H, T), entry [h][d] = bias of lag d in head h, computed in double; 0 without a module. With a strict mask
// entry [h][0] is -infinity.
void lag_bias_table(float* table, const LagBiasSpec& spec, const float* parameters, int64_t T);

// dparameters += the gradient that dtable (H, T) means for the module's parameters; sums in double, fixed order. With
// a strict mask lag 0 has none. The spec has a module.
void lag_bias_table_backward(float* dparameters, const float* dtable, const LagBiasSpec& spec, const float* parameters,
                             int64_t T);

// ---------------------------------------------------------------------------------------------------------------
// Attention

// Figures of the attention rows, exact for every row; (B, H, T) each. Row t attends keys 0..t with weights p.
struct AttentionRowStats {
    float* entropy;   // -sum p ln p, in nats; 0 for a row without a key
    float* mean_lag;  // sum p d, in tokens; 0 for a row without a key
};

// Counts of attention's tiles of scores. Where the lag bias makes all weights of a tile together smaller than half a
// unit in the last place of the row's sum, it may be skipped; results stay the same to the rounding of a tensor.
struct AttentionSkipping {
    int64_t tiles = 0, skipped = 0;
};

// What of a call its caller needs; a backend may do the rest all the same.
struct AttentionScope {
    // Forward: out, lse and stats of the rows before it need not be written. Backward, after a forward pass of the same
    // scope: dout of the rows before it is 0.
    int64_t first_row = 0;
    // false: queries and keys are all 0, so that scores are the lag bias alone; they need not be read, nor their
    // gradients written.
    bool has_content = true;
};

inline constexpr int64_t kMaxHeadDim = 256;

// Causal attention, diagonal included; D is at most kMaxHeadDim:
//     score(i, j) = q_i . k_j / sqrt(D) + lag_bias[h][i - j],   out_i = sum_j softmax_j(score) v_j
// with q and k sheared and rotated by the rotary table first. Nothing of size T x T is ever held. A lag-bias
// entry may be -infinity; a row whose entries all are has no key, and its output and gradients are 0.
//     out: (B, T, H, D)   lse: (B, H, T), ln sum_j exp(score), -infinity for a row without a key
//     qkv: (B, T, 3, H, D)   lag_bias: (H, T) or nullptr   stats: nullptr if not wanted
//     workspace: attention_workspace_floats(B, T, H, D) floats, for forward and backward alike
//     skipping: in device memory, += the tiles of this call; nullptr: nothing is skipped
void attention_forward(real* out, float* lse, const AttentionRowStats* stats, const real* qkv,
                       const RotaryTable& rotary, const float* lag_bias, float* workspace, int64_t B, int64_t T,
                       int64_t H, int64_t D, AttentionSkipping* skipping = nullptr, const AttentionScope& scope = {});

//     dqkv: (B, T, 3, H, D) =   dlag_bias: (H, T) =, sums of dscore along diagonals, nullptr exactly if lag_bias is
//     dout, out: (B, T, H, D)
void attention_backward(real* dqkv, float* dlag_bias, const real* dout, const real* qkv, const real* out,
                        const float* lse, const RotaryTable& rotary, const float* lag_bias, float* workspace, int64_t B,
                        int64_t T, int64_t H, int64_t D, AttentionSkipping* skipping = nullptr,
                        const AttentionScope& scope = {});

int64_t attention_workspace_floats(int64_t B, int64_t T, int64_t H, int64_t D, bool forward_only = false);

// The same without a lag bias, statistics and skipping, through cuDNN. Only where kHasCudnn says so (the Makefile's
// CUDNN), and for a D that is a multiple of 8 and at most kMaxCudnnHeadDim. The first call of a shape makes a plan;
// backward holds B H T T values of `real` beside the workspace.
#ifdef JETLAG_CUDNN
inline constexpr bool kHasCudnn = true;
#else
inline constexpr bool kHasCudnn = false;
#endif
inline constexpr int64_t kMaxCudnnHeadDim = 128;
void attention_cudnn_forward(real* out, float* lse, const real* qkv, const RotaryTable& rotary, float* workspace,
                             int64_t B, int64_t T, int64_t H, int64_t D);
void attention_cudnn_backward(real* dqkv, const real* dout, const real* qkv, const real* out, const float* lse,
                              const RotaryTable& rotary, float* workspace, int64_t B, int64_t T, int64_t H, int64_t D);

// Attention of one sequence that grows to at most T tokens, for which keys and values are kept: two caches, each of
// attention_cache_size(T, H, D) values in an order of the backend's own. rotary: a table of T positions.
//
// Keeps the sheared and rotated keys, and the values, of the positions first .. first + rows - 1.
//     qkv: (rows, 3, H, D)
void attention_cache(real* key_cache, real* value_cache, const real* qkv, const RotaryTable& rotary, int64_t first,
                     int64_t rows, int64_t T, int64_t H, int64_t D);
int64_t attention_cache_size(int64_t T, int64_t H, int64_t D);

// The row `position` of attention_forward, over the positions 0 .. position in the caches; costs O(position).
//     out: (H, D)   qkv: (3, H, D), of which q is read   lag_bias: (H, T) or nullptr
//     workspace: attention_decode_workspace_floats(T, H, D) floats
void attention_decode(real* out, const real* qkv, const real* key_cache, const real* value_cache,
                      const RotaryTable& rotary, const float* lag_bias, float* workspace, int64_t position, int64_t T,
                      int64_t H, int64_t D);
int64_t attention_decode_workspace_floats(int64_t T, int64_t H, int64_t D);

// ---------------------------------------------------------------------------------------------------------------
// The other layers

// out: (N, C) = rows of weight (V, C); tokens: (N), each in [0, V).
void embedding_forward(real* out, const float* weight, const int32_t* tokens, int64_t N, int64_t C);
// dweight: (V, C) +=, the rows of dout (N, C) with the same token summed in the order of n.
void embedding_backward(float* dweight, const real* dout, const int32_t* tokens, int64_t N, int64_t V, int64_t C);

// LayerNorm over C with eps 1e-5. out: (N, C); mean, rstd: (N); weight, bias: (C).
void layernorm_forward(real* out, float* mean, float* rstd, const real* inp, const float* weight, const float* bias,
                       int64_t N, int64_t C);
// sum = a + b (N, C), and of it what layernorm_forward makes, with the same bits, in one pass; sum may be a.
void residual_layernorm_forward(real* sum, real* out, float* mean, float* rstd, const real* a, const real* b,
                                const float* weight, const float* bias, int64_t N, int64_t C);
// dinp: (N, C) += (the residual stream); dweight, dbias: (C) +=. workspace: layernorm_workspace_floats(N, C).
void layernorm_backward(real* dinp, float* dweight, float* dbias, const real* dout, const real* inp,
                        const float* weight, const float* mean, const float* rstd, float* workspace, int64_t N,
                        int64_t C);
int64_t layernorm_workspace_floats(int64_t N, int64_t C);

// out: (N, OC) = inp (N, C) weight^T + bias; weight: (OC, C), bias: (OC). Where `real` is not float, both are rounded
// copies of parameters.
void linear_forward(real* out, const real* inp, const real* weight, const real* bias, int64_t N, int64_t C, int64_t OC);
// The same for one row, out: (OC), inp: (C). It reads the weight as it is, which pays where there is one row only; sums
// are in another order than those of linear_forward.
void linear_forward_row(real* out, const real* inp, const real* weight, const real* bias, int64_t C, int64_t OC);
// dinp: (N, C) =, nullptr if not wanted; dweight: (OC, C) +=; dbias: (OC) +=; dout: (N, OC).
// workspace: linear_workspace_floats(N, C, OC).
void linear_backward(real* dinp, float* dweight, float* dbias, const real* dout, const real* inp, const real* weight,
                     float* workspace, int64_t N, int64_t C, int64_t OC);
int64_t linear_workspace_floats(int64_t N, int64_t C, int64_t OC);

// out = x, rounded to nearest. Like the other ops on bf16, only in backends that have it: kernels/cuda/.
void round_to_bf16(bf16* out, const float* x, int64_t n);

// Exact GELU, x/2 (1 + erf(x / sqrt 2)), of n values; out may be inp.
void gelu_forward(real* out, const real* inp, int64_t n);
// dinp = dout * gelu'(inp); dinp may be dout.
void gelu_backward(real* dinp, const real* dout, const real* inp, int64_t n);

// Row n of inp, at inp + n * inp_stride, becomes row n of out; C values each. out and inp do not overlap.
void copy_rows(real* out, int64_t out_stride, const real* inp, int64_t inp_stride, int64_t rows, int64_t C);

// out = a + b; out may be a.
void residual_forward(real* out, const real* a, const real* b, int64_t n);

// Softmax cross-entropy of logits (N, V) with targets (N) in [0, V): losses (N) in nats, and, if dlogits is not
// nullptr, dlogits = scale * (softmax - onehot). dlogits may be logits.
void cross_entropy(float* losses, real* dlogits, const real* logits, const int32_t* targets, float scale, int64_t N,
                   int64_t V);

// ---------------------------------------------------------------------------------------------------------------
// Reductions (results on the host) and the optimizer

struct Moments {
    double sum = 0;
    double sum_of_squares = 0;
    double largest = 0;  // largest magnitude
};
// Sums in double, fixed order.
Moments moments(const float* x, int64_t n);
Moments moments(const bf16* x, int64_t n);

// norm: in device memory, the square root of the sum of squares; the device need not be waited for.
void euclidean_norm(double* norm, const float* x, int64_t n);

// The position of the first value that is NaN or infinite, or -1.
int64_t first_nonfinite(const float* x, int64_t n);
int64_t first_nonfinite(const bf16* x, int64_t n);

// AdamW (Loshchilov and Hutter 2019) with PyTorch's arithmetic. Gradients are multiplied by grad_scale first.
struct AdamW {
    double lr, beta1, beta2, eps, weight_decay, grad_scale;
    const double* norm = nullptr;  // in device memory, or nullptr; if it is not finite, nothing changes,
    double max_norm = 0;           // and if it is larger than this (0: no limit), gradients shrink to it
};
// One step, numbered from 1, on n parameters with their moments m and v. Where takes_part is 0 nothing changes.
void adamw(float* parameters, float* m, float* v, const float* gradients, const uint8_t* takes_part,
           const AdamW& settings, int64_t step, int64_t n);

}  // namespace jetlag
