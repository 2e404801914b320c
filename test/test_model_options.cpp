// The options of a model beside its position method: a strict mask, a classifier's head, frozen queries and keys.
// Losses and gradients against test/reference/, and what the options promise.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "models/model.h"
#include "test/kernel_support.h"
#include "test/reference/reference.h"

namespace jetlag::test {
namespace {

struct Options {
    const char* position;
    bool strict_mask, freeze_qk;
    int64_t classes;
};

std::vector<Options> all_options() {
    std::vector<Options> list;
    for (const char* position : {"none", "rope", "affine", "full"})
        for (const bool strict : {false, true})
            for (const bool freeze : {false, true})
                for (const int64_t classes : {0, 2}) list.push_back({position, strict, freeze, classes});
    return list;
}

std::string name_of(const Options& o) {
    return fmt::format("{}{}{}{}", o.position, o.strict_mask ? "_strict" : "", o.freeze_qk ? "_frozen" : "",
                       o.classes > 0 ? "_classes" : "");
}

struct Example {
    Model model;
    std::vector<int32_t> tokens, targets;
    int64_t B, T;
};

// A small model at L = 16 with lag biases that matter, and a batch of random tokens.
Example make_example(const Options& o, int64_t B, int64_t T, int64_t layers = 2, int64_t C = 32) {
    std::vector<Setting> settings;
    add_overrides(settings, {fmt::format("model.position={}", o.position), "train.context=16",
                             fmt::format("model.embed_dim={}", C), fmt::format("model.layers={}", layers)});
    ModelShape shape = model_shape(make_config(settings));
    shape.vocab = 5;
    shape.classes = o.classes;
    shape.freeze_qk = o.freeze_qk;
    shape.lag_bias.strict_mask = o.strict_mask;
    Example e{make_model(shape), {}, {}, B, T};
    TorchGenerator generator = make_generator(4);
    initialize_model(e.model, generator);
    change_parameters(e.model, "zeta", [](Floats& values) {
        for (float& value : values) value *= 30;
    });
    e.tokens = random_tokens(generator, B * T, shape.vocab);
    e.targets = random_tokens(generator, o.classes > 0 ? B : B * T, o.classes > 0 ? o.classes : shape.vocab);
    return e;
}

reference::ModelOutput reference_gradients(const Options& o, const Example& e) {
    const ModelShape& shape = e.model.shape;
    reference::ModelSettings settings = reference::with_method({}, o.position);
    settings.layers = shape.layers;
    settings.embed_dim = shape.embed_dim;
    settings.heads = shape.heads;
    settings.vocab = shape.vocab;
    settings.train_len = shape.train_len;
    settings.strict_mask = o.strict_mask;
    settings.classes = o.classes;
    reference::Tensors parameters;
    const Floats values = read_device(e.model.parameters);
    for (const ParameterInfo& info : e.model.layout)
        parameters[info.name] = Doubles(values.begin() + info.offset, values.begin() + info.offset + info.size);
    return reference::model_gradients(settings, parameters, e.tokens, e.targets, e.B, e.T);
}

Floats gradients_of(const Example& e, double* loss) {
    Activations acts = make_activations(e.model.shape, e.B, e.T, Mode::training, false);
    DeviceArray<float> gradients(e.model.parameters.size);
    *loss = train_batch(e.model, acts, gradients, e.tokens, e.targets, e.B, e.T, 1.0);
    return read_device(gradients);
}

void expect_like_reference(const Options& o, const Example& e) {
    const reference::ModelOutput want = reference_gradients(o, e);
    double loss = 0, whole = 0;
    const Floats gradients = gradients_of(e, &loss);
    EXPECT_NEAR(loss, want.loss, by_precision(2e-6, 2e-2));
    for (const auto& [name, values] : want.gradients) whole = std::hypot(whole, norm(values));
    for (const ParameterInfo& info : e.model.layout) {
        const Doubles& tensor = want.gradients.at(info.name);
        const Floats found(gradients.begin() + info.offset, gradients.begin() + info.offset + info.size);
        // Gradients that are zero in exact arithmetic (of key biases, say) are rounding here.
        EXPECT_LE(distance(found, tensor), by_precision(2e-5, 0.1) * norm(tensor) + by_precision(1e-7, 1e-2) * whole)
            << info.name;
    }

    Activations acts = make_activations(e.model.shape, e.B, e.T, Mode::inference, true);
    const BatchResult result = evaluate_batch(e.model, acts, e.tokens, e.targets, e.B, e.T, e.T);
    EXPECT_NEAR(result.loss, want.loss, by_precision(2e-6, 2e-2));
    EXPECT_EQ(std::ssize(result.losses), std::ssize(e.targets));
    double entropy = 0, count = 0;
    for (int64_t row = 0; row < std::ssize(want.entropy); row++)
        if (o.classes == 0 || row % e.T == e.T - 1) {
            entropy += want.entropy[static_cast<size_t>(row)];
            count++;
        }
    EXPECT_NEAR(result.entropy.value(), entropy / count, by_precision(1e-5, 2e-2));
    if (o.classes == 0) return;
    ASSERT_EQ(result.logits.size(), want.logits.size());
    for (size_t i = 0; i < want.logits.size(); i++)
        EXPECT_NEAR(result.logits[i], want.logits[i], by_precision(1e-5, 4e-2));
}

TEST(ModelOptions, LossesAndGradientsMatchTheReference) {
    const ThreadCount one(1);
    for (const Options& o : all_options()) {
        SCOPED_TRACE(name_of(o));
        expect_like_reference(o, make_example(o, 3, 21));
    }
    for (const int64_t layers : {1, 3})
        expect_like_reference({"full", true, false, 2}, make_example({"full", true, false, 2}, 2, 9, layers));
    // Frozen, where a third of qkv's weights is not aligned as the whole.
    expect_like_reference({"full", true, true, 2}, make_example({"full", true, true, 2}, 2, 9, 2, 20));
    // A length of one: with a strict mask nothing is attended at all.
    expect_like_reference({"full", true, false, 2}, make_example({"full", true, false, 2}, 2, 1));
    // More tiles than one, and another number of rows than of chunks.
    expect_like_reference({"full", true, true, 2}, make_example({"full", true, true, 2}, 2, 150));
}

// Changing one token changes nothing before it and, with a strict mask, not what its own position attends.
TEST(ModelOptions, AStrictMaskHidesAPositionFromItself) {
    for (const char* position : {"none", "full"}) {
        Example e = make_example({position, true, false, 0}, 1, 12, 1);
        Activations acts = make_activations(e.model.shape, 1, 12, Mode::training, false);
        DeviceArray<float> gradients(e.model.parameters.size);
        const auto attended = [&] {
            train_batch(e.model, acts, gradients, e.tokens, e.targets, 1, 12, 1.0);
            return read_device(acts.blocks[0].attention, 12 * 32);
        };
        // Frozen scores: what a row attends then depends on the values alone.
        change_parameters(e.model, "qkv",
                          [](Floats& values) { std::fill_n(values.begin(), values.size() * 2 / 3, 0.0f); });
        const Floats before = attended();
        e.tokens[7] = (e.tokens[7] + 1) % 5;
        const Floats after = attended();
        for (int64_t t = 0; t < 12; t++) {
            const bool same =
                std::equal(before.begin() + t * 32, before.begin() + (t + 1) * 32, after.begin() + t * 32);
            EXPECT_EQ(same, t <= 7) << t;
        }
        for (int64_t c = 0; c < 32; c++) EXPECT_EQ(before[static_cast<size_t>(c)], 0) << "the first row has no key";
    }
}

TEST(ModelOptions, TheMaskedLagHasNoGradient) {
    const Example e = make_example({"full", true, false, 2}, 3, 40);
    const ModelShape& s = e.model.shape;
    Activations acts = make_activations(s, e.B, e.T, Mode::training, false);
    DeviceArray<float> gradients(e.model.parameters.size);
    train_batch(e.model, acts, gradients, e.tokens, e.targets, e.B, e.T, 1.0);
    const Floats table = read_device(acts.blocks[0].lag_bias, s.heads * e.T);
    const Floats dtable = read_device(acts.dlag_bias, s.heads * e.T);
    for (int64_t h = 0; h < s.heads; h++) {
        EXPECT_EQ(table[static_cast<size_t>(h * e.T)], -kInfinity);
        EXPECT_EQ(dtable[static_cast<size_t>(h * e.T)], 0);
        EXPECT_NE(dtable[static_cast<size_t>(h * e.T + 1)], 0);
    }
}

TEST(ModelOptions, FrozenQueriesAndKeysStayZero) {
    Example e = make_example({"full", true, true, 2}, 4, 20);
    const ModelShape& s = e.model.shape;
    Activations acts = make_activations(s, e.B, e.T, Mode::training, false);
    DeviceArray<float> m(e.model.parameters.size), v(e.model.parameters.size);
    const Floats start = read_device(e.model.parameters);
    for (int64_t step = 1; step <= 5; step++) {
        DeviceArray<float> gradients(e.model.parameters.size);
        train_batch(e.model, acts, gradients, e.tokens, e.targets, e.B, e.T, 1.0);
        adamw(e.model.parameters.data, m.data, v.data, gradients.data, e.model.takes_part.data,
              {0.01, 0.9, 0.999, 1e-8, 0.1, 1}, step, e.model.parameters.size);
    }
    const Floats end = read_device(e.model.parameters);
    int tensors = 0;
    for (const ParameterInfo& info : e.model.layout) {
        if (info.frozen == 0) continue;
        EXPECT_EQ(info.frozen * 3, info.size * 2) << info.name;
        tensors++;
        for (int64_t i = info.offset; i < info.offset + info.frozen; i++) ASSERT_EQ(end[static_cast<size_t>(i)], 0);
        EXPECT_NE(end[static_cast<size_t>(info.offset + info.frozen)],
                  start[static_cast<size_t>(info.offset + info.frozen)]);
    }
    EXPECT_EQ(tensors, 2 * s.layers);
}

TEST(ModelOptions, EveryThreadCount) {
    const Example e = make_example({"full", true, false, 2}, 40, 130);
    expect_same_for_every_thread_count([&] {
        double loss = 0;
        Floats gradients = gradients_of(e, &loss);
        gradients.push_back(static_cast<float>(loss));
        return std::vector<Floats>{gradients};
    });
}

TEST(CopyRows, TakesOutAndPutsBack) {
    TorchGenerator generator = make_generator(1);
    for (const int64_t C : {1, 5, 96, 300}) {
        const int64_t B = 7, T = 4;
        const Floats all = normals(generator, B * T * C);
        const RealBuffer inp(all), rows(B * C), out(Floats(all.size(), 0.0f));
        copy_rows(rows.data(), C, inp.data() + (T - 1) * C, T * C, B, C);
        copy_rows(out.data() + (T - 1) * C, T * C, rows.data(), C, B, C);
        const Floats taken = rows.read(), put = out.read();
        for (int64_t n = 0; n < B * T * C; n++) {
            const bool last = n / C % T == T - 1;
            EXPECT_EQ(put[static_cast<size_t>(n)], last ? all[static_cast<size_t>(n)] : 0);
            if (last) {
                EXPECT_EQ(taken[static_cast<size_t>(n / C / T * C + n % C)], all[static_cast<size_t>(n)]);
            }
        }
    }
}

}  // namespace
}  // namespace jetlag::test
