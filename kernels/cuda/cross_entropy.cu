// Softmax cross-entropy fused with its gradient. A warp has a row and goes over it three times: for the maximum, for
// the sum of the exponentials, for the gradient. Only the first pass reads memory, the others the first-level cache
// (256 logits are 1 KB); exponentials are computed twice, which costs less than keeping them. Bound by memory.
#include "kernels/cuda/runtime.h"
#include "kernels/ops.h"

namespace jetlag {

__global__ void __launch_bounds__(kThreads)
    cross_entropy_kernel(float* losses, real* dlogits, const real* logits, const int32_t* targets, float scale,
                         int64_t N, int64_t V) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int64_t n = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.x / kWarp;
    if (n >= N) return;  // the whole warp
    const real* row = logits + n * V;
    const int32_t target = targets[n];
    float largest = -INFINITY;
    for (int64_t v = lane; v < V; v += kWarp) largest = fmaxf(largest, load(row + v));
    largest = warp_max(largest);
    float sum = 0;
    for (int64_t v = lane; v < V; v += kWarp) sum += expf(load(row + v) - largest);
    sum = warp_sum(sum);
    // By the lane that may replace this logit below.
    if (lane == target % kWarp) losses[n] = logf(sum) + (largest - load(row + target));
    if (dlogits == nullptr) return;
    const float factor = scale / sum;
    for (int64_t v = lane; v < V; v += kWarp) {
        const float gradient = expf(load(row + v) - largest) * factor;
        store(dlogits + n * V + v, v == target ? gradient - scale : gradient);
    }
}

void cross_entropy(float* losses, real* dlogits, const real* logits, const int32_t* targets, float scale, int64_t N,
                   int64_t V) {
    launch(cross_entropy_kernel, blocks_for(N, kWarpsPerBlock), kThreads, 0, device_stream(), losses, dlogits, logits,
           targets, scale, N, V);
}

}  // namespace jetlag
