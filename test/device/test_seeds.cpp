// A whole training step is the same, bit for bit, in whatever order the threads of the kernels run. (On a GPU the order
// is what it is: there this only runs the step several times.)
#include <gtest/gtest.h>

#include "models/windows.h"
#include "test/kernel_support.h"

namespace jetlag::test {
namespace {

struct Seeds : testing::TestWithParam<Method> {};

TEST_P(Seeds, TrainingStep) {
    const int64_t B = 2, T = 40;
    Model model = make_small_model(GetParam().name, {"train.context=24", "model.embed_dim=16", "model.heads=2"});
    std::vector<int32_t> tokens, targets;
    for (int64_t i = 0; i < B * T; i++) {
        tokens.push_back(static_cast<int32_t>(i * i % 251));
        targets.push_back(static_cast<int32_t>((i * 7 + 3) % 256));
    }
    Floats losses[4], gradients[4];
    for (int seed = 1; seed <= 3; seed++) {
        const EmulatorSeed emulator_seed(seed);
        Activations acts = make_activations(model.shape, B, T, Mode::training, false);
        DeviceArray<float> sums(model.parameters.size);
        losses[seed] = {static_cast<float>(train_batch(model, acts, sums, tokens, targets, B, T, 1.0))};
        gradients[seed].resize(static_cast<size_t>(sums.size));
        copy_to_host(gradients[seed].data(), sums.data, sums.bytes());
    }
    for (int seed = 2; seed <= 3; seed++) {
        EXPECT_TRUE(same_bits(losses[seed], losses[1])) << "seed " << seed;
        EXPECT_TRUE(same_bits(gradients[seed], gradients[1])) << "seed " << seed;
    }
}

INSTANTIATE_TEST_SUITE_P(DeviceMethods, Seeds, testing::ValuesIn(methods()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace jetlag::test
