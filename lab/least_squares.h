// Linear least squares and condition numbers, through Eigen, which only this source includes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace jetlag {

// A dense matrix in column-major order: element (i, j) is values[j * rows + i].
struct Matrix {
    int64_t rows = 0, columns = 0;
    std::vector<double> values;
};

inline Matrix make_matrix(int64_t rows, int64_t columns) {
    return {rows, columns, std::vector<double>(static_cast<size_t>(rows * columns), 0.0)};
}

// A deviation counts as at least the first, a smallest singular value as at least the second.
inline constexpr double kDeviationFloor = 1e-8, kSingularValueFloor = 1e-12;

// Mean and sample standard deviation (n - 1) of every column, the latter at least 1e-8.
struct Standardisation {
    std::vector<double> mean, deviation;
};
Standardisation column_statistics(const Matrix& columns);

// (columns - mean) / deviation, behind a column of ones if `intercept`.
Matrix standardised(const Matrix& columns, const Standardisation& by, bool intercept);

// The w of least norm among those that minimise |design w - target|^2, one w per target, each a column of the result
// (design.columns, targets.columns): a rank-revealing complete orthogonal decomposition.
Matrix least_squares(const Matrix& design, const Matrix& targets);

// The largest singular value over the smallest, which counts as at least 1e-12.
double condition_number(const Matrix& matrix);

}  // namespace jetlag
