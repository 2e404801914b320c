// The table of keys of models/config.h: the files in configs/, composed positions, what is written and read back.
#include <gtest/gtest.h>

#include <filesystem>

#include "kernels/ops.h"
#include "models/config.h"
#include "src/error.h"

namespace jetlag {
namespace {

Config config_of(const std::vector<std::string>& overrides) {
    std::vector<Setting> settings;
    add_overrides(settings, overrides);
    return make_config(settings);
}

std::string error_of(const std::vector<std::string>& overrides) {
    try {
        config_of(overrides);
    } catch (const Error& e) {
        EXPECT_EQ(e.exit_code, kExitUsage);
        return e.what();
    }
    return "no error";
}

TEST(ModelConfig, EveryConfigFileIsValid) {
    int files = 0;
    for (const auto& entry : std::filesystem::directory_iterator("configs")) {
        if (entry.is_directory()) continue;  // of other programs
        const Config config = make_config(read_settings(entry.path()));
        EXPECT_FALSE(config.data.corpus.empty()) << entry.path();
        files++;
    }
    EXPECT_GE(files, 7);
}

TEST(ModelConfig, ResolvedFormReadsBackTheSame) {
    for (const std::vector<std::string>& overrides : std::vector<std::vector<std::string>>{
             {},
             {"model.position=rope_yarn", "train.lr=2e-5", "train.data_seed=7", "eval.contexts=[1,2,3]"},
             {"model.position={rotary: {kind: ntk, base: 500}, lag_bias: {sectors: [affine, lc], max_order: 2}}"},
             {"model.position.lag_bias.frequencies=3", "model.position.lag_bias.constant=true", "model.gate_init=lc"},
             {"model.position.rotary.kind=jordan", "model.position.rotary.eta=0.1"},
             {"model.position.lag_bias.kind=alibi"}}) {
        const Config config = config_of(overrides);
        const std::string json = config_json(config);
        EXPECT_EQ(config_json(make_config(settings_from_json(json, "json"))), json);
        const std::filesystem::path path = std::filesystem::path(testing::TempDir()) / "resolved.yaml";
        FILE* file = fopen(path.c_str(), "w");
        fputs(config_yaml(config).c_str(), file);
        fclose(file);
        EXPECT_EQ(config_json(make_config(read_settings(path))), json);
        std::filesystem::remove(path);
    }
}

// A name and the same thing composed are the same modules with the same options.
TEST(ModelConfig, NamedAndComposedAgree) {
    const auto expect_same = [](const std::vector<std::string>& named, const std::vector<std::string>& composed) {
        const ModelShape a = model_shape(config_of(named)), b = model_shape(config_of(composed));
        EXPECT_EQ(a.rotary.module, b.rotary.module);
        EXPECT_EQ(a.lag_bias.module, b.lag_bias.module);
        for (int i = 0; i < kMaxOptions; i++) {
            EXPECT_EQ(a.rotary.options[i], b.rotary.options[i]) << i;
            EXPECT_EQ(a.lag_bias.options[i], b.lag_bias.options[i]) << i;
        }
    };
    expect_same({"model.position=rope_ntk_affine"},
                {"model.position={rotary: {kind: ntk}, lag_bias: {sectors: [affine]}}"});
    expect_same(
        {"model.position=full", "model.max_order=5", "model.init_affine_slope=0.5", "model.gate_init=lc"},
        {"model.position.lag_bias.kind=pj", "model.max_order=5", "model.init_affine_slope=0.5", "model.gate_init=lc"});
    expect_same({"model.position=rope", "model.rope_base=500"}, {"model.position.rotary.base=500"});
    expect_same({"model.position=alibi"}, {"model.position.lag_bias.kind=alibi"});
}

// softplus of the initial raw slope is the slope that was asked for, at both ends of its range.
TEST(ModelConfig, AffineSlopeStartsWhereItShould) {
    for (const double slope : {1e-6, 0.4, 2.0, 30.0, 1000.0}) {
        const ModelShape shape =
            model_shape(config_of({fmt::format("model.init_affine_slope={}", slope), "model.position=affine"}));
        std::vector<float> parameters;
        for (const BiasParameter& p : shape.lag_bias.module->parameters(shape.lag_bias))
            for (int64_t i = 0, n = p.shape[0] * (p.shape.size() > 1 ? p.shape[1] : 1); i < n; i++)
                parameters.push_back(p.initial.empty() ? 0.0f : p.initial[static_cast<size_t>(i)]);
        for (const auto& [name, value] : shape.lag_bias.module->summary(shape.lag_bias, parameters.data()))
            if (name == "affine_slope_mean") {
                EXPECT_NEAR(value / slope, 1, 1e-6) << slope;
            }
    }
}

TEST(ModelConfig, ErrorsOfSeveralKeysTogether) {
    const auto expect_error = [](const std::vector<std::string>& overrides, const std::string& part) {
        const std::string message = error_of(overrides);
        EXPECT_NE(message.find(part), std::string::npos) << message;
    };
    expect_error({"model.heads=5"}, "5 heads do not divide model.embed_dim 96");
    expect_error({"model.embed_dim=2048"}, "head dim of 512");
    expect_error({"model.position=rope", "model.embed_dim=12"}, "multiple of 2, but 12 channels over 4 heads is 3");
    expect_error({"model.position=pj_rotary", "model.embed_dim=24"}, "multiple of 4");
    expect_error({"train.accumulate=3"}, "3 passes do not divide train.batch 32");
    expect_error({"model.position.rotary.eta=1"}, "the rotary kind rope has no such option (it has base)");
    expect_error({"model.position.lag_bias={kind: alibi, max_order: 3}"}, "alibi has no such option");
    expect_error({"model.position.lag_bias.sectors=[]"}, "is empty (wanted at least one of fj, affine, lc)");
    expect_error({"model.position=lc_afine"}, "did you mean lc_affine?");
}

// cuDNN's attention is for one build; which of them this is decides what is said.
TEST(ModelConfig, AttentionThroughCudnn) {
    EXPECT_FALSE(model_shape(config_of({})).cudnn_attention);
    EXPECT_FALSE(model_shape(config_of({"model.attention=fused"})).cudnn_attention);
    EXPECT_EQ(error_of({"model.attention=flash"}),
              "--set model.attention=flash: model.attention: 'flash' is none of its choices: fused, cudnn");
    const std::string message = error_of({"model.position=rope", "model.attention=cudnn"});
    if (kHasCudnn) {
        EXPECT_TRUE(model_shape(config_of({"model.position=rope", "model.attention=cudnn"})).cudnn_attention);
        EXPECT_EQ(error_of({"model.position=full", "model.attention=cudnn"}),
                  "--set model.attention=cudnn: model.attention: cudnn with position full, which has a lag bias "
                  "(wanted one without; or "
                  "fused)");
        EXPECT_EQ(error_of({"model.position=rope", "model.attention=cudnn", "model.embed_dim=80"}),
                  "--set model.attention=cudnn: model.attention: cudnn with a head dim of 20 (wanted a multiple of 8 "
                  "up to 128; or fused)");
        EXPECT_EQ(error_of({"model.position=rope", "model.attention=cudnn", "model.embed_dim=544"}),
                  "--set model.attention=cudnn: model.attention: cudnn with a head dim of 136 (wanted a multiple of 8 "
                  "up to 128; or fused)");
        return;
    }
    const std::string build = std::string("BACKEND=") + backend_name() + " PRECISION=";
    EXPECT_EQ(message.find("--set model.attention=cudnn: model.attention: cudnn in a program built with " + build), 0u)
        << message;
    EXPECT_NE(message.find("wanted BACKEND=cuda PRECISION=bf16 and cuDNN 9.16 or later when it was built; or fused"),
              std::string::npos)
        << message;
}

}  // namespace
}  // namespace jetlag
