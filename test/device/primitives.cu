#include "test/device/primitives.h"

#include "kernels/cuda/device.h"

namespace jetlag::test {
namespace {

__global__ void indices_kernel(int32_t* out) {
    const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
    const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    out[block * threads + thread] = static_cast<int32_t>(block * threads + thread);
}

constexpr int kSumThreads = 256;

__global__ void __launch_bounds__(kSumThreads) block_sums_kernel(float* out, const float* x) {
    SHARED_ARRAY(float, values, kSumThreads);
    const unsigned t = threadIdx.x;
    values[t] = x[blockIdx.x * kSumThreads + t];
    for (unsigned half = kSumThreads / 2; half > 0; half /= 2) {
        __syncthreads();
        if (t < half) values[t] += values[t + half];
    }
    if (t == 0) out[blockIdx.x] = values[0];
}

__global__ void __launch_bounds__(1024) large_block_sums_kernel(float* out, const float* x, int rounds) {
    float* values = dynamic_shared<float>();
    const int n = 1024 * rounds;
    for (int i = static_cast<int>(threadIdx.x); i < n; i += 1024) values[i] = x[static_cast<int>(blockIdx.x) * n + i];
    __syncthreads();
    // Thread t adds up column t, of other threads' values too.
    float sum = 0;
    for (int i = 0; i < rounds; i++) sum += values[static_cast<int>(threadIdx.x) * rounds + i];
    __syncthreads();
    SHARED_ARRAY(float, sums, kWarp);
    sum = warp_sum(sum);
    if (threadIdx.x % kWarp == 0) sums[threadIdx.x / kWarp] = sum;
    __syncthreads();
    if (threadIdx.x < kWarp) {
        sum = warp_sum(sums[threadIdx.x]);
        if (threadIdx.x == 0) out[blockIdx.x] = sum;
    }
}

__global__ void __launch_bounds__(32 * 8) transpose_kernel(float* out, const float* x, int rows, int columns) {
    using Row = float[33];  // a column in 32 banks
    SHARED_ARRAY(Row, tile, 32);
    const int row = static_cast<int>(blockIdx.y) * 32, column = static_cast<int>(blockIdx.x) * 32;
    const int tx = static_cast<int>(threadIdx.x), ty = static_cast<int>(threadIdx.y);
    for (int i = ty; i < 32; i += 8) tile[i][tx] = x[(row + i) * columns + column + tx];
    __syncthreads();
    for (int i = ty; i < 32; i += 8) out[(column + i) * rows + row + tx] = tile[tx][i];
}

__global__ void shuffles_kernel(int32_t* out, int operands) {
    const int lane = static_cast<int>(threadIdx.x);
    for (int w = 0; w < 3; w++)
        for (int i = 0; i < operands; i++) {
            const int width = 32 >> w;
            const int got[4] = {__shfl_sync(kAllLanes, lane, i, width),
                                __shfl_up_sync(kAllLanes, lane, static_cast<unsigned>(i), width),
                                __shfl_down_sync(kAllLanes, lane, static_cast<unsigned>(i), width),
                                __shfl_xor_sync(kAllLanes, lane, i, width)};
            for (int kind = 0; kind < 4; kind++) out[((kind * 3 + w) * operands + i) * 32 + lane] = got[kind];
        }
}

__global__ void partial_shuffles_kernel(double* out) {
    const int lane = static_cast<int>(threadIdx.x);
    double x = lane;
    if (lane < 16) {
        x = __shfl_xor_sync(0x0000ffffu, x, 1);
        x = __shfl_xor_sync(0x0000ffffu, x, 8);
    } else {
        x = __shfl_sync(0xffff0000u, x, 31);
    }
    __syncwarp();
    out[lane] = x;
}

__global__ void votes_kernel(uint32_t* out, const uint32_t* x, uint32_t mask) {
    const unsigned t = threadIdx.x;
    if (mask >> t % kWarp & 1) {
        const int predicate = x[t] % 3 == 0;
        out[t] = __ballot_sync(mask, predicate);
        out[64 + t] = static_cast<uint32_t>(__any_sync(mask, predicate));
        out[128 + t] = static_cast<uint32_t>(__all_sync(mask, predicate));
        out[192 + t] = __reduce_add_sync(mask, x[t]);
    }
    out[256 + t] = (mask >> t % kWarp & 1) == 0;
}

__global__ void warp_sums_kernel(float* out, float* by_shuffles, const float* x) {
    const unsigned t = threadIdx.x;
    out[t] = static_cast<float>(warp_sum(static_cast<double>(x[t])));
    out[64 + t] = warp_sum(x[t]);
    out[128 + t] = warp_max(x[t]);
    float sum = x[t], largest = x[t];
    for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
        sum += __shfl_xor_sync(kAllLanes, sum, lanes);
        largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, lanes));
    }
    by_shuffles[t] = sum;
    by_shuffles[64 + t] = largest;
}

// d: (16, 8), a fragment.
template <typename F>
__device__ void for_fragment_of_d(const F& f) {
    const int g = static_cast<int>(threadIdx.x) / 4, t = static_cast<int>(threadIdx.x) % 4;
    for (int i = 0; i < 4; i++) f(i, (g + i / 2 * 8) * 8 + 2 * t + i % 2);
}

__global__ void mma_bf16_kernel(float* d, const float* a, const float* b, int products) {
    const int g = static_cast<int>(threadIdx.x) / 4, t = static_cast<int>(threadIdx.x) % 4;
    float sum[4];
    for_fragment_of_d([&](int i, int place) { sum[i] = d[place]; });
    for (int p = 0; p < products; p++, a += 16 * 16, b += 16 * 8) {
        uint32_t a_fragment[4], b_fragment[2];
        for (int i = 0; i < 4; i++) {
            const float* pair = a + (g + i % 2 * 8) * 16 + 2 * t + i / 2 * 8;
            a_fragment[i] = pack_bf16(pair[0], pair[1]);
        }
        for (int i = 0; i < 2; i++) {
            const float* pair = b + (2 * t + i * 8) * 8 + g;
            b_fragment[i] = pack_bf16(pair[0], pair[8]);
        }
        mma_bf16_16x8x16(sum, a_fragment, b_fragment);
    }
    for_fragment_of_d([&](int i, int place) { d[place] = sum[i]; });
}

__global__ void mma_tf32_kernel(float* d, const float* a, const float* b, int products) {
    const int g = static_cast<int>(threadIdx.x) / 4, t = static_cast<int>(threadIdx.x) % 4;
    float sum[4];
    for_fragment_of_d([&](int i, int place) { sum[i] = d[place]; });
    for (int p = 0; p < products; p++, a += 16 * 8, b += 8 * 8) {
        uint32_t a_fragment[4], b_fragment[2];
        for (int i = 0; i < 4; i++) a_fragment[i] = to_tf32(a[(g + i % 2 * 8) * 8 + t + i / 2 * 4]);
        for (int i = 0; i < 2; i++) b_fragment[i] = to_tf32(b[(t + i * 4) * 8 + g]);
        mma_tf32_16x8x8(sum, a_fragment, b_fragment);
    }
    for_fragment_of_d([&](int i, int place) { d[place] = sum[i]; });
}

__global__ void mma_loaded_kernel(float* d, const float* a, const float* b, int products) {
    // Rows of 16 bytes and a multiple, aligned: of a 16 values and 8 that put rows in other banks, of b 8.
    struct alignas(16) RowOfA {
        bf16 x[24];
    };
    struct alignas(16) RowOfB {
        bf16 x[8];
    };
    SHARED_ARRAY(RowOfA, a_tile, 16);
    SHARED_ARRAY(RowOfB, b_tile, 16);
    const int lane = static_cast<int>(threadIdx.x);
    float sum[4];
    for_fragment_of_d([&](int i, int place) { sum[i] = d[place]; });
    for (int p = 0; p < products; p++, a += 16 * 16, b += 16 * 8) {
        for (int i = lane; i < 16 * 16; i += kWarp) store(&a_tile[i / 16].x[i % 16], a[i]);
        for (int i = lane; i < 16 * 8; i += kWarp) store(&b_tile[i / 8].x[i % 8], b[i]);
        __syncwarp();
        uint32_t a_fragment[4], b_fragment[2];
        load_matrix_x4(a_fragment, &a_tile[lane % 16].x[lane / 16 * 8]);
        load_matrix_x2_trans(b_fragment, &b_tile[lane % 16].x[0]);
        mma_bf16_16x8x16(sum, a_fragment, b_fragment);
        __syncwarp();
    }
    for_fragment_of_d([&](int i, int place) { d[place] = sum[i]; });
}

__global__ void load_matrix_kernel(uint32_t* out) {
    struct alignas(16) Row {
        uint16_t x[8];
    };
    SHARED_ARRAY(Row, rows, 32);
    const int lane = static_cast<int>(threadIdx.x);
    for (int i = 0; i < 8; i++) rows[lane].x[i] = static_cast<uint16_t>(8 * lane + i);
    __syncwarp();
    for (int kind = 0; kind < 4; kind++) {
        uint32_t r[4] = {};
        if (kind == 0) load_matrix_x4(r, &rows[lane]);
        if (kind == 1) load_matrix_x4_trans(r, &rows[lane]);
        if (kind == 2) load_matrix_x2(r, &rows[lane]);
        if (kind == 3) load_matrix_x2_trans(r, &rows[lane]);
        for (int i = 0; i < 4; i++) out[(kind * 32 + lane) * 4 + i] = r[i];
    }
}

constexpr int kColumns = 64;

// Two rows are under way while one is added.
__global__ void __launch_bounds__(kColumns) pipeline_kernel(float* out, const float* x, int rows, int end) {
    constexpr int kRows = 4;
    struct alignas(16) Row {
        float x[kColumns];
    };
    SHARED_ARRAY(Row, ring, kRows);
    const int t = static_cast<int>(threadIdx.x);
    const auto fetch = [&](int row) {
        if (t < kColumns / 4 && row <= rows)
            copy_async_16_or_zero(&ring[row % kRows].x[4 * t], row < end ? x + row * kColumns + 4 * t : x, row < end);
        copy_async_commit();
    };
    fetch(0), fetch(1), fetch(2);
    for (int row = 0; row < rows; row++) {
        copy_async_wait<1>();  // rows up to row + 1 are there
        __syncthreads();       // and nobody needs row - 1 any more
        out[row * kColumns + t] = ring[row % kRows].x[t] + ring[(row + 1) % kRows].x[t];
        fetch(row + 3);
    }
    copy_async_wait<0>();
}

__global__ void __launch_bounds__(kColumns) copy_shifted_kernel(float* out, const float* x, int shift) {
    SHARED_ARRAY(float, values, kColumns);
    const unsigned t = threadIdx.x;
    copy_async_4(&values[t], x + static_cast<int>(t) + shift);
    copy_async_commit();
    copy_async_wait<0>();
    __syncthreads();
    out[kColumns - 1 - t] = values[kColumns - 1 - t];
}

__global__ void conversions_kernel(uint32_t* out, const float* x, int n) {
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= n) return;
    const bf16 rounded = to_bf16(x[i]);
    bf16 stored;
    store(&stored, x[i]);
    real kept;
    store(&kept, x[i]);
    out[i] = pack_bf16(to_float(rounded), 0) & 0xffffu;
    out[n + i] = __float_as_uint(to_float(rounded));
    out[2 * n + i] = pack_bf16(x[i], -x[i]);
    out[3 * n + i] = to_tf32(x[i]);
    out[4 * n + i] =
        __float_as_uint(load(&stored)) | (load(&kept) == to_float(to_real(x[i])) || x[i] != x[i] ? 0u : 1u);
}

__global__ void atomics_kernel(int32_t* out, int32_t* block_sums, unsigned* blocks_done, const int32_t* x, int n) {
    SHARED_ARRAY(int32_t, sum, 1);
    SHARED_ARRAY(unsigned, place, 1);
    if (threadIdx.x == 0) sum[0] = 0;
    __syncthreads();
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) {
        atomicAdd(&sum[0], x[i]);
        atomicMax(&out[1], x[i]);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        atomicAdd(&out[0], sum[0]);
        block_sums[blockIdx.x] = sum[0];
        __threadfence();
        place[0] = atomicAdd(blocks_done, 1u);
    }
    __syncthreads();
    if (place[0] != gridDim.x - 1 || threadIdx.x != 0) return;
    __threadfence();
    out[2] = static_cast<int32_t>(gridDim.x);
    int32_t all = 0;
    for (unsigned block = 0; block < gridDim.x; block++) all += *static_cast<volatile int32_t*>(block_sums + block);
    out[3] = all;
}

template <int A, int B>
__global__ void nothing_kernel() {}

__global__ void arguments_kernel(double* out, int64_t a, float b, const double* c) {
    out[0] = static_cast<double>(2 * a);
    out[1] = static_cast<double>(b);
    out[2] = static_cast<double>(c - out);
}

__global__ void add_kernel(float* x, float addend, int n) {
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) x[i] += addend;
}

__global__ void double_kernel(float* x, int n) {
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) x[i] *= 2;
}

void check(cudaError_t error) {
    if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

}  // namespace

void run_indices(int32_t* out) {
    launch(indices_kernel, dim3(1, 2, 3), dim3(4, 3, 2), 0, device_stream(), out);
}
void run_block_sums(float* out, const float* x, int blocks) {
    launch(block_sums_kernel, blocks, kSumThreads, 0, device_stream(), out, x);
}
void run_large_block_sums(float* out, const float* x, int blocks, int rounds) {
    launch(large_block_sums_kernel, blocks, 1024, sizeof(float) * 1024 * static_cast<size_t>(rounds), device_stream(),
           out, x, rounds);
}
void run_transpose(float* out, const float* x, int rows, int columns) {
    launch(transpose_kernel, dim3(static_cast<unsigned>(columns / 32), static_cast<unsigned>(rows / 32)), dim3(32, 8),
           0, device_stream(), out, x, rows, columns);
}
void run_shuffles(int32_t* out, int operands) {
    launch(shuffles_kernel, 1, kWarp, 0, device_stream(), out, operands);
}
void run_partial_shuffles(double* out) {
    launch(partial_shuffles_kernel, 1, kWarp, 0, device_stream(), out);
}
void run_votes(uint32_t* out, const uint32_t* x, uint32_t mask) {
    launch(votes_kernel, 1, 2 * kWarp, 0, device_stream(), out, x, mask);
}
void run_warp_sums(float* out, float* by_shuffles, const float* x) {
    launch(warp_sums_kernel, 1, 2 * kWarp, 0, device_stream(), out, by_shuffles, x);
}
void run_mma_bf16(float* d, const float* a, const float* b, int products) {
    launch(mma_bf16_kernel, 1, kWarp, 0, device_stream(), d, a, b, products);
}
void run_mma_tf32(float* d, const float* a, const float* b, int products) {
    launch(mma_tf32_kernel, 1, kWarp, 0, device_stream(), d, a, b, products);
}
void run_mma_loaded(float* d, const float* a, const float* b, int products) {
    launch(mma_loaded_kernel, 1, kWarp, 0, device_stream(), d, a, b, products);
}
void run_load_matrix(uint32_t* out) {
    launch(load_matrix_kernel, 1, kWarp, 0, device_stream(), out);
}
void run_pipeline(float* out, const float* x, int rows, int end) {
    launch(pipeline_kernel, 1, kColumns, 0, device_stream(), out, x, rows, end);
}
void run_copy_shifted(float* out, const float* x, int shift) {
    launch(copy_shifted_kernel, 1, kColumns, 0, device_stream(), out, x, shift);
}
void run_conversions(uint32_t* out, const float* x, int n) {
    launch(conversions_kernel, (n + 255) / 256, 256, 0, device_stream(), out, x, n);
}
void run_atomics(int32_t* out, int32_t* block_sums, uint32_t* blocks_done, const int32_t* x, int n) {
    launch(atomics_kernel, (n + 127) / 128, 128, 0, device_stream(), out, block_sums, blocks_done, x, n);
}
std::string launch_with_threads(int threads) {
    try {
        launch(nothing_kernel<1, 2>, 1, threads, 0, device_stream());
    } catch (const std::runtime_error& error) {
        return error.what();
    }
    return "";
}
void run_arguments(double* out) {
    const int number = 21;
    launch(arguments_kernel, 1, 1, 0, device_stream(), out, number, 0.5, out + 3);
}

float run_graph(float* x, float addend, int n, int times) {
    const cudaStream_t stream = device_stream();
    cudaGraph_t graph;
    cudaGraphExec_t runnable;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    launch(add_kernel, (n + 127) / 128, 128, 0, stream, x, addend, n);
    launch(double_kernel, (n + 127) / 128, 128, 0, stream, x, n);
    check(cudaStreamEndCapture(stream, &graph));
    check(cudaGraphInstantiate(&runnable, graph, 0));
    check(cudaGraphDestroy(graph));
    cudaEvent_t start, end;
    check(cudaEventCreate(&start));
    check(cudaEventCreate(&end));
    check(cudaEventRecord(start, stream));
    for (int i = 0; i < times; i++) check(cudaGraphLaunch(runnable, stream));
    check(cudaEventRecord(end, stream));
    check(cudaEventSynchronize(end));
    float milliseconds;
    check(cudaEventElapsedTime(&milliseconds, start, end));
    check(cudaEventDestroy(start));
    check(cudaEventDestroy(end));
    check(cudaGraphExecDestroy(runnable));
    return milliseconds;
}

std::string allocate_while_capturing() {
    cudaStream_t stream;
    cudaGraph_t graph;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    void* memory;
    const cudaError_t error = cudaMalloc(&memory, 100);
    const cudaError_t end = cudaStreamEndCapture(stream, &graph);
    cudaGetLastError();
    check(cudaStreamDestroy(stream));
    return std::string(cudaGetErrorString(error)) + "; " + cudaGetErrorString(end);
}

}  // namespace jetlag::test
