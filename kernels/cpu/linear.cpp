// The ops of dense layers are dense.cpp's functions as they are.
#include "kernels/cpu/dense.h"
#include "kernels/ops.h"

namespace jetlag {

void linear_forward(float* out, const float* inp, const float* weight, const float* bias, int64_t N, int64_t C,
                    int64_t OC) {
    dense_forward(out, inp, weight, bias, N, C, OC);
}

void linear_forward_row(float* out, const float* inp, const float* weight, const float* bias, int64_t C, int64_t OC) {
    dense_forward_row(out, inp, weight, bias, C, OC);
}

void linear_backward(float* dinp, float* dweight, float* dbias, const float* dout, const float* inp,
                     const float* weight, float* workspace, int64_t N, int64_t C, int64_t OC) {
    dense_backward(dinp, dweight, dbias, dout, inp, weight, workspace, N, C, OC);
}

int64_t linear_workspace_floats(int64_t N, int64_t C, int64_t OC) {
    return dense_workspace_floats(N, C, OC);
}

}  // namespace jetlag
