// The rows that attention multiplies, for an implementation that does not rotate: attention_cudnn.cpp. Both are of
// attention.cu. D is a multiple of 4.
#pragma once

#include <cstdint>

#include "kernels/ops.h"

namespace jetlag {

// query, key: (B, H, T, D), sheared and rotated, query times 1 / sqrt(D).   qkv: (B, T, 3, H, D)
void attention_rows(real* query, real* key, const real* qkv, const RotaryTable& rotary, int64_t B, int64_t T, int64_t H,
                    int64_t D);
// dqkv: the gradients of q and k = from those of their rows, dquery and dkey; that of v stays as it is.
void attention_rows_backward(real* dqkv, real* dquery, real* dkey, const RotaryTable& rotary, int64_t B, int64_t T,
                             int64_t H, int64_t D);

}  // namespace jetlag
