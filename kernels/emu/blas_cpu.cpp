// cuBLASLt's place in the emulator is taken by the CPU's dense layer.
#include "kernels/cpu/dense.h"
#include "kernels/cuda/blas.h"
#include "kernels/cuda/device.h"

namespace jetlag {

void blas_forward(float* out, const float* inp, const float* weight, const float* bias, int64_t N, int64_t C,
                  int64_t OC) {
    emu::submit(device_stream(), [=] { dense_forward(out, inp, weight, bias, N, C, OC); });
}

void blas_backward(float* dinp, float* dweight, const float* dout, const float* inp, const float* weight,
                   float* workspace, int64_t N, int64_t C, int64_t OC) {
    emu::submit(device_stream(),
                [=] { dense_backward(dinp, dweight, nullptr, dout, inp, weight, workspace, N, C, OC); });
}

int64_t blas_workspace_floats(int64_t N, int64_t C, int64_t OC) {
    return dense_workspace_floats(N, C, OC);
}

}  // namespace jetlag
