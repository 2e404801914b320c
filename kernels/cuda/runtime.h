// What the ops share besides device.h: checked runtime calls, scratch memory, and how work is split.
#pragma once

#include "kernels/cuda/device.h"

namespace jetlag {

// Throws std::runtime_error "WHAT: what CUDA says" unless it says success.
void check_cuda(cudaError_t error, const char* what);

// At least so many bytes of device memory, aligned as device_alloc aligns, until the next call: ops of one stream may
// follow each other in the same memory.
void* device_scratch(size_t bytes);

inline constexpr int kWarpsPerBlock = 8;
inline constexpr int kThreads = kWarpsPerBlock * kWarp;  // of a block, where nothing else is said

// Elementwise kernels: a block has a tile of the values, a thread kValues of them, kThreads apart, so that a warp's
// accesses are whole cache lines at any alignment and a thread has several on the way.
inline constexpr int kValues = 4;
inline constexpr int64_t kTile = kThreads * kValues;

__device__ __forceinline__ int64_t tile_begin() {
    return static_cast<int64_t>(blockIdx.x) * kTile + threadIdx.x;
}

// The number of blocks that have `per_block` of n things each.
inline unsigned blocks_for(int64_t n, int64_t per_block) {
    return static_cast<unsigned>((n + per_block - 1) / per_block);
}

// Sums over n things are split into at most `most` chunks of at least `length`, whose partial sums are then added in
// order: as many for the same n on any device.
inline int64_t chunk_count(int64_t n, int64_t length, int64_t most) {
    const int64_t chunks = (n + length - 1) / length;
    return chunks < 1 ? 1 : (chunks > most ? most : chunks);
}
__host__ __device__ __forceinline__ int64_t chunk_start(int64_t chunk, int64_t chunks, int64_t n) {
    return n * chunk / chunks;
}

// Sums of chunks, partial: (chunks, columns), added in a fixed order to the first `columns_a` columns a +=, and the
// rest b +=.
void add_partial_sums(float* a, float* b, const float* partial, int64_t chunks, int64_t columns_a, int64_t columns);

}  // namespace jetlag
