// Causal attention with a rotary table and a lag-bias table, forward and backward.
//
// All products are the multiply-add loop of micro-inl.h, A broadcast and B in vectors, on tiles of 72 by 64 (where
// there are 32 vector registers) that stay in the first-level cache:
//
//     forward    rows in lanes    S^T = K Q^T     O^T += V^T P^T
//     backward   keys in lanes    S = Q K^T       dP = dO V^T       dV^T += dO^T P     dK^T += Q^T dS     dQ += dS K
//
// With rows in lanes the softmax needs no operation across lanes: the running maximum and sum of 16 rows are one
// vector. With keys in lanes only dQ has channels in lanes, whose number may not fill whole vectors. Either way lags
// change by one from lane to lane, so the bias of a row of a tile is a row of vectors of the lag table, at any offset.
// The score accumulators start from it, so adding the bias costs nothing, and as lags below zero read -infinity the
// causal mask costs nothing either; a method without a lag bias reads zeros.
//
// Forward works on one tile of rows at a time, from the newest keys to the oldest, with the online softmax. Backward
// works on one tile of keys at a time, so that dK and dV have one owner, and recomputes P from the saved log-sum-exp;
// dQ is summed per segment of keys, and the segments are added in order. Segments are cut by problem size, not by
// thread count. The gradient of the lag table is the sums of dS along diagonals, kept per segment and added in order.
//
// Arithmetic: 4 D operations per (row, key) pair forward, 10 D backward, beside one exponential (about 12 vector
// operations). Bound by the multiply-add units.
//
// Exact skipping. Score (i, j) is at most |q_i| |k_j| + bias(i - j). With upper bounds of all three for a tile, its
// weights, all T of a row taken together, stay below 2^-24 of the row's sum, half a unit in its last place, if
//
//     max_i (|q_i| |k| - m_i) + bias + ln(|v| / |v|_0) < -ln(2^24 T)
//
// where m_i is the running maximum (the row's sum is at least e^m_i) or, in backward, the log-sum-exp, and |v|_0 is the
// largest value of the tile of keys whose largest is smallest: a far key counts by what it would add to the output, not
// by its weight alone. Backward does the same with |dO|, and asks for another ln T for the gradient of the lag table;
// so does forward where the mean lag is wanted. Results are the same to the rounding of a tensor, not of each of its
// rows: a row of dK that only far queries feed may become 0, and |q| and |k|, which differ little from row to row, are
// not weighed. The same test with bounds for all tiles that follow ends the loop, so that a bias that falls with the
// lag costs O(T W).
//
// Without content (a model may freeze queries and keys at zero) scores are the lag bias alone: sums over D channels
// become sums over none, and neither queries nor keys are packed.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/attention.cpp"
#include <hwy/foreach_target.h>
// clang-format off
#include <hwy/highway.h>
#include "kernels/cpu/exp-inl.h"
#include "kernels/cpu/micro-inl.h"
#include "kernels/cpu/rotate-inl.h"
// clang-format on

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "kernels/ops.h"

// Shared by all targets.
#ifndef JETLAG_ATTENTION_ONCE
#define JETLAG_ATTENTION_ONCE
namespace jetlag {

inline constexpr int64_t kTile = 72;      // keys of a forward tile, rows of a backward tile
inline constexpr int64_t kMaxLanes = 64;  // rows of a forward tile, keys of a backward tile, at most
inline constexpr int64_t kLagPad = 192;   // -infinity on either side of a lag table: more than a tile reads
inline constexpr int64_t kPrefetchRows = 12;
inline constexpr int64_t kLagBlock = 16;  // lags whose largest bias is kept

// The lag bias of one head. Entries d = -kLagPad .. T + kLagPad - 1 can be read, -infinity for d < 0 and d >= T.
struct LagTable {
    const float* ascending;   // [d], forward
    const float* descending;  // [-d], backward
    const float* block;       // [b]: the largest of the lags from kLagBlock b on, kLagBlock of them
    const float* from_block;  // [b]: the largest of all blocks from b on
    bool skips;               // whether tiles may be skipped
};

// Of two bounds the larger; +infinity for what is not a number.
inline float larger_bound(float a, float b) {
    return b <= a ? a : b == b ? b : std::numeric_limits<float>::infinity();
}

// Upper bounds for the keys of one tile: Euclidean norms, of values their logarithm; +infinity where a key or a value
// is not finite.
struct KeyBound {
    float key, log_value;                // of this tile
    float key_before, log_value_before;  // of this and all tiles of older keys
};
// The same for the rows of a tile, backward. lse is the smallest.
struct RowBound {
    float query, lse, log_dout;                    // of this tile
    float query_after, lse_after, log_dout_after;  // of this and all tiles of later rows
};

// One head of one sequence, packed: rotated, contiguous, padded with zeros.
struct PackedHead {
    int64_t T, D, padded_D;
    int64_t score_dim;  // channels that scores are sums over: D, or 0 without content
    LagTable lags;
    float* query_norm;    // (padded T), of q / sqrt(D)
    KeyBound* key_bound;  // (tiles of keys)
    float log_quietest_value;
    float margin;  // ln(2^24 T), or more
    // Forward:
    float* query_panels;  // (tiles, D, lanes): q / sqrt(D)
    float* key;           // (T, D)
    float* value;         // (T, D)
    // Backward:
    float* query;         // (T, D): q / sqrt(D)
    float* dout;          // (T, D)
    float* key_panels;    // (tiles, D, lanes)
    float* value_panels;  // (tiles, D, lanes)
    float* key_rows;      // (padded T, padded D)
    float* lse;           // (padded T); +infinity where P is 0: no such row, or a row without a key
    float* delta;         // (padded T): sum_d dout out
    float* dout_norm;     // (padded T)
    RowBound* row_bound;  // (tiles of rows)
    float log_quietest_dout;
};

// Where the rows of a head are in the arrays of the op, with their strides.
struct HeadSource {
    const float *query, *key, *value;  // stride 3 C
    const float *dout, *out;           // stride C; backward
    const float* lse;                  // backward
    int64_t first_row;                 // backward: dout of the rows before it is 0
    int64_t C;
    const RotaryTable* rotary;
};

struct ForwardRows {
    float* out;  // row stride out_stride
    int64_t out_stride;
    float* lse;       // this head's (T)
    float* entropy;   // or nullptr
    float* mean_lag;  // or nullptr
};

struct BackwardSegment {
    int64_t key_begin, key_end;
    float* dquery;         // (T, padded D) = from the first row of the segment on
    double* dlag_bias;     // (T) =, [T - 1 - lag]; or nullptr
    float *dkey, *dvalue;  // this head's, row stride dkv_stride, rows key_begin .. key_end - 1 =
    int64_t dkv_stride;
    int64_t first_row;  // as the source's
};

}  // namespace jetlag
#endif

HWY_BEFORE_NAMESPACE();
namespace jetlag {
namespace HWY_NAMESPACE {

int64_t lanes_of_tile() {
    return tile_lanes();
}

// ---------------------------------------------------------------------------------------------------------------
// Packing

// memcpy without the call, and asks for the row that comes kPrefetchRows later.
HWY_INLINE void copy_row(float* to, const float* from, int64_t D, int64_t stride) {
    const hn::CappedTag<float, 8> d;
    const int64_t N = static_cast<int64_t>(hn::Lanes(d));
    const float* later = from + kPrefetchRows * stride;
    for (int64_t c = 0; c < D; c += 16) __builtin_prefetch(later + c);
    __builtin_prefetch(later + D - 1);
    int64_t c = 0;
    for (; c + N <= D; c += N) hn::StoreU(hn::LoadU(d, from + c), d, to + c);
    for (; c < D; c++) to[c] = from[c];
}

HWY_INLINE float dot(const float* a, const float* b, int64_t D) {
    const hn::CappedTag<float, 8> d;
    const int64_t N = static_cast<int64_t>(hn::Lanes(d));
    auto sums = hn::Zero(d);
    int64_t c = 0;
    for (; c + N <= D; c += N) sums = hn::MulAdd(hn::LoadU(d, a + c), hn::LoadU(d, b + c), sums);
    float sum = hn::GetLane(hn::SumOfLanes(d, sums));
    for (; c < D; c++) sum += a[c] * b[c];
    return sum;
}
HWY_INLINE float norm_of(const float* row, int64_t D) {
    return std::sqrt(dot(row, row, D));
}

// A key that is not finite must show even where its bias is -infinity, which only its value can prevent.
HWY_INLINE KeyBound key_bound(float key, float value) {
    const float infinity = std::numeric_limits<float>::infinity();
    return {key, key < infinity ? std::log(value) : infinity, 0, 0};
}

// Packs the tokens [begin, end) of a head for the forward pass; begin and end are bounds of tiles of rows and of keys,
// or T.
void pack_forward(const PackedHead& head, const HeadSource& source, int64_t begin, int64_t end) {
    const int64_t D = head.D, lanes = tile_lanes(), stride = 3 * source.C;
    const float scale = static_cast<float>(1 / std::sqrt(static_cast<double>(D)));
    const RotaryTable& rotary = *source.rotary;
    HWY_ALIGN float rows[kMaxLanes * kMaxHeadDim];
    for (int64_t t0 = begin; t0 < end; t0 += lanes) {
        const int64_t count = head.score_dim == 0 ? 0 : std::min(lanes, end - t0);
        for (int64_t r = 0; r < lanes; r++) {
            head.query_norm[t0 + r] = 0;
            if (r >= count) continue;
            float* row = rows + r * D;
            copy_row(row, source.query + (t0 + r) * stride, D, stride);
            rotate_row(row, rotary, rotary.query_cos, rotary.query_sin, t0 + r, false);
            if (head.lags.skips) head.query_norm[t0 + r] = norm_of(row, D) * scale;
        }
        if (count > 0) transpose_into_panel(head.query_panels + t0 * D, lanes, rows, D, count, D, scale);
    }
    for (int64_t t = begin; t < end; t++) {
        copy_row(head.value + t * D, source.value + t * stride, D, stride);
        if (head.score_dim == 0) continue;
        copy_row(head.key + t * D, source.key + t * stride, D, stride);
        rotate_row(head.key + t * D, rotary, rotary.key_cos, rotary.key_sin, t, true);
    }
    if (!head.lags.skips) return;
    for (int64_t j0 = begin; j0 < end; j0 += kTile) {
        float key = 0, value = 0;
        for (int64_t j = j0; j < std::min(end, j0 + kTile); j++) {
            key = larger_bound(key, norm_of(head.key + j * D, head.score_dim));
            value = larger_bound(value, norm_of(head.value + j * D, D));
        }
        head.key_bound[j0 / kTile] = key_bound(key, value);
    }
}

// The same for the backward pass: begin and end are bounds of tiles of keys.
void pack_backward(const PackedHead& head, const HeadSource& source, int64_t begin, int64_t end) {
    const int64_t D = head.D, lanes = tile_lanes(), C = source.C;
    const float scale = static_cast<float>(1 / std::sqrt(static_cast<double>(D)));
    const float infinity = std::numeric_limits<float>::infinity();
    const RotaryTable& rotary = *source.rotary;
    for (int64_t t = begin; head.score_dim > 0 && t < end; t++) {
        float* query = head.query + t * D;
        copy_row(query, source.query + t * 3 * C, D, 3 * C);
        rotate_row(query, rotary, rotary.query_cos, rotary.query_sin, t, false);
        for (int64_t c = 0; c < D; c++) query[c] *= scale;
        float* key = head.key_rows + t * head.padded_D;
        copy_row(key, source.key + t * 3 * C, D, 3 * C);
        std::fill(key + D, key + head.padded_D, 0.0f);
        rotate_row(key, rotary, rotary.key_cos, rotary.key_sin, t, true);
    }
    for (int64_t t = begin; t < std::min(end, source.first_row); t++) {
        head.delta[t] = head.query_norm[t] = head.dout_norm[t] = 0;
        head.lse[t] = infinity;
    }
    for (int64_t t = std::max(begin, source.first_row); t < end; t++) {
        float* dout = head.dout + t * D;
        copy_row(dout, source.dout + t * C, D, C);
        head.delta[t] = dot(dout, source.out + t * C, D);
        head.lse[t] = source.lse[t] == -infinity ? infinity : source.lse[t];
        if (!head.lags.skips) continue;
        head.query_norm[t] = norm_of(head.query + t * D, head.score_dim);
        head.dout_norm[t] = norm_of(dout, D);
    }
    for (int64_t t0 = begin; t0 < end; t0 += lanes) {
        const int64_t count = std::min(lanes, end - t0);
        if (head.score_dim > 0)
            transpose_into_panel(head.key_panels + t0 * D, lanes, head.key_rows + t0 * head.padded_D, head.padded_D,
                                 count, D, 1.0f);
        transpose_into_panel(head.value_panels + t0 * D, lanes, source.value + t0 * 3 * C, 3 * C, count, D, 1.0f);
        if (!head.lags.skips) continue;
        float key = 0, value = 0;
        for (int64_t j = t0; j < t0 + count; j++) {
            key = larger_bound(key, norm_of(head.key_rows + j * head.padded_D, head.score_dim));
            value = larger_bound(value, norm_of(source.value + j * 3 * C, D));
        }
        head.key_bound[t0 / lanes] = key_bound(key, value);
    }
}

// row[c] = scale panel[c][r]: one lane of a panel becomes a row.
HWY_INLINE void row_from_panel(float* row, const float* panel, int64_t lanes, int64_t r, int64_t columns, float scale) {
    const D32 d;
    const hn::RebindToSigned<D32> di;
    const int64_t N = lane_count();
    const auto steps = hn::Mul(hn::Iota(di, 0), hn::Set(di, static_cast<int32_t>(lanes)));
    int64_t c = 0;
    for (; c + N <= columns; c += N)
        hn::StoreU(hn::Mul(hn::GatherIndex(d, panel + c * lanes + r, steps), hn::Set(d, scale)), d, row + c);
    for (; c < columns; c++) row[c] = panel[c * lanes + r] * scale;
}

// ---------------------------------------------------------------------------------------------------------------
// Skipping

// The largest bias of the lags first .. last; those below 0 are masked.
HWY_INLINE float largest_bias(const LagTable& lags, int64_t first, int64_t last, int64_t T) {
    float largest = -std::numeric_limits<float>::infinity();
    const int64_t end = std::min(last, T - 1) / kLagBlock;
    for (int64_t b = std::max<int64_t>(first, 0) / kLagBlock; b <= end; b++) largest = std::max(largest, lags.block[b]);
    return largest;
}

// Whether weights of at most e^(reach + bias) on values of at most e^log_ratio times the smallest can be left out. A
// bound that is not a number, or not finite, says no.
HWY_INLINE bool is_negligible(float reach, float bias, float log_ratio, float margin) {
    const float infinity = std::numeric_limits<float>::infinity();
    if (bias == -infinity) return log_ratio < infinity;
    // The bounds are rounded: 1e-5 of them is more than their error.
    return reach + bias + 1e-5f * (std::fabs(reach) + std::fabs(bias)) + log_ratio < -margin;
}

// ---------------------------------------------------------------------------------------------------------------
// Forward

// One tile of rows over all its keys; returns how many tiles of keys were skipped.
//
// Statistics come from the same stream: with e = exp(s - max), entropy = ln(sum e) - sum e (s - max) / sum e, and
// the mean lag is sum e d / sum e. Both sums are rescaled with the running maximum like the others; a step from
// max to max' also shifts every (s - max), which adds (max - max') sum e to the first.
int64_t forward_rows(const PackedHead& head, int64_t tile, const ForwardRows& result) {
    const D32 d;
    const int64_t N = lane_count(), rows = tile_lanes(), D = head.D;
    const int64_t i0 = tile * rows, row_count = std::min(rows, head.T - i0), key_end = i0 + row_count;
    const float* query_panel = head.query_panels + i0 * D;
    const bool with_stats = result.entropy != nullptr;
    const float infinity = std::numeric_limits<float>::infinity();
    const auto none = hn::Set(d, -infinity);

    HWY_ALIGN float scores[kTile * kMaxLanes];
    HWY_ALIGN float out[kMaxHeadDim * kMaxLanes];
    std::fill(out, out + D * rows, 0.0f);
    Vec largest[kTileVectors], sum[kTileVectors], sum_es[kTileVectors], sum_ed[kTileVectors];
    for (int v = 0; v < kTileVectors; v++) {
        largest[v] = none;
        sum[v] = sum_es[v] = sum_ed[v] = hn::Zero(d);
    }

    const int64_t newest = (key_end - 1) / kTile;
    // Leaving out a lag of T may change the mean lag by T times its weight.
    const float margin = head.margin + (with_stats ? std::log(static_cast<float>(head.T)) : 0.0f);
    int64_t skipped = 0;
    for (int64_t key_tile = newest; key_tile >= 0; key_tile--) {
        const int64_t j0 = key_tile * kTile, keys = std::min(kTile, key_end - j0);
        if (head.lags.skips && key_tile < newest) {
            const KeyBound& bound = head.key_bound[key_tile];
            const int64_t first_lag = std::max<int64_t>(0, i0 - (j0 + keys - 1));
            const auto largest_reach = [&](float key) {
                Vec reach = none;
                for (int v = 0; v < kTileVectors; v++) {
                    const Vec query = hn::LoadU(d, head.query_norm + i0 + v * N);
                    reach = hn::Max(reach, hn::MulSub(query, hn::Set(d, key), largest[v]));
                }
                return hn::GetLane(hn::MaxOfLanes(d, reach));
            };
            if (is_negligible(largest_reach(bound.key), largest_bias(head.lags, first_lag, key_end - 1 - j0, head.T),
                              bound.log_value - head.log_quietest_value, margin)) {
                if (is_negligible(largest_reach(bound.key_before), head.lags.from_block[first_lag / kLagBlock],
                                  bound.log_value_before - head.log_quietest_value, margin)) {
                    skipped += key_tile + 1;
                    break;
                }
                skipped++;
                continue;
            }
        }
        Vec tile_largest[kTileVectors];
        for (int v = 0; v < kTileVectors; v++) tile_largest[v] = largest[v];
        multiply<kTileVectors, true>(head.key + j0 * D, D, 1, query_panel, rows, keys, head.score_dim,
                                     head.lags.ascending + (i0 - j0), -1, scores, rows, tile_largest);
        for (int v = 0; v < kTileVectors; v++) {
            float* column = scores + v * N;
            // Until a row has met a key its maximum is -infinity; exponents are then taken against 0.
            const Vec reference = hn::IfThenElse(hn::Eq(tile_largest[v], none), hn::Zero(d), tile_largest[v]);
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
                const Vec step = hn::IfThenZeroElse(hn::Eq(largest[v], none), hn::Sub(largest[v], reference));
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
            largest[v] = tile_largest[v];
            if (!hn::AllTrue(d, hn::Eq(rescale, hn::Set(d, 1.0f))))
                for (int64_t c = 0; c < D; c++) {
                    float* channel = out + c * rows + v * N;
                    hn::Store(hn::Mul(hn::Load(d, channel), rescale), d, channel);
                }
        }
        multiply<kTileVectors>(head.value + j0 * D, 1, D, scores, rows, D, keys, out, rows, out, rows);
    }

    HWY_ALIGN float largest_row[kMaxLanes], sum_row[kMaxLanes], sum_es_row[kMaxLanes], sum_ed_row[kMaxLanes];
    for (int v = 0; v < kTileVectors; v++) {
        hn::Store(largest[v], d, largest_row + v * N);
        hn::Store(sum[v], d, sum_row + v * N);
        hn::Store(sum_es[v], d, sum_es_row + v * N);
        hn::Store(sum_ed[v], d, sum_ed_row + v * N);
    }
    for (int64_t r = 0; r < row_count; r++) {
        const float total = sum_row[r];
        const float inverse = total == 0 ? 0 : 1 / total;  // 0: a row without a key
        row_from_panel(result.out + (i0 + r) * result.out_stride, out, rows, r, D, inverse);
        result.lse[i0 + r] = total == 0 ? -infinity : largest_row[r] + std::log(total);
        if (with_stats) {
            // max(NaN, 0) is NaN, max(0, NaN) would be 0.
            result.entropy[i0 + r] = total == 0 ? 0 : std::max(std::log(total) - sum_es_row[r] * inverse, 0.0f);
            result.mean_lag[i0 + r] = sum_ed_row[r] * inverse;
        }
    }
    return skipped;
}

// ---------------------------------------------------------------------------------------------------------------
// Backward

// One segment of keys over all rows that see it; returns how many tiles of rows were skipped.
//
// The sums of dS along diagonals: row r and key c of a tile have lag index r - c, so row r adds its vectors of keys to
// the run shifted by -r. Four runs take turns, since a load that straddles two recent stores stalls.
int64_t backward_segment(const PackedHead& head, const BackwardSegment& segment) {
    const D32 d;
    const int64_t N = lane_count(), lanes = tile_lanes(), D = head.D, T = head.T, width = head.padded_D;
    const int64_t row_tiles = (T + kTile - 1) / kTile;
    constexpr int kRuns = 4;
    HWY_ALIGN float weights[kTile * kMaxLanes];
    HWY_ALIGN float dscores[kTile * kMaxLanes];
    HWY_ALIGN float zeros[kMaxLanes] = {};
    HWY_ALIGN float diagonals[kRuns][kTile + kMaxLanes];
    HWY_ALIGN float dkey[kMaxHeadDim * kMaxLanes];
    HWY_ALIGN float dvalue[kMaxHeadDim * kMaxLanes];
    // The gradient of a slope multiplies the sum of a lag by the lag, up to T.
    const float margin = head.margin + std::log(static_cast<float>(T));
    const int64_t first_row = segment.key_begin / kTile * kTile;
    if (head.score_dim > 0) std::fill(segment.dquery + first_row * width, segment.dquery + T * width, 0.0f);
    if (segment.dlag_bias != nullptr) std::fill(segment.dlag_bias, segment.dlag_bias + T, 0.0);

    int64_t skipped = 0;
    for (int64_t j0 = segment.key_begin; j0 < segment.key_end; j0 += lanes) {
        const int64_t keys = std::min(lanes, segment.key_end - j0);
        const float* key_panel = head.key_panels + j0 * D;
        const float* value_panel = head.value_panels + j0 * D;
        std::fill(dkey, dkey + head.score_dim * lanes, 0.0f);
        std::fill(dvalue, dvalue + D * lanes, 0.0f);
        for (int64_t row_tile = std::max(j0, segment.first_row) / kTile; row_tile < row_tiles; row_tile++) {
            // Rows before the first key of the tile see none of it.
            const int64_t i0 = std::max({row_tile * kTile, j0, segment.first_row}),
                          rows = std::min((row_tile + 1) * kTile, T) - i0;
            if (head.lags.skips) {
                const KeyBound& key = head.key_bound[j0 / lanes];
                const RowBound& row = head.row_bound[row_tile];
                const int64_t first_lag = std::max<int64_t>(0, i0 - (j0 + keys - 1));
                const float log_ratio = key.log_value - head.log_quietest_value - head.log_quietest_dout;
                if (is_negligible(row.query * key.key - row.lse,
                                  largest_bias(head.lags, first_lag, i0 + rows - 1 - j0, T), log_ratio + row.log_dout,
                                  margin)) {
                    if (is_negligible(row.query_after * key.key - row.lse_after,
                                      head.lags.from_block[first_lag / kLagBlock], log_ratio + row.log_dout_after,
                                      margin)) {
                        skipped += row_tiles - row_tile;
                        break;
                    }
                    skipped++;
                    continue;
                }
            }
            const float* query = head.query + i0 * D;
            const float* dout = head.dout + i0 * D;
            multiply<kTileVectors>(query, D, 1, key_panel, lanes, rows, head.score_dim,
                                   head.lags.descending - (i0 - j0), -1, weights, lanes);
            multiply<kTileVectors>(dout, D, 1, value_panel, lanes, rows, D, zeros, 0, dscores, lanes);
            for (int64_t r = 0; r < rows; r++) {
                const Vec lse = hn::Set(d, head.lse[i0 + r]), delta = hn::Set(d, head.delta[i0 + r]);
                for (int v = 0; v < kTileVectors; v++) {
                    float* weight = weights + r * lanes + v * N;
                    float* dscore = dscores + r * lanes + v * N;
                    const Vec p = exp_nonpositive(d, hn::Sub(hn::Load(d, weight), lse));
                    hn::Store(p, d, weight);
                    hn::Store(hn::Mul(p, hn::Sub(hn::Load(d, dscore), delta)), d, dscore);
                }
            }
            multiply<kTileVectors>(dout, 1, D, weights, lanes, D, rows, dvalue, lanes, dvalue, lanes);
            if (head.score_dim > 0) {
                multiply<kTileVectors>(query, 1, D, dscores, lanes, D, rows, dkey, lanes, dkey, lanes);
                float* dquery = segment.dquery + i0 * width;
                multiply_wide(dscores, lanes, 1, head.key_rows + j0 * width, width, rows, keys, dquery, width, dquery,
                              width, width);
            }
            if (segment.dlag_bias != nullptr) {
                const int64_t length = rows + keys - 1, last_lag = i0 + rows - 1 - j0;
                for (int n = 0; n < kRuns; n++) std::fill(diagonals[n], diagonals[n] + kTile + kMaxLanes, 0.0f);
                for (int64_t r = 0; r < rows; r++) {
                    float* diagonal = diagonals[r % kRuns] + rows - 1 - r;
                    for (int v = 0; v < kTileVectors; v++)
                        hn::StoreU(hn::Add(hn::LoadU(d, diagonal + v * N), hn::Load(d, dscores + r * lanes + v * N)), d,
                                   diagonal + v * N);
                }
                // Entry u has lag last_lag - u; lags below 0 are masked.
                double* sums = segment.dlag_bias + T - 1 - last_lag;
                const int64_t end = std::min(length, last_lag + 1);
                for (int64_t u = 0; u < end; u++)
                    sums[u] += (diagonals[0][u] + diagonals[1][u]) + (diagonals[2][u] + diagonals[3][u]);
            }
        }
        for (int64_t c = 0; c < keys; c++) {
            row_from_panel(segment.dkey + (j0 + c) * segment.dkv_stride, dkey, lanes, c, head.score_dim, 1.0f);
            row_from_panel(segment.dvalue + (j0 + c) * segment.dkv_stride, dvalue, lanes, c, D, 1.0f);
        }
    }
    return skipped;
}

}  // namespace HWY_NAMESPACE
}  // namespace jetlag
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <omp.h>

#include <numeric>
#include <vector>

#include "kernels/cpu/parallel.h"

namespace jetlag {

HWY_EXPORT(lanes_of_tile);
HWY_EXPORT(pack_forward);
HWY_EXPORT(pack_backward);
HWY_EXPORT(forward_rows);
HWY_EXPORT(backward_segment);
HWY_EXPORT(rotate_row_backward);

// Channels times tokens of a head whose packed q, k and v (1 MB) stay in a core's second-level cache.
static constexpr int64_t kCachedHead = 1 << 17;

// How a problem is cut. Depends on its sizes alone (and the target's lanes, for the bounds of tiles).
struct Plan {
    int64_t T, H, D, C;
    int64_t lanes, padded_T, padded_D;
    int64_t panels;     // tiles of `lanes` tokens
    int64_t tiles;      // tiles of kTile tokens
    int64_t pack_span;  // tokens that are packed at once: whole tiles of both kinds
    int64_t group;      // heads (of all sequences) that the workspace holds
    bool splits_heads;  // threads share the work on one head; otherwise each has a head of its own, in its own cache
    int64_t segments;   // of keys, backward
};

static Plan make_plan(int64_t B, int64_t T, int64_t H, int64_t D) {
    Plan plan;
    plan.T = T;
    plan.H = H;
    plan.D = D;
    plan.C = H * D;
    plan.lanes = HWY_DYNAMIC_DISPATCH(lanes_of_tile)();
    plan.padded_T = round_up(T, kMaxLanes);
    plan.padded_D = round_up(D, kWidestVector);
    plan.panels = (T + plan.lanes - 1) / plan.lanes;
    plan.tiles = (T + kTile - 1) / kTile;
    plan.pack_span = std::lcm(plan.lanes, kTile);
    plan.group = std::clamp<int64_t>(32768 / plan.padded_T, 1, B * H);
    plan.splits_heads = B * H == 1 || T * D > kCachedHead;
    plan.segments = plan.splits_heads ? std::clamp<int64_t>(16 / plan.group, 1, plan.panels) : 1;
    return plan;
}

// Arrays from a workspace, each aligned for any vector; with a null workspace only counted.
struct Workspace {
    float* base;
    int64_t used = 0;
    template <typename T>
    T* take(int64_t count) {
        const int64_t floats =
            round_up(count * static_cast<int64_t>(sizeof(T)) / static_cast<int64_t>(sizeof(float)), 32);
        const int64_t at = std::exchange(used, used + floats);
        return base != nullptr ? reinterpret_cast<T*>(base + at) : nullptr;
    }
};

static PackedHead take_head(Workspace& space, const Plan& plan, bool backward) {
    PackedHead head = {};
    head.T = plan.T;
    head.D = plan.D;
    head.padded_D = plan.padded_D;
    head.query_norm = space.take<float>(plan.padded_T);
    head.key_bound = space.take<KeyBound>(std::max(plan.panels, plan.tiles));
    if (!backward) {
        head.query_panels = space.take<float>(plan.padded_T * plan.D);
        head.key = space.take<float>(plan.T * plan.D);
        head.value = space.take<float>(plan.T * plan.D);
        return head;
    }
    head.query = space.take<float>(plan.T * plan.D);
    head.dout = space.take<float>(plan.T * plan.D);
    head.key_panels = space.take<float>(plan.padded_T * plan.D);
    head.value_panels = space.take<float>(plan.padded_T * plan.D);
    head.key_rows = space.take<float>(plan.padded_T * plan.padded_D);
    head.lse = space.take<float>(plan.padded_T);
    head.delta = space.take<float>(plan.padded_T);
    head.dout_norm = space.take<float>(plan.padded_T);
    head.row_bound = space.take<RowBound>(plan.tiles);
    return head;
}

// The lag tables of all heads; without a lag bias one of zeros, which all heads share. Filled unless the
// workspace is only counted.
static std::vector<LagTable> take_lags(Workspace& space, const Plan& plan, const float* lag_bias, bool has_lag_bias,
                                       bool backward, bool skips) {
    const int64_t T = plan.T, blocks = (T + kLagBlock - 1) / kLagBlock;
    const float infinity = std::numeric_limits<float>::infinity();
    std::vector<LagTable> tables(static_cast<size_t>(has_lag_bias ? plan.H : 1));
    for (size_t h = 0; h < tables.size(); h++) {
        float* values = space.take<float>(T + 2 * kLagPad);
        float* block = space.take<float>(blocks);
        float* from_block = space.take<float>(blocks);
        if (values == nullptr) continue;
        const float* bias = has_lag_bias ? lag_bias + static_cast<int64_t>(h) * T : nullptr;
        float* lag0 = values + (backward ? T + kLagPad - 1 : kLagPad);
        const int64_t step = backward ? -1 : 1;
        for (int64_t d = 1; d <= kLagPad; d++) lag0[-d * step] = lag0[(T - 1 + d) * step] = -infinity;
        for (int64_t d = 0; d < T; d++) lag0[d * step] = bias != nullptr ? bias[d] : 0.0f;
        LagTable& table = tables[h];
        table.ascending = backward ? nullptr : lag0;
        table.descending = backward ? lag0 : nullptr;
        table.block = block;
        table.from_block = from_block;
        table.skips = skips && bias != nullptr;
        if (!table.skips) continue;
        // Where the bias is a NaN or +infinity nothing is skipped.
        float lowest = infinity, after = -infinity;
        for (int64_t b = blocks - 1; b >= 0; b--) {
            float largest = -infinity;
            for (int64_t d = b * kLagBlock; d < std::min(T, (b + 1) * kLagBlock); d++)
                largest = larger_bound(largest, bias[d]);
            block[b] = largest;
            from_block[b] = after = std::max(after, largest);
            lowest = std::min(lowest, largest);
        }
        // Testing costs a percent, which a flat bias would pay for nothing.
        table.skips = from_block[0] - lowest > std::log(0x1p24f) / 2;
    }
    return tables;
}

static void finish_key_bounds(PackedHead& head, int64_t tiles) {
    const float infinity = std::numeric_limits<float>::infinity();
    head.log_quietest_value = infinity;
    KeyBound before = {0, 0, 0, -infinity};
    for (int64_t i = 0; i < tiles; i++) {
        KeyBound& bound = head.key_bound[i];
        before.key_before = bound.key_before = std::max(before.key_before, bound.key);
        before.log_value_before = bound.log_value_before = std::max(before.log_value_before, bound.log_value);
        head.log_quietest_value = std::min(head.log_quietest_value, bound.log_value);
    }
}

static void finish_row_bounds(PackedHead& head, int64_t tiles) {
    const float infinity = std::numeric_limits<float>::infinity();
    head.log_quietest_dout = infinity;
    RowBound after = {0, 0, 0, 0, infinity, -infinity};
    for (int64_t i = tiles - 1; i >= 0; i--) {
        RowBound bound = {0, infinity, 0, 0, 0, 0};
        float dout = 0;
        for (int64_t t = i * kTile; t < std::min(head.T, (i + 1) * kTile); t++) {
            // lse is +infinity for a row without a key. Whatever else is not finite must show.
            const bool finite = std::isfinite(head.query_norm[t]) && std::isfinite(head.delta[t]) &&
                                std::isfinite(head.dout_norm[t]) && head.lse[t] > -infinity;
            dout = std::max(dout, finite ? head.dout_norm[t] : infinity);
            bound.query = std::max(bound.query, head.query_norm[t]);
            bound.lse = std::min(bound.lse, head.lse[t]);
        }
        bound.log_dout = std::log(dout);
        after.query_after = bound.query_after = std::max(after.query_after, bound.query);
        after.lse_after = bound.lse_after = std::min(after.lse_after, bound.lse);
        after.log_dout_after = bound.log_dout_after = std::max(after.log_dout_after, bound.log_dout);
        head.log_quietest_dout = std::min(head.log_quietest_dout, bound.log_dout);
        head.row_bound[i] = bound;
    }
}

// The arrays of one call, in the order of the workspace.
struct Arrays {
    std::vector<LagTable> lags;
    std::vector<PackedHead> heads;          // of the group
    std::vector<BackwardSegment> segments;  // (group, segments)
    double* lag_sums = nullptr;             // (H, T)
};

static Arrays take_arrays(Workspace& space, const Plan& plan, const float* lag_bias, bool has_lag_bias, bool backward,
                          bool skips) {
    Arrays arrays;
    arrays.lags = take_lags(space, plan, lag_bias, has_lag_bias, backward, skips);
    for (int64_t g = 0; g < plan.group; g++) arrays.heads.push_back(take_head(space, plan, backward));
    if (!backward) return arrays;
    for (int64_t i = 0; i < plan.group * plan.segments; i++) {
        BackwardSegment segment = {};
        segment.dquery = space.take<float>(plan.T * plan.padded_D);
        segment.dlag_bias = has_lag_bias ? space.take<double>(plan.T) : nullptr;
        arrays.segments.push_back(segment);
    }
    if (has_lag_bias) arrays.lag_sums = space.take<double>(plan.H * plan.T);
    return arrays;
}

int64_t attention_workspace_floats(int64_t B, int64_t T, int64_t H, int64_t D, bool forward_only) {
    const Plan plan = make_plan(B, T, H, D);
    Workspace forward = {nullptr}, backward = {nullptr};
    take_arrays(forward, plan, nullptr, true, false, false);
    if (!forward_only) take_arrays(backward, plan, nullptr, true, true, false);
    return std::max(forward.used, backward.used);
}

// Where head number `index` of all sequences begins in (B, T, H, D), and in (B, T, 3, H, D).
static int64_t head_offset(const Plan& plan, int64_t index) {
    return (index / plan.H * plan.T * plan.H + index % plan.H) * plan.D;
}
static int64_t qkv_offset(const Plan& plan, int64_t index) {
    return (index / plan.H * plan.T * 3 * plan.H + index % plan.H) * plan.D;
}

static HeadSource source_of(const Plan& plan, int64_t index, const float* qkv, const RotaryTable& rotary) {
    HeadSource source = {};
    source.query = qkv + qkv_offset(plan, index);
    source.key = source.query + plan.C;
    source.value = source.key + plan.C;
    source.C = plan.C;
    source.rotary = &rotary;
    return source;
}

// The part of a head that changes from group to group.
static void set_head(PackedHead& head, const Plan& plan, const std::vector<LagTable>& lags, int64_t index,
                     const AttentionScope& scope) {
    head.lags = lags[lags.size() > 1 ? static_cast<size_t>(index % plan.H) : 0];
    head.margin = std::log(0x1p24f) + std::log(static_cast<float>(plan.T));
    head.score_dim = scope.has_content ? plan.D : 0;
}

void attention_forward(float* out, float* lse, const AttentionRowStats* stats, const float* qkv,
                       const RotaryTable& rotary, const float* lag_bias, float* workspace, int64_t B, int64_t T,
                       int64_t H, int64_t D, AttentionSkipping* skipping, const AttentionScope& scope) {
    const Plan plan = make_plan(B, T, H, D);
    const int64_t first_panel = scope.first_row / plan.lanes;
    Workspace space = {workspace};
    Arrays arrays = take_arrays(space, plan, lag_bias, lag_bias != nullptr, false, skipping != nullptr);
    const auto pack = HWY_DYNAMIC_DISPATCH(pack_forward);
    const auto rows_of_tile = HWY_DYNAMIC_DISPATCH(forward_rows);
    // The steps of the work on head number `index` of all sequences, in `head`.
    const auto pack_span = [&](const PackedHead& head, int64_t index, int64_t begin) {
        pack(head, source_of(plan, index, qkv, rotary), begin, std::min(T, begin + plan.pack_span));
    };
    const auto run_tile = [&](const PackedHead& head, int64_t index, int64_t tile) {
        ForwardRows rows;
        rows.out = out + head_offset(plan, index);
        rows.out_stride = plan.C;
        rows.lse = lse + index * T;
        rows.entropy = stats != nullptr ? stats->entropy + index * T : nullptr;
        rows.mean_lag = stats != nullptr ? stats->mean_lag + index * T : nullptr;
        return rows_of_tile(head, tile, rows);
    };
    int64_t skipped = 0;
    const double head_work = static_cast<double>(T) * static_cast<double>(T + 1) / 8 * static_cast<double>(D);
    if (!plan.splits_heads) {
        const int threads = std::min(static_cast<int>(plan.group), threads_for(head_work * static_cast<double>(B * H)));
#pragma omp parallel for schedule(guided) num_threads(threads) reduction(+ : skipped)
        for (int64_t index = 0; index < B * H; index++) {
            PackedHead& head = arrays.heads[omp_get_thread_num()];
            set_head(head, plan, arrays.lags, index, scope);
            for (int64_t begin = 0; begin < T; begin += plan.pack_span) pack_span(head, index, begin);
            if (head.lags.skips) finish_key_bounds(head, plan.tiles);
            for (int64_t tile = first_panel; tile < plan.panels; tile++) skipped += run_tile(head, index, tile);
        }
    }
    for (int64_t first = 0; plan.splits_heads && first < B * H; first += plan.group) {
        const int64_t heads = std::min(plan.group, B * H - first);
        for (int64_t g = 0; g < heads; g++) set_head(arrays.heads[g], plan, arrays.lags, first + g, scope);
#pragma omp parallel num_threads(threads_for(head_work* static_cast <double>(heads)))
        {
#pragma omp for collapse(2) schedule(static)
            for (int64_t g = 0; g < heads; g++)
                for (int64_t begin = 0; begin < T; begin += plan.pack_span)
                    pack_span(arrays.heads[g], first + g, begin);
#pragma omp for schedule(static)
            for (int64_t g = 0; g < heads; g++)
                if (arrays.heads[g].lags.skips) finish_key_bounds(arrays.heads[g], plan.tiles);
                    // The longest rows first, so that the threads end together.
#pragma omp for collapse(2) schedule(dynamic) reduction(+ : skipped)
            for (int64_t g = 0; g < heads; g++)
                for (int64_t back = 0; back < plan.panels - first_panel; back++)
                    skipped += run_tile(arrays.heads[g], first + g, plan.panels - 1 - back);
        }
    }
    if (skipping == nullptr) return;
    for (int64_t tile = first_panel; tile < plan.panels; tile++)
        skipping->tiles += B * H * ((std::min(T, (tile + 1) * plan.lanes) + kTile - 1) / kTile);
    skipping->skipped += skipped;
}

void attention_backward(float* dqkv, float* dlag_bias, const float* dout, const float* qkv, const float* out,
                        const float* lse, const RotaryTable& rotary, const float* lag_bias, float* workspace, int64_t B,
                        int64_t T, int64_t H, int64_t D, AttentionSkipping* skipping, const AttentionScope& scope) {
    const Plan plan = make_plan(B, T, H, D);
    const int64_t C = plan.C, S = plan.segments;
    const float scale = static_cast<float>(1 / std::sqrt(static_cast<double>(D)));
    Workspace space = {workspace};
    Arrays arrays = take_arrays(space, plan, lag_bias, lag_bias != nullptr, true, skipping != nullptr);
    if (dlag_bias != nullptr) std::fill(arrays.lag_sums, arrays.lag_sums + H * T, 0.0);
    const auto pack = HWY_DYNAMIC_DISPATCH(pack_backward);
    const auto segment_backward = HWY_DYNAMIC_DISPATCH(backward_segment);
    const auto unrotate = HWY_DYNAMIC_DISPATCH(rotate_row_backward);
    // Segment s holds the keys from here on: cut so that each has the same number of pairs.
    const auto segment_begin = [&](int64_t s) {
        const double share = static_cast<double>(s) / static_cast<double>(S);
        const int64_t key = static_cast<int64_t>(static_cast<double>(T) * (1 - std::sqrt(1 - share)));
        return s == S ? T : key / kMaxLanes * kMaxLanes;
    };
    // The steps of the work on head number `index` of all sequences, in `head`.
    const auto pack_span = [&](const PackedHead& head, int64_t index, int64_t begin) {
        const int64_t offset = head_offset(plan, index);
        HeadSource source = source_of(plan, index, qkv, rotary);
        source.dout = dout + offset;
        source.out = out + offset;
        source.lse = lse + index * T;
        source.first_row = scope.first_row;
        pack(head, source, begin, std::min(T, begin + plan.pack_span));
    };
    const auto finish_bounds = [&](PackedHead& head) {
        if (!head.lags.skips) return;
        finish_key_bounds(head, plan.panels);
        finish_row_bounds(head, plan.tiles);
    };
    const auto run_segment = [&](const PackedHead& head, int64_t index, BackwardSegment& segment, int64_t s) {
        segment.key_begin = segment_begin(s);
        segment.key_end = segment_begin(s + 1);
        segment.dkey = dqkv + qkv_offset(plan, index) + C;
        segment.dvalue = segment.dkey + C;
        segment.dkv_stride = 3 * C;
        segment.first_row = scope.first_row;
        return segment_backward(head, segment);
    };
    // dQ: the segments that reach the row added in order, scaled, and rotated back, as dK.
    const auto finish_row = [&](int64_t index, const BackwardSegment* segments, int64_t t) {
        float* dquery = dqkv + qkv_offset(plan, index) + t * 3 * C;
        std::copy_n(segments[0].dquery + t * plan.padded_D, D, dquery);
        for (int64_t s = 1; s < S && segments[s].key_begin <= t; s++)
            for (int64_t c = 0; c < D; c++) dquery[c] += segments[s].dquery[t * plan.padded_D + c];
        for (int64_t c = 0; c < D; c++) dquery[c] *= scale;
        unrotate(dquery, rotary, rotary.query_cos, rotary.query_sin, t, false);
        unrotate(dquery + C, rotary, rotary.key_cos, rotary.key_sin, t, true);
    };
    const int64_t rows_to_finish = scope.has_content ? T : 0;
    const auto add_lag_sums = [&](int64_t h, const BackwardSegment* segments) {
        for (int64_t s = 0; s < S; s++)
            for (int64_t d = 0; d < T; d++) arrays.lag_sums[h * T + d] += segments[s].dlag_bias[T - 1 - d];
    };

    int64_t skipped = 0;
    const double head_work = static_cast<double>(T) * static_cast<double>(T + 1) / 2 * static_cast<double>(D);
    for (int64_t first = 0; first < B * H; first += plan.group) {
        const int64_t heads = std::min(plan.group, B * H - first);
        const int threads = threads_for(head_work * static_cast<double>(heads));
        for (int64_t g = 0; plan.splits_heads && g < heads; g++)
            set_head(arrays.heads[g], plan, arrays.lags, first + g, scope);
#pragma omp parallel num_threads(plan.splits_heads ? threads : std::min(threads, static_cast <int>(heads)))
        {
            if (plan.splits_heads) {
#pragma omp for collapse(2) schedule(static)
                for (int64_t g = 0; g < heads; g++)
                    for (int64_t begin = 0; begin < T; begin += plan.pack_span)
                        pack_span(arrays.heads[g], first + g, begin);
#pragma omp for schedule(static)
                for (int64_t g = 0; g < heads; g++) finish_bounds(arrays.heads[g]);
#pragma omp for collapse(2) schedule(dynamic) reduction(+ : skipped)
                for (int64_t g = 0; g < heads; g++)
                    for (int64_t s = 0; s < S; s++)
                        skipped += run_segment(arrays.heads[g], first + g, arrays.segments[g * S + s], s);
#pragma omp for collapse(2) schedule(static)
                for (int64_t g = 0; g < heads; g++)
                    for (int64_t t = 0; t < rows_to_finish; t++) finish_row(first + g, &arrays.segments[g * S], t);
            } else {
#pragma omp for schedule(guided) reduction(+ : skipped)
                for (int64_t g = 0; g < heads; g++) {
                    PackedHead& head = arrays.heads[omp_get_thread_num()];
                    BackwardSegment segment = arrays.segments[omp_get_thread_num()];
                    segment.dlag_bias = arrays.segments[g].dlag_bias;
                    set_head(head, plan, arrays.lags, first + g, scope);
                    for (int64_t begin = 0; begin < T; begin += plan.pack_span) pack_span(head, first + g, begin);
                    finish_bounds(head);
                    skipped += run_segment(head, first + g, segment, 0);
                    for (int64_t t = 0; t < rows_to_finish; t++) finish_row(first + g, &segment, t);
                }
            }
            if (dlag_bias != nullptr) {
#pragma omp for schedule(static)
                for (int64_t h = 0; h < H; h++)
                    for (int64_t g = 0; g < heads; g++)
                        if ((first + g) % H == h) add_lag_sums(h, &arrays.segments[g * S]);
            }
        }
    }
    if (dlag_bias != nullptr)
        for (int64_t i = 0; i < H * T; i++) dlag_bias[i] = static_cast<float>(arrays.lag_sums[i]);
    if (skipping == nullptr) return;
    for (int64_t j0 = 0; j0 < T; j0 += plan.lanes)
        skipping->tiles += B * H * (plan.tiles - std::max(j0, scope.first_row) / kTile);
    skipping->skipped += skipped;
}

}  // namespace jetlag
#endif
