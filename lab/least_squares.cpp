#include "lab/least_squares.h"

#include <algorithm>
#include <cmath>

#include <eigen3/Eigen/QR>
#include <eigen3/Eigen/SVD>

namespace jetlag {

using EigenMatrix = Eigen::MatrixXd;

static Eigen::Map<const EigenMatrix> view(const Matrix& matrix) {
    return {matrix.values.data(), matrix.rows, matrix.columns};
}

Standardisation column_statistics(const Matrix& columns) {
    Standardisation s;
    for (int64_t j = 0; j < columns.columns; j++) {
        const double* x = &columns.values[static_cast<size_t>(j * columns.rows)];
        double mean = 0, squares = 0;
        for (int64_t i = 0; i < columns.rows; i++) mean += x[i];
        mean /= static_cast<double>(columns.rows);
        for (int64_t i = 0; i < columns.rows; i++) squares += (x[i] - mean) * (x[i] - mean);
        s.mean.push_back(mean);
        s.deviation.push_back(std::max(std::sqrt(squares / static_cast<double>(columns.rows - 1)), kDeviationFloor));
    }
    return s;
}

Matrix standardised(const Matrix& columns, const Standardisation& by, bool intercept) {
    const int64_t first = intercept ? 1 : 0;
    Matrix design = make_matrix(columns.rows, columns.columns + first);
    if (intercept) std::fill_n(design.values.begin(), columns.rows, 1.0);
    for (int64_t j = 0; j < columns.columns; j++) {
        const size_t k = static_cast<size_t>(j);
        for (int64_t i = 0; i < columns.rows; i++)
            design.values[static_cast<size_t>((j + first) * columns.rows + i)] =
                (columns.values[static_cast<size_t>(j * columns.rows + i)] - by.mean[k]) / by.deviation[k];
    }
    return design;
}

Matrix least_squares(const Matrix& design, const Matrix& targets) {
    const Eigen::CompleteOrthogonalDecomposition<EigenMatrix> decomposition(view(design));
    Matrix weights = make_matrix(design.columns, targets.columns);
    Eigen::Map<EigenMatrix> w(weights.values.data(), weights.rows, weights.columns);
    w = decomposition.solve(view(targets));
    // One step of iterative refinement: what the first solution left of a target that lies in the space.
    w += decomposition.solve(view(targets) - view(design) * w);
    return weights;
}

double condition_number(const Matrix& matrix) {
    // Of a tall matrix the singular values are those of the triangular factor, which is small.
    EigenMatrix square = view(matrix);
    if (!square.allFinite()) return NAN;
    if (matrix.rows > matrix.columns) {
        const Eigen::HouseholderQR<EigenMatrix> qr(square);
        square = qr.matrixQR().topRows(matrix.columns).triangularView<Eigen::Upper>();
    }
    const Eigen::JacobiSVD<EigenMatrix> svd(square);
    return svd.singularValues()(0) /
           std::max(svd.singularValues()(svd.singularValues().size() - 1), kSingularValueFloor);
}

}  // namespace jetlag
