// The model against the golden numbers of the published PyTorch code, to float's rounding; in bf16 losses to 2e-2, and
// gradients to what roundings of 2^-9 in every layer make of them; in tf32 losses to 2^-11.
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "models/checkpoint.h"
#include "models/model.h"
#include "models/windows.h"
#include "src/files.h"
#include "src/token_stream.h"
#include "test/kernel_support.h"
#include "test/support.h"

namespace jetlag {
namespace {

using nlohmann::json;

std::filesystem::path golden_path(const std::string& method) {
    return test::shared_folder() / "golden" / "lm_parity" / (method + ".safetensors");
}

// The methods that have golden numbers; without the shared data all, so that the skipped tests still show.
std::vector<std::string> published_methods() {
    std::vector<std::string> names;
    for (const Method& method : methods())
        if (!test::have_shared() || std::filesystem::exists(golden_path(method.name))) names.push_back(method.name);
    return names;
}

TEST(GoldenMethods, EveryPublishedMethodIsThere) {
    NEEDS_SHARED();
    const json index = json::parse(read_file(test::shared_folder() / "golden" / "lm_parity" / "index.json"));
    EXPECT_EQ(index.size(), 17u);
    for (const auto& item : index.items()) EXPECT_NE(find_method(item.key()), nullptr) << item.key();
}

std::vector<double> f64_values(const SafetensorsFile& file, const std::string& name) {
    const Tensor* tensor = find_tensor(file, name);
    if (tensor == nullptr || tensor->dtype != "F64") throw std::runtime_error("no F64 tensor " + name);
    std::vector<double> values(tensor->bytes.size() / sizeof(double));
    std::memcpy(values.data(), tensor->bytes.data(), tensor->bytes.size());
    return values;
}

std::vector<int32_t> u8_values(const SafetensorsFile& file, const std::string& name) {
    std::vector<int32_t> values;
    for (std::byte b : find_tensor(file, name)->bytes) values.push_back(static_cast<int32_t>(b));
    return values;
}

Config golden_config(const SafetensorsFile& file) {
    const auto& m = file.metadata;
    std::vector<Setting> settings;
    add_overrides(settings,
                  {"model.position=" + m.at("method"), "model.embed_dim=" + m.at("embed_dim"),
                   "model.heads=" + m.at("num_heads"), "model.layers=" + m.at("layers"),
                   "model.max_order=" + m.at("max_order"), "model.mlp_ratio=" + m.at("mlp_ratio"),
                   "train.context=" + m.at("train_len"), "train.batch=" + m.at("batch_size"), "train.lr=" + m.at("lr"),
                   "train.weight_decay=" + m.at("weight_decay"), "model.rope_base=" + m.at("rope_base")});
    return make_config(settings);
}

AdamW adamw_settings(const Config& c) {
    return {c.train.lr, c.train.beta1, c.train.beta2, c.train.eps, c.train.weight_decay, 1.0};
}

// Of losses. From tokens to logits there are ten products in a row. In tf32 each of them is off by some 2^-12 of its
// size, all of them, adding up as squares, by less than 2^-10; of a mean over tokens half of that is plenty.
double loss_tolerance(double in_float, double in_bf16) {
    return kTf32 ? 0x1p-11 : test::by_precision(in_float, in_bf16);
}

class Golden : public testing::TestWithParam<std::string> {};

TEST_P(Golden, LossGradientsAndTrajectory) {
    NEEDS_SHARED();
    const std::string path = golden_path(GetParam());
    const SafetensorsFile file = read_safetensors(path);
    const Config config = golden_config(file);
    Model model = make_model(model_shape(config));
    read_parameter_tensors(model, model.parameters.data, file, "init.", path);
    const int64_t B = config.train.batch, T = config.train.context;
    Activations acts = make_activations(model.shape, B, T, Mode::training, false);
    DeviceArray<float> gradients(model.parameters.size);
    const std::vector<int32_t> tokens = u8_values(file, "tokens"), targets = u8_values(file, "targets");

    const double loss = train_batch(model, acts, gradients, tokens, targets, B, T, 1.0);
    EXPECT_NEAR(loss, std::stod(file.metadata.at("loss64")), loss_tolerance(2e-6, 1e-2));
    const std::vector<float> host_gradients = test::read_device(gradients);
    for (const ParameterInfo& info : model.layout) {
        const std::vector<double> want = f64_values(file, "grad64." + info.name);
        double difference = 0, norm = 0;
        for (size_t i = 0; i < want.size(); i++) {
            const double found = host_gradients[static_cast<size_t>(info.offset) + i];
            difference += (found - want[i]) * (found - want[i]);
            norm += want[i] * want[i];
        }
        if (std::sqrt(norm) < 1e-12) {
            EXPECT_LT(std::sqrt(difference), test::by_precision(1e-6, 1e-3)) << info.name;
        } else {
            EXPECT_LT(std::sqrt(difference / norm), test::by_precision(2e-5, 0.1))
                << info.name << " norm " << std::sqrt(norm);
        }
    }

    // A pass without backward leaves the logits of the last sequence.
    const std::vector<double> want_logits = f64_values(file, "logits64");
    Activations forward_acts = make_activations(model.shape, B, T, Mode::inference, false);
    evaluate_batch(model, forward_acts, tokens, targets, B, T, T);
    const int64_t count = T * model.shape.vocab;
    std::vector<real> logits(static_cast<size_t>(count));
    copy_to_host(logits.data(), forward_acts.logits, logits.size() * sizeof(real));
    for (int64_t i = 0; i < count; i++)
        ASSERT_NEAR(to_float(logits[static_cast<size_t>(i)]),
                    want_logits[want_logits.size() - static_cast<size_t>(count - i)], test::by_precision(2e-5, 4e-2));

    const TokenStream corpus = open_token_stream(test::shared_folder() / "data" / "text" / "tiny_shakespeare.txt");
    const std::vector<double> want_eval = f64_values(file, "eval_loss64");
    const int64_t lengths[] = {64, 256, 1024};
    for (size_t i = 0; i < 3; i++) {
        Activations eval_acts = make_activations(model.shape, 1, lengths[i], Mode::inference, true);
        const int64_t start = 1000;
        const Batch batch = make_batch(corpus.tokens, {&start, 1}, lengths[i]);
        const BatchResult result =
            evaluate_batch(model, eval_acts, batch.tokens, batch.targets, 1, lengths[i], lengths[i]);
        EXPECT_NEAR(result.loss, want_eval[i], loss_tolerance(2e-6, 1e-2)) << "at length " << lengths[i];
    }

    const Tensor* starts_tensor = find_tensor(file, "batch_starts");
    std::vector<int64_t> starts(starts_tensor->bytes.size() / sizeof(int64_t));
    std::memcpy(starts.data(), starts_tensor->bytes.data(), starts_tensor->bytes.size());
    const std::vector<double> want_losses = f64_values(file, "adamw_losses32");
    DeviceArray<float> m(model.parameters.size), v(model.parameters.size);
    const std::span<const uint8_t> train = split_corpus(corpus.tokens, 0.9).train;
    for (size_t step = 0; step < want_losses.size(); step++) {
        const Batch batch =
            make_batch(train, {starts.data() + step * static_cast<size_t>(B), static_cast<size_t>(B)}, T);
        device_zero(gradients.data, gradients.bytes());
        const double step_loss = train_batch(model, acts, gradients, batch.tokens, batch.targets, B, T, 1.0);
        EXPECT_NEAR(step_loss, want_losses[step], loss_tolerance(5e-6, 2e-2)) << "at step " << step;
        adamw(model.parameters.data, m.data, v.data, gradients.data, model.takes_part.data, adamw_settings(config),
              static_cast<int64_t>(step) + 1, model.parameters.size);
    }
    const std::vector<float> parameters = test::read_device(model.parameters);
    for (const ParameterInfo& info : model.layout) {
        const Tensor* final_tensor = find_tensor(file, "final32." + info.name);
        if (final_tensor == nullptr || kHalfPrecision || kTf32)
            continue;  // signs of small gradients differ, and a step is lr long
        const std::span<const float> want = f32_values(*final_tensor, path);
        for (size_t i = 0; i < want.size(); i++)
            EXPECT_NEAR(parameters[static_cast<size_t>(info.offset) + i], want[i], 2e-4) << info.name;
    }
}

INSTANTIATE_TEST_SUITE_P(Methods, Golden, testing::ValuesIn(published_methods()),
                         [](const auto& info) { return info.param; });

// From the seed alone: weights, held-out batches and training batches as the published code draws them.
TEST(Golden, TrainingRunsFromASeed) {
    NEEDS_SHARED();
    const json golden = json::parse(read_file(test::shared_folder() / "golden" / "torch_rng.json"));
    const TokenStream corpus = open_token_stream(test::shared_folder() / "data" / "text" / "tiny_shakespeare.txt");
    const CorpusParts parts = split_corpus(corpus.tokens, 0.9);
    int runs = 0;
    for (const auto& [name, run] : golden.at("training_runs").items()) {
        SCOPED_TRACE(name);
        std::vector<Setting> settings;
        add_overrides(settings,
                      {"model.position=" + run.at("method").get<std::string>(),
                       "train.context=" + run.at("train_len").dump(), "train.batch=" + run.at("batch_size").dump()});
        const Config config = make_config(settings);
        const int64_t B = config.train.batch, T = config.train.context;
        ASSERT_EQ(static_cast<int64_t>(parts.train.size()), run.at("train_bytes").get<int64_t>());
        ASSERT_EQ(static_cast<int64_t>(parts.eval.size()), run.at("eval_bytes").get<int64_t>());
        TorchGenerator generator = make_generator(run.at("seed").get<uint64_t>());
        Model model = make_model(model_shape(config));
        initialize_model(model, generator);
        for (const auto& [tensor, want] : run.at("init").items()) {
            const auto info = std::find_if(model.layout.begin(), model.layout.end(),
                                           [&tensor = tensor](const ParameterInfo& i) { return i.name == tensor; });
            ASSERT_NE(info, model.layout.end()) << tensor;
            EXPECT_EQ(info->shape, want.at("shape").get<std::vector<int64_t>>()) << tensor;
            const std::vector<float> values = test::read_device(model.parameters.data + info->offset, info->size);
            double sum = 0;
            for (float x : values) sum += x;
            EXPECT_NEAR(sum, want.at("sum").get<double>(), 1e-4) << tensor;
            for (size_t i = 0; i < want.at("first").size(); i++)
                EXPECT_NEAR(values[i], want.at("first")[i].get<double>(), 2e-7) << tensor;
        }
        Activations acts = make_activations(model.shape, B, T, Mode::training, false);
        Activations eval_acts = make_activations(model.shape, B, T, Mode::inference, false);
        for (const auto& want : run.at("initial_eval_losses")) {
            const auto starts = draw_windows(generator, static_cast<int64_t>(parts.eval.size()), T, B);
            const Batch batch = make_batch(parts.eval, starts, T);
            EXPECT_NEAR(evaluate_batch(model, eval_acts, batch.tokens, batch.targets, B, T, T).loss, want.get<double>(),
                        loss_tolerance(1e-5, 1e-2));
        }
        DeviceArray<float> gradients(model.parameters.size), m(model.parameters.size), v(model.parameters.size);
        int64_t step = 0;
        for (const auto& want : run.at("losses")) {
            const auto starts = draw_windows(generator, static_cast<int64_t>(parts.train.size()), T, B);
            if (static_cast<size_t>(step) < run.at("batch_starts").size()) {
                EXPECT_EQ(starts, run.at("batch_starts")[static_cast<size_t>(step)].get<std::vector<int64_t>>());
            }
            const Batch batch = make_batch(parts.train, starts, T);
            device_zero(gradients.data, gradients.bytes());
            EXPECT_NEAR(train_batch(model, acts, gradients, batch.tokens, batch.targets, B, T, 1.0), want.get<double>(),
                        loss_tolerance(1e-5, 2e-2))
                << "at step " << step;
            adamw(model.parameters.data, m.data, v.data, gradients.data, model.takes_part.data, adamw_settings(config),
                  ++step, model.parameters.size);
        }
        runs++;
    }
    EXPECT_EQ(runs, 3);
}

}  // namespace
}  // namespace jetlag
