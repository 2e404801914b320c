// LayerNorm, a warp to a row. Forward goes over the row three times (mean, variance, output), of which the first reads
// memory and the others the first-level cache; with a residual add before it, the first pass adds, stores the sum and
// takes its mean, and the others read what the same thread has stored. Backward needs two sums per row for dinp and two
// per channel for the parameters: a warp takes several rows of its block's chunk and adds up its channels' sums in
// shared memory, where each lane has channels of its own; then the warps' sums are added in order, and in a second
// kernel the chunks'. Bound by memory.
#include "kernels/cuda/runtime.h"
#include "kernels/ops.h"

namespace jetlag {

// Of inp, or of the sum = inp + added where `added` is given.
__global__ void __launch_bounds__(kThreads)
    layernorm_forward_kernel(real* sum_out, real* out, float* means, float* rstds, const real* inp, const real* added,
                             const float* weight, const float* bias, int64_t N, int64_t C) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int64_t n = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.x / kWarp;
    if (n >= N) return;  // the whole warp
    const real* x = inp + n * C;
    float sum = 0;
    if (added == nullptr) {
        for (int64_t c = lane; c < C; c += kWarp) sum += load(x + c);
    } else {
        for (int64_t c = lane; c < C; c += kWarp) {
            const real value = to_real(load(x + c) + load(added + n * C + c));
            sum_out[n * C + c] = value;
            sum += load(&value);
        }
        x = sum_out + n * C;
    }
    const float mean = warp_sum(sum) / static_cast<float>(C);
    float squares = 0;
    for (int64_t c = lane; c < C; c += kWarp) {
        const float centred = load(x + c) - mean;
        squares = fmaf(centred, centred, squares);
    }
    const float rstd = 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(C) + 1e-5f);
    for (int64_t c = lane; c < C; c += kWarp)
        store(out + n * C + c, fmaf((load(x + c) - mean) * rstd, weight[c], bias[c]));
    if (lane == 0) {
        means[n] = mean;
        rstds[n] = rstd;
    }
}

// With n = (x - mean) rstd and g = dout * weight: dx += rstd (g - mean(g) - n mean(g n)). partial: (chunks, 2, C).
__global__ void __launch_bounds__(kThreads)
    layernorm_backward_kernel(real* dinp, float* partial, const real* dout, const real* inp, const float* weight,
                              const float* means, const float* rstds, int64_t N, int64_t C) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
    const int warps = static_cast<int>(blockDim.x) / kWarp;
    float* sums = dynamic_shared<float>();  // (warps, 2, C)
    float* dweight = sums + 2 * warp * C;
    float* dbias = dweight + C;
    for (int64_t c = lane; c < C; c += kWarp) dweight[c] = dbias[c] = 0;
    const int64_t end = chunk_start(blockIdx.x + 1, gridDim.x, N);
    for (int64_t n = chunk_start(blockIdx.x, gridDim.x, N) + warp; n < end; n += warps) {
        const real *x = inp + n * C, *dy = dout + n * C;
        const float mean = means[n], rstd = rstds[n];
        float sum_g = 0, sum_gn = 0;
        for (int64_t c = lane; c < C; c += kWarp) {
            const float normal = (load(x + c) - mean) * rstd, d = load(dy + c), g = d * weight[c];
            sum_g += g;
            sum_gn = fmaf(g, normal, sum_gn);
            dweight[c] = fmaf(d, normal, dweight[c]);
            dbias[c] += d;
        }
        const float mean_g = warp_sum(sum_g) / static_cast<float>(C);
        const float mean_gn = warp_sum(sum_gn) / static_cast<float>(C);
        for (int64_t c = lane; c < C; c += kWarp) {
            const float normal = (load(x + c) - mean) * rstd, g = load(dy + c) * weight[c];
            real* dx = dinp + n * C + c;
            store(dx, fmaf(g - mean_g - normal * mean_gn, rstd, load(dx)));
        }
    }
    __syncthreads();
    for (int64_t i = threadIdx.x; i < 2 * C; i += blockDim.x) {
        float sum = sums[i];
        for (int w = 1; w < warps; w++) sum += sums[2 * w * C + i];
        partial[blockIdx.x * 2 * C + i] = sum;
    }
}

void layernorm_forward(real* out, float* mean, float* rstd, const real* inp, const float* weight, const float* bias,
                       int64_t N, int64_t C) {
    launch(layernorm_forward_kernel, blocks_for(N, kWarpsPerBlock), kThreads, 0, device_stream(), nullptr, out, mean,
           rstd, inp, nullptr, weight, bias, N, C);
}

void residual_layernorm_forward(real* sum, real* out, float* mean, float* rstd, const real* a, const real* b,
                                const float* weight, const float* bias, int64_t N, int64_t C) {
    launch(layernorm_forward_kernel, blocks_for(N, kWarpsPerBlock), kThreads, 0, device_stream(), sum, out, mean, rstd,
           a, b, weight, bias, N, C);
}

// Some rows for each warp, and enough blocks for any device.
static int64_t backward_chunks(int64_t N) {
    return chunk_count(N, 4 * kWarpsPerBlock, 512);
}

int64_t layernorm_workspace_floats(int64_t N, int64_t C) {
    return 2 * backward_chunks(N) * C;
}

void layernorm_backward(real* dinp, float* dweight, float* dbias, const real* dout, const real* inp,
                        const float* weight, const float* mean, const float* rstd, float* workspace, int64_t N,
                        int64_t C) {
    // Sums of many channels leave shared memory for fewer warps.
    constexpr int64_t kSharedFloats = 48 * 1024 / sizeof(float);
    const int64_t chunks = backward_chunks(N);
    const int64_t fitting = kSharedFloats / (2 * C);
    const int64_t warps = fitting < 1 ? 1 : (fitting > kWarpsPerBlock ? kWarpsPerBlock : fitting);
    launch(layernorm_backward_kernel, static_cast<unsigned>(chunks), static_cast<unsigned>(warps * kWarp),
           static_cast<size_t>(warps * 2 * C) * sizeof(float), device_stream(), dinp, workspace, dout, inp, weight,
           mean, rstd, N, C);
    add_partial_sums(dweight, dbias, workspace, chunks, C, 2 * C);
}

}  // namespace jetlag
