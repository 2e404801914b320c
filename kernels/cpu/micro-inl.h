// The one multiply-add loop that attention and the dense layers share, and the packing that feeds it.
//
//     C (M x lanes) = init + A B,  A (M x K) read one number at a time and broadcast, B (K x lanes) in vectors
//
// A block of C (6 rows of 4 vectors where there are 32 vector registers, of 2 where there are 16) stays in registers
// for the whole sum: each step of k loads a row of B and 6 numbers of A for 24 (12) multiply-adds, so that the
// multiply-add units are what bounds it. A may have any strides; B must be contiguous along the lanes, which is what
// panels are packed for. Included once per SIMD target (hence the guard).

#if defined(JETLAG_MICRO_INL_H) == defined(HWY_TARGET_TOGGLE)
#ifdef JETLAG_MICRO_INL_H
#undef JETLAG_MICRO_INL_H
#else
#define JETLAG_MICRO_INL_H
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstdint>

HWY_BEFORE_NAMESPACE();
namespace jetlag {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D32 = hn::ScalableTag<float>;
using Vec = hn::Vec<D32>;

inline constexpr bool kManyRegisters = HWY_TARGET <= HWY_AVX3 || HWY_ARCH_ARM_A64;
inline constexpr int kTileVectors = kManyRegisters ? 4 : 2;
inline constexpr int kMicroRows = 6;

HWY_INLINE int64_t lane_count() {
    return static_cast<int64_t>(hn::Lanes(D32()));
}
// Lanes of a tile, and of a panel of B.
HWY_INLINE int64_t tile_lanes() {
    return kTileVectors * lane_count();
}

// c[m][:] = init[m][:] + sum_k a[m][k] b[k][:] for m < M, with V vectors to a row. Strides in floats; init_m may be 0
// (a row that all start from) or negative. With kMax, largest[v] becomes the maximum of itself and all c[m][v].
template <int M, int V, bool kMax>
HWY_INLINE void micro_kernel(const float* HWY_RESTRICT a, int64_t a_m, int64_t a_k, const float* HWY_RESTRICT b,
                             int64_t b_k, int64_t K, const float* init, int64_t init_m, float* c, int64_t c_m,
                             Vec* largest) {
    const D32 d;
    const int64_t N = lane_count();
    Vec sum[M][V];
    for (int m = 0; m < M; m++)
        for (int v = 0; v < V; v++) sum[m][v] = hn::LoadU(d, init + m * init_m + v * N);
    for (int64_t k = 0; k < K; k++) {
        Vec row[V];
        for (int v = 0; v < V; v++) row[v] = hn::LoadU(d, b + k * b_k + v * N);
        for (int m = 0; m < M; m++) {
            const Vec factor = hn::Set(d, a[m * a_m + k * a_k]);
            for (int v = 0; v < V; v++) sum[m][v] = hn::MulAdd(factor, row[v], sum[m][v]);
        }
    }
    for (int m = 0; m < M; m++)
        for (int v = 0; v < V; v++) {
            hn::StoreU(sum[m][v], d, c + m * c_m + v * N);
            if (kMax) largest[v] = hn::Max(largest[v], sum[m][v]);
        }
}

// The same for any number of rows m < M.
template <int V, bool kMax = false>
HWY_INLINE void multiply(const float* a, int64_t a_m, int64_t a_k, const float* b, int64_t b_k, int64_t M, int64_t K,
                         const float* init, int64_t init_m, float* c, int64_t c_m, Vec* largest = nullptr) {
    int64_t m = 0;
    for (; m + kMicroRows <= M; m += kMicroRows)
        micro_kernel<kMicroRows, V, kMax>(a + m * a_m, a_m, a_k, b, b_k, K, init + m * init_m, init_m, c + m * c_m, c_m,
                                          largest);
    for (; m + 2 <= M; m += 2)
        micro_kernel<2, V, kMax>(a + m * a_m, a_m, a_k, b, b_k, K, init + m * init_m, init_m, c + m * c_m, c_m,
                                 largest);
    for (; m < M; m++)
        micro_kernel<1, V, kMax>(a + m * a_m, a_m, a_k, b, b_k, K, init + m * init_m, init_m, c + m * c_m, c_m,
                                 largest);
}

// Columns of the panel that begins at column w: the vectors of all columns are dealt out evenly (96 columns are two
// panels of three vectors, not one of four and one of two, which would keep the multiply-add units less busy).
HWY_INLINE int64_t panel_width(int64_t w, int64_t columns) {
    const int64_t N = lane_count(), vectors = (columns - w + N - 1) / N,
                  panels = (vectors + kTileVectors - 1) / kTileVectors;
    return std::min(columns - w, (vectors + panels - 1) / panels * N);
}

// The same for any number of vectors to a row; b and c are wide enough for whole vectors.
HWY_INLINE void multiply_wide(const float* a, int64_t a_m, int64_t a_k, const float* b, int64_t b_k, int64_t M,
                              int64_t K, const float* init, int64_t init_m, float* c, int64_t c_m, int64_t width) {
    const int64_t N = lane_count();
    int64_t w = 0;
    for (; w + kTileVectors * N <= width; w += kTileVectors * N)
        multiply<kTileVectors>(a, a_m, a_k, b + w, b_k, M, K, init + w, init_m, c + w, c_m);
    if (kTileVectors > 3 && w + 3 * N <= width) {
        multiply<3>(a, a_m, a_k, b + w, b_k, M, K, init + w, init_m, c + w, c_m);
        w += 3 * N;
    }
    for (; w + 2 * N <= width; w += 2 * N) multiply<2>(a, a_m, a_k, b + w, b_k, M, K, init + w, init_m, c + w, c_m);
    for (; w < width; w += N) multiply<1>(a, a_m, a_k, b + w, b_k, M, K, init + w, init_m, c + w, c_m);
}

// panel[c * lanes + r] = scale * rows[r * stride + c] for r < count and c < columns, 0 for count <= r < lanes: rows
// become lanes. `lanes` is a multiple of the vector length.
HWY_INLINE void transpose_into_panel(float* panel, int64_t lanes, const float* rows, int64_t stride, int64_t count,
                                     int64_t columns, float scale) {
    const D32 d;
    const hn::RebindToSigned<D32> di;
    const int64_t N = lane_count();
    const auto steps = hn::Mul(hn::Iota(di, 0), hn::Set(di, static_cast<int32_t>(stride)));
    const Vec factor = hn::Set(d, scale);
    int64_t r = 0;
    for (; r + N <= count; r += N)
        for (int64_t c = 0; c < columns; c++)
            hn::StoreU(hn::Mul(hn::GatherIndex(d, rows + r * stride + c, steps), factor), d, panel + c * lanes + r);
    for (; r < lanes; r++)
        for (int64_t c = 0; c < columns; c++) panel[c * lanes + r] = r < count ? rows[r * stride + c] * scale : 0.0f;
}

}  // namespace HWY_NAMESPACE
}  // namespace jetlag
HWY_AFTER_NAMESPACE();

#endif
