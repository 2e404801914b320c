// The products of dense layers that a library computes: cuBLASLt on a GPU (blas_cublaslt.cpp), the CPU's dense layer in
// the emulator (kernels/emu/blas_cpu.cpp). Shapes as in kernels/ops.h; sums in float32; the same bits for the same
// inputs.
#pragma once

#include <cstdint>

#include "kernels/real.h"

namespace jetlag {

// out (N, OC) = inp (N, C) weight^T + bias; weight: (OC, C), bias: (OC).
void blas_forward(real* out, const real* inp, const real* weight, const real* bias, int64_t N, int64_t C, int64_t OC);
// dinp (N, C) = dout (N, OC) weight, unless nullptr; dweight (OC, C) += dout^T inp.
// workspace: blas_workspace_floats(N, C, OC).
void blas_backward(real* dinp, float* dweight, const real* dout, const real* inp, const real* weight, float* workspace,
                   int64_t N, int64_t C, int64_t OC);
int64_t blas_workspace_floats(int64_t N, int64_t C, int64_t OC);

}  // namespace jetlag
