// The primitives of kernels/cuda/device.h against plain loops, on a GPU or on the emulator, where everything is the
// same bit for bit whatever the order of the threads.
#include <fmt/format.h>

#include <bit>
#include <cstdlib>

#include "test/device/primitives.h"
#include "test/kernel_support.h"

namespace jetlag::test {
namespace {

// What `run` returns, which must be the same under several seeds of the emulator.
template <typename T>
std::vector<T> for_seeds(const std::function<std::vector<T>()>& run) {
    const char* before = std::getenv("JETLAG_EMU_SEED");
    const std::string restored = before == nullptr ? "" : before;
    std::vector<T> first;
    for (int seed = 1; seed <= 5; seed++) {
        setenv("JETLAG_EMU_SEED", std::to_string(seed).c_str(), 1);
        const std::vector<T> found = run();
        if (seed == 1) first = found;
        EXPECT_EQ(std::memcmp(found.data(), first.data(), sizeof(T) * first.size()), 0) << "seed " << seed;
    }
    if (before == nullptr) {
        unsetenv("JETLAG_EMU_SEED");
    } else {
        setenv("JETLAG_EMU_SEED", restored.c_str(), 1);
    }
    return first;
}

template <typename T>
std::vector<T> values_for_seeds(int64_t n, const std::function<void(T*)>& run) {
    return for_seeds<T>([&] {
        const Buffer<T> out(std::vector<T>(static_cast<size_t>(n)));
        run(out.data());
        return out.read();
    });
}

Floats integers(TorchGenerator& generator, int64_t n, int64_t low, int64_t high) {
    std::vector<int64_t> values(static_cast<size_t>(n));
    fill_randint(generator, low, high, values);
    return {values.begin(), values.end()};
}

// Rounded to nearest, ties to even, by arithmetic: a value of 8 significant bits.
float round_to_bf16(float x) {
    int exponent;
    const float fraction = std::frexp(x, &exponent);
    return std::ldexp(std::nearbyint(std::ldexp(fraction, 8)), exponent - 8);
}
// Ties away from zero; 11 bits.
float round_to_tf32(float x) {
    int exponent;
    const float fraction = std::frexp(x, &exponent);
    return std::ldexp(std::round(std::ldexp(fraction, 11)), exponent - 11);
}

TEST(Device, Indices) {
    const std::vector<int32_t> out = values_for_seeds<int32_t>(6 * 24, run_indices);
    for (size_t i = 0; i < out.size(); i++) EXPECT_EQ(out[i], static_cast<int32_t>(i));
}

TEST(Device, SharedMemoryAndBarriers) {
    TorchGenerator generator = make_generator(1);
    const Floats x = integers(generator, 5 * 256, -100, 100);
    const FloatBuffer device_x(x);
    const Floats sums = values_for_seeds<float>(5, [&](float* out) { run_block_sums(out, device_x.data(), 5); });
    for (size_t block = 0; block < 5; block++) {
        float want = 0;
        for (size_t i = 0; i < 256; i++) want += x[256 * block + i];
        EXPECT_EQ(sums[block], want);
    }
    const Floats transpose =
        values_for_seeds<float>(32 * 40, [&](float* out) { run_transpose(out, device_x.data(), 32, 32); });
    for (size_t i = 0; i < 32; i++)
        for (size_t j = 0; j < 32; j++) EXPECT_EQ(transpose[32 * j + i], x[32 * i + j]);
    const Floats wide = values_for_seeds<float>(64 * 96, [&](float* out) {
        run_transpose(out, FloatBuffer(integers(generator = make_generator(2), 64 * 96, 0, 1000)).data(), 64, 96);
    });
    const Floats want = integers(generator = make_generator(2), 64 * 96, 0, 1000);
    for (size_t i = 0; i < 64; i++)
        for (size_t j = 0; j < 96; j++) EXPECT_EQ(wide[64 * j + i], want[96 * i + j]);
}

TEST(Device, DynamicSharedMemoryOver48KiB) {
    const int rounds = 20, blocks = 2;
    TorchGenerator generator = make_generator(3);
    const Floats x = integers(generator, 1024 * rounds * blocks, -100, 100);
    const FloatBuffer device_x(x);
    const Floats sums = values_for_seeds<float>(
        blocks, [&](float* out) { run_large_block_sums(out, device_x.data(), blocks, rounds); });
    for (size_t block = 0; block < 2; block++) {
        float want = 0;
        for (size_t i = 0; i < 1024 * 20; i++) want += x[1024 * 20 * block + i];
        EXPECT_EQ(sums[block], want);
    }
}

TEST(Device, Shuffles) {
    const int operands = 40;
    const std::vector<int32_t> out =
        values_for_seeds<int32_t>(4 * 3 * operands * 32, [&](int32_t* o) { run_shuffles(o, operands); });
    const auto at = [&](int kind, int w, int operand, int lane) {
        return out[static_cast<size_t>(((kind * 3 + w) * operands + operand) * 32 + lane)];
    };
    for (int w = 0; w < 3; w++)
        for (int operand = 0; operand < 32; operand++)
            for (int lane = 0; lane < 32; lane++) {
                const int width = 32 >> w, first = lane / width * width, last = first + width - 1;
                EXPECT_EQ(at(0, w, operand, lane), first + operand % width);
                EXPECT_EQ(at(1, w, operand, lane), lane - operand >= first ? lane - operand : lane);
                EXPECT_EQ(at(2, w, operand, lane), lane + operand <= last ? lane + operand : lane);
                EXPECT_EQ(at(3, w, operand, lane), (lane ^ operand) <= last ? lane ^ operand : lane);
            }
    for (int lane = 0; lane < 32; lane++) EXPECT_EQ(at(0, 0, 39, lane), 7);  // operands modulo 32

    const std::vector<double> partial = values_for_seeds<double>(32, run_partial_shuffles);
    for (size_t lane = 0; lane < 32; lane++) EXPECT_EQ(partial[lane], static_cast<double>(lane < 16 ? lane ^ 9 : 31));
}

TEST(Device, Votes) {
    TorchGenerator generator = make_generator(4);
    for (const uint32_t mask : {0xffffffffu, 0x1u, 0x80000000u, 0x0f0f0f0fu, 0x5u})
        for (const int64_t range : {2, 4, 1000}) {
            const std::vector<int32_t> tokens = random_tokens(generator, 64, range);
            const std::vector<uint32_t> x(tokens.begin(), tokens.end());
            const Buffer<uint32_t> device_x(x);
            const std::vector<uint32_t> out =
                values_for_seeds<uint32_t>(5 * 64, [&](uint32_t* o) { run_votes(o, device_x.data(), mask); });
            for (size_t warp = 0; warp < 2; warp++) {
                uint32_t ballot = 0, sum = 0;
                for (size_t lane = 0; lane < 32; lane++)
                    if (mask >> lane & 1) {
                        ballot |= (x[32 * warp + lane] % 3 == 0 ? 1u : 0u) << lane;
                        sum += x[32 * warp + lane];
                    }
                for (size_t lane = 0; lane < 32; lane++) {
                    const size_t thread = 32 * warp + lane;
                    const bool named = mask >> lane & 1;
                    EXPECT_EQ(out[thread], named ? ballot : 0);
                    EXPECT_EQ(out[64 + thread] != 0, named && ballot != 0);
                    EXPECT_EQ(out[128 + thread] != 0, named && ballot == mask);
                    EXPECT_EQ(out[192 + thread], named ? sum : 0);
                    EXPECT_EQ(out[256 + thread], named ? 0 : 1);
                }
            }
        }
}

TEST(Device, WarpSums) {
    TorchGenerator generator = make_generator(5);
    const Floats x = normals(generator, 64);
    const FloatBuffer device_x(x), by_shuffles(128);
    const Floats out =
        values_for_seeds<float>(192, [&](float* o) { run_warp_sums(o, by_shuffles.data(), device_x.data()); });
    EXPECT_TRUE(same_bits(Floats(out.begin() + 64, out.end()), by_shuffles.read()));
    for (size_t warp = 0; warp < 2; warp++) {
        double sum = 0;
        float largest = x[32 * warp];
        for (size_t lane = 0; lane < 32; lane++) {
            sum += x[32 * warp + lane];
            largest = std::max(largest, x[32 * warp + lane]);
        }
        for (size_t lane = 0; lane < 32; lane++) {
            EXPECT_NEAR(out[32 * warp + lane], sum, 1e-6);
            EXPECT_NEAR(out[64 + 32 * warp + lane], sum, 1e-5);
            EXPECT_EQ(out[128 + 32 * warp + lane], largest);
        }
    }
}

// The product by loops, of a and b rounded by `round`.
Doubles multiply(const Floats& d, const Floats& a, const Floats& b, size_t K, size_t products,
                 const std::function<float(float)>& round) {
    Doubles result = to_doubles(d);
    for (size_t p = 0; p < products; p++)
        for (size_t i = 0; i < 16; i++)
            for (size_t j = 0; j < 8; j++)
                for (size_t k = 0; k < K; k++)
                    result[8 * i + j] += static_cast<double>(round(a[p * 16 * K + i * K + k])) *
                                         static_cast<double>(round(b[p * K * 8 + k * 8 + j]));
    return result;
}

TEST(Device, MatrixProducts) {
    TorchGenerator generator = make_generator(6);
    struct Kind {
        const char* name;
        int K;
        void (*run)(float*, const float*, const float*, int);
        float (*round)(float);
    };
    for (const Kind& kind : {Kind{"bf16", 16, run_mma_bf16, round_to_bf16},
                             Kind{"bf16 through shared memory", 16, run_mma_loaded, round_to_bf16},
                             Kind{"tf32", 8, run_mma_tf32, round_to_tf32}})
        for (const int products : {1, 3}) {
            SCOPED_TRACE(fmt::format("{}, {} products", kind.name, products));
            for (const bool whole : {true, false}) {
                // Sums of small integers are exact in any order.
                const auto draw = [&](int n) {
                    return whole ? integers(generator, n, -16, 17) : normals(generator, n);
                };
                const Floats a = draw(products * 16 * kind.K), b = draw(products * kind.K * 8), d = draw(16 * 8);
                const FloatBuffer device_a(a), device_b(b);
                const Floats found = for_seeds<float>([&] {
                    const FloatBuffer device_d(d);
                    kind.run(device_d.data(), device_a.data(), device_b.data(), products);
                    return device_d.read();
                });
                const Doubles want =
                    multiply(d, a, b, static_cast<size_t>(kind.K), static_cast<size_t>(products), kind.round);
                if (whole) {
                    EXPECT_EQ(to_doubles(found), want);
                } else {
                    EXPECT_LT(relative_error(found, want), 1e-6);
                }
            }
        }
}

TEST(Device, LoadMatrix) {
    const std::vector<uint32_t> out = values_for_seeds<uint32_t>(4 * 32 * 4, run_load_matrix);
    for (uint32_t kind = 0; kind < 4; kind++)
        for (uint32_t lane = 0; lane < 32; lane++)
            for (uint32_t i = 0; i < 4; i++) {
                const uint32_t g = lane / 4, t = lane % 4;
                uint32_t low = 64 * i + 8 * g + 2 * t, high = low + 1;
                if (kind % 2 == 1) low = 64 * i + 8 * (2 * t) + g, high = low + 8;
                const uint32_t want = kind >= 2 && i >= 2 ? 0 : high << 16 | low;
                EXPECT_EQ(out[(kind * 32 + lane) * 4 + i], want) << kind << " " << lane << " " << i;
            }
}

TEST(Device, AsynchronousCopies) {
    TorchGenerator generator = make_generator(7);
    const int rows = 37, end = 31;
    const Floats x = normals(generator, (rows + 1) * 64);
    const FloatBuffer device_x(x);
    const Floats out =
        values_for_seeds<float>(rows * 64, [&](float* o) { run_pipeline(o, device_x.data(), rows, end); });
    for (size_t row = 0; row < rows; row++)
        for (size_t i = 0; i < 64; i++) {
            const float above = row < end ? x[64 * row + i] : 0, below = row + 1 < end ? x[64 * (row + 1) + i] : 0;
            EXPECT_EQ(out[64 * row + i], above + below);
        }
    for (const int shift : {0, 1, 7}) {
        const Floats shifted =
            values_for_seeds<float>(64, [&](float* o) { run_copy_shifted(o, device_x.data(), shift); });
        EXPECT_TRUE(same_bits(shifted, Floats(x.begin() + shift, x.begin() + shift + 64)));
    }
}

TEST(Device, Conversions) {
    TorchGenerator generator = make_generator(8);
    Floats x = normals(generator, 2000);
    // Halfway between two bf16, and between two tf32, with the lower one even and odd.
    for (const uint32_t bits : {0x3f808000u, 0x3f818000u, 0x3f808001u, 0x3f817fffu, 0x3f801000u, 0x3f803000u,
                                0x3f800fffu, 0x7f7fffffu, 0x00000000u, 0x00800000u})
        for (const uint32_t sign : {0u, 0x80000000u}) x.push_back(std::bit_cast<float>(bits | sign));
    const auto n = static_cast<int>(x.size());
    const FloatBuffer device_x(x);
    const std::vector<uint32_t> out =
        values_for_seeds<uint32_t>(5 * n, [&](uint32_t* o) { run_conversions(o, device_x.data(), n); });
    for (size_t i = 0; i < x.size(); i++) {
        SCOPED_TRACE(x[i]);
        const uint32_t bf16_bits = std::bit_cast<uint32_t>(round_to_bf16(x[i]));
        EXPECT_EQ(out[i], bf16_bits >> 16);
        EXPECT_EQ(out[x.size() + i], bf16_bits);
        EXPECT_EQ(out[2 * x.size() + i], (bf16_bits ^ 0x80000000u) | bf16_bits >> 16);
        EXPECT_EQ(out[3 * x.size() + i] & 0xffffe000u, std::bit_cast<uint32_t>(round_to_tf32(x[i])));
        EXPECT_EQ(out[4 * x.size() + i], bf16_bits);
    }
    const Floats special = {kInfinity, -kInfinity, kNan};
    const FloatBuffer device_special(special);
    const std::vector<uint32_t> bits =
        values_for_seeds<uint32_t>(15, [&](uint32_t* o) { run_conversions(o, device_special.data(), 3); });
    EXPECT_EQ(bits[0], 0x7f80u);
    EXPECT_EQ(bits[1], 0xff80u);
    EXPECT_TRUE(std::isnan(std::bit_cast<float>(bits[5])));
    EXPECT_EQ(bits[9], 0x7f800000u);
    EXPECT_TRUE(std::isnan(std::bit_cast<float>(bits[11])));
}

TEST(Device, Atomics) {
    TorchGenerator generator = make_generator(9);
    const int n = 1000;
    const std::vector<int32_t> x = random_tokens(generator, n, 1 << 20);
    int32_t sum = 0;
    for (const int32_t value : x) sum += value;
    const TokenBuffer device_x(x);
    const std::vector<int32_t> out = values_for_seeds<int32_t>(4, [&](int32_t* o) {
        const TokenBuffer block_sums(8);
        const Buffer<uint32_t> blocks_done(std::vector<uint32_t>(1));
        run_atomics(o, block_sums.data(), blocks_done.data(), device_x.data(), n);
        EXPECT_EQ(blocks_done.read()[0], 8u);
    });
    EXPECT_EQ(out, (std::vector<int32_t>{sum, *std::max_element(x.begin(), x.end()), 8, sum}));
}

TEST(Device, Launches) {
    EXPECT_EQ(launch_with_threads(1024), "");
    EXPECT_EQ(launch_with_threads(1025).substr(0, 23), "nothing_kernel<1, 2>: i");
    EXPECT_EQ(launch_with_threads(0).substr(0, 23), "nothing_kernel<1, 2>: i");
    EXPECT_EQ(values_for_seeds<double>(4, run_arguments), (std::vector<double>{42, 0.5, 3, 0}));
}

TEST(Device, GraphsRunEachTimeTheyAreLaunched) {
    const FloatBuffer x(Floats(300, 1.0f));
    const float milliseconds = run_graph(x.data(), 3, 300, 2);  // ((1 + 3) * 2 + 3) * 2
    EXPECT_EQ(x.read(), Floats(300, 22.0f));
    EXPECT_GE(milliseconds, 0);
    EXPECT_EQ(allocate_while_capturing(),
              "operation not permitted when stream is capturing; operation failed due to a "
              "previous error during capture");
}

}  // namespace
}  // namespace jetlag::test
