// Memory, threads, and what the machine can do.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/machine.cpp"
#include <hwy/foreach_target.h>
// clang-format off
#include <hwy/highway.h>
// clang-format on

#include "kernels/ops.h"

HWY_BEFORE_NAMESPACE();
namespace jetlag {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Multiply-adds on registers alone: twelve independent chains, more than latency times issue width of any CPU so
// far, few enough for sixteen registers. Returns the number of floating-point operations done.
double fma_chains(int64_t rounds, float* sink) {
    const hn::ScalableTag<float> d;
    const auto factor = hn::Set(d, 0.9999f), addend = hn::Set(d, 0.0001f);
    // Different starts, or the compiler would see that all chains are one.
    auto a0 = hn::Set(d, 0.00f), a1 = hn::Set(d, 0.01f), a2 = hn::Set(d, 0.02f), a3 = hn::Set(d, 0.03f);
    auto a4 = hn::Set(d, 0.04f), a5 = hn::Set(d, 0.05f), a6 = hn::Set(d, 0.06f), a7 = hn::Set(d, 0.07f);
    auto a8 = hn::Set(d, 0.08f), a9 = hn::Set(d, 0.09f), a10 = hn::Set(d, 0.10f), a11 = hn::Set(d, 0.11f);
    for (int64_t i = 0; i < rounds; i++) {
        a0 = hn::MulAdd(a0, factor, addend);
        a1 = hn::MulAdd(a1, factor, addend);
        a2 = hn::MulAdd(a2, factor, addend);
        a3 = hn::MulAdd(a3, factor, addend);
        a4 = hn::MulAdd(a4, factor, addend);
        a5 = hn::MulAdd(a5, factor, addend);
        a6 = hn::MulAdd(a6, factor, addend);
        a7 = hn::MulAdd(a7, factor, addend);
        a8 = hn::MulAdd(a8, factor, addend);
        a9 = hn::MulAdd(a9, factor, addend);
        a10 = hn::MulAdd(a10, factor, addend);
        a11 = hn::MulAdd(a11, factor, addend);
    }
    a0 = hn::Add(hn::Add(hn::Add(a0, a1), hn::Add(a2, a3)), hn::Add(hn::Add(a4, a5), hn::Add(a6, a7)));
    a0 = hn::Add(hn::Add(a0, a8), hn::Add(a9, hn::Add(a10, a11)));
    *sink = hn::GetLane(a0);
    return static_cast<double>(rounds) * 12 * 2 * static_cast<double>(hn::Lanes(d));
}

const char* target_name() {
    return hwy::TargetName(HWY_TARGET);
}

}  // namespace HWY_NAMESPACE
}  // namespace jetlag
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <hwy/aligned_allocator.h>
#include <hwy/targets.h>
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>

namespace jetlag {

HWY_EXPORT(fma_chains);
HWY_EXPORT(target_name);

void* device_alloc(size_t bytes) {
    void* memory = hwy::AllocateAlignedBytes(bytes, nullptr, nullptr);
    if (memory == nullptr) throw std::bad_alloc();
    std::memset(memory, 0, bytes);
    return memory;
}
void device_free(void* memory) {
    hwy::FreeAlignedBytes(memory, nullptr, nullptr);
}
void device_zero(void* memory, size_t bytes) {
    if (bytes > 0) std::memset(memory, 0, bytes);
}
void copy_to_device(void* device, const void* host, size_t bytes) {
    if (bytes > 0) std::memcpy(device, host, bytes);
}
void copy_to_host(void* host, const void* device, size_t bytes) {
    if (bytes > 0) std::memcpy(host, device, bytes);
}

void device_wait() {}

void run_graph(Graph& graph, const std::function<void()>& ops) {
    graph.runs++;
    ops();
}

const char* backend_name() {
    return "cpu";
}
const char* simd_target_name() {
    return HWY_DYNAMIC_DISPATCH(target_name)();
}
int thread_count() {
    return omp_get_max_threads();
}
void set_thread_count(int count) {
    omp_set_num_threads(std::max(1, count));
}

int64_t forward_rows() {
    return 1024 * thread_count();
}

double measure_peak_flops() {
    double best = 0;
    const int64_t rounds = 1 << 20;
    for (int attempt = 0; attempt < 5; attempt++) {
        double operations = 0;
        const auto start = std::chrono::steady_clock::now();
#pragma omp parallel reduction(+ : operations)
        {
            volatile float keep;
            float sink;
            operations += HWY_DYNAMIC_DISPATCH(fma_chains)(rounds, &sink);
            keep = sink;
            (void)keep;
        }
        const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
        best = std::max(best, operations / elapsed.count());
    }
    return best;
}

std::vector<std::pair<const char*, double>> measure_peaks() {
    struct Restore {
        ~Restore() { hwy::SetSupportedTargetsForTest(0); }
    } restore;
    std::vector<std::pair<const char*, double>> peaks;
    for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
        hwy::SetSupportedTargetsForTest(target);
        peaks.push_back({hwy::TargetName(target), measure_peak_flops()});
        hwy::SetSupportedTargetsForTest(0);
    }
    return peaks;
}

double measure_copy_bandwidth(size_t bytes) {
    const DeviceArray<std::byte> from(static_cast<int64_t>(bytes)), to(static_cast<int64_t>(bytes));
    double best = 0;
    for (int attempt = 0; attempt < 5; attempt++) {
        const auto start = std::chrono::steady_clock::now();
#pragma omp parallel
        {
            const size_t threads = static_cast<size_t>(omp_get_num_threads()),
                         t = static_cast<size_t>(omp_get_thread_num());
            const size_t begin = bytes * t / threads, end = bytes * (t + 1) / threads;
            std::memcpy(to.data + begin, from.data + begin, end - begin);
        }
        const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
        best = std::max(best, 2 * static_cast<double>(bytes) / elapsed.count());
    }
    return best;
}

}  // namespace jetlag
#endif
