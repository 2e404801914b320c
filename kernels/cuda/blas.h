// The products of dense layers that a library computes: cuBLASLt on a GPU (blas_cublaslt.cpp), the CPU's dense layer in
// the emulator (kernels/emu/blas_cpu.cpp). Shapes as in kernels/ops.h; float32 throughout; the same bits for the same
// inputs.
#pragma once

#include <cstdint>

namespace jetlag {

// out (N, OC) = inp (N, C) weight^T + bias; weight: (OC, C), bias: (OC).
void blas_forward(float* out, const float* inp, const float* weight, const float* bias, int64_t N, int64_t C,
                  int64_t OC);
// dinp (N, C) = dout (N, OC) weight, unless nullptr; dweight (OC, C) += dout^T inp.
// workspace: blas_workspace_floats(N, C, OC).
void blas_backward(float* dinp, float* dweight, const float* dout, const float* inp, const float* weight,
                   float* workspace, int64_t N, int64_t C, int64_t OC);
int64_t blas_workspace_floats(int64_t N, int64_t C, int64_t OC);

}  // namespace jetlag
