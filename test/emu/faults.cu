#include "test/emu/faults.h"

#include "kernels/cuda/device.h"

namespace jetlag::test {
namespace {

__global__ void sum_kernel(float* out, const float* x, bool right) {
    SHARED_ARRAY(float, values, 128);
    const unsigned t = threadIdx.x;
    values[t] = x[t];
    for (unsigned half = 64; half > 0; half /= 2) {
        if (right || half != 16) __syncthreads();
        if (t < half) values[t] += values[t + half];
    }
    if (t == 0) out[0] = values[0];
}

__global__ void race_kernel(float* out) {
    const float before = *out;
    __syncwarp();
    *out = before * 0.5f + static_cast<float>(threadIdx.x);
}

__global__ void unwritten_kernel(float* out) {
    SHARED_ARRAY(float, values, 64);
    out[threadIdx.x] = values[threadIdx.x];
}

__global__ void without_wait_kernel(float* out, const float* x) {
    SHARED_ARRAY(float, values, 64);
    copy_async_4(&values[threadIdx.x], x + threadIdx.x);
    copy_async_commit();
    out[threadIdx.x] = values[threadIdx.x];
    copy_async_wait<0>();
}

__global__ void refetch_kernel(float* out, const float* x, bool right) {
    SHARED_ARRAY(float, values, 64);
    float sum = 0;
    for (int i = 0; i < 4; i++) {
        copy_async_4(&values[threadIdx.x], x + threadIdx.x);
        copy_async_commit();
        copy_async_wait<0>();
        __syncthreads();
        sum += values[63 - threadIdx.x];
        if (right) __syncthreads();
    }
    out[threadIdx.x] = sum;
}

__global__ void barrier_in_branch_kernel(float* out) {
    if (threadIdx.x < 32) __syncthreads();
    out[threadIdx.x] = 1;
}

__global__ void barriers_in_two_branches_kernel(float* out) {
    if (threadIdx.x < 32) {
        __syncthreads();
        out[threadIdx.x] = 1;
    } else {
        __syncthreads();
        out[threadIdx.x] = 2;
    }
}

__global__ void barrier_against_shuffle_kernel(float* out) {
    float x = 1;
    if (threadIdx.x == 3) __syncthreads();
    x = __shfl_xor_sync(kAllLanes, x, 1);
    if (threadIdx.x != 3) __syncthreads();
    out[threadIdx.x] = x;
}

__global__ void shuffle_of_ended_lanes_kernel(float* out) {
    if (threadIdx.x % kWarp >= 16) return;
    out[threadIdx.x] = warp_sum(1.0f);
}

__global__ void shuffle_then_end_kernel(float* out) {
    __syncthreads();
    if (threadIdx.x == 40) return;
    out[threadIdx.x] = warp_sum(1.0f);
}

__global__ void different_masks_kernel(float* out) {
    out[threadIdx.x] = __shfl_sync(threadIdx.x % kWarp < 31 ? kAllLanes : 0xfffffffeu, 1.0f, 5);
}

__global__ void different_operations_kernel(float* out) {
    if (threadIdx.x % kWarp == 7) {
        __syncwarp();
    } else {
        out[threadIdx.x] = __shfl_sync(kAllLanes, 1.0f, 5);
    }
}

__global__ void different_shuffles_kernel(float* out) {
    const float x = threadIdx.x % kWarp < 16 ? __shfl_up_sync(kAllLanes, 1.0f, 1) : __shfl_xor_sync(kAllLanes, 1.0f, 1);
    out[threadIdx.x] = x;
}

__global__ void mma_in_two_branches_kernel(float* out) {
    float d[4] = {};
    const uint32_t a[4] = {}, b[2] = {};
    if (threadIdx.x % kWarp < 16)
        mma_bf16_16x8x16(d, a, b);
    else
        mma_bf16_16x8x16(d, a, b);
    out[threadIdx.x] = d[0];
}

__global__ void own_lane_not_named_kernel(float* out) {
    out[threadIdx.x] = __shfl_sync(0x7fffffffu, 1.0f, 5);
}

__global__ void source_not_named_kernel(float* out) {
    if (threadIdx.x % kWarp < 16) out[threadIdx.x] = __shfl_sync(0xffffu, 1.0f, 20);
}

__global__ void lanes_beyond_block_kernel(float* out) {
    if (threadIdx.x >= 64) out[threadIdx.x % 64] = static_cast<float>(__ballot_sync(kAllLanes, 1));
}

__global__ void crossed_shuffles_kernel(float* out) {
    const unsigned lane = threadIdx.x % kWarp;
    if (lane < 3) {  // 0 waits for 1, 1 for 2, 2 for 0
        const unsigned mask = 1u << lane | 1u << (lane + 1) % 3;
        out[lane] = __shfl_sync(mask, 1.0f, static_cast<int>(lane));
    }
}

__global__ void shared_write_kernel(float* out, int at) {
    SHARED_ARRAY(float, values, 64);
    float* p = values;
    p[threadIdx.x] = 1;
    if (threadIdx.x == 5 && blockIdx.x == 1) p[at] = 2;
    out[threadIdx.x] = values[threadIdx.x];
}

__global__ void shared_read_kernel(float* out, int at) {
    SHARED_ARRAY(float, values, 64);
    const float* p = values;
    values[threadIdx.x] = 1;
    __syncthreads();
    out[threadIdx.x] = p[static_cast<int>(threadIdx.x) + at];
}

__global__ void dynamic_shared_read_kernel(float* out, int at) {
    float* values = dynamic_shared<float>();
    values[threadIdx.x] = 1;
    __syncthreads();
    out[threadIdx.x] = values[static_cast<int>(threadIdx.x) + at];
}

__global__ void too_much_shared_kernel(float* out) {
    SHARED_ARRAY(float, first, 8192);
    SHARED_ARRAY(float, second, 4097);
    first[threadIdx.x] = second[threadIdx.x] = 1;
    out[threadIdx.x] = first[threadIdx.x];
}

__global__ void load_matrix_kernel(float* out, int offset, bool from_global) {
    SHARED_ARRAY(float4, rows, 64);
    rows[threadIdx.x] = make_float4(0, 0, 0, 0);
    __syncthreads();
    const void* row = from_global ? static_cast<const void*>(out) : reinterpret_cast<const char*>(&rows[0]) + offset;
    uint32_t r[4];
    load_matrix_x4(r, row);
    out[threadIdx.x] = __uint_as_float(r[0]);
}

__global__ void copy_async_kernel(float* out, int offset, bool to_local) {
    SHARED_ARRAY(float4, rows, 64);
    float4 local;
    char* to = to_local ? reinterpret_cast<char*>(&local) : reinterpret_cast<char*>(&rows[0]) + offset;
    copy_async_16(to, out);
    copy_async_commit();
    copy_async_wait<0>();
}

__global__ void copy_async_from_shared_kernel(float* out) {
    SHARED_ARRAY(float4, rows, 64);
    rows[threadIdx.x] = make_float4(0, 0, 0, 0);
    __syncthreads();
    copy_async_16(&rows[threadIdx.x], &rows[63 - threadIdx.x]);
    copy_async_commit();
    copy_async_wait<0>();
    out[threadIdx.x] = rows[threadIdx.x].x;
}

__global__ void wrong_dynamic_shared_kernel(float* out) {
    expect_dynamic_shared<512>();
    out[threadIdx.x] = dynamic_shared<float>()[0];
}

__device__ float recurse(volatile float* x, int depth) {
    volatile float here[256];
    here[depth % 256] = x[0];
    return depth == 0 ? here[0] : recurse(here, depth - 1) + here[depth % 256];
}

__global__ void deep_recursion_kernel(float* out, int depth) {
    out[threadIdx.x] = recurse(out, depth);
}

__global__ void global_access_kernel(float* x, int at, bool write) {
    if (threadIdx.x == 2) x[0] = x[at];
    if (threadIdx.x == 2 && write) x[at] = 1;
}

__global__ void global_copy_kernel(float* x, int at) {
    SHARED_ARRAY(float4, row, 1);
    if (threadIdx.x == 2) copy_async_16(&row[0], x + at);
    copy_async_commit();
    copy_async_wait<0>();
    if (threadIdx.x == 2) x[0] = row[0].x;
}

}  // namespace

void run_sum(float* out, const float* x, bool right) {
    launch(sum_kernel, 1, 128, 0, device_stream(), out, x, right);
}
void run_race(float* out) {
    launch(race_kernel, 1, 32, 0, device_stream(), out);
}
void run_unwritten(float* out) {
    launch(unwritten_kernel, 1, 64, 0, device_stream(), out);
}
void run_without_wait(float* out, const float* x) {
    launch(without_wait_kernel, 1, 64, 0, device_stream(), out, x);
}
void run_refetch(float* out, const float* x, bool right) {
    launch(refetch_kernel, 1, 64, 0, device_stream(), out, x, right);
}

void run_fault(Fault fault, float* out) {
    const cudaStream_t stream = device_stream();
    switch (fault) {
        case Fault::barrier_in_branch:
            launch(barrier_in_branch_kernel, 2, 64, 0, stream, out);
            break;
        case Fault::barriers_in_two_branches:
            launch(barriers_in_two_branches_kernel, 2, 64, 0, stream, out);
            break;
        case Fault::barrier_against_shuffle:
            launch(barrier_against_shuffle_kernel, 2, 64, 0, stream, out);
            break;
        case Fault::shuffle_of_ended_lanes:
            launch(shuffle_of_ended_lanes_kernel, 2, 64, 0, stream, out);
            break;
        case Fault::shuffle_then_end:
            launch(shuffle_then_end_kernel, 2, 64, 0, stream, out);
            break;
        case Fault::different_masks:
            launch(different_masks_kernel, 2, 64, 0, stream, out);
            break;
        case Fault::different_operations:
            launch(different_operations_kernel, 2, 64, 0, stream, out);
            break;
        case Fault::different_shuffles:
            launch(different_shuffles_kernel, 2, 64, 0, stream, out);
            break;
        case Fault::mma_in_two_branches:
            launch(mma_in_two_branches_kernel, 2, 64, 0, stream, out);
            break;
        case Fault::copy_async_from_shared:
            launch(copy_async_from_shared_kernel, 2, 64, 0, stream, out);
            break;
        case Fault::wrong_dynamic_shared:
            launch(wrong_dynamic_shared_kernel, 2, 64, 256, stream, out);
            break;
        case Fault::own_lane_not_named:
            launch(own_lane_not_named_kernel, 2, 64, 0, stream, out);
            break;
        case Fault::source_not_named:
            launch(source_not_named_kernel, 2, 64, 0, stream, out);
            break;
        case Fault::lanes_beyond_block:
            launch(lanes_beyond_block_kernel, 2, 72, 0, stream, out);
            break;
        case Fault::crossed_shuffles:
            launch(crossed_shuffles_kernel, 2, 64, 0, stream, out);
            break;
        case Fault::shared_write:
            launch(shared_write_kernel, 2, 64, 0, stream, out, 64);
            break;
        case Fault::shared_read:
            launch(shared_read_kernel, 2, 64, 0, stream, out, 1);
            break;
        case Fault::shared_write_before:
            launch(shared_write_kernel, 2, 64, 0, stream, out, -1);
            break;
        case Fault::dynamic_shared_read:
            launch(dynamic_shared_read_kernel, 2, 64, 256, stream, out, 1);
            break;
        case Fault::too_much_shared:
            launch(too_much_shared_kernel, 2, 64, 0, stream, out);
            break;
        case Fault::too_much_with_dynamic_shared:
            launch(shared_write_kernel, 2, 64, 99 * 1024, stream, out, 0);
            break;
        case Fault::load_matrix_from_global:
            launch(load_matrix_kernel, 2, 64, 0, stream, out, 0, true);
            break;
        case Fault::load_matrix_unaligned:
            launch(load_matrix_kernel, 2, 64, 0, stream, out, 8, false);
            break;
        case Fault::copy_async_to_local:
            launch(copy_async_kernel, 2, 64, 0, stream, out, 0, true);
            break;
        case Fault::copy_async_unaligned:
            launch(copy_async_kernel, 2, 64, 0, stream, out, 8, false);
            break;
        case Fault::deep_recursion:
            launch(deep_recursion_kernel, 2, 64, 0, stream, out, 1 << 20);
            break;
    }
}

void run_global_access(float* x, int at, bool write) {
    launch(global_access_kernel, 1, 32, 0, device_stream(), x, at, write);
}
void run_global_copy(float* x, int at) {
    launch(global_copy_kernel, 1, 32, 0, device_stream(), x, at);
}

}  // namespace jetlag::test
