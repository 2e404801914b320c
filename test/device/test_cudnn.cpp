// Attention through cuDNN. What surrounds it, packed rows and the way back of their gradients, is tested in every build
// of the device kernels; that cuDNN knows engines for our graphs, without a GPU; numbers, on a GPU, against the
// double-precision loops of test/reference/.
#include <fmt/format.h>

#include "kernels/cuda/attention_cudnn.h"
#include "kernels/cuda/attention_rows.h"
#include "models/windows.h"
#include "test/kernel_support.h"
#include "test/reference/reference.h"

namespace jetlag::test {
namespace {

struct Problem {
    int64_t B, T, H, D;
    reference::Rotary kind = reference::Rotary::kNone;
};

// A rotary table on both sides, rounded to float on both.
struct Rotary {
    reference::RotaryTable want;
    std::vector<std::unique_ptr<FloatBuffer>> memory;
    RotaryTable table;
};

Rotary make_rotary(const Problem& p) {
    Rotary rotary;
    reference::RotarySettings settings;
    settings.kind = p.kind;
    rotary.want = reference::rotary_table(settings, 64, p.T, p.D);
    rotary.table.pairs = rotary.want.pairs;
    const auto copy = [&](Doubles& values) -> float* {
        if (values.empty()) return nullptr;
        const Floats rounded(values.begin(), values.end());
        values.assign(rounded.begin(), rounded.end());
        rotary.memory.push_back(std::make_unique<FloatBuffer>(rounded));
        return rotary.memory.back()->data();
    };
    rotary.table.query_cos = copy(rotary.want.query_cosine);
    rotary.table.query_sin = copy(rotary.want.query_sine);
    rotary.table.key_cos = copy(rotary.want.key_cosine);
    rotary.table.key_sin = copy(rotary.want.key_sine);
    rotary.table.shear = copy(rotary.want.shear);
    return rotary;
}

// Head h of sequence b of part s of `parts`, x: (B, T, parts, H, D) -> (T, D).
Doubles head_of(const Floats& x, const Problem& p, int64_t parts, int64_t s, int64_t b, int64_t h) {
    Doubles head;
    for (int64_t t = 0; t < p.T; t++)
        for (int64_t d = 0; d < p.D; d++)
            head.push_back(x[static_cast<size_t>((((b * p.T + t) * parts + s) * p.H + h) * p.D + d)]);
    return head;
}

TEST(DeviceAttentionRows, MatchTheReferenceBothWays) {
    using enum reference::Rotary;
    for (const reference::Rotary kind : {kNone, kRope, kYarn, kJordan})
        for (const int64_t T : {1, 65, 150})
            for (const int64_t D : {4, 8, 24, 128}) {
                SCOPED_TRACE(fmt::format("rotary {} T {} D {}", static_cast<int>(kind), T, D));
                const Problem p = {2, T, 3, D, kind};
                const Rotary rotary = make_rotary(p);
                TorchGenerator generator = make_generator(31);
                const int64_t n = p.B * p.H * T * D;
                const Floats qkv = normals(generator, 3 * n), drows = normals(generator, n);
                const Floats dkey_rows = normals(generator, n), before = normals(generator, 3 * n);
                const RealBuffer query(n), key(n), dqkv(before), dquery(drows), dkey(dkey_rows);
                attention_rows(query.data(), key.data(), RealBuffer(qkv).data(), rotary.table, p.B, T, p.H, D);
                attention_rows_backward(dqkv.data(), dquery.data(), dkey.data(), rotary.table, p.B, T, p.H, D);

                const double scale = 1 / std::sqrt(static_cast<double>(D));
                const Floats found = dqkv.read();
                Doubles want_query, want_key;
                double error[2] = {}, size[2] = {};
                for (int64_t b = 0; b < p.B; b++)
                    for (int64_t h = 0; h < p.H; h++) {
                        for (const double x : reference::rotate_queries(rotary.want, head_of(qkv, p, 3, 0, b, h), D))
                            want_query.push_back(x * scale);
                        for (const double x : reference::rotate_keys(rotary.want, head_of(qkv, p, 3, 1, b, h), D))
                            want_key.push_back(x);
                        const int64_t at = (b * p.H + h) * T * D;
                        Doubles drotated(drows.begin() + at, drows.begin() + at + T * D);
                        for (double& x : drotated) x *= scale;
                        const Doubles dkey_head(dkey_rows.begin() + at, dkey_rows.begin() + at + T * D);
                        const Doubles want[] = {reference::rotate_queries_backward(rotary.want, drotated, D),
                                                reference::rotate_keys_backward(rotary.want, dkey_head, D)};
                        for (int64_t s = 0; s < 2; s++) {
                            const Doubles head = head_of(found, p, 3, s, b, h);
                            for (size_t i = 0; i < head.size(); i++) {
                                error[s] += (head[i] - want[s][i]) * (head[i] - want[s][i]);
                                size[s] += want[s][i] * want[s][i];
                            }
                        }
                        EXPECT_EQ(head_of(found, p, 3, 2, b, h), head_of(before, p, 3, 2, b, h)) << "dv";
                    }
                EXPECT_LE(relative_error(query.read(), want_query), 1e-6 + kRealRounding);
                EXPECT_LE(relative_error(key.read(), want_key), 1e-6 + kRealRounding);
                for (int64_t s = 0; s < 2; s++)
                    EXPECT_LE(std::sqrt(error[s] / size[s]), 1e-6 + kRealRounding) << (s == 0 ? "dq" : "dk");
            }
}

#ifdef JETLAG_CUDNN
// What cuDNN wants to know of an H100 SXM, with compute capability 9.0.
constexpr const char* kH100 = R"({"deviceName": "NVIDIA H100 80GB HBM3", "deviceVer": 900, "driverVer": 13000,
"cudaDeviceId": 0, "pciDeviceId": 0, "isTccDriver": 0, "supportCoopLaunch": 1, "multiProcessorCount": 132,
"warpSize": 32, "maxGridSize": [2147483647, 65535, 65535], "maxBlockSize": [1024, 1024, 64], "maxThreadsPerBlock": 1024,
"maxThreadsPerSM": 2048, "maxCtasPerSM": 32, "regsPerBlock": 65536, "maxRegistersPerSM": 65536,
"maxSharedMemoryPerBlock": 49152, "maxSharedMemoryPerBlockOptin": 232448, "reservedSharedMemoryPerBlock": 1024,
"totalGlobalMem": 85000000000, "l2CacheSize": 52428800, "smClockRateKHz": 1980000, "memClockRateKHz": 2619000})";
#endif

// cuDNN finalizes every tensor, every operation and the graph, and its heuristics for a GPU that need not be there
// propose engines. Whether those are there, and what they compute, only a GPU shows.
TEST(DeviceCudnnGraphs, HaveEnginesForAnH100) {
#ifdef JETLAG_CUDNN
    for (const bool backward : {false, true})
        for (const int64_t D : {8, 24, 64, 128})
            for (const int64_t T : {1, 129, 1024})
                EXPECT_GT(cudnn_engine_count(kH100, 32, T, 4, D, backward), 0)
                    << (backward ? "backward" : "forward") << " D " << D << " T " << T;
#else
    GTEST_SKIP() << "a build without cuDNN's attention (it needs BACKEND=cuda PRECISION=bf16)";
#endif
}

#ifdef JETLAG_CUDNN
std::string no_gpu() {
    try {
        simd_target_name();
        return "";
    } catch (const std::exception& e) {
        return fmt::format("no GPU: {}", e.what());
    }
}
#define NEEDS_CUDNN() \
    if (const std::string why = no_gpu(); !why.empty()) GTEST_SKIP() << why

struct Outputs {
    Floats out, lse, dqkv;
};

// Memory for both passes; results are NaN at first.
struct Passes {
    Problem p;
    Rotary rotary;
    RealBuffer qkv, dout, out, dqkv;
    FloatBuffer lse, workspace;

    Passes(const Problem& problem, const Floats& qkv_values, const Floats& dout_values)
        : p(problem),
          rotary(make_rotary(problem)),
          qkv(qkv_values),
          dout(dout_values),
          out(std::ssize(dout_values)),
          dqkv(std::ssize(qkv_values)),
          lse(p.B * p.H * p.T),
          workspace(attention_workspace_floats(p.B, p.T, p.H, p.D)) {}
    void run() const {
        attention_cudnn_forward(out.data(), lse.data(), qkv.data(), rotary.table, workspace.data(), p.B, p.T, p.H, p.D);
        attention_cudnn_backward(dqkv.data(), dout.data(), qkv.data(), out.data(), lse.data(), rotary.table,
                                 workspace.data(), p.B, p.T, p.H, p.D);
    }
    Outputs read() const {
        workspace.read();
        return {out.read(), lse.read(), dqkv.read()};
    }
};

// Every row by itself, so that one that is wrong cannot hide among many: within eight roundings of its size, and a part
// of the mean row's for rows whose terms cancel. rows: of D values.
void expect_rows_match(const Floats& found, const Doubles& want, int64_t D, const std::string& name) {
    ASSERT_EQ(found.size(), want.size());
    const double typical = norm(want) / std::sqrt(static_cast<double>(want.size()) / static_cast<double>(D));
    for (size_t row = 0; row < want.size() / static_cast<size_t>(D); row++) {
        const size_t begin = row * static_cast<size_t>(D), end = begin + static_cast<size_t>(D);
        const Floats found_row(found.begin() + begin, found.begin() + end);
        const Doubles want_row(want.begin() + begin, want.begin() + end);
        ASSERT_LE(distance(found_row, want_row), 0x1p-5 * norm(want_row) + 0x1p-6 * typical)
            << name << ", row " << row << " of " << want.size() / static_cast<size_t>(D);
    }
    // All together are better than any one has to be.
    EXPECT_LE(relative_error(found, want), 0x1p-6) << name;
}

void expect_matches_reference(const Problem& p) {
    SCOPED_TRACE(fmt::format("B {} T {} H {} D {} rotary {}", p.B, p.T, p.H, p.D, static_cast<int>(p.kind)));
    TorchGenerator generator = make_generator(17);
    const int64_t n = p.B * p.T * p.H * p.D;
    const Floats qkv = normals(generator, 3 * n), dout = normals(generator, n);
    const Passes passes(p, qkv, dout);
    passes.run();
    const Outputs found = passes.read();
    const reference::AttentionLayer want =
        reference::attention_layer_forward(to_doubles(qkv), passes.rotary.want, {}, p.B, p.T, p.H, p.D);
    const reference::AttentionLayerGradients want_gradients = reference::attention_layer_backward(
        to_doubles(dout), to_doubles(qkv), passes.rotary.want, {}, p.B, p.T, p.H, p.D);
    expect_rows_match(found.out, want.out, p.D, "out");
    for (size_t i = 0; i < want.lse.size(); i++)
        ASSERT_LE(std::fabs(found.lse[i] - want.lse[i]), 0x1p-5 * std::max(1.0, std::fabs(want.lse[i])))
            << "lse of row " << i;
    const char* names[] = {"dq", "dk", "dv"};
    for (int64_t s = 0; s < 3; s++) {
        Floats found_part;
        Doubles want_part;
        const int64_t C = p.H * p.D;
        for (int64_t t = 0; t < p.B * p.T; t++)
            for (int64_t c = 0; c < C; c++) {
                found_part.push_back(found.dqkv[static_cast<size_t>((3 * t + s) * C + c)]);
                want_part.push_back(want_gradients.dqkv[static_cast<size_t>((3 * t + s) * C + c)]);
            }
        // With one key the weights cannot change: the gradient of scores is rounding alone.
        if (p.T == 1 && s < 2) {
            EXPECT_LE(norm(found_part), 0x1p-6 * norm(dout)) << names[s];
        } else {
            expect_rows_match(found_part, want_part, p.D, names[s]);
        }
    }
}

TEST(DeviceCudnn, EveryHeadDim) {
    NEEDS_CUDNN();
    for (const int64_t D : {8, 24, 40, 64, 128}) expect_matches_reference({.B = 1, .T = 129, .H = 2, .D = D});
}

TEST(DeviceCudnn, RaggedLengths) {
    NEEDS_CUDNN();
    for (const int64_t T : {1, 2, 17, 64, 65, 128, 257})
        expect_matches_reference({.B = 2, .T = T, .H = 3, .D = 24, .kind = reference::Rotary::kRope});
    expect_matches_reference({.B = 1, .T = 1024, .H = 1, .D = 24, .kind = reference::Rotary::kRope});
}

TEST(DeviceCudnn, EveryRotaryKind) {
    NEEDS_CUDNN();
    using enum reference::Rotary;
    for (const reference::Rotary kind : {kNone, kPi, kNtk, kYarn, kJordan})
        expect_matches_reference({.B = 2, .T = 129, .H = 2, .D = 24, .kind = kind});
}

// The same bits when it is run again, and as a graph of launches; what came before in scratch memory and workspace does
// not count.
TEST(DeviceCudnn, SameBitsAgainAndAsAGraph) {
    NEEDS_CUDNN();
    const Problem p = {.B = 8, .T = 1000, .H = 4, .D = 64, .kind = reference::Rotary::kRope};
    TorchGenerator generator = make_generator(18);
    const int64_t n = p.B * p.T * p.H * p.D;
    const Floats qkv = normals(generator, 3 * n), dout = normals(generator, n);
    const Passes first(p, qkv, dout), captured(p, qkv, dout);
    first.run();
    const Outputs want = first.read();
    Graph graph;
    for (int64_t i = 0; i < 4; i++) {
        first.run();
        run_graph(graph, [&] { captured.run(); });
        for (const Passes* passes : {&first, &captured}) {
            const Outputs found = passes->read();
            EXPECT_TRUE(same_bits(found.out, want.out)) << i;
            EXPECT_TRUE(same_bits(found.lse, want.lse)) << i;
            EXPECT_TRUE(same_bits(found.dqkv, want.dqkv)) << i;
        }
        // Plans and scratch memory of another shape come in between.
        if (i == 1) expect_matches_reference({.B = 1, .T = 96, .H = 1, .D = 32});
    }
}

// Whole models with one and with the other, over a step's passes (from the second on as a graph) and an evaluation.
TEST(DeviceCudnn, ModelsAgreeWithOurOwnKernels) {
    NEEDS_CUDNN();
    const int64_t B = 4, T = 200;
    TorchGenerator generator = make_generator(19);
    const std::vector<int32_t> tokens = random_tokens(generator, B * T, 256),
                               targets = random_tokens(generator, B * T, 256);
    for (const char* method : {"none", "rope", "pj_rotary"}) {
        SCOPED_TRACE(method);
        std::vector<double> losses;
        std::vector<Floats> all_gradients;
        std::vector<BatchResult> evaluations;
        for (const char* attention : {"fused", "cudnn"}) {
            const Model model =
                make_small_model(method, {"train.context=200", std::string("model.attention=") + attention});
            Activations acts = make_activations(model.shape, B, T, Mode::training, false);
            DeviceArray<float> gradients(model.parameters.size);
            for (int pass = 0; pass < 3; pass++) {
                device_zero(gradients.data, gradients.bytes());
                losses.push_back(train_batch(model, acts, gradients, tokens, targets, B, T, 1.0));
                all_gradients.push_back(read_device(gradients));
            }
            Activations eval_acts = make_activations(model.shape, B, T, Mode::inference, true);
            evaluations.push_back(evaluate_batch(model, eval_acts, tokens, targets, B, T, T));
        }
        for (const size_t first : {0, 3})
            for (size_t pass = 1; pass < 3; pass++) {
                EXPECT_EQ(losses[first], losses[first + pass]);
                EXPECT_TRUE(same_bits(all_gradients[first], all_gradients[first + pass])) << "pass " << pass;
            }
        EXPECT_NEAR(losses[3], losses[0], 1e-2);
        EXPECT_LE(relative_error(all_gradients[3], to_doubles(all_gradients[0])), 0x1p-4);
        EXPECT_NEAR(evaluations[1].loss, evaluations[0].loss, 1e-2);
        // Of the last block, which has statistics, attention is our own either way.
        ASSERT_TRUE(evaluations[1].entropy.has_value());
        EXPECT_NEAR(*evaluations[1].entropy, *evaluations[0].entropy, 1e-2);
        EXPECT_NEAR(*evaluations[1].mean_lag, *evaluations[0].mean_lag, 0.5);
    }
}
#endif

}  // namespace
}  // namespace jetlag::test
