// Sums of partial sums, and reductions to the host. All are split by the number of values alone and added up in a
// fixed order: within a thread, then over the lanes of a warp by halves, then over a block's warps, then over blocks.
#include "kernels/cuda/runtime.h"
#include "kernels/ops.h"

namespace jetlag {

// A block has kWarp columns; thread (x, y) adds up every y-th of a column's partial sums.
inline constexpr int kPartialRows = 16;

__global__ void __launch_bounds__(kWarp* kPartialRows)
    add_partial_sums_kernel(float* a, float* b, const float* partial, int64_t chunks, int64_t columns_a,
                            int64_t columns) {
    using Row = float[kWarp];
    SHARED_ARRAY(Row, sums, kPartialRows);
    const int x = static_cast<int>(threadIdx.x), y = static_cast<int>(threadIdx.y);
    const int64_t column = static_cast<int64_t>(blockIdx.x) * kWarp + x;
    float sum = 0;
    if (column < columns)
        for (int64_t chunk = y; chunk < chunks; chunk += kPartialRows) sum += partial[chunk * columns + column];
    sums[y][x] = sum;
    __syncthreads();
    if (y > 0 || column >= columns) return;
    for (int row = 1; row < kPartialRows; row++) sum += sums[row][x];
    float* out = column < columns_a ? a + column : b + (column - columns_a);
    *out += sum;
}

void add_partial_sums(float* a, float* b, const float* partial, int64_t chunks, int64_t columns_a, int64_t columns) {
    launch(add_partial_sums_kernel, blocks_for(columns, kWarp), dim3(kWarp, kPartialRows), 0, device_stream(), a, b,
           partial, chunks, columns_a, columns);
}

// ---------------------------------------------------------------------------------------------------------------
// Moments

inline constexpr int64_t kReduceChunk = 16384;  // values of a block

// The moments of all threads of a block, in its first thread.
__device__ __forceinline__ Moments block_moments(double sum, double squares, float largest) {
    SHARED_ARRAY(double, sums, kWarpsPerBlock);
    SHARED_ARRAY(double, sums_of_squares, kWarpsPerBlock);
    SHARED_ARRAY(float, magnitudes, kWarpsPerBlock);
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    sum = warp_sum(sum);
    squares = warp_sum(squares);
    largest = warp_max(largest);
    if (threadIdx.x % kWarp == 0) {
        sums[warp] = sum;
        sums_of_squares[warp] = squares;
        magnitudes[warp] = largest;
    }
    __syncthreads();
    Moments total;
    for (int w = 0; w < kWarpsPerBlock; w++) {
        total.sum += sums[w];
        total.sum_of_squares += sums_of_squares[w];
        total.largest = fmax(total.largest, static_cast<double>(magnitudes[w]));
    }
    return total;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) moments_kernel(Moments* partial, const T* x, int64_t n) {
    const int64_t begin = blockIdx.x * kReduceChunk, end = min(n, begin + kReduceChunk);
    double sum = 0, squares = 0;
    float largest = 0;
    for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
        const float value = load(x + i);
        sum += value;
        squares += static_cast<double>(value) * value;
        largest = fmaxf(largest, fabsf(value));
    }
    const Moments total = block_moments(sum, squares, largest);
    if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

__global__ void __launch_bounds__(kThreads)
    total_moments_kernel(Moments* total, double* norm, const Moments* partial, int64_t n) {
    double sum = 0, squares = 0;
    float largest = 0;
    for (int64_t i = threadIdx.x; i < n; i += kThreads) {
        sum += partial[i].sum;
        squares += partial[i].sum_of_squares;
        largest = fmaxf(largest, static_cast<float>(partial[i].largest));
    }
    const Moments all = block_moments(sum, squares, largest);
    if (threadIdx.x > 0) return;
    if (total != nullptr) *total = all;
    if (norm != nullptr) *norm = sqrt(all.sum_of_squares);
}

// Moments of the whole into total, and their norm, each unless it is nullptr.
template <typename T>
static void launch_moments(Moments* total, double* norm, Moments* partial, const T* x, int64_t n) {
    const unsigned blocks = blocks_for(n, kReduceChunk);
    launch(moments_kernel<T>, blocks, kThreads, 0, device_stream(), partial, x, n);
    launch(total_moments_kernel, 1, kThreads, 0, device_stream(), total, norm, partial, blocks);
}

static Moments* moments_scratch(int64_t n) {
    return static_cast<Moments*>(device_scratch((blocks_for(n, kReduceChunk) + 1) * sizeof(Moments)));
}

void euclidean_norm(double* norm, const float* x, int64_t n) {
    launch_moments(nullptr, norm, moments_scratch(n), x, n);
}

template <typename T>
static Moments moments_of(const T* x, int64_t n) {
    Moments result;
    if (n == 0) return result;
    Moments* total = moments_scratch(n);
    launch_moments(total, nullptr, total + 1, x, n);
    copy_to_host(&result, total, sizeof(result));
    return result;
}

Moments moments(const float* x, int64_t n) {
    return moments_of(x, n);
}
Moments moments(const bf16* x, int64_t n) {
    return moments_of(x, n);
}

// ---------------------------------------------------------------------------------------------------------------
// The first value that is not finite

// The smallest of all threads of a block, in its first warp.
__device__ __forceinline__ int64_t block_smallest(int64_t x) {
    SHARED_ARRAY(int64_t, smallest, kWarpsPerBlock);
    for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) x = min(x, __shfl_xor_sync(kAllLanes, x, lanes));
    if (threadIdx.x % kWarp == 0) smallest[threadIdx.x / kWarp] = x;
    __syncthreads();
    for (int w = 0; w < kWarpsPerBlock; w++) x = min(x, smallest[w]);
    return x;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) first_nonfinite_kernel(int64_t* firsts, const T* x, int64_t n) {
    const int64_t begin = blockIdx.x * kReduceChunk, end = min(n, begin + kReduceChunk);
    int64_t first = INT64_MAX;
    for (int64_t i = begin + threadIdx.x; i < end && first == INT64_MAX; i += kThreads)
        if (!isfinite(load(x + i))) first = i;
    first = block_smallest(first);
    if (threadIdx.x == 0) firsts[blockIdx.x] = first;
}

__global__ void __launch_bounds__(kThreads) smallest_kernel(int64_t* smallest, const int64_t* x, int64_t n) {
    int64_t found = INT64_MAX;
    for (int64_t i = threadIdx.x; i < n; i += kThreads) found = min(found, x[i]);
    found = block_smallest(found);
    if (threadIdx.x == 0) *smallest = found;
}

template <typename T>
static int64_t first_nonfinite_of(const T* x, int64_t n) {
    if (n == 0) return -1;
    const unsigned blocks = blocks_for(n, kReduceChunk);
    int64_t* first = static_cast<int64_t*>(device_scratch((blocks + 1) * sizeof(int64_t)));
    launch(first_nonfinite_kernel<T>, blocks, kThreads, 0, device_stream(), first + 1, x, n);
    launch(smallest_kernel, 1, kThreads, 0, device_stream(), first, first + 1, blocks);
    int64_t result;
    copy_to_host(&result, first, sizeof(result));
    return result == INT64_MAX ? -1 : result;
}

int64_t first_nonfinite(const float* x, int64_t n) {
    return first_nonfinite_of(x, n);
}
int64_t first_nonfinite(const bf16* x, int64_t n) {
    return first_nonfinite_of(x, n);
}

}  // namespace jetlag
