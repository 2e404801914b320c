// Helpers of the kernel and model tests: device memory with a guard behind it, random values, comparisons, and loops
// over SIMD targets and thread counts.
#pragma once

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "kernels/ops.h"
#include "models/model.h"
#include "src/random.h"

namespace jetlag::test {

using Floats = std::vector<float>;
using Doubles = std::vector<double>;

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr double kRounding = 0x1p-24;  // the largest relative error of one float rounding
// What the rounding of a result to `real` adds to its relative error, where that is more than a float's.
inline constexpr double kRealRounding = kHalfPrecision ? 0x1p-8 : 0;
// The largest relative error of an operand of a product, where it is rounded for it.
inline constexpr double kOperandRounding = kTf32 ? 0x1p-11 : 0;

// A tolerance in float, or in bf16. In tf32, operands of products are rounded an eighth as much as in bf16, and nothing
// else is rounded: an eighth of what bf16 is allowed.
constexpr double by_precision(double in_float, double in_bf16) {
    return kHalfPrecision ? in_bf16 : kTf32 ? in_bf16 / 8 : in_float;
}

// The values in device memory, which the host cannot read itself.
template <typename T>
std::vector<T> read_device(const T* device, int64_t n) {
    std::vector<T> values(static_cast<size_t>(n));
    copy_to_host(values.data(), device, values.size() * sizeof(T));
    return values;
}
// bf16 as floats.
inline Floats read_device(const bf16* device, int64_t n) {
    Floats values;
    for (const bf16 value : read_device<bf16>(device, n)) values.push_back(to_float(value));
    return values;
}
template <typename T>
std::vector<T> read_device(const DeviceArray<T>& array) {
    return read_device(array.data, array.size);
}

// Changes the first n values in device memory.
template <typename T>
void change_device(T* device, int64_t n, const std::function<void(std::vector<T>&)>& change) {
    std::vector<T> values = read_device(device, n);
    change(values);
    copy_to_device(device, values.data(), static_cast<size_t>(n) * sizeof(T));
}

// Device memory of n values of T. What is not given is NaN at first, so that a value that an op forgets to write, or
// reads before it is written, shows. Behind the values lies a guard that read() finds unchanged.
template <typename T>
struct Buffer {
    static constexpr int64_t kGuard = 64;
    int64_t size;
    DeviceArray<T> memory;

    explicit Buffer(const std::vector<T>& values) : size(std::ssize(values)), memory(size + kGuard) {
        std::vector<T> all = values;
        all.resize(values.size() + kGuard, guard());
        copy_to_device(memory.data, all.data(), all.size() * sizeof(T));
    }
    explicit Buffer(int64_t n) : Buffer(std::vector<T>(static_cast<size_t>(n), static_cast<T>(kNan))) {}

    static T guard() { return static_cast<T>(-77); }
    T* data() const { return memory.data; }
    std::vector<T> read() const {
        std::vector<T> all(static_cast<size_t>(size + kGuard));
        copy_to_host(all.data(), memory.data, all.size() * sizeof(T));
        for (int64_t i = size; i < size + kGuard; i++)
            EXPECT_EQ(all[static_cast<size_t>(i)], guard()) << "written " << i - size << " values behind the end";
        all.resize(static_cast<size_t>(size));
        return all;
    }
};
using FloatBuffer = Buffer<float>;
using TokenBuffer = Buffer<int32_t>;

// The nearest value that `real` holds.
inline float rounded(float x) {
    return to_float(to_real(x));
}
inline Floats rounded(Floats values) {
    for (float& value : values) value = rounded(value);
    return values;
}

// Activations: `real` on the device, floats here.
#ifdef JETLAG_BF16
struct RealBuffer {
    Buffer<uint16_t> bits;

    explicit RealBuffer(const Floats& values) : bits(bits_of(values)) {}
    explicit RealBuffer(int64_t n) : RealBuffer(Floats(static_cast<size_t>(n), kNan)) {}

    static std::vector<uint16_t> bits_of(const Floats& values) {
        std::vector<uint16_t> bits;
        for (const float value : values) bits.push_back(to_real(value).bits);
        return bits;
    }
    real* data() const { return reinterpret_cast<real*>(bits.data()); }
    Floats read() const {
        bits.read();
        return read_device(data(), bits.size);
    }
};
#else
using RealBuffer = FloatBuffer;
#endif

// n normal values, rounded to `real`.
inline Floats normals(TorchGenerator& generator, int64_t n, float deviation = 1, float mean = 0) {
    Floats values(static_cast<size_t>(n));
    fill_normal(generator, values);
    for (float& value : values) value = rounded(mean + deviation * value);
    return values;
}

// n tokens in [0, V).
inline std::vector<int32_t> random_tokens(TorchGenerator& generator, int64_t n, int64_t V) {
    std::vector<int64_t> values(static_cast<size_t>(n));
    fill_randint(generator, 0, V, values);
    return {values.begin(), values.end()};
}

inline Doubles to_doubles(const Floats& values) {
    return {values.begin(), values.end()};
}

template <typename Values>
double norm(const Values& values) {
    double sum = 0;
    for (const double value : values) sum += value * value;
    return std::sqrt(sum);
}

// |found - want|, the Euclidean norm; NaN if the sizes differ, so that no bound holds.
inline double distance(const Floats& found, const Doubles& want) {
    if (found.size() != want.size()) return kNan;
    double sum = 0;
    for (size_t i = 0; i < want.size(); i++) sum += (found[i] - want[i]) * (found[i] - want[i]);
    return std::sqrt(sum);
}

// What rounding the operands adds to a product of matrices with k terms in each sum, the Euclidean norm: independent
// errors of all terms, each of up to two roundings.
inline double product_noise(const Floats& a, const Floats& b, int64_t k) {
    return 2 * kOperandRounding * norm(a) * norm(b) / std::sqrt(static_cast<double>(k));
}

// distance / |want|.
inline double relative_error(const Floats& found, const Doubles& want) {
    return distance(found, want) / norm(want);
}

inline bool same_bits(const Floats& a, const Floats& b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

// Runs `body` once for every SIMD target that this binary holds and this CPU has, with the ops dispatched to it. Other
// backends have one target.
inline void for_each_simd_target(const std::function<void()>& body) {
    if (std::string(backend_name()) != "cpu") return body();
    struct Restore {
        ~Restore() { hwy::SetSupportedTargetsForTest(0); }
    } restore;
    for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
        SCOPED_TRACE(hwy::TargetName(target));
        hwy::SetSupportedTargetsForTest(target);
        EXPECT_STREQ(simd_target_name(), hwy::TargetName(target));
        body();
        hwy::SetSupportedTargetsForTest(0);
    }
}

// So many threads until the end of the scope.
struct ThreadCount {
    int before = thread_count();
    explicit ThreadCount(int count) { set_thread_count(count); }
    ~ThreadCount() { set_thread_count(before); }
    ThreadCount(const ThreadCount&) = delete;
};

// The emulator's seed until the end of the scope; other backends do not look at it.
struct EmulatorSeed {
    const char* before = std::getenv("JETLAG_EMU_SEED");
    const std::string restored = before != nullptr ? before : "";
    explicit EmulatorSeed(int seed) { setenv("JETLAG_EMU_SEED", std::to_string(seed).c_str(), 1); }
    ~EmulatorSeed() {
        if (before != nullptr)
            setenv("JETLAG_EMU_SEED", restored.c_str(), 1);
        else
            unsetenv("JETLAG_EMU_SEED");
    }
    EmulatorSeed(const EmulatorSeed&) = delete;
};

// Runs `op` with 1 to 4 threads; what it returns must be the same bit for bit.
inline void expect_same_for_every_thread_count(const std::function<std::vector<Floats>()>& op) {
    const ThreadCount one(1);
    const std::vector<Floats> want = op();
    for (int threads = 2; threads <= 4; threads++) {
        set_thread_count(threads);
        // In the emulator the threads of a block also run in another order each time.
        const EmulatorSeed seed(threads);
        EXPECT_EQ(thread_count(), threads);
        const std::vector<Floats> found = op();
        ASSERT_EQ(found.size(), want.size());
        for (size_t i = 0; i < want.size(); i++)
            EXPECT_TRUE(same_bits(found[i], want[i])) << "result " << i << " with " << threads << " threads";
    }
}

// The model of a method with parameters drawn from a fixed seed. `overrides` are KEY=VALUEs.
inline Model make_small_model(const std::string& method, const std::vector<std::string>& overrides) {
    std::vector<Setting> settings;
    add_overrides(settings, {"model.position=" + method});
    add_overrides(settings, overrides);
    Model model = make_model(model_shape(make_config(settings)));
    TorchGenerator generator = make_generator(3);
    initialize_model(model, generator);
    return model;
}

// Changes the parameters whose names contain `part`.
inline void change_parameters(Model& model, const std::string& part, const std::function<void(Floats&)>& change) {
    for (const ParameterInfo& info : model.layout)
        if (info.name.find(part) != std::string::npos)
            change_device<float>(model.parameters.data + info.offset, info.size, change);
}

}  // namespace jetlag::test
