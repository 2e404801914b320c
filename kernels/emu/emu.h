// The part of CUDA that kernels/cuda/ uses, on a CPU: for tests, with or without a GPU. Included by
// kernels/cuda/device.h alone.
//
// The threads of a block are fibers of one operating-system thread. A fiber runs until it waits (at a barrier, a
// shuffle, ...) or ends; then the next is picked at random among those that can go on. So a missing barrier gives
// other results under another seed. What is no valid CUDA program ends the process with exit code 70 and one line that
// names kernel, block and thread: a barrier that not all threads of the block reach, a warp operation whose lanes are
// not all there (a mask may name no lanes that the block does not have), an asynchronous copy to what is not shared
// memory, more shared memory than the smallest of our GPUs has, ...
//
//     JETLAG_EMU_SEED   seed of the order, default 1; read at every launch
//     JETLAG_EMU_GUARD  1: a host that accesses device memory itself ends with exit code 70 (see runtime.cpp)
//
// Blocks run on the OpenMP threads, in an order from the seed too. A block must not wait for another one. A kernel is
// done when launch() returns, unless the stream is captured in a graph.
#pragma once

#include <math.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#include "kernels/emu/runtime.h"

// ---------------------------------------------------------------------------------------------------------------
// The language

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

extern constinit thread_local uint3 threadIdx, blockIdx;
extern constinit thread_local dim3 blockDim, gridDim;

struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(16) double2 {
    double x, y;
};
struct alignas(8) int2 {
    int x, y;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) {
    return {x, y};
}
inline float4 make_float4(float x, float y, float z, float w) {
    return {x, y, z, w};
}
inline double2 make_double2(double x, double y) {
    return {x, y};
}
inline int2 make_int2(int x, int y) {
    return {x, y};
}
inline int4 make_int4(int x, int y, int z, int w) {
    return {x, y, z, w};
}
inline uint2 make_uint2(unsigned x, unsigned y) {
    return {x, y};
}
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
    return {x, y, z, w};
}

using std::max;
using std::min;

inline float rsqrtf(float x) {
    return 1 / sqrtf(x);
}
inline double rsqrt(double x) {
    return 1 / sqrt(x);
}
inline float __expf(float x) {
    return expf(x);
}
inline float __logf(float x) {
    return logf(x);
}
inline float __fdividef(float x, float y) {
    return x / y;
}
inline unsigned __float_as_uint(float x) {
    return std::bit_cast<unsigned>(x);
}
inline int __float_as_int(float x) {
    return std::bit_cast<int>(x);
}
inline float __uint_as_float(unsigned x) {
    return std::bit_cast<float>(x);
}
inline float __int_as_float(int x) {
    return std::bit_cast<float>(x);
}
inline int __popc(unsigned x) {
    return std::popcount(x);
}
inline int __clz(unsigned x) {
    return std::countl_zero(x);
}
inline int __ffs(unsigned x) {
    return x == 0 ? 0 : std::countr_zero(x) + 1;
}
template <typename T>
T __ldg(const T* p) {
    return *p;
}

// Real atomics: blocks run on several operating-system threads.
template <typename T>
T atomicAdd(T* p, std::type_identity_t<T> x) {
    return std::atomic_ref<T>(*p).fetch_add(x);
}
template <typename T>
T atomicExch(T* p, std::type_identity_t<T> x) {
    return std::atomic_ref<T>(*p).exchange(x);
}
template <typename T>
T atomicCAS(T* p, std::type_identity_t<T> compare, std::type_identity_t<T> x) {
    std::atomic_ref<T>(*p).compare_exchange_strong(compare, x);
    return compare;
}
template <typename T>
T atomicMax(T* p, std::type_identity_t<T> x) {
    T old = std::atomic_ref<T>(*p).load();
    while (old < x && !std::atomic_ref<T>(*p).compare_exchange_weak(old, x)) {
    }
    return old;
}
template <typename T>
T atomicMin(T* p, std::type_identity_t<T> x) {
    T old = std::atomic_ref<T>(*p).load();
    while (x < old && !std::atomic_ref<T>(*p).compare_exchange_weak(old, x)) {
    }
    return old;
}
inline void __threadfence() {
    std::atomic_thread_fence(std::memory_order_seq_cst);
}
inline void __threadfence_block() {
    std::atomic_thread_fence(std::memory_order_seq_cst);
}

// ---------------------------------------------------------------------------------------------------------------
// What waits: barriers and warp operations

namespace jetlag::emu {

// Where in the source an operation stands, for messages; and all threads of a barrier must be at the same one.
struct Site {
    const char* file;
    int line;
};

enum class Warp { sync, shuffle, ballot, add, sum_float, sum_double, max_float, mma_bf16, mma_tf32, load_matrix };

// One lane's part in an operation of its warp. The lane that arrives last carries it out for all of them.
struct WarpOperation {
    Warp kind;
    uint32_t mask;
    Site site;
    uint64_t value = 0;  // what the lane brings; afterwards what it gets
    int mode = 0;        // shuffle: which
    int source = 0;      // shuffle: the lane whose value it gets
    float* d = nullptr;  // mma
    const uint32_t *a = nullptr, *b = nullptr;
    uint32_t* registers = nullptr;  // load_matrix: count of them, and the row that the lane points to
    const void* row = nullptr;
    int count = 0;
    bool transposed = false;
};

void block_barrier(Site site);
void warp_operation(WarpOperation& operation);
int lane();

enum class Shuffle { index, up, down, exclusive_or };
int shuffle_source(Shuffle kind, int operand, int width);

template <typename T>
T shuffle(Shuffle kind, unsigned mask, T x, int operand, int width, Site site) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8);
    WarpOperation operation{.kind = Warp::shuffle, .mask = mask, .site = site};
    operation.mode = static_cast<int>(kind);
    operation.source = shuffle_source(kind, operand, width);
    std::memcpy(&operation.value, &x, sizeof(T));
    warp_operation(operation);
    std::memcpy(&x, &operation.value, sizeof(T));
    return x;
}
inline unsigned warp_value(Warp kind, unsigned mask, unsigned value, Site site) {
    WarpOperation operation{.kind = kind, .mask = mask, .site = site, .value = value};
    warp_operation(operation);
    return static_cast<unsigned>(operation.value);
}

template <typename T>
T warp_butterfly(Warp kind, T x, Site site) {
    WarpOperation operation{.kind = kind, .mask = 0xffffffffu, .site = site};
    std::memcpy(&operation.value, &x, sizeof(T));
    warp_operation(operation);
    std::memcpy(&x, &operation.value, sizeof(T));
    return x;
}

// Shared memory of the running block. `key` stands for the declaration; the first thread that gets there makes the
// array, filled with NaNs.
void* shared_array(const void* key, const char* name, size_t bytes, size_t alignment);
void* dynamic_shared_memory();
void check_dynamic_shared(size_t bytes);  // stops unless the launch gave so many

// cp.async of 4, 8 or 16 bytes. From here to the wait the destination holds NaNs.
void copy_async(void* shared, const void* global, int bytes, bool zeros);
void copy_async_commit();
void copy_async_wait(int groups_left);

// Throws std::runtime_error if no GPU could launch it.
void check_launch(const char* text, dim3 grid, dim3 block, size_t shared_bytes);
// Runs body(arguments) for each thread of each block.
void run_grid(const char* text, dim3 grid, dim3 block, size_t shared_bytes, void (*body)(const void*),
              const void* arguments);

}  // namespace jetlag::emu

#define EMU_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(EMU_SITE) {
    jetlag::emu::block_barrier({file, line});
}
inline void __syncwarp(unsigned mask = 0xffffffffu, EMU_SITE) {
    jetlag::emu::warp_value(jetlag::emu::Warp::sync, mask, 0, {file, line});
}
template <typename T>
T __shfl_sync(unsigned mask, T x, int source, int width = 32, EMU_SITE) {
    return jetlag::emu::shuffle(jetlag::emu::Shuffle::index, mask, x, source, width, {file, line});
}
template <typename T>
T __shfl_up_sync(unsigned mask, T x, unsigned delta, int width = 32, EMU_SITE) {
    return jetlag::emu::shuffle(jetlag::emu::Shuffle::up, mask, x, static_cast<int>(delta), width, {file, line});
}
template <typename T>
T __shfl_down_sync(unsigned mask, T x, unsigned delta, int width = 32, EMU_SITE) {
    return jetlag::emu::shuffle(jetlag::emu::Shuffle::down, mask, x, static_cast<int>(delta), width, {file, line});
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T x, int lanes, int width = 32, EMU_SITE) {
    return jetlag::emu::shuffle(jetlag::emu::Shuffle::exclusive_or, mask, x, lanes, width, {file, line});
}
inline unsigned __ballot_sync(unsigned mask, int predicate, EMU_SITE) {
    return jetlag::emu::warp_value(jetlag::emu::Warp::ballot, mask, predicate != 0, {file, line});
}
inline int __any_sync(unsigned mask, int predicate, EMU_SITE) {
    return __ballot_sync(mask, predicate, file, line) != 0;
}
inline int __all_sync(unsigned mask, int predicate, EMU_SITE) {
    return __ballot_sync(mask, predicate, file, line) == mask;
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned x, EMU_SITE) {
    return jetlag::emu::warp_value(jetlag::emu::Warp::add, mask, x, {file, line});
}

// ---------------------------------------------------------------------------------------------------------------
// The primitives of kernels/cuda/device.h; what they do stands there

namespace jetlag {

#define UNROLL _Pragma("GCC unroll 64")
#define ROLLED _Pragma("GCC unroll 1")
#define SHARED_ARRAY(type, name, count)                \
    static char name##_key;                            \
    type(&name)[count] = *static_cast<type(*)[count]>( \
        ::jetlag::emu::shared_array(&name##_key, #name, sizeof(type) * (count), alignof(type)))

template <typename T>
T* dynamic_shared() {
    return static_cast<T*>(emu::dynamic_shared_memory());
}

template <size_t Bytes>
void expect_dynamic_shared() {
    emu::check_dynamic_shared(Bytes);
}

inline void copy_async_16(void* shared, const void* global) {
    emu::copy_async(shared, global, 16, false);
}
inline void copy_async_16_or_zero(void* shared, const void* global, bool in_range) {
    emu::copy_async(shared, global, 16, !in_range);
}
inline void copy_async_4(void* shared, const void* global) {
    emu::copy_async(shared, global, 4, false);
}
inline void copy_async_commit() {
    emu::copy_async_commit();
}
template <int N>
void copy_async_wait() {
    emu::copy_async_wait(N);
}

inline uint32_t pack_bf16(float lo, float hi) {
    return static_cast<uint32_t>(to_bf16(hi).bits) << 16 | to_bf16(lo).bits;
}
inline uint32_t to_tf32(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    if (x != x) return 0x7fffe000;
    return (bits & 0x7fffffff) >= 0x7f800000 ? bits : (bits + 0x1000) & 0xffffe000;
}

inline void mma_bf16_16x8x16(float d[4], const uint32_t a[4], const uint32_t b[2], EMU_SITE) {
    emu::WarpOperation operation{.kind = emu::Warp::mma_bf16, .mask = 0xffffffffu, .site = {file, line}};
    operation.d = d, operation.a = a, operation.b = b;
    emu::warp_operation(operation);
}
inline void mma_tf32_16x8x8(float d[4], const uint32_t a[4], const uint32_t b[2], EMU_SITE) {
    emu::WarpOperation operation{.kind = emu::Warp::mma_tf32, .mask = 0xffffffffu, .site = {file, line}};
    operation.d = d, operation.a = a, operation.b = b;
    emu::warp_operation(operation);
}
namespace emu {
inline void load_matrix(uint32_t* registers, int count, bool transposed, const void* row, Site site) {
    WarpOperation operation{.kind = Warp::load_matrix, .mask = 0xffffffffu, .site = site};
    operation.registers = registers, operation.row = row, operation.count = count, operation.transposed = transposed;
    warp_operation(operation);
}
}  // namespace emu
inline void load_matrix_x4(uint32_t r[4], const void* shared_row, EMU_SITE) {
    emu::load_matrix(r, 4, false, shared_row, {file, line});
}
inline void load_matrix_x2(uint32_t r[2], const void* shared_row, EMU_SITE) {
    emu::load_matrix(r, 2, false, shared_row, {file, line});
}
inline void load_matrix_x4_trans(uint32_t r[4], const void* shared_row, EMU_SITE) {
    emu::load_matrix(r, 4, true, shared_row, {file, line});
}
inline void load_matrix_x2_trans(uint32_t r[2], const void* shared_row, EMU_SITE) {
    emu::load_matrix(r, 2, true, shared_row, {file, line});
}

// As by five shuffles, to the bit, but the lanes wait for each other only once.
inline float warp_sum(float x, EMU_SITE) {
    return emu::warp_butterfly(emu::Warp::sum_float, x, {file, line});
}
inline double warp_sum(double x, EMU_SITE) {
    return emu::warp_butterfly(emu::Warp::sum_double, x, {file, line});
}
inline float warp_max(float x, EMU_SITE) {
    return emu::warp_butterfly(emu::Warp::max_float, x, {file, line});
}

// The kernel gets its own copies of the arguments in every thread, as on the device.
template <typename... Parameters, typename... Arguments>
void launch_kernel(const char* text, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                   cudaStream_t stream, Arguments&&... arguments) {
    using Values = std::tuple<std::remove_cv_t<Parameters>...>;
    struct Call {
        void (*kernel)(Parameters...);
        Values values;
    };
    const Call call{kernel, Values(static_cast<Parameters>(std::forward<Arguments>(arguments))...)};
    emu::check_launch(text, grid, block, shared_bytes);
    emu::submit(stream, [=] {
        emu::run_grid(
            text, grid, block, shared_bytes,
            [](const void* data) {
                const Call& it = *static_cast<const Call*>(data);
                std::apply(it.kernel, it.values);
            },
            &call);
    });
}

}  // namespace jetlag
