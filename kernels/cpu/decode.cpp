// Attention of one new row over keys and values that are kept from row to row.
//
// A cache is cut into segments of kSegment positions, one piece of memory per head: (H, segments, D, kSegment). Keys
// along the lanes: the scores of a vector of keys are D multiply-adds without a sum across lanes, and the weighted
// values need one such sum per channel and segment, not one per key. Eight channels at a time pass over a segment, so
// that memory is read in long runs, all of it once.
//
// Each segment gives the largest score, the sum of the weights against it, and the weighted sum of the values; the
// segments of a head are then put together in order. They are cut by position alone, and so the result does not depend
// on which thread took which.
//
// Arithmetic: 4 D operations per key and head for 8 D bytes. Bound by memory, or the cache that holds the segments.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/decode.cpp"
#include <hwy/foreach_target.h>
// clang-format off
#include <hwy/highway.h>
#include "kernels/cpu/exp-inl.h"
#include "kernels/cpu/rotate-inl.h"
// clang-format on

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/ops.h"

// Shared by all targets.
#ifndef JETLAG_DECODE_ONCE
#define JETLAG_DECODE_ONCE
namespace jetlag {

inline constexpr int64_t kSegment = 512;  // whole vectors of any target

// The rows of one call of attention_cache.
struct NewRows {
    float *key_cache, *value_cache;
    const float* qkv;
    const RotaryTable* rotary;
    int64_t first, segments, H, D;
};

// One segment of one head.
struct CachedSegment {
    const float *key, *value;  // (D, kSegment)
    const float* lag_bias;     // of its first key, those of the next ones before it; nullptr: zeros
    int64_t keys;              // that the row sees, at least 1
};

// What a segment gives: `largest` score, `sum` of the weights e^(score - largest), and `out`: (D), the weighted values.
struct SegmentPart {
    float *largest, *sum, *out;
};

}  // namespace jetlag
#endif

HWY_BEFORE_NAMESPACE();
namespace jetlag {
namespace HWY_NAMESPACE {

using D32 = hn::ScalableTag<float>;
using Vec = hn::Vec<D32>;

// Puts the positions begin .. end - 1 of head h into the caches.
void cache_rows(const NewRows& rows, int64_t h, int64_t begin, int64_t end) {
    const int64_t D = rows.D, C = rows.H * D;
    const RotaryTable& rotary = *rows.rotary;
    HWY_ALIGN float key[kMaxHeadDim];
    for (int64_t t = begin; t < end; t++) {
        const float* source = rows.qkv + (t - rows.first) * 3 * C + C + h * D;
        std::copy_n(source, D, key);
        rotate_row(key, rotary, rotary.key_cos, rotary.key_sin, t, true);
        const int64_t at = (h * rows.segments + t / kSegment) * D * kSegment + t % kSegment;
        for (int64_t c = 0; c < D; c++) {
            rows.key_cache[at + c * kSegment] = key[c];
            rows.value_cache[at + c * kSegment] = source[C + c];
        }
    }
}

// query: (H, D) = the rotated query of a row (3, H, D), times `scale`.
void prepare_query(float* query, const float* qkv, const RotaryTable& rotary, int64_t position, int64_t H, int64_t D,
                   float scale) {
    for (int64_t h = 0; h < H; h++) {
        float* row = query + h * D;
        std::copy_n(qkv + h * D, D, row);
        rotate_row(row, rotary, rotary.query_cos, rotary.query_sin, position, false);
        for (int64_t c = 0; c < D; c++) row[c] *= scale;
    }
}

// scores[j] += sum over M channels of query[m] key[m][j], for all j of the vectors that hold `keys` keys.
template <int M>
HWY_INLINE void add_scores(float* scores, const float* query, const float* key, int64_t keys) {
    const D32 d;
    const int64_t N = static_cast<int64_t>(hn::Lanes(d));
    for (int64_t j = 0; j < keys; j += N) {
        Vec score = hn::Load(d, scores + j);
        for (int m = 0; m < M; m++)
            score = hn::MulAdd(hn::Set(d, query[m]), hn::LoadU(d, key + m * kSegment + j), score);
        hn::Store(score, d, scores + j);
    }
}

// out[m] = sum_j weights[j] value[m][j] for M channels. What lies behind the last key may be anything.
template <int M>
HWY_INLINE void weigh_values(float* out, const float* weights, const float* value, int64_t keys) {
    const D32 d;
    const int64_t N = static_cast<int64_t>(hn::Lanes(d));
    Vec sums[M];
    for (int m = 0; m < M; m++) sums[m] = hn::Zero(d);
    int64_t j = 0;
    for (; j + N <= keys; j += N) {
        const Vec weight = hn::Load(d, weights + j);
        for (int m = 0; m < M; m++) sums[m] = hn::MulAdd(weight, hn::LoadU(d, value + m * kSegment + j), sums[m]);
    }
    if (j < keys) {
        const auto is_key = hn::FirstN(d, static_cast<size_t>(keys - j));
        const Vec weight = hn::Load(d, weights + j);
        for (int m = 0; m < M; m++)
            sums[m] = hn::MulAdd(weight, hn::IfThenElseZero(is_key, hn::LoadU(d, value + m * kSegment + j)), sums[m]);
    }
    for (int m = 0; m < M; m++) out[m] = hn::GetLane(hn::SumOfLanes(d, sums[m]));
}

// query: (D), from prepare_query.
void decode_segment(const SegmentPart& part, const float* query, const CachedSegment& segment, int64_t D) {
    constexpr int kChannels = 8;
    const D32 d;
    const int64_t N = static_cast<int64_t>(hn::Lanes(d)), keys = segment.keys;
    const float infinity = std::numeric_limits<float>::infinity();
    const int64_t padded = (keys + N - 1) / N * N;
    HWY_ALIGN float scores[kSegment] = {};
    // Lags fall as positions rise.
    if (segment.lag_bias != nullptr)
        for (int64_t j = 0; j < keys; j++) scores[j] = segment.lag_bias[-j];
    int64_t c = 0;
    for (; c + kChannels <= D; c += kChannels)
        add_scores<kChannels>(scores, query + c, segment.key + c * kSegment, keys);
    for (; c < D; c++) add_scores<1>(scores, query + c, segment.key + c * kSegment, keys);
    std::fill(scores + keys, scores + padded, -infinity);

    Vec maximum = hn::Load(d, scores);
    for (int64_t j = N; j < padded; j += N) maximum = hn::Max(maximum, hn::Load(d, scores + j));
    const float largest = hn::GetLane(hn::MaxOfLanes(d, maximum));
    // Without a key that it may see, exponents are taken against 0.
    const Vec reference = hn::Set(d, largest == -infinity ? 0.0f : largest);
    Vec sum = hn::Zero(d);
    for (int64_t j = 0; j < padded; j += N) {
        const Vec weight = exp_nonpositive(d, hn::Sub(hn::Load(d, scores + j), reference));
        hn::Store(weight, d, scores + j);
        sum = hn::Add(sum, weight);
    }
    *part.largest = largest;
    *part.sum = hn::GetLane(hn::SumOfLanes(d, sum));

    for (c = 0; c + kChannels <= D; c += kChannels)
        weigh_values<kChannels>(part.out + c, scores, segment.value + c * kSegment, keys);
    for (; c < D; c++) weigh_values<1>(part.out + c, scores, segment.value + c * kSegment, keys);
}

}  // namespace HWY_NAMESPACE
}  // namespace jetlag
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "kernels/cpu/parallel.h"

namespace jetlag {

HWY_EXPORT(cache_rows);
HWY_EXPORT(prepare_query);
HWY_EXPORT(decode_segment);

static int64_t segments_of(int64_t T) {
    return (T + kSegment - 1) / kSegment;
}

int64_t attention_cache_size(int64_t T, int64_t H, int64_t D) {
    return H * segments_of(T) * D * kSegment;
}

void attention_cache(float* key_cache, float* value_cache, const float* qkv, const RotaryTable& rotary, int64_t first,
                     int64_t rows, int64_t T, int64_t H, int64_t D) {
    const NewRows new_rows = {key_cache, value_cache, qkv, &rotary, first, segments_of(T), H, D};
    const auto put = HWY_DYNAMIC_DISPATCH(cache_rows);
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads_for(static_cast <double>(rows * H * D) * 4))
    for (int64_t h = 0; h < H; h++)
        for (int64_t segment = first / kSegment; segment < segments_of(first + rows); segment++)
            put(new_rows, h, std::max(first, segment * kSegment), std::min(first + rows, (segment + 1) * kSegment));
}

int64_t attention_decode_workspace_floats(int64_t T, int64_t H, int64_t D) {
    return H * D + H * segments_of(T) * (D + 2);
}

void attention_decode(float* out, const float* qkv, const float* key_cache, const float* value_cache,
                      const RotaryTable& rotary, const float* lag_bias, float* workspace, int64_t position, int64_t T,
                      int64_t H, int64_t D) {
    const int64_t keys = position + 1, used = segments_of(keys), stride = segments_of(T) * D * kSegment;
    float* query = workspace;
    const auto part_of = [&](int64_t h, int64_t segment) {
        float* at = workspace + H * D + (h * used + segment) * (D + 2);
        return SegmentPart{at, at + 1, at + 2};
    };
    HWY_DYNAMIC_DISPATCH(prepare_query)
    (query, qkv, rotary, position, H, D, static_cast<float>(1 / std::sqrt(static_cast<double>(D))));
    const auto run_segment = HWY_DYNAMIC_DISPATCH(decode_segment);
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads_for(static_cast <double>(keys * H * D) / 8))
    for (int64_t h = 0; h < H; h++)
        for (int64_t segment = 0; segment < used; segment++) {
            const int64_t begin = segment * kSegment, at = h * stride + begin * D;
            run_segment(
                part_of(h, segment), query + h * D,
                {key_cache + at, value_cache + at, lag_bias != nullptr ? lag_bias + h * T + position - begin : nullptr,
                 std::min(kSegment, keys - begin)},
                D);
        }
    for (int64_t h = 0; h < H; h++) {
        const float infinity = std::numeric_limits<float>::infinity();
        float *row = out + h * D, largest = -infinity, total = 0;
        for (int64_t segment = 0; segment < used; segment++) largest = std::max(largest, *part_of(h, segment).largest);
        const float reference = largest == -infinity ? 0 : largest;
        std::fill(row, row + D, 0.0f);
        for (int64_t segment = 0; segment < used; segment++) {
            const SegmentPart part = part_of(h, segment);
            const float weight = std::exp(*part.largest - reference);
            total += *part.sum * weight;
            // Also where the weight is 0: a value that is not finite must show.
            for (int64_t c = 0; c < D; c++) row[c] += part.out[c] * weight;
        }
        const float inverse = total == 0 ? 0 : 1 / total;  // 0: a row without a key
        for (int64_t c = 0; c < D; c++) row[c] *= inverse;
    }
}

}  // namespace jetlag
#endif
