// cuBLASLt's place in the emulator is taken by the CPU's dense layer, with operands of bf16 widened to float before it
// and its results rounded after it. In tf32, operands are rounded before it.
#include <algorithm>
#include <bit>
#include <vector>

#include "kernels/cpu/dense.h"
#include "kernels/cuda/blas.h"
#include "kernels/cuda/device.h"

namespace jetlag {
namespace {

// n values of x as floats: x itself, or a copy in `copy`.
[[maybe_unused]] const float* widened(const float* x, int64_t, std::vector<float>&) {
    return x;
}
[[maybe_unused]] const float* widened(const bf16* x, int64_t n, std::vector<float>& copy) {
    copy.resize(static_cast<size_t>(n));
    std::transform(x, x + n, copy.begin(), [](bf16 value) { return to_float(value); });
    return copy.data();
}
// The same of what a product multiplies.
const float* operand(const real* x, int64_t n, std::vector<float>& copy) {
    if (!kTf32) return widened(x, n, copy);
    copy.resize(static_cast<size_t>(n));
    std::transform(x, x + n, copy.begin(), [](real value) { return std::bit_cast<float>(to_tf32(to_float(value))); });
    return copy.data();
}

// Where n results for `out` are to be written, and what brings them there.
[[maybe_unused]] float* destination(float* out, int64_t, std::vector<float>&) {
    return out;
}
[[maybe_unused]] float* destination(bf16*, int64_t n, std::vector<float>& results) {
    results.resize(static_cast<size_t>(n));
    return results.data();
}
[[maybe_unused]] void deliver(float*, const std::vector<float>&) {}
[[maybe_unused]] void deliver(bf16* out, const std::vector<float>& results) {
    std::transform(results.begin(), results.end(), out, to_bf16);
}

}  // namespace

void blas_forward(real* out, const real* inp, const real* weight, const real* bias, int64_t N, int64_t C, int64_t OC) {
    emu::submit(device_stream(), [=] {
        std::vector<float> results, copies[3];
        dense_forward(destination(out, N * OC, results), operand(inp, N * C, copies[0]),
                      operand(weight, OC * C, copies[1]), widened(bias, OC, copies[2]), N, C, OC);
        deliver(out, results);
    });
}

void blas_backward(real* dinp, float* dweight, const real* dout, const real* inp, const real* weight, float* workspace,
                   int64_t N, int64_t C, int64_t OC) {
    emu::submit(device_stream(), [=] {
        std::vector<float> results, copies[3];
        dense_backward(dinp != nullptr ? destination(dinp, N * C, results) : nullptr, dweight, nullptr,
                       operand(dout, N * OC, copies[0]), operand(inp, N * C, copies[1]),
                       operand(weight, OC * C, copies[2]), workspace, N, C, OC);
        if (dinp != nullptr) deliver(dinp, results);
    });
}

int64_t blas_workspace_floats(int64_t N, int64_t C, int64_t OC) {
    return dense_workspace_floats(N, C, OC);
}

}  // namespace jetlag
