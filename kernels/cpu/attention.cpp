// Causal attention with a rotary table and a lag-bias table, forward and backward.
//
// Everything is laid out with query rows in vector lanes. A tile of scores is computed transposed, S^T (keys x rows),
// so that the softmax needs no operation across lanes: the running maximum and sum of 16 rows are one vector.
// Lags grow by one from lane to lane, so the lag bias of a key and a vector of rows is one (unaligned) vector of
// the table. The bias is what the score accumulators start from, so adding it costs a load. Lags below zero read
// -infinity, so the causal mask costs nothing either. The run of the table that a tile needs (rows + keys - 1 floats)
// is staged once per tile.
//
// All products are one micro-kernel, C (M x vectors) = init + A B with A broadcast and B in vectors:
//
//     forward    S^T  = K Q^T          O^T  += V^T P^T
//     backward   S^T, dP^T = V dO^T    dQ^T += K^T dS^T     dV += P^T dO     dK += dS^T Q
//
// Forward works on one tile of rows at a time, streaming over key tiles with the online softmax. Backward works on
// one tile of keys at a time, so that dK and dV have one owner, and recomputes P from the saved log-sum-exp; dQ is
// summed per segment of keys, and the segments are added in order. Segments are cut by problem size, not by thread
// count. The gradient of the lag table is the sums of dS along diagonals, kept per segment and added in order.
//
// Arithmetic: 4 D operations per (row, key) pair forward, 10 D backward; bound by the multiply-add units.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/attention.cpp"
#include <hwy/foreach_target.h>
// clang-format off
#include <hwy/highway.h>
#include "kernels/cpu/exp-inl.h"
// clang-format on

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/ops.h"

// Shared by all targets.
#ifndef JETLAG_ATTENTION_ONCE
#define JETLAG_ATTENTION_ONCE
namespace jetlag {

inline constexpr int64_t kKeyTile = 48;  // keys of a tile
inline constexpr int64_t kMaxRows = 64;  // rows of a tile, at most; the widest target has as many
inline constexpr int64_t kPad = 16;      // rows of q and dout as vectors along D are padded to this

// One head of one sequence, packed: rotated, contiguous, padded with zeros.
struct PackedHead {
    int64_t T, D, padded_D;
    float* query_tiles;  // (tiles, D, rows): q transposed within a tile of rows, times 1/sqrt(D)
    float* key;          // (T, D)
    float* value;        // (T, D)
    // Backward only:
    float* dout_tiles;      // (tiles, D, rows)
    float* query_rows;      // (tiles * rows, padded_D), times 1/sqrt(D)
    float* dout_rows;       // (tiles * rows, padded_D)
    float* lse;             // (tiles * rows); +infinity where P is 0: no such row, or a row without a key
    float* delta;           // (tiles * rows): sum_d dout out
    const float* lag_bias;  // (T) or nullptr
};

struct ForwardRows {
    float* out;  // row stride H * D
    int64_t out_stride;
    float* lse;       // this head's (T)
    float* entropy;   // or nullptr
    float* mean_lag;  // or nullptr
};

struct BackwardSegment {
    int64_t key_begin, key_end;
    float* dquery_tiles;  // (tiles, D, rows) =
    double* dlag_bias;    // (T) =, or nullptr
    float* dkey;          // row stride dkv_stride, rows key_begin.. of this head =
    float* dvalue;
    int64_t dkv_stride;
};

}  // namespace jetlag
#endif

HWY_BEFORE_NAMESPACE();
namespace jetlag {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D32 = hn::ScalableTag<float>;
using Vec = hn::Vec<D32>;

// Targets with 32 vector registers hold 6 x 4 accumulators, those with 16 hold 6 x 2.
inline constexpr bool kManyRegisters = HWY_TARGET <= HWY_AVX3 || HWY_ARCH_ARM_A64;
inline constexpr int kRowVectors = kManyRegisters ? 4 : 2;
inline constexpr int kMicroRows = 6;

int64_t row_tile() {
    return kRowVectors * static_cast<int64_t>(hn::Lanes(D32()));
}

// c[m][:] = init[m][:] + sum_k a[m][k] b[k][:] for m < M, with V vectors to a row. Strides in floats.
template <int M, int V>
HWY_INLINE void micro_kernel(const float* HWY_RESTRICT a, int64_t a_m, int64_t a_k, const float* HWY_RESTRICT b,
                             int64_t b_k, int64_t K, const float* init, int64_t init_m, float* c, int64_t c_m) {
    const D32 d;
    const int64_t N = static_cast<int64_t>(hn::Lanes(d));
    Vec sum[M][V];
    for (int m = 0; m < M; m++)
        for (int v = 0; v < V; v++) sum[m][v] = hn::LoadU(d, init + m * init_m + v * N);
    for (int64_t k = 0; k < K; k++) {
        Vec column[V];
        for (int v = 0; v < V; v++) column[v] = hn::LoadU(d, b + k * b_k + v * N);
        for (int m = 0; m < M; m++) {
            const Vec factor = hn::Set(d, a[m * a_m + k * a_k]);
            for (int v = 0; v < V; v++) sum[m][v] = hn::MulAdd(factor, column[v], sum[m][v]);
        }
    }
    for (int m = 0; m < M; m++)
        for (int v = 0; v < V; v++) hn::StoreU(sum[m][v], d, c + m * c_m + v * N);
}

// The same for any number of rows m < M.
template <int V>
HWY_INLINE void multiply(const float* a, int64_t a_m, int64_t a_k, const float* b, int64_t b_k, int64_t M, int64_t K,
                         const float* init, int64_t init_m, float* c, int64_t c_m) {
    int64_t m = 0;
    for (; m + kMicroRows <= M; m += kMicroRows)
        micro_kernel<kMicroRows, V>(a + m * a_m, a_m, a_k, b, b_k, K, init + m * init_m, init_m, c + m * c_m, c_m);
    for (; m + 2 <= M; m += 2)
        micro_kernel<2, V>(a + m * a_m, a_m, a_k, b, b_k, K, init + m * init_m, init_m, c + m * c_m, c_m);
    for (; m < M; m++)
        micro_kernel<1, V>(a + m * a_m, a_m, a_k, b, b_k, K, init + m * init_m, init_m, c + m * c_m, c_m);
}

// c (M, width) += a b for a width that is a multiple of the vector length: dK and dV, which have channels in lanes.
HWY_INLINE void accumulate_wide(const float* a, int64_t a_m, int64_t a_k, const float* b, int64_t b_k, int64_t M,
                                int64_t K, float* c, int64_t c_m, int64_t width) {
    const int64_t N = static_cast<int64_t>(hn::Lanes(D32()));
    int64_t w = 0;
    for (; w + kRowVectors * N <= width; w += kRowVectors * N)
        multiply<kRowVectors>(a, a_m, a_k, b + w, b_k, M, K, c + w, c_m, c + w, c_m);
    for (; w + 2 * N <= width; w += 2 * N) multiply<2>(a, a_m, a_k, b + w, b_k, M, K, c + w, c_m, c + w, c_m);
    for (; w < width; w += N) multiply<1>(a, a_m, a_k, b + w, b_k, M, K, c + w, c_m, c + w, c_m);
}

// Stages run[u] = the bias of lag first_lag + u, -infinity for lags below 0.
HWY_INLINE void stage_lags(float* run, const float* lag_bias, int64_t first_lag, int64_t length, int64_t T) {
    for (int64_t u = 0; u < length; u++) {
        const int64_t lag = first_lag + u;
        run[u] =
            lag < 0 ? -std::numeric_limits<float>::infinity() : (lag_bias != nullptr && lag < T ? lag_bias[lag] : 0.0f);
    }
}

// scores (keys, rows) = bias + K Q^T. Without a bias, tiles that are wholly below the diagonal start from zero.
HWY_INLINE void score_tile(float* scores, float* run, const PackedHead& head, const float* query_tile, int64_t i0,
                           int64_t j0, int64_t keys) {
    const int64_t rows = row_tile();
    const bool needs_run = head.lag_bias != nullptr || j0 + keys - 1 > i0;
    int64_t init_step = 0;
    if (needs_run) {
        stage_lags(run, head.lag_bias, i0 - (j0 + keys - 1), rows + keys - 1, head.T);
        init_step = -1;
    } else {
        std::fill(run, run + rows, 0.0f);
    }
    multiply<kRowVectors>(head.key + j0 * head.D, head.D, 1, query_tile, rows, keys, head.D,
                          run + (needs_run ? keys - 1 : 0), init_step, scores, rows);
}

// One tile of rows over all its keys.
//
// Statistics come from the same stream: with e = exp(s - max), entropy = ln(sum e) - sum e (s - max) / sum e, and
// the mean lag is sum e d / sum e. Both sums are rescaled with the running maximum like the others; a step from
// max to max' also shifts every (s - max), which adds (max - max') sum e to the first.
void forward_rows(const PackedHead& head, int64_t tile, const ForwardRows& result) {
    const D32 d;
    const int64_t N = static_cast<int64_t>(hn::Lanes(d)), rows = row_tile();
    const int64_t i0 = tile * rows, row_count = std::min(rows, head.T - i0), key_end = i0 + row_count;
    const float* query_tile = head.query_tiles + tile * head.D * rows;
    const bool with_stats = result.entropy != nullptr;
    const float infinity = std::numeric_limits<float>::infinity();

    HWY_ALIGN float scores[kKeyTile * kMaxRows];
    HWY_ALIGN float run[kKeyTile + kMaxRows];
    HWY_ALIGN float out[kMaxHeadDim * kMaxRows];
    std::fill(out, out + head.D * rows, 0.0f);
    Vec largest[kRowVectors], sum[kRowVectors], sum_es[kRowVectors], sum_ed[kRowVectors];
    for (int v = 0; v < kRowVectors; v++) {
        largest[v] = hn::Set(d, -infinity);
        sum[v] = sum_es[v] = sum_ed[v] = hn::Zero(d);
    }

    for (int64_t j0 = 0; j0 < key_end; j0 += kKeyTile) {
        const int64_t keys = std::min(kKeyTile, key_end - j0);
        score_tile(scores, run, head, query_tile, i0, j0, keys);
        for (int v = 0; v < kRowVectors; v++) {
            float* column = scores + v * N;
            Vec tile_largest = largest[v];
            for (int64_t c = 0; c < keys; c++) tile_largest = hn::Max(tile_largest, hn::Load(d, column + c * rows));
            // Until a row has met a key its maximum is -infinity; exponents are then taken against 0.
            const Vec reference =
                hn::IfThenElse(hn::Eq(tile_largest, hn::Set(d, -infinity)), hn::Zero(d), tile_largest);
            const Vec rescale = exp_nonpositive(d, hn::Sub(largest[v], reference));
            Vec tile_sum = hn::Zero(d);
            if (with_stats) {
                Vec tile_es = hn::Zero(d), tile_ed = hn::Zero(d);
                const Vec lane_lag = hn::Add(hn::Iota(d, 0.0f), hn::Set(d, static_cast<float>(i0 + v * N - j0)));
                for (int64_t c = 0; c < keys; c++) {
                    const Vec shifted = hn::Sub(hn::Load(d, column + c * rows), reference);
                    const Vec e = exp_nonpositive(d, shifted);
                    hn::Store(e, d, column + c * rows);
                    tile_sum = hn::Add(tile_sum, e);
                    // e is 0 where the score is -infinity, and 0 * -infinity must not be formed.
                    tile_es = hn::MulAdd(e, hn::IfThenZeroElse(hn::Eq(e, hn::Zero(d)), shifted), tile_es);
                    tile_ed = hn::MulAdd(e, hn::Sub(lane_lag, hn::Set(d, static_cast<float>(c))), tile_ed);
                }
                const Vec step =
                    hn::IfThenZeroElse(hn::Eq(largest[v], hn::Set(d, -infinity)), hn::Sub(largest[v], reference));
                sum_es[v] = hn::MulAdd(hn::MulAdd(step, sum[v], sum_es[v]), rescale, tile_es);
                sum_ed[v] = hn::MulAdd(sum_ed[v], rescale, tile_ed);
            } else {
                for (int64_t c = 0; c < keys; c++) {
                    const Vec e = exp_nonpositive(d, hn::Sub(hn::Load(d, column + c * rows), reference));
                    hn::Store(e, d, column + c * rows);
                    tile_sum = hn::Add(tile_sum, e);
                }
            }
            sum[v] = hn::MulAdd(sum[v], rescale, tile_sum);
            largest[v] = tile_largest;
            if (!hn::AllTrue(d, hn::Eq(rescale, hn::Set(d, 1.0f))))
                for (int64_t c = 0; c < head.D; c++) {
                    float* channel = out + c * rows + v * N;
                    hn::Store(hn::Mul(hn::Load(d, channel), rescale), d, channel);
                }
        }
        multiply<kRowVectors>(head.value + j0 * head.D, 1, head.D, scores, rows, head.D, keys, out, rows, out, rows);
    }

    HWY_ALIGN float largest_row[kMaxRows], sum_row[kMaxRows], sum_es_row[kMaxRows], sum_ed_row[kMaxRows];
    for (int v = 0; v < kRowVectors; v++) {
        hn::Store(largest[v], d, largest_row + v * N);
        hn::Store(sum[v], d, sum_row + v * N);
        hn::Store(sum_es[v], d, sum_es_row + v * N);
        hn::Store(sum_ed[v], d, sum_ed_row + v * N);
    }
    for (int64_t r = 0; r < row_count; r++) {
        const float total = sum_row[r];
        const float inverse = total == 0 ? 0 : 1 / total;  // 0: a row without a key
        float* out_row = result.out + (i0 + r) * result.out_stride;
        for (int64_t c = 0; c < head.D; c++) out_row[c] = out[c * rows + r] * inverse;
        result.lse[i0 + r] = total == 0 ? -infinity : largest_row[r] + std::log(total);
        if (with_stats) {
            // max(NaN, 0) is NaN, max(0, NaN) would be 0.
            result.entropy[i0 + r] = total == 0 ? 0 : std::max(std::log(total) - sum_es_row[r] * inverse, 0.0f);
            result.mean_lag[i0 + r] = sum_ed_row[r] * inverse;
        }
    }
}

// One segment of keys over all rows that see it.
//
// The sums of dS along diagonals: key c and row r of a tile have lag index r - c, so key c adds its row vector to the
// run shifted by -c. Four runs take turns, since a load that straddles two recent stores stalls.
void backward_segment(const PackedHead& head, const BackwardSegment& segment) {
    const D32 d;
    const int64_t N = static_cast<int64_t>(hn::Lanes(d)), rows = row_tile(), D = head.D;
    const int64_t tiles = (head.T + rows - 1) / rows;
    constexpr int kRuns = 4;
    HWY_ALIGN float weights[kKeyTile * kMaxRows];
    HWY_ALIGN float dscores[kKeyTile * kMaxRows];
    HWY_ALIGN float run[kKeyTile + kMaxRows];
    HWY_ALIGN float zeros[kMaxRows] = {};
    HWY_ALIGN float diagonals[kRuns][kKeyTile + kMaxRows];
    HWY_ALIGN float dkey[kKeyTile * kMaxHeadDim];
    HWY_ALIGN float dvalue[kKeyTile * kMaxHeadDim];
    std::fill(segment.dquery_tiles, segment.dquery_tiles + tiles * D * rows, 0.0f);
    if (segment.dlag_bias != nullptr) std::fill(segment.dlag_bias, segment.dlag_bias + head.T, 0.0);

    for (int64_t j0 = segment.key_begin; j0 < segment.key_end; j0 += kKeyTile) {
        const int64_t keys = std::min(kKeyTile, segment.key_end - j0);
        std::fill(dkey, dkey + keys * head.padded_D, 0.0f);
        std::fill(dvalue, dvalue + keys * head.padded_D, 0.0f);
        for (int64_t tile = j0 / rows; tile < tiles; tile++) {
            const int64_t i0 = tile * rows;
            score_tile(weights, run, head, head.query_tiles + tile * D * rows, i0, j0, keys);
            multiply<kRowVectors>(head.value + j0 * D, D, 1, head.dout_tiles + tile * D * rows, rows, keys, D, zeros, 0,
                                  dscores, rows);
            for (int v = 0; v < kRowVectors; v++) {
                const Vec lse = hn::Load(d, head.lse + i0 + v * N), delta = hn::Load(d, head.delta + i0 + v * N);
                for (int64_t c = 0; c < keys; c++) {
                    float* weight = weights + c * rows + v * N;
                    float* dscore = dscores + c * rows + v * N;
                    const Vec p = exp_nonpositive(d, hn::Sub(hn::Load(d, weight), lse));
                    hn::Store(p, d, weight);
                    hn::Store(hn::Mul(p, hn::Sub(hn::Load(d, dscore), delta)), d, dscore);
                }
            }
            accumulate_wide(weights, rows, 1, head.dout_rows + i0 * head.padded_D, head.padded_D, keys, rows, dvalue,
                            head.padded_D, head.padded_D);
            accumulate_wide(dscores, rows, 1, head.query_rows + i0 * head.padded_D, head.padded_D, keys, rows, dkey,
                            head.padded_D, head.padded_D);
            float* dquery = segment.dquery_tiles + tile * D * rows;
            multiply<kRowVectors>(head.key + j0 * D, 1, D, dscores, rows, D, keys, dquery, rows, dquery, rows);
            if (segment.dlag_bias != nullptr) {
                const int64_t length = rows + keys - 1, first_lag = i0 - (j0 + keys - 1);
                for (int n = 0; n < kRuns; n++) std::fill(diagonals[n], diagonals[n] + length, 0.0f);
                for (int64_t c = 0; c < keys; c++) {
                    float* diagonal = diagonals[c % kRuns] + keys - 1 - c;
                    for (int v = 0; v < kRowVectors; v++)
                        hn::StoreU(hn::Add(hn::LoadU(d, diagonal + v * N), hn::Load(d, dscores + c * rows + v * N)), d,
                                   diagonal + v * N);
                }
                const int64_t end = std::min(length, head.T - first_lag);
                for (int64_t u = std::max<int64_t>(0, -first_lag); u < end; u++)
                    segment.dlag_bias[first_lag + u] +=
                        (diagonals[0][u] + diagonals[1][u]) + (diagonals[2][u] + diagonals[3][u]);
            }
        }
        for (int64_t c = 0; c < keys; c++)
            for (int64_t channel = 0; channel < D; channel++) {
                segment.dkey[(j0 + c) * segment.dkv_stride + channel] = dkey[c * head.padded_D + channel];
                segment.dvalue[(j0 + c) * segment.dkv_stride + channel] = dvalue[c * head.padded_D + channel];
            }
    }
}

}  // namespace HWY_NAMESPACE
}  // namespace jetlag
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "kernels/cpu/parallel.h"

namespace jetlag {

HWY_EXPORT(row_tile);
HWY_EXPORT(forward_rows);
HWY_EXPORT(backward_segment);

// Shears and rotates one row of q or k in place (z0 += c z1 in a query, z1 -= c z0 in a key).
static void rotate_row(float* row, const RotaryTable& table, const float* cosines, const float* sines, int64_t t,
                       bool is_key) {
    const int64_t P = table.pairs;
    if (table.shear != nullptr) {
        const float c = table.shear[t];
        for (int64_t b = 0; b < P / 2; b++)
            for (int64_t part = 0; part < 2; part++) {
                float& z0 = row[4 * b + part];
                float& z1 = row[4 * b + 2 + part];
                if (is_key)
                    z1 -= c * z0;
                else
                    z0 += c * z1;
            }
    }
    for (int64_t p = 0; p < P; p++) {
        const float x = row[2 * p], y = row[2 * p + 1];
        const float cosine = cosines[t * P + p], sine = sines[t * P + p];
        row[2 * p] = x * cosine - y * sine;
        row[2 * p + 1] = x * sine + y * cosine;
    }
}

// The transpose of rotate_row, for gradients.
static void rotate_row_backward(float* row, const RotaryTable& table, const float* cosines, const float* sines,
                                int64_t t, bool is_key) {
    const int64_t P = table.pairs;
    for (int64_t p = 0; p < P; p++) {
        const float x = row[2 * p], y = row[2 * p + 1];
        const float cosine = cosines[t * P + p], sine = sines[t * P + p];
        row[2 * p] = x * cosine + y * sine;
        row[2 * p + 1] = y * cosine - x * sine;
    }
    if (table.shear != nullptr) {
        const float c = table.shear[t];
        for (int64_t b = 0; b < P / 2; b++)
            for (int64_t part = 0; part < 2; part++) {
                float& dz0 = row[4 * b + part];
                float& dz1 = row[4 * b + 2 + part];
                if (is_key)
                    dz0 -= c * dz1;
                else
                    dz1 += c * dz0;
            }
    }
}

// How a problem is cut. Depends on its sizes alone (and the target's tile of rows, in padding only).
struct Plan {
    int64_t rows, tiles, padded_T, padded_D;
    int64_t group;     // heads (of all sequences) that are packed and worked on at once
    int64_t segments;  // of keys, backward
};

static Plan make_plan(int64_t B, int64_t T, int64_t H, int64_t D) {
    Plan plan;
    plan.rows = HWY_DYNAMIC_DISPATCH(row_tile)();
    plan.tiles = (T + plan.rows - 1) / plan.rows;
    plan.padded_T = round_up(T, kMaxRows);
    plan.padded_D = round_up(D, kPad);
    plan.group = std::clamp<int64_t>(32768 / plan.padded_T, 1, B * H);
    plan.segments = std::clamp<int64_t>(16 / (B * H), 1, (T + kKeyTile - 1) / kKeyTile);
    return plan;
}

// Floats of one packed head, and of one segment's sums.
static int64_t head_floats(const Plan& plan, int64_t D) {
    return plan.padded_T * (2 * D + 2 * round_up(D, 4) + 2 * plan.padded_D + 2);
}
static int64_t segment_floats(const Plan& plan, int64_t D) {
    return plan.padded_T * (D + 2);
}

int64_t attention_workspace_floats(int64_t B, int64_t T, int64_t H, int64_t D) {
    const Plan plan = make_plan(B, T, H, D);
    return plan.group * (head_floats(plan, D) + plan.segments * segment_floats(plan, D)) + 2 * H * plan.padded_T;
}

// Where head number g of the group is packed.
static PackedHead packed_head(float* workspace, const Plan& plan, int64_t g, int64_t T, int64_t D,
                              const float* lag_bias) {
    PackedHead head;
    head.T = T;
    head.D = D;
    head.padded_D = plan.padded_D;
    float* next = workspace + g * head_floats(plan, D);
    const auto take = [&next](int64_t n) { return std::exchange(next, next + n); };
    head.lse = take(plan.padded_T);
    head.delta = take(plan.padded_T);
    head.query_rows = take(plan.padded_T * plan.padded_D);
    head.dout_rows = take(plan.padded_T * plan.padded_D);
    head.query_tiles = take(plan.padded_T * D);
    head.dout_tiles = take(plan.padded_T * D);
    head.key = take(plan.padded_T * round_up(D, 4));
    head.value = take(plan.padded_T * round_up(D, 4));
    head.lag_bias = lag_bias;
    return head;
}

// Packs the rows of one tile: q rotated, scaled and transposed, k rotated, v.
static void pack_tile(const PackedHead& head, const Plan& plan, int64_t tile, const float* qkv, int64_t stride,
                      int64_t C, const RotaryTable& rotary) {
    const int64_t D = head.D, rows = plan.rows, i0 = tile * rows, row_count = std::min(rows, head.T - i0);
    const float scale = static_cast<float>(1 / std::sqrt(static_cast<double>(D)));
    float* query_tile = head.query_tiles + tile * D * rows;
    if (row_count < rows) std::fill(query_tile, query_tile + D * rows, 0.0f);
    float row[kMaxHeadDim];
    for (int64_t r = 0; r < row_count; r++) {
        const int64_t t = i0 + r;
        const float* source = qkv + t * stride;
        std::copy(source, source + D, row);
        rotate_row(row, rotary, rotary.query_cos, rotary.query_sin, t, false);
        for (int64_t c = 0; c < D; c++) query_tile[c * rows + r] = row[c] * scale;
        float* key = head.key + t * D;
        std::copy(source + C, source + C + D, key);
        rotate_row(key, rotary, rotary.key_cos, rotary.key_sin, t, true);
        std::copy(source + 2 * C, source + 2 * C + D, head.value + t * D);
    }
}

// What backward needs besides: q and dout as padded rows, dout transposed, delta, and lse.
static void pack_tile_backward(const PackedHead& head, const Plan& plan, int64_t tile, const float* dout,
                               const float* out, int64_t stride, const float* lse) {
    const int64_t D = head.D, rows = plan.rows, i0 = tile * rows, row_count = std::min(rows, head.T - i0);
    const float infinity = std::numeric_limits<float>::infinity();
    const float* query_tile = head.query_tiles + tile * D * rows;
    float* dout_tile = head.dout_tiles + tile * D * rows;
    std::fill(dout_tile, dout_tile + D * rows, 0.0f);
    for (int64_t r = 0; r < rows; r++) {
        const int64_t t = i0 + r;
        float* query_row = head.query_rows + t * plan.padded_D;
        float* dout_row = head.dout_rows + t * plan.padded_D;
        std::fill(query_row, query_row + plan.padded_D, 0.0f);
        std::fill(dout_row, dout_row + plan.padded_D, 0.0f);
        head.lse[t] = infinity;
        head.delta[t] = 0;
        if (r >= row_count) continue;
        float delta = 0;
        for (int64_t c = 0; c < D; c++) {
            query_row[c] = query_tile[c * rows + r];
            dout_row[c] = dout_tile[c * rows + r] = dout[t * stride + c];
            delta += dout[t * stride + c] * out[t * stride + c];
        }
        head.delta[t] = delta;
        if (lse[t] != -infinity) head.lse[t] = lse[t];
    }
}

void attention_forward(float* out, float* lse, const AttentionRowStats* stats, const float* qkv,
                       const RotaryTable& rotary, const float* lag_bias, float* workspace, int64_t B, int64_t T,
                       int64_t H, int64_t D) {
    const Plan plan = make_plan(B, T, H, D);
    const int64_t C = H * D;
    const auto rows_of_tile = HWY_DYNAMIC_DISPATCH(forward_rows);
    for (int64_t first = 0; first < B * H; first += plan.group) {
        const int64_t heads = std::min(plan.group, B * H - first);
        const auto head_of = [&](int64_t g) {
            const int64_t h = (first + g) % H;
            return packed_head(workspace, plan, g, T, D, lag_bias != nullptr ? lag_bias + h * T : nullptr);
        };
        const double pairs = static_cast<double>(heads) * static_cast<double>(T) * static_cast<double>(T + 1) / 2;
#pragma omp parallel num_threads(threads_for(pairs* static_cast <double>(D) / 4))
        {
#pragma omp for collapse(2) schedule(static)
            for (int64_t g = 0; g < heads; g++)
                for (int64_t tile = 0; tile < plan.tiles; tile++) {
                    const int64_t b = (first + g) / H, h = (first + g) % H;
                    pack_tile(head_of(g), plan, tile, qkv + (b * T * 3 * H + h) * D, 3 * C, C, rotary);
                }
                // The longest rows first, so that the threads end together.
#pragma omp for collapse(2) schedule(dynamic)
            for (int64_t back = 0; back < plan.tiles; back++)
                for (int64_t g = 0; g < heads; g++) {
                    const int64_t b = (first + g) / H, h = (first + g) % H;
                    ForwardRows rows;
                    rows.out = out + (b * T * H + h) * D;
                    rows.out_stride = C;
                    rows.lse = lse + (first + g) * T;
                    rows.entropy = stats != nullptr ? stats->entropy + (first + g) * T : nullptr;
                    rows.mean_lag = stats != nullptr ? stats->mean_lag + (first + g) * T : nullptr;
                    rows_of_tile(head_of(g), plan.tiles - 1 - back, rows);
                }
        }
    }
}

void attention_backward(float* dqkv, float* dlag_bias, const float* dout, const float* qkv, const float* out,
                        const float* lse, const RotaryTable& rotary, const float* lag_bias, float* workspace, int64_t B,
                        int64_t T, int64_t H, int64_t D) {
    const Plan plan = make_plan(B, T, H, D);
    const int64_t C = H * D, S = plan.segments;
    const float scale = static_cast<float>(1 / std::sqrt(static_cast<double>(D)));
    const auto segment_backward = HWY_DYNAMIC_DISPATCH(backward_segment);
    float* segment_space = workspace + plan.group * head_floats(plan, D);
    double* lag_sums =  // (H, T)
        reinterpret_cast<double*>(segment_space + plan.group * S * segment_floats(plan, D));
    if (dlag_bias != nullptr) std::fill(lag_sums, lag_sums + H * T, 0.0);
    // Segment s holds the keys from here on: cut so that each has the same number of pairs.
    const auto segment_begin = [&](int64_t s) {
        const double share = static_cast<double>(s) / static_cast<double>(S);
        const int64_t key = static_cast<int64_t>(static_cast<double>(T) * (1 - std::sqrt(1 - share)));
        return s == S ? T : key / kKeyTile * kKeyTile;
    };

    for (int64_t first = 0; first < B * H; first += plan.group) {
        const int64_t heads = std::min(plan.group, B * H - first);
        const auto head_of = [&](int64_t g) {
            const int64_t h = (first + g) % H;
            return packed_head(workspace, plan, g, T, D, lag_bias != nullptr ? lag_bias + h * T : nullptr);
        };
        const auto segment_of = [&](int64_t g, int64_t s) {
            float* dqkv_head = dqkv + ((first + g) / H * T * 3 * H + (first + g) % H) * D;
            float* space = segment_space + (g * S + s) * segment_floats(plan, D);
            BackwardSegment segment;
            segment.key_begin = segment_begin(s);
            segment.key_end = segment_begin(s + 1);
            segment.dlag_bias = dlag_bias != nullptr ? reinterpret_cast<double*>(space) : nullptr;
            segment.dquery_tiles = space + 2 * plan.padded_T;
            segment.dkey = dqkv_head + C;
            segment.dvalue = dqkv_head + 2 * C;
            segment.dkv_stride = 3 * C;
            return segment;
        };
        const double pairs = static_cast<double>(heads) * static_cast<double>(T) * static_cast<double>(T + 1) / 2;
#pragma omp parallel num_threads(threads_for(pairs* static_cast <double>(D)))
        {
#pragma omp for collapse(2) schedule(static)
            for (int64_t g = 0; g < heads; g++)
                for (int64_t tile = 0; tile < plan.tiles; tile++) {
                    const int64_t b = (first + g) / H, h = (first + g) % H, offset = (b * T * H + h) * D;
                    const PackedHead head = head_of(g);
                    pack_tile(head, plan, tile, qkv + (b * T * 3 * H + h) * D, 3 * C, C, rotary);
                    pack_tile_backward(head, plan, tile, dout + offset, out + offset, C, lse + (first + g) * T);
                }
#pragma omp for collapse(2) schedule(dynamic)
            for (int64_t g = 0; g < heads; g++)
                for (int64_t s = 0; s < S; s++) segment_backward(head_of(g), segment_of(g, s));
                    // dQ: the segments added in order, back from tiles to rows, scaled, and rotated back, as dK.
#pragma omp for collapse(2) schedule(static)
            for (int64_t g = 0; g < heads; g++)
                for (int64_t t = 0; t < T; t++) {
                    float* dquery = dqkv + (((first + g) / H * T + t) * 3 * H + (first + g) % H) * D;
                    const int64_t in_tile = t / plan.rows * D * plan.rows + t % plan.rows;
                    for (int64_t c = 0; c < D; c++) {
                        float sum = 0;
                        for (int64_t s = 0; s < S; s++) sum += segment_of(g, s).dquery_tiles[in_tile + c * plan.rows];
                        dquery[c] = sum * scale;
                    }
                    rotate_row_backward(dquery, rotary, rotary.query_cos, rotary.query_sin, t, false);
                    rotate_row_backward(dquery + C, rotary, rotary.key_cos, rotary.key_sin, t, true);
                }
            if (dlag_bias != nullptr) {
#pragma omp for schedule(static)
                for (int64_t d = 0; d < T; d++)
                    for (int64_t g = 0; g < heads; g++)
                        for (int64_t s = 0; s < S; s++)
                            lag_sums[(first + g) % H * T + d] += segment_of(g, s).dlag_bias[d];
            }
        }
    }
    if (dlag_bias != nullptr)
        for (int64_t i = 0; i < H * T; i++) dlag_bias[i] = static_cast<float>(lag_sums[i]);
}

}  // namespace jetlag
#endif
