#include "src/random.h"

#include <bit>
#include <cmath>
#include <locale>
#include <numbers>
#include <numeric>
#include <sstream>
#include <utility>

#include "src/error.h"

namespace jetlag {

TorchGenerator make_generator(uint64_t seed) {
    return {std::mt19937(static_cast<uint32_t>(seed)), std::nullopt};
}

static uint32_t random_32(TorchGenerator& generator) {
    return static_cast<uint32_t>(generator.engine());
}

static uint64_t random_64(TorchGenerator& generator) {
    const uint64_t high = random_32(generator);
    return high << 32 | random_32(generator);
}

// 24 random bits as a float in [0, 1).
static float unit_float(TorchGenerator& generator) {
    return static_cast<float>(random_32(generator) & 0xffffff) * 0x1p-24f;
}

// 53 random bits as a double in [0, 1).
static double unit_double(TorchGenerator& generator) {
    return static_cast<double>(random_64(generator) & 0x1fffffffffffff) * 0x1p-53;
}

void fill_uniform(TorchGenerator& generator, float low, float high, std::span<float> out) {
    // PyTorch's release builds contract this product and sum into one rounding; without fma every second value
    // is one unit in the last place off.
    for (float& value : out) value = std::fma(unit_float(generator), high - low, low);
}

// Box-Muller on 16 uniforms: value j and value j + 8 become a pair. In float, as PyTorch computes it: in double
// the values are right and further from PyTorch's.
static void box_muller_16(float* data) {
    for (int j = 0; j < 8; ++j) {
        const float u1 = 1.0f - data[j];  // (0, 1], for the logarithm
        const float u2 = data[j + 8];
        const float radius = std::sqrt(-2.0f * std::log(u1));
        const float theta = 2.0f * std::numbers::pi_v<float> * u2;
        data[j] = radius * std::cos(theta);
        data[j + 8] = radius * std::sin(theta);
    }
}

double draw_normal(TorchGenerator& generator) {
    if (generator.cached_normal) return *std::exchange(generator.cached_normal, std::nullopt);
    const double u1 = unit_double(generator);
    const double u2 = unit_double(generator);
    const double radius = std::sqrt(-2.0 * std::log1p(-u2));
    const double theta = 2.0 * std::numbers::pi * u1;
    generator.cached_normal = radius * std::sin(theta);
    return radius * std::cos(theta);
}

void fill_normal(TorchGenerator& generator, std::span<float> out) {
    const size_t size = out.size();
    if (size < 16) {
        for (float& value : out) value = static_cast<float>(draw_normal(generator));
        return;
    }
    for (float& value : out) value = unit_float(generator);
    for (size_t start = 0; start + 16 <= size; start += 16) box_muller_16(&out[start]);
    if (size % 16 != 0) {
        const std::span<float> last = out.last(16);
        for (float& value : last) value = unit_float(generator);
        box_muller_16(last.data());
    }
}

void fill_randint(TorchGenerator& generator, int64_t low, int64_t high, std::span<int64_t> out) {
    if (low >= high) fail("randint: the range [{}, {}) is empty", low, high);
    const uint64_t range = static_cast<uint64_t>(high) - static_cast<uint64_t>(low);
    const bool is_wide = range >= uint64_t{1} << 32;
    for (int64_t& value : out) {
        const uint64_t draw = is_wide ? random_64(generator) : random_32(generator);
        value = static_cast<int64_t>(static_cast<uint64_t>(low) + draw % range);
    }
}

std::vector<int64_t> randperm(TorchGenerator& generator, int64_t n) {
    if (n < 0) fail("randperm: {} values, wanted 0 or more", n);
    std::vector<int64_t> order(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) order[i] = i;
    for (int64_t i = 0; i + 1 < n; ++i) std::swap(order[i], order[i + random_32(generator) % (n - i)]);
    return order;
}

TorchGenerator make_indexed_generator(uint64_t seed, uint64_t stream, uint64_t index) {
    std::seed_seq words = {static_cast<uint32_t>(seed),   static_cast<uint32_t>(seed >> 32),
                           static_cast<uint32_t>(stream), static_cast<uint32_t>(stream >> 32),
                           static_cast<uint32_t>(index),  static_cast<uint32_t>(index >> 32)};
    return {std::mt19937(words), std::nullopt};
}

// The state's text: "mt19937", the 624 words and the position in them, "normal", and "none" or the cached value's
// 64 bits in hex.
std::mt19937 make_python_random(uint64_t seed) {
    // init_by_array of the authors' mt19937ar.c (Matsumoto and Nishimura 2002), with the seed's 32-bit words as key.
    constexpr size_t N = std::mt19937::state_size;
    std::vector<uint32_t> key = {static_cast<uint32_t>(seed)};
    if (seed >> 32 != 0) key.push_back(static_cast<uint32_t>(seed >> 32));
    std::vector<uint32_t> state(N);
    state[0] = 19650218;
    for (uint32_t i = 1; i < N; i++) state[i] = 1812433253 * (state[i - 1] ^ state[i - 1] >> 30) + i;
    size_t i = 1, j = 0;
    const auto advance = [&]() {
        if (++i == N) {
            state[0] = state[N - 1];
            i = 1;
        }
    };
    for (size_t k = 0; k < N; k++) {
        state[i] = (state[i] ^ (state[i - 1] ^ state[i - 1] >> 30) * 1664525) + key[j] + static_cast<uint32_t>(j);
        j = (j + 1) % key.size();
        advance();
    }
    for (size_t k = 1; k < N; k++) {
        state[i] = (state[i] ^ (state[i - 1] ^ state[i - 1] >> 30) * 1566083941) - static_cast<uint32_t>(i);
        advance();
    }
    state[0] = 0x80000000;
    std::stringstream text;
    text.imbue(std::locale::classic());
    for (uint32_t word : state) text << word << ' ';
    text << N;  // the position: all words are used up
    std::mt19937 engine;
    text >> engine;
    return engine;
}

std::vector<size_t> python_shuffled(std::mt19937& engine, size_t n) {
    std::vector<size_t> order(n);
    std::iota(order.begin(), order.end(), size_t{0});
    for (size_t i = n; i-- > 1;) {
        // randbelow(i + 1): as many bits as i + 1 has, again until they are below it.
        const int bits = std::bit_width(i + 1);
        size_t j;
        do j = engine() >> (32 - bits);
        while (j > i);
        std::swap(order[i], order[j]);
    }
    return order;
}

std::string generator_state(const TorchGenerator& generator) {
    std::ostringstream text;
    text.imbue(std::locale::classic());
    text << "mt19937 " << generator.engine << " normal ";
    if (generator.cached_normal) {
        text << std::hex << std::bit_cast<uint64_t>(*generator.cached_normal);
    } else {
        text << "none";
    }
    return text.str();
}

TorchGenerator generator_from_state(const std::string& state) {
    constexpr size_t kWords = std::mt19937::state_size;
    std::istringstream text(state);
    text.imbue(std::locale::classic());

    std::string word;
    if (!(text >> word) || word != "mt19937") fail("generator state: wanted \"mt19937\", found \"{:.20}\"", word);
    // The numbers are checked before the engine reads them, since the engine believes any position.
    std::string numbers;
    for (size_t i = 0; i <= kWords; ++i) {
        uint64_t number = 0;
        if (!(text >> number)) fail("generator state: wanted {} numbers, found {}", kWords + 1, i);
        const uint64_t largest = i < kWords ? 0xffffffff : kWords;
        if (number > largest) fail("generator state: number {} is {}, wanted at most {}", i, number, largest);
        numbers += fmt::format("{} ", number);
    }
    TorchGenerator generator;
    std::istringstream engine_text(numbers);
    engine_text.imbue(std::locale::classic());
    engine_text >> generator.engine;

    if (!(text >> word) || word != "normal") fail("generator state: wanted \"normal\", found \"{:.20}\"", word);
    if (!(text >> word)) fail("generator state: wanted the cached normal or \"none\", found the end");
    if (word != "none") {
        std::istringstream bits_text(word);
        bits_text.imbue(std::locale::classic());
        uint64_t bits = 0;
        if (!(bits_text >> std::hex >> bits) || !bits_text.eof())
            fail("generator state: wanted the cached normal in hex, found \"{:.20}\"", word);
        generator.cached_normal = std::bit_cast<double>(bits);
        if (!std::isfinite(*generator.cached_normal)) fail("generator state: the cached normal is not finite");
    }
    if (text >> word) fail("generator state: wanted the end, found \"{:.20}\"", word);
    return generator;
}

}  // namespace jetlag
