// The position tables, computed on the device in double by the formulas of kernels/position/ and stored as float: at
// position 32768 an angle in float is wrong by 1e-3. A host's function pointer means nothing to a device, so there is a
// kernel for each module, with the module's formulas as template arguments; at run time the module is looked up in the
// table of names. The work is O(T) per head or pair, small beside attention's O(T^2).
//
// A head's coefficients are computed by one thread of each block that needs them. The gradient of a lag-bias table is
// summed per (head, chunk of lags): each thread adds up the lags of its own in shared memory, then each coefficient is
// summed over the threads in order; a second kernel adds up the chunks in order and goes on to the parameters. What a
// lag costs, a few hundred double-precision operations, bounds both.
#include <stdexcept>
#include <string>
#include <type_traits>

#include "kernels/cuda/runtime.h"
#include "kernels/ops.h"
#include "kernels/position/registry.h"

namespace jetlag {

// ---------------------------------------------------------------------------------------------------------------
// From a module at run time to its formulas as constants

// Whether a constant is nullptr. GCC does not take `p != nullptr` as a constant under -fsanitize=undefined.
template <auto p>
inline constexpr bool kIsNull =
    std::is_same_v<std::integral_constant<decltype(p), p>, std::integral_constant<decltype(p), nullptr>>;

// run.operator()<I>() for the first entry I of the table of names that `has` the module.
template <size_t I = 0>
void with_entry(const char* name, const auto& has, const auto& run) {
    if constexpr (I == std::size(kMethods)) {
        throw std::runtime_error(std::string("position module ") + name + ": no method of the table of names has it");
    } else {
        if (!has(kMethods[I])) return with_entry<I + 1>(name, has, run);
        run.template operator()<I>();
    }
}

// Calls run.operator()<module>() with the module as a constant.
void with_rotary_module(const RotaryModule* wanted, const auto& run) {
    with_entry(
        wanted->name, [&](const Method& method) { return method.rotary == wanted; },
        [&]<size_t I>() {
            if constexpr (!kIsNull<kMethods[I].rotary>) run.template operator()<kMethods[I].rotary>();
        });
}
void with_lag_bias_module(const LagBiasModule* wanted, const auto& run) {
    with_entry(
        wanted->name, [&](const Method& method) { return method.lag_bias == wanted; },
        [&]<size_t I>() {
            if constexpr (!kIsNull<kMethods[I].lag_bias>) run.template operator()<kMethods[I].lag_bias>();
        });
}

// ---------------------------------------------------------------------------------------------------------------
// Rotary

// A thread has a position and a pair. shear: nullptr if the module has none.
template <auto rotation_of, auto shear_of>
__global__ void __launch_bounds__(kThreads) rotary_table_kernel(RotaryTable table, RotarySpec spec, int64_t T) {
    const int64_t P = table.pairs, i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (i >= T * P) return;
    const int64_t t = i / P, p = i % P;
    const Rotation rotation = rotation_of(spec, T, t, p);
    const double cosine = cos(rotation.angle), sine = sin(rotation.angle);
    table.query_cos[i] = static_cast<float>(rotation.query_gain * cosine);
    table.query_sin[i] = static_cast<float>(rotation.query_gain * sine);
    table.key_cos[i] = static_cast<float>(rotation.key_gain * cosine);
    table.key_sin[i] = static_cast<float>(rotation.key_gain * sine);
    if constexpr (!kIsNull<shear_of>)
        if (table.shear != nullptr && p == 0) table.shear[t] = static_cast<float>(shear_of(spec, T, t));
}

void rotary_table(const RotaryTable& table, const RotarySpec& spec, int64_t T) {
    if (table.pairs == 0) return;
    with_rotary_module(spec.module, [&]<const RotaryModule * module>() {
        constexpr auto rotation = module->rotation;
        constexpr auto shear = module->shear;
        launch(rotary_table_kernel<rotation, shear>, blocks_for(T * table.pairs, kThreads), kThreads, 0,
               device_stream(), table, spec, T);
    });
}

// ---------------------------------------------------------------------------------------------------------------
// Lag bias

template <auto coefficients_of, auto bias_of>
__global__ void __launch_bounds__(kThreads)
    lag_bias_table_kernel(float* table, LagBiasSpec spec, const float* parameters, int64_t T) {
    double* c = dynamic_shared<double>();
    const int64_t h = blockIdx.y, d = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (threadIdx.x == 0) coefficients_of(spec, parameters, h, c);
    __syncthreads();
    if (d >= T) return;
    table[h * T + d] =
        d == 0 && spec.strict_mask ? -INFINITY : static_cast<float>(bias_of(spec, c, static_cast<double>(d)));
}

// The table without a module.
__global__ void __launch_bounds__(kThreads) mask_table_kernel(float* table, LagBiasSpec spec, int64_t T) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (i < spec.heads * T) table[i] = i % T == 0 && spec.strict_mask ? -INFINITY : 0.0f;
}

void lag_bias_table(float* table, const LagBiasSpec& spec, const float* parameters, int64_t T) {
    if (spec.module == nullptr)
        return launch(mask_table_kernel, blocks_for(spec.heads * T, kThreads), kThreads, 0, device_stream(), table,
                      spec, T);
    const size_t n = static_cast<size_t>(spec.module->coefficient_count(spec));
    with_lag_bias_module(spec.module, [&]<const LagBiasModule * module>() {
        constexpr auto coefficients = module->coefficients;
        constexpr auto bias = module->bias;
        launch(lag_bias_table_kernel<coefficients, bias>,
               dim3(blocks_for(T, kThreads), static_cast<unsigned>(spec.heads)), kThreads, n * sizeof(double),
               device_stream(), table, spec, parameters, T);
    });
}

// partial: (H, chunks, n), n coefficients. Sums of neighbouring threads lie an odd number of doubles apart, in
// different banks.
template <auto coefficients_of, auto bias_gradient_of>
__global__ void __launch_bounds__(kWarp)
    lag_bias_partial_gradient_kernel(double* partial, const float* dtable, LagBiasSpec spec, const float* parameters,
                                     int64_t n, int64_t T) {
    const int64_t stride = n | 1, h = blockIdx.y, chunks = gridDim.x;
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    double* c = dynamic_shared<double>();  // (n)
    double* sums = c + n;                  // (threads, stride)
    double* sum = sums + thread * stride;
    if (thread == 0) coefficients_of(spec, parameters, h, c);
    for (int64_t i = 0; i < n; i++) sum[i] = 0;
    __syncthreads();
    const int64_t end = chunk_start(blockIdx.x + 1, chunks, T);
    for (int64_t d = chunk_start(blockIdx.x, chunks, T) + thread; d < end; d += threads)
        if (d > 0 || !spec.strict_mask) bias_gradient_of(spec, c, static_cast<double>(d), dtable[h * T + d], sum);
    __syncthreads();
    for (int64_t i = thread; i < n; i += threads) {
        double total = 0;
        for (int j = 0; j < threads; j++) total += sums[j * stride + i];
        partial[(h * chunks + blockIdx.x) * n + i] = total;
    }
}

template <auto coefficients_of, auto coefficients_gradient_of>
__global__ void __launch_bounds__(kThreads)
    lag_bias_gradient_kernel(float* dparameters, const double* partial, LagBiasSpec spec, const float* parameters,
                             int64_t n, int64_t chunks) {
    double* c = dynamic_shared<double>();  // (n)
    double* dc = c + n;                    // (n)
    const int64_t h = blockIdx.x;
    for (int64_t i = threadIdx.x; i < n; i += kThreads) {
        double total = 0;
        for (int64_t chunk = 0; chunk < chunks; chunk++) total += partial[(h * chunks + chunk) * n + i];
        dc[i] = total;
    }
    __syncthreads();
    if (threadIdx.x > 0) return;
    coefficients_of(spec, parameters, h, c);
    coefficients_gradient_of(spec, parameters, h, c, dc, dparameters);
}

void lag_bias_table_backward(float* dparameters, const float* dtable, const LagBiasSpec& spec, const float* parameters,
                             int64_t T) {
    // Fewer threads in a block where their sums would not fit its shared memory.
    constexpr int64_t kSharedDoubles = 48 * 1024 / sizeof(double);
    const int64_t H = spec.heads, n = spec.module->coefficient_count(spec);
    const int64_t fitting = n > 0 ? kSharedDoubles / (n + 1) - 1 : kWarp;
    const int64_t threads = fitting < 1 ? 1 : (fitting > kWarp ? kWarp : fitting);
    const int64_t chunks = chunk_count(T, kWarp, 64);
    double* partial = static_cast<double*>(device_scratch(static_cast<size_t>(H * chunks * n) * sizeof(double)));
    with_lag_bias_module(spec.module, [&]<const LagBiasModule * module>() {
        constexpr auto coefficients = module->coefficients;
        constexpr auto bias_gradient = module->bias_gradient;
        constexpr auto coefficients_gradient = module->coefficients_gradient;
        launch(lag_bias_partial_gradient_kernel<coefficients, bias_gradient>,
               dim3(static_cast<unsigned>(chunks), static_cast<unsigned>(H)), static_cast<unsigned>(threads),
               static_cast<size_t>(n + threads * (n | 1)) * sizeof(double), device_stream(), partial, dtable, spec,
               parameters, n, T);
        launch(lag_bias_gradient_kernel<coefficients, coefficients_gradient>, static_cast<unsigned>(H), kThreads,
               static_cast<size_t>(2 * n) * sizeof(double), device_stream(), dparameters, partial, spec, parameters, n,
               chunks);
    });
}

}  // namespace jetlag
