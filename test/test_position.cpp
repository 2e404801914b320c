// The position modules and their tables: every method of methods(), and composed ones. A method that is added to the
// table is picked up: finite differences, determinism and change of length need nothing that is written for it here.
// The comparisons with test/reference/ and with long double know the modules of the published study by name.
#include <fmt/format.h>

#include <algorithm>
#include <numbers>
#include <optional>

#include "models/model.h"
#include "test/kernel_support.h"
#include "test/reference/reference.h"

namespace jetlag::test {
namespace {

// ---- The methods under test ----------------------------------------------------------------------------------------

using Overrides = std::vector<std::string>;

struct Case {
    std::string name;
    Overrides overrides;
};
void PrintTo(const Case& c, std::ostream* out) {
    *out << c.name;
}

std::vector<Case> all_cases() {
    std::vector<Case> list;
    for (const Method& method : methods())
        list.push_back({method.name, {std::string("model.position=") + method.name}});
    const std::string rotary = "model.position.rotary.", bias = "model.position.lag_bias.";
    const Overrides definition_1 = {bias + "frequencies=3", bias + "constant=true", bias + "lc_damping=true"};
    const auto with = [](Overrides list, const Overrides& more) {
        list.insert(list.end(), more.begin(), more.end());
        return list;
    };
    list.push_back({"ntk_base_100_affine_lc",
                    {rotary + "kind=ntk", rotary + "base=100", bias + "sectors=[affine, lc]", bias + "max_order=2"}});
    list.push_back({"jordan_eta_fj", {rotary + "kind=jordan", rotary + "eta=-0.5", bias + "sectors=[fj]"}});
    list.push_back({"rope_alibi", {rotary + "kind=rope", bias + "kind=alibi"}});
    list.push_back({"definition_1", with(definition_1, {bias + "sectors=[fj, affine, lc]"})});
    list.push_back({"definition_1_order_0", with(definition_1, {bias + "sectors=[fj, lc]", bias + "max_order=0"})});
    list.push_back({"definition_1_lc_order_7", with(definition_1, {bias + "sectors=[lc]", bias + "max_order=7"})});
    list.push_back({"definition_1_affine", with(definition_1, {bias + "sectors=[affine]"})});
    list.push_back(
        {"yarn_definition_1", with(definition_1, {rotary + "kind=yarn", bias + "sectors=[fj, affine, lc]"})});
    return list;
}

// A small model of that position method: L = train_len, head dim C / H.
ModelShape make_shape(const Case& c, int64_t train_len, int64_t C = 32, int64_t H = 4) {
    std::vector<Setting> settings;
    Overrides overrides = c.overrides;
    overrides.push_back(fmt::format("train.context={}", train_len));
    overrides.push_back(fmt::format("model.embed_dim={}", C));
    overrides.push_back(fmt::format("model.heads={}", H));
    add_overrides(settings, overrides);
    ModelShape shape = model_shape(make_config(settings));
    shape.vocab = 11;
    return shape;
}

class Position : public testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Methods, Position, testing::ValuesIn(all_cases()),
                         [](const auto& info) { return info.param.name; });

template <typename Spec>
std::optional<double> option_of(const Spec& spec, const std::string& name) {
    const std::vector<Option> options = spec.module->options();
    for (size_t i = 0; i < options.size(); i++)
        if (options[i].name == name) return spec.options[i];
    return std::nullopt;
}

// What test/reference/ calls the same thing; nothing for a module that it does not know.
std::optional<reference::RotarySettings> reference_rotary(const RotarySpec& spec) {
    using enum reference::Rotary;
    const std::map<std::string, reference::Rotary> kinds = {
        {"rope", kRope}, {"pi", kPi}, {"ntk", kNtk}, {"yarn", kYarn}, {"jordan", kJordan}};
    if (spec.module == nullptr) return reference::RotarySettings{};
    if (!kinds.contains(spec.module->name)) return std::nullopt;
    return reference::RotarySettings{kinds.at(spec.module->name), option_of(spec, "base").value(),
                                     option_of(spec, "eta").value_or(1)};
}

std::optional<reference::LagBiasSettings> reference_lag_bias(const LagBiasSpec& spec) {
    if (spec.module == nullptr) return reference::LagBiasSettings{};
    if (std::string(spec.module->name) != "pj") return std::nullopt;
    const auto integer = [&](const char* name) { return static_cast<int64_t>(option_of(spec, name).value()); };
    const int64_t sectors = integer("sectors");
    reference::LagBiasSettings settings;
    settings.fj = (sectors & 1) != 0;
    settings.affine = (sectors & 2) != 0;
    settings.lc = (sectors & 4) != 0;
    settings.max_order = integer("max_order");
    settings.frequencies = integer("frequencies");
    settings.constant = integer("constant") != 0;
    settings.lc_damping = integer("lc_damping") != 0;
    return settings;
}

// Parameters at which every tensor matters: near their initial values, random where those are 0 or drawn.
Floats lag_bias_parameters(const LagBiasSpec& spec, TorchGenerator& generator) {
    Floats values;
    for (const BiasParameter& parameter : spec.module->parameters(spec)) {
        const Floats noise = normals(generator, reference::element_count(parameter.shape));
        for (size_t i = 0; i < noise.size(); i++) {
            const float initial = parameter.initial.empty() ? 0 : parameter.initial[i];
            values.push_back(initial != 0 ? initial * (1 + 0.1f * noise[i]) : 0.5f * noise[i]);
        }
    }
    return values;
}

reference::Tensors named_tensors(const LagBiasSpec& spec, const Floats& values) {
    reference::Tensors tensors;
    auto next = values.begin();
    for (const BiasParameter& parameter : spec.module->parameters(spec)) {
        const int64_t size = reference::element_count(parameter.shape);
        tensors[parameter.name] = Doubles(next, next + size);
        next += size;
    }
    EXPECT_EQ(next, values.end());
    return tensors;
}

struct HostRotary {
    int64_t pairs = 0;
    Floats query_cos, query_sin, key_cos, key_sin, shear;
};

HostRotary make_rotary_table(const RotarySpec& spec, int64_t T) {
    const int64_t P = spec.head_dim / 2;
    const FloatBuffer query_cos(T * P), query_sin(T * P), key_cos(T * P), key_sin(T * P), shear(T);
    const bool sheared = spec.module->shear != nullptr;
    rotary_table(
        {P, query_cos.data(), query_sin.data(), key_cos.data(), key_sin.data(), sheared ? shear.data() : nullptr}, spec,
        T);
    return {P, query_cos.read(), query_sin.read(), key_cos.read(), key_sin.read(), sheared ? shear.read() : Floats()};
}

Floats make_lag_bias_table(const LagBiasSpec& spec, const Floats& parameters, int64_t T) {
    const FloatBuffer table(spec.heads * T);
    lag_bias_table(table.data(), spec, FloatBuffer(parameters).data(), T);
    return table.read();
}

Floats make_lag_bias_gradient(const LagBiasSpec& spec, const Floats& parameters, const Floats& dtable, int64_t T,
                              const Floats& before) {
    const FloatBuffer gradient(before);
    lag_bias_table_backward(gradient.data(), FloatBuffer(dtable).data(), spec, FloatBuffer(parameters).data(), T);
    return gradient.read();
}

// ---- Tables against test/reference/ --------------------------------------------------------------------------------

// One rounding to float, of values up to about 1 or with the size of the bias.
void expect_near(const Floats& found, const Doubles& want, const char* what) {
    ASSERT_EQ(found.size(), want.size()) << what;
    for (size_t i = 0; i < want.size(); i++)
        ASSERT_LE(std::fabs(found[i] - want[i]), 1e-7 * std::max(1.0, std::fabs(want[i]))) << what << " " << i;
}

TEST_P(Position, TablesMatchTheReference) {
    const int64_t L = 64;
    const ModelShape shape = make_shape(GetParam(), L);
    int compared = 0;
    for (const int64_t T : {1, 2, 63, 64, 65, 300}) {
        SCOPED_TRACE(T);
        if (const auto settings = reference_rotary(shape.rotary); settings && shape.rotary.module != nullptr) {
            const reference::RotaryTable want = reference::rotary_table(*settings, L, T, shape.head_dim);
            const HostRotary found = make_rotary_table(shape.rotary, T);
            expect_near(found.query_cos, want.query_cosine, "query cosine");
            expect_near(found.query_sin, want.query_sine, "query sine");
            expect_near(found.key_cos, want.key_cosine, "key cosine");
            expect_near(found.key_sin, want.key_sine, "key sine");
            expect_near(found.shear, want.shear, "shear");
            compared++;
        }
        if (shape.lag_bias.module == nullptr) continue;
        TorchGenerator generator = make_generator(1);
        const Floats parameters = lag_bias_parameters(shape.lag_bias, generator);
        const Floats found = make_lag_bias_table(shape.lag_bias, parameters, T);
        const int64_t H = shape.heads;
        if (std::string(shape.lag_bias.module->name) == "alibi") {
            expect_near(found, reference::alibi_table(H, T), "ALiBi");
            compared++;
        } else if (const auto settings = reference_lag_bias(shape.lag_bias)) {
            const reference::Tensors tensors = named_tensors(shape.lag_bias, parameters);
            expect_near(found, reference::lag_bias_table(*settings, tensors, H, L, T), "lag bias");
            compared++;

            const Floats dtable = normals(generator, H * T), before = normals(generator, std::ssize(parameters));
            reference::Tensors want = named_tensors(shape.lag_bias, before);
            reference::lag_bias_backward(*settings, tensors, H, L, T, to_doubles(dtable), want);
            const reference::Tensors gradient =
                named_tensors(shape.lag_bias, make_lag_bias_gradient(shape.lag_bias, parameters, dtable, T, before));
            // Sums are in double; the result is rounded to float and added in float.
            for (const auto& [name, values] : want)
                for (size_t i = 0; i < values.size(); i++)
                    EXPECT_LE(std::fabs(gradient.at(name)[i] - values[i]), 3e-7 * (1 + std::fabs(values[i]))) << name;
        }
    }
    // Every method of the study is compared, and a name means what the reference says it means.
    const std::vector<std::string>& known = reference::method_names();
    if (std::find(known.begin(), known.end(), GetParam().name) != known.end()) {
        const reference::ModelSettings want = reference::with_method({}, GetParam().name);
        EXPECT_EQ(reference_rotary(shape.rotary).value().kind, want.rotary.kind);
        const bool has_bias = reference::has_any_sector(want.lag_bias) || want.alibi;
        EXPECT_EQ(shape.lag_bias.module != nullptr, has_bias);
        if (reference::has_any_sector(want.lag_bias)) {
            const reference::LagBiasSettings found = reference_lag_bias(shape.lag_bias).value();
            EXPECT_EQ(found.fj, want.lag_bias.fj);
            EXPECT_EQ(found.affine, want.lag_bias.affine);
            EXPECT_EQ(found.lc, want.lag_bias.lc);
        }
        EXPECT_EQ(compared, 6 * ((shape.rotary.module != nullptr) + has_bias));
    }
}

// Shapes, names, what takes part and initial values; the parts that are drawn are tested with the model.
TEST_P(Position, ParametersMatchTheReference) {
    for (const int64_t H : {1, 4, 6}) {
        const ModelShape shape = make_shape(GetParam(), 100, 48, H);
        const auto settings = reference_lag_bias(shape.lag_bias);
        if (!settings || shape.lag_bias.module == nullptr) continue;
        const auto shapes = reference::lag_bias_shapes(*settings, H);
        const reference::Tensors initial = reference::initial_lag_bias(*settings, H, 100);
        const std::vector<BiasParameter> parameters = shape.lag_bias.module->parameters(shape.lag_bias);
        EXPECT_EQ(parameters.size(), shapes.size());
        int64_t count = 0;
        for (const BiasParameter& parameter : parameters) {
            SCOPED_TRACE(parameter.name);
            ASSERT_TRUE(shapes.contains(parameter.name));
            EXPECT_EQ(parameter.shape, shapes.at(parameter.name));
            EXPECT_EQ(parameter.takes_part, reference::lag_bias_takes_part(*settings, parameter.name));
            count += reference::element_count(parameter.shape);
            if (parameter.name.find("zeta") != std::string::npos) {
                EXPECT_TRUE(parameter.initial.empty());
                EXPECT_EQ(parameter.normal_std, 0.02);
            } else {
                expect_near(parameter.initial, initial.at(parameter.name), "initial value");
            }
        }
        EXPECT_EQ(bias_parameter_count(shape.lag_bias), count);
    }
}

TEST(Alibi, SlopesOfAnyNumberOfHeads) {
    const Case alibi = {"alibi", {"model.position=alibi"}};
    for (const int64_t H : {1, 2, 3, 5, 6, 8, 12, 16, 20}) {
        const Floats table = make_lag_bias_table(make_shape(alibi, 64, 4 * H, H).lag_bias, {}, 50);
        expect_near(table, reference::alibi_table(H, 50), "ALiBi");
    }
}

// ---- Accuracy at long lags, against long double --------------------------------------------------------------------

using Real = long double;

// Position t of pair p as DESIGN writes it: the angle, and the gain of q and k.
std::pair<Real, Real> rotation_in_long_double(const reference::RotarySettings& settings, int64_t L, int64_t T,
                                              int64_t D, int64_t t, int64_t p) {
    using enum reference::Rotary;
    Real base = settings.base, position = t, gain = 1;
    const bool longer = T > L;
    const Real stretch = static_cast<Real>(T) / L;
    if (settings.kind == kNtk && longer) base *= std::pow(stretch, static_cast<Real>(D) / (D - 2));
    if (settings.kind == kPi && longer) position = position * (L - 1) / (T - 1);
    const Real exponent = settings.kind == kJordan ? (p / 2) / static_cast<Real>(D / 4) : 2 * p / static_cast<Real>(D);
    Real frequency = std::pow(base, -exponent);
    if (settings.kind == kYarn && longer) {
        const Real turns = L * frequency / (2 * std::numbers::pi_v<Real>);
        const Real keep = std::clamp((turns - 1) / 31, Real{0}, Real{1});
        frequency = frequency / stretch * (1 - keep) + frequency * keep;
        gain = 1 + std::log(stretch) / 10;
    }
    return {position * frequency, gain};
}

// bias(d) of one head, from the parameters as they are stored.
Real lag_bias_in_long_double(const reference::LagBiasSettings& settings, const reference::Tensors& tensors, int64_t h,
                             int64_t L, int64_t d) {
    const int64_t R = settings.max_order, F = settings.frequencies;
    const auto entry = [&](const char* name, int64_t width, int64_t i) {
        return static_cast<Real>(tensors.at(name)[static_cast<size_t>(h * width + i)]);
    };
    const auto softmax = [&](const char* name, int64_t width, int64_t at, const std::vector<bool>& enabled) {
        Real sum = 0;
        for (int64_t i = 0; i < width; i++)
            if (enabled[i]) sum += std::exp(entry(name, width, i));
        return enabled[at] ? std::exp(entry(name, width, at)) / sum : 0;
    };
    const auto softplus = [&](const char* name) { return std::log1p(std::exp(entry(name, 1, 0))); };
    const auto jets = [&](const std::string& sector, Real lag, auto basis) {
        Real sum = 0;
        for (int64_t m = 0; m < F; m++) {
            const Real angle = entry("omega", F, m) * lag;
            for (int64_t r = 0; r <= R; r++) {
                const Real re = entry((sector + "_zeta_re").c_str(), F * (R + 1), m * (R + 1) + r);
                const Real im = entry((sector + "_zeta_im").c_str(), F * (R + 1), m * (R + 1) + r);
                sum += softmax((sector + "_alpha_logits").c_str(), R + 1, r, std::vector<bool>(R + 1, true)) *
                       basis(r) * (re * std::cos(angle) - im * std::sin(angle));
            }
        }
        return sum;
    };
    const std::vector<bool> enabled = {settings.fj, settings.affine, settings.lc};
    const Real u = static_cast<Real>(d) / L;
    Real bias = settings.constant ? entry("b0", 1, 0) : 0;
    if (settings.fj)
        bias += softmax("gate_logits", 3, 0, enabled) * std::exp(-softplus("raw_fj_damping") * u) *
                jets("fj", d, [&](int64_t r) { return std::pow(u, Real(r)) / std::tgamma(Real(r + 1)); });
    if (settings.affine) bias -= softmax("gate_logits", 3, 1, enabled) * softplus("raw_affine_slope") * u;
    if (settings.lc) {
        const Real rapidity = std::asinh(u), beta = u / std::sqrt(u * u + 1);
        bias += softmax("gate_logits", 3, 2, enabled) *
                (settings.lc_damping ? std::exp(-softplus("raw_lc_damping") * rapidity) : 1) *
                jets("lc", L * rapidity, [&](int64_t r) { return std::pow(beta, Real(r)); });
    }
    return bias;
}

// Positions and lags up to 32768: all of the first and last ones, a sample between.
std::vector<int64_t> long_sample(int64_t T) {
    std::vector<int64_t> sample;
    for (int64_t t = 0; t < T; t += t < 100 || t > T - 100 ? 1 : 97) sample.push_back(t);
    sample.push_back(T - 1);
    return sample;
}

TEST_P(Position, TablesAreRightTo1e7AtAnyLength) {
    const int64_t T = 32769;
    for (const int64_t L : {64, 1024, 32769, 40000}) {
        SCOPED_TRACE(L);
        const ModelShape shape = make_shape(GetParam(), L, 64, 2);
        if (const auto settings = reference_rotary(shape.rotary); settings && shape.rotary.module != nullptr) {
            const HostRotary found = make_rotary_table(shape.rotary, T);
            const int64_t P = found.pairs;
            for (const int64_t t : long_sample(T)) {
                for (int64_t p = 0; p < P; p++) {
                    const auto [angle, gain] = rotation_in_long_double(*settings, L, T, 2 * P, t, p);
                    const size_t i = static_cast<size_t>(t * P + p);
                    ASSERT_LE(std::fabs(found.query_cos[i] - gain * std::cos(angle)), 1e-7) << t << " " << p;
                    ASSERT_LE(std::fabs(found.query_sin[i] - gain * std::sin(angle)), 1e-7) << t << " " << p;
                    ASSERT_LE(std::fabs(found.key_cos[i] - gain * std::cos(angle)), 1e-7) << t << " " << p;
                    ASSERT_LE(std::fabs(found.key_sin[i] - gain * std::sin(angle)), 1e-7) << t << " " << p;
                }
                if (!found.shear.empty()) {
                    const Real want = static_cast<Real>(settings->jordan_eta) * t / L;
                    ASSERT_LE(std::fabs(found.shear[static_cast<size_t>(t)] - want),
                              1e-7 * std::max(Real{1}, std::fabs(want)));
                }
            }
        }
        if (const auto settings = reference_lag_bias(shape.lag_bias); settings && shape.lag_bias.module != nullptr) {
            TorchGenerator generator = make_generator(2);
            const Floats parameters = lag_bias_parameters(shape.lag_bias, generator);
            const reference::Tensors tensors = named_tensors(shape.lag_bias, parameters);
            const Floats found = make_lag_bias_table(shape.lag_bias, parameters, T);
            for (int64_t h = 0; h < shape.heads; h++)
                for (const int64_t d : long_sample(T)) {
                    const Real want = lag_bias_in_long_double(*settings, tensors, h, L, d);
                    ASSERT_LE(std::fabs(found[static_cast<size_t>(h * T + d)] - want),
                              1e-7 * std::max(Real{1}, std::fabs(want)))
                        << "head " << h << " lag " << d;
                }
        }
    }
}

// ---- Gradients -----------------------------------------------------------------------------------------------------

// Central differences of fourth order, in double, of sum w bias with random w; parameters and steps are multiples of
// powers of two, so that the floats that the module reads are exactly those meant. The step 2^-14 makes the error of
// the difference h^4 f^(5) / 30, with f^(5) up to (T d/d lag)^5 for omega, some 1e-9 of the gradient.
TEST_P(Position, LagBiasGradientsAreDifferences) {
    const LagBiasSpec spec = make_shape(GetParam(), 64).lag_bias;
    if (spec.module == nullptr) return;
    const int64_t T = 150, H = spec.heads;
    TorchGenerator generator = make_generator(3);
    Floats parameters = lag_bias_parameters(spec, generator);
    for (float& value : parameters) value = std::round(value * 0x1p16f) * 0x1p-16f;
    const Floats weights = normals(generator, H * T);
    const auto bias_of = [&](const Floats& at, int64_t h, int64_t d) {
        Doubles c(static_cast<size_t>(spec.module->coefficient_count(spec)));
        spec.module->coefficients(spec, at.data(), h, c.data());
        return spec.module->bias(spec, c.data(), static_cast<double>(d));
    };
    Floats dtable = weights;
    const auto value = [&](const Floats& at) {
        double sum = 0;
        for (int64_t h = 0; h < H; h++) {
            Doubles c(static_cast<size_t>(spec.module->coefficient_count(spec)));
            spec.module->coefficients(spec, at.data(), h, c.data());
            for (int64_t d = 0; d < T; d++) {
                const double bias = spec.module->bias(spec, c.data(), static_cast<double>(d));
                if (bias != -INFINITY) sum += weights[static_cast<size_t>(h * T + d)] * bias;
            }
        }
        return sum;
    };
    // A masked pair has no gradient.
    for (int64_t h = 0; h < H; h++)
        for (int64_t d = 0; d < T; d++)
            if (bias_of(parameters, h, d) == -INFINITY) dtable[static_cast<size_t>(h * T + d)] = 0;

    const Floats zeros(parameters.size(), 0.0f);
    const Floats found = make_lag_bias_gradient(spec, parameters, dtable, T, zeros);
    const double h = 0x1p-14;
    size_t first = 0;
    for (const BiasParameter& parameter : spec.module->parameters(spec)) {
        const size_t size = static_cast<size_t>(reference::element_count(parameter.shape));
        Doubles want(size);
        for (size_t i = 0; i < size; i++) {
            const auto at = [&](double step) {
                Floats moved = parameters;
                moved[first + i] += static_cast<float>(step);
                return value(moved);
            };
            want[i] = (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h);
        }
        const Floats tensor(found.begin() + static_cast<int64_t>(first),
                            found.begin() + static_cast<int64_t>(first + size));
        // Differences are good to 1e-16 / h of the values summed, some 100.
        EXPECT_LE(distance(tensor, want), 1e-6 * norm(want) + 1e-9) << parameter.name;
        if (!parameter.takes_part) {
            EXPECT_EQ(norm(tensor), 0) << parameter.name << " takes no part but has a gradient";
        }
        first += size;
    }

    // Gradients accumulate, here onto random values.
    const Floats before = normals(generator, std::ssize(parameters));
    const Floats after = make_lag_bias_gradient(spec, parameters, dtable, T, before);
    for (size_t i = 0; i < before.size(); i++) EXPECT_EQ(after[i], before[i] + found[i]);
}

struct Example {
    ModelShape shape;
    Model model;
    std::vector<int32_t> tokens, targets;
    int64_t B, T;
};

// A model whose lag biases are large enough to matter, and a batch.
Example make_example(const Case& c, int64_t train_len, int64_t B, int64_t T, int64_t C = 32) {
    Example e{make_shape(c, train_len, C), {}, {}, {}, B, T};
    e.model = make_model(e.shape);
    TorchGenerator generator = make_generator(4);
    initialize_model(e.model, generator);
    if (e.shape.lag_bias.module != nullptr) {
        const std::string part = std::string(".attn.") + e.shape.lag_bias.module->state_name + ".";
        const int64_t count = bias_parameter_count(e.shape.lag_bias);
        int64_t at = 0;
        Floats values;
        for (const ParameterInfo& info : e.model.layout) {
            if (info.name.find(part) == std::string::npos) continue;
            if (at % count == 0) {
                values = lag_bias_parameters(e.shape.lag_bias, generator);
                at = 0;
            }
            copy_to_device(e.model.parameters.data + info.offset, values.data() + at,
                           static_cast<size_t>(info.size) * sizeof(float));
            at += info.size;
        }
    }
    e.tokens = random_tokens(generator, B * T, e.shape.vocab);
    e.targets = random_tokens(generator, B * T, e.shape.vocab);
    return e;
}

Floats host_copy(const DeviceArray<float>& values) {
    Floats copy(static_cast<size_t>(values.size));
    copy_to_host(copy.data(), values.data, values.bytes());
    return copy;
}

double loss_and_gradient(const Example& e, Floats* gradient) {
    Activations acts = make_activations(e.shape, e.B, e.T, Mode::training, false);
    DeviceArray<float> gradients(e.model.parameters.size);
    const double loss = train_batch(e.model, acts, gradients, e.tokens, e.targets, e.B, e.T, 1.0);
    if (gradient != nullptr) *gradient = host_copy(gradients);
    return loss;
}

// Loss and every gradient of a whole model at another length than it was made for, for composed positions too. Models
// as small as these are quickest on one thread.
TEST_P(Position, ModelsMatchTheReference) {
    const ThreadCount one(1);
    const int64_t L = 16;
    for (const int64_t T : {7, 40}) {
        const Example e = make_example(GetParam(), L, 2, T);
        reference::ModelSettings settings;
        const auto rotary = reference_rotary(e.shape.rotary);
        const auto lag_bias = reference_lag_bias(e.shape.lag_bias);
        settings.alibi = e.shape.lag_bias.module != nullptr && std::string(e.shape.lag_bias.module->name) == "alibi";
        if (!rotary || (!lag_bias && !settings.alibi)) return;
        settings.layers = e.shape.layers;
        settings.embed_dim = e.shape.embed_dim;
        settings.heads = e.shape.heads;
        settings.vocab = e.shape.vocab;
        settings.train_len = L;
        settings.rotary = *rotary;
        settings.lag_bias = lag_bias.value_or(reference::LagBiasSettings{});
        reference::Tensors parameters;
        const Floats values = host_copy(e.model.parameters);
        for (const ParameterInfo& info : e.model.layout)
            parameters[info.name] = Doubles(values.begin() + info.offset, values.begin() + info.offset + info.size);
        const reference::ModelOutput want =
            reference::model_gradients(settings, parameters, e.tokens, e.targets, e.B, T);
        Floats gradient;
        EXPECT_NEAR(loss_and_gradient(e, &gradient), want.loss, by_precision(2e-6, 2e-2));
        double whole = 0;
        for (const auto& [name, values] : want.gradients) whole = std::hypot(whole, norm(values));
        for (const ParameterInfo& info : e.model.layout) {
            const Doubles& want_tensor = want.gradients.at(info.name);
            const Floats found(gradient.begin() + info.offset, gradient.begin() + info.offset + info.size);
            // Gradients that are zero in exact arithmetic (of key biases, say) are rounding here.
            EXPECT_LE(distance(found, want_tensor),
                      by_precision(2e-5, 0.1) * norm(want_tensor) + by_precision(1e-7, 1e-2) * whole)
                << info.name;
        }
    }
}

// The directional derivative along the gradient is the gradient's norm. Losses are good to about 1e-7 and change by
// some 1e-2 here, so differences are good to 1e-4 or so of their value; extrapolation takes the error of order h^2
// away.
TEST_P(Position, ModelGradientsAreDirectionalDifferences) {
    if (kHalfPrecision || kTf32) GTEST_SKIP() << "differences of losses are their roundings";
    const ThreadCount one(1);
    Example e = make_example(GetParam(), 16, 2, 40);
    Floats gradient;
    loss_and_gradient(e, &gradient);
    const Floats parameters = host_copy(e.model.parameters);
    for (const bool only_bias : {false, true}) {
        if (only_bias && bias_parameter_count(e.shape.lag_bias) == 0) continue;
        SCOPED_TRACE(only_bias ? "lag bias alone" : "all parameters");
        Doubles direction(gradient.begin(), gradient.end());
        if (only_bias)
            for (const ParameterInfo& info : e.model.layout)
                if (info.name.find(std::string(".") + e.shape.lag_bias.module->state_name + ".") == std::string::npos)
                    std::fill_n(direction.begin() + info.offset, info.size, 0.0);
        const double slope = norm(direction);
        ASSERT_GT(slope, 1e-4);
        const auto loss_at = [&](double way) {
            Floats moved(parameters.size());
            for (size_t i = 0; i < moved.size(); i++)
                moved[i] = static_cast<float>(parameters[i] + way * direction[i] / slope);
            copy_to_device(e.model.parameters.data, moved.data(), moved.size() * sizeof(float));
            return loss_and_gradient(e, nullptr);
        };
        const double h = std::min(0.02, 0.005 / slope);
        const double narrow = (loss_at(h) - loss_at(-h)) / (2 * h);
        const double wide = (loss_at(2 * h) - loss_at(-2 * h)) / (4 * h);
        EXPECT_NEAR((4 * narrow - wide) / 3 / slope, 1, 1e-3 + 2e-7 / (h * slope));
    }
}

// ---- Determinism, and change of length -----------------------------------------------------------------------------

TEST_P(Position, TheSameBitsWithAnyNumberOfThreads) {
    const ModelShape shape = make_shape(GetParam(), 64, 96);
    const int64_t T = 2000;
    TorchGenerator generator = make_generator(5);
    Floats parameters;
    if (shape.lag_bias.module != nullptr) parameters = lag_bias_parameters(shape.lag_bias, generator);
    const Floats dtable = normals(generator, shape.heads * T);
    expect_same_for_every_thread_count([&] {
        std::vector<Floats> results;
        if (shape.rotary.module != nullptr) {
            const HostRotary table = make_rotary_table(shape.rotary, T);
            results = {table.query_cos, table.query_sin, table.key_cos, table.key_sin, table.shear};
        }
        if (shape.lag_bias.module != nullptr) {
            results.push_back(make_lag_bias_table(shape.lag_bias, parameters, T));
            results.push_back(make_lag_bias_gradient(shape.lag_bias, parameters, dtable, T, parameters));
        }
        return results;
    });
    const Example e = make_example(GetParam(), 64, 2, 200, 64);
    expect_same_for_every_thread_count([&] {
        Floats gradient;
        const double loss = loss_and_gradient(e, &gradient);
        gradient.push_back(static_cast<float>(loss));
        gradient.push_back(static_cast<float>(loss - static_cast<float>(loss)));
        return std::vector<Floats>{gradient};
    });
}

// The same memory serves one length after another; each evaluation equals that of fresh memory.
TEST_P(Position, LengthsMayChange) {
    const ThreadCount one(1);
    const Example e = make_example(GetParam(), 32, 1, 100);
    Activations acts = make_activations(e.shape, 1, 100, Mode::inference, true);
    for (const int64_t T : {32, 100, 1, 33, 100}) {
        SCOPED_TRACE(T);
        const std::span<const int32_t> tokens(e.tokens.data(), static_cast<size_t>(T));
        const std::span<const int32_t> targets(e.targets.data(), static_cast<size_t>(T));
        Activations fresh = make_activations(e.shape, 1, T, Mode::inference, true);
        const BatchResult found = evaluate_batch(e.model, acts, tokens, targets, 1, T, T);
        const BatchResult want = evaluate_batch(e.model, fresh, tokens, targets, 1, T, T);
        EXPECT_EQ(found.losses, want.losses);
        EXPECT_EQ(found.entropy, want.entropy);
        EXPECT_EQ(found.mean_lag, want.mean_lag);
        EXPECT_TRUE(std::isfinite(found.loss));
    }
}

// ---- The relative law ----------------------------------------------------------------------------------------------

// The score of query content at i and key content at j, from the float table in double, as ops.h writes it.
double score(const HostRotary& table, const Floats& q, const Floats& k, int64_t i, int64_t j) {
    Doubles query = to_doubles(q), key = to_doubles(k);
    const int64_t P = table.pairs;
    if (!table.shear.empty())
        for (int64_t b = 0; b < P / 2; b++)
            for (int64_t x = 4 * b; x < 4 * b + 2; x++) {
                query[x] += static_cast<double>(table.shear[i]) * query[x + 2];
                key[x + 2] -= static_cast<double>(table.shear[j]) * key[x];
            }
    double sum = 0;
    for (int64_t p = 0; p < P; p++) {
        const double qc = table.query_cos[i * P + p], qs = table.query_sin[i * P + p];
        const double kc = table.key_cos[j * P + p], ks = table.key_sin[j * P + p];
        const double qx = query[2 * p], qy = query[2 * p + 1], kx = key[2 * p], ky = key[2 * p + 1];
        sum += (qx * qc - qy * qs) * (kx * kc - ky * ks) + (qx * qs + qy * qc) * (kx * ks + ky * kc);
    }
    return sum;
}

// |q| |k| times the shears' growth: what rounding errors of q, k, cosines and sines are relative to.
double score_size(const HostRotary& table, const Floats& q, const Floats& k, int64_t t) {
    const double grown = table.shear.empty() ? 1 : 1 + std::fabs(table.shear[static_cast<size_t>(t)]);
    return norm(q) * norm(k) * grown * grown;
}

Case relative_case(bool jordan) {
    return jordan ? Case{"pj_rotary", {"model.position=pj_rotary"}} : Case{"rope", {"model.position=rope"}};
}

// Cosines and sines are rounded once, at i and at j: two errors of 2^-24 each in every product.
TEST(RelativeLaw, ScoresFromTheTable) {
    const int64_t T = 32769, D = 24, L = 1024;
    for (const bool jordan : {false, true}) {
        const HostRotary table = make_rotary_table(make_shape(relative_case(jordan), L, 2 * D, 2).rotary, T);
        TorchGenerator generator = make_generator(6);
        for (int repeat = 0; repeat < 20; repeat++) {
            const Floats q = normals(generator, D), k = normals(generator, D);
            for (const int64_t lag : {0, 1, 7, 1000, 20000, 32768}) {
                const double want = score(table, q, k, lag, 0);
                for (int64_t i = lag; i < T; i += 311)
                    ASSERT_NEAR(score(table, q, k, i, i - lag), want, 4 * kRounding * score_size(table, q, k, i))
                        << "lag " << lag << " at " << i;
            }
            // The law is about something: another lag has another score.
            EXPECT_GT(std::fabs(score(table, q, k, 1000, 0) - score(table, q, k, 1001, 0)), 1e-3);
        }
    }
}

// The op itself. All rows have the same q and the same k; the lag bias lets each head see one lag, so that the
// log-sum-exp of a row is its score at that lag.
TEST(RelativeLaw, ScoresFromAttention) {
    const int64_t T = 32769, D = 8, L = 1024, H = 3;
    const int64_t lags[] = {1, 1500, 30000};
    for (const bool jordan : {false, true}) {
        const RotarySpec spec = make_shape(relative_case(jordan), L, H * D, H).rotary;
        const HostRotary table = make_rotary_table(spec, T);
        TorchGenerator generator = make_generator(7);
        const Floats content = normals(generator, 3 * H * D);
        Floats qkv;
        for (int64_t t = 0; t < T; t++) qkv.insert(qkv.end(), content.begin(), content.end());
        Floats bias(static_cast<size_t>(H * T), -kInfinity);
        for (int64_t h = 0; h < H; h++) bias[static_cast<size_t>(h * T + lags[h])] = 0;

        const FloatBuffer query_cos(table.query_cos), query_sin(table.query_sin), key_cos(table.key_cos);
        const FloatBuffer key_sin(table.key_sin), shear(table.shear), lse(H * T);
        const RealBuffer out(T * H * D);
        const FloatBuffer workspace(attention_workspace_floats(1, T, H, D));
        attention_forward(out.data(), lse.data(), nullptr, RealBuffer(qkv).data(),
                          {table.pairs, query_cos.data(), query_sin.data(), key_cos.data(), key_sin.data(),
                           jordan ? shear.data() : nullptr},
                          FloatBuffer(bias).data(), workspace.data(), 1, T, H, D);
        const Floats found = lse.read();
        for (int64_t h = 0; h < H; h++) {
            const Floats q(content.begin() + h * D, content.begin() + (h + 1) * D);
            const Floats k(content.begin() + (H + h) * D, content.begin() + (H + h + 1) * D);
            const double want = score(table, q, k, lags[h], 0) / std::sqrt(static_cast<double>(D));
            for (int64_t i = 0; i < T; i++) {
                const float row = found[static_cast<size_t>(h * T + i)];
                if (i < lags[h]) {
                    ASSERT_EQ(row, -kInfinity) << "row " << i << " sees nothing";
                } else {
                    // Besides the table: q and k are sheared and turned in float, and D products are summed.
                    ASSERT_NEAR(row, want,
                                (8 * kRounding + 2 * kRealRounding + 2 * kOperandRounding) * score_size(table, q, k, i))
                        << "lag " << lags[h] << " at " << i;
                }
            }
        }
    }
}

}  // namespace
}  // namespace jetlag::test
