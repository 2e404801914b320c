// Exact GELU, the residual add, rounding and the copy of rows: one pass over memory, bound by it. Each thread loads its
// values before it stores one, so that the loads overlap also where the output is the input.
#include "kernels/cuda/runtime.h"
#include "kernels/ops.h"

namespace jetlag {

__device__ __forceinline__ float gelu(float x) {
    const float half = 0.5f * x;
    return fmaf(half, erff(x * 0.70710678118654752f), half);
}

// gelu'(x) = (1 + erf(x / sqrt 2)) / 2 + x e^(-x^2 / 2) / sqrt(2 pi).
__device__ __forceinline__ float gelu_derivative(float x) {
    const float phi = fmaf(0.5f, erff(x * 0.70710678118654752f), 0.5f);
    const float density = expf(x * x * -0.5f) * 0.39894228040143268f;
    return fmaf(x, density, phi);
}

__global__ void __launch_bounds__(kThreads) gelu_forward_kernel(real* out, const real* inp, int64_t n) {
    const int64_t begin = tile_begin();
    float x[kValues];
    for (int k = 0; k < kValues; k++)
        if (const int64_t i = begin + k * kThreads; i < n) x[k] = load(inp + i);
    for (int k = 0; k < kValues; k++)
        if (const int64_t i = begin + k * kThreads; i < n) store(out + i, gelu(x[k]));
}

__global__ void __launch_bounds__(kThreads)
    gelu_backward_kernel(real* dinp, const real* dout, const real* inp, int64_t n) {
    const int64_t begin = tile_begin();
    float x[kValues], dy[kValues];
    for (int k = 0; k < kValues; k++)
        if (const int64_t i = begin + k * kThreads; i < n) x[k] = load(inp + i), dy[k] = load(dout + i);
    for (int k = 0; k < kValues; k++)
        if (const int64_t i = begin + k * kThreads; i < n) store(dinp + i, dy[k] * gelu_derivative(x[k]));
}

__global__ void __launch_bounds__(kThreads)
    residual_forward_kernel(real* out, const real* a, const real* b, int64_t n) {
    const int64_t begin = tile_begin();
    float x[kValues], y[kValues];
    for (int k = 0; k < kValues; k++)
        if (const int64_t i = begin + k * kThreads; i < n) x[k] = load(a + i), y[k] = load(b + i);
    for (int k = 0; k < kValues; k++)
        if (const int64_t i = begin + k * kThreads; i < n) store(out + i, x[k] + y[k]);
}

__global__ void __launch_bounds__(kThreads) round_to_bf16_kernel(bf16* out, const float* x, int64_t n) {
    const int64_t begin = tile_begin();
    for (int k = 0; k < kValues; k++)
        if (const int64_t i = begin + k * kThreads; i < n) store(out + i, x[i]);
}

// A block has a row.
__global__ void __launch_bounds__(kThreads)
    copy_rows_kernel(real* out, int64_t out_stride, const real* inp, int64_t inp_stride, int64_t C) {
    const int64_t n = blockIdx.x;
    for (int64_t c = threadIdx.x; c < C; c += kThreads) out[n * out_stride + c] = inp[n * inp_stride + c];
}

void gelu_forward(real* out, const real* inp, int64_t n) {
    launch(gelu_forward_kernel, blocks_for(n, kTile), kThreads, 0, device_stream(), out, inp, n);
}

void gelu_backward(real* dinp, const real* dout, const real* inp, int64_t n) {
    launch(gelu_backward_kernel, blocks_for(n, kTile), kThreads, 0, device_stream(), dinp, dout, inp, n);
}

void residual_forward(real* out, const real* a, const real* b, int64_t n) {
    launch(residual_forward_kernel, blocks_for(n, kTile), kThreads, 0, device_stream(), out, a, b, n);
}

void copy_rows(real* out, int64_t out_stride, const real* inp, int64_t inp_stride, int64_t rows, int64_t C) {
    launch(copy_rows_kernel, static_cast<unsigned>(rows), kThreads, 0, device_stream(), out, out_stride, inp,
           inp_stride, C);
}

void round_to_bf16(bf16* out, const float* x, int64_t n) {
    launch(round_to_bf16_kernel, blocks_for(n, kTile), kThreads, 0, device_stream(), out, x, n);
}

}  // namespace jetlag
