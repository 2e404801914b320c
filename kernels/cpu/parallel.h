// How many threads an op uses, and how it splits sums.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/ops.h"

namespace jetlag {

// As many threads as `work` pays for, in multiply-adds or memory accesses: waking a thread costs about as much
// time as some 20,000 of them.
inline int threads_for(double work) {
    return static_cast<int>(std::clamp(work / 20000.0, 1.0, static_cast<double>(thread_count())));
}

// Sums over n rows are split into this many chunks of equal length, whose partial sums are then added in order.
// Depends on n alone, so that the result does not depend on the number of threads.
inline int64_t sum_chunks(int64_t n) {
    return std::clamp<int64_t>(n / 512, 1, 16);
}
inline int64_t chunk_begin(int64_t chunk, int64_t chunks, int64_t n) {
    return n * chunk / chunks;
}

inline constexpr int64_t kWidestVector = 16;  // floats, of any target

inline int64_t round_up(int64_t n, int64_t multiple) {
    return (n + multiple - 1) / multiple * multiple;
}

}  // namespace jetlag
