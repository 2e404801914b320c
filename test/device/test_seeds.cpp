// Training steps and an evaluation are the same, bit for bit, in whatever order the threads of the kernels run. (On a
// GPU the order is what it is: there this only runs them several times.)
#include <gtest/gtest.h>

#include "models/windows.h"
#include "test/kernel_support.h"

namespace jetlag::test {
namespace {

struct Seeds : testing::TestWithParam<Method> {};

TEST_P(Seeds, TrainingStepsAndAnEvaluation) {
    const int64_t B = 2, T = 40;
    const std::vector<std::string> kSmall = {"train.context=24", "model.embed_dim=16", "model.heads=2"};
    std::vector<int32_t> tokens, targets;
    for (int64_t i = 0; i < B * T; i++) {
        tokens.push_back(static_cast<int32_t>(i * i % 251));
        targets.push_back(static_cast<int32_t>((i * 7 + 3) % 256));
    }
    std::vector<Floats> results[4];
    for (int seed = 1; seed <= 3; seed++) {
        const EmulatorSeed emulator_seed(seed);
        Model trained = make_small_model(GetParam().name, kSmall);
        const int64_t n = trained.parameters.size;
        Activations acts = make_activations(trained.shape, B, T, Mode::training, false);
        const DeviceArray<float> m(n), v(n);
        for (int64_t step = 1; step <= 2; step++) {
            DeviceArray<float> gradients(n);
            const double loss = train_batch(trained, acts, gradients, tokens, targets, B, T, 1.0);
            adamw(trained.parameters.data, m.data, v.data, gradients.data, trained.takes_part.data,
                  {3e-3, 0.9, 0.999, 1e-8, 1e-4, 1}, step, n);
            results[seed].push_back({static_cast<float>(loss)});
            results[seed].push_back(read_device(gradients));
        }
        results[seed].push_back(read_device(trained.parameters));
        Activations with_stats = make_activations(trained.shape, B, T, Mode::inference, true);
        const BatchResult found = evaluate_batch(trained, with_stats, tokens, targets, B, T, T);
        results[seed].push_back(found.losses);
        results[seed].push_back({static_cast<float>(*found.entropy), static_cast<float>(*found.mean_lag)});
    }
    for (int seed = 2; seed <= 3; seed++)
        for (size_t i = 0; i < results[1].size(); i++)
            EXPECT_TRUE(same_bits(results[seed][i], results[1][i])) << "seed " << seed << ", result " << i;
}

INSTANTIATE_TEST_SUITE_P(DeviceMethods, Seeds, testing::ValuesIn(methods()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace jetlag::test
