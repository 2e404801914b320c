// The Transformer: x += attn(LN(x)), x += mlp(LN(x)) per block, then LN and an untied head with bias, at every position
// or, for classes, at the last one.
#include <cmath>

#include "src/error.h"
#include "test/reference/reference.h"

namespace jetlag::reference {

struct Method {
    std::string name;
    Rotary rotary;
    bool fj, affine, lc, alibi;
};

static const std::vector<Method>& methods() {
    static const std::vector<Method> table = {
        // name                 rotary          FJ     affine LC     ALiBi
        {"none", Rotary::kNone, false, false, false, false},
        {"rope", Rotary::kRope, false, false, false, false},
        {"grape_m_rope", Rotary::kRope, false, false, false, false},
        {"rope_pi", Rotary::kPi, false, false, false, false},
        {"rope_ntk", Rotary::kNtk, false, false, false, false},
        {"rope_yarn", Rotary::kYarn, false, false, false, false},
        {"pj_rotary", Rotary::kJordan, false, false, false, false},
        {"affine", Rotary::kNone, false, true, false, false},
        {"grape_a_alibi", Rotary::kNone, false, true, false, false},
        {"rope_affine", Rotary::kRope, false, true, false, false},
        {"grape_ma_rope_alibi", Rotary::kRope, false, true, false, false},
        {"rope_ntk_affine", Rotary::kNtk, false, true, false, false},
        {"rope_yarn_affine", Rotary::kYarn, false, true, false, false},
        {"fj_affine", Rotary::kNone, true, true, false, false},
        {"fj_lc", Rotary::kNone, true, false, true, false},
        {"lc_affine", Rotary::kNone, false, true, true, false},
        {"full", Rotary::kNone, true, true, true, false},
        {"alibi", Rotary::kNone, false, false, false, true},
    };
    return table;
}

const std::vector<std::string>& method_names() {
    static const std::vector<std::string> names = [] {
        std::vector<std::string> list;
        for (const Method& method : methods()) list.push_back(method.name);
        return list;
    }();
    return names;
}

ModelSettings with_method(ModelSettings settings, const std::string& name) {
    for (const Method& method : methods()) {
        if (method.name != name) continue;
        settings.rotary.kind = method.rotary;
        settings.lag_bias.fj = method.fj;
        settings.lag_bias.affine = method.affine;
        settings.lag_bias.lc = method.lc;
        settings.alibi = method.alibi;
        return settings;
    }
    fail("reference: {} is no position method", name);
}

static std::string block_name(int64_t layer) {
    return "blocks." + std::to_string(layer) + ".";
}

static const std::string kLagBiasPart = "attn.pj_bias.";

std::map<std::string, std::vector<int64_t>> parameter_shapes(const ModelSettings& settings) {
    const int64_t C = settings.embed_dim, V = settings.vocab, M = settings.mlp_ratio * C;
    const int64_t outputs = settings.classes > 0 ? settings.classes : V;
    std::map<std::string, std::vector<int64_t>> shapes = {
        {"embedding.weight", {V, C}},  {"norm.weight", {C}},     {"norm.bias", {C}},
        {"head.weight", {outputs, C}}, {"head.bias", {outputs}},
    };
    for (int64_t layer = 0; layer < settings.layers; layer++) {
        const std::string block = block_name(layer);
        shapes[block + "norm1.weight"] = {C};
        shapes[block + "norm1.bias"] = {C};
        shapes[block + "norm2.weight"] = {C};
        shapes[block + "norm2.bias"] = {C};
        shapes[block + "attn.qkv.weight"] = {3 * C, C};
        shapes[block + "attn.qkv.bias"] = {3 * C};
        shapes[block + "attn.out_proj.weight"] = {C, C};
        shapes[block + "attn.out_proj.bias"] = {C};
        shapes[block + "mlp.0.weight"] = {M, C};
        shapes[block + "mlp.0.bias"] = {M};
        shapes[block + "mlp.2.weight"] = {C, M};
        shapes[block + "mlp.2.bias"] = {C};
        if (!has_any_sector(settings.lag_bias)) continue;
        for (const auto& [name, shape] : lag_bias_shapes(settings.lag_bias, settings.heads)) {
            shapes[block + kLagBiasPart + name] = shape;
        }
    }
    return shapes;
}

bool parameter_takes_part(const ModelSettings& settings, const std::string& name) {
    const size_t part = name.find(kLagBiasPart);
    return part == std::string::npos || lag_bias_takes_part(settings.lag_bias, name.substr(part + kLagBiasPart.size()));
}

// The lag-bias tensors of a block under their short names, and back.
static Tensors lag_bias_of(const LagBiasSettings& settings, int64_t H, const Tensors& tensors,
                           const std::string& block) {
    Tensors part;
    for (const auto& [name, shape] : lag_bias_shapes(settings, H)) part[name] = tensors.at(block + kLagBiasPart + name);
    return part;
}

static void set_lag_bias_of(const Tensors& part, const std::string& block, Tensors& tensors) {
    for (const auto& [name, values] : part) tensors.at(block + kLagBiasPart + name) = values;
}

// What the backward pass of one block needs.
struct BlockActivations {
    Vector x;      // (B, T, C), the input
    Vector norm1;  // (B, T, C)
    Vector qkv;    // (B, T, 3, H, D)
    AttentionLayer attention;
    Vector x_middle;  // (B, T, C), after attention
    Vector norm2;     // (B, T, C)
    Vector hidden;    // (B, T, mlp_ratio * C), before the GELU
    Vector lag_bias;  // (H, T), or empty
};

struct Activations {
    RotaryTable rotary;
    std::vector<BlockActivations> blocks;
    Vector x;     // (B, T, C), after the last block; with classes (B, C), of the last positions
    Vector norm;  // as x
    Vector logits;
};

static Vector sum_of(const Vector& a, const Vector& b) {
    check_size(b, std::ssize(a), "addend");
    Vector out = a;
    for (size_t i = 0; i < out.size(); i++) out[i] += b[i];
    return out;
}

static void check_model(const ModelSettings& settings, const Tensors& parameters, const std::vector<int32_t>& tokens,
                        int64_t B, int64_t T) {
    if (settings.embed_dim % settings.heads != 0) {
        fail("reference: embed_dim {} is no multiple of heads {}", settings.embed_dim, settings.heads);
    }
    if (std::ssize(tokens) != B * T) fail("reference: {} tokens, wanted {} x {}", tokens.size(), B, T);
    for (const auto& [name, shape] : parameter_shapes(settings)) {
        const auto found = parameters.find(name);
        if (found == parameters.end()) fail("reference: the model has no tensor {}", name);
        check_size(found->second, element_count(shape), name.c_str());
    }
}

static Vector last_positions(const Vector& x, int64_t B, int64_t T, int64_t C) {
    Vector out;
    for (int64_t b = 1; b <= B; b++) out.insert(out.end(), x.begin() + (b * T - 1) * C, x.begin() + b * T * C);
    return out;
}

static Vector last_positions_backward(const Vector& dout, int64_t B, int64_t T, int64_t C) {
    Vector dx(B * T * C, 0.0);
    for (int64_t b = 0; b < B; b++)
        for (int64_t c = 0; c < C; c++) dx[((b + 1) * T - 1) * C + c] = dout[b * C + c];
    return dx;
}

static Activations run_forward(const ModelSettings& settings, const Tensors& parameters,
                               const std::vector<int32_t>& tokens, int64_t B, int64_t T) {
    check_model(settings, parameters, tokens, B, T);
    const int64_t H = settings.heads, D = settings.embed_dim / H;
    Activations activations;
    activations.rotary = rotary_table(settings.rotary, settings.train_len, T, D);
    Vector x = embedding_forward(parameters.at("embedding.weight"), tokens, settings.embed_dim);
    for (int64_t layer = 0; layer < settings.layers; layer++) {
        const std::string block = block_name(layer);
        const auto parameter = [&](const std::string& name) -> const Vector& { return parameters.at(block + name); };
        BlockActivations a;
        if (settings.alibi) a.lag_bias = alibi_table(H, T);
        if (has_any_sector(settings.lag_bias)) {
            a.lag_bias = lag_bias_table(settings.lag_bias, lag_bias_of(settings.lag_bias, H, parameters, block), H,
                                        settings.train_len, T);
        }
        if (settings.strict_mask) {
            if (a.lag_bias.empty()) a.lag_bias.assign(H * T, 0.0);
            for (int64_t h = 0; h < H; h++) a.lag_bias[h * T] = -INFINITY;
        }
        a.x = x;
        a.norm1 = layernorm_forward(a.x, parameter("norm1.weight"), parameter("norm1.bias"));
        a.qkv = linear_forward(a.norm1, parameter("attn.qkv.weight"), parameter("attn.qkv.bias"));
        a.attention = attention_layer_forward(a.qkv, activations.rotary, a.lag_bias, B, T, H, D);
        const Vector projected =
            linear_forward(a.attention.out, parameter("attn.out_proj.weight"), parameter("attn.out_proj.bias"));
        a.x_middle = sum_of(a.x, projected);
        a.norm2 = layernorm_forward(a.x_middle, parameter("norm2.weight"), parameter("norm2.bias"));
        a.hidden = linear_forward(a.norm2, parameter("mlp.0.weight"), parameter("mlp.0.bias"));
        const Vector mlp = linear_forward(gelu_forward(a.hidden), parameter("mlp.2.weight"), parameter("mlp.2.bias"));
        x = sum_of(a.x_middle, mlp);
        activations.blocks.push_back(std::move(a));
    }
    activations.x = settings.classes > 0 ? last_positions(x, B, T, settings.embed_dim) : x;
    activations.norm = layernorm_forward(activations.x, parameters.at("norm.weight"), parameters.at("norm.bias"));
    activations.logits = linear_forward(activations.norm, parameters.at("head.weight"), parameters.at("head.bias"));
    return activations;
}

static Tensors run_backward(const ModelSettings& settings, const Tensors& parameters,
                            const std::vector<int32_t>& tokens, int64_t B, int64_t T, const Activations& activations,
                            const Vector& dlogits) {
    const int64_t H = settings.heads, D = settings.embed_dim / H;
    Tensors gradients;
    for (const auto& [name, extents] : parameter_shapes(settings))
        gradients[name] = Vector(element_count(extents), 0.0);

    const Vector dnorm = linear_backward(dlogits, activations.norm, parameters.at("head.weight"),
                                         gradients.at("head.weight"), gradients.at("head.bias"));
    Vector dx = layernorm_backward(dnorm, activations.x, parameters.at("norm.weight"), gradients.at("norm.weight"),
                                   gradients.at("norm.bias"));
    if (settings.classes > 0) dx = last_positions_backward(dx, B, T, settings.embed_dim);
    for (int64_t layer = settings.layers - 1; layer >= 0; layer--) {
        const std::string block = block_name(layer);
        const auto parameter = [&](const std::string& name) -> const Vector& { return parameters.at(block + name); };
        const auto gradient = [&](const std::string& name) -> Vector& { return gradients.at(block + name); };
        const BlockActivations& a = activations.blocks[layer];

        const Vector dactivated = linear_backward(dx, gelu_forward(a.hidden), parameter("mlp.2.weight"),
                                                  gradient("mlp.2.weight"), gradient("mlp.2.bias"));
        const Vector dnorm2 = linear_backward(gelu_backward(dactivated, a.hidden), a.norm2, parameter("mlp.0.weight"),
                                              gradient("mlp.0.weight"), gradient("mlp.0.bias"));
        dx = sum_of(dx, layernorm_backward(dnorm2, a.x_middle, parameter("norm2.weight"), gradient("norm2.weight"),
                                           gradient("norm2.bias")));

        const Vector dattended = linear_backward(dx, a.attention.out, parameter("attn.out_proj.weight"),
                                                 gradient("attn.out_proj.weight"), gradient("attn.out_proj.bias"));
        const AttentionLayerGradients d =
            attention_layer_backward(dattended, a.qkv, activations.rotary, a.lag_bias, B, T, H, D);
        if (has_any_sector(settings.lag_bias)) {
            Tensors part = lag_bias_of(settings.lag_bias, H, gradients, block);
            lag_bias_backward(settings.lag_bias, lag_bias_of(settings.lag_bias, H, parameters, block), H,
                              settings.train_len, T, d.dlag_bias, part);
            set_lag_bias_of(part, block, gradients);
        }
        const Vector dnorm1 = linear_backward(d.dqkv, a.norm1, parameter("attn.qkv.weight"),
                                              gradient("attn.qkv.weight"), gradient("attn.qkv.bias"));
        dx = sum_of(dx, layernorm_backward(dnorm1, a.x, parameter("norm1.weight"), gradient("norm1.weight"),
                                           gradient("norm1.bias")));
    }
    embedding_backward(dx, tokens, settings.embed_dim, gradients.at("embedding.weight"));
    return gradients;
}

static ModelOutput output_of(const Activations& activations) {
    ModelOutput output;
    output.logits = activations.logits;
    if (!activations.blocks.empty()) {
        output.entropy = activations.blocks.back().attention.entropy;
        output.mean_lag = activations.blocks.back().attention.mean_lag;
    }
    return output;
}

ModelOutput model_forward(const ModelSettings& settings, const Tensors& parameters, const std::vector<int32_t>& tokens,
                          int64_t B, int64_t T) {
    return output_of(run_forward(settings, parameters, tokens, B, T));
}

ModelOutput model_loss(const ModelSettings& settings, const Tensors& parameters, const std::vector<int32_t>& tokens,
                       const std::vector<int32_t>& targets, int64_t B, int64_t T) {
    ModelOutput output = model_forward(settings, parameters, tokens, B, T);
    output.loss = cross_entropy(output.logits, targets).loss;
    return output;
}

ModelOutput model_gradients(const ModelSettings& settings, const Tensors& parameters,
                            const std::vector<int32_t>& tokens, const std::vector<int32_t>& targets, int64_t B,
                            int64_t T) {
    const Activations activations = run_forward(settings, parameters, tokens, B, T);
    const CrossEntropy loss = cross_entropy(activations.logits, targets);
    ModelOutput output = output_of(activations);
    output.loss = loss.loss;
    output.gradients = run_backward(settings, parameters, tokens, B, T, activations, loss.dlogits);
    return output;
}

}  // namespace jetlag::reference
