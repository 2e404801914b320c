// The calls of CUDA's runtime that kernels/cuda/ makes from the host, on a CPU. Device memory is memory, and everything
// is done when the call returns, unless it is captured in a graph: then each time that the graph is launched. Memory is
// filled with NaNs at first, as nothing promises zeros. Included by kernels/emu/emu.h alone.
#pragma once

#include <cstddef>
#include <functional>

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorStreamCaptureUnsupported = 900,
    cudaErrorStreamCaptureInvalidated = 901,
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2, cudaMemcpyDeviceToDevice = 3 };
inline constexpr unsigned cudaStreamNonBlocking = 1;

struct cudaDeviceProp {
    char name[256];
    int major, minor, multiProcessorCount;
};

struct CUstream_st;
using cudaStream_t = CUstream_st*;

struct CUevent_st;
using cudaEvent_t = CUevent_st*;

enum cudaStreamCaptureMode {
    cudaStreamCaptureModeGlobal = 0,
    cudaStreamCaptureModeThreadLocal = 1,
    cudaStreamCaptureModeRelaxed = 2
};
struct CUgraph_st;
using cudaGraph_t = CUgraph_st*;
struct CUgraphExec_st;
using cudaGraphExec_t = CUgraphExec_st*;

const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaMalloc(void** memory, size_t bytes);
cudaError_t cudaFree(void* memory);
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream);
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream);

cudaError_t cudaEventCreate(cudaEvent_t* event);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end);

// While a stream is captured nothing may wait for it, and no memory be had: cudaErrorStreamCaptureUnsupported, and then
// there is no graph.
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* runnable, cudaGraph_t graph, unsigned long long flags = 0);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphLaunch(cudaGraphExec_t runnable, cudaStream_t stream);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t runnable);

cudaError_t cudaGetDevice(int* device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device);

namespace jetlag {
inline constexpr const char* kBackendName = "emu";
}

namespace jetlag::emu {
// Does the work, or adds it to the graph in which the stream is captured. Everything that the device would do goes this
// way: kernels, copies, products.
void submit(cudaStream_t stream, std::function<void()> work);
}  // namespace jetlag::emu
