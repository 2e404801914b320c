// Token embedding: a gather forward, a sum by token backward.
//
// The rows of dout with one token are to be added in a fixed order, without atomics. A first kernel sorts each chunk of
// the tokens by value, rows of a value in their order: a thread has a value and looks for it in the chunk, which lies
// in shared memory (256 values times 256 tokens are 65536 comparisons, nothing for a GPU). In the second a block has a
// value and finds its rows in all chunks; a warp takes several chunks, a lane several columns, in double as a common
// byte occurs thousands of times in a batch; the warps' sums are added in order. The comparisons are N V, which for
// vocabularies of 100,000 becomes dear; the rest is bound by memory.
#include "kernels/cuda/runtime.h"
#include "kernels/ops.h"

namespace jetlag {

__global__ void __launch_bounds__(kThreads)
    embedding_forward_kernel(real* out, const float* weight, const int32_t* tokens, int64_t N, int64_t C) {
    const int64_t n = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.x / kWarp;
    if (n >= N) return;
    const float* row = weight + tokens[n] * C;
    for (int64_t c = threadIdx.x % kWarp; c < C; c += kWarp) store(out + n * C + c, row[c]);
}

inline constexpr int kChunkTokens = 256;

// For each chunk: starts (V + 1), where the rows of a value begin in the chunk's part of order (N), which lists rows.
// occurs: (V), set to 1 where a value occurs anywhere.
__global__ void __launch_bounds__(kThreads)
    sort_tokens_kernel(int32_t* starts, int32_t* occurs, int32_t* order, const int32_t* tokens, int64_t N, int64_t V) {
    SHARED_ARRAY(int32_t, chunk, kChunkTokens);
    SHARED_ARRAY(int32_t, counts, kThreads);
    const int64_t begin = static_cast<int64_t>(blockIdx.x) * kChunkTokens;
    const int size = static_cast<int>(min(N - begin, static_cast<int64_t>(kChunkTokens)));
    const int thread = static_cast<int>(threadIdx.x);
    for (int i = thread; i < size; i += kThreads) chunk[i] = tokens[begin + i];
    __syncthreads();
    starts += blockIdx.x * (V + 1);
    int before = 0;  // tokens with smaller values than those of this round
    for (int64_t first = 0; first < V; first += kThreads) {
        const int64_t value = first + thread;
        int count = 0;
        for (int i = 0; i < size; i++) count += chunk[i] == value;
        counts[thread] = count;
        __syncthreads();
        // Sums of all counts up to a thread's own, over distances that double.
        for (int distance = 1; distance < kThreads; distance *= 2) {
            const int left = thread >= distance ? counts[thread - distance] : 0;
            __syncthreads();
            counts[thread] += left;
            __syncthreads();
        }
        int place = before + counts[thread] - count;
        before += counts[kThreads - 1];
        if (value < V) {
            starts[value] = place;
            if (count > 0) occurs[value] = 1;
            for (int i = 0; count > 0; i++)
                if (chunk[i] == value) {
                    order[begin + place++] = static_cast<int32_t>(begin + i);
                    count--;
                }
        }
        __syncthreads();
    }
    if (thread == 0) starts[V] = size;
}

inline constexpr int kSumWarps = 16;
inline constexpr int kColumns = 4;  // of a lane, kWarp apart

__global__ void __launch_bounds__(kWarp* kSumWarps)
    embedding_backward_kernel(float* dweight, const real* dout, const int32_t* starts, const int32_t* occurs,
                              const int32_t* order, int64_t chunks, int64_t V, int64_t C) {
    using Row = double[kWarp * kColumns];
    SHARED_ARRAY(Row, sums, kSumWarps);
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    const int64_t value = blockIdx.x, column = static_cast<int64_t>(blockIdx.y) * kWarp * kColumns + lane;
    if (!occurs[value]) return;  // the whole block; the row stays as it is, to the bit
    double sum[kColumns] = {};
    const int64_t end = chunk_start(warp + 1, kSumWarps, chunks);
    for (int64_t chunk = chunk_start(warp, kSumWarps, chunks); chunk < end; chunk++) {
        const int32_t* start = starts + chunk * (V + 1) + value;
        for (int i = start[0]; i < start[1]; i++) {
            const real* row = dout + order[chunk * kChunkTokens + i] * C;
            for (int k = 0; k < kColumns; k++)
                if (const int64_t c = column + k * kWarp; c < C) sum[k] += load(row + c);
        }
    }
    for (int k = 0; k < kColumns; k++) sums[warp][k * kWarp + lane] = sum[k];
    __syncthreads();
    if (warp >= kColumns) return;
    const int64_t c = column + warp * kWarp;
    if (c >= C) return;
    double total = 0;
    for (int w = 0; w < kSumWarps; w++) total += sums[w][warp * kWarp + lane];
    dweight[value * C + c] += static_cast<float>(total);
}

void embedding_forward(real* out, const float* weight, const int32_t* tokens, int64_t N, int64_t C) {
    launch(embedding_forward_kernel, blocks_for(N, kWarpsPerBlock), kThreads, 0, device_stream(), out, weight, tokens,
           N, C);
}

void embedding_backward(float* dweight, const real* dout, const int32_t* tokens, int64_t N, int64_t V, int64_t C) {
    const unsigned chunks = blocks_for(N, kChunkTokens);
    int32_t* order =
        static_cast<int32_t*>(device_scratch(static_cast<size_t>(N + V + chunks * (V + 1)) * sizeof(int32_t)));
    int32_t* occurs = order + N;
    int32_t* starts = occurs + V;
    device_zero(occurs, static_cast<size_t>(V) * sizeof(int32_t));
    launch(sort_tokens_kernel, chunks, kThreads, 0, device_stream(), starts, occurs, order, tokens, N, V);
    launch(embedding_backward_kernel, dim3(static_cast<unsigned>(V), blocks_for(C, kWarp * kColumns)),
           kWarp * kSumWarps, 0, device_stream(), dweight, dout, starts, occurs, order, chunks, V, C);
}

}  // namespace jetlag
