#include "kernels/emu/runtime.h"

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

using Clock = std::chrono::steady_clock;

struct CUevent_st {
    Clock::time_point time;
};
struct CUgraph_st {
    std::vector<std::function<void()>> work;
};
struct CUgraphExec_st {
    std::vector<std::function<void()>> work;
};
struct CUstream_st {
    CUgraph_st* graph;  // in which it is captured
};

// How many streams are captured, and whether something was done meanwhile that must not be.
static int captures = 0;
static bool invalidated = false;

// For what a capture does not allow.
static cudaError_t unless_capturing() {
    if (captures == 0) return cudaSuccess;
    invalidated = true;
    return cudaErrorStreamCaptureUnsupported;
}

void jetlag::emu::submit(cudaStream_t stream, std::function<void()> work) {
    if (stream != nullptr && stream->graph != nullptr) {
        stream->graph->work.push_back(std::move(work));
    } else {
        work();
    }
}

const char* cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaSuccess:
            return "no error";
        case cudaErrorInvalidValue:
            return "invalid argument";
        case cudaErrorMemoryAllocation:
            return "out of memory";
        case cudaErrorStreamCaptureUnsupported:
            return "operation not permitted when stream is capturing";
        case cudaErrorStreamCaptureInvalidated:
            return "operation failed due to a previous error during capture";
    }
    return "unrecognized error code";
}

cudaError_t cudaGetLastError() {
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
    *stream = new CUstream_st{nullptr};
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    delete stream;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) {
    return unless_capturing();
}

// Aligned as CUDA aligns.
cudaError_t cudaMalloc(void** memory, size_t bytes) {
    *memory = nullptr;
    if (const cudaError_t error = unless_capturing(); error != cudaSuccess) return error;
    if (bytes == 0) return cudaSuccess;
    if (posix_memalign(memory, 256, bytes) != 0) return cudaErrorMemoryAllocation;
    std::memset(*memory, 0xff, bytes);
    return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
    if (const cudaError_t error = unless_capturing(); error != cudaSuccess) return error;
    std::free(memory);
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
    jetlag::emu::submit(stream, [=] { std::memset(memory, value, bytes); });
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
    jetlag::emu::submit(stream, [=] { std::memcpy(to, from, bytes); });
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
    *event = new CUevent_st{};
    return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete event;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    jetlag::emu::submit(stream, [=] { event->time = Clock::now(); });
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t) {
    return unless_capturing();
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
    *milliseconds = std::chrono::duration<float, std::milli>(end->time - start->time).count();
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    if (stream == nullptr || stream->graph != nullptr) return cudaErrorStreamCaptureUnsupported;
    stream->graph = new CUgraph_st;
    captures++;
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    if (stream == nullptr || stream->graph == nullptr) return cudaErrorInvalidValue;
    *graph = std::exchange(stream->graph, nullptr);
    captures--;
    if (!std::exchange(invalidated, false)) return cudaSuccess;
    delete std::exchange(*graph, nullptr);
    return cudaErrorStreamCaptureInvalidated;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* runnable, cudaGraph_t graph, unsigned long long) {
    *runnable = new CUgraphExec_st{graph->work};
    return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete graph;
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t runnable, cudaStream_t stream) {
    if (stream != nullptr && stream->graph != nullptr) return cudaErrorStreamCaptureUnsupported;
    for (const std::function<void()>& work : runnable->work) work();
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t runnable) {
    delete runnable;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
    *device = 0;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
    *properties = {.name = "emulated", .major = 8, .minor = 0, .multiProcessorCount = 2};
    return cudaSuccess;
}
