// Generation: attention over kept keys and values against double loops, the growing model against the whole forward
// pass, sampling, and the program as its user meets it.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <map>
#include <thread>

#include "data_prep/midi_tokens.h"
#include "generate/sampling.h"
#include "models/checkpoint.h"
#include "src/error.h"
#include "src/files.h"
#include "test/kernel_support.h"
#include "test/midi_support.h"
#include "test/reference/reference.h"
#include "test/support.h"

namespace jetlag::test {
namespace {

using Texts = std::vector<std::string>;

// ------------------------------------------------------------------------------------------------ the ops

enum class Bias { none, random, slope, window, first_masked, all_masked };

struct Problem {
    int64_t T, H, D;
    int64_t total = 0;  // the length of caches and tables; 0: T
    Bias bias = Bias::none;
    reference::Rotary rotary = reference::Rotary::kNone;
    int64_t partial_pairs = 0;  // if not 0: a rotary table of so many pairs, with gains that differ for q and k
};

struct Inputs {
    Problem p;
    Floats qkv;   // (T, 3, H, D)
    Floats bias;  // (H, total), or empty
    reference::RotaryTable rotary;
    Floats query_cos, query_sin, key_cos, key_sin, shear;
};

Inputs make_inputs(const Problem& problem) {
    TorchGenerator generator = make_generator(29);
    Inputs in;
    in.p = problem;
    Problem& p = in.p;
    p.total = std::max(p.total, p.T);
    in.qkv = normals(generator, p.T * 3 * p.H * p.D);
    if (p.bias != Bias::none) in.bias = normals(generator, p.H * p.total);
    for (int64_t i = 0; i < std::ssize(in.bias); i++) {
        const int64_t h = i / p.total, d = i % p.total;
        if (p.bias == Bias::slope) in.bias[i] = -3 * static_cast<float>(d * (h + 1));
        const bool is_masked = p.bias == Bias::all_masked || (p.bias == Bias::window && d >= 5 + 17 * h) ||
                               (p.bias == Bias::first_masked && d <= 20 * h);
        if (is_masked) in.bias[i] = -kInfinity;
    }
    reference::RotarySettings settings;
    settings.kind = p.rotary;
    in.rotary = reference::rotary_table(settings, 64, p.total, p.D);
    if (p.partial_pairs > 0) {
        const int64_t n = p.total * p.partial_pairs;
        in.rotary = {p.partial_pairs,
                     to_doubles(normals(generator, n)),
                     to_doubles(normals(generator, n)),
                     to_doubles(normals(generator, n)),
                     to_doubles(normals(generator, n)),
                     {}};
    }
    // Both sides take the table as floats; the reference only the rows that there are.
    const auto round = [&](Doubles& values) {
        Floats rounded(values.begin(), values.end());
        values.assign(rounded.begin(), rounded.end());
        values.resize(values.size() / static_cast<size_t>(p.total) * static_cast<size_t>(p.T));
        return rounded;
    };
    in.query_cos = round(in.rotary.query_cosine);
    in.query_sin = round(in.rotary.query_sine);
    in.key_cos = round(in.rotary.key_cosine);
    in.key_sin = round(in.rotary.key_sine);
    in.shear = round(in.rotary.shear);
    return in;
}

// The rows of attention at `positions` (ascending), each computed as soon as the caches hold it and nothing later.
// Between two of them the rows come together.
Floats decode(const Inputs& in, const std::vector<int64_t>& positions) {
    const auto& [T, H, D] = std::tie(in.p.T, in.p.H, in.p.D);
    const int64_t C = H * D, total = in.p.total;
    const RealBuffer qkv(in.qkv);
    const FloatBuffer bias(in.bias);
    const FloatBuffer query_cos(in.query_cos), query_sin(in.query_sin), key_cos(in.key_cos), key_sin(in.key_sin),
        shear(in.shear);
    RotaryTable table;
    if (in.rotary.pairs > 0)
        table = {in.rotary.pairs, query_cos.data(), query_sin.data(),
                 key_cos.data(),  key_sin.data(),   in.shear.empty() ? nullptr : shear.data()};
    const RealBuffer keys(attention_cache_size(total, H, D)), values(attention_cache_size(total, H, D));
    Floats rows;
    int64_t first = 0;
    for (const int64_t position : positions) {
        attention_cache(keys.data(), values.data(), qkv.data() + first * 3 * C, table, first, position + 1 - first,
                        total, H, D);
        first = position + 1;
        const RealBuffer out(C);
        const FloatBuffer workspace(attention_decode_workspace_floats(total, H, D));
        attention_decode(out.data(), qkv.data() + position * 3 * C, keys.data(), values.data(), table,
                         in.bias.empty() ? nullptr : bias.data(), workspace.data(), position, total, H, D);
        workspace.read();
        const Floats row = out.read();
        rows.insert(rows.end(), row.begin(), row.end());
    }
    keys.read();
    values.read();
    EXPECT_TRUE(same_bits(qkv.read(), rounded(in.qkv)));
    return rows;
}

void expect_matches_reference(const Problem& problem, std::vector<int64_t> positions = {}) {
    SCOPED_TRACE(fmt::format("T {} of {} H {} D {} bias {} rotary {} pairs {}", problem.T, problem.total, problem.H,
                             problem.D, static_cast<int>(problem.bias), static_cast<int>(problem.rotary),
                             problem.partial_pairs));
    const Inputs in = make_inputs(problem);
    const Problem& p = in.p;
    const int64_t C = p.H * p.D;
    for (int64_t t = 0; positions.empty() && t < p.T; t++) positions.push_back(t);
    Doubles bias;
    for (int64_t h = 0; h < p.H && !in.bias.empty(); h++)
        bias.insert(bias.end(), in.bias.begin() + h * p.total, in.bias.begin() + h * p.total + p.T);
    const Doubles all = reference::attention_layer_forward(to_doubles(in.qkv), in.rotary, bias, 1, p.T, p.H, p.D).out;
    Doubles want;
    for (const int64_t t : positions) want.insert(want.end(), all.begin() + t * C, all.begin() + (t + 1) * C);
    for_each_simd_target([&] {
        const Floats found = decode(in, positions);
        EXPECT_LE(distance(found, want), (1e-5 + 4 * kRealRounding) * norm(want));
        // A row without a key gives zeros, not small numbers.
        for (size_t i = 0; i < want.size(); i++)
            if (want[i] == 0) {
                EXPECT_EQ(found[i], 0.0f) << i;
            }
    });
}

TEST(Decode, EveryHeadDim) {
    for (const int64_t D : {1, 4, 5, 7, 8, 9, 24, 31, 64, 96, 255, 256}) {
        expect_matches_reference({.T = 19, .H = 2, .D = D});
        expect_matches_reference({.T = 35, .H = 1, .D = D, .total = 37, .bias = Bias::random});
    }
}

// Every position around the ends of vectors, and of a segment of any length up to 1024.
TEST(Decode, EveryLength) {
    for (const Bias bias : {Bias::none, Bias::random}) {
        expect_matches_reference({.T = 140, .H = 2, .D = 8, .total = 141, .bias = bias});
        std::vector<int64_t> positions;
        for (const int64_t boundary : {256, 512, 768, 1024})
            for (int64_t t = boundary - 2; t <= boundary + 2; t++) positions.push_back(t);
        expect_matches_reference({.T = 1100, .H = 2, .D = 7, .total = 1100, .bias = bias}, positions);
        expect_matches_reference({.T = 1100, .H = 1, .D = 24, .total = 5000, .bias = bias}, positions);
    }
}

TEST(Decode, MaskedLags) {
    for (const Bias bias : {Bias::slope, Bias::window, Bias::first_masked, Bias::all_masked}) {
        expect_matches_reference({.T = 70, .H = 3, .D = 8, .total = 90, .bias = bias});
        expect_matches_reference({.T = 1100, .H = 3, .D = 4, .total = 1200, .bias = bias},
                                 {0, 17, 511, 512, 530, 1023, 1024, 1099});
    }
}

TEST(Decode, EveryRotaryKind) {
    using reference::Rotary;
    for (const Rotary rotary : {Rotary::kRope, Rotary::kPi, Rotary::kNtk, Rotary::kYarn, Rotary::kJordan})
        for (const int64_t D : {8, 24, 36})
            expect_matches_reference({.T = 80, .H = 2, .D = D, .total = 300, .bias = Bias::random, .rotary = rotary});
    for (const int64_t pairs : {1, 3, 5})
        expect_matches_reference({.T = 40, .H = 2, .D = 11, .total = 50, .partial_pairs = pairs});
}

TEST(Decode, SameForEveryThreadCountAndHoweverRowsCome) {
    const Inputs in = make_inputs(
        {.T = 3000, .H = 3, .D = 24, .total = 3001, .bias = Bias::random, .rotary = reference::Rotary::kJordan});
    const std::vector<int64_t> last = {2999}, stops = {0, 1, 700, 701, 1536, 2998, 2999};
    expect_same_for_every_thread_count([&]() -> std::vector<Floats> { return {decode(in, stops)}; });
    const Floats all = decode(in, stops);
    EXPECT_TRUE(same_bits(decode(in, last), {all.end() - 72, all.end()}));
}

// Also behind a bias of -infinity.
TEST(Decode, NanShows) {
    for (const int64_t part : {1, 2}) {  // key, value
        Inputs in = make_inputs({.T = 600, .H = 2, .D = 8, .bias = Bias::window});
        in.qkv[3 * 48 + part * 16 + 8] = kNan;  // position 3, head 1
        for_each_simd_target([&] {
            const Floats rows = decode(in, {2, 599});
            for (int64_t i = 0; i < 32; i++)
                EXPECT_EQ(std::isnan(rows[i]), i >= 24 && (part == 1 || i == 24)) << part << " " << i;
        });
    }
}

TEST(LinearRow, MatchesReference) {
    TorchGenerator generator = make_generator(5);
    for (const int64_t C : {1, 3, 16, 24, 96, 97, 1000})
        for (const int64_t OC : {1, 2, 5, 64, 65, 288}) {
            SCOPED_TRACE(fmt::format("C {} OC {}", C, OC));
            const Floats weight = normals(generator, OC * C), inp = normals(generator, C),
                         bias = normals(generator, OC);
            const Doubles want = reference::linear_forward(to_doubles(inp), to_doubles(weight), to_doubles(bias));
            const auto run = [&] {
                const RealBuffer out(OC), device_inp(inp), device_weight(weight), device_bias(bias);
                linear_forward_row(out.data(), device_inp.data(), device_weight.data(), device_bias.data(), C, OC);
                return out.read();
            };
            for_each_simd_target([&] { EXPECT_LE(relative_error(run(), want), 2e-6 + kRealRounding); });
            expect_same_for_every_thread_count([&]() -> std::vector<Floats> { return {run()}; });
        }
    const Floats weight = normals(generator, 2000 * 700), inp = normals(generator, 700), bias(2000, 0.0f);
    expect_same_for_every_thread_count([&]() -> std::vector<Floats> {
        const RealBuffer out(2000), device_inp(inp), device_weight(weight), device_bias(bias);
        linear_forward_row(out.data(), device_inp.data(), device_weight.data(), device_bias.data(), 700, 2000);
        return {out.read()};
    });
}

// ------------------------------------------------------------------------------------------------ the model

// Lag biases and scores that matter: at the start zetas are small and attention is nearly flat.
Model make_sharp_model(const std::string& method, const Texts& overrides) {
    Model model = make_small_model(method, overrides);
    const auto times = [](float factor) {
        return [factor](Floats& values) {
            for (float& x : values) x *= factor;
        };
    };
    change_parameters(model, "zeta", times(30));
    change_parameters(model, "qkv.weight", times(3));
    return model;
}

// The logits of the last rows of a forward pass over all tokens, as many as are kept.
Floats whole_pass(const Model& model, const std::vector<int32_t>& tokens, int64_t rows) {
    const int64_t T = std::ssize(tokens), V = model.shape.vocab, chunk = (T - 1) % 2048 + 1;
    Activations acts = make_activations(model.shape, 1, T, Mode::inference, false);
    evaluate_batch(model, acts, tokens, tokens, 1, T, T);
    EXPECT_LE(rows, chunk);
    return read_device(acts.logits + (chunk - rows) * V, rows * V);
}

double largest_difference(std::span<const float> a, std::span<const float> b) {
    if (a.size() != b.size()) return kNan;
    double largest = 0;
    for (size_t i = 0; i < a.size(); i++) largest = std::max(largest, static_cast<double>(std::fabs(a[i] - b[i])));
    return largest;
}

// Extends by `pieces` tokens at a time, which add up to a sequence of T; every piece's logits against the whole pass.
void expect_same_logits(const Model& model, const std::vector<int32_t>& tokens, const Floats& want,
                        const std::vector<int64_t>& pieces, double tolerance) {
    const int64_t T = std::ssize(tokens), V = model.shape.vocab, first = T - std::ssize(want) / V;
    KeyValueCache cache = make_key_value_cache(model, T);
    for (const int64_t piece : pieces) {
        const Floats found = extend_sequence(model, cache, std::span(tokens).subspan(cache.length, piece));
        const int64_t row = cache.length - 1 - first;
        if (row < 0) continue;
        EXPECT_LE(largest_difference(found, std::span(want).subspan(row * V, V)),
                  by_precision(tolerance, 1e4 * tolerance))
            << "row " << row;
    }
    EXPECT_EQ(cache.length, T);
}

std::vector<int64_t> pieces_of(std::vector<int64_t> start, int64_t T) {
    int64_t sum = 0;
    for (const int64_t piece : start) sum += piece;
    start.resize(start.size() + static_cast<size_t>(T - sum), 1);
    return start;
}

const Texts kSmall = {"model.embed_dim=24", "model.heads=3", "model.layers=2", "train.context=64"};

// Logits are of size 1; their errors are some roundings of that, carried through two layers.
TEST(Growing, SameLogitsAsTheWholePass) {
    const int64_t T = 150;
    for (const Method& method : methods()) {
        SCOPED_TRACE(method.name);
        const Model model = make_sharp_model(method.name, kSmall);
        TorchGenerator generator = make_generator(4);
        const std::vector<int32_t> tokens = random_tokens(generator, T, model.shape.vocab);
        const Floats want = whole_pass(model, tokens, T);
        EXPECT_GT(norm(want) / std::sqrt(static_cast<double>(want.size())), 0.1);
        for (const std::vector<int64_t>& start : {std::vector<int64_t>{100}, {1}, {40, 60, 3}, {150}})
            expect_same_logits(model, tokens, want, pieces_of(start, T), 1e-5);
    }
}

TEST(Growing, SeveralSegments) {
    const int64_t T = 1100;
    for (const char* method : {"rope_yarn", "full", "pj_rotary", "alibi"}) {
        SCOPED_TRACE(method);
        const Model model = make_sharp_model(method, kSmall);
        TorchGenerator generator = make_generator(4);
        const std::vector<int32_t> tokens = random_tokens(generator, T, model.shape.vocab);
        // The shear of Jordan blocks grows with the position, here to 17, and scores with its square.
        const double tolerance = method == std::string("pj_rotary") ? 1e-4 : 1e-5;
        expect_same_logits(model, tokens, whole_pass(model, tokens, T), pieces_of({500, 1, 1, 490}, T), tolerance);
    }
}

TEST(Growing, LongestLength) {
    const int64_t T = 32768, steps = 6;
    const Model model = make_sharp_model("rope_yarn_affine",
                                         {"model.embed_dim=8", "model.heads=1", "model.layers=2", "train.context=128"});
    TorchGenerator generator = make_generator(4);
    const std::vector<int32_t> tokens = random_tokens(generator, T, model.shape.vocab);
    expect_same_logits(model, tokens, whole_pass(model, tokens, steps), pieces_of({T - steps}, T), 1e-5);
}

// The table is that of the total length, not of the length so far.
TEST(Growing, TablesOfTheTotalLength) {
    for (const char* method : {"rope_pi", "rope_ntk", "rope_yarn"}) {
        SCOPED_TRACE(method);
        const Model model = make_sharp_model(method, kSmall);
        TorchGenerator generator = make_generator(4);
        const std::vector<int32_t> tokens = random_tokens(generator, 100, model.shape.vocab);
        KeyValueCache small = make_key_value_cache(model, 100), large = make_key_value_cache(model, 400);
        EXPECT_GT(largest_difference(extend_sequence(model, small, tokens), extend_sequence(model, large, tokens)),
                  1e-3);
    }
}

TEST(Growing, SameForEveryThreadCount) {
    const Model model = make_sharp_model("full", {"model.embed_dim=48", "model.heads=2", "train.context=64"});
    TorchGenerator generator = make_generator(4);
    const int64_t T = is_emulated() ? 300 : 3000;
    const std::vector<int32_t> tokens = random_tokens(generator, T, model.shape.vocab);
    expect_same_for_every_thread_count([&]() -> std::vector<Floats> {
        KeyValueCache cache = make_key_value_cache(model, T);
        std::vector<Floats> logits;
        for (const int64_t piece : {T / 3 + 25, 1l, 1l, T / 2, 1l})  // a chunk of the forward pass, and one row
            logits.push_back(extend_sequence(model, cache, std::span(tokens).subspan(cache.length, piece)));
        return logits;
    });
}

TEST(Growing, Errors) {
    const Model model = make_sharp_model("rope", kSmall);
    KeyValueCache cache = make_key_value_cache(model, 10);
    const std::vector<int32_t> tokens(11, 7);
    EXPECT_THROW(extend_sequence(model, cache, tokens), Error);
    EXPECT_THROW(extend_sequence(model, cache, {}), Error);
    extend_sequence(model, cache, std::span(tokens).first(10));
    EXPECT_THROW(extend_sequence(model, cache, std::span(tokens).first(1)), Error);
}

// ------------------------------------------------------------------------------------------------ sampling

std::vector<int32_t> tokens_of(const std::vector<Candidate>& candidates) {
    std::vector<int32_t> tokens;
    for (const Candidate& candidate : candidates) tokens.push_back(candidate.token);
    return tokens;
}

using Tokens = std::vector<int32_t>;

TEST(Sampling, TemperatureOneIsTheSoftmax) {
    const Floats logits = {1, 3, -2, 3, 0.5f};
    const std::vector<Candidate> candidates = sampling_candidates(logits, {});
    EXPECT_EQ(tokens_of(candidates), (Tokens{1, 3, 0, 4, 2}));
    double total = 0;
    for (const float logit : logits) total += std::exp(static_cast<double>(logit));
    for (const Candidate& c : candidates)
        EXPECT_NEAR(c.probability, std::exp(static_cast<double>(logits[static_cast<size_t>(c.token)])) / total, 1e-15);
}

TEST(Sampling, Temperature) {
    const Floats logits = {1, 3, -2, 3, 0.5f};
    // Greedy takes the lowest of the likeliest; a low temperature tends to all of those.
    EXPECT_EQ(tokens_of(sampling_candidates(logits, {.temperature = 0})), Tokens{1});
    for (const double temperature : {1e-3, 1e-300, 5e-324}) {
        const std::vector<Candidate> cold = sampling_candidates(logits, {.temperature = temperature});
        EXPECT_EQ(cold[0].probability, 0.5);
        EXPECT_EQ(cold[1].probability, 0.5);
        EXPECT_EQ(cold[2].probability, 0);
        EXPECT_EQ(pick_candidate(cold, std::nextafter(1, 0)), 3);
    }
    for (const Candidate& c : sampling_candidates(logits, {.temperature = 1e9})) EXPECT_NEAR(c.probability, 0.2, 1e-8);
    const std::vector<Candidate> warm = sampling_candidates(logits, {.temperature = 2});
    EXPECT_NEAR(warm[2].probability / warm[0].probability, std::exp(-1), 1e-15);
    const Floats extreme = {-3e38f, 3e38f, 0};
    EXPECT_EQ(sampling_candidates(extreme, {})[0].probability, 1);
}

TEST(Sampling, TopK) {
    const Floats logits = {2, 5, 5, 2, 2, 1};
    EXPECT_EQ(tokens_of(sampling_candidates(logits, {.top_k = 1})), Tokens{1});
    EXPECT_EQ(tokens_of(sampling_candidates(logits, {.top_k = 4})), (Tokens{1, 2, 0, 3}));
    for (const int64_t k : {0, 6, 7, 1000000}) EXPECT_EQ(sampling_candidates(logits, {.top_k = k}).size(), 6u) << k;
    const std::vector<Candidate> three = sampling_candidates(logits, {.top_k = 3});
    EXPECT_NEAR(three[0].probability, 1 / (2 + std::exp(-3)), 1e-15);
    EXPECT_NEAR(three[0].probability + three[1].probability + three[2].probability, 1, 1e-15);
}

TEST(Sampling, TopP) {
    const auto logit = [](double probability) { return static_cast<float>(std::log(probability)); };
    const Floats logits = {logit(0.1), logit(0.5), logit(0.25), logit(0.15)};
    EXPECT_EQ(tokens_of(sampling_candidates(logits, {.top_p = 1e-9})), Tokens{1});
    EXPECT_EQ(tokens_of(sampling_candidates(logits, {.top_p = 0.49})), Tokens{1});
    EXPECT_EQ(tokens_of(sampling_candidates(logits, {.top_p = 0.51})), (Tokens{1, 2}));
    EXPECT_EQ(tokens_of(sampling_candidates(logits, {.top_p = 0.8})), (Tokens{1, 2, 3}));
    EXPECT_EQ(sampling_candidates(logits, {.top_p = 1}).size(), 4u);
    EXPECT_NEAR(sampling_candidates(logits, {.top_p = 0.51})[0].probability, 2.0 / 3, 1e-7);
    // After top-k: of the two that are left, the first has two thirds.
    EXPECT_EQ(tokens_of(sampling_candidates(logits, {.top_k = 2, .top_p = 0.6})), Tokens{1});
    EXPECT_EQ(tokens_of(sampling_candidates(Floats(5, 0.0f), {.top_p = 0.5})), (Tokens{0, 1, 2}));
}

TEST(Sampling, PicksByShare) {
    const std::vector<Candidate> candidates = {{7, 0.5}, {2, 0.25}, {9, 0.25 - 0x1p-50}, {1, 0}};
    EXPECT_EQ(pick_candidate(candidates, 0), 7);
    EXPECT_EQ(pick_candidate(candidates, std::nextafter(0.5, 0)), 7);
    EXPECT_EQ(pick_candidate(candidates, 0.5), 2);
    EXPECT_EQ(pick_candidate(candidates, 0.75), 9);
    // Behind the rounded sum: the last that is possible at all.
    EXPECT_EQ(pick_candidate(candidates, std::nextafter(1, 0)), 9);
}

TEST(Sampling, UniformNumbers) {
    // As Python's random.random() makes them from the same engine; the first two draws of seed 5489 are known.
    std::mt19937 engine;
    EXPECT_EQ(draw_uniform(engine), static_cast<double>((3499211612ULL >> 5 << 26) + (581869302 >> 6)) * 0x1p-53);
    double sum = 0;
    for (int i = 0; i < 100000; i++) {
        const double u = draw_uniform(engine);
        ASSERT_TRUE(u >= 0 && u < 1);
        sum += u;
    }
    EXPECT_NEAR(sum / 100000, 0.5, 5 * 0.29 / std::sqrt(100000.0));
}

TEST(Sampling, Frequencies) {
    TorchGenerator generator = make_generator(2);
    const Floats logits = normals(generator, 20);
    const Sampling sampling = {.temperature = 0.8, .top_k = 12, .top_p = 0.9};
    const std::vector<Candidate> candidates = sampling_candidates(logits, sampling);
    ASSERT_GT(candidates.size(), 3u);
    std::map<int32_t, double> counts;
    const double n = 100000;
    for (double i = 0; i < n; i++) counts[pick_candidate(candidates, draw_uniform(generator.engine))]++;
    EXPECT_EQ(counts.size(), candidates.size());
    for (const Candidate& c : candidates)
        EXPECT_NEAR(counts[c.token] / n, c.probability, 5 * std::sqrt(c.probability / n)) << c.token;
}

// ------------------------------------------------------------------------------------------------ the program

struct Workshop {
    TemporaryFolder folder;
    std::string path(const std::string& name) const { return folder.path / name; }

    // A checkpoint of an untrained model; `change` may edit the parameters.
    std::string save(const std::string& name, const Texts& overrides,
                     const std::function<void(Model&)>& change = {}) const {
        std::vector<Setting> settings;
        add_overrides(settings, {"train.context=64", "model.embed_dim=16", "model.heads=2"});
        add_overrides(settings, overrides);
        const Config config = make_config(settings);
        Model model = make_model(model_shape(config));
        TorchGenerator generator = make_generator(1);
        initialize_model(model, generator);
        if (change) change(model);
        save_checkpoint(path(name), model, config_json(config), 0, "");
        return path(name);
    }
};

std::string generated(const Texts& arguments, const Texts& environment = {}) {
    const ProgramResult result = run_program("generate", arguments, environment);
    EXPECT_EQ(result.exit_code, kExitGood) << result.err;
    return result.out;
}

TEST(Generate, IsAFunctionOfItsArguments) {
    const Workshop w;
    const std::string model = w.save("model", {"model.position=full"}), out = w.path("out");
    const Texts arguments = {model, "--prompt", "[To be, or not", "--tokens", "300"};
    const auto with = [&](const Texts& more) {
        Texts all = arguments;
        all.insert(all.end(), more.begin(), more.end());
        return all;
    };
    const ProgramResult result = run_program("generate", with({"--out", out}));
    ASSERT_EQ(result.exit_code, kExitGood) << result.err;
    EXPECT_EQ(result.out.size(), 300u);
    EXPECT_EQ(read_file(out), "[To be, or not" + result.out);
    const Texts lines = lines_of(result.err);
    ASSERT_EQ(lines.size(), 1u) << result.err;
    EXPECT_TRUE(lines[0].starts_with("generate: 300 tokens, ")) << lines[0];
    EXPECT_NE(lines[0].find(" tokens/s, after a prompt of 14 tokens in "), std::string::npos) << lines[0];

    EXPECT_EQ(generated(with({"--seed", "0"})), result.out);
    EXPECT_EQ(generated(with({"--top-k", "256", "--top-p", "1.0", "--temperature", "1"})), result.out);
    EXPECT_EQ(generated(arguments, {"OMP_NUM_THREADS=1"}), generated(arguments, {"OMP_NUM_THREADS=3"}));
    EXPECT_NE(generated(with({"--seed", "1"})), result.out);
    EXPECT_NE(generated(with({"--temperature", "0.5"})), result.out);
    const std::string greedy = generated(with({"--temperature", "0"}));
    EXPECT_EQ(generated(with({"--top-k", "1", "--seed", "9"})), greedy);
    EXPECT_EQ(generated(with({"--top-p", "1e-9", "--seed", "8"})), greedy);
    EXPECT_EQ(generated(with({"--temperature", "1e-9", "--seed", "8"})), greedy);

    const std::string rope = w.save("rope", {"model.position=rope"});
    EXPECT_NE(generated({rope, "--prompt", "abc", "--tokens", "100", "--set", "model.position=rope_yarn"}),
              generated({rope, "--prompt", "abc", "--tokens", "100"}));
}

// The first token of every byte as a prompt, greedy, against the model's own logits.
TEST(Generate, PromptFilesOfAnyBytes) {
    const Workshop w;
    std::string prompt;
    for (int byte = 0; byte < 256; byte++) prompt += static_cast<char>(byte);
    write_file_atomically(w.path("prompt"), prompt);
    const std::string file = w.save("model", {"model.position=rope_ntk"});
    const std::string text =
        generated({file, "--prompt-file", w.path("prompt"), "--tokens", "40", "--temperature", "0"});
    ASSERT_EQ(text.size(), 40u);
    const Checkpoint checkpoint = load_checkpoint(file, {});
    Tokens tokens;
    for (const char byte : prompt + text) tokens.push_back(static_cast<uint8_t>(byte));
    const Floats logits = whole_pass(checkpoint.model, tokens, 41);
    for (int64_t i = 0; i < 40; i++) {
        const auto row = logits.begin() + i * 256;
        // Two logits within the rounding of the two ways are both right.
        EXPECT_GE(row[tokens[static_cast<size_t>(256 + i)]],
                  *std::max_element(row, row + 256) - by_precision(1e-5, 5e-2))
            << i;
    }
}

TEST(Generate, SaysWhenTablesDependOnTheTotalLength) {
    const Workshop w;
    for (const auto& [method, kind] : {std::pair("rope_pi", "pi"), {"rope_ntk_affine", "ntk"}, {"rope_yarn", "yarn"}}) {
        const std::string model = w.save(method, {fmt::format("model.position={}", method)});
        const auto lines = [&](const char* count) {
            return lines_of(run_program("generate", {model, "--prompt", "abc", "--tokens", count}).err);
        };
        ASSERT_EQ(lines("62").size(), 2u) << method;
        EXPECT_EQ(
            lines("62")[0],
            fmt::format("generate: note: rotary kind {} depends on the total length, fixed ahead at 65 tokens", kind));
        EXPECT_EQ(lines("61").size(), 1u) << method;  // within the training length
    }
    for (const char* method : {"none", "rope", "pj_rotary", "full"}) {
        const std::string model = w.save(method, {fmt::format("model.position={}", method)});
        EXPECT_EQ(lines_of(run_program("generate", {model, "--prompt", "abc", "--tokens", "200"}).err).size(), 1u);
    }
}

TEST(Generate, WrongInputs) {
    const Workshop w;
    const std::string model = w.save("model", {}), folder = w.folder.path, long_prompt = w.path("long");
    write_file_atomically(long_prompt, std::string(32768, 'x'));
    write_file_atomically(w.path("empty"), "");
    const struct {
        Texts arguments;
        Texts parts;
    } cases[] = {
        {{}, {"RUN_OR_CHECKPOINT", "see --help"}},
        {{model}, {"wanted one of --prompt, --prompt-file and --prompt-midi, found none"}},
        {{model, "--prompt", "a", "--prompt-file", long_prompt}, {"--prompt-midi, found --prompt and --prompt-file"}},
        {{model, "--prompt", ""}, {"--prompt: is empty (wanted at least one byte)"}},
        {{model, "--prompt-file", w.path("empty")}, {"--prompt-file " + w.path("empty") + ": is empty"}},
        {{model, "--prompt-file", w.path("no")}, {"--prompt-file " + w.path("no") + ": no such file"}},
        {{model, "--prompt-file", folder}, {"--prompt-file " + folder + ": is a folder, wanted a file"}},
        {{model, "--prompt-midi", w.path("no.mid")}, {"--prompt-midi " + w.path("no.mid") + ": no such file"}},
        {{model, "--prompt", "a", "--prompt-tokens", "0"}, {"--prompt-tokens: found 0, wanted a whole number from 1"}},
        {{model, "--prompt", "a", "--midi", folder}, {"--midi " + folder}},
        {{model, "--prompt", "a", "--out", w.path("o"), "--midi", w.path("o")},
         {"--midi " + w.path("o") + ": is taken"}},
        {{model, "--prompt-midi", long_prompt, "--midi", long_prompt}, {"--midi " + long_prompt + ": is taken"}},
        {{w.path("no"), "--prompt", "a"}, {w.path("no") + ": no such file or folder (wanted a run folder, or a"}},
        {{folder, "--prompt", "a"}, {folder + ": a folder without checkpoint.safetensors"}},
        {{model, "--prompt", "a", "--tokens", "-1"}, {"--tokens: found -1, wanted a whole number from 1 to 32768"}},
        {{model, "--prompt", "a", "--tokens", "0"}, {"--tokens: found 0, wanted a whole number from 1 to 32768"}},
        {{model, "--prompt", "a", "--tokens", "1e3"}, {"--tokens: found 1e3, wanted a whole number"}},
        {{model, "--prompt", "a", "--tokens", "32768"},
         {"a prompt of 1 tokens and --tokens 32768 make 32769 tokens (wanted at most 32768)"}},
        {{model, "--prompt-file", long_prompt, "--tokens", "1"},
         {"a prompt of 32768 tokens and --tokens 1 make 32769"}},
        {{model, "--prompt", "a", "--temperature", "nan"},
         {"--temperature: found nan, wanted a finite number of at least 0"}},
        {{model, "--prompt", "a", "--temperature", "inf"}, {"--temperature: found inf, wanted a finite number"}},
        {{model, "--prompt", "a", "--temperature", "-0.5"}, {"--temperature: found -0.5, wanted a finite number"}},
        {{model, "--prompt", "a", "--temperature", "hot"}, {"--temperature: found hot, wanted a finite number"}},
        {{model, "--prompt", "a", "--top-p", "0"}, {"--top-p: found 0, wanted a number above 0 and at most 1"}},
        {{model, "--prompt", "a", "--top-p", "1.01"}, {"--top-p: found 1.01, wanted a number above 0 and at most 1"}},
        {{model, "--prompt", "a", "--top-p", "nan"}, {"--top-p: found nan, wanted a number above 0 and at most 1"}},
        {{model, "--prompt", "a", "--top-k", "0"}, {"--top-k: found 0, wanted a whole number from 1"}},
        {{model, "--prompt", "a", "--seed", "first"}, {"--seed: found first, wanted a whole number from 0"}},
        {{model, "--prompt", "a", "--seed", "-1"}, {"--seed: found -1, wanted a whole number from 0"}},
        {{model, "--prompt", "a", "--out", folder + "/no/out"}, {"--out " + folder + "/no/out: there is no folder "}},
        {{model, "--prompt", "a", "--out", ""}, {"--out: is empty (wanted a file)"}},
        {{model, "--prompt", "a", "--out", model}, {"--out " + model + ": is taken by " + model}},
        {{model, "--prompt", "a", "--set", "model.positio=rope"}, {"model.positio: unknown key"}},
    };
    for (const auto& c : cases) {
        SCOPED_TRACE(c.parts[0]);
        const ProgramResult result = run_program("generate", c.arguments);
        expect_error(result, "generate", kExitUsage, c.parts);
        EXPECT_EQ(result.out, "");
    }
}

TEST(Generate, TakesTheBeginningOfAPrompt) {
    const Workshop w;
    const std::string model = w.save("model", {});
    write_file_atomically(w.path("prompt"), "abcdef");
    EXPECT_EQ(generated({model, "--prompt-file", w.path("prompt"), "--prompt-tokens", "3", "--tokens", "20"}),
              generated({model, "--prompt", "abc", "--tokens", "20"}));
    EXPECT_EQ(generated({model, "--prompt", "abc", "--prompt-tokens", "9", "--tokens", "20"}),
              generated({model, "--prompt", "abc", "--tokens", "20"}));
}

// A corpus of each format; a model of it, which knows nothing yet; a MIDI file to go on from.
TEST(Generate, GoesFromMidiToMidi) {
    const Workshop w;
    std::string notes;
    for (int i = 0; i < 40; i++)
        notes += hex("00 90") + static_cast<char>(30 + i) + hex("40 30 80") + static_cast<char>(30 + i) + hex("00");
    write_file_atomically(w.path("a.mid"), one_track(hex("00 c0 05") + notes + hex("00 ff 2f 00")));
    const std::string opening = "d000.pg005.c0 d000.on030.v064.c0 d025.off030.c0 d000.on031.v064.c0 ";
    for (const char* format : {"text", "binary"}) {
        SCOPED_TRACE(format);
        const std::string corpus = w.path(std::string("corpus.") + format);
        ASSERT_EQ(run_program("prepare_midi", {"files", w.path("a.mid"), "--format", format, "--grid-ms", "10",
                                               "--include-programs", "--out", corpus})
                      .exit_code,
                  0);
        const std::string model = w.save("model", {"data.corpus=" + corpus}), midi = w.path("b.mid");
        const bool is_text = std::string(format) == "text";
        const ProgramResult result =
            run_program("generate", {model, "--prompt-midi", w.path("a.mid"), "--prompt-tokens", is_text ? "70" : "12",
                                     "--tokens", "200", "--midi", midi, "--out", w.path("out")});
        ASSERT_EQ(result.exit_code, 0) << result.err;
        EXPECT_EQ(read_file(w.path("out")), (is_text ? opening : hex("a3 a2 05 90 1e cc a0 1e 90 1f")) + result.out);
        EXPECT_NE(result.err.find("the prompt is the first 4 events of "), std::string::npos) << result.err;
        EXPECT_NE(result.err.find("malformed tokens, the first "), std::string::npos) << result.err;
        EXPECT_NE(result.err.find(" s at 10 ms a step"), std::string::npos) << result.err;
        const std::string bytes = read_file(midi);
        const MidiFile file = read_midi(bytes_of(bytes), midi, MidiMode::strict);
        TokenOptions options;
        options.grid_ms = 10;
        options.programs = true;
        options.max_events = 4;
        TokenCounts counts;
        const std::string text = encode_piece("", stream_events(file, midi, options, counts), TokenFormat::text);
        EXPECT_EQ(text, is_text ? opening.substr(0, opening.size() - 1) + "\n"
                                : "d000.pg005.c0 d000.on030.v066.c0 d025.off030.c0 d000.on031.v066.c0\n");

        EXPECT_GT(loudest_sample_played(midi).value_or(32767), 500);
        // All of it fits where more tokens are taken.
        const ProgramResult whole = run_program("generate", {model, "--prompt-midi", w.path("a.mid"), "--tokens", "1"});
        EXPECT_NE(whole.err.find("the prompt is the first 81 events of "), std::string::npos) << whole.err;
    }
}

TEST(Generate, SaysWhatIsWrongWithMidi) {
    const Workshop w;
    const std::string model = w.save("model", {"data.corpus=" + w.path("gone")});
    write_file_atomically(w.path("a.mid"), "nothing");
    const auto fails = [&](const Texts& arguments, const std::string& part) {
        Texts all = {model, "--tokens", "5"};
        all.insert(all.end(), arguments.begin(), arguments.end());
        const ProgramResult result = run_program("generate", all);
        EXPECT_EQ(result.exit_code, kExitFailed);
        EXPECT_NE(result.err.find(part), std::string::npos) << result.err;
        EXPECT_NE(result.err.find("generate: note: no corpus of MIDI events at " + w.path("gone")), std::string::npos)
            << result.err;
    };
    fails({"--prompt-midi", w.path("a.mid")}, "a.mid: byte 7: the file ends early");
    write_file_atomically(w.path("a.mid"), one_track(hex("00 ff 2f 00")));
    fails({"--prompt-midi", w.path("a.mid")}, "a.mid: holds no event of the kinds that the corpus has");
    write_file_atomically(w.path("a.mid"), one_track(hex("00 90 3c 40 00 ff 2f 00")));
    EXPECT_NE(run_program("generate", {model, "--prompt-midi", w.path("a.mid"), "--prompt-tokens", "5"})
                  .err.find("its first event does not fit into 5 tokens"),
              std::string::npos);
    fails({"--prompt", "abc", "--midi", w.path("b.mid")}, "b.mid: not written, the tokens hold no event");
    EXPECT_FALSE(std::filesystem::exists(w.path("b.mid")));
}

// The run, its corpus and what it reads are not written over.
TEST(Generate, ReplacesNothingOfTheRun) {
    const Workshop w;
    const std::string corpus = w.path("corpus.txt"), run = w.path("run");
    write_file_atomically(corpus, "abc");
    std::filesystem::create_directory(run);
    const std::string model = w.save("run/checkpoint.safetensors", {"data.corpus=" + corpus});
    for (const std::string& path : {corpus, corpus + ".json", run + "/config.yaml", run + "/state.safetensors",
                                    run + "/log.csv", run + "/log.jsonl", run + "/initial_eval.json", model})
        for (const char* option : {"--out", "--midi"})
            expect_error(run_program("generate", {run, "--prompt", "abc", "--tokens", "5", option, path}), "generate",
                         kExitUsage, {option, path, "is taken by"});
    EXPECT_EQ(read_file(corpus), "abc");
}

TEST(Generate, LosesNothingWhereAnOutputFails) {
    const Workshop w;
    const std::string model = w.save("model", {});
    const Texts arguments = {model, "--prompt", "d000.on060.v064.c0 ", "--tokens", "5", "--midi", w.path("a.mid")};
    Texts with_out = arguments;
    with_out.insert(with_out.end(), {"--out", "/dev/full"});
    const ProgramResult result = run_program("generate", with_out);
    EXPECT_EQ(result.exit_code, kExitFailed);
    EXPECT_NE(result.err.find("generate: error: cannot write /dev/full"), std::string::npos) << result.err;
    EXPECT_TRUE(std::filesystem::remove(w.path("a.mid")));
    // Nowhere to say anything.
    for (const char* err : {"/dev/full", ""}) {
        RunningProgram program = start_program("generate", arguments, {}, [&] {
            close(2);
            if (*err != '\0') open(err, O_WRONLY);
        });
        const ProgramResult silent = wait_for_program(program);
        EXPECT_EQ(silent.exit_code, kExitGood) << err;
        EXPECT_EQ(silent.out.size(), 5u);
        EXPECT_TRUE(std::filesystem::remove(w.path("a.mid")));
    }
}

TEST(Generate, LogitsThatAreNotFinite) {
    const Workshop w;
    const std::string model = w.save("model", {"model.position=rope"}, [](Model& m) {
        change_parameters(m, "head.bias", [](Floats& values) { values[200] = kNan; });
    });
    const ProgramResult result =
        run_program("generate", {model, "--prompt", "a", "--tokens", "5", "--out", w.path("out")});
    expect_error(result, "generate", kExitFailed, {model + ": the logits hold a NaN or infinity after 0 of 5 tokens"});
    EXPECT_EQ(result.out, "");
    EXPECT_FALSE(std::filesystem::exists(w.path("out")));
}

// A model that needs tens of seconds for so many tokens.
Texts long_generation(const Workshop& w) {
    return {w.save("model", {"model.position=full", "model.embed_dim=96", "model.heads=4", "model.layers=4"}),
            "--prompt", "abc", "--tokens", "30000"};
}

TEST(Generate, SignalsKeepWhatThereIs) {
    const Workshop w;
    Texts arguments = long_generation(w);
    arguments.insert(arguments.end(), {"--out", w.path("out")});
    for (const int signal : {SIGINT, SIGTERM}) {
        RunningProgram program = start_program("generate", arguments);
        // A file gets its first bytes when a buffer is full.
        while (is_running(program) && (!std::filesystem::exists(program.folder->path / "out") ||
                                       std::filesystem::file_size(program.folder->path / "out") == 0))
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
        kill(program.pid, signal);
        const ProgramResult result = wait_for_program(program);
        expect_error(result, "generate", kExitFailed,
                     {fmt::format("interrupted by {} after {} of 30000 tokens; prompt and tokens are in {}",
                                  strsignal(signal), result.out.size(), w.path("out"))});
        EXPECT_GT(result.out.size(), 0u);
        EXPECT_EQ(read_file(w.path("out")), "abc" + result.out);
    }
}

// A reader of a pipe sees the first token long before the last; when it leaves, the program ends.
TEST(Generate, PipesGrowAndBreak) {
    const Workshop w;
    int ends[2];
    ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
    RunningProgram program = start_program("generate", long_generation(w), {}, [&] { dup2(ends[1], 1); });
    close(ends[1]);
    char byte;
    EXPECT_EQ(read(ends[0], &byte, 1), 1);
    EXPECT_TRUE(is_running(program));
    close(ends[0]);
    expect_error(wait_for_program(program), "generate", kExitFailed,
                 {"cannot write to standard output (Broken pipe) after ", " of 30000 tokens"});
}

}  // namespace
}  // namespace jetlag::test
