// Random numbers exactly as PyTorch's CPU generator draws them (aten/src/ATen/core/DistributionsHelper.h,
// aten/src/ATen/native/cpu/DistributionTemplates.h), so that a seed gives the initial weights and the batches of
// the published PyTorch code.
#pragma once

#include <cstdint>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <vector>

namespace jetlag {

// torch.Generator on the CPU: MT19937 and the second value of the last scalar normal draw.
struct TorchGenerator {
    std::mt19937 engine;
    std::optional<double> cached_normal;
};

// torch.manual_seed(seed); only the low 32 bits of the seed take part, as in PyTorch.
TorchGenerator make_generator(uint64_t seed);

// tensor.uniform_(low, high): low + (high - low) * u, with u of 24 random bits, in float with one rounding.
void fill_uniform(TorchGenerator& generator, float low, float high, std::span<float> out);

// tensor.normal_(0, 1). From 16 values on PyTorch fills with uniforms and applies Box-Muller in blocks of 16
// (a ragged end redraws the last 16 values); below 16 it draws pairs in double and keeps the second of a pair.
void fill_normal(TorchGenerator& generator, std::span<float> out);

// The next value of torch.randn(n, dtype=torch.float64) for n < 16.
double draw_normal(TorchGenerator& generator);

// torch.randint(low, high, (out.size(),)): low <= value < high. Errors: an empty range.
void fill_randint(TorchGenerator& generator, int64_t low, int64_t high, std::span<int64_t> out);

// torch.randperm(n). Errors: n < 0.
std::vector<int64_t> randperm(TorchGenerator& generator, int64_t n);

// The generator for draw number `index` of stream `stream` under `seed`: a function of the three numbers alone,
// so that batch n can be drawn without having drawn the batches before it.
TorchGenerator make_indexed_generator(uint64_t seed, uint64_t stream, uint64_t index);

// The engine of Python's random.Random(seed), seed >= 0: engine() is its getrandbits(32).
std::mt19937 make_python_random(uint64_t seed);

// Its shuffle(): the permutation that shuffling the list 0 .. n - 1 gives.
std::vector<size_t> python_shuffled(std::mt19937& engine, size_t n);

// The whole state as text, and back. Errors: text that is not such a state.
std::string generator_state(const TorchGenerator& generator);
TorchGenerator generator_from_state(const std::string& state);

}  // namespace jetlag
