// Rows taken out of a longer array, and put back.
#include <cstring>

#include "kernels/cpu/parallel.h"
#include "kernels/ops.h"

namespace jetlag {

void copy_rows(float* out, int64_t out_stride, const float* inp, int64_t inp_stride, int64_t rows, int64_t C) {
#pragma omp parallel for schedule(static) num_threads(threads_for(static_cast <double>(rows * C)))
    for (int64_t n = 0; n < rows; n++)
        std::memcpy(out + n * out_stride, inp + n * inp_stride, static_cast<size_t>(C) * sizeof(float));
}

}  // namespace jetlag
