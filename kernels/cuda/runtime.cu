// Memory, the stream, and what the device can do.
#include "kernels/cuda/runtime.h"

#include <omp.h>

#include <algorithm>
#include <chrono>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/ops.h"

namespace jetlag {

void check_cuda(cudaError_t error, const char* what) {
    if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

// Ops run in the order in which they are called, on one stream; only what the host reads is waited for.
cudaStream_t device_stream() {
    static const cudaStream_t stream = [] {
        cudaStream_t made;
        check_cuda(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking), "the GPU");
        return made;
    }();
    return stream;
}

void* device_alloc(size_t bytes) {
    const cudaStream_t stream = device_stream();
    void* memory = nullptr;
    const cudaError_t error = cudaMalloc(&memory, bytes);
    if (error == cudaErrorMemoryAllocation) {
        cudaGetLastError();  // or a later launch would report it
        throw std::bad_alloc();
    }
    check_cuda(error, "cudaMalloc");
    check_cuda(cudaMemsetAsync(memory, 0, bytes, stream), "cudaMemset");
    return memory;
}

void device_free(void* memory) {
    cudaFree(memory);  // waits for the device; fails only where an earlier operation failed, or at the program's end
}

void device_zero(void* memory, size_t bytes) {
    if (bytes > 0) check_cuda(cudaMemsetAsync(memory, 0, bytes, device_stream()), "cudaMemset");
}

void copy_to_device(void* device, const void* host, size_t bytes) {
    if (bytes == 0) return;
    check_cuda(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, device_stream()), "copy to the device");
    // The host's memory may change afterwards, and be gone.
    device_wait();
}

void copy_to_host(void* host, const void* device, size_t bytes) {
    if (bytes == 0) return;
    check_cuda(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, device_stream()), "copy to the host");
    device_wait();
}

void device_wait() {
    check_cuda(cudaStreamSynchronize(device_stream()), "the device's work");
}

// The graph of what `ops` launches. Nothing of it is done yet.
static std::shared_ptr<void> capture(const std::function<void()>& ops) {
    check_cuda(cudaStreamBeginCapture(device_stream(), cudaStreamCaptureModeThreadLocal), "capture of a graph");
    cudaGraph_t graph = nullptr;
    try {
        ops();
    } catch (...) {
        cudaStreamEndCapture(device_stream(), &graph);
        if (graph != nullptr) cudaGraphDestroy(graph);
        cudaGetLastError();  // or a later launch would report it
        throw;
    }
    check_cuda(cudaStreamEndCapture(device_stream(), &graph), "capture of a graph");
    cudaGraphExec_t runnable = nullptr;
    const cudaError_t error = cudaGraphInstantiate(&runnable, graph, 0);
    cudaGraphDestroy(graph);
    check_cuda(error, "capture of a graph");
    return {runnable, [](void* made) { cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(made)); }};
}

void run_graph(Graph& graph, const std::function<void()>& ops) {
    if (graph.runs++ == 0) return ops();
    if (graph.captured == nullptr) graph.captured = capture(ops);
    check_cuda(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph.captured.get()), device_stream()),
               "launch of a graph");
}

// Grows in steps of twice the size. What was given out before is kept: kernels that were captured in a graph hold its
// address.
void* device_scratch(size_t bytes) {
    static std::vector<void*> given;
    static size_t size = 0;
    if (bytes > size) {
        const size_t wanted = std::max(bytes, std::max<size_t>(2 * size, 1 << 20));
        given.push_back(device_alloc(wanted));
        size = wanted;
    }
    return given.empty() ? nullptr : given.back();
}

// ---------------------------------------------------------------------------------------------------------------
// The machine

static const cudaDeviceProp& device_properties() {
    static const cudaDeviceProp properties = [] {
        int device = 0;
        cudaDeviceProp found;
        check_cuda(cudaGetDevice(&device), "the GPU");
        check_cuda(cudaGetDeviceProperties(&found, device), "the GPU");
        return found;
    }();
    return properties;
}

const char* backend_name() {
    return kBackendName;
}

const char* simd_target_name() {
    static const std::string name = std::string(device_properties().name) + " sm_" +
                                    std::to_string(device_properties().major) +
                                    std::to_string(device_properties().minor);
    return name.c_str();
}

int64_t forward_rows() {
    return 32768;
}

// The host's threads: a kernel's own follow from its sizes.
int thread_count() {
    return omp_get_max_threads();
}
void set_thread_count(int count) {
    omp_set_num_threads(std::max(1, count));
}

// Multiply-adds on registers alone: eight independent chains in each thread, more than a multiprocessor's pipelines
// need with all its warps. The sums are written so that nothing can be left out.
inline constexpr int kChains = 8;

__global__ void __launch_bounds__(kThreads) fma_chains_kernel(float* sink, int64_t rounds) {
    float a[kChains];
    for (int i = 0; i < kChains; i++) a[i] = 0.01f * static_cast<float>(i);
    for (int64_t round = 0; round < rounds; round++)
        for (int i = 0; i < kChains; i++) a[i] = fmaf(a[i], 0.9999f, 0.0001f);
    float sum = 0;
    for (int i = 0; i < kChains; i++) sum += a[i];
    sink[blockIdx.x * kThreads + threadIdx.x] = sum;
}

static double seconds_of(const auto& work) {
    device_wait();
    const auto start = std::chrono::steady_clock::now();
    work();
    device_wait();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double measure_peak_flops() {
    const unsigned blocks = 16 * static_cast<unsigned>(device_properties().multiProcessorCount);
    const DeviceArray<float> sink(static_cast<int64_t>(blocks) * kThreads);
    int64_t rounds = 8;
    const auto run = [&] {
        return seconds_of([&] { launch(fma_chains_kernel, blocks, kThreads, 0, device_stream(), sink.data, rounds); });
    };
    // Long enough that a launch's own time does not count.
    double best = run();
    while (best < 0.004) {
        rounds *= 2;
        best = run();
    }
    for (int attempt = 0; attempt < 5; attempt++) best = std::min(best, run());
    return 2.0 * kChains * static_cast<double>(rounds) * static_cast<double>(sink.size) / best;
}

std::vector<std::pair<const char*, double>> measure_peaks() {
    return {{simd_target_name(), measure_peak_flops()}};
}

double measure_copy_bandwidth(size_t bytes) {
    const DeviceArray<std::byte> from(static_cast<int64_t>(bytes)), to(static_cast<int64_t>(bytes));
    double best = 0;
    for (int attempt = 0; attempt < 5; attempt++) {
        const double seconds = seconds_of([&] {
            check_cuda(cudaMemcpyAsync(to.data, from.data, bytes, cudaMemcpyDeviceToDevice, device_stream()), "copy");
        });
        best = std::max(best, 2 * static_cast<double>(bytes) / seconds);
    }
    return best;
}

}  // namespace jetlag
