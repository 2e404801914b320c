#include "kernels/emu/runtime.h"

#include <cstdlib>
#include <cstring>

const char* cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaSuccess:
            return "no error";
        case cudaErrorInvalidValue:
            return "invalid argument";
        case cudaErrorMemoryAllocation:
            return "out of memory";
    }
    return "unrecognized error code";
}

cudaError_t cudaGetLastError() {
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
    *stream = nullptr;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) {
    return cudaSuccess;
}

// Aligned as CUDA aligns.
cudaError_t cudaMalloc(void** memory, size_t bytes) {
    *memory = nullptr;
    if (bytes == 0) return cudaSuccess;
    if (posix_memalign(memory, 256, bytes) != 0) return cudaErrorMemoryAllocation;
    std::memset(*memory, 0xff, bytes);
    return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
    free(memory);
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
    std::memset(memory, value, bytes);
    return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
    std::memcpy(to, from, bytes);
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
