// Token embedding: a gather forward, a scatter-add backward.
#include <cstring>
#include <vector>

#include "kernels/cpu/parallel.h"
#include "kernels/ops.h"

namespace jetlag {

void embedding_forward(float* out, const float* weight, const int32_t* tokens, int64_t N, int64_t C) {
#pragma omp parallel for schedule(static) num_threads(threads_for(static_cast <double>(N * C)))
    for (int64_t n = 0; n < N; n++)
        std::memcpy(out + n * C, weight + tokens[n] * C, static_cast<size_t>(C) * sizeof(float));
}

// A counting sort brings the rows of each token together, so that every row of dweight has one owner, who adds
// them in the order of n, in double: a common byte occurs thousands of times in a batch.
void embedding_backward(float* dweight, const float* dout, const int32_t* tokens, int64_t N, int64_t V, int64_t C) {
    std::vector<int64_t> first(static_cast<size_t>(V + 1), 0), order(static_cast<size_t>(N));
    for (int64_t n = 0; n < N; n++) first[tokens[n] + 1]++;
    for (int64_t v = 0; v < V; v++) first[v + 1] += first[v];
    std::vector<int64_t> next(first.begin(), first.end() - 1);
    for (int64_t n = 0; n < N; n++) order[next[tokens[n]]++] = n;
#pragma omp parallel num_threads(threads_for(static_cast <double>(N * C)))
    {
        std::vector<double> sum(static_cast<size_t>(C));
#pragma omp for schedule(dynamic, 4)
        for (int64_t v = 0; v < V; v++) {
            if (first[v] == first[v + 1]) continue;
            std::fill(sum.begin(), sum.end(), 0.0);
            for (int64_t i = first[v]; i < first[v + 1]; i++)
                for (int64_t c = 0; c < C; c++) sum[c] += dout[order[i] * C + c];
            for (int64_t c = 0; c < C; c++) dweight[v * C + c] += static_cast<float>(sum[c]);
        }
    }
}

}  // namespace jetlag
