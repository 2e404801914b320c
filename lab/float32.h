// Arithmetic in float, rounded as PyTorch rounds it on a CPU with FMA. The retrieval diagnostic compares scores that
// differ in the last bit (two lags of equal phase whose largest component grows as d^3), so that who wins is decided by
// every rounding on the way; repeated exactly, it gives the published counts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace jetlag {

// Those that PyTorch's vectorised kernels call: SLEEF's functions of 1 unit in the last place, their FMA form. On a CPU
// without FMA the last bits differ.
float float_cos(float x);
float float_sin(float x);
float float_exp(float x);
float float_log1p(float x);

// x^r for an order r >= 0: 1, x, x x, x x x, and from r = 4 on SLEEF's power.
float float_power(float x, int r);

// A matrix of floats in row-major order.
struct FloatMatrix {
    int64_t rows = 0, columns = 0;
    std::vector<float> values;
};

inline FloatMatrix make_float_matrix(int64_t rows, int64_t columns) {
    return {rows, columns, std::vector<float>(static_cast<size_t>(rows * columns))};
}

FloatMatrix transposed(const FloatMatrix& matrix);

// a (M, K) times b (K, N): every element is a chain of fused multiply-adds in the order k = 0..K-1, as BLAS does it for
// a K this small.
FloatMatrix product(const FloatMatrix& a, const FloatMatrix& b);

// Every row divided by its Euclidean norm (at least 1e-12). The squares are summed as a vector unit of eight floats
// sums them: eight fused chains, added in order, then what is left of the row.
// Returns how many rows have a norm that is not finite: those come out as zeros and NaN.
int64_t normalise_rows(FloatMatrix& matrix);

// The first `rows` rows rounded to a symmetric grid of 2^bits - 1 steps: q = round(x / s) s, s = max |x| / (2^(bits -
// 1) - 1), halves to even; s per column, or one s of the whole. A column of zeros stays; with a value that is not
// finite all become NaN.
FloatMatrix quantised(const FloatMatrix& matrix, int bits, bool per_column);

}  // namespace jetlag
