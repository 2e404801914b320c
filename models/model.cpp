#include "models/model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <utility>

#include "src/error.h"

namespace jetlag {

// The head and its loss are computed for this many rows at a time: logits are four times as wide as the residual
// stream and are never needed twice.
static constexpr int64_t kHeadRows = 2048;

// Rows of a chunk of the backward pass. It cuts sums over rows, so that it must not depend on the threads.
static constexpr int64_t kBackwardRows = 8192;

// ---------------------------------------------------------------------------------------------------------------
// What a shape means

static bool is_classifier(const ModelShape& s) {
    return s.classes > 0;
}
// Values that the head gives for a row.
static int64_t head_width(const ModelShape& s) {
    return is_classifier(s) ? s.classes : s.vocab;
}
// Rows that the head reads.
static int64_t head_rows(const ModelShape& s, int64_t B, int64_t T) {
    return is_classifier(s) ? B : B * T;
}
// Whether attention reads a table of lags: a bias, or a mask.
static bool has_lag_table(const ModelShape& s) {
    return s.lag_bias.module != nullptr || s.lag_bias.strict_mask;
}

// ---------------------------------------------------------------------------------------------------------------
// Parameters

// So many values, and what keeps those behind them aligned.
static int64_t aligned(int64_t n) {
    return (n + 63) / 64 * 64;
}

static int64_t product(const std::vector<int64_t>& shape) {
    int64_t size = 1;
    for (int64_t n : shape) size *= n;
    return size;
}

static void add_norm(std::vector<ParameterInfo>& layout, const std::string& name, int64_t C) {
    ParameterInfo weight, bias;
    weight.name = name + ".weight";
    bias.name = name + ".bias";
    weight.shape = bias.shape = {C};
    weight.initial.assign(static_cast<size_t>(C), 1.0f);
    bias.initial.assign(static_cast<size_t>(C), 0.0f);
    layout.push_back(weight);
    layout.push_back(bias);
}

static void add_linear(std::vector<ParameterInfo>& layout, const std::string& name, int64_t OC, int64_t C) {
    ParameterInfo weight, bias;
    weight.name = name + ".weight";
    bias.name = name + ".bias";
    weight.shape = {OC, C};
    bias.shape = {OC};
    weight.uniform_bound = bias.uniform_bound = 1 / std::sqrt(static_cast<double>(C));
    weight.rounded_at = bias.rounded_at = 0;  // in a copy; where is not known yet
    layout.push_back(weight);
    layout.push_back(bias);
}

static std::vector<ParameterInfo> make_layout(const ModelShape& shape) {
    const int64_t C = shape.embed_dim;
    std::vector<ParameterInfo> layout;
    ParameterInfo embedding;
    embedding.name = "embedding.weight";
    embedding.shape = {shape.vocab, C};
    embedding.normal_std = 1;
    layout.push_back(embedding);
    for (int64_t l = 0; l < shape.layers; l++) {
        const std::string block = "blocks." + std::to_string(l);
        add_norm(layout, block + ".norm1", C);
        add_norm(layout, block + ".norm2", C);
        add_linear(layout, block + ".attn.qkv", 3 * C, C);
        if (shape.freeze_qk) {
            layout[layout.size() - 2].frozen = 2 * C * C;
            layout[layout.size() - 1].frozen = 2 * C;
        }
        add_linear(layout, block + ".attn.out_proj", C, C);
        if (shape.lag_bias.module != nullptr)
            for (const BiasParameter& parameter : shape.lag_bias.module->parameters(shape.lag_bias)) {
                ParameterInfo info;
                info.name = block + ".attn." + shape.lag_bias.module->state_name + "." + parameter.name;
                info.shape = parameter.shape;
                info.takes_part = parameter.takes_part;
                info.is_lag_bias = true;
                info.initial = parameter.initial;
                info.normal_std = parameter.normal_std;
                layout.push_back(info);
            }
        add_linear(layout, block + ".mlp.0", shape.mlp_dim, C);
        add_linear(layout, block + ".mlp.2", C, shape.mlp_dim);
    }
    add_norm(layout, "norm", C);
    add_linear(layout, "head", head_width(shape), C);
    int64_t offset = 0, rounded_at = 0;
    for (ParameterInfo& info : layout) {
        info.offset = offset;
        info.size = product(info.shape);
        offset += info.size;
        if (info.rounded_at < 0) continue;
        info.rounded_at = rounded_at;
        rounded_at += aligned(info.size);
    }
    return layout;
}

Model make_model(const ModelShape& shape) {
    Model model;
    model.shape = shape;
    model.layout = make_layout(shape);
    const int64_t count = model.layout.back().offset + model.layout.back().size;
    std::vector<uint8_t> mask;
    try {
        model.parameters = DeviceArray<float>(count);
        model.takes_part = DeviceArray<uint8_t>(count);
        mask.resize(static_cast<size_t>(count));
    } catch (const std::bad_alloc&) {
        fail("no memory for a model of {} parameters", count);
    }
    for (const ParameterInfo& info : model.layout) {
        std::fill_n(mask.begin() + info.offset, info.size, static_cast<uint8_t>(info.takes_part));
        std::fill_n(mask.begin() + info.offset, info.frozen, static_cast<uint8_t>(0));
    }
    copy_to_device(model.takes_part.data, mask.data(), mask.size());
    return model;
}

// The tensors in the order in which their initial values are drawn.
static std::vector<const ParameterInfo*> draw_order(const Model& model) {
    std::vector<const ParameterInfo*> order;
    int64_t before_qkv = 0;
    for (const ParameterInfo& info : model.layout) {
        if (info.name.ends_with(".attn.qkv.weight")) before_qkv = std::ssize(order);
        if (info.is_lag_bias && model.shape.lag_bias_drawn_first)
            order.insert(order.begin() + before_qkv++, &info);
        else
            order.push_back(&info);
    }
    return order;
}

void initialize_model(Model& model, TorchGenerator& generator) {
    std::vector<float> values(static_cast<size_t>(model.parameters.size));
    for (const ParameterInfo* drawn : draw_order(model)) {
        const ParameterInfo& info = *drawn;
        const std::span<float> out(values.data() + info.offset, static_cast<size_t>(info.size));
        if (info.normal_std != 0) {
            fill_normal(generator, out);
            for (float& x : out) x *= static_cast<float>(info.normal_std);
        } else if (info.uniform_bound != 0) {
            const float bound = static_cast<float>(info.uniform_bound);
            fill_uniform(generator, -bound, bound, out);
        } else {
            std::copy(info.initial.begin(), info.initial.end(), out.begin());
        }
        std::fill_n(out.begin(), info.frozen, 0.0f);
    }
    copy_to_device(model.parameters.data, values.data(), model.parameters.bytes());
}

// Where the tensors of one block are in an array laid out like the parameters (the parameters, or the gradients).
struct BlockTensors {
    float *norm1_weight, *norm1_bias, *norm2_weight, *norm2_bias, *qkv_weight, *qkv_bias, *out_proj_weight,
        *out_proj_bias, *lag_bias, *mlp0_weight, *mlp0_bias, *mlp2_weight, *mlp2_bias;
};
struct ModelTensors {
    float* embedding;
    std::vector<BlockTensors> blocks;
    float *norm_weight, *norm_bias, *head_weight, *head_bias;
};

static ModelTensors locate(const Model& model, float* base) {
    const size_t bias_tensors = model.shape.lag_bias.module == nullptr
                                    ? 0
                                    : model.shape.lag_bias.module->parameters(model.shape.lag_bias).size();
    size_t i = 0;
    const auto next = [&]() { return base + model.layout[i++].offset; };
    ModelTensors t;
    t.embedding = next();
    for (int64_t l = 0; l < model.shape.layers; l++) {
        BlockTensors b;
        b.norm1_weight = next();
        b.norm1_bias = next();
        b.norm2_weight = next();
        b.norm2_bias = next();
        b.qkv_weight = next();
        b.qkv_bias = next();
        b.out_proj_weight = next();
        b.out_proj_bias = next();
        b.lag_bias = bias_tensors > 0 ? base + model.layout[i].offset : nullptr;
        i += bias_tensors;
        b.mlp0_weight = next();
        b.mlp0_bias = next();
        b.mlp2_weight = next();
        b.mlp2_bias = next();
        t.blocks.push_back(b);
    }
    t.norm_weight = next();
    t.norm_bias = next();
    t.head_weight = next();
    t.head_bias = next();
    return t;
}

// The dense layers for matrix products.
struct Dense {
    const real *weight, *bias;
};
struct BlockDense {
    Dense qkv, out_proj, mlp0, mlp2;
};
struct ModelDense {
    std::vector<BlockDense> blocks;
    Dense head;
};

static ModelDense locate_dense(const Model& model, const RoundedWeights& weights) {
    size_t i = 0;
    const auto next = [&]() -> const real* {
        while (model.layout[i].rounded_at < 0) i++;
        const ParameterInfo& info = model.layout[i++];
        if (kHalfPrecision) return weights.memory.data + info.rounded_at;
        return reinterpret_cast<const real*>(model.parameters.data + info.offset);
    };
    const auto next_dense = [&]() -> Dense {
        const real* weight = next();
        return {weight, next()};
    };
    ModelDense dense;
    for (int64_t l = 0; l < model.shape.layers; l++) {
        BlockDense block;
        for (Dense* layer : {&block.qkv, &block.out_proj, &block.mlp0, &block.mlp2}) *layer = next_dense();
        dense.blocks.push_back(block);
    }
    dense.head = next_dense();
    return dense;
}

static int64_t rounded_values(const std::vector<ParameterInfo>& layout) {
    int64_t values = 0;
    if (kHalfPrecision)
        for (const ParameterInfo& info : layout)
            if (info.rounded_at >= 0) values = info.rounded_at + aligned(info.size);
    return values;
}

// Makes the copies anew.
static void round_weights([[maybe_unused]] RoundedWeights& weights, [[maybe_unused]] const Model& model) {
#ifdef JETLAG_BF16
    for (const ParameterInfo& info : model.layout)
        if (info.rounded_at >= 0)
            round_to_bf16(weights.memory.data + info.rounded_at, model.parameters.data + info.offset, info.size);
#endif
}

std::vector<std::pair<std::string, double>> lag_bias_summary(const Model& model) {
    std::vector<std::pair<std::string, double>> mean;
    const LagBiasSpec& spec = model.shape.lag_bias;
    if (spec.module == nullptr) return mean;
    const int64_t count = bias_parameter_count(spec);
    std::vector<float> parameters(static_cast<size_t>(count));
    for (const BlockTensors& block : locate(model, model.parameters.data).blocks) {
        copy_to_host(parameters.data(), block.lag_bias, parameters.size() * sizeof(float));
        const auto figures = spec.module->summary(spec, parameters.data());
        if (mean.empty())
            for (const auto& figure : figures) mean.push_back({figure.first, 0});
        for (size_t i = 0; i < figures.size(); i++)
            mean[i].second += figures[i].second / static_cast<double>(model.shape.layers);
    }
    return mean;
}

// ---------------------------------------------------------------------------------------------------------------
// Activations

static int64_t workspace_floats(const ModelShape& s, int64_t B, int64_t T, Mode mode) {
    const int64_t N = B * T, C = s.embed_dim, rows = std::min(N, kBackwardRows);
    const int64_t R = head_rows(s, B, T), head = std::min(R, kHeadRows);
    if (mode == Mode::inference) return attention_workspace_floats(B, T, s.heads, s.head_dim, true);
    return std::max({attention_workspace_floats(B, T, s.heads, s.head_dim), layernorm_workspace_floats(N, C),
                     layernorm_workspace_floats(rows, C), linear_workspace_floats(N, C, 3 * C),
                     linear_workspace_floats(N, C, C), linear_workspace_floats(rows, C, s.mlp_dim),
                     linear_workspace_floats(rows, C, C), linear_workspace_floats(rows, s.mlp_dim, C),
                     layernorm_workspace_floats(R, C), linear_workspace_floats(R, C, C),
                     linear_workspace_floats(R, C, s.mlp_dim), linear_workspace_floats(R, s.mlp_dim, C),
                     linear_workspace_floats(head, C, head_width(s))});
}

// Hands out the arrays of `acts` from memory that starts at `base`, and returns how many floats they take; with
// base == nullptr it only counts.
static ActivationSizes place(Activations& acts, float* base, const ModelShape& s, int64_t B, int64_t T, Mode mode,
                             bool with_stats) {
    const bool backward = mode != Mode::inference, shared = mode != Mode::training;
    const int64_t N = B * T, R = head_rows(s, B, T), C = s.embed_dim;
    acts.chunk = std::min(N, forward_rows());
    const int64_t kept = backward ? N : acts.chunk;  // rows of what only backward reads again
    int64_t used = 0;
    const auto take = [&](int64_t n) {
        float* at = base != nullptr ? base + used : nullptr;
        used += (n + 15) / 16 * 16;
        return at;
    };
    const auto take_real = [&](int64_t n) {
        return reinterpret_cast<real*>(take((n * static_cast<int64_t>(sizeof(real)) + 3) / 4));
    };
    acts.residual.assign(static_cast<size_t>(s.layers + 1), nullptr);
    acts.blocks.assign(static_cast<size_t>(s.layers), {});
    for (size_t l = 0; l < acts.residual.size(); l++)
        acts.residual[l] = l == 0 || backward ? take_real(N * C) : acts.residual[0];
    for (size_t l = 0; l < acts.blocks.size(); l++) {
        BlockActivations& block = acts.blocks[l];
        if (l > 0 && shared) {
            block = acts.blocks[0];
            continue;
        }
        block.norm1 = take_real(kept * C);
        block.norm1_mean = take(N);
        block.norm1_rstd = take(N);
        block.qkv = take_real(N * 3 * C);
        block.attention = take_real(N * C);
        block.lse = take(N * s.heads);
        block.middle = backward ? take_real(N * C) : acts.residual[0];
        block.norm2 = backward ? take_real(N * C) : block.norm1;
        block.norm2_mean = take(N);
        block.norm2_rstd = take(N);
        block.hidden = take_real(kept * s.mlp_dim);
        block.gelu = backward ? take_real(N * s.mlp_dim) : block.hidden;
    }
    acts.projection = take_real(acts.chunk * C);
    if (is_classifier(s)) {
        acts.last_residual = take_real(B * C);
        acts.last_attention = take_real(B * C);
    }
    acts.norm = take_real(std::min(R, kHeadRows) * C);
    acts.norm_mean = take(R);
    acts.norm_rstd = take(R);
    acts.logits = take_real(std::min(R, kHeadRows) * head_width(s));
    acts.losses = take(R);
    if (with_stats) {
        acts.entropy = take(N * s.heads);
        acts.mean_lag = take(N * s.heads);
    }
    if (backward) {
        acts.dresidual = take_real(N * C);
        acts.dnorm = take_real(N * C);
        acts.dhidden = take_real(std::min(N, kBackwardRows) * s.mlp_dim);
        acts.dqkv = take_real(N * 3 * C);
    }
    ActivationSizes sizes;
    sizes.activation_floats = used;
    if (has_lag_table(s)) {
        for (size_t l = 0; l < acts.blocks.size(); l++)
            acts.blocks[l].lag_bias = l == 0 || !shared ? take(s.heads * T) : acts.blocks[0].lag_bias;
        if (backward) acts.dlag_bias = take(s.heads * T);
    }
    sizes.table_floats = used - sizes.activation_floats;
    acts.workspace = take(workspace_floats(s, B, T, mode));
    sizes.workspace_floats = used - sizes.activation_floats - sizes.table_floats;
    return sizes;
}

int64_t rotary_floats(const ModelShape& s, int64_t T) {
    if (s.rotary.module == nullptr) return 0;
    return T * (4 * (s.head_dim / 2) + (s.rotary.module->shear != nullptr ? 1 : 0));
}

ActivationSizes activation_sizes(const ModelShape& shape, int64_t B, int64_t T, Mode mode, bool with_stats) {
    Activations counted;
    ActivationSizes sizes = place(counted, nullptr, shape, B, T, mode, with_stats);
    sizes.table_floats += rotary_floats(shape, T);
    if (kHalfPrecision) sizes.table_floats += rounded_values(make_layout(shape)) / 2;
    return sizes;
}

static double batch_flops(const ModelShape& s, int64_t B, int64_t T, double per_weight, double per_channel) {
    const double C = static_cast<double>(s.embed_dim), mlp = static_cast<double>(s.mlp_dim);
    const double after_attention = C * C + 2 * C * mlp, layers = static_cast<double>(s.layers);
    const double tokens = static_cast<double>(B) * static_cast<double>(T),
                 pairs = tokens * static_cast<double>(T + 1) / 2, rows = static_cast<double>(head_rows(s, B, T));
    const double products = tokens * (layers * 3 * C * C + (layers - 1) * after_attention) +
                            rows * (after_attention + C * static_cast<double>(head_width(s)));
    return per_weight * products + layers * per_channel * C * pairs;
}

double forward_flops(const ModelShape& shape, int64_t B, int64_t T) {
    return batch_flops(shape, B, T, 2, 4);
}
double training_flops(const ModelShape& shape, int64_t B, int64_t T) {
    return batch_flops(shape, B, T, 6, 14);
}

static double mebibytes_of(const ActivationSizes& sizes) {
    return static_cast<double>(sizes.activation_floats + sizes.table_floats + sizes.workspace_floats) * 4 / 1048576;
}

// Throws std::bad_alloc.
static Activations allocate_activations(const ModelShape& shape, int64_t B, int64_t T, Mode mode, bool with_stats) {
    Activations acts;
    acts.mode = mode;
    acts.B = B;
    acts.T = T;
    const ActivationSizes sizes = place(acts, nullptr, shape, B, T, mode, with_stats);
    acts.memory = DeviceArray<float>(sizes.activation_floats + sizes.table_floats + sizes.workspace_floats);
    place(acts, acts.memory.data, shape, B, T, mode, with_stats);
    acts.tokens = DeviceArray<int32_t>(B * T);
    acts.targets = DeviceArray<int32_t>(head_rows(shape, B, T));
    acts.reads_last = is_classifier(shape);
    acts.skipping = DeviceArray<AttentionSkipping>(1);
    acts.rotary_memory = DeviceArray<float>(rotary_floats(shape, T));
    return acts;
}

Activations make_activations(const ModelShape& shape, int64_t B, int64_t T, Mode mode, bool with_stats) try {
    Activations acts = allocate_activations(shape, B, T, mode, with_stats);
    acts.weights.memory = DeviceArray<real>(rounded_values(make_layout(shape)));
    return acts;
} catch (const std::bad_alloc&) {
    fail(
        "no memory for a batch of {} x {} tokens: {:.0f} MiB wanted (fewer sequences at a time need less: "
        "train.accumulate, eval.batch; train.batch of the bridge)",
        B, T, mebibytes_of(activation_sizes(shape, B, T, mode, with_stats)));
}

RotaryTable make_rotary_table(const ModelShape& s, float* memory, int64_t T) {
    RotaryTable table;
    if (s.rotary.module == nullptr) return table;
    table.pairs = s.head_dim / 2;
    for (float** part : {&table.query_cos, &table.query_sin, &table.key_cos, &table.key_sin}) {
        *part = memory;
        memory += T * table.pairs;
    }
    table.shear = s.rotary.module->shear != nullptr ? memory : nullptr;
    rotary_table(table, s.rotary, T);
    return table;
}

// The rotary table depends on T (pi, ntk and yarn stretch with it) and on nothing that is learned.
static void update_rotary(const ModelShape& s, Activations& acts, int64_t T) {
    if (acts.rotary_T == T) return;
    acts.rotary = make_rotary_table(s, acts.rotary_memory.data, T);
    acts.rotary_T = T;
}

void lap(OpTimes* times, const char* op) {
    if (times == nullptr) return;
    device_wait();
    const auto now = std::chrono::steady_clock::now();
    const double elapsed = std::chrono::duration<double>(now - times->last).count();
    times->last = now;
    for (auto& [name, seconds] : times->seconds)
        if (std::strcmp(name, op) == 0) {
            seconds += elapsed;
            return;
        }
    times->seconds.push_back({op, elapsed});
}

// ---------------------------------------------------------------------------------------------------------------
// Forward and backward

// One row reads the weight as it is. Which way a dense layer goes depends on all N rows of the batch, not on a chunk of
// them, since the sums differ in their last bits.
static void forward_dense(real* out, const real* inp, const Dense& layer, int64_t rows, int64_t C, int64_t OC,
                          int64_t N) {
    if (N == 1)
        linear_forward_row(out, inp, layer.weight, layer.bias, C, OC);
    else
        linear_forward(out, inp, layer.weight, layer.bias, rows, C, OC);
}

// Whether of qkv only the values are computed: frozen queries and keys are the zeros that their memory holds from the
// start. Where a third of the weights is not as well aligned as the whole, all of it is.
static bool only_values(const ModelShape& s) {
    return s.freeze_qk && s.embed_dim % 8 == 0;
}
static Dense value_rows(const Dense& qkv, int64_t C) {
    return {qkv.weight + 2 * C * C, qkv.bias + 2 * C};
}

// Whether only the last position of each sequence is read of what follows block l's attention.
static bool reads_last_only(const Activations& acts, size_t l) {
    return acts.reads_last && l + 1 == acts.blocks.size();
}
static AttentionScope attention_scope(const ModelShape& s, const Activations& acts, size_t l, int64_t T) {
    return {reads_last_only(acts, l) ? T - 1 : 0, !only_values(s)};
}

// Attention of block l; with a cache, over the T new tokens and those before.
static void forward_attention(const ModelShape& s, const BlockTensors& w, Activations& acts, size_t l, int64_t B,
                              int64_t T, const AttentionRowStats* stats, KeyValueCache* cache) {
    const BlockActivations& a = acts.blocks[l];
    const int64_t C = s.embed_dim;
    OpTimes* times = acts.op_times;
    if (cache != nullptr) {
        attention_cache(cache->keys[l], cache->values[l], a.qkv, acts.rotary, cache->length, T, cache->T, s.heads,
                        s.head_dim);
        lap(times, "attention cache");
        for (int64_t t = 0; cache->length > 0 && t < T; t++)
            attention_decode(a.attention + t * C, a.qkv + t * 3 * C, cache->keys[l], cache->values[l], acts.rotary,
                             cache->lag_bias[l], cache->workspace.data, cache->length + t, cache->T, s.heads,
                             s.head_dim);
        lap(times, "attention decode");
        if (cache->length > 0) return;
    }
    if (a.lag_bias != nullptr) lag_bias_table(a.lag_bias, s.lag_bias, w.lag_bias, T);
    lap(times, "lag-bias table");
    bool done = false;
    if constexpr (kHasCudnn) {
        // cuDNN has no statistics.
        done = s.cudnn_attention && stats == nullptr;
        if (done)
            attention_cudnn_forward(a.attention, a.lse, a.qkv, acts.rotary, acts.workspace, B, T, s.heads, s.head_dim);
    }
    if (!done)
        attention_forward(a.attention, a.lse, stats, a.qkv, acts.rotary, a.lag_bias, acts.workspace, B, T, s.heads,
                          s.head_dim, s.exact_skipping ? acts.skipping.data : nullptr, attention_scope(s, acts, l, T));
    lap(times, "attention forward");
}

// One block; without `to_the_end`, what its backward pass reads.
static void forward_block(const ModelShape& s, const BlockTensors& w, const BlockDense& dense, Activations& acts,
                          size_t l, int64_t B, int64_t T, const AttentionRowStats* stats, bool to_the_end,
                          KeyValueCache* cache = nullptr) {
    const int64_t N = B * T, C = s.embed_dim, mlp = s.mlp_dim;
    const BlockActivations& a = acts.blocks[l];
    const real* in = acts.residual[l];
    real* out = acts.residual[l + 1];
    OpTimes* times = acts.op_times;
    for (int64_t n = 0; n < N; n += acts.chunk) {
        const int64_t rows = std::min(acts.chunk, N - n), kept = acts.mode == Mode::inference ? 0 : n;
        real* norm1 = a.norm1 + kept * C;
        layernorm_forward(norm1, a.norm1_mean + n, a.norm1_rstd + n, in + n * C, w.norm1_weight, w.norm1_bias, rows, C);
        lap(times, "layernorm");
        if (only_values(s)) {
            forward_dense(acts.projection, norm1, value_rows(dense.qkv, C), rows, C, C, N);
            copy_rows(a.qkv + n * 3 * C + 2 * C, 3 * C, acts.projection, C, rows, C);
        } else {
            forward_dense(a.qkv + n * 3 * C, norm1, dense.qkv, rows, C, 3 * C, N);
        }
        lap(times, "dense forward");
    }
    forward_attention(s, w, acts, l, B, T, stats, cache);
    const real* attention = a.attention;
    int64_t R = N;
    if (reads_last_only(acts, l)) {
        copy_rows(acts.last_residual, C, in + (T - 1) * C, T * C, B, C);
        copy_rows(acts.last_attention, C, a.attention + (T - 1) * C, T * C, B, C);
        lap(times, "residual");
        in = acts.last_residual;
        attention = acts.last_attention;
        R = B;
    }
    for (int64_t n = 0; n < R; n += acts.chunk) {
        const int64_t rows = std::min(acts.chunk, R - n), kept = acts.mode == Mode::inference ? 0 : n;
        real *middle = a.middle + n * C, *norm2 = a.norm2 + kept * C;
        real *hidden = a.hidden + kept * mlp, *gelu = a.gelu + kept * mlp;
        forward_dense(acts.projection, attention + n * C, dense.out_proj, rows, C, C, R);
        lap(times, "dense forward");
        residual_layernorm_forward(middle, norm2, a.norm2_mean + n, a.norm2_rstd + n, in + n * C, acts.projection,
                                   w.norm2_weight, w.norm2_bias, rows, C);
        lap(times, "layernorm");
        forward_dense(hidden, norm2, dense.mlp0, rows, C, mlp, R);
        lap(times, "dense forward");
        gelu_forward(gelu, hidden, rows * mlp);
        lap(times, "gelu");
        if (!to_the_end) continue;
        forward_dense(acts.projection, gelu, dense.mlp2, rows, mlp, C, R);
        lap(times, "dense forward");
        residual_forward(out + n * C, middle, acts.projection, rows * C);
        lap(times, "residual");
    }
}

// The batch and the rotary table. With a cache B is 1 and the tokens are those that follow in it.
static void set_batch(const ModelShape& s, Activations& acts, std::span<const int32_t> tokens,
                      std::span<const int32_t> targets, int64_t T, const KeyValueCache* cache = nullptr) {
    lap(acts.op_times, "between batches");
    copy_to_device(acts.tokens.data, tokens.data(), tokens.size_bytes());
    copy_to_device(acts.targets.data, targets.data(), targets.size_bytes());
    if (cache != nullptr)
        acts.rotary = cache->rotary;
    else
        update_rotary(s, acts, T);
    lap(acts.op_times, "batch and rotary table");
}

// Everything up to the final LayerNorm.
static void forward_blocks(const Model& model, Activations& acts, int64_t B, int64_t T,
                           KeyValueCache* cache = nullptr) {
    const ModelShape& s = model.shape;
    const ModelTensors p = locate(model, model.parameters.data);
    if (kHalfPrecision && cache == nullptr) {
        round_weights(acts.weights, model);
        lap(acts.op_times, "rounded weights");
    }
    const ModelDense dense = locate_dense(model, cache != nullptr ? cache->weights : acts.weights);
    embedding_forward(acts.residual[0], p.embedding, acts.tokens.data, B * T, s.embed_dim);
    lap(acts.op_times, "embedding");
    const AttentionRowStats stats = {acts.entropy, acts.mean_lag};
    for (size_t l = 0; l < acts.blocks.size(); l++) {
        const bool wants_stats = l + 1 == acts.blocks.size() && acts.entropy != nullptr;
        forward_block(s, p.blocks[l], dense.blocks[l], acts, l, B, T, wants_stats ? &stats : nullptr, true, cache);
    }
}

// The final LayerNorm and the logits of the rows first .. first + rows - 1, into acts.norm and acts.logits.
static void forward_head(const ModelShape& s, const ModelTensors& p, const Dense& head, Activations& acts,
                         int64_t first, int64_t rows) {
    const int64_t C = s.embed_dim;
    layernorm_forward(acts.norm, acts.norm_mean + first, acts.norm_rstd + first, acts.residual.back() + first * C,
                      p.norm_weight, p.norm_bias, rows, C);
    lap(acts.op_times, "layernorm");
    forward_dense(acts.logits, acts.norm, head, rows, C, head_width(s), rows);
    lap(acts.op_times, "dense forward");
}

static void append_logits(std::vector<float>& all, const real* logits, int64_t n) {
    std::vector<real> some(static_cast<size_t>(n));
    copy_to_host(some.data(), logits, some.size() * sizeof(real));
    for (const real logit : some) all.push_back(to_float(logit));
}

static double mean_of(std::span<const float> values) {
    double sum = 0;
    for (float x : values) sum += x;
    return sum / static_cast<double>(values.size());
}

BatchResult evaluate_batch(const Model& model, Activations& acts, std::span<const int32_t> tokens,
                           std::span<const int32_t> targets, int64_t B, int64_t T, int64_t scored) {
    const ModelShape& s = model.shape;
    const int64_t V = head_width(s);
    const ModelTensors p = locate(model, model.parameters.data);
    const ModelDense dense = locate_dense(model, acts.weights);
    OpTimes* times = acts.op_times;
    device_zero(acts.skipping.data, acts.skipping.bytes());
    set_batch(s, acts, tokens, targets, T);
    forward_blocks(model, acts, B, T);
    // A classifier's rows are those of one sequence of B positions, all of them scored.
    const int64_t sequences = acts.reads_last ? 1 : B, positions = acts.reads_last ? B : T;
    if (acts.reads_last) scored = B;

    BatchResult result;
    result.losses.resize(static_cast<size_t>(sequences * positions));
    Moments logits;
    double loss_sum = 0;
    for (int64_t b = 0; b < sequences; b++)
        for (int64_t begin = 0; begin < positions; begin += kHeadRows) {
            const int64_t first = b * positions + begin, rows = std::min(kHeadRows, positions - begin);
            forward_head(s, p, dense.head, acts, first, rows);
            cross_entropy(acts.losses + first, nullptr, acts.logits, acts.targets.data + first, 1.0f, rows, V);
            lap(times, "cross-entropy");
            if (acts.reads_last) append_logits(result.logits, acts.logits, rows * V);
            const int64_t unscored = std::clamp<int64_t>(positions - scored - begin, 0, rows);
            const Moments part = moments(acts.logits + unscored * V, (rows - unscored) * V);
            logits.sum += part.sum;
            logits.sum_of_squares += part.sum_of_squares;
            logits.largest = std::max(logits.largest, part.largest);
            lap(times, "figures");
        }
    copy_to_host(result.losses.data(), acts.losses, result.losses.size() * sizeof(float));
    if (const AttentionSkipping skipping = attention_skipping(acts); skipping.tiles > 0)
        result.skipped = static_cast<double>(skipping.skipped) / static_cast<double>(skipping.tiles);
    for (int64_t b = 0; b < sequences; b++)
        for (int64_t t = positions - scored; t < positions; t++)
            loss_sum += result.losses[static_cast<size_t>(b * positions + t)];
    result.loss = loss_sum / static_cast<double>(sequences * scored);
    const double n = static_cast<double>(sequences * scored * V);
    result.logit_std = std::sqrt(std::max(0.0, logits.sum_of_squares - logits.sum * logits.sum / n) / (n - 1));
    result.logit_abs_max = logits.largest;

    if (acts.entropy != nullptr) {
        const auto rows_of = [&](const float* figure) {
            std::vector<float> rows(static_cast<size_t>(B * s.heads * T));
            copy_to_host(rows.data(), figure, rows.size() * sizeof(float));
            if (!acts.reads_last) return rows;
            std::vector<float> last;
            for (size_t i = 1; i <= static_cast<size_t>(B * s.heads); i++)
                last.push_back(rows[i * static_cast<size_t>(T) - 1]);
            return last;
        };
        result.mean_lag = mean_of(rows_of(acts.mean_lag));
        const std::vector<float> rows = rows_of(acts.entropy);
        result.entropy = mean_of(rows);
        double support = 0;
        for (float entropy : rows) support += std::exp(static_cast<double>(entropy));
        result.effective_support = support / static_cast<double>(rows.size());
    }
    return result;
}

AttentionSkipping attention_skipping(const Activations& acts) {
    AttentionSkipping skipping;
    copy_to_host(&skipping, acts.skipping.data, sizeof(skipping));
    return skipping;
}

// Gradients of the last positions, the first B rows of x, to where those are in (B, T, C); all others are 0.
// rows: (B, C), for the way.
static void spread_last_rows(real* x, real* rows, int64_t B, int64_t T, int64_t C) {
    copy_rows(rows, C, x, C, B, C);
    device_zero(x, static_cast<size_t>(B * T * C) * sizeof(real));
    copy_rows(x + (T - 1) * C, T * C, rows, C, B, C);
}

// Everything of a training batch that the device does, once the batch is there.
static void forward_and_backward(const Model& model, Activations& acts, DeviceArray<float>& gradients, int64_t B,
                                 int64_t T, double loss_scale) {
    const ModelShape& s = model.shape;
    const int64_t N = B * T, R = head_rows(s, B, T), C = s.embed_dim, V = head_width(s), mlp = s.mlp_dim;
    const ModelTensors p = locate(model, model.parameters.data);
    const ModelTensors g = locate(model, gradients.data);
    const ModelDense dense = locate_dense(model, acts.weights);
    float* workspace = acts.workspace;
    OpTimes* times = acts.op_times;
    forward_blocks(model, acts, B, T);

    // The head, a chunk of rows at a time: logits, loss, their gradient in place, and back to the final LayerNorm.
    const float dloss = static_cast<float>(loss_scale / static_cast<double>(R));
    for (int64_t begin = 0; begin < R; begin += kHeadRows) {
        const int64_t rows = std::min(kHeadRows, R - begin);
        forward_head(s, p, dense.head, acts, begin, rows);
        cross_entropy(acts.losses + begin, acts.logits, acts.logits, acts.targets.data + begin, dloss, rows, V);
        lap(times, "cross-entropy");
        linear_backward(acts.dnorm + begin * C, g.head_weight, g.head_bias, acts.logits, acts.norm, dense.head.weight,
                        workspace, rows, C, V);
        lap(times, "dense backward");
    }
    device_zero(acts.dresidual, static_cast<size_t>(R * C) * sizeof(real));
    layernorm_backward(acts.dresidual, g.norm_weight, g.norm_bias, acts.dnorm, acts.residual.back(), p.norm_weight,
                       acts.norm_mean, acts.norm_rstd, workspace, R, C);
    lap(times, "layernorm");
    for (size_t l = acts.blocks.size(); l-- > 0;) {
        const BlockTensors& w = p.blocks[l];
        const BlockTensors& dw = g.blocks[l];
        const BlockDense& layers = dense.blocks[l];
        const BlockActivations& a = acts.blocks[l];
        // The last block's activations are still there.
        if (acts.mode == Mode::recomputing && l + 1 < acts.blocks.size())
            forward_block(s, w, layers, acts, l, B, T, nullptr, false);
        const bool last_only = reads_last_only(acts, l);
        const int64_t M = last_only ? R : N;  // rows after attention
        for (int64_t n = 0; n < M; n += kBackwardRows) {
            const int64_t rows = std::min(kBackwardRows, M - n);
            real *dresidual = acts.dresidual + n * C, *dnorm = acts.dnorm + n * C;
            linear_backward(acts.dhidden, dw.mlp2_weight, dw.mlp2_bias, dresidual, a.gelu + n * mlp, layers.mlp2.weight,
                            workspace, rows, mlp, C);
            lap(times, "dense backward");
            gelu_backward(acts.dhidden, acts.dhidden, a.hidden + n * mlp, rows * mlp);
            lap(times, "gelu");
            linear_backward(dnorm, dw.mlp0_weight, dw.mlp0_bias, acts.dhidden, a.norm2 + n * C, layers.mlp0.weight,
                            workspace, rows, C, mlp);
            lap(times, "dense backward");
            layernorm_backward(dresidual, dw.norm2_weight, dw.norm2_bias, dnorm, a.middle + n * C, w.norm2_weight,
                               a.norm2_mean + n, a.norm2_rstd + n, workspace, rows, C);
            lap(times, "layernorm");
        }
        // dnorm now holds the gradient of the attention output.
        linear_backward(acts.dnorm, dw.out_proj_weight, dw.out_proj_bias, acts.dresidual,
                        last_only ? acts.last_attention : a.attention, layers.out_proj.weight, workspace, M, C, C);
        lap(times, "dense backward");
        if (last_only) {
            spread_last_rows(acts.dnorm, acts.last_attention, B, T, C);
            spread_last_rows(acts.dresidual, acts.last_attention, B, T, C);
            lap(times, "residual");
        }
        if constexpr (kHasCudnn) {
            if (s.cudnn_attention)
                attention_cudnn_backward(acts.dqkv, acts.dnorm, a.qkv, a.attention, a.lse, acts.rotary, workspace, B, T,
                                         s.heads, s.head_dim);
        }
        if (!s.cudnn_attention)
            attention_backward(acts.dqkv, acts.dlag_bias, acts.dnorm, a.qkv, a.attention, a.lse, acts.rotary,
                               a.lag_bias, workspace, B, T, s.heads, s.head_dim,
                               s.exact_skipping ? acts.skipping.data : nullptr, attention_scope(s, acts, l, T));
        lap(times, "attention backward");
        if (w.lag_bias != nullptr) lag_bias_table_backward(dw.lag_bias, acts.dlag_bias, s.lag_bias, w.lag_bias, T);
        lap(times, "lag-bias table");
        if (only_values(s)) {
            // The gradients of a frozen query and key are those of scores times zeros.
            for (int64_t n = 0; n < N; n += kBackwardRows) {
                const int64_t rows = std::min(kBackwardRows, N - n);
                copy_rows(acts.dhidden, C, acts.dqkv + n * 3 * C + 2 * C, 3 * C, rows, C);
                linear_backward(acts.dnorm + n * C, dw.qkv_weight + 2 * C * C, dw.qkv_bias + 2 * C, acts.dhidden,
                                a.norm1 + n * C, value_rows(layers.qkv, C).weight, workspace, rows, C, C);
            }
        } else {
            linear_backward(acts.dnorm, dw.qkv_weight, dw.qkv_bias, acts.dqkv, a.norm1, layers.qkv.weight, workspace, N,
                            C, 3 * C);
        }
        lap(times, "dense backward");
        layernorm_backward(acts.dresidual, dw.norm1_weight, dw.norm1_bias, acts.dnorm, acts.residual[l], w.norm1_weight,
                           a.norm1_mean, a.norm1_rstd, workspace, N, C);
        lap(times, "layernorm");
    }
    embedding_backward(g.embedding, acts.dresidual, acts.tokens.data, N, s.vocab, C);
    lap(times, "embedding");
}

void start_train_batch(const Model& model, Activations& acts, DeviceArray<float>& gradients,
                       std::span<const int32_t> tokens, std::span<const int32_t> targets, int64_t B, int64_t T,
                       double loss_scale) {
    set_batch(model.shape, acts, tokens, targets, T);
    const auto ops = [&] { forward_and_backward(model, acts, gradients, B, T, loss_scale); };
    if (acts.op_times != nullptr) return ops();
    TrainingGraph& t = acts.training;
    if (t.parameters != model.parameters.data || t.gradients != gradients.data || t.B != B || t.T != T ||
        t.loss_scale != loss_scale)
        t = {{}, model.parameters.data, gradients.data, B, T, loss_scale};
    run_graph(t.graph, ops);
}

double finish_train_batch(const Activations& acts, int64_t B, int64_t T) {
    std::vector<float> losses(static_cast<size_t>(acts.reads_last ? B : B * T));
    copy_to_host(losses.data(), acts.losses, losses.size() * sizeof(float));
    return mean_of(losses);
}

double train_batch(const Model& model, Activations& acts, DeviceArray<float>& gradients,
                   std::span<const int32_t> tokens, std::span<const int32_t> targets, int64_t B, int64_t T,
                   double loss_scale) {
    start_train_batch(model, acts, gradients, tokens, targets, B, T, loss_scale);
    return finish_train_batch(acts, B, T);
}

// ---------------------------------------------------------------------------------------------------------------
// Growing sequences

KeyValueCache make_key_value_cache(const Model& model, int64_t T) {
    const ModelShape& s = model.shape;
    const int64_t side = attention_cache_size(T, s.heads, s.head_dim);
    const int64_t bias = has_lag_table(s) ? s.heads * T : 0;
    const int64_t side_floats = aligned(side) * static_cast<int64_t>(sizeof(real)) / 4;
    const int64_t floats = s.layers * (2 * side_floats + bias) + rotary_floats(s, T);
    const int64_t workspace = attention_decode_workspace_floats(T, s.heads, s.head_dim);
    KeyValueCache cache;
    cache.T = T;
    try {
        cache.memory = DeviceArray<float>(floats);
        cache.workspace = DeviceArray<float>(workspace);
        cache.weights.memory = DeviceArray<real>(rounded_values(model.layout));
    } catch (const std::bad_alloc&) {
        fail("no memory for the keys and values of {} tokens: {:.0f} MiB wanted", T,
             static_cast<double>(floats + workspace) * 4 / 1048576);
    }
    float* at = cache.memory.data;
    const auto take = [&at](int64_t n) { return std::exchange(at, at + n); };
    for (const BlockTensors& block : locate(model, model.parameters.data).blocks) {
        cache.keys.push_back(reinterpret_cast<real*>(take(side_floats)));
        cache.values.push_back(reinterpret_cast<real*>(take(side_floats)));
        cache.lag_bias.push_back(bias > 0 ? take(bias) : nullptr);
        if (bias > 0) lag_bias_table(cache.lag_bias.back(), s.lag_bias, block.lag_bias, T);
    }
    cache.rotary = make_rotary_table(s, at, T);
    round_weights(cache.weights, model);
    return cache;
}

std::vector<float> extend_sequence(const Model& model, KeyValueCache& cache, std::span<const int32_t> tokens) {
    const ModelShape& s = model.shape;
    const int64_t rows = std::ssize(tokens);
    if (rows < 1 || rows > cache.T - cache.length)
        fail("{} more tokens for a sequence of {} of {} tokens (wanted 1 to {})", rows, cache.length, cache.T,
             cache.T - cache.length);
    if (cache.acts.T != rows) {
        cache.acts = {};  // before the next ones are made
        try {
            cache.acts = allocate_activations(s, 1, rows, Mode::inference, false);
        } catch (const std::bad_alloc&) {
            fail("no memory for {} tokens at once: {:.0f} MiB wanted", rows,
                 mebibytes_of(activation_sizes(s, 1, rows, Mode::inference, false)));
        }
    }
    set_batch(s, cache.acts, tokens, {}, rows, &cache);
    forward_blocks(model, cache.acts, 1, rows, &cache);
    cache.length += rows;
    forward_head(s, locate(model, model.parameters.data), locate_dense(model, cache.weights).head, cache.acts, rows - 1,
                 1);
    std::vector<real> logits(static_cast<size_t>(s.vocab));
    copy_to_host(logits.data(), cache.acts.logits, logits.size() * sizeof(real));
    std::vector<float> widened;
    for (const real logit : logits) widened.push_back(to_float(logit));
    return widened;
}

std::string first_nonfinite_tensor(const Model& model, const Activations& acts, const DeviceArray<float>* gradients,
                                   int64_t B, int64_t T) {
    const ModelShape& s = model.shape;
    const int64_t N = B * T, C = s.embed_dim;
    for (const ParameterInfo& info : model.layout)
        if (first_nonfinite(model.parameters.data + info.offset, info.size) >= 0) return "parameter " + info.name;
    const auto bad = [](const auto* x, int64_t n) { return x != nullptr && first_nonfinite(x, n) >= 0; };
    if (bad(acts.residual[0], N * C)) return "activation embedding";
    for (size_t l = 0; l < acts.blocks.size(); l++) {
        const std::string block = "activation blocks." + std::to_string(l);
        const BlockActivations& a = acts.blocks[l];
        // What the blocks share holds the last one's.
        if (acts.mode != Mode::training) {
            if (bad(acts.residual[l + 1], N * C)) return block;
            continue;
        }
        if (bad(a.norm1, N * C)) return block + ".norm1";
        if (bad(a.qkv, N * 3 * C)) return block + ".attn.qkv";
        // A strict mask's own infinities are as they should be.
        const int64_t first_lag = s.lag_bias.strict_mask ? 1 : 0;
        for (int64_t h = 0; a.lag_bias != nullptr && h < s.heads; h++)
            if (bad(a.lag_bias + h * T + first_lag, T - first_lag)) return block + ".attn lag-bias table";
        if (bad(a.attention, N * C)) return block + ".attn";
        if (bad(a.middle, N * C)) return block + ".attn.out_proj";
        if (bad(a.norm2, N * C)) return block + ".norm2";
        if (bad(a.hidden, N * s.mlp_dim)) return block + ".mlp.0";
        if (bad(a.gelu, N * s.mlp_dim)) return block + ".mlp.1";
        if (bad(acts.residual[l + 1], N * C)) return block + ".mlp.2";
    }
    const int64_t R = head_rows(s, B, T);
    if (bad(acts.norm, std::min(R, kHeadRows) * C)) return "activation norm";
    if (bad(acts.losses, R)) return "activation head";
    // Backward runs from the head to the embedding.
    if (gradients != nullptr)
        for (size_t i = model.layout.size(); i-- > 0;)
            if (first_nonfinite(gradients->data + model.layout[i].offset, model.layout[i].size) >= 0)
                return "gradient " + model.layout[i].name;
    return "";
}

}  // namespace jetlag
