// Dense layers: the products are a library's (blas.h), bias in their epilogue. Here are the bias gradient, sums over
// columns of dout in chunks of rows, bound by memory; and a single row, where each output is a product of two rows: a
// warp has an output, and the weight is read once.
//
// GELU is not in the epilogue: cuBLASLt's is the approximation by tanh, and the model's is exact.
#include "kernels/cuda/blas.h"
#include "kernels/cuda/runtime.h"
#include "kernels/ops.h"

namespace jetlag {

// Thread (x, y) of a block adds up every y-th row of the chunk blockIdx.y, in column x of kWarp columns.
inline constexpr int kBiasRows = 8;

__global__ void __launch_bounds__(kWarp* kBiasRows)
    bias_gradient_kernel(float* partial, const real* dout, int64_t N, int64_t OC) {
    using Row = float[kWarp];
    SHARED_ARRAY(Row, sums, kBiasRows);
    const int x = static_cast<int>(threadIdx.x), y = static_cast<int>(threadIdx.y);
    const int64_t column = static_cast<int64_t>(blockIdx.x) * kWarp + x;
    const int64_t end = chunk_start(blockIdx.y + 1, gridDim.y, N);
    float sum = 0;
    if (column < OC)
        for (int64_t n = chunk_start(blockIdx.y, gridDim.y, N) + y; n < end; n += kBiasRows)
            sum += load(dout + n * OC + column);
    sums[y][x] = sum;
    __syncthreads();
    if (y > 0 || column >= OC) return;
    for (int row = 1; row < kBiasRows; row++) sum += sums[row][x];
    partial[blockIdx.y * OC + column] = sum;
}

__global__ void __launch_bounds__(kThreads)
    linear_forward_row_kernel(real* out, const real* inp, const real* weight, const real* bias, int64_t C, int64_t OC) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int64_t o = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.x / kWarp;
    if (o >= OC) return;  // the whole warp
    float sum = 0;
    for (int64_t c = lane; c < C; c += kWarp) sum = fmaf(load(inp + c), load(weight + o * C + c), sum);
    sum = warp_sum(sum);
    if (lane == 0) store(out + o, load(bias + o) + sum);
}

void linear_forward(real* out, const real* inp, const real* weight, const real* bias, int64_t N, int64_t C,
                    int64_t OC) {
    blas_forward(out, inp, weight, bias, N, C, OC);
}

void linear_forward_row(real* out, const real* inp, const real* weight, const real* bias, int64_t C, int64_t OC) {
    launch(linear_forward_row_kernel, blocks_for(OC, kWarpsPerBlock), kThreads, 0, device_stream(), out, inp, weight,
           bias, C, OC);
}

// At least eight rows a thread.
static int64_t bias_chunks(int64_t N) {
    return chunk_count(N, 8 * kBiasRows, 256);
}

// The products' part comes first, aligned.
int64_t linear_workspace_floats(int64_t N, int64_t C, int64_t OC) {
    return blas_workspace_floats(N, C, OC) + bias_chunks(N) * OC;
}

void linear_backward(real* dinp, float* dweight, float* dbias, const real* dout, const real* inp, const real* weight,
                     float* workspace, int64_t N, int64_t C, int64_t OC) {
    blas_backward(dinp, dweight, dout, inp, weight, workspace, N, C, OC);
    const int64_t chunks = bias_chunks(N);
    float* partial = workspace + blas_workspace_floats(N, C, OC);
    launch(bias_gradient_kernel, dim3(blocks_for(OC, kWarp), static_cast<unsigned>(chunks)), dim3(kWarp, kBiasRows), 0,
           device_stream(), partial, dout, N, OC);
    add_partial_sums(dbias, nullptr, partial, chunks, OC, OC);
}

}  // namespace jetlag
