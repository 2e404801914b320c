// Kernels with a fault each, which the emulator is to report. All pointers are device memory.
#pragma once

namespace jetlag::test {

// A sum over 128 threads as in block_sums_kernel; without one of its barriers if not `right`.
void run_sum(float* out, const float* x, bool right);
// Threads add to one float in global memory without an atomic or a barrier.
void run_race(float* out);
// out: (64), shared memory that nobody wrote.
void run_unwritten(float* out);
// out: (64) = x through shared memory, read before the wait for the copies.
void run_without_wait(float* out, const float* x);
// Buffers are fetched into again while other threads still read them.
void run_refetch(float* out, const float* x, bool right);

enum class Fault {
    barrier_in_branch,         // half of the threads end instead
    barriers_in_two_branches,  // each half has its own
    barrier_against_shuffle,   // lane 3 is at a barrier, the others shuffle
    shuffle_of_ended_lanes,    // lanes from 16 on have ended
    shuffle_then_end,          // the same, whoever comes first
    different_masks,
    different_operations,
    different_shuffles,  // up in one half of a warp, exclusive or in the other
    mma_in_two_branches,
    own_lane_not_named,
    source_not_named,
    lanes_beyond_block,  // a full mask in a warp of 8 threads
    crossed_shuffles,    // lanes wait for each other in a circle
    shared_write,        // one past the end
    shared_read,
    shared_write_before,
    dynamic_shared_read,
    too_much_shared,
    too_much_with_dynamic_shared,
    load_matrix_from_global,
    load_matrix_unaligned,
    copy_async_to_local,
    copy_async_unaligned,
    copy_async_from_shared,
    wrong_dynamic_shared,  // the kernel expects another size than the launch gives
    deep_recursion,
};
// Runs a kernel with the fault in grids of (2) blocks of (64).
void run_fault(Fault fault, float* out);

// Reads x[at], or writes it.
void run_global_access(float* x, int at, bool write);
// Copies the 4 floats from x[at] on.
void run_global_copy(float* x, int at);

}  // namespace jetlag::test
