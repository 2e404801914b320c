// What saves memory or time must not change results: chunks of rows, recomputed activations, threads.
#include <fmt/format.h>

#include <algorithm>

#include "models/model.h"
#include "models/windows.h"
#include "test/kernel_support.h"
#include "test/reference/reference.h"

namespace jetlag {
namespace {

using test::Floats;
using test::make_small_model;

struct Step {
    Floats loss, gradients;
};

Step train_once(const Model& model, Mode mode, int64_t B, int64_t T) {
    TorchGenerator generator = make_generator(4);
    const std::vector<int32_t> tokens = test::random_tokens(generator, B * T, model.shape.vocab);
    const std::vector<int32_t> targets = test::random_tokens(generator, B * T, model.shape.vocab);
    Activations acts = make_activations(model.shape, B, T, mode, false);
    DeviceArray<float> gradients(model.parameters.size);
    Step step;
    step.loss = {static_cast<float>(train_batch(model, acts, gradients, tokens, targets, B, T, 1.0))};
    step.gradients = test::read_device(gradients);
    return step;
}

const std::vector<std::string> kTiny = {"model.embed_dim=8", "model.heads=2", "model.layers=3", "train.context=128"};

TEST(Recompute, SameBitsInLessMemory) {
    for (const char* method : {"none", "rope", "pj_rotary", "alibi", "full", "rope_yarn_affine"})
        for (const auto& [B, T] : {std::pair<int64_t, int64_t>{1, 1}, {3, 70}, {2, 700}}) {
            SCOPED_TRACE(fmt::format("{} B {} T {}", method, B, T));
            const Model model = make_small_model(method, kTiny);
            const Step kept = train_once(model, Mode::training, B, T);
            const Step again = train_once(model, Mode::recomputing, B, T);
            EXPECT_TRUE(test::same_bits(kept.loss, again.loss));
            EXPECT_TRUE(test::same_bits(kept.gradients, again.gradients));
            EXPECT_GT(test::norm(kept.gradients), 0);
        }
    const Model model = make_small_model("full", {"model.layers=6"});
    EXPECT_LT(activation_sizes(model.shape, 1, 4096, Mode::recomputing, false).activation_floats,
              activation_sizes(model.shape, 1, 4096, Mode::training, false).activation_floats / 2);
}

// Training steps in which a graph is replayed, where the backend has graphs, and with the ops called one by one.
TEST(TrainingGraph, SameBitsAsOps) {
    const int64_t B = 2, T = 25;
    for (const char* method : {"pj_rotary", "full", "rope_yarn_affine"})
        for (const Mode mode : {Mode::training, Mode::recomputing}) {
            if (mode == Mode::recomputing && std::string(method) != "full") continue;
            SCOPED_TRACE(method);
            Step results[2];
            for (int graphs = 0; graphs < 2; graphs++) {
                const Model model = make_small_model(method, kTiny);
                Activations acts = make_activations(model.shape, B, T, mode, false);
                OpTimes times;
                if (graphs == 0) acts.op_times = &times;
                const int64_t n = model.parameters.size;
                DeviceArray<float> gradients(n), m(n), v(n);
                const DeviceArray<double> norm(1);
                TorchGenerator generator = make_generator(4);
                for (int64_t step = 1; step <= 20; step++) {
                    device_zero(gradients.data, gradients.bytes());
                    for (int pass = 0; pass < 2; pass++) {
                        const std::vector<int32_t> tokens = test::random_tokens(generator, B * T, model.shape.vocab);
                        const std::vector<int32_t> targets = test::random_tokens(generator, B * T, model.shape.vocab);
                        const double loss = train_batch(model, acts, gradients, tokens, targets, B, T, 0.5);
                        results[graphs].loss.push_back(static_cast<float>(loss));
                    }
                    euclidean_norm(norm.data, gradients.data, n);
                    adamw(model.parameters.data, m.data, v.data, gradients.data, model.takes_part.data,
                          {0.01 / static_cast<double>(step), 0.9, 0.999, 1e-8, 1e-4, 1, norm.data, 0.5}, step, n);
                    // Another length and scale in between, which has its own graph.
                    if (step % 7 == 0) {
                        const std::vector<int32_t> tokens = test::random_tokens(generator, 40, model.shape.vocab);
                        train_batch(model, acts, gradients, tokens, tokens, 2, 20, 0.25);
                    }
                }
                results[graphs].gradients = test::read_device(model.parameters);
                if (graphs == 1 && std::string(backend_name()) != "cpu") {
                    EXPECT_NE(acts.training.graph.captured, nullptr);
                }
            }
            EXPECT_TRUE(test::same_bits(results[0].loss, results[1].loss));
            EXPECT_TRUE(test::same_bits(results[0].gradients, results[1].gradients));
        }
}

// More rows than a chunk of the forward pass, of the head, and of the backward pass hold, and not a multiple of any.
TEST(Chunks, MatchTheReference) {
    const int64_t B = 11, T = 777;
    for (const char* method : {"rope", "full"}) {
        SCOPED_TRACE(method);
        const Model model =
            make_small_model(method, {"model.embed_dim=8", "model.heads=1", "model.layers=1", "train.context=128"});
        reference::ModelSettings settings;
        settings.embed_dim = 8;
        settings.heads = 1;
        settings.layers = 1;
        settings.train_len = 128;
        settings = reference::with_method(settings, method);
        reference::Tensors parameters;
        for (const ParameterInfo& info : model.layout) {
            const Floats values = test::read_device(model.parameters.data + info.offset, info.size);
            parameters[info.name].assign(values.begin(), values.end());
        }
        TorchGenerator generator = make_generator(4);
        const std::vector<int32_t> tokens = test::random_tokens(generator, B * T, model.shape.vocab);
        const std::vector<int32_t> targets = test::random_tokens(generator, B * T, model.shape.vocab);
        const reference::ModelOutput want = reference::model_gradients(settings, parameters, tokens, targets, B, T);
        for (const Mode mode : {Mode::training, Mode::recomputing}) {
            const Step found = train_once(model, mode, B, T);
            EXPECT_NEAR(found.loss[0], want.loss, test::by_precision(1e-6, 2e-3) * want.loss);
            double whole = 0;
            for (const auto& [name, values] : want.gradients) whole = std::hypot(whole, test::norm(values));
            for (const ParameterInfo& info : model.layout) {
                const auto begin = found.gradients.begin() + info.offset;
                const std::vector<double>& tensor = want.gradients.at(info.name);
                EXPECT_LE(test::distance({begin, begin + info.size}, tensor),
                          test::by_precision(2e-5, 0.1) * test::norm(tensor) + test::by_precision(1e-7, 1e-2) * whole)
                    << info.name;
            }
        }
        Activations acts = make_activations(model.shape, B, T, Mode::inference, false);
        const BatchResult result = evaluate_batch(model, acts, tokens, targets, B, T, T);
        EXPECT_NEAR(result.loss, want.loss, test::by_precision(1e-6, 2e-3) * want.loss);
    }
}

// The forward pass's chunks grow with the number of threads.
TEST(Chunks, EveryThreadCount) {
    const Model model = make_small_model("full", kTiny);
    for (const Mode mode : {Mode::training, Mode::recomputing})
        test::expect_same_for_every_thread_count([&]() -> std::vector<Floats> {
            const Step step = train_once(model, mode, 9, 1000);
            return {step.loss, step.gradients};
        });
}

}  // namespace
}  // namespace jetlag
