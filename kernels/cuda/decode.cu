// Attention of one new row over keys and values that are kept from row to row (flash decoding).
//
// Caches are cut into segments of kSegment positions. A block works on one segment of one head: with a thread for each
// key, which lies with its channels kSegment apart, (H, segments, D, kSegment), a score is D multiply-adds without a
// sum across threads, and every load of a warp is one run of memory. Values lie row by row, (H, T, D): a thread takes
// one channel of every n-th row, and the n sums of a channel are added in order.
//
// Each segment gives the largest score, the sum of the weights against it, and the weighted sum of the values; a second
// kernel puts the segments of a head together in order. They are cut by position alone.
//
// Arithmetic: 4 D operations per key and head for 8 D bytes. Bound by memory.

#include <cmath>

#include "kernels/cuda/device.h"
#include "kernels/cuda/rotate.h"
#include "kernels/ops.h"

namespace jetlag {
namespace {

constexpr int kSegment = 256;  // keys, and threads, of a block; no less than kMaxHeadDim
constexpr int kSegmentWarps = kSegment / kWarp;
static_assert(kSegment >= kMaxHeadDim);

struct DecodeShape {
    int64_t segments;  // of a cache
    int H, D;
    float scale;  // of scores
};

int64_t segments_of(int64_t T) {
    return (T + kSegment - 1) / kSegment;
}

DecodeShape shape_of(int64_t T, int64_t H, int64_t D) {
    return {segments_of(T), static_cast<int>(H), static_cast<int>(D),
            static_cast<float>(1 / std::sqrt(static_cast<double>(D)))};
}

// A thread for four channels of one row of one head. Rows lie together in a block, for the sake of the keys.
__global__ void attention_cache_kernel(real* key_cache, real* value_cache, const real* qkv, RotaryTable rotary,
                                       int64_t first, int64_t rows, DecodeShape shape) {
    const int D = shape.D, groups = (D + 3) / 4;
    const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    const int64_t row = index % rows, group = index / rows % groups, h = index / rows / groups;
    if (h >= shape.H) return;
    const int64_t C = static_cast<int64_t>(shape.H) * D, t = first + row;
    const real* source = qkv + row * 3 * C + C + h * D;
    real* keys = key_cache + (h * shape.segments + t / kSegment) * D * kSegment + t % kSegment;
    real* values = value_cache + (h * shape.segments * kSegment + t) * D;
    float key[4];
    for (int e = 0; e < 4; e++) key[e] = 4 * group + e < D ? load(source + 4 * group + e) : 0;
    rotate_channels(key, rotary, t, group, true);
    for (int e = 0; e < 4; e++) {
        const int64_t c = 4 * group + e;
        if (c >= D) break;
        store(keys + c * kSegment, key[e]);
        store(values + c, load(source + C + c));
    }
}

// Of segment s of head h, at parts + (h segments + s) (D + 2): the largest score, the sum of the weights, and (D).
__global__ void __launch_bounds__(kSegment)
    attention_decode_kernel(float* parts, const real* qkv, const real* key_cache, const real* value_cache,
                            RotaryTable rotary, const float* lag_bias, int64_t position, int64_t T, DecodeShape shape) {
    SHARED_ARRAY(float, query, kSegment);
    SHARED_ARRAY(float, weights, kSegment);
    SHARED_ARRAY(float, sums, kSegment);
    SHARED_ARRAY(float, warp_results, 2 * kSegmentWarps);
    const int D = shape.D, thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp;
    const int64_t segment = blockIdx.x, h = blockIdx.y, begin = segment * kSegment;
    const int keys = static_cast<int>(min(static_cast<int64_t>(kSegment), position + 1 - begin));
    const real* segment_keys = key_cache + (h * shape.segments + segment) * D * kSegment;
    const real* segment_values = value_cache + (h * shape.segments * kSegment + begin) * D;
    float* part = parts + (h * gridDim.x + segment) * (D + 2);

    if (4 * thread < D) {
        float x[4];
        for (int e = 0; e < 4; e++) x[e] = 4 * thread + e < D ? load(qkv + h * D + 4 * thread + e) : 0;
        rotate_channels(x, rotary, position, thread, false);
        for (int e = 0; e < 4; e++) query[4 * thread + e] = x[e] * shape.scale;
    }
    __syncthreads();

    float score = -INFINITY;
    if (thread < keys) {
        score = lag_bias != nullptr ? lag_bias[h * T + position - begin - thread] : 0;
        for (int c = 0; c < D; c++) score = fmaf(query[c], load(segment_keys + c * kSegment + thread), score);
    }
    const float largest_of_warp = warp_max(score);
    if (lane == 0) warp_results[warp] = largest_of_warp;
    __syncthreads();
    float largest = warp_results[0];
    for (int w = 1; w < kSegmentWarps; w++) largest = fmaxf(largest, warp_results[w]);
    // Without a key that it may see, exponents are taken against 0.
    const float weight = expf(score - (largest == -INFINITY ? 0 : largest));
    weights[thread] = weight;
    const float sum_of_warp = warp_sum(weight);
    if (lane == 0) warp_results[kSegmentWarps + warp] = sum_of_warp;
    __syncthreads();
    if (thread == 0) {
        float sum = 0;
        for (int w = 0; w < kSegmentWarps; w++) sum += warp_results[kSegmentWarps + w];
        part[0] = largest;
        part[1] = sum;
    }

    // Rows behind the last key may be anything.
    const int steps = kSegment / D, step = thread / D, c = thread % D;
    float sum = 0;
    if (step < steps)
        for (int j = step; j < keys; j += steps)
            sum = fmaf(weights[j], load(segment_values + static_cast<int64_t>(j) * D + c), sum);
    sums[thread] = sum;
    __syncthreads();
    if (thread >= D) return;
    for (int n = 1; n < steps; n++) sum += sums[n * D + thread];
    part[2 + thread] = sum;
}

__global__ void __launch_bounds__(kSegment)
    attention_decode_merge_kernel(real* out, const float* parts, int segments, int D) {
    const int64_t h = blockIdx.x;
    const int c = static_cast<int>(threadIdx.x);
    if (c >= D) return;
    parts += h * segments * (D + 2);
    float largest = -INFINITY, total = 0, row = 0;
    for (int s = 0; s < segments; s++) largest = fmaxf(largest, parts[s * (D + 2)]);
    const float reference = largest == -INFINITY ? 0 : largest;
    for (int s = 0; s < segments; s++) {
        const float* part = parts + s * (D + 2);
        const float weight = expf(part[0] - reference);
        total = fmaf(part[1], weight, total);
        // Also where the weight is 0: a value that is not finite must show.
        row = fmaf(part[2 + c], weight, row);
    }
    store(out + h * D + c, row * (total == 0 ? 0 : 1 / total));  // 0: a row without a key
}

}  // namespace

int64_t attention_cache_size(int64_t T, int64_t H, int64_t D) {
    return H * segments_of(T) * D * kSegment;
}

void attention_cache(real* key_cache, real* value_cache, const real* qkv, const RotaryTable& rotary, int64_t first,
                     int64_t rows, int64_t T, int64_t H, int64_t D) {
    const DecodeShape shape = shape_of(T, H, D);
    constexpr int64_t kThreads = 128;
    const int64_t threads = rows * H * ((D + 3) / 4);
    launch(attention_cache_kernel, static_cast<unsigned>((threads + kThreads - 1) / kThreads), kThreads, 0,
           device_stream(), key_cache, value_cache, qkv, rotary, first, rows, shape);
}

int64_t attention_decode_workspace_floats(int64_t T, int64_t H, int64_t D) {
    return H * segments_of(T) * (D + 2);
}

void attention_decode(real* out, const real* qkv, const real* key_cache, const real* value_cache,
                      const RotaryTable& rotary, const float* lag_bias, float* workspace, int64_t position, int64_t T,
                      int64_t H, int64_t D) {
    const DecodeShape shape = shape_of(T, H, D);
    const unsigned used = static_cast<unsigned>(segments_of(position + 1)), heads = static_cast<unsigned>(H);
    launch(attention_decode_kernel, dim3(used, heads), kSegment, 0, device_stream(), workspace, qkv, key_cache,
           value_cache, rotary, lag_bias, position, T, shape);
    launch(attention_decode_merge_kernel, heads, kSegment, 0, device_stream(), out, workspace, used, D);
}

}  // namespace jetlag
