// The ops that know nothing about position.
#include <algorithm>
#include <cmath>
#include <numbers>

#include "src/error.h"
#include "test/reference/reference.h"

namespace jetlag::reference {

int64_t element_count(const std::vector<int64_t>& shape) {
    int64_t count = 1;
    for (const int64_t extent : shape) count *= extent;
    return count;
}

void check_size(const Vector& values, int64_t wanted, const char* name) {
    if (std::ssize(values) != wanted) fail("reference: {} has {} elements, wanted {}", name, values.size(), wanted);
}

static int64_t rows_of(const Vector& values, int64_t width, const char* name) {
    const int64_t size = std::ssize(values);
    if (width <= 0 || size % width != 0) fail("reference: {} has {} elements, not rows of {}", name, size, width);
    return size / width;
}

static void check_index(int64_t index, int64_t V, const char* name) {
    if (index < 0 || index >= V) fail("reference: {} is {}, wanted 0 <= it < {}", name, index, V);
}

Vector embedding_forward(const Vector& weight, const std::vector<int32_t>& tokens, int64_t C) {
    const int64_t N = std::ssize(tokens), V = rows_of(weight, C, "embedding weight");
    Vector out(N * C);
    for (int64_t n = 0; n < N; n++) {
        check_index(tokens[n], V, "token");
        for (int64_t c = 0; c < C; c++) out[n * C + c] = weight[tokens[n] * C + c];
    }
    return out;
}

void embedding_backward(const Vector& dout, const std::vector<int32_t>& tokens, int64_t C, Vector& dweight) {
    const int64_t N = std::ssize(tokens), V = rows_of(dweight, C, "embedding dweight");
    check_size(dout, N * C, "embedding dout");
    for (int64_t n = 0; n < N; n++) {
        check_index(tokens[n], V, "token");
        for (int64_t c = 0; c < C; c++) dweight[tokens[n] * C + c] += dout[n * C + c];
    }
}

struct Moments {
    double mean, inverse_deviation;
};

static Moments row_moments(const double* row, int64_t C) {
    double mean = 0, variance = 0;
    for (int64_t c = 0; c < C; c++) mean += row[c] / C;
    for (int64_t c = 0; c < C; c++) variance += (row[c] - mean) * (row[c] - mean) / C;
    return {mean, 1 / std::sqrt(variance + kLayerNormEpsilon)};
}

Vector layernorm_forward(const Vector& x, const Vector& weight, const Vector& bias) {
    const int64_t C = std::ssize(weight), N = rows_of(x, C, "layernorm x");
    check_size(bias, C, "layernorm bias");
    Vector out(N * C);
    for (int64_t n = 0; n < N; n++) {
        const Moments m = row_moments(&x[n * C], C);
        for (int64_t c = 0; c < C; c++) {
            out[n * C + c] = (x[n * C + c] - m.mean) * m.inverse_deviation * weight[c] + bias[c];
        }
    }
    return out;
}

Vector layernorm_backward(const Vector& dout, const Vector& x, const Vector& weight, Vector& dweight, Vector& dbias) {
    const int64_t C = std::ssize(weight), N = rows_of(x, C, "layernorm x");
    check_size(dout, N * C, "layernorm dout");
    check_size(dweight, C, "layernorm dweight");
    check_size(dbias, C, "layernorm dbias");
    Vector dx(N * C), normalized(C), dnormalized(C);
    for (int64_t n = 0; n < N; n++) {
        const Moments m = row_moments(&x[n * C], C);
        double mean_dn = 0, mean_dn_n = 0;
        for (int64_t c = 0; c < C; c++) {
            normalized[c] = (x[n * C + c] - m.mean) * m.inverse_deviation;
            dnormalized[c] = dout[n * C + c] * weight[c];
            mean_dn += dnormalized[c] / C;
            mean_dn_n += dnormalized[c] * normalized[c] / C;
            dweight[c] += dout[n * C + c] * normalized[c];
            dbias[c] += dout[n * C + c];
        }
        // Mean and deviation depend on every x of the row: their shares are the projections that are taken off.
        for (int64_t c = 0; c < C; c++) {
            dx[n * C + c] = m.inverse_deviation * (dnormalized[c] - mean_dn - normalized[c] * mean_dn_n);
        }
    }
    return dx;
}

Vector linear_forward(const Vector& x, const Vector& weight, const Vector& bias) {
    const int64_t O = std::ssize(bias);
    if (O == 0) fail("reference: linear bias is empty");
    const int64_t I = std::ssize(weight) / O;
    check_size(weight, O * I, "linear weight");
    const int64_t N = rows_of(x, I, "linear x");
    Vector out(N * O);
    for (int64_t n = 0; n < N; n++) {
        for (int64_t o = 0; o < O; o++) {
            double sum = bias[o];
            for (int64_t i = 0; i < I; i++) sum += x[n * I + i] * weight[o * I + i];
            out[n * O + o] = sum;
        }
    }
    return out;
}

Vector linear_backward(const Vector& dout, const Vector& x, const Vector& weight, Vector& dweight, Vector& dbias) {
    const int64_t O = std::ssize(dbias), N = rows_of(dout, O, "linear dout"), I = std::ssize(weight) / O;
    check_size(weight, O * I, "linear weight");
    check_size(dweight, O * I, "linear dweight");
    check_size(x, N * I, "linear x");
    Vector dx(N * I);
    for (int64_t n = 0; n < N; n++) {
        for (int64_t o = 0; o < O; o++) {
            const double d = dout[n * O + o];
            dbias[o] += d;
            for (int64_t i = 0; i < I; i++) {
                dweight[o * I + i] += d * x[n * I + i];
                dx[n * I + i] += d * weight[o * I + i];
            }
        }
    }
    return dx;
}

static double normal_cdf(double x) {
    return 0.5 * std::erfc(-x / std::numbers::sqrt2);
}

Vector gelu_forward(const Vector& x) {
    Vector out(x.size());
    for (size_t i = 0; i < x.size(); i++) out[i] = x[i] * normal_cdf(x[i]);
    return out;
}

Vector gelu_backward(const Vector& dout, const Vector& x) {
    check_size(dout, std::ssize(x), "gelu dout");
    Vector dx(x.size());
    for (size_t i = 0; i < x.size(); i++) {
        const double density = std::exp(-0.5 * x[i] * x[i]) / std::sqrt(2 * std::numbers::pi);
        dx[i] = dout[i] * (normal_cdf(x[i]) + x[i] * density);
    }
    return dx;
}

CrossEntropy cross_entropy(const Vector& logits, const std::vector<int32_t>& targets) {
    const int64_t N = std::ssize(targets);
    if (N == 0) fail("reference: cross_entropy of no targets");
    const int64_t V = std::ssize(logits) / N;
    check_size(logits, N * V, "cross_entropy logits");
    CrossEntropy result{0, Vector(N), Vector(N * V)};
    for (int64_t n = 0; n < N; n++) {
        check_index(targets[n], V, "target");
        const double* row = &logits[n * V];
        const double max = *std::max_element(row, row + V);
        double sum = 0;
        for (int64_t v = 0; v < V; v++) sum += std::exp(row[v] - max);
        result.losses[n] = max + std::log(sum) - row[targets[n]];
        result.loss += result.losses[n] / N;
        for (int64_t v = 0; v < V; v++) {
            result.dlogits[n * V + v] = (std::exp(row[v] - max) / sum - (v == targets[n] ? 1 : 0)) / N;
        }
    }
    return result;
}

void adamw_step(const AdamWSettings& settings, int64_t step, Vector& parameter, const Vector& gradient,
                Vector& first_moment, Vector& second_moment) {
    check_size(gradient, std::ssize(parameter), "adamw gradient");
    check_size(first_moment, std::ssize(parameter), "adamw first_moment");
    check_size(second_moment, std::ssize(parameter), "adamw second_moment");
    const double correction1 = 1 - std::pow(settings.beta1, static_cast<double>(step));
    const double correction2 = 1 - std::pow(settings.beta2, static_cast<double>(step));
    for (size_t i = 0; i < parameter.size(); i++) {
        const double g = gradient[i];
        parameter[i] -= settings.lr * settings.weight_decay * parameter[i];
        first_moment[i] = settings.beta1 * first_moment[i] + (1 - settings.beta1) * g;
        second_moment[i] = settings.beta2 * second_moment[i] + (1 - settings.beta2) * g * g;
        const double m = first_moment[i] / correction1, v = second_moment[i] / correction2;
        parameter[i] -= settings.lr * m / (std::sqrt(v) + settings.eps);
    }
}

}  // namespace jetlag::reference
