// The dense layer of the CPU under names of its own: linear.cpp makes the ops of it, and kernels/emu/ the products that
// cuBLASLt computes on a GPU. As the linear_* ops (kernels/ops.h); dbias may be nullptr too.
#pragma once

#include <cstdint>

namespace jetlag {

void dense_forward(float* out, const float* inp, const float* weight, const float* bias, int64_t N, int64_t C,
                   int64_t OC);
void dense_forward_row(float* out, const float* inp, const float* weight, const float* bias, int64_t C, int64_t OC);
void dense_backward(float* dinp, float* dweight, float* dbias, const float* dout, const float* inp, const float* weight,
                    float* workspace, int64_t N, int64_t C, int64_t OC);
int64_t dense_workspace_floats(int64_t N, int64_t C, int64_t OC);

}  // namespace jetlag
