// Dense layers, through oneDNN's sgemm, one thread to a chunk of rows, the chunks in parallel.
//
// Why oneDNN, and why chunks: measured against OpenBLAS 0.3.21 (both from Debian 12) on two cores of a Sapphire
// Rapids server, M = 8192 and 32768, K and N from 96 to 288, single-threaded calls on chunks of 512 rows. In GFLOP/s:
//
//                          M = 8192                          M = 32768
//                     forward   dX       dW             forward   dX       dW
//     OpenBLAS        257-273   261-279  205-268        159-238   198-247  160-244
//     oneDNN 2.6.3    333-363   330-364  295-335        197-339   167-342  268-335
//
// (forward and dX at M = 32768 with N = 256 or more are bound by memory.) Both libraries' own threading splits
// the sums by the number of threads; with chunks of our own the result does not depend on it.
#include <omp.h>
#include <oneapi/dnnl/dnnl.h>

#include <cstring>

#include "kernels/cpu/parallel.h"
#include "kernels/ops.h"

namespace jetlag {

static constexpr int64_t kChunkRows = 512;

// c (M, N) = a b + beta c in row-major order, on the calling thread alone.
static void single_thread_sgemm(char transpose_a, char transpose_b, int64_t M, int64_t N, int64_t K, const float* a,
                                int64_t lda, const float* b, int64_t ldb, float beta, float* c, int64_t ldc) {
    // oneDNN takes all threads it may unless it is inside a parallel region of several.
    const int saved = omp_get_max_threads();
    omp_set_num_threads(1);
    dnnl_sgemm(transpose_a, transpose_b, M, N, K, 1.0f, a, lda, b, ldb, beta, c, ldc);
    omp_set_num_threads(saved);
}

// Each chunk of rows: the bias is written into the output and the product is added to it, so that the output
// is touched once while it is in cache.
void linear_forward(float* out, const float* inp, const float* weight, const float* bias, int64_t N, int64_t C,
                    int64_t OC) {
#pragma omp parallel for schedule(static) \
    num_threads(threads_for(static_cast <double>(N * C) * static_cast <double>(OC) / 16))
    for (int64_t begin = 0; begin < N; begin += kChunkRows) {
        const int64_t rows = std::min(kChunkRows, N - begin);
        for (int64_t n = begin; n < begin + rows; n++)
            std::memcpy(out + n * OC, bias, static_cast<size_t>(OC) * sizeof(float));
        single_thread_sgemm('N', 'T', rows, OC, C, inp + begin * C, C, weight, C, 1.0f, out + begin * OC, OC);
    }
}

int64_t linear_workspace_floats(int64_t N, int64_t C, int64_t OC) {
    return sum_chunks(N) * OC * (C + 1);
}

// dinp = dout weight by chunks of rows; dweight = dout^T inp and dbias = column sums of dout by up to 16 chunks of
// rows, each into a buffer of its own, added in order at the end.
void linear_backward(float* dinp, float* dweight, float* dbias, const float* dout, const float* inp,
                     const float* weight, float* workspace, int64_t N, int64_t C, int64_t OC) {
    const int threads = threads_for(static_cast<double>(N * C) * static_cast<double>(OC) / 16);
    if (dinp != nullptr) {
#pragma omp parallel for schedule(static) num_threads(threads)
        for (int64_t begin = 0; begin < N; begin += kChunkRows) {
            const int64_t rows = std::min(kChunkRows, N - begin);
            single_thread_sgemm('N', 'N', rows, C, OC, dout + begin * OC, OC, weight, C, 0.0f, dinp + begin * C, C);
        }
    }
    const int64_t chunks = sum_chunks(N);
    float* partial_weight = workspace;                  // (chunks, OC, C)
    float* partial_bias = workspace + chunks * OC * C;  // (chunks, OC)
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t chunk = 0; chunk < chunks; chunk++) {
        const int64_t begin = chunk_begin(chunk, chunks, N), end = chunk_begin(chunk + 1, chunks, N);
        single_thread_sgemm('T', 'N', OC, C, end - begin, dout + begin * OC, OC, inp + begin * C, C, 0.0f,
                            partial_weight + chunk * OC * C, C);
        float* sum = partial_bias + chunk * OC;
        std::fill(sum, sum + OC, 0.0f);
        for (int64_t n = begin; n < end; n++)
            for (int64_t o = 0; o < OC; o++) sum[o] += dout[n * OC + o];
    }
#pragma omp parallel for schedule(static) num_threads(threads_for(static_cast <double>(chunks * OC * C)))
    for (int64_t o = 0; o < OC; o++) {
        for (int64_t c = 0; c < C; c++) {
            float sum = 0;
            for (int64_t chunk = 0; chunk < chunks; chunk++) sum += partial_weight[(chunk * OC + o) * C + c];
            dweight[o * C + c] += sum;
        }
        float sum = 0;
        for (int64_t chunk = 0; chunk < chunks; chunk++) sum += partial_bias[chunk * OC + o];
        dbias[o] += sum;
    }
}

}  // namespace jetlag
