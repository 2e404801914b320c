// The reference implementation against the published numbers, against finite differences, and against values that
// can be worked out by hand.
#include "test/reference/reference.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <numbers>
#include <random>

#include "src/error.h"
#include "src/safetensors.h"
#include "test/support.h"

namespace jetlag::reference {
namespace {

// ---- Golden files -------------------------------------------------------------------------------------------------

template <typename T>
std::vector<T> values_of(const SafetensorsFile& file, const std::string& name, const std::string& dtype) {
    const Tensor* tensor = find_tensor(file, name);
    if (tensor == nullptr) fail("golden file has no tensor {}", name);
    if (tensor->dtype != dtype) fail("golden tensor {} is {}, wanted {}", name, tensor->dtype, dtype);
    std::vector<T> values(tensor->bytes.size() / sizeof(T));
    std::memcpy(values.data(), tensor->bytes.data(), tensor->bytes.size());
    return values;
}

Vector doubles_of(const SafetensorsFile& file, const std::string& name) {
    return values_of<double>(file, name, "F64");
}

std::vector<int32_t> tokens_of(const SafetensorsFile& file, const std::string& name) {
    const std::vector<uint8_t> bytes = values_of<uint8_t>(file, name, "U8");
    return {bytes.begin(), bytes.end()};
}

struct Golden {
    SafetensorsFile file;
    ModelSettings settings;
    Tensors initial;
    std::vector<int32_t> corpus;  // the whole file
    int64_t number(const std::string& key) const { return std::stoll(file.metadata.at(key)); }
};

Golden read_golden(const std::string& method) {
    Golden golden;
    golden.file = read_safetensors(test::shared_folder() / "golden" / "lm_parity" / (method + ".safetensors"));
    ModelSettings settings;
    settings.layers = golden.number("layers");
    settings.embed_dim = golden.number("embed_dim");
    settings.heads = golden.number("num_heads");
    settings.mlp_ratio = golden.number("mlp_ratio");
    settings.train_len = golden.number("train_len");
    settings.rotary.base = std::stod(golden.file.metadata.at("rope_base"));
    settings.lag_bias.max_order = golden.number("max_order");
    golden.settings = with_method(settings, golden.file.metadata.at("method"));
    for (const Tensor& tensor : golden.file.tensors) {
        if (!tensor.name.starts_with("init.")) continue;
        const std::vector<float> values = values_of<float>(golden.file, tensor.name, "F32");
        golden.initial[tensor.name.substr(5)] = Vector(values.begin(), values.end());
    }
    std::ifstream stream(test::shared_folder() / golden.file.metadata.at("corpus"), std::ios::binary);
    const std::string text((std::istreambuf_iterator<char>(stream)), std::istreambuf_iterator<char>());
    for (const char byte : text) golden.corpus.push_back(static_cast<uint8_t>(byte));
    return golden;
}

// Windows of T tokens from each start, and the tokens that follow them.
struct Windows {
    std::vector<int32_t> tokens, targets;
};

Windows windows_of(const std::vector<int32_t>& corpus, const std::vector<int64_t>& starts, int64_t T) {
    Windows windows;
    for (const int64_t start : starts) {
        if (start < 0 || start + T >= std::ssize(corpus))
            fail("a window of {} tokens at {} leaves the corpus", T, start);
        const auto first = corpus.begin() + start;
        windows.tokens.insert(windows.tokens.end(), first, first + T);
        windows.targets.insert(windows.targets.end(), first + 1, first + T + 1);
    }
    return windows;
}

double norm_of(const Vector& values) {
    double sum = 0;
    for (const double value : values) sum += value * value;
    return std::sqrt(sum);
}

// Norm of the difference over the norm of `wanted`; the norm itself where `wanted` is 0 to rounding.
void expect_same(const Vector& got, const Vector& wanted, const std::string& what) {
    ASSERT_EQ(got.size(), wanted.size()) << what;
    Vector difference(got.size());
    for (size_t i = 0; i < got.size(); i++) difference[i] = got[i] - wanted[i];
    const double size = norm_of(wanted);
    if (size < 1e-12) {
        EXPECT_LT(norm_of(got), 1e-12) << what << ", whose true gradient is zero";
    } else {
        EXPECT_LT(norm_of(difference) / size, 1e-9) << what;
    }
}

class ReferenceGolden : public testing::TestWithParam<std::string> {};

TEST_P(ReferenceGolden, LogitsLossAndEveryGradient) {
    NEEDS_SHARED();
    const Golden golden = read_golden(GetParam());
    const int64_t B = golden.number("batch_size"), T = golden.number("train_len");
    std::map<std::string, std::vector<int64_t>> published;
    for (const Tensor& tensor : golden.file.tensors) {
        if (tensor.name.starts_with("init.")) published[tensor.name.substr(5)] = tensor.shape;
    }
    EXPECT_EQ(parameter_shapes(golden.settings), published);

    const ModelOutput output = model_gradients(golden.settings, golden.initial, tokens_of(golden.file, "tokens"),
                                               tokens_of(golden.file, "targets"), B, T);
    expect_same(output.logits, doubles_of(golden.file, "logits64"), "logits");
    expect_same({output.loss}, {std::stod(golden.file.metadata.at("loss64"))}, "loss");
    EXPECT_EQ(output.gradients.size(), published.size());
    for (const auto& [name, gradient] : output.gradients) {
        if (find_tensor(golden.file, "grad64." + name) == nullptr) {
            ADD_FAILURE() << "no golden gradient of " << name;
            continue;
        }
        expect_same(gradient, doubles_of(golden.file, "grad64." + name), name);
        if (!parameter_takes_part(golden.settings, name)) {
            EXPECT_EQ(norm_of(gradient), 0) << name;
        }
    }
}

TEST_P(ReferenceGolden, LossAtOtherLengths) {
    NEEDS_SHARED();
    const Golden golden = read_golden(GetParam());
    const std::vector<int64_t> lengths = values_of<int64_t>(golden.file, "eval_lens", "I64");
    const Vector wanted = doubles_of(golden.file, "eval_loss64");
    ASSERT_EQ(lengths, (std::vector<int64_t>{64, 256, 1024}));
    for (size_t i = 0; i < lengths.size(); i++) {
        const Windows window = windows_of(golden.corpus, {1000}, lengths[i]);
        const ModelOutput output =
            model_loss(golden.settings, golden.initial, window.tokens, window.targets, 1, lengths[i]);
        expect_same({output.loss}, {wanted[i]}, "loss at " + std::to_string(lengths[i]));
    }
}

// The published steps ran in float, whose rounding grows over the steps.
TEST_P(ReferenceGolden, AdamWSteps) {
    NEEDS_SHARED();
    const Golden golden = read_golden(GetParam());
    const int64_t B = golden.number("batch_size"), T = golden.number("train_len"), steps = golden.number("steps");
    AdamWSettings adamw;
    adamw.lr = std::stod(golden.file.metadata.at("lr"));
    adamw.weight_decay = std::stod(golden.file.metadata.at("weight_decay"));
    const std::vector<int64_t> starts = values_of<int64_t>(golden.file, "batch_starts", "I64");
    const Vector wanted = doubles_of(golden.file, "adamw_losses32");
    ASSERT_EQ(std::ssize(wanted), steps);

    Tensors parameters = golden.initial, first = golden.initial, second = golden.initial;
    for (auto& [name, values] : first) std::fill(values.begin(), values.end(), 0.0);
    second = first;
    for (int64_t step = 0; step < steps; step++) {
        const std::vector<int64_t> batch(starts.begin() + step * B, starts.begin() + (step + 1) * B);
        const Windows windows = windows_of(golden.corpus, batch, T);
        const ModelOutput output = model_gradients(golden.settings, parameters, windows.tokens, windows.targets, B, T);
        ASSERT_NEAR(output.loss, wanted[step], 5e-6) << "step " << step;
        for (auto& [name, values] : parameters) {
            if (!parameter_takes_part(golden.settings, name)) continue;
            adamw_step(adamw, step + 1, values, output.gradients.at(name), first.at(name), second.at(name));
        }
    }
    for (const Tensor& tensor : golden.file.tensors) {
        if (!tensor.name.starts_with("final32.")) continue;
        const std::string name = tensor.name.substr(8);
        const std::vector<float> published = values_of<float>(golden.file, tensor.name, "F32");
        const Vector& values = parameters.at(name);
        ASSERT_EQ(values.size(), published.size());
        for (size_t i = 0; i < values.size(); i++) EXPECT_NEAR(values[i], published[i], 1e-5) << name;
        if (!parameter_takes_part(golden.settings, name)) {
            EXPECT_EQ(values, golden.initial.at(name)) << name;
        }
    }
}

std::vector<std::string> published_methods() {
    std::vector<std::string> names = method_names();
    std::erase(names, "alibi");
    return names;
}

INSTANTIATE_TEST_SUITE_P(Methods, ReferenceGolden, testing::ValuesIn(published_methods()),
                         [](const auto& info) { return info.param; });

// ---- Finite differences -------------------------------------------------------------------------------------------

Vector normal_vector(std::mt19937_64& random, int64_t size, double deviation, double mean = 0) {
    std::normal_distribution<double> normal(mean, deviation);
    Vector values(size);
    for (double& value : values) value = normal(random);
    return values;
}

// Values for every tensor of the shapes, of a size at which every tensor matters.
Tensors random_parameters(std::mt19937_64& random, const std::map<std::string, std::vector<int64_t>>& shapes) {
    Tensors parameters;
    for (const auto& [name, shape] : shapes) {
        const double mean = name.find("norm") != std::string::npos && name.ends_with("weight") ? 1 : 0;
        parameters[name] = normal_vector(random, element_count(shape), 0.5, mean);
    }
    return parameters;
}

// d/ds f(tensor + s direction) at s = 0, by central differences of fourth order. With this step the truncation
// (s^4) and the rounding (1e-16 / s) are both below 1e-11 for functions and derivatives of order 1.
template <typename Function>
double directional_derivative(const Function& f, Vector& tensor, const Vector& direction) {
    const double step = 2e-4;
    const Vector original = tensor;
    const auto at = [&](double s) {
        for (size_t i = 0; i < tensor.size(); i++) tensor[i] = original[i] + s * direction[i];
        return f();
    };
    const double slope = (8 * (at(step) - at(-step)) - (at(2 * step) - at(-2 * step))) / (12 * step);
    tensor = original;
    return slope;
}

// How far the gradients are from the differences of `loss`, a function of `parameters`: the largest disagreement over
// the allowed one, for each tensor, over a random direction of unit length and three single entries.
template <typename Function>
std::map<std::string, double> disagreements(const Function& loss, Tensors& parameters, const Tensors& gradients) {
    std::mt19937_64 random(5);
    std::map<std::string, double> worst;
    for (auto& [name, tensor] : parameters) {
        const Vector& gradient = gradients.at(name);
        std::vector<Vector> directions = {normal_vector(random, std::ssize(tensor), 1)};
        const double length = norm_of(directions[0]);
        for (double& value : directions[0]) value /= length;
        for (int i = 0; i < 3; i++) {
            directions.emplace_back(tensor.size(), 0.0);
            directions.back()[random() % tensor.size()] = 1;
        }
        for (const Vector& direction : directions) {
            double analytic = 0;
            for (size_t i = 0; i < tensor.size(); i++) analytic += direction[i] * gradient[i];
            const double numeric = directional_derivative(loss, tensor, direction);
            const double allowed = 1e-10 + 1e-7 * std::abs(analytic);
            worst[name] = std::max(worst[name], std::abs(numeric - analytic) / allowed);
        }
    }
    return worst;
}

// A tiny model on more tokens than its training length, so that the stretched tables take part.
struct Tiny {
    ModelSettings settings;
    Tensors parameters;
    int64_t B = 2, T = 7;
    std::vector<int32_t> tokens, targets;
};

Tiny tiny_model(const ModelSettings& position, int64_t head_dim) {
    std::mt19937_64 random(11);
    Tiny tiny;
    tiny.settings = position;
    tiny.settings.layers = 2;
    tiny.settings.heads = 2;
    tiny.settings.embed_dim = 2 * head_dim;
    tiny.settings.vocab = 11;
    tiny.settings.train_len = 5;
    tiny.parameters = random_parameters(random, parameter_shapes(tiny.settings));
    for (int64_t n = 0; n < tiny.B * tiny.T; n++) {
        tiny.tokens.push_back(static_cast<int32_t>(random() % 11));
        tiny.targets.push_back(static_cast<int32_t>(random() % 11));
    }
    return tiny;
}

double tiny_loss(const Tiny& tiny) {
    return model_loss(tiny.settings, tiny.parameters, tiny.tokens, tiny.targets, tiny.B, tiny.T).loss;
}

Tensors tiny_gradients(const Tiny& tiny) {
    return model_gradients(tiny.settings, tiny.parameters, tiny.tokens, tiny.targets, tiny.B, tiny.T).gradients;
}

// Whether the loss is unmoved by every value of the tensor although the optimizer updates it: a constant added to all
// scores of a row cancels in the softmax, and so does a choice among one.
bool is_flat(const LagBiasSettings& bias, const std::string& name) {
    const int sectors = bias.fj + bias.affine + bias.lc;
    return name.ends_with(".b0") || (name.ends_with("gate_logits") && sectors == 1) ||
           (name.ends_with("alpha_logits") && bias.max_order == 0);
}

void expect_gradients_match_differences(Tiny tiny) {
    Tensors gradients = tiny_gradients(tiny);
    const auto loss = [&] { return tiny_loss(tiny); };
    for (const auto& [name, ratio] : disagreements(loss, tiny.parameters, gradients)) EXPECT_LT(ratio, 1) << name;
    // The comparison must be about something: gradients 10,000 times what it allows, except where there are none.
    for (const auto& [name, gradient] : gradients) {
        if (!parameter_takes_part(tiny.settings, name)) {
            EXPECT_EQ(norm_of(gradient), 0) << name;
        } else if (is_flat(tiny.settings.lag_bias, name)) {
            EXPECT_LT(norm_of(gradient), 1e-14) << name;
        } else {
            EXPECT_GT(norm_of(gradient), 1e-6) << name;
        }
    }
}

class ReferenceDifferences : public testing::TestWithParam<std::string> {};

TEST_P(ReferenceDifferences, Model) {
    ModelSettings settings;
    settings.rotary.base = 100;
    expect_gradients_match_differences(tiny_model(with_method(settings, GetParam()), 4));
    expect_gradients_match_differences(tiny_model(with_method(settings, GetParam()), 8));
}

INSTANTIATE_TEST_SUITE_P(Methods, ReferenceDifferences, testing::ValuesIn(method_names()),
                         [](const auto& info) { return info.param; });

// The options of a classifier that reads earlier positions only.
TEST(Reference, StrictMaskAndClassesDifferences) {
    for (const char* method : {"none", "affine", "rope", "full"}) {
        SCOPED_TRACE(method);
        ModelSettings settings = with_method({}, method);
        settings.strict_mask = true;
        expect_gradients_match_differences(tiny_model(settings, 4));
        settings.classes = 3;
        Tiny tiny = tiny_model(settings, 4);
        tiny.targets = {2, 0};
        expect_gradients_match_differences(tiny);
    }
}

// Every set of sectors with the options of Definition 1 on and off, one and several frequencies, orders 0 to 4.
std::vector<LagBiasSettings> composed_lag_biases() {
    std::vector<LagBiasSettings> list;
    for (int sectors = 1; sectors < 8; sectors++) {
        for (int64_t R = 0; R <= 4; R++) {
            LagBiasSettings bias;
            bias.fj = (sectors & 1) != 0;
            bias.affine = (sectors & 2) != 0;
            bias.lc = (sectors & 4) != 0;
            bias.max_order = R;
            bias.frequencies = 1 + R % 3;
            bias.constant = (sectors + R) % 2 == 0;
            bias.lc_damping = (sectors + R) % 3 != 0;
            list.push_back(bias);
        }
    }
    return list;
}

std::string text_of(const LagBiasSettings& bias) {
    return std::string(bias.fj ? "fj " : "") + (bias.affine ? "affine " : "") + (bias.lc ? "lc " : "") + "R " +
           std::to_string(bias.max_order) + " F " + std::to_string(bias.frequencies) + (bias.constant ? " b0" : "") +
           (bias.lc_damping ? " lc_damping" : "");
}

TEST(Reference, ComposedModelDifferences) {
    for (const LagBiasSettings& bias : composed_lag_biases()) {
        SCOPED_TRACE(text_of(bias));
        ModelSettings settings;
        settings.lag_bias = bias;
        settings.rotary.kind = bias.max_order % 2 == 0 ? Rotary::kYarn : Rotary::kJordan;
        settings.rotary.base = 100;
        expect_gradients_match_differences(tiny_model(settings, 4));
    }
}

TEST(Reference, LagBiasDifferences) {
    const int64_t H = 3, L = 6, T = 9;
    for (const LagBiasSettings& bias : composed_lag_biases()) {
        SCOPED_TRACE(text_of(bias));
        std::mt19937_64 random(3);
        Tensors parameters = random_parameters(random, lag_bias_shapes(bias, H));
        const Vector weights = normal_vector(random, H * T, 1);
        const auto loss = [&] {
            const Vector table = lag_bias_table(bias, parameters, H, L, T);
            double sum = 0;
            for (int64_t i = 0; i < H * T; i++) sum += weights[i] * table[i];
            return sum;
        };
        Tensors gradients = parameters;
        for (auto& [name, values] : gradients) std::fill(values.begin(), values.end(), 0.0);
        lag_bias_backward(bias, parameters, H, L, T, weights, gradients);
        for (const auto& [name, ratio] : disagreements(loss, parameters, gradients)) EXPECT_LT(ratio, 1) << name;
        if (bias.constant) {
            EXPECT_GT(norm_of(gradients.at("b0")), 0.1);
        }
        if (bias.lc && bias.lc_damping) {
            EXPECT_GT(norm_of(gradients.at("raw_lc_damping")), 1e-4);
        }
        // Gradients accumulate.
        const Tensors once = gradients;
        lag_bias_backward(bias, parameters, H, L, T, weights, gradients);
        for (const auto& [name, values] : once) {
            for (size_t i = 0; i < values.size(); i++) EXPECT_NEAR(gradients.at(name)[i], 2 * values[i], 1e-12);
        }
    }
}

// The comparison sees an error of 1e-5 in one tensor's gradient, in that tensor alone.
TEST(Reference, DifferencesSeeAWrongGradient) {
    ModelSettings position;
    position.lag_bias.frequencies = 2;
    position.lag_bias.lc_damping = true;
    Tiny tiny = tiny_model(with_method(position, "full"), 4);
    tiny.settings.layers = 1;
    std::mt19937_64 random(11);
    tiny.parameters = random_parameters(random, parameter_shapes(tiny.settings));
    const Tensors gradients = tiny_gradients(tiny);
    const auto loss = [&] { return tiny_loss(tiny); };
    for (const auto& [wrong, gradient] : gradients) {
        Tensors perturbed = gradients;
        for (double& value : perturbed.at(wrong)) value *= 1 + 1e-5;
        for (const auto& [name, ratio] : disagreements(loss, tiny.parameters, perturbed)) {
            if (name == wrong) {
                EXPECT_GT(ratio, 1) << name;
            } else {
                EXPECT_LT(ratio, 1) << name;
            }
        }
    }
}

// ---- AdamW --------------------------------------------------------------------------------------------------------

TEST(Reference, AdamWByHand) {
    AdamWSettings settings{0.1, 0.5, 0.75, 1e-3, 0.25};
    Vector x = {2, -3}, m = {0, 0}, v = {0, 0};
    // In the first step the corrected moments are g and g^2.
    adamw_step(settings, 1, x, {4, 0}, m, v);
    const double first = 2 * (1 - 0.025) - 0.1 * 4 / (4 + 1e-3);
    EXPECT_DOUBLE_EQ(x[0], first);
    EXPECT_DOUBLE_EQ(x[1], -3 * 0.975);
    // In the second m = (0.5 * 2 + 0.5 * 6) / 0.75 and v = (0.75 * 4 + 0.25 * 36) / (1 - 0.75^2).
    adamw_step(settings, 2, x, {6, 0}, m, v);
    EXPECT_DOUBLE_EQ(x[0], first * 0.975 - 0.1 * (4 / 0.75) / (std::sqrt(12 / 0.4375) + 1e-3));
    EXPECT_DOUBLE_EQ(x[1], -3 * 0.975 * 0.975);
}

// ---- Attention ----------------------------------------------------------------------------------------------------

struct AttentionInputs {
    int64_t T, D;
    Vector q, k, v, lag_bias, dout;
};

AttentionInputs attention_inputs(int64_t T, int64_t D) {
    std::mt19937_64 random(17);
    return {T,
            D,
            normal_vector(random, T * D, 1),
            normal_vector(random, T * D, 1),
            normal_vector(random, T * D, 1),
            normal_vector(random, T, 1),
            normal_vector(random, T * D, 1)};
}

void expect_attention_differences(AttentionInputs in) {
    const double scale = 0.7;
    const auto loss = [&] {
        const Attention a = attention_forward(in.q, in.k, in.v, in.lag_bias, in.D, scale);
        double sum = 0;
        for (size_t i = 0; i < a.out.size(); i++) sum += in.dout[i] * a.out[i];
        return sum;
    };
    const AttentionGradients gradients = attention_backward(in.dout, in.q, in.k, in.v, in.lag_bias, in.D, scale);
    const auto expect_gradient = [&](Vector& input, const Vector& gradient, const std::string& name) {
        for (size_t i = 0; i < input.size(); i++) {
            if (std::isinf(input[i])) {
                EXPECT_EQ(gradient[i], 0) << name;
                continue;
            }
            Vector direction(input.size(), 0.0);
            direction[i] = 1;
            EXPECT_NEAR(directional_derivative(loss, input, direction), gradient[i], 1e-9) << name << "[" << i << "]";
        }
    };
    expect_gradient(in.q, gradients.dq, "dq");
    expect_gradient(in.k, gradients.dk, "dk");
    expect_gradient(in.v, gradients.dv, "dv");
    expect_gradient(in.lag_bias, gradients.dlag_bias, "dlag_bias");
}

TEST(Reference, AttentionDifferences) {
    expect_attention_differences(attention_inputs(6, 3));
    expect_attention_differences(attention_inputs(1, 2));
    AttentionInputs window = attention_inputs(6, 3);
    window.lag_bias[2] = window.lag_bias[4] = window.lag_bias[5] = -INFINITY;
    expect_attention_differences(window);
}

TEST(Reference, AttentionRowWithoutAnyKey) {
    AttentionInputs in = attention_inputs(4, 2);
    in.lag_bias = {-INFINITY, -INFINITY, 0.5, -INFINITY};
    const Attention a = attention_forward(in.q, in.k, in.v, in.lag_bias, in.D, 1);
    for (int64_t i = 0; i < 4; i++) {
        const bool has_key = i >= 2;  // exactly one: i - 2
        EXPECT_EQ(std::isinf(a.lse[i]), !has_key);
        EXPECT_EQ(a.entropy[i], 0);
        EXPECT_EQ(a.mean_lag[i], has_key ? 2 : 0);
        for (int64_t x = 0; x < 2; x++) EXPECT_EQ(a.out[i * 2 + x], has_key ? in.v[(i - 2) * 2 + x] : 0);
    }
    const AttentionGradients d = attention_backward(in.dout, in.q, in.k, in.v, in.lag_bias, in.D, 1);
    EXPECT_EQ(d.dq, Vector(8, 0.0));
    EXPECT_EQ(d.dk, Vector(8, 0.0));
    EXPECT_EQ(d.dlag_bias, Vector(4, 0.0));
    for (int64_t i = 0; i < 4; i++) {
        for (int64_t x = 0; x < 2; x++) EXPECT_EQ(d.dv[i * 2 + x], i < 2 ? in.dout[(i + 2) * 2 + x] : 0);
    }
}

// With equal scores a row is uniform: ln(i + 1) of entropy, i/2 of mean lag.
TEST(Reference, AttentionOfEqualScores) {
    const Vector zeros(5 * 2, 0.0), v = attention_inputs(5, 2).v;
    const Attention a = attention_forward(zeros, zeros, v, {}, 2, 1);
    double mean = 0;
    for (int64_t i = 0; i < 5; i++) {
        mean += v[i * 2];
        EXPECT_NEAR(a.lse[i], std::log(i + 1.0), 1e-15);
        EXPECT_NEAR(a.entropy[i], std::log(i + 1.0), 1e-15);
        EXPECT_NEAR(a.mean_lag[i], i / 2.0, 1e-15);
        EXPECT_NEAR(a.out[i * 2], mean / (i + 1), 1e-15);
    }
}

// ---- Position tables ----------------------------------------------------------------------------------------------

// Scores depend on i - j only, whatever the kind.
TEST(Reference, RotaryRelativeLaw) {
    const int64_t L = 40, T = 60, D = 8;
    std::mt19937_64 random(23);
    const Vector q_row = normal_vector(random, D, 1), k_row = normal_vector(random, D, 1);
    Vector q, k;
    for (int64_t t = 0; t < T; t++) {
        q.insert(q.end(), q_row.begin(), q_row.end());
        k.insert(k.end(), k_row.begin(), k_row.end());
    }
    for (const Rotary kind : {Rotary::kRope, Rotary::kPi, Rotary::kNtk, Rotary::kYarn, Rotary::kJordan}) {
        const RotaryTable table = rotary_table({kind, 10000, 1}, L, T, D);
        const Vector turned_q = rotate_queries(table, q, D), turned_k = rotate_keys(table, k, D);
        const auto score = [&](int64_t i, int64_t j) {
            double sum = 0;
            for (int64_t x = 0; x < D; x++) sum += turned_q[i * D + x] * turned_k[j * D + x];
            return sum;
        };
        double spread = 0;
        for (int64_t d = 0; d < T; d++) {
            spread = std::max(spread, std::abs(score(d, 0) - score(0, 0)));
            for (int64_t j = 0; j + d < T; j++) EXPECT_NEAR(score(j + d, j), score(d, 0), 1e-12) << d << " " << j;
        }
        EXPECT_GT(spread, 0.1);
    }
}

// The stretched kinds are plain RoPE up to the training length.
TEST(Reference, RotaryKindsAgreeUpToTheTrainingLength) {
    const RotaryTable rope = rotary_table({Rotary::kRope, 10000, 1}, 16, 16, 8);
    for (const Rotary kind : {Rotary::kPi, Rotary::kNtk, Rotary::kYarn}) {
        const RotaryTable table = rotary_table({kind, 10000, 1}, 16, 16, 8);
        EXPECT_EQ(table.query_cosine, rope.query_cosine);
        EXPECT_EQ(table.key_sine, rope.key_sine);
        EXPECT_NE(rotary_table({kind, 10000, 1}, 16, 17, 8).query_sine,
                  rotary_table({Rotary::kRope, 10000, 1}, 16, 17, 8).query_sine);
    }
}

// Channels beyond the table's pairs stay as they are.
TEST(Reference, RotaryOfSomeChannels) {
    RotaryTable table;
    table.pairs = 1;
    table.query_cosine = table.key_cosine = {0, 0};
    table.query_sine = table.key_sine = {1, -1};
    const Vector x = {1, 2, 3, 4, 5, 6, 7, 8};
    EXPECT_EQ(rotate_queries(table, x, 4), (Vector{-2, 1, 3, 4, 6, -5, 7, 8}));
    EXPECT_EQ(rotate_keys_backward(table, rotate_keys(table, x, 4), 4), x);
}

TEST(Reference, LagBiasByHand) {
    const int64_t L = 4;
    LagBiasSettings bias{true, false, false, 1, 1, false, false};
    Tensors p = initial_lag_bias(bias, 1, L, 2.0, "fj");
    EXPECT_DOUBLE_EQ(p.at("omega")[0], 2 * std::numbers::pi * 17 / L);
    p.at("omega")[0] = std::numbers::pi / 2;
    p.at("fj_zeta_re") = {3, 5};
    p.at("fj_zeta_im") = {7, 11};
    const double damping = std::log1p(std::exp(-2));
    Vector table = lag_bias_table(bias, p, 1, L, 3);
    EXPECT_NEAR(table[0], 0.5 * 3, 1e-14);
    EXPECT_NEAR(table[1], std::exp(-damping / 4) * (0.5 * -7 + 0.5 * 0.25 * -11), 1e-14);
    EXPECT_NEAR(table[2], std::exp(-damping / 2) * (0.5 * -3 + 0.5 * 0.5 * -5), 1e-14);

    bias = {false, true, true, 1, 1, true, true};
    p = initial_lag_bias(bias, 1, L, 2.0, "affine");
    p.at("b0")[0] = 0.25;
    p.at("omega")[0] = 0;
    p.at("lc_zeta_re") = {3, 5};
    const double gate = 1 / (1 + std::exp(-4.0));
    table = lag_bias_table(bias, p, 1, L, 5);
    EXPECT_NEAR(table[0], 0.25 + (1 - gate) * 0.5 * 3, 1e-14);
    const double decay = std::exp(-damping * std::log(1 + std::numbers::sqrt2));
    EXPECT_NEAR(table[4], 0.25 - gate * 2 + (1 - gate) * decay * 0.5 * (3 + 5 / std::numbers::sqrt2), 1e-14);

    // A gate_init whose sector is off leaves the gates even.
    EXPECT_EQ(initial_lag_bias(bias, 1, L, 2.0, "fj").at("gate_logits"), Vector(3, 0.0));
    bias.frequencies = 3;
    const Vector omega = initial_lag_bias(bias, 3, L).at("omega");
    for (int64_t i = 0; i < 9; i++) EXPECT_NEAR(omega[i], 2 * std::numbers::pi * (1 + 2 * i) / L, 1e-13);
}

TEST(Reference, AlibiSlopes) {
    EXPECT_EQ(alibi_slopes(1), (Vector{std::exp2(-8)}));
    EXPECT_EQ(alibi_slopes(4), (Vector{std::exp2(-2), std::exp2(-4), std::exp2(-6), std::exp2(-8)}));
    EXPECT_EQ(alibi_slopes(3), (Vector{std::exp2(-4), std::exp2(-8), std::exp2(-2)}));
    EXPECT_EQ(alibi_slopes(6),
              (Vector{std::exp2(-2), std::exp2(-4), std::exp2(-6), std::exp2(-8), std::exp2(-1), std::exp2(-3)}));
    EXPECT_EQ(alibi_table(2, 3), (Vector{0, -std::exp2(-4), -std::exp2(-3), 0, -std::exp2(-8), -std::exp2(-7)}));
}

TEST(Reference, Errors) {
    const auto message_of = [](const auto& body) -> std::string {
        try {
            body();
        } catch (const Error& error) {
            return error.what();
        }
        return "no error";
    };
    EXPECT_EQ(message_of([] { with_method({}, "rop"); }), "reference: rop is no position method");
    EXPECT_EQ(message_of([] {
                  rotary_table({Rotary::kJordan, 10000, 1}, 4, 4, 6);
              }),
              "reference: jordan head dim is 6, wanted a multiple of 4");
    EXPECT_EQ(message_of([] { embedding_forward({0, 0}, {2}, 1); }), "reference: token is 2, wanted 0 <= it < 2");
    EXPECT_EQ(message_of([] {
                  attention_forward({1, 2}, {1, 2}, {1}, {}, 1, 1);
              }),
              "reference: v has 1 elements, wanted 2");
}

}  // namespace
}  // namespace jetlag::reference
