#include "src/random.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>

#include "src/error.h"
#include "src/files.h"
#include "test/support.h"

namespace jetlag {
namespace {

using nlohmann::json;

json golden_rng() {
    return json::parse(read_file(test::shared_folder() / "golden" / "torch_rng.json"));
}

std::vector<float> uniforms(TorchGenerator& generator, float low, float high, size_t count) {
    std::vector<float> values(count);
    fill_uniform(generator, low, high, values);
    return values;
}

std::vector<float> normals(TorchGenerator& generator, size_t count) {
    std::vector<float> values(count);
    fill_normal(generator, values);
    return values;
}

std::vector<int64_t> integers(TorchGenerator& generator, int64_t low, int64_t high, size_t count) {
    std::vector<int64_t> values(count);
    fill_randint(generator, low, high, values);
    return values;
}

void expect_equal(const std::vector<float>& values, const json& wanted) {
    ASSERT_EQ(values.size(), wanted.size());
    for (size_t i = 0; i < values.size(); ++i) EXPECT_EQ(values[i], wanted[i].get<float>()) << "value " << i;
}

void expect_near(const std::vector<float>& values, const json& wanted) {
    ASSERT_EQ(values.size(), wanted.size());
    for (size_t i = 0; i < values.size(); ++i) EXPECT_NEAR(values[i], wanted[i].get<double>(), 1e-6) << "value " << i;
}

// The draws of one seed in torch_rng.json. Each draw has a fresh generator, except those continued from the one
// before: *_after, and the Linear, which was made right after the embedding.
void expect_draws(uint64_t seed, const json& golden) {
    std::set<std::string> tested;
    const auto wanted = [&](const std::string& name) -> const json& {
        tested.insert(name);
        return golden.at(name);
    };

    TorchGenerator generator = make_generator(seed);
    expect_equal(uniforms(generator, 0, 1, 5), wanted("rand_5"));
    expect_equal(uniforms(generator, 0, 1, 3), wanted("rand_after"));

    generator = make_generator(seed);
    EXPECT_EQ(integers(generator, 0, 1000000, 6), wanted("randint_0_1000000_6").get<std::vector<int64_t>>());
    generator = make_generator(seed);
    EXPECT_EQ(integers(generator, 0, 2, 12), wanted("randint_0_2_12").get<std::vector<int64_t>>());

    generator = make_generator(seed);
    expect_near(normals(generator, 5), wanted("randn_5"));
    expect_near(normals(generator, 3), wanted("randn_after_5"));

    generator = make_generator(seed);
    expect_near(normals(generator, 16), wanted("randn_16"));
    expect_equal(uniforms(generator, 0, 1, 2), wanted("rand_after_randn_16"));

    generator = make_generator(seed);
    expect_near(normals(generator, 37), wanted("randn_37"));
    expect_equal(uniforms(generator, 0, 1, 2), wanted("rand_after_randn_37"));

    generator = make_generator(seed);
    expect_equal(uniforms(generator, -0.25f, 0.25f, 5), wanted("uniform_-0.25_0.25_5"));

    generator = make_generator(seed);
    EXPECT_EQ(randperm(generator, 10), wanted("randperm_10").get<std::vector<int64_t>>());

    generator = make_generator(seed);
    const std::vector<float> embedding = normals(generator, 7 * 5);
    EXPECT_NEAR(std::accumulate(embedding.begin(), embedding.end(), 0.0), wanted("embedding_7_5_sum").get<double>(),
                1e-6);
    expect_near({embedding.begin(), embedding.begin() + 4}, wanted("embedding_first4"));
    const float bound = static_cast<float>(1 / std::sqrt(5.0));
    expect_equal(uniforms(generator, -bound, bound, 3 * 5), wanted("linear_5_3_weight"));
    expect_equal(uniforms(generator, -bound, bound, 3), wanted("linear_5_3_bias"));

    for (const auto& [name, draws] : golden.items()) EXPECT_TRUE(tested.contains(name)) << name << " is not tested";
}

TEST(Random, DrawsWhatPyTorchDraws) {
    NEEDS_SHARED();
    const json golden = golden_rng();
    EXPECT_EQ(golden.at("generator").size(), 4u);
    for (const auto& [seed, draws] : golden.at("generator").items()) {
        SCOPED_TRACE("seed " + seed);
        expect_draws(std::stoull(seed), draws);
    }
}

TEST(Random, OnlyTheLow32BitsOfTheSeedCount) {
    TorchGenerator small = make_generator(7), large = make_generator(7 + (uint64_t{5} << 32));
    EXPECT_EQ(small.engine, large.engine);
}

TEST(Random, RangesOf32BitsAndMoreTake64BitDraws) {
    // Below 2^32 one word a value; from there on two, the first one high.
    std::mt19937 words(3);
    const uint64_t high = words(), low = words();
    TorchGenerator generator = make_generator(3);
    EXPECT_EQ(integers(generator, 0, 0xffffffff, 1).at(0), static_cast<int64_t>(high % 0xffffffff));
    generator = make_generator(3);
    const int64_t range = int64_t{1} << 40;
    EXPECT_EQ(integers(generator, -range, 0, 1).at(0), static_cast<int64_t>((high << 32 | low) % range) - range);

    generator = make_generator(3);
    const int64_t min = std::numeric_limits<int64_t>::min(), max = std::numeric_limits<int64_t>::max();
    EXPECT_EQ(integers(generator, min, max, 1).at(0),
              static_cast<int64_t>((high << 32 | low) % 0xffffffffffffffff + (uint64_t{1} << 63)));
}

TEST(Random, RefusesEmptyRanges) {
    TorchGenerator generator = make_generator(0);
    EXPECT_THROW(integers(generator, 3, 3, 1), Error);
    EXPECT_THROW(integers(generator, 3, -3, 1), Error);
    EXPECT_THROW(randperm(generator, -1), Error);
    EXPECT_TRUE(randperm(generator, 0).empty());
    EXPECT_EQ(randperm(generator, 1), std::vector<int64_t>{0});
}

TEST(Random, LargeNormalFillsLeaveTheCachedValueAlone) {
    TorchGenerator generator = make_generator(11);
    TorchGenerator scalar = make_generator(11);
    const std::vector<float> pair = normals(scalar, 2);
    EXPECT_EQ(normals(generator, 1).at(0), pair[0]);
    normals(generator, 16);
    EXPECT_EQ(normals(generator, 1).at(0), pair[1]);
}

TEST(Random, StateRoundTrips) {
    TorchGenerator generator = make_generator(5);
    EXPECT_EQ(generator_state(generator_from_state(generator_state(generator))), generator_state(generator));
    for (const size_t count : {1, 2, 3, 620, 700}) {
        uniforms(generator, 0, 1, count);
        normals(generator, 3);
        TorchGenerator copy = generator_from_state(generator_state(generator));
        ASSERT_EQ(copy.engine, generator.engine);
        ASSERT_EQ(copy.cached_normal, generator.cached_normal);  // no rounding on the way
        TorchGenerator original = generator;
        EXPECT_EQ(normals(copy, 5), normals(original, 5));
        EXPECT_EQ(integers(copy, 0, 1000, 700), integers(original, 0, 1000, 700));
    }
}

TEST(Random, RefusesDamagedStates) {
    TorchGenerator generator = make_generator(5);
    normals(generator, 1);
    const std::string good = generator_state(generator);
    EXPECT_NO_THROW(generator_from_state(good));

    const size_t normal = good.find(" normal ");
    const size_t position = good.rfind(' ', normal - 1);
    const std::vector<std::string> bad = {
        "",
        "mt19937",
        "something else",
        good.substr(0, normal),
        good.substr(0, normal + 8),
        good.substr(0, position) + " 625" + good.substr(normal),
        good.substr(0, position) + good.substr(normal),
        "mt19937 4294967296 " + good.substr(good.find(' ', 8) + 1),
        "mt19937 -1 " + good.substr(good.find(' ', 8) + 1),
        "mt19937 word " + good.substr(good.find(' ', 8) + 1),
        good.substr(0, normal) + " normal 7ff0000000000000",
        good.substr(0, normal) + " normal 3ff000000000000g",
        good.substr(0, normal) + " normal 13ff0000000000000",
        good + " more",
    };
    for (const std::string& state : bad) EXPECT_THROW(generator_from_state(state), Error) << state.substr(0, 40);
}

TEST(Random, IndexedGeneratorsDifferInEveryArgument) {
    const uint64_t numbers[] = {0, 1, 2, 3, 1000, uint64_t{1} << 32, ~uint64_t{0}};
    std::set<std::vector<int64_t>> draws;
    for (const uint64_t seed : numbers)
        for (const uint64_t stream : numbers)
            for (const uint64_t index : numbers) {
                TorchGenerator once = make_indexed_generator(seed, stream, index);
                TorchGenerator again = make_indexed_generator(seed, stream, index);
                ASSERT_EQ(once.engine, again.engine);
                draws.insert(integers(once, 0, 1000000, 4));
            }
    EXPECT_EQ(draws.size(), 7u * 7u * 7u);
}

TEST(Random, IndexedGeneratorsAreUniformAcrossIndices) {
    // The first value of each of many consecutive generators, as batches use them: 16 bins of 1000 expected
    // values each; chi-squared with 15 degrees of freedom is over 45 with probability 1e-4.
    constexpr int kBins = 16, kDraws = 16000;
    std::vector<double> counts(kBins);
    for (int index = 0; index < kDraws; ++index) {
        TorchGenerator generator = make_indexed_generator(1, 2, index);
        counts[integers(generator, 0, kBins, 1)[0]] += 1;
    }
    double chi_squared = 0;
    for (const double count : counts) chi_squared += std::pow(count - kDraws / kBins, 2) / (kDraws / kBins);
    EXPECT_LT(chi_squared, 45);
}

}  // namespace
}  // namespace jetlag
