// What kernels are written with: the one header in which the two worlds differ that compile them. nvcc makes GPU code
// of CUDA's runtime and a few PTX instructions; any other compiler gets kernels/emu/, which runs the same kernels on a
// CPU. Every file in kernels/cuda/ includes this header and asks nowhere else which world it is in.
//
// Beside CUDA's own names (__global__, threadIdx, __syncthreads(), __shfl_xor_sync(), atomicAdd(), ...):
//
//     launch(kernel, grid, block, shared_bytes, stream, arguments...)
//         Launches with the arguments converted to the kernel's parameter types. Throws std::runtime_error
//         "KERNEL: what CUDA says" if it cannot be launched. Dynamic shared memory may be more than 48 KiB.
//     SHARED_ARRAY(type, name, count);
//         type name[count] in shared memory. For rows: using Row = float[33]; SHARED_ARRAY(Row, tile, 32).
//     T* dynamic_shared<T>()
//         The shared_bytes of the launch, aligned to 16 bytes.
//     expect_dynamic_shared<bytes>()
//         Says how many they are, where that is known at compile time, for scripts/kernel_report; the emulator checks
//         it.
//     copy_async_16(shared, global), copy_async_16_or_zero(shared, global, in_range), copy_async_4(shared, global)
//     copy_async_commit(), copy_async_wait<N>()
//         Copies that go on while the thread computes. The wait is for all groups that the thread committed but the
//         last N; what other threads copied needs __syncthreads() after their wait.
//     bf16, to_float(bf16), to_bf16(float), pack_bf16(lo, hi), to_tf32(float)
//         Rounded to nearest: bf16 ties to even, tf32 ties away from zero (cvt.rna, all that there is).
//     mma_bf16_16x8x16(d, a, b), mma_tf32_16x8x8(d, a, b)
//         d += a b with a row by row, b column by column, for a whole warp; fragments as in the PTX ISA. With
//         g = lane / 4 and t = lane % 4, and pairs of bf16 in one register, lower column or row in the lower half:
//             d[0], d[1]   row g, columns 2t, 2t+1          d[2], d[3]   row g+8, the same columns
//             bf16 a[0]    row g, columns 2t, 2t+1          a[1]   row g+8      a[2]   row g, columns 2t+8, 2t+9
//                  a[3]    row g+8, columns 2t+8, 2t+9
//                  b[0]    rows 2t, 2t+1, column g          b[1]   rows 2t+8, 2t+9, column g
//             tf32 a[0]    row g, column t                  a[1]   row g+8      a[2]   row g, column t+4
//                  a[3]    row g+8, column t+4
//                  b[0]    row t, column g                  b[1]   row t+4, column g
//     load_matrix_x4(r, row), load_matrix_x2, load_matrix_x4_trans, load_matrix_x2_trans
//         ldmatrix: 8x8 matrices of 16-bit values from shared memory. Lane l points to row l % 8 (16 bytes, aligned) of
//         matrix l / 8; x2 ignores what the lanes from 16 on point to. r[i] gets of matrix i the row g, columns 2t,
//         2t+1; with _trans the rows 2t, 2t+1 of column g.
//
//     warp_sum(float or double), warp_max(float)
//         Over the lanes of a full warp, by halves: five exchanges with lane ^ 16, ^ 8, ... Every lane gets the result.
//     UNROLL for (...), ROLLED for (...)
//         Whether the compiler repeats the body as often as the loop runs, which registers in arrays need.
//
// Multiply-adds are not fused by the compiler in either world (as on the CPU, see the Makefile): write fmaf where one
// rounding is meant.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "kernels/real.h"

#ifdef __CUDACC__
#include <cuda_runtime.h>

#include <tuple>
#include <utility>
#else
#include "kernels/emu/emu.h"
#endif

namespace jetlag {

// The kernel's name in the text of a launch: "KERNEL, grid, block, ...".
inline std::string kernel_name(const char* text) {
    int depth = 0;  // of template arguments
    const char* end = text;
    for (; *end != '\0' && (depth > 0 || *end != ','); end++) depth += (*end == '<') - (*end == '>');
    return std::string(text, end);
}

}  // namespace jetlag

#ifdef __CUDACC__
namespace jetlag {

inline constexpr const char* kBackendName = "cuda";

#define SHARED_ARRAY(type, name, count) __shared__ type name[count]
#define UNROLL _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")

extern __shared__ __align__(16) unsigned char dynamic_shared_memory[];
template <typename T>
__device__ __forceinline__ T* dynamic_shared() {
    return reinterpret_cast<T*>(dynamic_shared_memory);
}

template <size_t Bytes>
__device__ __forceinline__ void expect_dynamic_shared() {
    asm volatile("// dynamic shared %0" ::"n"(Bytes));
}

__device__ __forceinline__ unsigned shared_address(const void* shared) {
    return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}
__device__ __forceinline__ void copy_async_16(void* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}
__device__ __forceinline__ void copy_async_16_or_zero(void* shared, const void* global, bool in_range) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
                 "r"(in_range ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void copy_async_4(void* shared, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}
__device__ __forceinline__ void copy_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int N>
__device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

__device__ __forceinline__ uint32_t pack_bf16(float lo, float hi) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
    return packed;
}
__device__ __forceinline__ uint32_t to_tf32(float x) {
    uint32_t rounded;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(x));
    return rounded;
}

__device__ __forceinline__ void mma_bf16_16x8x16(float d[4], const uint32_t a[4], const uint32_t b[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma_tf32_16x8x8(float d[4], const uint32_t a[4], const uint32_t b[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void load_matrix_x4(uint32_t r[4], const void* shared_row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(shared_row))
                 : "memory");
}
__device__ __forceinline__ void load_matrix_x2(uint32_t r[2], const void* shared_row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared_address(shared_row))
                 : "memory");
}
__device__ __forceinline__ void load_matrix_x4_trans(uint32_t r[4], const void* shared_row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(shared_row))
                 : "memory");
}
__device__ __forceinline__ void load_matrix_x2_trans(uint32_t r[2], const void* shared_row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared_address(shared_row))
                 : "memory");
}

__device__ __forceinline__ float warp_sum(float x) {
    for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
    return x;
}
__device__ __forceinline__ double warp_sum(double x) {
    for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xffffffffu, x, lanes);
    return x;
}
__device__ __forceinline__ float warp_max(float x) {
    for (int lanes = 16; lanes > 0; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lanes));
    return x;
}

template <typename... Parameters, typename... Arguments>
void launch_kernel(const char* text, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                   cudaStream_t stream, Arguments&&... arguments) {
    std::tuple<Parameters...> values(static_cast<Parameters>(std::forward<Arguments>(arguments))...);
    const void* function = reinterpret_cast<const void*>(kernel);
    cudaError_t error = cudaSuccess;
    if (shared_bytes > 48 * 1024)
        error =
            cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    if (error == cudaSuccess)
        error = std::apply(
            [&](auto&... value) {
                void* pointers[] = {&value..., nullptr};
                return cudaLaunchKernel(function, grid, block, pointers, shared_bytes, stream);
            },
            values);
    if (error != cudaSuccess) {
        cudaGetLastError();  // or the next launch would report it again
        throw std::runtime_error(kernel_name(text) + ": " + cudaGetErrorString(error));
    }
}

}  // namespace jetlag
#endif

#define launch(...) launch_kernel(#__VA_ARGS__, __VA_ARGS__)

namespace jetlag {

// The stream of all ops.
cudaStream_t device_stream();

inline constexpr int kWarp = 32;
inline constexpr unsigned kAllLanes = 0xffffffffu;

// Kernels read and write `real` with load and store alone.
__device__ __forceinline__ float load(const float* p) {
    return *p;
}
__device__ __forceinline__ float load(const bf16* p) {
    return to_float(*p);
}
__device__ __forceinline__ void store(float* p, float x) {
    *p = x;
}
__device__ __forceinline__ void store(bf16* p, float x) {
    *p = to_bf16(x);
}

}  // namespace jetlag
