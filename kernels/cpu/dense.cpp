// Dense layers: three products with the shared multiply-add loop (micro-inl.h), by chunks of rows.
//
// The weight is packed once per call into panels of tile_lanes() columns. A chunk of rows then runs through all
// panels; in backward the chunk of dout, fresh in the second-level cache, serves dinp, dweight and dbias in one go. A
// single row would take longer to pack for than to multiply: there each output is a product of two rows, with the
// channels in lanes.
//
// Arithmetic: 2 C OC operations a row forward, 4 C OC backward. Bound by the multiply-add units; but at C = 96 a row of
// qkv is 55 KFLOP for 1.5 KB, so that from memory both ceilings are near. Chunks are cut by N alone and partial sums of
// dweight are added in order: the result does not depend on the number of threads.

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/dense.cpp"
#include <hwy/foreach_target.h>
// clang-format off
#include <hwy/highway.h>
#include "kernels/cpu/micro-inl.h"
// clang-format on

#include <cstring>

#include "kernels/cpu/parallel.h"

// Shared by all targets.
#ifndef JETLAG_DENSE_ONCE
#define JETLAG_DENSE_ONCE
namespace jetlag {

inline constexpr int64_t kBlockRows = 64;  // of inp in dweight: 64 columns of them are 16 KB, in the first-level cache
inline constexpr int64_t kMaxDepth = 96;   // of a product's panel: 24 KB at most
inline constexpr int64_t kMaxPanel = 64;   // columns of a panel, at most

struct LinearBackward {
    const float *dout, *inp;     // (N, OC), (N, C)
    const float* weight_panels;  // nullptr: dinp is not wanted
    const float* zeros;          // (padded C)
    float* dinp;                 // (N, C)
    int64_t C, OC;
};
// The sums of one chunk of rows.
struct LinearSums {
    float* dweight;   // (OC, padded C)
    float* dbias;     // (OC)
    float* inp_rows;  // (kBlockRows, padded C), scratch where C is not whole vectors
};

}  // namespace jetlag
#endif

HWY_BEFORE_NAMESPACE();
namespace jetlag {
namespace HWY_NAMESPACE {

int64_t padded_width(int64_t columns) {
    return round_up(columns, lane_count());
}

// B of a product as panels, one after the other: (K, panel) each, the last one as wide as whole vectors need. B is
// matrix (K, columns), or with `transposed` matrix (columns, K).
void pack_panels(float* panels, const float* matrix, int64_t K, int64_t columns, bool transposed) {
    for (int64_t w = 0, width; w < columns; w += width) {
        width = panel_width(w, columns);
        const int64_t lanes = padded_width(width);
        if (transposed)
            transpose_into_panel(panels, lanes, matrix + w * K, K, width, K, 1.0f);
        else
            for (int64_t k = 0; k < K; k++) {
                std::memcpy(panels + k * lanes, matrix + k * columns + w, static_cast<size_t>(width) * sizeof(float));
                std::fill(panels + k * lanes + width, panels + (k + 1) * lanes, 0.0f);
            }
        panels += K * lanes;
    }
}

// Asks for `share` of `shares` equal parts of an array, to be in cache when its turn comes.
HWY_INLINE void prefetch_share(const float* array, int64_t size, int64_t share, int64_t shares) {
    for (int64_t i = size * share / shares / 16 * 16; i < size * (share + 1) / shares; i += 16)
        __builtin_prefetch(array + i, 0, 2);
}

// out (M, columns) = init + a (M, K) B with B from pack_panels; init: (padded columns), the same for every row. A panel
// is taken a depth at a time that fits the first-level cache. The rows of a and out that follow, as many again, are
// fetched meanwhile.
void multiply_panels(float* out, const float* a, const float* panels, const float* init, int64_t M, int64_t K,
                     int64_t columns) {
    HWY_ALIGN float block[kMicroRows * kMaxPanel] = {};
    const int64_t slices = (K + kMaxDepth - 1) / kMaxDepth, depth = (K + slices - 1) / slices;
    const int64_t shares = (columns + tile_lanes() - 1) / tile_lanes() * slices * ((M + kMicroRows - 1) / kMicroRows);
    int64_t share = 0;
    for (int64_t w = 0, width; w < columns; w += width) {
        width = panel_width(w, columns);
        const int64_t lanes = padded_width(width);
        for (int64_t k = 0; k < K; k += depth)
            for (int64_t m = 0; m < M; m += kMicroRows, share++) {
                const int64_t rows = std::min<int64_t>(kMicroRows, M - m), slice = std::min(depth, K - k);
                prefetch_share(a + M * K, M * K, share, shares);
                prefetch_share(out + M * columns, M * columns, share, shares);
                float* c = out + m * columns + w;
                if (width == lanes) {
                    multiply_wide(a + m * K + k, K, 1, panels + k * lanes, lanes, rows, slice, k == 0 ? init + w : c,
                                  k == 0 ? 0 : columns, c, columns, lanes);
                    continue;
                }
                // Whole vectors would write into the next row.
                for (int64_t r = 0; r < rows; r++)
                    std::copy_n(k == 0 ? init + w : c + r * columns, width, block + r * lanes);
                multiply_wide(a + m * K + k, K, 1, panels + k * lanes, lanes, rows, slice, block, lanes, block, lanes,
                              lanes);
                for (int64_t r = 0; r < rows; r++) std::copy_n(block + r * lanes, width, c + r * columns);
            }
        panels += K * lanes;
    }
}

// Outputs begin .. end - 1 of a single row, four at a time.
void multiply_row(float* out, const float* inp, const float* weight, const float* bias, int64_t C, int64_t begin,
                  int64_t end) {
    constexpr int kOutputs = 4;
    const D32 d;
    const int64_t N = lane_count();
    for (int64_t o = begin; o < end; o += kOutputs) {
        // At the end the last rows are taken once more.
        const float* rows[kOutputs];
        Vec sums[kOutputs];
        for (int i = 0; i < kOutputs; i++) {
            rows[i] = weight + std::min(o + i, end - 1) * C;
            sums[i] = hn::Zero(d);
        }
        int64_t c = 0;
        for (; c + N <= C; c += N) {
            const Vec factor = hn::LoadU(d, inp + c);
            for (int i = 0; i < kOutputs; i++) sums[i] = hn::MulAdd(factor, hn::LoadU(d, rows[i] + c), sums[i]);
        }
        for (int i = 0; i < kOutputs && o + i < end; i++) {
            float sum = hn::GetLane(hn::SumOfLanes(d, sums[i]));
            for (int64_t rest = c; rest < C; rest++) sum += inp[rest] * rows[i][rest];
            out[o + i] = bias[o + i] + sum;
        }
    }
}

void backward_rows(const LinearBackward& layer, const LinearSums& sums, int64_t begin, int64_t end) {
    const int64_t C = layer.C, OC = layer.OC, width = padded_width(C);
    std::fill(sums.dweight, sums.dweight + OC * width, 0.0f);
    std::fill(sums.dbias, sums.dbias + OC, 0.0f);
    for (int64_t n = begin; n < end; n += kBlockRows) {
        const int64_t rows = std::min(kBlockRows, end - n);
        const float* dout = layer.dout + n * OC;
        if (layer.weight_panels != nullptr)
            multiply_panels(layer.dinp + n * C, dout, layer.weight_panels, layer.zeros, rows, OC, C);
        // Rows of whole vectors are read where they are, others from a padded copy.
        const float* inp = layer.inp + n * C;
        prefetch_share(inp + rows * C, rows * C, 0, 1);
        if (width != C) {
            for (int64_t r = 0; r < rows; r++) {
                std::copy_n(inp + r * C, C, sums.inp_rows + r * width);
                std::fill(sums.inp_rows + r * width + C, sums.inp_rows + (r + 1) * width, 0.0f);
            }
            inp = sums.inp_rows;
        }
        for (int64_t w = 0, lanes; w < C; w += lanes) {
            lanes = padded_width(panel_width(w, C));
            multiply_wide(dout, 1, OC, inp + w, width, OC, rows, sums.dweight + w, width, sums.dweight + w, width,
                          lanes);
        }
        for (int64_t r = 0; r < rows; r++)
            for (int64_t o = 0; o < OC; o++) sums.dbias[o] += dout[r * OC + o];
    }
}

}  // namespace HWY_NAMESPACE
}  // namespace jetlag
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <vector>

#include "kernels/cpu/dense.h"

namespace jetlag {

HWY_EXPORT(padded_width);
HWY_EXPORT(pack_panels);
HWY_EXPORT(multiply_panels);
HWY_EXPORT(multiply_row);
HWY_EXPORT(backward_rows);

static constexpr int64_t kChunkRows = 96;  // of forward

void dense_forward(float* out, const float* inp, const float* weight, const float* bias, int64_t N, int64_t C,
                   int64_t OC) {
    const int64_t width = HWY_DYNAMIC_DISPATCH(padded_width)(OC);
    std::vector<float> packed(static_cast<size_t>((C + 1) * width));
    float* init = packed.data() + C * width;
    HWY_DYNAMIC_DISPATCH(pack_panels)(packed.data(), weight, C, OC, true);
    std::copy(bias, bias + OC, init);
    const auto multiply_rows = HWY_DYNAMIC_DISPATCH(multiply_panels);
#pragma omp parallel for schedule(static) \
    num_threads(threads_for(static_cast <double>(N * C) * static_cast <double>(OC) / 16))
    for (int64_t begin = 0; begin < N; begin += kChunkRows)
        multiply_rows(out + begin * OC, inp + begin * C, packed.data(), init, std::min(kChunkRows, N - begin), C, OC);
}

void dense_forward_row(float* out, const float* inp, const float* weight, const float* bias, int64_t C, int64_t OC) {
    constexpr int64_t kSpan = 64;  // outputs of a thread at a time
    const auto multiply_span = HWY_DYNAMIC_DISPATCH(multiply_row);
#pragma omp parallel for schedule(static) num_threads(threads_for(static_cast <double>(C * OC) / 16))
    for (int64_t begin = 0; begin < OC; begin += kSpan)
        multiply_span(out, inp, weight, bias, C, begin, std::min(OC, begin + kSpan));
}

int64_t dense_workspace_floats(int64_t N, int64_t C, int64_t OC) {
    const int64_t width = round_up(C, kWidestVector);
    return sum_chunks(N) * (OC * width + OC + kBlockRows * width) + (OC + 1) * width;
}

// The sums of up to 16 chunks of rows, each in a buffer of its own, are added in order at the end.
void dense_backward(float* dinp, float* dweight, float* dbias, const float* dout, const float* inp, const float* weight,
                    float* workspace, int64_t N, int64_t C, int64_t OC) {
    const int64_t chunks = sum_chunks(N), width = HWY_DYNAMIC_DISPATCH(padded_width)(C);
    const int threads = threads_for(static_cast<double>(N * C) * static_cast<double>(OC) / 16);
    const auto take = [&workspace](int64_t n) { return std::exchange(workspace, workspace + n); };
    float* dweights = take(chunks * OC * width);
    float* dbiases = take(chunks * OC);
    float* inp_rows = take(chunks * kBlockRows * width);
    float* panels = take(OC * width);
    float* zeros = take(width);
    std::fill(zeros, zeros + width, 0.0f);
    if (dinp != nullptr) HWY_DYNAMIC_DISPATCH(pack_panels)(panels, weight, OC, C, false);
    const LinearBackward layer = {dout, inp, dinp != nullptr ? panels : nullptr, zeros, dinp, C, OC};
    const auto rows_backward = HWY_DYNAMIC_DISPATCH(backward_rows);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t chunk = 0; chunk < chunks; chunk++)
            rows_backward(layer,
                          {dweights + chunk * OC * width, dbiases + chunk * OC, inp_rows + chunk * kBlockRows * width},
                          chunk_begin(chunk, chunks, N), chunk_begin(chunk + 1, chunks, N));
#pragma omp for schedule(static)
        for (int64_t o = 0; o < OC; o++) {
            float* sum = dweights + o * width;  // of the first chunk
            for (int64_t chunk = 1; chunk < chunks; chunk++)
                for (int64_t c = 0; c < C; c++) sum[c] += dweights[(chunk * OC + o) * width + c];
            for (int64_t c = 0; c < C; c++) dweight[o * C + c] += sum[c];
            if (dbias == nullptr) continue;
            for (int64_t chunk = 1; chunk < chunks; chunk++) dbiases[o] += dbiases[chunk * OC + o];
            dbias[o] += dbiases[o];
        }
    }
}

}  // namespace jetlag
#endif
