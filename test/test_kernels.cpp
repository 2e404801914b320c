// The ops without position against the double-precision loops of test/reference/.
//
// Tolerances: an op sums at most a few thousand terms of comparable size in float, in several partial sums, whose
// rounding errors stay under 2e-6 of the result's norm; where a bound is tighter or wider the reason stands there.
#include <fmt/format.h>

#include <cfloat>

#include "test/kernel_support.h"
#include "test/reference/reference.h"

namespace jetlag::test {
namespace {

constexpr double kTolerance = 2e-6;

TEST(Memory, IsZeroedAlignedAndOwned) {
    for (const size_t bytes : {1, 63, 64, 4096, 100000}) {
        void* memory = device_alloc(bytes);
        EXPECT_EQ(reinterpret_cast<uintptr_t>(memory) % 64, 0u);
        std::vector<unsigned char> found(bytes, 1);
        copy_to_host(found.data(), memory, bytes);
        EXPECT_EQ(found, std::vector<unsigned char>(bytes, 0));
        copy_to_device(memory, std::vector<unsigned char>(bytes, 7).data(), bytes);
        device_zero(memory, bytes);
        copy_to_host(found.data(), memory, bytes);
        EXPECT_EQ(found, std::vector<unsigned char>(bytes, 0));
        device_free(memory);
    }
    device_zero(nullptr, 0);
    copy_to_device(nullptr, nullptr, 0);
    copy_to_host(nullptr, nullptr, 0);

    DeviceArray<float> a(5);
    float* data = a.data;
    DeviceArray<float> b = std::move(a);
    EXPECT_EQ(b.data, data);
    EXPECT_EQ(b.size, 5);
    EXPECT_EQ(b.bytes(), 20u);
    DeviceArray<float> c;
    EXPECT_EQ(c.data, nullptr);
    c = std::move(b);
    EXPECT_EQ(c.data, data);
    EXPECT_EQ(DeviceArray<float>(0).data, nullptr);
}

TEST(Machine, SaysWhatItIs) {
    EXPECT_STRNE(backend_name(), "");
    EXPECT_STRNE(simd_target_name(), "");
    const int threads = thread_count();
    EXPECT_GE(threads, 1);
    set_thread_count(0);
    EXPECT_EQ(thread_count(), 1);
    set_thread_count(3);
    EXPECT_EQ(thread_count(), 3);
    set_thread_count(threads);
    // Slower than 10 MFLOP/s or faster than 1 EFLOP/s is no machine but a mistake.
    EXPECT_GT(measure_peak_flops(), 1e7);
    EXPECT_LT(measure_peak_flops(), 1e18);
}

TEST(Embedding, Forward) {
    TorchGenerator generator = make_generator(1);
    for (const int64_t V : {3, 256})
        for (const int64_t N : {1, 7, 1000})
            for (const int64_t C : {1, 5, 24, 97}) {
                SCOPED_TRACE(fmt::format("V {} N {} C {}", V, N, C));
                const Floats weight = normals(generator, V * C);
                const std::vector<int32_t> tokens = random_tokens(generator, N, V);
                const FloatBuffer device_weight(weight);
                const RealBuffer out(N * C);
                embedding_forward(out.data(), device_weight.data(), TokenBuffer(tokens).data(), N, C);
                EXPECT_EQ(to_doubles(out.read()), reference::embedding_forward(to_doubles(weight), tokens, C));
            }
}

TEST(Embedding, Backward) {
    TorchGenerator generator = make_generator(2);
    for (const int64_t V : {3, 256})
        for (const int64_t N : {1, 7, 1000, 3000})
            for (const int64_t C : {1, 5, 24, 97}) {
                SCOPED_TRACE(fmt::format("V {} N {} C {}", V, N, C));
                const Floats dout = normals(generator, N * C), before = normals(generator, V * C);
                const std::vector<int32_t> tokens = random_tokens(generator, N, V);
                const FloatBuffer dweight(before);
                embedding_backward(dweight.data(), RealBuffer(dout).data(), TokenBuffer(tokens).data(), N, V, C);
                Doubles want = to_doubles(before);
                reference::embedding_backward(to_doubles(dout), tokens, C, want);
                // Sums are in double: two roundings to float, of the sum and of the total.
                EXPECT_LE(relative_error(dweight.read(), want), 2 * kRounding);
            }
}

// The inverse deviation of one row, in double.
double inverse_deviation(const Doubles& x, int64_t n, int64_t C, double* mean_out) {
    double mean = 0, variance = 0;
    for (int64_t c = 0; c < C; c++) mean += x[n * C + c] / static_cast<double>(C);
    for (int64_t c = 0; c < C; c++) variance += std::pow(x[n * C + c] - mean, 2) / static_cast<double>(C);
    *mean_out = mean;
    return 1 / std::sqrt(variance + 1e-5);
}

TEST(LayerNorm, ForwardAndBackward) {
    TorchGenerator generator = make_generator(3);
    for (const int64_t N : {1, 3, 1100})
        for (const int64_t C : {1, 2, 7, 16, 24, 31, 96, 257})
            for (const float mean : {0.0f, 10.0f}) {
                SCOPED_TRACE(fmt::format("N {} C {} mean {}", N, C, mean));
                // Rounding of the mean, and of x - mean, counts relative to the mean.
                const double tolerance = kTolerance * (1 + mean);
                const Floats x = normals(generator, N * C, 1, mean), weight = normals(generator, C);
                const Floats bias = normals(generator, C), dout = normals(generator, N * C);
                const Floats dinp_before = normals(generator, N * C), dweight_before = normals(generator, C);
                const Floats dbias_before = normals(generator, C);
                const Doubles x64 = to_doubles(x), weight64 = to_doubles(weight), dout64 = to_doubles(dout);
                const Doubles want_out = reference::layernorm_forward(x64, weight64, to_doubles(bias));
                Doubles want_dweight = to_doubles(dweight_before), want_dbias = to_doubles(dbias_before);
                Doubles want_dinp = reference::layernorm_backward(dout64, x64, weight64, want_dweight, want_dbias);
                // A row of one channel has no variance: its rstd is 1/sqrt(eps) = 316, and dinp is that times zero.
                for (int64_t i = 0; i < N * C; i++) want_dinp[i] += dinp_before[i];

                for_each_simd_target([&] {
                    const RealBuffer inp(x), out(N * C), dinp(dinp_before);
                    const FloatBuffer device_weight(weight), means(N), rstds(N);
                    layernorm_forward(out.data(), means.data(), rstds.data(), inp.data(), device_weight.data(),
                                      FloatBuffer(bias).data(), N, C);
                    EXPECT_LE(relative_error(out.read(), want_out), tolerance + kRealRounding);
                    const Floats found_means = means.read(), found_rstds = rstds.read();
                    for (int64_t n = 0; n < N; n++) {
                        double row_mean = 0;
                        const double rstd = inverse_deviation(x64, n, C, &row_mean);
                        EXPECT_NEAR(found_means[n], row_mean, 1e-6 * (1 + mean));
                        EXPECT_NEAR(found_rstds[n] / rstd, 1, 1e-6 * (1 + mean) * rstd * rstd);
                    }

                    const FloatBuffer dweight(dweight_before), dbias(dbias_before);
                    const FloatBuffer workspace(layernorm_workspace_floats(N, C));
                    layernorm_backward(dinp.data(), dweight.data(), dbias.data(), RealBuffer(dout).data(), inp.data(),
                                       device_weight.data(), means.data(), rstds.data(), workspace.data(), N, C);
                    EXPECT_LE(relative_error(dinp.read(), want_dinp),
                              (C == 2 ? 10 * tolerance : tolerance) + kRealRounding);
                    EXPECT_LE(relative_error(dweight.read(), want_dweight), tolerance);
                    EXPECT_LE(relative_error(dbias.read(), want_dbias), kTolerance);
                    workspace.read();
                });
            }
}

TEST(Linear, ForwardAndBackward) {
    TorchGenerator generator = make_generator(4);
    for (const int64_t N : {1, 5, 513, 1300})
        for (const int64_t C : {1, 3, 24, 97})
            for (const int64_t OC : {1, 7, 96, 256}) {
                SCOPED_TRACE(fmt::format("N {} C {} OC {}", N, C, OC));
                const Floats x = normals(generator, N * C), weight = normals(generator, OC * C);
                const Floats bias = normals(generator, OC), dout = normals(generator, N * OC);
                const Floats dweight_before = normals(generator, OC * C), dbias_before = normals(generator, OC);
                const RealBuffer inp(x), device_weight(weight), device_dout(dout), out(N * OC);
                linear_forward(out.data(), inp.data(), device_weight.data(), RealBuffer(bias).data(), N, C, OC);
                const Doubles want_out = reference::linear_forward(to_doubles(x), to_doubles(weight), to_doubles(bias));
                EXPECT_LE(distance(out.read(), want_out),
                          (kTolerance + kRealRounding) * norm(want_out) + product_noise(x, weight, C));

                Doubles want_dweight = to_doubles(dweight_before), want_dbias = to_doubles(dbias_before);
                const Doubles want_dinp = reference::linear_backward(to_doubles(dout), to_doubles(x),
                                                                     to_doubles(weight), want_dweight, want_dbias);
                Floats first_dweight;
                for (const bool with_dinp : {true, false}) {
                    const RealBuffer dinp(N * C);
                    const FloatBuffer dweight(dweight_before), dbias(dbias_before);
                    const FloatBuffer workspace(linear_workspace_floats(N, C, OC));
                    linear_backward(with_dinp ? dinp.data() : nullptr, dweight.data(), dbias.data(), device_dout.data(),
                                    inp.data(), device_weight.data(), workspace.data(), N, C, OC);
                    if (with_dinp) {
                        EXPECT_LE(distance(dinp.read(), want_dinp),
                                  (kTolerance + kRealRounding) * norm(want_dinp) + product_noise(dout, weight, OC));
                        first_dweight = dweight.read();
                    }
                    EXPECT_LE(distance(dweight.read(), want_dweight),
                              kTolerance * norm(want_dweight) + product_noise(dout, x, N));
                    // With few channels the sum over rows may cancel; its error is relative to the terms.
                    EXPECT_LE(distance(dbias.read(), want_dbias), kTolerance * norm(dout));
                    EXPECT_TRUE(same_bits(dweight.read(), first_dweight));
                    workspace.read();
                }
            }
}

// Finite values of a dense grid, of both signs: small steps where GELU bends, every power of two, and the largest.
Floats gelu_grid() {
    Floats grid;
    for (int i = 0; i <= 14 * 1024; i++) grid.push_back(static_cast<float>(i) / 1024);
    for (int exponent = -149; exponent <= 127; exponent++)
        for (const float factor : {1.0f, 1.37f}) grid.push_back(std::ldexp(factor, exponent));
    grid.push_back(kHalfPrecision ? 0x1.fep127f : FLT_MAX);
    const size_t half = grid.size();
    for (size_t i = 0; i < half; i++) grid.push_back(-grid[i]);
    return rounded(grid);
}

TEST(Gelu, DenseGrid) {
    const Floats x = gelu_grid();
    const int64_t n = std::ssize(x);
    const Doubles x64 = to_doubles(x), ones(x.size(), 1.0);
    const Doubles want = reference::gelu_forward(x64), want_derivative = reference::gelu_backward(ones, x64);
    for_each_simd_target([&] {
        const RealBuffer inp(x), out(n), dinp(n);
        gelu_forward(out.data(), inp.data(), n);
        gelu_backward(dinp.data(), RealBuffer(Floats(x.size(), 1.0f)).data(), inp.data(), n);
        const Floats found = out.read(), derivative = dinp.read();
        for (size_t i = 0; i < x.size(); i++) {
            // erf is good to 2.4 units in the last place (1.5e-7 near 1); x/2 (1 + erf) inherits half of that times x.
            // Below the smallest normal float the spacing is absolute.
            EXPECT_LE(std::fabs(found[i] - want[i]), 1.5e-7 * std::fabs(x64[i]) + kRealRounding * std::fabs(want[i]) +
                                                         (kHalfPrecision ? 0x1p-133 : 0x1p-149))
                << "x = " << x[i];
            // Values reach 1.13, and two terms, each good to 1.5e-7, are added.
            EXPECT_LE(std::fabs(derivative[i] - want_derivative[i]),
                      3e-7 + kRealRounding * std::fabs(want_derivative[i]))
                << "x = " << x[i];
        }
        EXPECT_EQ(found[0], 0.0f);
        EXPECT_EQ(found[x.size() / 2], 0.0f);
        EXPECT_TRUE(std::signbit(x[x.size() / 2]));
    });
}

TEST(Gelu, SizesAndAliases) {
    TorchGenerator generator = make_generator(5);
    const Floats all = normals(generator, 20001, 2), all_dout = normals(generator, 20001);
    for_each_simd_target([&] {
        const RealBuffer whole_inp(all), whole_out(20001), whole_dinp(20001);
        gelu_forward(whole_out.data(), whole_inp.data(), 20001);
        gelu_backward(whole_dinp.data(), RealBuffer(all_dout).data(), whole_inp.data(), 20001);
        const Floats want_out = whole_out.read(), want_dinp = whole_dinp.read();
        for (const int64_t n : {1, 3, 15, 16, 17, 8191, 8192, 8193, 20001}) {
            SCOPED_TRACE(n);
            // A value's result does not depend on where it stands: the last n values give the last n results.
            const RealBuffer in_place(Floats(all.end() - n, all.end())), inp(Floats(all.end() - n, all.end()));
            const RealBuffer dout(Floats(all_dout.end() - n, all_dout.end()));
            gelu_forward(in_place.data(), in_place.data(), n);
            EXPECT_TRUE(same_bits(in_place.read(), Floats(want_out.end() - n, want_out.end())));
            gelu_backward(dout.data(), dout.data(), inp.data(), n);
            EXPECT_TRUE(same_bits(dout.read(), Floats(want_dinp.end() - n, want_dinp.end())));
        }
    });
}

TEST(Gelu, NothingHidesANanOrAnInfinity) {
    for_each_simd_target([&] {
        for (const int64_t at : {0, 15, 16, 36}) {
            for (const float bad : {kNan, -kNan, kInfinity, -kInfinity}) {
                Floats x(37, 0.5f);
                x[static_cast<size_t>(at)] = bad;
                const RealBuffer inp(x), out(37), dinp(37);
                gelu_forward(out.data(), inp.data(), 37);
                gelu_backward(dinp.data(), RealBuffer(Floats(37, 1.0f)).data(), inp.data(), 37);
                const Floats found = out.read(), derivative = dinp.read();
                for (int64_t i = 0; i < 37; i++) {
                    EXPECT_EQ(std::isfinite(found[i]), i != at) << bad << " at " << at << ", result " << i;
                    EXPECT_EQ(std::isfinite(derivative[i]), i != at) << bad << " at " << at << ", result " << i;
                }
                if (bad == kInfinity) {
                    EXPECT_EQ(found[at], kInfinity);
                }
            }
        }
    });
}

TEST(LayerNorm, AfterAResidualAddTheSameBits) {
    TorchGenerator generator = make_generator(18);
    for (const int64_t N : {1, 3, 1100})
        for (const int64_t C : {1, 7, 32, 97, 257})
            for_each_simd_target([&] {
                SCOPED_TRACE(fmt::format("N {} C {}", N, C));
                const RealBuffer a(normals(generator, N * C)), b(normals(generator, N * C));
                const RealBuffer want_sum(N * C), want(N * C), sum(N * C), out(N * C), out_in_place(N * C);
                const FloatBuffer weight(normals(generator, C)), bias(normals(generator, C));
                const FloatBuffer want_mean(N), want_rstd(N), mean(N), rstd(N);
                residual_forward(want_sum.data(), a.data(), b.data(), N * C);
                layernorm_forward(want.data(), want_mean.data(), want_rstd.data(), want_sum.data(), weight.data(),
                                  bias.data(), N, C);
                residual_layernorm_forward(sum.data(), out.data(), mean.data(), rstd.data(), a.data(), b.data(),
                                           weight.data(), bias.data(), N, C);
                EXPECT_TRUE(same_bits(sum.read(), want_sum.read()));
                EXPECT_TRUE(same_bits(out.read(), want.read()));
                EXPECT_TRUE(same_bits(mean.read(), want_mean.read()));
                EXPECT_TRUE(same_bits(rstd.read(), want_rstd.read()));
                residual_layernorm_forward(a.data(), out_in_place.data(), mean.data(), rstd.data(), a.data(), b.data(),
                                           weight.data(), bias.data(), N, C);
                EXPECT_TRUE(same_bits(a.read(), want_sum.read()));
                EXPECT_TRUE(same_bits(out_in_place.read(), want.read()));
            });
}

TEST(Residual, AddsAndMayAliasItsFirstArgument) {
    TorchGenerator generator = make_generator(6);
    for (const int64_t n : {1, 7, 64, 100003}) {
        const Floats a = normals(generator, n), b = normals(generator, n);
        const RealBuffer out(n), device_a(a), device_b(b);
        residual_forward(out.data(), device_a.data(), device_b.data(), n);
        residual_forward(device_a.data(), device_a.data(), device_b.data(), n);
        Floats want(a);
        for (size_t i = 0; i < want.size(); i++) want[i] = rounded(want[i] + b[i]);
        EXPECT_EQ(out.read(), want);
        EXPECT_EQ(device_a.read(), want);
        EXPECT_EQ(device_b.read(), b);
    }
}

TEST(CrossEntropy, LossAndGradient) {
    TorchGenerator generator = make_generator(7);
    for (const int64_t V : {1, 3, 5, 17, 256, 257})
        for (const int64_t N : {1, 9, 300})
            for (const float deviation : {1.0f, 30.0f, 1000.0f})
                for (const float mean : {0.0f, -10000.0f}) {
                    SCOPED_TRACE(fmt::format("V {} N {} deviation {} mean {}", V, N, deviation, mean));
                    const Floats logits = normals(generator, N * V, deviation, mean);
                    const std::vector<int32_t> targets = random_tokens(generator, N, V);
                    const float scale = 0.375f;
                    const reference::CrossEntropy want = reference::cross_entropy(to_doubles(logits), targets);
                    for_each_simd_target([&] {
                        const TokenBuffer device_targets(targets);
                        const RealBuffer device_logits(logits), dlogits(N * V);
                        const FloatBuffer losses(N), only_losses(N);
                        cross_entropy(losses.data(), dlogits.data(), device_logits.data(), device_targets.data(), scale,
                                      N, V);
                        EXPECT_EQ(device_logits.read(), logits);
                        const Floats found = losses.read(), gradient = dlogits.read();
                        for (int64_t n = 0; n < N; n++) {
                            // Loss: a sum of up to 257 terms, its logarithm, and one addition.
                            EXPECT_LE(std::fabs(found[n] - want.losses[n]),
                                      1e-6 + 4 * kRounding * std::fabs(want.losses[n]));
                            for (int64_t v = 0; v < V; v++)
                                EXPECT_LE(std::fabs(gradient[n * V + v] -
                                                    scale * static_cast<double>(N) * want.dlogits[n * V + v]),
                                          1e-6 * scale + kRealRounding * std::fabs(gradient[n * V + v]));
                        }
                        cross_entropy(only_losses.data(), nullptr, device_logits.data(), device_targets.data(), scale,
                                      N, V);
                        EXPECT_TRUE(same_bits(only_losses.read(), found));
                        cross_entropy(losses.data(), device_logits.data(), device_logits.data(), device_targets.data(),
                                      scale, N, V);
                        EXPECT_TRUE(same_bits(losses.read(), found));
                        EXPECT_TRUE(same_bits(device_logits.read(), gradient));
                    });
                }
}

// Small probabilities keep their relative accuracy: the gradient of a logit 60 below the largest is not zero.
TEST(CrossEntropy, SmallProbabilities) {
    const int64_t V = 37;
    Floats logits(static_cast<size_t>(V));
    for (int64_t v = 0; v < V; v++) logits[static_cast<size_t>(v)] = rounded(-2.25f * static_cast<float>(v));
    const reference::CrossEntropy want = reference::cross_entropy(to_doubles(logits), {0});
    for_each_simd_target([&] {
        const FloatBuffer losses(1);
        const RealBuffer dlogits(V);
        cross_entropy(losses.data(), dlogits.data(), RealBuffer(logits).data(),
                      TokenBuffer(std::vector<int32_t>{0}).data(), 1, 1, V);
        const Floats gradient = dlogits.read();
        for (int64_t v = 1; v < V; v++)
            EXPECT_NEAR(gradient[v] / want.dlogits[v], 1, 1e-6 + kRealRounding) << "logit " << v;
    });
}

TEST(CrossEntropy, MaskedAndBadLogits) {
    for_each_simd_target([&] {
        for (const int64_t at : {0, 5, 16, 34}) {
            Floats logits(35, 0.25f);
            logits[static_cast<size_t>(at)] = -kInfinity;
            const int32_t target = 7;
            const FloatBuffer losses(1);
            const RealBuffer dlogits(35);
            cross_entropy(losses.data(), dlogits.data(), RealBuffer(logits).data(),
                          TokenBuffer(std::vector<int32_t>{target}).data(), 1, 1, 35);
            EXPECT_NEAR(losses.read()[0], std::log(34.0), 1e-6);
            EXPECT_EQ(dlogits.read()[static_cast<size_t>(at)], 0.0f);
            EXPECT_NEAR(dlogits.read()[static_cast<size_t>(target)], 1.0 / 34 - 1, 1e-6 + kRealRounding);
            for (const float bad : {kNan, kInfinity}) {
                logits[static_cast<size_t>(at)] = bad;
                cross_entropy(losses.data(), dlogits.data(), RealBuffer(logits).data(),
                              TokenBuffer(std::vector<int32_t>{target}).data(), 1, 1, 35);
                EXPECT_FALSE(std::isfinite(losses.read()[0])) << bad << " at " << at;
                EXPECT_FALSE(std::isfinite(dlogits.read()[static_cast<size_t>(at)])) << bad << " at " << at;
            }
        }
    });
}

// Eight steps on gradients from 0 and 1e-12 (where eps matters) to 1e8.
TEST(AdamW, FollowsPyTorchsFormula) {
    TorchGenerator generator = make_generator(8);
    const int64_t n = 1003;
    const AdamW settings = {3e-3, 0.9, 0.999, 1e-8, 0.1, 0.5};
    reference::AdamWSettings reference_settings;
    reference_settings.weight_decay = settings.weight_decay;
    const float sizes[] = {0.0f, 1e-12f, 1e-8f, 1.0f, 1e8f};
    std::vector<uint8_t> takes_part(static_cast<size_t>(n));
    for (size_t i = 0; i < takes_part.size(); i++) takes_part[i] = i % 3 != 0;

    const Floats initial = normals(generator, n), initial_m = normals(generator, n), initial_v(takes_part.size(), 0.5f);
    Floats start_m = initial_m, start_v = initial_v;
    for (size_t i = 0; i < takes_part.size(); i++)
        if (takes_part[i]) start_m[i] = start_v[i] = 0;
    const FloatBuffer parameters(initial), m(start_m), v(start_v);
    Doubles want = to_doubles(initial), want_m(want.size(), 0), want_v(want.size(), 0);
    for (int64_t step = 1; step <= 8; step++) {
        Floats gradients = normals(generator, n);
        Doubles scaled(gradients.size());
        for (size_t i = 0; i < gradients.size(); i++) {
            gradients[i] *= sizes[i / 3 % 5];
            scaled[i] = settings.grad_scale * gradients[i];
            if (!takes_part[i]) gradients[i] = kNan;
        }
        adamw(parameters.data(), m.data(), v.data(), FloatBuffer(gradients).data(), Buffer<uint8_t>(takes_part).data(),
              settings, step, n);
        reference::adamw_step(reference_settings, step, want, scaled, want_m, want_v);
        const Floats found = parameters.read(), found_m = m.read(), found_v = v.read();
        const double steps = static_cast<double>(step);
        for (size_t i = 0; i < takes_part.size(); i++) {
            if (!takes_part[i]) {
                EXPECT_EQ(found[i], initial[i]);
                EXPECT_EQ(found_m[i], initial_m[i]);
                EXPECT_EQ(found_v[i], initial_v[i]);
                continue;
            }
            // Per step a parameter is rounded three times, and lr times a quotient good to eight roundings is added. v
            // of gradients of 1e-12 is around 1e-27, far from underflow.
            EXPECT_LE(std::fabs(found[i] - want[i]),
                      steps * (3 * kRounding * std::max(1.0, std::fabs(want[i])) + 16 * kRounding * settings.lr));
            const double size = sizes[i / 3 % 5];
            EXPECT_LE(std::fabs(found_m[i] - want_m[i]), 8 * kRounding * steps * size) << "m at step " << step;
            EXPECT_LE(std::fabs(found_v[i] - want_v[i]), 8 * kRounding * steps * std::fabs(want_v[i]))
                << "v at step " << step;
        }
    }
}

TEST(Graphs, DoWhatTheirOpsDo) {
    const bool cpu = std::string(backend_name()) == "cpu";
    const RealBuffer a(Floats{1, 2, 3}), sum(Floats(3, 0.0f));
    int calls = 0;
    const auto ops = [&] {
        calls++;
        residual_forward(sum.data(), sum.data(), a.data(), 3);
    };
    Graph graph;
    for (int i = 0; i < 5; i++) run_graph(graph, ops);
    EXPECT_EQ(sum.read(), (Floats{5, 10, 15}));
    EXPECT_EQ(calls, cpu ? 5 : 2);

    // A capture that fails leaves no graph, and the ops as they were.
    Graph failing;
    run_graph(failing, ops);
    EXPECT_THROW(run_graph(failing, [] { throw std::runtime_error("no"); }), std::runtime_error);
    run_graph(failing, ops);
    EXPECT_EQ(sum.read(), (Floats{7, 14, 21}));
    Graph waiting;
    run_graph(waiting, device_wait);
    if (!cpu) {
        EXPECT_THROW(run_graph(waiting, device_wait), std::runtime_error);
    }
    run_graph(graph, ops);
    EXPECT_EQ(sum.read(), (Floats{8, 16, 24}));
}

// A norm on the device means what the host would make of it.
TEST(AdamW, ShrinksToALargestNorm) {
    TorchGenerator generator = make_generator(9);
    const int64_t n = 20000;
    const Floats gradients = normals(generator, n), initial = normals(generator, n);
    const FloatBuffer device_gradients(gradients);
    const Buffer<uint8_t> takes_part(std::vector<uint8_t>(static_cast<size_t>(n), 1));
    const Buffer<double> norm(1);
    euclidean_norm(norm.data(), device_gradients.data(), n);
    const double size = norm.read()[0];
    EXPECT_EQ(size, std::sqrt(moments(device_gradients.data(), n).sum_of_squares));
    AdamW settings = {3e-3, 0.9, 0.999, 1e-8, 0.1, 1};
    const auto step = [&](double scale, const double* device_norm, double max_norm) {
        settings.grad_scale = scale;
        settings.norm = device_norm;
        settings.max_norm = max_norm;
        const FloatBuffer parameters(initial), m(Floats(initial.size(), 0.0f)), v(Floats(initial.size(), 0.0f));
        adamw(parameters.data(), m.data(), v.data(), device_gradients.data(), takes_part.data(), settings, 1, n);
        Floats all = parameters.read();
        for (const FloatBuffer* buffer : {&m, &v}) {
            const Floats values = buffer->read();
            all.insert(all.end(), values.begin(), values.end());
        }
        return all;
    };
    EXPECT_TRUE(same_bits(step(1, norm.data(), 0.7), step(0.7 / size, nullptr, 0)));
    for (double max_norm : {0.0, size, 2 * size})
        EXPECT_TRUE(same_bits(step(1, norm.data(), max_norm), step(1, nullptr, 0)));
    Floats unchanged = initial;
    unchanged.resize(3 * initial.size(), 0.0f);
    for (double bad : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()})
        EXPECT_TRUE(same_bits(step(1, Buffer<double>(std::vector<double>{bad}).data(), 0.7), unchanged));
}

TEST(Moments, AgainstSumsInDouble) {
    TorchGenerator generator = make_generator(9);
    for (const int64_t n : {0, 1, 5, 16384, 16385, 100001}) {
        SCOPED_TRACE(n);
        Floats x = normals(generator, n, 3);
        if (n > 1) x[static_cast<size_t>(n / 2)] = -100;
        long double sum = 0, squares = 0, largest = 0;
        for (const float value : x) {
            sum += value;
            squares += static_cast<long double>(value) * value;
            largest = std::max(largest, std::fabs(static_cast<long double>(value)));
        }
        const Moments found = moments(FloatBuffer(x).data(), n);
        EXPECT_NEAR(found.sum, static_cast<double>(sum), 1e-13 * static_cast<double>(n) * 3);
        EXPECT_NEAR(found.sum_of_squares, static_cast<double>(squares), 1e-13 * static_cast<double>(squares));
        EXPECT_EQ(found.largest, static_cast<double>(largest));
    }
    Floats x(40000, 1.0f);
    x[30000] = kNan;
    EXPECT_TRUE(std::isnan(moments(FloatBuffer(x).data(), 40000).sum));
    EXPECT_TRUE(std::isnan(moments(FloatBuffer(x).data(), 40000).sum_of_squares));
    x[30000] = -kInfinity;
    EXPECT_EQ(moments(FloatBuffer(x).data(), 40000).sum, -kInfinity);
    EXPECT_EQ(moments(FloatBuffer(x).data(), 40000).largest, kInfinity);
}

TEST(FirstNonfinite, FindsTheFirst) {
    for (const int64_t n : {1, 7, 64, 100000})
        for (const float bad : {kNan, kInfinity, -kInfinity})
            for (const int64_t at : {int64_t{0}, n / 2, n - 1}) {
                Floats x(static_cast<size_t>(n), FLT_MAX);
                EXPECT_EQ(first_nonfinite(FloatBuffer(x).data(), n), -1);
                x.back() = bad;
                x[static_cast<size_t>(at)] = bad;
                EXPECT_EQ(first_nonfinite(FloatBuffer(x).data(), n), at);
            }
    EXPECT_EQ(first_nonfinite(static_cast<const float*>(nullptr), 0), -1);
}

// ---- The same bits with any number of threads ----------------------------------------------------------------------

TEST(Determinism, Embedding) {
    TorchGenerator generator = make_generator(10);
    const int64_t N = 5000, V = 256, C = 97;
    const FloatBuffer weight(normals(generator, V * C));
    const RealBuffer dout(normals(generator, N * C));
    const TokenBuffer tokens(random_tokens(generator, N, V));
    expect_same_for_every_thread_count([&] {
        const RealBuffer out(N * C);
        const FloatBuffer dweight(Floats(static_cast<size_t>(V * C), 0.1f));
        embedding_forward(out.data(), weight.data(), tokens.data(), N, C);
        embedding_backward(dweight.data(), dout.data(), tokens.data(), N, V, C);
        return std::vector<Floats>{out.read(), dweight.read()};
    });
}

TEST(Determinism, LayerNorm) {
    TorchGenerator generator = make_generator(11);
    const int64_t N = 5001, C = 97;
    const FloatBuffer weight(normals(generator, C)), bias(normals(generator, C));
    const RealBuffer x(normals(generator, N * C)), dout(normals(generator, N * C));
    const Floats dinp_before = normals(generator, N * C);
    expect_same_for_every_thread_count([&] {
        const RealBuffer out(N * C), dinp(dinp_before), sum(N * C), sum_out(N * C);
        const FloatBuffer mean(N), rstd(N), dweight(Floats(97, 0.1f));
        const FloatBuffer dbias(Floats(97, 0.1f)), workspace(layernorm_workspace_floats(N, C));
        layernorm_forward(out.data(), mean.data(), rstd.data(), x.data(), weight.data(), bias.data(), N, C);
        layernorm_backward(dinp.data(), dweight.data(), dbias.data(), dout.data(), x.data(), weight.data(), mean.data(),
                           rstd.data(), workspace.data(), N, C);
        const std::vector<Floats> statistics = {mean.read(), rstd.read()};
        residual_layernorm_forward(sum.data(), sum_out.data(), mean.data(), rstd.data(), x.data(), dout.data(),
                                   weight.data(), bias.data(), N, C);
        return std::vector<Floats>{out.read(),   statistics[0], statistics[1],  dinp.read(), dweight.read(),
                                   dbias.read(), sum.read(),    sum_out.read(), mean.read(), rstd.read()};
    });
}

TEST(Determinism, Linear) {
    TorchGenerator generator = make_generator(12);
    for (const int64_t N : {300, 5001}) {
        const int64_t C = 96, OC = 131;
        const RealBuffer x(normals(generator, N * C)), weight(normals(generator, OC * C));
        const RealBuffer bias(normals(generator, OC)), dout(normals(generator, N * OC));
        expect_same_for_every_thread_count([&] {
            const RealBuffer out(N * OC), dinp(N * C);
            const FloatBuffer dweight(Floats(static_cast<size_t>(OC * C), 0.1f));
            const FloatBuffer dbias(Floats(static_cast<size_t>(OC), 0.1f)),
                workspace(linear_workspace_floats(N, C, OC));
            linear_forward(out.data(), x.data(), weight.data(), bias.data(), N, C, OC);
            linear_backward(dinp.data(), dweight.data(), dbias.data(), dout.data(), x.data(), weight.data(),
                            workspace.data(), N, C, OC);
            return std::vector<Floats>{out.read(), dinp.read(), dweight.read(), dbias.read()};
        });
    }
}

TEST(Determinism, Elementwise) {
    TorchGenerator generator = make_generator(13);
    const int64_t n = 100003;
    const Floats values = normals(generator, n);
    const RealBuffer x(values), y(normals(generator, n));
    const FloatBuffer gradients(normals(generator, n));
    const Buffer<uint8_t> takes_part(std::vector<uint8_t>(static_cast<size_t>(n), 1));
    expect_same_for_every_thread_count([&] {
        const RealBuffer gelu(n), dgelu(n), sum(n);
        const FloatBuffer parameters(values), m(Floats(values.size(), 0.0f)), v(Floats(values.size(), 0.0f));
        gelu_forward(gelu.data(), x.data(), n);
        gelu_backward(dgelu.data(), y.data(), x.data(), n);
        residual_forward(sum.data(), x.data(), y.data(), n);
        adamw(parameters.data(), m.data(), v.data(), gradients.data(), takes_part.data(),
              {3e-3, 0.9, 0.999, 1e-8, 1e-4, 1}, 1, n);
        return std::vector<Floats>{gelu.read(), dgelu.read(), sum.read(), parameters.read(), m.read(), v.read()};
    });
}

TEST(Determinism, CrossEntropyAndMoments) {
    TorchGenerator generator = make_generator(14);
    const int64_t N = 2001, V = 256;
    const RealBuffer logits(normals(generator, N * V, 3));
    const TokenBuffer targets(random_tokens(generator, N, V));
    Moments first;
    expect_same_for_every_thread_count([&] {
        const FloatBuffer losses(N);
        const RealBuffer dlogits(N * V);
        cross_entropy(losses.data(), dlogits.data(), logits.data(), targets.data(), 0.25f, N, V);
        const Moments found = moments(logits.data(), N * V);
        if (thread_count() == 1) first = found;
        EXPECT_EQ(found.sum, first.sum);
        EXPECT_EQ(found.sum_of_squares, first.sum_of_squares);
        EXPECT_EQ(found.largest, first.largest);
        return std::vector<Floats>{losses.read(), dlogits.read()};
    });
}

}  // namespace
}  // namespace jetlag::test
