// Attention, forward and backward, against the double-precision loops of test/reference/.
//
// Tolerances. A score is a sum of D products in float and its error e is a few roundings of the score's size; weights
// are then off by the factor 1 + e, and sums over keys average independent errors. For scores of about 1 the outputs
// are good to 1e-6 of their norm; 1e-5 is asked for. Larger scores get a bound in proportion. dscore = p (dP - delta)
// cancels where one key has all the weight: what remains there is the rounding of dP, which `noise` allows for. In bf16
// and tf32 all of this is larger, as their roundings are.
#include <fmt/format.h>

#include <algorithm>

#include "test/kernel_support.h"
#include "test/reference/reference.h"
#include "test/support.h"

namespace jetlag::test {
namespace {

enum class Bias { none, random, slope, window, first_masked, holes, all_masked };

struct Problem {
    int64_t B, T, H, D;
    Bias bias = Bias::none;
    reference::Rotary rotary = reference::Rotary::kNone;
    int64_t train_len = 64;
    float query_size = 1;       // standard deviation of q
    int64_t partial_pairs = 0;  // if not 0: a rotary table of so many pairs, with gains that differ for q and k
    double tolerance = 1e-5;    // in float
};

std::string text_of(const Problem& p) {
    return fmt::format("B {} T {} H {} D {} bias {} rotary {} L {} q {} pairs {}", p.B, p.T, p.H, p.D,
                       static_cast<int>(p.bias), static_cast<int>(p.rotary), p.train_len, p.query_size,
                       p.partial_pairs);
}

Floats make_bias(const Problem& p, TorchGenerator& generator) {
    if (p.bias == Bias::none) return {};
    Floats table = normals(generator, p.H * p.T);
    for (int64_t h = 0; h < p.H; h++)
        for (int64_t d = 0; d < p.T; d++) {
            float& entry = table[static_cast<size_t>(h * p.T + d)];
            switch (p.bias) {
                case Bias::slope:  // down to -1e4 in the first head, gentler in the others
                    entry = -10000.0f * static_cast<float>(d) / static_cast<float>(p.T * (1 + 7 * h));
                    break;
                case Bias::window:  // the last 5, 22, ... keys
                    if (d >= 5 + 17 * h) entry = -kInfinity;
                    break;
                case Bias::first_masked:  // no row sees itself, so the first rows see nothing
                    if (d <= h) entry = -kInfinity;
                    break;
                case Bias::holes:
                    if (entry > 0.5f) entry = -kInfinity;
                    break;
                case Bias::all_masked:
                    entry = -kInfinity;
                    break;
                default:
                    break;
            }
        }
    return table;
}

// The table as the op takes it: the reference's, rounded to float on both sides.
struct Rotary {
    reference::RotaryTable reference;
    Floats query_cos, query_sin, key_cos, key_sin, shear;
};

Rotary make_rotary(const Problem& p, TorchGenerator& generator) {
    Rotary rotary;
    reference::RotaryTable& table = rotary.reference;
    reference::RotarySettings settings;
    settings.kind = p.rotary;
    table = reference::rotary_table(settings, p.train_len, p.T, p.D);
    if (p.partial_pairs > 0) {
        table.pairs = p.partial_pairs;
        const int64_t n = p.T * p.partial_pairs;
        table.query_cosine = to_doubles(normals(generator, n));
        table.query_sine = to_doubles(normals(generator, n));
        table.key_cosine = to_doubles(normals(generator, n));
        table.key_sine = to_doubles(normals(generator, n));
    }
    const auto round = [](Doubles& values) {
        Floats rounded(values.begin(), values.end());
        values.assign(rounded.begin(), rounded.end());
        return rounded;
    };
    rotary.query_cos = round(table.query_cosine);
    rotary.query_sin = round(table.query_sine);
    rotary.key_cos = round(table.key_cosine);
    rotary.key_sin = round(table.key_sine);
    rotary.shear = round(table.shear);
    return rotary;
}

// A problem's inputs on the device, and one run of both passes on fresh outputs.
struct Inputs {
    Problem p;
    Floats qkv, dout, bias;
    Rotary rotary;
};

Inputs make_inputs(const Problem& p) {
    TorchGenerator generator = make_generator(17);
    Inputs in{p, normals(generator, p.B * p.T * 3 * p.H * p.D), normals(generator, p.B * p.T * p.H * p.D), {}, {}};
    for (int64_t n = 0; n < p.B * p.T; n++)
        for (int64_t c = 0; c < p.H * p.D; c++) in.qkv[n * 3 * p.H * p.D + c] *= p.query_size;
    in.qkv = rounded(in.qkv);
    in.bias = make_bias(p, generator);
    in.rotary = make_rotary(p, generator);
    return in;
}

struct Outputs {
    Floats out, lse, entropy, mean_lag, dqkv, dlag_bias;
};

Outputs run(const Inputs& in, bool with_stats = true, AttentionSkipping* skipping = nullptr,
            const AttentionScope& scope = {}) {
    const auto& [B, T, H, D] = std::tie(in.p.B, in.p.T, in.p.H, in.p.D);
    const RealBuffer qkv(in.qkv), dout(in.dout), out(B * T * H * D), dqkv(B * T * 3 * H * D);
    const FloatBuffer bias(in.bias);
    const FloatBuffer query_cos(in.rotary.query_cos), query_sin(in.rotary.query_sin), key_cos(in.rotary.key_cos);
    const FloatBuffer key_sin(in.rotary.key_sin), shear(in.rotary.shear);
    RotaryTable table;
    table.pairs = in.rotary.reference.pairs;
    if (table.pairs > 0)
        table = {table.pairs,    query_cos.data(), query_sin.data(),
                 key_cos.data(), key_sin.data(),   in.rotary.shear.empty() ? nullptr : shear.data()};
    const float* lag_bias = in.bias.empty() ? nullptr : bias.data();

    const FloatBuffer lse(B * H * T), entropy(B * H * T), mean_lag(B * H * T);
    const FloatBuffer workspace(attention_workspace_floats(B, T, H, D));
    const DeviceArray<AttentionSkipping> counts(1);
    AttentionSkipping* device_skipping = skipping != nullptr ? counts.data : nullptr;
    const AttentionRowStats stats = {entropy.data(), mean_lag.data()};
    attention_forward(out.data(), lse.data(), with_stats ? &stats : nullptr, qkv.data(), table, lag_bias,
                      workspace.data(), B, T, H, D, device_skipping, scope);
    const FloatBuffer dlag_bias(in.bias.empty() ? 0 : H * T);
    const FloatBuffer other_workspace(attention_workspace_floats(B, T, H, D));
    attention_backward(dqkv.data(), lag_bias != nullptr ? dlag_bias.data() : nullptr, dout.data(), qkv.data(),
                       out.data(), lse.data(), table, lag_bias, other_workspace.data(), B, T, H, D, device_skipping,
                       scope);
    if (skipping != nullptr) {
        const AttentionSkipping found = read_device(counts)[0];
        skipping->tiles += found.tiles;
        skipping->skipped += found.skipped;
    }
    workspace.read();
    other_workspace.read();
    EXPECT_TRUE(same_bits(qkv.read(), rounded(in.qkv)));
    return {out.read(), lse.read(), entropy.read(), mean_lag.read(), dqkv.read(), dlag_bias.read()};
}

// How much larger errors are than in float: the tolerance of 1e-5 becomes 2^-5 in bf16, 2^-8 in tf32, eight roundings.
constexpr double kLooser = by_precision(1, 0x1p-5 / 1e-5);

// Part s (0: q, 1: k, 2: v) of a (B, T, 3, H, D) array.
template <typename Values>
Values part_of(const Values& qkv, const Problem& p, int64_t s) {
    Values part;
    const int64_t C = p.H * p.D;
    for (int64_t n = 0; n < p.B * p.T; n++)
        part.insert(part.end(), qkv.begin() + (3 * n + s) * C, qkv.begin() + (3 * n + s + 1) * C);
    return part;
}

void expect_matches_reference(const Problem& problem) {
    SCOPED_TRACE(text_of(problem));
    const Inputs in = make_inputs(problem);
    const Problem& p = in.p;
    const double tolerance = p.tolerance * kLooser;
    const Doubles qkv = to_doubles(in.qkv), bias = to_doubles(in.bias), dout = to_doubles(in.dout);
    const reference::AttentionLayer want =
        reference::attention_layer_forward(qkv, in.rotary.reference, bias, p.B, p.T, p.H, p.D);
    const reference::AttentionLayerGradients want_gradients =
        reference::attention_layer_backward(dout, qkv, in.rotary.reference, bias, p.B, p.T, p.H, p.D);

    // Rows of effective support n average the rounding errors of n terms dout_i . v_j, each a sum in float, as delta
    // is.
    double sharpness = 0;
    for (const double entropy : want.entropy) sharpness += std::exp(-entropy) / static_cast<double>(p.B * p.H * p.T);
    const double value_size = norm(part_of(in.qkv, p, 2)) / std::sqrt(static_cast<double>(p.B * p.T * p.H));
    const double noise = 4 * (kRounding + kRealRounding + kOperandRounding) * norm(in.dout) * value_size *
                         std::sqrt(sharpness) * p.query_size;

    const auto check = [&](AttentionSkipping* skipping) {
        SCOPED_TRACE(skipping != nullptr ? "with skipping" : "every tile");
        const Outputs found = run(in, true, skipping);
        if (norm(want.out) > 0) {
            EXPECT_LE(relative_error(found.out, want.out), tolerance);
        }
        for (size_t i = 0; i < want.lse.size(); i++) {
            if (want.lse[i] == -INFINITY) {
                EXPECT_EQ(found.lse[i], -kInfinity) << "row " << i;
                EXPECT_EQ(found.entropy[i], 0.0f) << "row " << i;
                EXPECT_EQ(found.mean_lag[i], 0.0f) << "row " << i;
                continue;
            }
            EXPECT_LE(std::fabs(found.lse[i] - want.lse[i]), tolerance * std::max(1.0, std::fabs(want.lse[i])))
                << "lse of row " << i;
            EXPECT_LE(std::fabs(found.entropy[i] - want.entropy[i]), 2 * tolerance) << "entropy of row " << i;
            EXPECT_LE(std::fabs(found.mean_lag[i] - want.mean_lag[i]), tolerance * std::max(1.0, want.mean_lag[i]))
                << "mean lag of row " << i;
        }
        const char* names[] = {"dq", "dk", "dv"};
        for (int64_t s = 0; s < 3; s++) {
            const Doubles want_part = part_of(want_gradients.dqkv, p, s);
            EXPECT_LE(distance(part_of(found.dqkv, p, s), want_part), tolerance * norm(want_part) + noise) << names[s];
        }
        if (!in.bias.empty()) {
            EXPECT_LE(distance(found.dlag_bias, want_gradients.dlag_bias),
                      tolerance * norm(want_gradients.dlag_bias) + noise);
        }
        // A row without a key gives zeros, not small numbers.
        for (int64_t b = 0; b < p.B; b++)
            for (int64_t h = 0; h < p.H; h++)
                for (int64_t t = 0; t < p.T; t++) {
                    if (want.lse[(b * p.H + h) * p.T + t] != -INFINITY) continue;
                    for (int64_t c = 0; c < p.D; c++) {
                        EXPECT_EQ(found.out[((b * p.T + t) * p.H + h) * p.D + c], 0.0f);
                        EXPECT_EQ(found.dqkv[(((b * p.T + t) * 3) * p.H + h) * p.D + c], 0.0f);
                    }
                }
    };
    for_each_simd_target([&] {
        check(nullptr);
        AttentionSkipping skipping;
        check(&skipping);
    });
}

TEST(Attention, EveryHeadDim) {
    for (const int64_t D : {1, 4, 5, 7, 8, 24, 31, 64, 96, 128, 255, 256})
        for (const int64_t T : {1, 2, 129}) {
            expect_matches_reference({.B = 1, .T = T, .H = D > 64 ? 1 : 2, .D = D});
            expect_matches_reference({.B = 2, .T = T, .H = 1, .D = D, .bias = Bias::random});
        }
}

// What is asked for is the same, whether or not the rest is left out; the forward pass bit for bit.
TEST(Attention, WhatIsOutOfScopeChangesNothing) {
    for (const Bias bias : {Bias::none, Bias::random, Bias::first_masked, Bias::slope})
        for (const int64_t T : {1, 64, 97, 300})
            for (const int64_t first_row : {int64_t{0}, T / 3, T - 1})
                for (const bool has_content : {true, false}) {
                    Inputs in = make_inputs({.B = 2, .T = T, .H = 3, .D = 24, .bias = bias});
                    const Problem& p = in.p;
                    SCOPED_TRACE(fmt::format("{} from row {}{}", text_of(p), first_row, has_content ? "" : " frozen"));
                    const int64_t C = p.H * p.D;
                    for (int64_t n = 0; n < p.B * T; n++) {
                        if (!has_content) std::fill_n(in.qkv.begin() + n * 3 * C, 2 * C, 0.0f);
                        if (n % T < first_row) std::fill_n(in.dout.begin() + n * C, C, 0.0f);
                    }
                    for (const bool skips : {false, true}) {
                        AttentionSkipping counts;
                        AttentionSkipping* skipping = skips ? &counts : nullptr;
                        const Outputs all = run(in, true, skipping),
                                      some = run(in, true, skipping, {first_row, has_content});
                        for (int64_t n = 0; n < p.B * T; n++) {
                            if (n % T < first_row) continue;
                            for (int64_t c = 0; c < C; c++)
                                ASSERT_EQ(some.out[static_cast<size_t>(n * C + c)],
                                          all.out[static_cast<size_t>(n * C + c)]);
                        }
                        for (int64_t n = 0; n < p.B * p.H * T; n++) {
                            if (n % T < first_row) continue;
                            const size_t i = static_cast<size_t>(n);
                            ASSERT_EQ(some.lse[i], all.lse[i]);
                            ASSERT_EQ(some.entropy[i], all.entropy[i]);
                            ASSERT_EQ(some.mean_lag[i], all.mean_lag[i]);
                        }
                        // Sums of fewer rows are added in another order, and their bounds may skip more.
                        const double tolerance = first_row > 0 ? 1e-6 : 0;
                        const auto same = [tolerance](const Floats& a, const Floats& b) {
                            return distance(a, to_doubles(b)) <= tolerance * norm(b);
                        };
                        for (const int64_t part : {0, 1, 2})
                            ASSERT_TRUE((part < 2 && !has_content) ||
                                        same(part_of(some.dqkv, p, part), part_of(all.dqkv, p, part)));
                        ASSERT_TRUE(same(some.dlag_bias, all.dlag_bias));
                    }
                }
}

// A row with one key gives its value, as products round it; heads of more channels are computed in float.
TEST(Attention, OneKeyGivesItsRoundedValue) {
    for (const int64_t D : {5, 8, 24, 64, 128, 129, 256}) {
        SCOPED_TRACE(D);
        const Inputs in = make_inputs({.B = 1, .T = 1, .H = 1, .D = D});
        Doubles want;
        for (int64_t c = 0; c < D; c++) {
            const double value = in.qkv[static_cast<size_t>(2 * D + c)];
            int exponent = 0;
            const double eleven_bits = std::round(0x1p11 * std::frexp(value, &exponent));
            want.push_back(kTf32 && D <= 128 ? std::ldexp(eleven_bits, exponent - 11) : value);
        }
        for_each_simd_target([&] { EXPECT_LE(relative_error(run(in).out, want), 1e-6); });
    }
}

// Values of one: what is left of an average is how weights are rounded.
TEST(Attention, RoundingOfWeightsHasNoBias) {
    Inputs in = make_inputs({.B = 1, .T = 300, .H = 1, .D = 8});
    for (int64_t t = 0; t < 300; t++)
        for (int64_t c = 0; c < 8; c++) in.qkv[static_cast<size_t>((3 * t + 2) * 8 + c)] = 1;
    for_each_simd_target([&] {
        const Floats out = run(in).out;
        double sum = 0;
        for (const float x : out) sum += x - 1;
        EXPECT_NEAR(sum / static_cast<double>(out.size()), 0, 0x1p-15);
    });
}

TEST(Attention, RaggedLengths) {
    for (const int64_t T : {1, 2, 3, 15, 16, 17, 47, 48, 49, 63, 64, 65, 95, 97, 127, 128, 129, 191, 257})
        for (const Bias bias : {Bias::none, Bias::random, Bias::window})
            expect_matches_reference({.B = 2, .T = T, .H = 3, .D = 8, .bias = bias});
    expect_matches_reference({.B = 1, .T = 1025, .H = 1, .D = 24, .bias = Bias::random});
    expect_matches_reference({.B = 1, .T = 1025, .H = 2, .D = 7});
    expect_matches_reference({.B = 1, .T = 1500, .H = 1, .D = 4, .bias = Bias::slope});
}

// More heads than are worked on at once.
TEST(Attention, ManyHeads) {
    expect_matches_reference({.B = 173, .T = 3, .H = 3, .D = 5, .bias = Bias::random});
    expect_matches_reference({.B = 43, .T = 401, .H = 2, .D = 4, .bias = Bias::random});
    expect_matches_reference({.B = 60, .T = 260, .H = 3, .D = 4, .bias = Bias::random});
    expect_matches_reference({.B = 260, .T = 140, .H = 2, .D = 4, .bias = Bias::slope});
}

TEST(Attention, MaskedLags) {
    for (const Bias bias : {Bias::window, Bias::first_masked, Bias::holes, Bias::all_masked})
        for (const int64_t T : {1, 2, 40, 129, 300}) {
            expect_matches_reference({.B = 2, .T = T, .H = 3, .D = 24, .bias = bias});
            expect_matches_reference(
                {.B = 1, .T = T, .H = 1, .D = 8, .bias = bias, .rotary = reference::Rotary::kJordan});
        }
}

TEST(Attention, StrongSlopes) {
    for (const int64_t T : {2, 129, 1025})
        expect_matches_reference({.B = 1, .T = T, .H = 2, .D = 8, .bias = Bias::slope});
}

// Scores up to about 4 query_size: rounded to 2^-24 of that, twice (the log-sum-exp also), so a relative error of the
// weights of some 1e-6 query_size. In tf32 a score has D independent roundings of its terms, of either operand, which
// make a deviation of some 2^-12 query_size: four of them for the largest of many weights, and a mean lag of n is
// off by up to 2 n times that.
TEST(Attention, LargeScores) {
    for (const float size : {10.0f, 100.0f, 1000.0f})
        for (const Bias bias : {Bias::none, Bias::random})
            expect_matches_reference({.B = 1,
                                      .T = 200,
                                      .H = 2,
                                      .D = 24,
                                      .bias = bias,
                                      .query_size = size,
                                      .tolerance = (kTf32 ? 0x1p-9 / kLooser : 1e-6) * static_cast<double>(size)});
}

TEST(Attention, EveryRotaryKind) {
    using enum reference::Rotary;
    for (const reference::Rotary kind : {kRope, kPi, kNtk, kYarn, kJordan})
        for (const int64_t T : {1, 65, 150})
            for (const int64_t D : {4, 8, 24})
                // At L = 16 the shear of Jordan blocks reaches 12, which adds scores of up to some hundred.
                for (const int64_t L : {16, 256})
                    expect_matches_reference({.B = 1,
                                              .T = T,
                                              .H = 2,
                                              .D = D,
                                              .bias = T == 65 ? Bias::random : Bias::none,
                                              .rotary = kind,
                                              .train_len = L,
                                              .tolerance = kind == kJordan && L == 16 ? 1e-4 : 1e-5});
    for (const int64_t D : {7, 24, 31})
        expect_matches_reference({.B = 2, .T = 70, .H = 2, .D = D, .bias = Bias::random, .partial_pairs = 3});
}

TEST(Attention, StatisticsChangeNothing) {
    for (const Bias bias : {Bias::none, Bias::random, Bias::holes}) {
        const Inputs in = make_inputs({.B = 1, .T = 300, .H = 2, .D = 24, .bias = bias});
        for_each_simd_target([&] {
            const Outputs with = run(in), without = run(in, false);
            EXPECT_TRUE(same_bits(without.out, with.out));
            EXPECT_TRUE(same_bits(without.lse, with.lse));
            EXPECT_TRUE(same_bits(without.dqkv, with.dqkv));
        });
    }
}

TEST(Attention, NothingHidesANan) {
    for (const Bias bias : {Bias::none, Bias::random}) {
        const Problem p = {.B = 1, .T = 150, .H = 2, .D = 24, .bias = bias};
        for (const int64_t row : {0, 70, 149}) {
            const Inputs clean = make_inputs(p);
            Inputs bad = clean;
            bad.qkv[static_cast<size_t>(row * 3 * p.H * p.D + p.D + 5)] = kNan;  // q of head 1
            for_each_simd_target([&] {
                SCOPED_TRACE(row);
                const Outputs want = run(clean), found = run(bad);
                for (int64_t h = 0; h < p.H; h++)
                    for (int64_t t = 0; t < p.T; t++) {
                        const bool hit = h == 1 && t == row;
                        const size_t at = static_cast<size_t>(h * p.T + t);
                        EXPECT_EQ(std::isnan(found.lse[at]), hit);
                        EXPECT_EQ(std::isnan(found.entropy[at]), hit);
                        EXPECT_EQ(std::isnan(found.mean_lag[at]), hit);
                        for (int64_t c = 0; c < p.D; c++) {
                            const size_t i = static_cast<size_t>((t * p.H + h) * p.D + c);
                            if (hit) {
                                EXPECT_TRUE(std::isnan(found.out[i]));
                                EXPECT_TRUE(std::isnan(found.dqkv[static_cast<size_t>((t * 3 * p.H + h) * p.D + c)]));
                            } else {
                                EXPECT_EQ(found.out[i], want.out[i]);
                            }
                        }
                    }
                // The keys and values that the row attends share in its NaN.
                for (int64_t t = 0; t <= row; t++)
                    for (const int64_t s : {1, 2})
                        EXPECT_TRUE(std::isnan(found.dqkv[static_cast<size_t>(((t * 3 + s) * p.H + 1) * p.D)]));
                if (bias != Bias::none) {
                    EXPECT_TRUE(std::isnan(found.dlag_bias[static_cast<size_t>(p.T + row)]));
                }
            });
        }
    }
}

TEST(Attention, LaterKeysDoNotReachEarlierRows) {
    const Problem p = {.B = 1, .T = 130, .H = 1, .D = 24, .bias = Bias::random};
    const Inputs in = make_inputs(p);
    for (const int64_t changed : {1, 63, 64, 100, 129}) {
        Inputs other = in;
        for (size_t i = static_cast<size_t>(changed * 3 * p.D); i < other.qkv.size(); i++) other.qkv[i] += 1;
        for_each_simd_target([&] {
            const Outputs want = run(in), found = run(other);
            EXPECT_TRUE(std::equal(want.out.begin(), want.out.begin() + changed * p.D, found.out.begin()));
            EXPECT_TRUE(std::equal(want.lse.begin(), want.lse.begin() + changed, found.lse.begin()));
            EXPECT_NE(want.out[static_cast<size_t>(changed * p.D)], found.out[static_cast<size_t>(changed * p.D)]);
        });
    }
}

TEST(Determinism, Attention) {
    using enum reference::Rotary;
    const Problem problems[] = {
        {.B = 1, .T = 1000, .H = 1, .D = 24, .bias = Bias::random, .rotary = kRope},
        {.B = 1, .T = 1000, .H = 1, .D = 7},
        {.B = 2, .T = 513, .H = 3, .D = 24, .bias = Bias::random, .rotary = kJordan},
        {.B = 9, .T = 200, .H = 4, .D = 8, .bias = Bias::window},
    };
    for (const Problem& p : problems) {
        SCOPED_TRACE(text_of(p));
        const Inputs in = make_inputs(p);
        for_each_simd_target([&] {
            expect_same_for_every_thread_count([&] {
                const Outputs found = run(in);
                return std::vector<Floats>{found.out,      found.lse,  found.entropy,
                                           found.mean_lag, found.dqkv, found.dlag_bias};
            });
        });
    }
}

// ---- T over 46341, where T * T leaves 32 bits ----------------------------------------------------------------------

// All pairs are computed; a sample of rows, keys and lags is recomputed in double. Sums over the rows of a key or a lag
// take lse and delta from the op's own forward pass, which the sampled rows check.
TEST(Attention, LengthsWhoseSquareLeaves32Bits) {
    if (is_emulated()) GTEST_SKIP() << "a thousand million scores take hours in the emulator";
    const int64_t T = 46400, D = 4;
    Problem p = {.B = 1, .T = T, .H = 1, .D = D, .bias = Bias::random};
    Inputs in = make_inputs(p);
    // A slow wave: all lags matter.
    for (int64_t d = 0; d < T; d++)
        in.bias[static_cast<size_t>(d)] = static_cast<float>(std::cos(1e-3 * static_cast<double>(d)));
    const Outputs found = run(in);
    const double scale = 1 / std::sqrt(static_cast<double>(D));
    const auto dot = [&](const float* a, const float* b) {
        double sum = 0;
        for (int64_t c = 0; c < D; c++) sum += static_cast<double>(a[c]) * b[c];
        return sum;
    };
    const auto part = [&](int64_t t, int64_t s) { return in.qkv.data() + (t * 3 + s) * D; };
    const auto score = [&](int64_t i, int64_t j) {
        return scale * dot(part(i, 0), part(j, 1)) + in.bias[static_cast<size_t>(i - j)];
    };
    const float* dout = in.dout.data();
    std::vector<int64_t> sample = {0, 1, 63, 64, 46336, 46340, 46341, 46342, 46343, T - 2, T - 1};
    for (int64_t t = 1500; t < T; t += 2311) sample.push_back(t);

    Doubles want_out, want_dq;
    Floats found_out, found_dq;
    for (const int64_t i : sample) {
        double largest = -INFINITY, sum = 0, entropy = 0, mean_lag = 0;
        for (int64_t j = 0; j <= i; j++) largest = std::max(largest, score(i, j));
        for (int64_t j = 0; j <= i; j++) sum += std::exp(score(i, j) - largest);
        const double lse = largest + std::log(sum);
        Doubles out(D, 0.0), dq(D, 0.0);
        for (int64_t j = 0; j <= i; j++) {
            const double weight = std::exp(score(i, j) - lse);
            entropy -= weight * (score(i, j) - lse);
            mean_lag += weight * static_cast<double>(i - j);
            for (int64_t c = 0; c < D; c++) out[c] += weight * part(j, 2)[c];
        }
        double delta = 0;
        for (int64_t c = 0; c < D; c++) delta += dout[i * D + c] * out[c];
        for (int64_t j = 0; j <= i; j++) {
            const double dscore = std::exp(score(i, j) - lse) * (dot(dout + i * D, part(j, 2)) - delta);
            for (int64_t c = 0; c < D; c++) dq[c] += scale * dscore * part(j, 1)[c];
        }
        want_out.insert(want_out.end(), out.begin(), out.end());
        want_dq.insert(want_dq.end(), dq.begin(), dq.end());
        found_out.insert(found_out.end(), found.out.begin() + i * D, found.out.begin() + (i + 1) * D);
        found_dq.insert(found_dq.end(), found.dqkv.begin() + i * 3 * D, found.dqkv.begin() + (i * 3 + 1) * D);
        EXPECT_NEAR(found.lse[i], lse, 1e-5 * kLooser) << "row " << i;
        EXPECT_NEAR(found.entropy[i], entropy, 2e-5 * kLooser) << "row " << i;
        EXPECT_NEAR(found.mean_lag[i], mean_lag, 1e-5 * kLooser * std::max(1.0, mean_lag)) << "row " << i;
    }
    EXPECT_LE(relative_error(found_out, want_out), 1e-5 * kLooser);
    EXPECT_LE(relative_error(found_dq, want_dq), 1e-5 * kLooser);

    Doubles want_dk, want_dv, want_dlag;
    Floats found_dk, found_dv, found_dlag;
    const auto dscore_of = [&](int64_t i, int64_t j, double* weight) {
        *weight = std::exp(score(i, j) - found.lse[static_cast<size_t>(i)]);
        return *weight * (dot(dout + i * D, part(j, 2)) - dot(dout + i * D, found.out.data() + i * D));
    };
    for (const int64_t j : sample) {
        Doubles dk(D, 0.0), dv(D, 0.0);
        double weight = 0, dlag = 0;
        for (int64_t i = j; i < T; i++) {
            const double dscore = dscore_of(i, j, &weight);
            for (int64_t c = 0; c < D; c++) {
                dk[c] += scale * dscore * part(i, 0)[c];
                dv[c] += weight * dout[i * D + c];
            }
            dlag += dscore_of(i, i - j, &weight);
        }
        want_dk.insert(want_dk.end(), dk.begin(), dk.end());
        want_dv.insert(want_dv.end(), dv.begin(), dv.end());
        want_dlag.push_back(dlag);
        found_dk.insert(found_dk.end(), found.dqkv.begin() + (j * 3 + 1) * D, found.dqkv.begin() + (j * 3 + 2) * D);
        found_dv.insert(found_dv.end(), found.dqkv.begin() + (j * 3 + 2) * D, found.dqkv.begin() + (j * 3 + 3) * D);
        found_dlag.push_back(found.dlag_bias[static_cast<size_t>(j)]);
    }
    EXPECT_LE(relative_error(found_dk, want_dk), 1e-5 * kLooser);
    EXPECT_LE(relative_error(found_dv, want_dv), 1e-5 * kLooser);
    EXPECT_LE(relative_error(found_dlag, want_dlag), 1e-5 * kLooser);
}

// ---------------------------------------------------------------------------------------------------------------
// Exact skipping

// Runs with and without skipping on every target; returns the share skipped, the same for all of them but for the size
// of their tiles. What is left out may change results by a rounding of the largest ones.
double expect_same_with_skipping(const Inputs& in) {
    double least = 1;
    for_each_simd_target([&] {
        AttentionSkipping skipping;
        const Outputs every = run(in), found = run(in, true, &skipping);
        const Floats *wants[] = {&every.out, &every.lse, &every.dqkv, &every.dlag_bias},
                     *founds[] = {&found.out, &found.lse, &found.dqkv, &found.dlag_bias};
        for (int i = 0; i < 4; i++)
            EXPECT_LE(distance(*founds[i], to_doubles(*wants[i])),
                      (1e-6 + kRealRounding + kOperandRounding) * norm(*wants[i]))
                << "result " << i;
        for (size_t i = 0; i < every.lse.size(); i++) {
            EXPECT_NEAR(found.lse[i], every.lse[i], 2e-6 * std::max(1.0f, std::fabs(every.lse[i])));
            EXPECT_NEAR(found.entropy[i], every.entropy[i], 2e-5);
            EXPECT_NEAR(found.mean_lag[i], every.mean_lag[i], 1e-5 * std::max(1.0f, every.mean_lag[i]));
        }
        EXPECT_GT(skipping.tiles, 0);
        EXPECT_LE(skipping.skipped, skipping.tiles);
        least = std::min(least, static_cast<double>(skipping.skipped) / static_cast<double>(skipping.tiles));
    });
    return least;
}

TEST(AttentionSkipping, LeavesOutWhatCannotCount) {
    Inputs in = make_inputs({.B = 2, .T = 1500, .H = 2, .D = 8, .bias = Bias::slope});
    EXPECT_GT(expect_same_with_skipping(in), 0.8);
    in = make_inputs({.B = 1, .T = 1100, .H = 2, .D = 24, .bias = Bias::window, .rotary = reference::Rotary::kRope});
    EXPECT_GT(expect_same_with_skipping(in), 0.7);
    // Two thirds of the lags are worth nothing, the oldest are worth as much as the newest.
    in = make_inputs({.B = 1, .T = 1200, .H = 2, .D = 8, .bias = Bias::random});
    for (int64_t h = 0; h < 2; h++)
        for (int64_t d = 200; d < 1000; d++) in.bias[h * 1200 + d] -= 100;
    const double share = expect_same_with_skipping(in);
    EXPECT_GT(share, 0.4);
    EXPECT_LT(share, 0.8);
}

TEST(AttentionSkipping, LeavesOutNothingThatMayCount) {
    // The bias falls by less than the scores may rise.
    Inputs in = make_inputs({.B = 1, .T = 600, .H = 1, .D = 8, .bias = Bias::slope, .query_size = 1});
    for (int64_t d = 0; d < 600; d++) in.bias[d] = -0.05f * static_cast<float>(d);
    for (int64_t n = 0; n < 600; n++)
        for (int64_t c = 0; c < 8; c++) in.qkv[n * 24 + c] *= 20;
    EXPECT_EQ(expect_same_with_skipping(in), 0.0);
    in = make_inputs({.B = 1, .T = 600, .H = 1, .D = 8, .bias = Bias::random});
    EXPECT_EQ(expect_same_with_skipping(in), 0.0);
    in = make_inputs({.B = 1, .T = 600, .H = 1, .D = 8, .bias = Bias::all_masked});
    AttentionSkipping skipping;
    EXPECT_EQ(norm(run(in, true, &skipping).out), 0.0);
}

// Old values that are a million times as large count for more than their weight.
TEST(AttentionSkipping, LargeOldValues) {
    for (const float size : {1e3f, 1e6f, 1e12f}) {
        SCOPED_TRACE(size);
        Inputs in = make_inputs({.B = 1, .T = 800, .H = 1, .D = 8, .bias = Bias::slope});
        for (int64_t d = 0; d < 800; d++) in.bias[d] = -0.06f * static_cast<float>(d);
        for (int64_t n = 0; n < 200; n++)
            for (int64_t c = 16; c < 24; c++) in.qkv[n * 24 + c] *= size;
        in.qkv = rounded(in.qkv);
        const Doubles qkv = to_doubles(in.qkv), bias = to_doubles(in.bias);
        const reference::AttentionLayer want =
            reference::attention_layer_forward(qkv, in.rotary.reference, bias, 1, 800, 1, 8);
        for_each_simd_target([&] {
            AttentionSkipping skipping;
            const Outputs found = run(in, false, &skipping);
            for (int64_t t = 0; t < 800; t++) {
                const Floats row(found.out.begin() + t * 8, found.out.begin() + (t + 1) * 8);
                const Doubles want_row(want.out.begin() + t * 8, want.out.begin() + (t + 1) * 8);
                EXPECT_LE(distance(row, want_row), 2e-5 * kLooser * norm(want_row)) << "row " << t;
            }
        });
    }
}

// A NaN or an infinity shows in the same places as without skipping: far back or in the newest row, in q (0), k (1), v
// (2) or dout (3).
TEST(AttentionSkipping, HidesNoNan) {
    for (const Bias bias : {Bias::slope, Bias::window})
        for (const int64_t part : {0, 1, 2, 3})
            for (const int64_t row : {3, 699})
                for (const float bad : {kNan, kInfinity}) {
                    SCOPED_TRACE(fmt::format("part {} row {} value {}", part, row, bad));
                    Inputs in = make_inputs({.B = 1, .T = 700, .H = 1, .D = 8, .bias = bias});
                    (part < 3 ? in.qkv[row * 24 + part * 8 + 5] : in.dout[row * 8 + 5]) = bad;
                    for_each_simd_target([&] {
                        AttentionSkipping skipping;
                        const Outputs every = run(in, false), found = run(in, false, &skipping);
                        const auto pairs = {std::pair(&every.out, &found.out), std::pair(&every.dqkv, &found.dqkv),
                                            std::pair(&every.dlag_bias, &found.dlag_bias)};
                        for (const auto& [want, have] : pairs) {
                            int64_t hidden = 0;
                            for (size_t i = 0; i < want->size(); i++)
                                hidden += std::isfinite((*have)[i]) && !std::isfinite((*want)[i]);
                            EXPECT_EQ(hidden, 0);
                        }
                    });
                }
}

// The gradient of a slope weighs each lag's sum by the lag.
TEST(AttentionSkipping, GradientOfASlope) {
    for (const float plateau : {-24.0f, -25.5f, -27.0f, -30.0f}) {
        SCOPED_TRACE(plateau);
        const int64_t T = 1000;
        Inputs in = make_inputs({.B = 1, .T = T, .H = 1, .D = 8, .bias = Bias::slope, .query_size = 0.01f});
        for (int64_t d = 0; d < T; d++) in.bias[d] = d < 2 ? 0 : plateau;
        const auto slope_gradient = [T](const Floats& dlag) {
            double sum = 0;
            for (int64_t d = 0; d < T; d++) sum += static_cast<double>(d) * dlag[d];
            return sum;
        };
        for_each_simd_target([&] {
            AttentionSkipping skipping;
            const double every = slope_gradient(run(in, false).dlag_bias);
            EXPECT_NEAR(slope_gradient(run(in, false, &skipping).dlag_bias), every, 2e-6 * std::fabs(every));
        });
    }
}

TEST(AttentionSkipping, EveryThreadCount) {
    for (const int64_t T : {300, 5000}) {
        const Inputs in = make_inputs({.B = 1, .T = T, .H = 2, .D = 24, .bias = Bias::slope});
        std::vector<int64_t> counts;
        expect_same_for_every_thread_count([&]() -> std::vector<Floats> {
            AttentionSkipping skipping;
            const Outputs found = run(in, true, &skipping);
            counts.push_back(skipping.skipped);
            return {found.out, found.lse, found.entropy, found.mean_lag, found.dqkv, found.dlag_bias};
        });
        for (const int64_t count : counts) EXPECT_EQ(count, counts[0]);
    }
}

}  // namespace
}  // namespace jetlag::test
