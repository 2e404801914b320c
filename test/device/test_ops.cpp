// The ops of kernels/cuda/ at sizes where their kernels go ways of their own that the tests of all backends do not
// reach: vocabularies over a block, rows too long for the shared memory of a full block, partial sums over a block.
#include <fmt/format.h>

#include <algorithm>

#include "test/kernel_support.h"
#include "test/reference/reference.h"

namespace jetlag::test {
namespace {

TEST(DeviceEmbedding, LargeVocabularyAndManyColumns) {
    TorchGenerator generator = make_generator(1);
    for (const int64_t V : {257, 1000})
        for (const int64_t N : {255, 256, 257, 6000}) {
            SCOPED_TRACE(fmt::format("V {} N {}", V, N));
            const int64_t C = 130;
            const Floats dout = normals(generator, N * C), before = normals(generator, V * C);
            const std::vector<int32_t> tokens = random_tokens(generator, N, V);
            const FloatBuffer dweight(before);
            embedding_backward(dweight.data(), RealBuffer(dout).data(), TokenBuffer(tokens).data(), N, V, C);
            Doubles want = to_doubles(before);
            reference::embedding_backward(to_doubles(dout), tokens, C, want);
            const Floats found = dweight.read();
            EXPECT_LE(relative_error(found, want), 2 * kRounding);
            for (int64_t v = 0; v < V; v++)
                if (std::find(tokens.begin(), tokens.end(), v) == tokens.end()) {
                    EXPECT_EQ(found[v * C], before[v * C]) << "value " << v << " does not occur";
                }
        }
}

TEST(DeviceLayerNorm, LongRowsAndManyChunks) {
    TorchGenerator generator = make_generator(2);
    const std::pair<int64_t, int64_t> sizes[] = {{70, 2000}, {9, 7000}, {20000, 3}};
    for (const auto& [N, C] : sizes) {
        SCOPED_TRACE(fmt::format("N {} C {}", N, C));
        const Floats x = normals(generator, N * C), weight = normals(generator, C), bias = normals(generator, C);
        const Floats dout = normals(generator, N * C), dinp_before = normals(generator, N * C);
        Doubles want_dweight(static_cast<size_t>(C), 0), want_dbias(want_dweight);
        const Doubles want_out = reference::layernorm_forward(to_doubles(x), to_doubles(weight), to_doubles(bias));
        Doubles want_dinp = reference::layernorm_backward(to_doubles(dout), to_doubles(x), to_doubles(weight),
                                                          want_dweight, want_dbias);
        for (int64_t i = 0; i < N * C; i++) want_dinp[i] += dinp_before[i];
        const RealBuffer inp(x), out(N * C), dinp(dinp_before);
        const FloatBuffer device_weight(weight), mean(N), rstd(N);
        const FloatBuffer dweight(Floats(weight.size(), 0.0f)), dbias(Floats(weight.size(), 0.0f));
        const FloatBuffer workspace(layernorm_workspace_floats(N, C));
        layernorm_forward(out.data(), mean.data(), rstd.data(), inp.data(), device_weight.data(),
                          FloatBuffer(bias).data(), N, C);
        layernorm_backward(dinp.data(), dweight.data(), dbias.data(), RealBuffer(dout).data(), inp.data(),
                           device_weight.data(), mean.data(), rstd.data(), workspace.data(), N, C);
        // Three channels: where two of them nearly agree, rstd multiplies the rounding of x - mean.
        EXPECT_LE(relative_error(out.read(), want_out), 2e-6 + kRealRounding);
        EXPECT_LE(relative_error(dinp.read(), want_dinp), (C == 3 ? 2e-5 : 2e-6) + kRealRounding);
        EXPECT_LE(relative_error(dweight.read(), want_dweight), 4e-6);
        EXPECT_LE(relative_error(dbias.read(), want_dbias), 4e-6);
        workspace.read();
    }
}

TEST(DeviceLinear, ManyRowsOfBiasGradient) {
    TorchGenerator generator = make_generator(3);
    const int64_t N = 40000, C = 2, OC = 33;
    const Floats x = normals(generator, N * C), weight = normals(generator, OC * C), dout = normals(generator, N * OC);
    const RealBuffer dinp(N * C);
    const FloatBuffer dweight(Floats(static_cast<size_t>(OC * C), 0.0f));
    const FloatBuffer dbias(Floats(static_cast<size_t>(OC), 0.0f)), workspace(linear_workspace_floats(N, C, OC));
    linear_backward(dinp.data(), dweight.data(), dbias.data(), RealBuffer(dout).data(), RealBuffer(x).data(),
                    RealBuffer(weight).data(), workspace.data(), N, C, OC);
    Doubles want_dweight(static_cast<size_t>(OC * C), 0), want_dbias(static_cast<size_t>(OC), 0);
    const Doubles want =
        reference::linear_backward(to_doubles(dout), to_doubles(x), to_doubles(weight), want_dweight, want_dbias);
    EXPECT_LE(distance(dinp.read(), want), (2e-6 + kRealRounding) * norm(want) + product_noise(dout, weight, OC));
    EXPECT_LE(distance(dweight.read(), want_dweight), 2e-6 * norm(dout) + product_noise(dout, x, N));
    EXPECT_LE(distance(dbias.read(), want_dbias), 2e-6 * norm(dout));
    workspace.read();
}

TEST(DeviceReductions, MorePartialResultsThanThreads) {
    TorchGenerator generator = make_generator(4);
    Floats x = normals(generator, 5'000'000);
    long double sum = 0, squares = 0;
    for (const float value : x) {
        sum += value;
        squares += static_cast<long double>(value) * value;
    }
    const FloatBuffer device(x);
    const Moments found = moments(device.data(), std::ssize(x));
    EXPECT_NEAR(found.sum, static_cast<double>(sum), 1e-9);
    EXPECT_NEAR(found.sum_of_squares / static_cast<double>(squares), 1, 1e-13);
    EXPECT_EQ(first_nonfinite(device.data(), std::ssize(x)), -1);
    for (const int64_t at : {4'999'999, 4'500'000, 300'000}) {
        x[static_cast<size_t>(at)] = kNan;
        EXPECT_EQ(first_nonfinite(FloatBuffer(x).data(), std::ssize(x)), at);
    }
}

// So many coefficients that a block has fewer threads, and so many lags that a thread has several.
TEST(DeviceLagBias, ManyCoefficientsAndLags) {
    const Model model = make_small_model(
        "full", {"model.position.lag_bias.sectors=[fj, affine, lc]", "model.position.lag_bias.max_order=15",
                 "model.position.lag_bias.frequencies=16", "train.context=64", "model.embed_dim=16", "model.heads=2"});
    const LagBiasSpec& spec = model.shape.lag_bias;
    const int64_t n = spec.module->coefficient_count(spec), T = 5000;
    EXPECT_GT(n, 1000);
    TorchGenerator generator = make_generator(5);
    const Floats parameters = normals(generator, bias_parameter_count(spec), 0.1f);
    const Floats dtable = normals(generator, spec.heads * T), before(parameters.size(), 0.0f);
    const FloatBuffer gradient(before), table(spec.heads * T), device_parameters(parameters);
    lag_bias_table(table.data(), spec, device_parameters.data(), T);
    lag_bias_table_backward(gradient.data(), FloatBuffer(dtable).data(), spec, device_parameters.data(), T);
    const Floats found_table = table.read();
    Floats want(before);
    for (int64_t h = 0; h < spec.heads; h++) {
        Doubles c(static_cast<size_t>(n)), dc(static_cast<size_t>(n), 0.0);
        spec.module->coefficients(spec, parameters.data(), h, c.data());
        for (int64_t d = 0; d < T; d++) {
            const double value = spec.module->bias(spec, c.data(), static_cast<double>(d));
            ASSERT_LE(std::fabs(found_table[h * T + d] - value), 1e-7 * (1 + std::fabs(value))) << d;
            spec.module->bias_gradient(spec, c.data(), static_cast<double>(d), dtable[h * T + d], dc.data());
        }
        spec.module->coefficients_gradient(spec, parameters.data(), h, c.data(), dc.data(), want.data());
    }
    EXPECT_LE(relative_error(gradient.read(), to_doubles(want)), 1e-6);
}

TEST(DeviceReductions, OfBf16) {
    TorchGenerator generator = make_generator(6);
    const int64_t n = 40001;
    std::vector<bf16> x;
    long double sum = 0, squares = 0;
    for (const float value : normals(generator, n)) {
        x.push_back(to_bf16(value));
        sum += to_float(x.back());
        squares += static_cast<long double>(to_float(x.back())) * to_float(x.back());
    }
    const DeviceArray<bf16> device(n), again(n);
    copy_to_device(device.data, x.data(), device.bytes());
    EXPECT_NEAR(moments(device.data, n).sum, static_cast<double>(sum), 1e-9);
    EXPECT_NEAR(moments(device.data, n).sum_of_squares / static_cast<double>(squares), 1, 1e-13);
    EXPECT_EQ(first_nonfinite(device.data, n), -1);
    x[30000] = to_bf16(kInfinity);
    copy_to_device(again.data, x.data(), again.bytes());
    EXPECT_EQ(first_nonfinite(again.data, n), 30000);
    const Floats values = normals(generator, n, 1, 0.1f);
    round_to_bf16(again.data, FloatBuffer(values).data(), n);
    copy_to_host(x.data(), again.data, again.bytes());
    for (int64_t i = 0; i < n; i++) EXPECT_EQ(x[static_cast<size_t>(i)].bits, to_bf16(values[i]).bits);
}

}  // namespace
}  // namespace jetlag::test
