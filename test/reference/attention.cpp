// Causal attention, one row of one batch element and head at a time.
#include <algorithm>
#include <cmath>

#include "src/error.h"
#include "test/reference/reference.h"

namespace jetlag::reference {

struct Row {
    double lse;
    Vector probabilities;  // (i + 1), all 0 if every key is masked
};

static Row attention_row(const Vector& q, const Vector& k, const Vector& lag_bias, int64_t i, int64_t D, double scale) {
    Vector scores(i + 1);
    for (int64_t j = 0; j <= i; j++) {
        double dot = 0;
        for (int64_t x = 0; x < D; x++) dot += q[i * D + x] * k[j * D + x];
        scores[j] = scale * dot + (lag_bias.empty() ? 0 : lag_bias[i - j]);
    }
    const double max = *std::max_element(scores.begin(), scores.end());
    if (max == -INFINITY) return {max, Vector(i + 1, 0.0)};
    double sum = 0;
    for (const double score : scores) sum += std::exp(score - max);
    for (double& score : scores) score = std::exp(score - max) / sum;
    return {max + std::log(sum), scores};
}

static int64_t check_attention(const Vector& q, const Vector& k, const Vector& v, const Vector& lag_bias, int64_t D) {
    if (D <= 0) fail("reference: head dim is {}, wanted 1 or more", D);
    const int64_t T = std::ssize(q) / D;
    check_size(q, T * D, "q");
    check_size(k, T * D, "k");
    check_size(v, T * D, "v");
    if (!lag_bias.empty()) check_size(lag_bias, T, "lag_bias");
    return T;
}

Attention attention_forward(const Vector& q, const Vector& k, const Vector& v, const Vector& lag_bias, int64_t D,
                            double scale) {
    const int64_t T = check_attention(q, k, v, lag_bias, D);
    Attention result{Vector(T * D, 0.0), Vector(T), Vector(T, 0.0), Vector(T, 0.0)};
    for (int64_t i = 0; i < T; i++) {
        const Row row = attention_row(q, k, lag_bias, i, D, scale);
        result.lse[i] = row.lse;
        for (int64_t j = 0; j <= i; j++) {
            const double p = row.probabilities[j];
            for (int64_t x = 0; x < D; x++) result.out[i * D + x] += p * v[j * D + x];
            if (p > 0) result.entropy[i] -= p * std::log(p);
            result.mean_lag[i] += p * (i - j);
        }
    }
    return result;
}

AttentionGradients attention_backward(const Vector& dout, const Vector& q, const Vector& k, const Vector& v,
                                      const Vector& lag_bias, int64_t D, double scale) {
    const int64_t T = check_attention(q, k, v, lag_bias, D);
    check_size(dout, T * D, "dout");
    AttentionGradients result{Vector(T * D, 0.0), Vector(T * D, 0.0), Vector(T * D, 0.0), Vector(T, 0.0)};
    for (int64_t i = 0; i < T; i++) {
        const Row row = attention_row(q, k, lag_bias, i, D, scale);
        Vector dprobabilities(i + 1, 0.0);
        double mean = 0;
        for (int64_t j = 0; j <= i; j++) {
            for (int64_t x = 0; x < D; x++) {
                dprobabilities[j] += dout[i * D + x] * v[j * D + x];
                result.dv[j * D + x] += row.probabilities[j] * dout[i * D + x];
            }
            mean += row.probabilities[j] * dprobabilities[j];
        }
        for (int64_t j = 0; j <= i; j++) {
            const double dscore = row.probabilities[j] * (dprobabilities[j] - mean);
            result.dlag_bias[i - j] += dscore;
            for (int64_t x = 0; x < D; x++) {
                result.dq[i * D + x] += scale * dscore * k[j * D + x];
                result.dk[j * D + x] += scale * dscore * q[i * D + x];
            }
        }
    }
    return result;
}

struct Shape {
    int64_t B, T, H, D;
};

// One of S arrays of one batch element and head out of (B, T, S, H, D) -> (T, D), and back.
static Vector head_slice(const Vector& x, const Shape& shape, int64_t S, int64_t s, int64_t b, int64_t h) {
    const auto [B, T, H, D] = shape;
    check_size(x, B * T * S * H * D, "(B, T, S, H, D) array");
    Vector out(T * D);
    for (int64_t t = 0; t < T; t++) {
        for (int64_t d = 0; d < D; d++) out[t * D + d] = x[(((b * T + t) * S + s) * H + h) * D + d];
    }
    return out;
}

static void set_head_slice(const Vector& slice, const Shape& shape, int64_t S, int64_t s, int64_t b, int64_t h,
                           Vector& x) {
    const auto [B, T, H, D] = shape;
    check_size(x, B * T * S * H * D, "(B, T, S, H, D) array");
    for (int64_t t = 0; t < T; t++) {
        for (int64_t d = 0; d < D; d++) x[(((b * T + t) * S + s) * H + h) * D + d] = slice[t * D + d];
    }
}

static Vector lag_bias_row(const Vector& table, int64_t T, int64_t h) {
    return table.empty() ? Vector() : Vector(table.begin() + h * T, table.begin() + (h + 1) * T);
}

static Shape checked_layer(const Vector& qkv, const Vector& lag_bias, const Shape& shape) {
    check_size(qkv, shape.B * shape.T * 3 * shape.H * shape.D, "qkv");
    if (!lag_bias.empty()) check_size(lag_bias, shape.H * shape.T, "lag_bias");
    return shape;
}

AttentionLayer attention_layer_forward(const Vector& qkv, const RotaryTable& rotary, const Vector& lag_bias, int64_t B,
                                       int64_t T, int64_t H, int64_t D) {
    const Shape shape = checked_layer(qkv, lag_bias, {B, T, H, D});
    AttentionLayer layer;
    layer.out.resize(B * T * H * D);
    for (int64_t b = 0; b < B; b++) {
        for (int64_t h = 0; h < H; h++) {
            const Vector q = rotate_queries(rotary, head_slice(qkv, shape, 3, 0, b, h), D);
            const Vector k = rotate_keys(rotary, head_slice(qkv, shape, 3, 1, b, h), D);
            const Vector v = head_slice(qkv, shape, 3, 2, b, h);
            const Attention one = attention_forward(q, k, v, lag_bias_row(lag_bias, T, h), D, 1 / std::sqrt(D));
            set_head_slice(one.out, shape, 1, 0, b, h, layer.out);
            layer.lse.insert(layer.lse.end(), one.lse.begin(), one.lse.end());
            layer.entropy.insert(layer.entropy.end(), one.entropy.begin(), one.entropy.end());
            layer.mean_lag.insert(layer.mean_lag.end(), one.mean_lag.begin(), one.mean_lag.end());
        }
    }
    return layer;
}

AttentionLayerGradients attention_layer_backward(const Vector& dout, const Vector& qkv, const RotaryTable& rotary,
                                                 const Vector& lag_bias, int64_t B, int64_t T, int64_t H, int64_t D) {
    const Shape shape = checked_layer(qkv, lag_bias, {B, T, H, D});
    check_size(dout, B * T * H * D, "dout");
    AttentionLayerGradients result{Vector(qkv.size(), 0.0), Vector(H * T, 0.0)};
    for (int64_t b = 0; b < B; b++) {
        for (int64_t h = 0; h < H; h++) {
            const Vector q = rotate_queries(rotary, head_slice(qkv, shape, 3, 0, b, h), D);
            const Vector k = rotate_keys(rotary, head_slice(qkv, shape, 3, 1, b, h), D);
            const Vector v = head_slice(qkv, shape, 3, 2, b, h);
            const AttentionGradients one = attention_backward(head_slice(dout, shape, 1, 0, b, h), q, k, v,
                                                              lag_bias_row(lag_bias, T, h), D, 1 / std::sqrt(D));
            set_head_slice(rotate_queries_backward(rotary, one.dq, D), shape, 3, 0, b, h, result.dqkv);
            set_head_slice(rotate_keys_backward(rotary, one.dk, D), shape, 3, 1, b, h, result.dqkv);
            set_head_slice(one.dv, shape, 3, 2, b, h, result.dqkv);
            for (int64_t lag = 0; lag < T; lag++) result.dlag_bias[h * T + lag] += one.dlag_bias[lag];
        }
    }
    return result;
}

}  // namespace jetlag::reference
