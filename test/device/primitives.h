// Kernels that use each primitive of kernels/cuda/device.h, for a test on a GPU as on the emulator. All pointers are
// device memory.
#pragma once

#include <cstdint>
#include <string>

namespace jetlag::test {

// out: (6 * 24), the linear number of each thread of a grid (1, 2, 3) of blocks (4, 3, 2), found from its indices.
void run_indices(int32_t* out);

// out[i] = the sum of the 256 values x[256 i ...], by halves in shared memory.
void run_block_sums(float* out, const float* x, int blocks);
// The same in dynamic shared memory of 1024 threads, each with `rounds` values in it; blocks of 1024 * rounds values.
void run_large_block_sums(float* out, const float* x, int blocks, int rounds);

// out: (columns, rows) = the transpose of x (rows, columns), both multiples of 32, through tiles.
void run_transpose(float* out, const float* x, int rows, int columns);

// out: (4, 3, operands, 32): what each lane gets of the lanes' numbers with __shfl_sync, up, down, xor of widths 32,
// 16, 8 and the operands 0 .. operands - 1.
void run_shuffles(int32_t* out, int operands);
// Two halves of a warp with masks of their own, of which one is shuffled twice, and a double.
void run_partial_shuffles(double* out);

// out: (5, 64): for the two warps of a block, with predicates x[thread] % 3 == 0 over the lanes of `mask`: ballot, any,
// all, the sum of x, and, from there on, 1 in each thread that the mask does not name.
void run_votes(uint32_t* out, const uint32_t* x, uint32_t mask);

// out: (3, 64): warp_sum in double, warp_sum, warp_max; by_shuffles: (2, 64): the last two from shuffles.
void run_warp_sums(float* out, float* by_shuffles, const float* x);

// d: (16, 8) += a (16, K) b (K, 8), for `products` products one behind the other; K is 16 for bf16, 8 for tf32. The
// fragments are loaded value by value as their layouts say.
void run_mma_bf16(float* d, const float* a, const float* b, int products);
void run_mma_tf32(float* d, const float* a, const float* b, int products);
// The same bf16 product through shared memory and load_matrix: a by x4, b (K, 8) by x2 with transposition.
void run_mma_loaded(float* d, const float* a, const float* b, int products);
// out: (4, 32, 4): the registers of load_matrix_x4, _x4_trans, _x2, _x2_trans of a (32, 8) of the numbers 0 .. 255.
void run_load_matrix(uint32_t* out);

// out: (rows, 64) = the sums of neighbouring rows of x (rows + 1, 64), by a pipeline of asynchronous copies. Rows from
// `end` on count as zeros.
void run_pipeline(float* out, const float* x, int rows, int end);
// out: (64) = x[shift ...], in single values.
void run_copy_shifted(float* out, const float* x, int shift);

// out: (5, n): for each x the bits of to_bf16, of it back in float, of pack_bf16(x, -x), of to_tf32, of load(store).
void run_conversions(uint32_t* out, const float* x, int n);

// out: (4): sum and maximum of x (n), the number of blocks of 128, and the sum again by the last block to end.
// out and blocks_done are zeros before; block_sums is as long as there are blocks.
void run_atomics(int32_t* out, int32_t* block_sums, uint32_t* blocks_done, const int32_t* x, int n);

// The message of a launch that cannot be, of a kernel template; "" if it can.
std::string launch_with_threads(int threads);
// out = twice an int64_t, given as int; a float, given as double; and the pointer's offset.
void run_arguments(double* out);

// x (n) += addend, then doubled: captured in a graph once, and replayed `times` times. Returns the milliseconds that
// events say it took.
float run_graph(float* x, float addend, int n, int times);
// What cudaMalloc says while a stream is captured, and then the end of the capture.
std::string allocate_while_capturing();

}  // namespace jetlag::test
