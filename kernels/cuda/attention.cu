// Causal attention with a rotary table and a lag-bias table, forward and backward, in float or with products in bf16 or
// tf32.
//
// A block owns a tile of M tokens, whose sums stay in registers, and streams over tiles of N tokens of the other side,
// which cp.async brings into one of two buffers while the block works on the other:
//
//     forward    owns rows   O += P V                      over keys, from the newest on, with the online softmax
//     dq         owns rows   dQ += dS K                    over keys, from the newest on
//     dkdv       owns keys   dV += P^T dO, dK += dS^T Q    over rows
//
// The lag table's gradient, sums of dS along diagonals, is dq's by-product.
//
// Backward recomputes P from the saved log-sum-exp, in both of its kernels: 7 products instead of 5, but every sum has
// one owner, so that nothing is added by atomics, or written for others to add up, and the order is always the same.
//
// All products are two functions. multiply_rows is A B^T of two tiles whose rows are contiguous, multiply_columns is
// the product of a tile of weights, which has been through shared memory, with the rows of the other side. In a warp,
// lane 4 g + q owns the rows g, g + 8, ... of the warp's own rows, and of a tile of scores the columns q, q + 4, ...:
// every load from shared memory is of four floats, and few of them serve many multiply-adds; a row's maximum takes two
// shuffles. Rows of tiles are 4 floats longer than their number of channels, so that the eight rows that a warp reads
// at once are in different banks.
//
// In bf16 and tf32, with up to 128 channels, rows are packed rounded, in whole groups of 16 or 8 channels, and both
// functions are products of the tensor cores with sums in float: lane 4 g + q then owns the columns 2 q, 2 q + 1 of
// each 8. Softmax stays in float. P and dS are rounded for the products that they are an operand of, and stay in their
// registers: in bf16 a lane's part of a result is its part of an operand, and in tf32 it is once the sum takes keys in
// the order 0, 2, 4, 6, 1, 3, 5, 7. What is summed along diagonals is not rounded. More channels are computed in float:
// registers do not suffice for sums of a fragment's 16 rows.
//
// The two differ in a few lines. A fragment of rows is four pieces of 16 bytes for ldmatrix, of 8 bf16 or of 4 tf32.
// ldmatrix can transpose bf16 only: in tf32, what is read by columns is single words, which rows of 8 n + 4 words keep
// in different banks. Rows of tf32 are twice as long, so that with 128 channels only smaller tiles fit in shared
// memory.
//
// The lag table is copied with -infinity on either side, and the run of M + N entries that a tile of scores needs is
// brought along with the tile. The accumulators of scores start from it, so that adding the bias costs nothing, and as
// lags below zero read -infinity, the causal mask costs nothing either; without a lag bias the run holds zeros. Lags at
// a distance of 4 share their entries in a lane: a lane reads a few of them only.
//
// First of all a kernel packs q, k, v (and dO): sheared, rotated, q times 1 / sqrt(D), padded with zeros to whole
// groups of channels, in rows that cp.async can read. Tokens behind the last one read as copies of it, with a weight of
// 0 through their lag or their log-sum-exp.
//
// Arithmetic: 4 D operations per (row, key) pair forward, 14 D backward, beside one exponential each time a weight is
// computed. Bound by the multiply-add units, or by shared memory, of which a tile of 4 by 8 per lane loads 12 groups of
// four floats for 128 multiply-adds.
//
// Exact skipping. Score (i, j) is at most |q_i| |k_j| + bias(i - j). With upper bounds of all three for a tile, its
// weights, all T of a row taken together, stay below 2^-24 of the row's sum, half a unit in its last place, if
//
//     max_i |q_i| |k| - min_i m_i + bias + ln(|v| / |v|_0) < -ln(2^24 T)
//
// where m_i is the running maximum (the row's sum is at least e^m_i) or, in backward, the log-sum-exp, and |v|_0 is the
// largest value of the block of keys whose largest is smallest: a far key counts by what it would add to the output,
// not by its weight alone. Backward does the same with |dO|, and asks for another ln T for the gradient of the lag
// table; so does forward where the mean lag is wanted. Forward takes the first two terms per warp. The same test with
// bounds for all tiles that follow ends the loop, so that a bias that falls with the lag costs O(T W). What is not
// finite is never skipped.

#include <algorithm>
#include <cmath>
#include <utility>

#include "kernels/cuda/attention_rows.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/rotate.h"
#include "kernels/ops.h"

namespace jetlag {
namespace {

constexpr int kPackRows = 64;      // tokens that a block packs, and that have bounds together; whole tiles of N tokens
constexpr int kPackThreads = 128;  // two for each token
constexpr int kLagPad = 128;       // -infinity on either side of a lag table: no less than M or N
constexpr int kLagBlock = 32;      // lags whose largest bias is kept
constexpr int kScanThreads = 128;  // of the kernels that turn bounds of tiles into bounds of all that follow
constexpr int kStreamsWanted = 512;  // blocks of dq that have sums of diagonals of their own: enough for any GPU

// Upper bounds for a block of keys: Euclidean norms, of values their logarithm; +infinity where a key or a value is not
// finite.
struct KeyBound {
    float key, log_value;                // of this block
    float key_before, log_value_before;  // of this and all blocks of older keys
};
// The same for a block of rows, backward. lse is the smallest.
struct RowBound {
    float query, lse, log_dout;
    float query_after, lse_after, log_dout_after;
};
struct HeadBound {
    float log_quietest_value, log_quietest_dout;
};

// What the kernels of one call share. A head is one of B H, numbered as in lse.
struct Call {
    int T, H, D;
    int heads;
    int width;              // of packed rows: D or more, whole groups of 4
    bool in_bf16, in_tf32;  // packed rows
    int blocks;             // of kPackRows tokens
    int padded_T;           // blocks kPackRows
    float scale;            // of scores
    RotaryTable rotary;
    const real* qkv;
    // Packed, (heads, T, width), of floats, rounded to tf32 or not, or of bf16: query times scale
    void *query, *key, *value, *dout;
    // The lag tables, of every head or of none: (H or 1, lag_stride), entry kLagPad + d
    float* lags;
    int lag_stride;
    bool has_lag_bias;
    // Backward, (heads, padded_T): lse, +infinity where P is 0: no such row, or a row without a key; sum_d dout out
    float *lse, *delta;
    // Gradient of the lag table, (heads, streams, T)
    float* lag_sums;
    int streams;
    // Skipping; nothing below is set without
    bool skips;
    float margin;            // ln(2^24 T), or more
    float* query_norm;       // (heads, T)
    KeyBound* key_bounds;    // (heads, blocks)
    RowBound* row_bounds;    // (heads, blocks)
    HeadBound* head_bounds;  // (heads)
    float* lag_blocks;       // (H, lag_block_count): the largest of kLagBlock lags
    float* lag_blocks_from;  // the same of all blocks from there on
    int lag_block_count;
    int* bias_skips;       // (H): whether the table falls far enough for a test to pay
    unsigned* tiles_done;  // of this call, by warp
};

// ---------------------------------------------------------------------------------------------------------------
// Packing

// Of two bounds the larger; +infinity for what is not a number.
__device__ __forceinline__ float larger_bound(float a, float b) {
    return b <= a ? a : b == b ? b : INFINITY;
}

// Of packed rows, the norm of one.
template <typename Element>
__device__ float norm_of(const void* rows, int64_t token, int width) {
    const Element* row = static_cast<const Element*>(rows) + token * width;
    float sum = 0;
    for (int c = 0; c < width; c++) {
        const float x = load(row + c);
        sum = fmaf(x, x, sum);
    }
    return sqrtf(sum);
}
__device__ float norm_of(const Call& call, const void* rows, int64_t token) {
    return call.in_bf16 ? norm_of<bf16>(rows, token, call.width) : norm_of<float>(rows, token, call.width);
}

// kPackRows tokens of one head from t0 on: the first `parts` of q, k, v and dO.
__device__ __forceinline__ void pack_rows(const Call& call, const real* dout, int parts, int head, int t0) {
    const int groups = call.width / 4;
    const int64_t C = static_cast<int64_t>(call.H) * call.D;
    const int64_t first = static_cast<int64_t>(head / call.H) * call.T, channel = head % call.H * call.D;
    for (int index = static_cast<int>(threadIdx.x); index < parts * kPackRows * groups; index += kPackThreads) {
        const int group = index % groups, t = t0 + index / groups % kPackRows, part = index / groups / kPackRows;
        if (t >= call.T) continue;
        const real* source =
            part < 3 ? call.qkv + ((first + t) * 3 + part) * C + channel : dout + (first + t) * C + channel;
        float x[4];
        for (int e = 0; e < 4; e++) x[e] = 4 * group + e < call.D ? load(source + 4 * group + e) : 0;
        if (part < 2) rotate_channels(x, call.rotary, t, group, part == 1);
        if (part == 0)
            for (int e = 0; e < 4; e++) x[e] *= call.scale;
        if (kTf32 && call.in_tf32)
            for (int e = 0; e < 4; e++) x[e] = __uint_as_float(to_tf32(x[e]));
        void* packed = part == 0 ? call.query : part == 1 ? call.key : part == 2 ? call.value : call.dout;
        const int64_t four = (static_cast<int64_t>(head) * call.T + t) * groups + group;
        if (call.in_bf16)
            static_cast<uint2*>(packed)[four] = make_uint2(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]));
        else
            static_cast<float4*>(packed)[four] = make_float4(x[0], x[1], x[2], x[3]);
    }
}

// Packs, and computes delta and bounds with one thread for q and k of a token, and one for v and dO. dout, out and lse
// are null in the forward pass.
__global__ void __launch_bounds__(kPackThreads)
    attention_pack_kernel(Call call, const real* dout, const real* out, const float* lse) {
    constexpr int kWarps = kPackThreads / kWarp;
    SHARED_ARRAY(float, largest_key_value, kWarps);
    SHARED_ARRAY(float, largest_query, kWarps);
    SHARED_ARRAY(float, largest_dout, kWarps);
    SHARED_ARRAY(float, smallest_lse, kWarps);
    const int head = static_cast<int>(blockIdx.x) % call.heads, block = static_cast<int>(blockIdx.x) / call.heads;
    const int thread = static_cast<int>(threadIdx.x), t = block * kPackRows + thread % kPackRows;
    const bool is_value = thread >= kPackRows, is_token = t < call.T, backward = dout != nullptr;
    pack_rows(call, dout, backward ? 4 : 3, head, block * kPackRows);
    if (!backward && !call.skips) return;
    __syncthreads();

    const int64_t token = static_cast<int64_t>(head) * call.T + t;
    float row_lse = INFINITY, delta = 0;
    if (backward && is_value) {
        if (is_token) {
            const int64_t C = static_cast<int64_t>(call.H) * call.D;
            const int64_t at = (static_cast<int64_t>(head / call.H) * call.T + t) * C + head % call.H * call.D;
            for (int c = 0; c < call.D; c++) delta = fmaf(load(dout + at + c), load(out + at + c), delta);
            row_lse = lse[token] == -INFINITY ? INFINITY : lse[token];
        }
        call.lse[static_cast<int64_t>(head) * call.padded_T + t] = row_lse;
        call.delta[static_cast<int64_t>(head) * call.padded_T + t] = delta;
    }
    if (!call.skips) return;

    float key_value = 0, query = 0, row_dout = 0;
    if (is_token) {
        key_value = norm_of(call, is_value ? call.value : call.key, token);
        if (!is_value) {
            query = norm_of(call, call.query, token);
            call.query_norm[token] = query;
            // lse is +infinity for a row without a key. Whatever else is not finite must show.
            if (!(query < INFINITY)) row_dout = INFINITY;
        } else if (backward) {
            row_dout = norm_of(call, call.dout, token);
            if (!(row_dout < INFINITY && fabsf(delta) < INFINITY && row_lse > -INFINITY)) row_dout = INFINITY;
        }
    }
    const int warp = thread / kWarp;
    const float warp_key_value = warp_max(larger_bound(0, key_value)), warp_query = warp_max(query);
    const float warp_dout = warp_max(row_dout), warp_lse = -warp_max(-row_lse);
    if (thread % kWarp == 0) {
        largest_key_value[warp] = warp_key_value;
        largest_query[warp] = warp_query;
        largest_dout[warp] = warp_dout;
        smallest_lse[warp] = warp_lse;
    }
    __syncthreads();
    if (thread > 0) return;
    const float key = fmaxf(largest_key_value[0], largest_key_value[1]);
    const float value = fmaxf(largest_key_value[2], largest_key_value[3]);
    // A key that is not finite must show even where its bias is -infinity, which only its value can prevent.
    const int64_t at = static_cast<int64_t>(head) * call.blocks + block;
    call.key_bounds[at] = {key, key < INFINITY ? logf(value) : INFINITY, 0, 0};
    if (!backward) return;
    float largest = 0;
    for (int w = 0; w < kWarps; w++) largest = fmaxf(largest, largest_dout[w]);
    call.row_bounds[at] = {
        fmaxf(largest_query[0], largest_query[1]), fminf(smallest_lse[2], smallest_lse[3]), logf(largest), 0, 0, 0};
}

// The lag tables with what lies on either side.
__global__ void attention_lags_kernel(Call call, const float* lag_bias) {
    const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    const int64_t h = index / call.lag_stride, d = index % call.lag_stride - kLagPad;
    if (h >= (call.has_lag_bias ? call.H : 1)) return;
    float bias = -INFINITY;
    if (d >= 0 && d < call.T) bias = lag_bias != nullptr ? lag_bias[h * call.T + d] : 0;
    call.lags[index] = bias;
}

// ---------------------------------------------------------------------------------------------------------------
// Skipping

// The part of n blocks that this thread of a scan goes through.
__device__ __forceinline__ int scan_begin(int n, int thread) {
    return static_cast<int>(static_cast<int64_t>(n) * thread / kScanThreads);
}

// Bounds of the lags of one head. Where the bias is a NaN or +infinity nothing is skipped.
__global__ void __launch_bounds__(kScanThreads) attention_lag_bounds_kernel(Call call) {
    SHARED_ARRAY(float, largest_of, kScanThreads);
    SHARED_ARRAY(float, lowest_of, kScanThreads);
    const int thread = static_cast<int>(threadIdx.x), n = call.lag_block_count;
    const int begin = scan_begin(n, thread), end = scan_begin(n, thread + 1);
    const float* bias = call.lags + static_cast<int64_t>(blockIdx.x) * call.lag_stride + kLagPad;
    float* block = call.lag_blocks + static_cast<int64_t>(blockIdx.x) * n;
    float* from = call.lag_blocks_from + static_cast<int64_t>(blockIdx.x) * n;
    float all = -INFINITY, lowest = INFINITY;
    for (int b = begin; b < end; b++) {
        float largest = -INFINITY;
        for (int d = b * kLagBlock; d < min(call.T, (b + 1) * kLagBlock); d++) largest = larger_bound(largest, bias[d]);
        block[b] = largest;
        all = fmaxf(all, largest);
        lowest = fminf(lowest, largest);
    }
    largest_of[thread] = all;
    lowest_of[thread] = lowest;
    __syncthreads();
    float after = -INFINITY;
    for (int other = thread + 1; other < kScanThreads; other++) after = fmaxf(after, largest_of[other]);
    for (int b = end - 1; b >= begin; b--) from[b] = after = fmaxf(after, block[b]);
    if (thread > 0) return;
    for (int other = 0; other < kScanThreads; other++) lowest = fminf(lowest, lowest_of[other]);
    // Testing costs a little, which a flat bias would pay for nothing.
    call.bias_skips[blockIdx.x] = fmaxf(all, after) - lowest > logf(0x1p24f) / 2;
    if (blockIdx.x == 0) *call.tiles_done = 0;
}

// Bounds of all keys up to a block and all rows from a block on, of one head.
__global__ void __launch_bounds__(kScanThreads) attention_bounds_kernel(Call call, bool backward) {
    SHARED_ARRAY(KeyBound, keys_of, kScanThreads);
    SHARED_ARRAY(RowBound, rows_of, kScanThreads);
    SHARED_ARRAY(HeadBound, quietest_of, kScanThreads);
    const int thread = static_cast<int>(threadIdx.x), n = call.blocks;
    const int begin = scan_begin(n, thread), end = scan_begin(n, thread + 1);
    KeyBound* keys = call.key_bounds + static_cast<int64_t>(blockIdx.x) * n;
    RowBound* rows = call.row_bounds + static_cast<int64_t>(blockIdx.x) * n;
    const auto add_key = [](KeyBound& sum, float key, float log_value) {
        sum.key_before = fmaxf(sum.key_before, key);
        sum.log_value_before = fmaxf(sum.log_value_before, log_value);
    };
    const auto add_row = [](RowBound& sum, float query, float lse, float log_dout) {
        sum.query_after = fmaxf(sum.query_after, query);
        sum.lse_after = fminf(sum.lse_after, lse);
        sum.log_dout_after = fmaxf(sum.log_dout_after, log_dout);
    };
    KeyBound key = {0, 0, 0, -INFINITY};
    RowBound row = {0, 0, 0, 0, INFINITY, -INFINITY};
    HeadBound quietest = {INFINITY, INFINITY};
    for (int i = begin; i < end; i++) {
        add_key(key, keys[i].key, keys[i].log_value);
        quietest.log_quietest_value = fminf(quietest.log_quietest_value, keys[i].log_value);
        if (!backward) continue;
        add_row(row, rows[i].query, rows[i].lse, rows[i].log_dout);
        quietest.log_quietest_dout = fminf(quietest.log_quietest_dout, rows[i].log_dout);
    }
    keys_of[thread] = key;
    rows_of[thread] = row;
    quietest_of[thread] = quietest;
    __syncthreads();
    key = {0, 0, 0, -INFINITY};
    for (int other = 0; other < thread; other++)
        add_key(key, keys_of[other].key_before, keys_of[other].log_value_before);
    for (int i = begin; i < end; i++) {
        add_key(key, keys[i].key, keys[i].log_value);
        keys[i].key_before = key.key_before;
        keys[i].log_value_before = key.log_value_before;
    }
    if (backward) {
        row = {0, 0, 0, 0, INFINITY, -INFINITY};
        for (int other = kScanThreads - 1; other > thread; other--)
            add_row(row, rows_of[other].query_after, rows_of[other].lse_after, rows_of[other].log_dout_after);
        for (int i = end - 1; i >= begin; i--) {
            add_row(row, rows[i].query, rows[i].lse, rows[i].log_dout);
            rows[i].query_after = row.query_after;
            rows[i].lse_after = row.lse_after;
            rows[i].log_dout_after = row.log_dout_after;
        }
    }
    if (thread > 0) return;
    for (int other = 0; other < kScanThreads; other++) {
        quietest.log_quietest_value = fminf(quietest.log_quietest_value, quietest_of[other].log_quietest_value);
        quietest.log_quietest_dout = fminf(quietest.log_quietest_dout, quietest_of[other].log_quietest_dout);
    }
    call.head_bounds[blockIdx.x] = quietest;
}

// Whether tiles of a head may be skipped. Everything else that a test reads is loaded when it is made: registers are
// for sums.
__device__ __forceinline__ bool may_skip(const Call& call, int head) {
    return call.skips && call.bias_skips[head % call.H] != 0;
}

// The largest bias of the lags first .. last of a head; those below 0 are masked.
__device__ __forceinline__ float largest_bias(const Call& call, int head, int first, int last) {
    const float* blocks = call.lag_blocks + static_cast<int64_t>(head % call.H) * call.lag_block_count;
    float largest = -INFINITY;
    const int end = min(last, call.T - 1) / kLagBlock;
    for (int b = max(first, 0) / kLagBlock; b <= end; b++) largest = fmaxf(largest, blocks[b]);
    return largest;
}
// The largest bias of the lags from `first` on.
__device__ __forceinline__ float largest_bias_from(const Call& call, int head, int first) {
    return call.lag_blocks_from[static_cast<int64_t>(head % call.H) * call.lag_block_count + first / kLagBlock];
}

// Whether weights of at most e^(reach + bias) on values of at most e^log_ratio times the smallest can be left out. A
// bound that is not a number, or not finite, says no.
__device__ __forceinline__ bool is_negligible(float reach, float bias, float log_ratio, float margin) {
    if (bias == -INFINITY) return log_ratio < INFINITY;
    // The bounds are rounded: 1e-5 of them is more than their error.
    return reach + bias + 1e-5f * (fabsf(reach) + fabsf(bias)) + log_ratio < -margin;
}

// A tile of the other side, and which warps of the block work on it; without a bit for one none of its scores count.
struct Visit {
    int tile;
    unsigned warps;
};

// Bounds of the rows of a warp: |q|, the least of the running maxima or log-sum-exps, and what is added to the
// logarithm of the values' bound.
struct RowTest {
    float query, reached, log_ratio;
};

// The tile of keys that rows i0 .. i0 + M - 1 of a head work on after tile `tile`, from the newest to the oldest; -1:
// none. Each lane tests for one of the warps, lane % Warps, of whose rows bounds() returns a RowTest.
template <typename Tile, typename Bounds>
__device__ __forceinline__ Visit next_key_tile(const Call& call, int head, bool skips, int tile, int i0,
                                               Bounds bounds) {
    constexpr int kN = Tile::kN;
    if (!skips) return {tile - 1, kAllLanes};
    const int lane = static_cast<int>(threadIdx.x) % kWarp, first = i0 + lane % Tile::kWarps * Tile::kWarpRows;
    const int end = min(first + Tile::kWarpRows, call.T);
    const bool is_warp = lane < Tile::kWarps && first < end;
    const RowTest rows = bounds();
    for (tile--; tile >= 0; tile--) {
        const int j0 = tile * kN, first_lag = max(0, first - (j0 + kN - 1));
        const KeyBound keys = call.key_bounds[static_cast<int64_t>(head) * call.blocks + j0 / kPackRows];
        const bool counts =
            is_warp && j0 < end &&
            !is_negligible(rows.query * keys.key - rows.reached, largest_bias(call, head, first_lag, end - 1 - j0),
                           keys.log_value + rows.log_ratio, call.margin);
        const unsigned warps = __ballot_sync(kAllLanes, counts);
        if (warps != 0) return {tile, warps};
        const bool others_may = is_warp && !is_negligible(rows.query * keys.key_before - rows.reached,
                                                          largest_bias_from(call, head, first_lag),
                                                          keys.log_value_before + rows.log_ratio, call.margin);
        if (!__any_sync(kAllLanes, others_may)) break;
    }
    return {-1, 0};
}

// The same for keys j0 .. j0 + M - 1 and their tiles of rows, from the first to the last of `tiles`; `tiles`: none.
template <typename Tile>
__device__ __forceinline__ Visit next_row_tile(const Call& call, int head, bool skips, int tile, int tiles, int j0) {
    constexpr int kN = Tile::kN;
    if (!skips) return {tile + 1, kAllLanes};
    const int lane = static_cast<int>(threadIdx.x) % kWarp, first = j0 + lane % Tile::kWarps * Tile::kWarpRows;
    const bool is_warp = lane < Tile::kWarps && first < call.T;
    const int64_t blocks = static_cast<int64_t>(head) * call.blocks;
    const KeyBound keys = call.key_bounds[blocks + min(first, call.T - 1) / kPackRows];
    const HeadBound quietest = call.head_bounds[head];
    const float log_ratio = keys.log_value - quietest.log_quietest_value - quietest.log_quietest_dout;
    for (tile++; tile < tiles; tile++) {
        const int i0 = tile * kN, end = min(i0 + kN, call.T);
        const int first_lag = max(0, i0 - (first + Tile::kWarpRows - 1));
        const RowBound rows = call.row_bounds[blocks + i0 / kPackRows];
        const bool counts =
            is_warp && first < end &&
            !is_negligible(rows.query * keys.key - rows.lse, largest_bias(call, head, first_lag, end - 1 - first),
                           rows.log_dout + log_ratio, call.margin);
        const unsigned warps = __ballot_sync(kAllLanes, counts);
        if (warps != 0) return {tile, warps};
        const bool others_may = is_warp && !is_negligible(rows.query_after * keys.key - rows.lse_after,
                                                          largest_bias_from(call, head, first_lag),
                                                          rows.log_dout_after + log_ratio, call.margin);
        if (!__any_sync(kAllLanes, others_may)) break;
    }
    return {tiles, 0};
}

// ---------------------------------------------------------------------------------------------------------------
// Tiles

// A float that is rounded to tf32.
struct tf32 {
    uint32_t bits;
};

// Whether products are the tensor cores', and of what.
template <int Dim>
constexpr bool kTensor = (kHalfPrecision || kTf32) && Dim <= 128;
using TensorElement = std::conditional_t<kHalfPrecision, bf16, tf32>;

// How a block is cut for heads of up to kDim channels: lanes own kRows rows and kColumns columns of scores.
template <int Dim, int Warps, int Rows, int Columns>
struct Tile {
    static constexpr int kDim = Dim, kWarps = Warps, kRows = Rows, kColumns = Columns;
    static constexpr bool kTensor = jetlag::kTensor<Dim>;
    using Element = std::conditional_t<kTensor, TensorElement, float>;  // of packed rows
    static constexpr int kPiece = 16 / sizeof(Element);                 // elements of a copy
    static constexpr int kStep = kTensor ? 2 * kPiece : 4;  // channels, or keys, that a product takes at once
    static constexpr int kDepth = (kDim + kStep - 1) / kStep * kStep;  // channels of a packed row
    static constexpr int kThreads = Warps * kWarp;
    static constexpr int kWarpRows = 8 * Rows;
    static constexpr int kM = Warps * kWarpRows, kN = 4 * Columns;
    static constexpr int kStride = kDepth + kPiece;  // elements of a row in shared memory
    static constexpr int kRowFloats = kStride * sizeof(Element) / sizeof(float);
    static constexpr int kWeightStride = kN + 4;                      // the same of a tile of weights
    static constexpr int kGroup = !kTensor && Dim % 16 == 0 ? 4 : 2;  // channels that a lane owns together
    static constexpr int kGroups = Dim / (4 * kGroup);                // of its groups, 4 kGroup channels apart
    static constexpr int kChannels = kGroup * kGroups;
    static constexpr int kRun = kM + kN;  // lags
    // Column j of a lane, from its first on.
    static constexpr __host__ __device__ int column(int j) { return kTensor ? 8 * (j / 2) + j % 2 : 4 * j; }
    static_assert(!kTensor || (Rows % 2 == 0 && Columns % 4 == 0));
    static_assert(Dim % 8 == 0 && Columns % 2 == 0 && kM % kN == 0 && kPackRows % kN == 0 && kM <= kLagPad);
};

// 99 KiB of shared memory are what every GPU from sm_80 on gives a block, and 255 registers each thread. With fewer
// registers more blocks can run at once: what loads and barriers leave idle, another block uses.
constexpr size_t kMostShared = 97 * 1024;  // beside static arrays
template <int Dim>
constexpr auto forward_tile() {
    if constexpr (Dim <= 64)
        return Tile<Dim, 4, 4, 8>();
    else if constexpr (kTensor<Dim>)
        return Tile<Dim, 4, 2, (kTf32 ? 4 : 8)>();
    else if constexpr (Dim <= 128)
        return Tile<Dim, 2, 4, 4>();
    else
        return Tile<Dim, 2, 2, 2>();
}
template <int Dim>
constexpr auto backward_tile() {
    if constexpr (Dim <= 32)
        return Tile<Dim, 4, 4, 8>();
    else if constexpr (Dim <= 64)
        return Tile<Dim, 4, 2, 8>();
    else if constexpr (kTensor<Dim> && !kTf32)
        return Tile<Dim, 4, 2, 4>();
    else if constexpr (Dim <= 128)
        return Tile<Dim, 2, 2, 4>();
    else
        return Tile<Dim, 2, 1, 2>();
}
template <int Dim>
using ForwardTile = decltype(forward_tile<Dim>());
template <int Dim>
using BackwardTile = decltype(backward_tile<Dim>());

// The blocks that __launch_bounds__ asks room for; 0: as the compiler likes, who in tf32 would now and then spill a few
// registers to make room for one block more.
template <int Dim, bool WithStats>
constexpr int kForwardBlocks = (WithStats || Dim == 8) && kTf32 ? 1 : 0;
template <int Dim>
constexpr int kDqBlocks = Dim == 64 && kTf32 ? 1 : 0;

template <int Rows, int Columns, typename Body>
__device__ __forceinline__ void for_each(Body body) {
    UNROLL for (int i = 0; i < Rows; i++) {
        UNROLL for (int j = 0; j < Columns; j++) body(i, j);
    }
}

__device__ __forceinline__ float4 load4(const float* p) {
    return *reinterpret_cast<const float4*>(p);
}

// Where this thread is in its block.
template <typename Tile>
struct Lane {
    int warp, g, q;
    int row;     // of the block's tile, the first that the lane owns
    int column;  // of a tile of scores, the first that the lane owns

    __device__ Lane() {
        const int lane = static_cast<int>(threadIdx.x) % kWarp;
        warp = static_cast<int>(threadIdx.x) / kWarp;
        g = lane / 4;
        q = lane % 4;
        row = warp * Tile::kWarpRows + g;
        column = Tile::kTensor ? 2 * q : q;
    }
    // The channel of sums[.][n].
    __device__ int channel(int n) const { return Tile::kGroup * (q + n / Tile::kGroup * 4) + n % Tile::kGroup; }
};

// d[n] += a b[n] for the rows 16 m .. 16 m + 15, with d in the lane's part of `sums`, and two tiles of 8 columns.
template <int Rows, int Columns>
__device__ __forceinline__ void multiply_fragments(float (&sums)[Rows][Columns], int m, int tile, const uint32_t* a,
                                                   const uint32_t* b) {
    float d[4] = {sums[2 * m][2 * tile], sums[2 * m][2 * tile + 1], sums[2 * m + 1][2 * tile],
                  sums[2 * m + 1][2 * tile + 1]};
    if constexpr (kHalfPrecision)
        mma_bf16_16x8x16(d, a, b);
    else
        mma_tf32_16x8x8(d, a, b);
    sums[2 * m][2 * tile] = d[0];
    sums[2 * m][2 * tile + 1] = d[1];
    sums[2 * m + 1][2 * tile] = d[2];
    sums[2 * m + 1][2 * tile + 1] = d[3];
}

// scores += the product of the warp's rows of `rows` and all of `columns`, both of kStride elements, over the first
// `channels` channels (whole steps).
template <typename Tile>
__device__ __forceinline__ void multiply_rows(float (&scores)[Tile::kRows][Tile::kColumns], const TensorElement* rows,
                                              const TensorElement* columns, int channels, const Lane<Tile>& lane) {
    const int l = 4 * lane.g + lane.q;
    rows += (lane.warp * Tile::kWarpRows + l % 16) * Tile::kStride + l / 16 * Tile::kPiece;
    columns += (l % 8 + l / 16 * 8) * Tile::kStride + l / 8 % 2 * Tile::kPiece;
    ROLLED for (int c = 0; c < channels; c += Tile::kStep) {
        uint32_t a[Tile::kRows / 2][4];
        UNROLL for (int m = 0; m < Tile::kRows / 2; m++) load_matrix_x4(a[m], rows + 16 * m * Tile::kStride + c);
        UNROLL for (int n = 0; n < Tile::kN / 16; n++) {
            uint32_t b[4];
            load_matrix_x4(b, columns + 16 * n * Tile::kStride + c);
            UNROLL for (int m = 0; m < Tile::kRows / 2; m++) {
                multiply_fragments(scores, m, 2 * n, a[m], b);
                multiply_fragments(scores, m, 2 * n + 1, a[m], b + 2);
            }
        }
    }
}

// Register k of a lane's fragment of weights, rounded: `row` has four weights for it in bf16, two in tf32, whose keys
// 2 q and 2 q + 1 take the places q and q + 4 of the sum.
template <typename Tile>
__device__ __forceinline__ uint32_t weight_fragment(const float* row, int k) {
    if constexpr (kHalfPrecision)
        return pack_bf16(row[k / 2 * 2], row[k / 2 * 2 + 1]);
    else
        return to_tf32(row[k / 2]);
}

// Where a lane's fragments of values begin, and those of two tiles of 8 channels; without `both` of the first.
template <typename Tile>
__device__ __forceinline__ int value_offset(const Lane<Tile>& lane) {
    const int l = 4 * lane.g + lane.q;
    return kHalfPrecision ? l % 16 * Tile::kStride + l / 16 * 8 : 2 * lane.q * Tile::kStride + lane.g;
}
template <typename Tile>
__device__ __forceinline__ void value_fragments(uint32_t b[4], const TensorElement* values, bool both) {
    if constexpr (kHalfPrecision) {
        load_matrix_x4_trans(b, values);
    } else {
        const TensorElement* next = values + Tile::kStride;
        b[0] = values[0].bits, b[1] = next[0].bits;
        if (both) b[2] = values[8].bits, b[3] = next[8].bits;
    }
}

// sums += the product of the warp's tile of `weights`, rounded, with the kN rows of `values`, of kStride elements.
template <typename Tile>
__device__ __forceinline__ void multiply_weights(float (&sums)[Tile::kRows][Tile::kChannels],
                                                 const float (&weights)[Tile::kRows][Tile::kColumns],
                                                 const TensorElement* values, const Lane<Tile>& lane) {
    values += value_offset(lane);
    UNROLL for (int n = 0; n < Tile::kN / Tile::kStep; n++) {
        uint32_t a[Tile::kRows / 2][4];
        UNROLL for (int m = 0; m < Tile::kRows / 2; m++) {
            UNROLL for (int k = 0; k < 4; k++) a[m][k] =
                weight_fragment<Tile>(&weights[2 * m + k % 2][Tile::kStep / 4 * n], k);
        }
        UNROLL for (int c = 0; c < Tile::kDim; c += 16) {
            uint32_t b[4];
            value_fragments<Tile>(b, values + Tile::kStep * n * Tile::kStride + c, c + 8 < Tile::kDim);
            UNROLL for (int m = 0; m < Tile::kRows / 2; m++) {
                multiply_fragments(sums, m, c / 8, a[m], b);
                if (c + 8 < Tile::kDim) multiply_fragments(sums, m, c / 8 + 1, a[m], b + 2);
            }
        }
    }
}

// The same in float: scores[i][j] += the product of rows 8 i and columns 4 j of a lane, over whole groups of 4.
template <typename Tile>
__device__ __forceinline__ void multiply_rows(float (&scores)[Tile::kRows][Tile::kColumns], const float* rows,
                                              const float* columns, int channels, const Lane<Tile>& lane) {
    rows += lane.row * Tile::kStride;
    columns += lane.q * Tile::kStride;
    ROLLED for (int c = 0; c < channels; c += 4) {
        float4 a[Tile::kRows];
        UNROLL for (int i = 0; i < Tile::kRows; i++) a[i] = load4(rows + 8 * i * Tile::kStride + c);
        UNROLL for (int j = 0; j < Tile::kColumns; j++) {
            const float4 b = load4(columns + 4 * j * Tile::kStride + c);
            UNROLL for (int i = 0; i < Tile::kRows; i++) {
                float& score = scores[i][j];
                score = fmaf(a[i].x, b.x, score);
                score = fmaf(a[i].y, b.y, score);
                score = fmaf(a[i].z, b.z, score);
                score = fmaf(a[i].w, b.w, score);
            }
        }
    }
}

// sums[i][channel] += the product of row 8 i of `weights`, of kWeightStride floats, with the kN rows of `values`, of
// kStride floats, whose first channel is the lane's.
template <typename Tile>
__device__ __forceinline__ void multiply_columns(float (&sums)[Tile::kRows][Tile::kChannels], const float* weights,
                                                 const float* values) {
    constexpr int kGroup = Tile::kGroup;
    ROLLED for (int n = 0; n < Tile::kN; n += 4) {
        float w[Tile::kRows][4];
        UNROLL for (int i = 0; i < Tile::kRows; i++) {
            const float4 four = load4(weights + 8 * i * Tile::kWeightStride + n);
            w[i][0] = four.x, w[i][1] = four.y, w[i][2] = four.z, w[i][3] = four.w;
        }
        UNROLL for (int k = 0; k < 4; k++) {
            const float* row = values + (n + k) * Tile::kStride;
            UNROLL for (int m = 0; m < Tile::kGroups; m++) {
                float value[kGroup];
                if constexpr (kGroup == 4) {
                    const float4 four = load4(row + 16 * m);
                    value[0] = four.x, value[1] = four.y, value[2] = four.z, value[3] = four.w;
                } else {
                    const float2 two = *reinterpret_cast<const float2*>(row + 8 * m);
                    value[0] = two.x, value[1] = two.y;
                }
                for_each<Tile::kRows, kGroup>([&](int i, int e) {
                    float& sum = sums[i][m * kGroup + e];
                    sum = fmaf(w[i][k], value[e], sum);
                });
            }
        }
    }
}

// Each warp's own count.
__device__ __forceinline__ void count_tiles(const Call& call, unsigned tiles) {
    if (call.skips && threadIdx.x % kWarp == 0) atomicAdd(call.tiles_done, tiles);
}

// Asks for `count` rows from `first` on, of T that there are.
template <typename Tile>
__device__ __forceinline__ void load_rows(typename Tile::Element* shared, const typename Tile::Element* packed,
                                          int first, int count, int T) {
    constexpr int kPieces = Tile::kDepth / Tile::kPiece;
    for (int index = static_cast<int>(threadIdx.x); index < count * kPieces; index += Tile::kThreads) {
        const int row = index / kPieces, piece = index % kPieces;
        copy_async_16(shared + row * Tile::kStride + Tile::kPiece * piece,
                      packed + static_cast<int64_t>(min(first + row, T - 1)) * Tile::kDepth + Tile::kPiece * piece);
    }
}
// A head's packed rows.
template <typename Tile>
__device__ __forceinline__ const typename Tile::Element* rows_of(const void* packed, int head, int T) {
    return static_cast<const typename Tile::Element*>(packed) + static_cast<int64_t>(head) * T * Tile::kDepth;
}
// The channels that products go over.
template <typename Tile>
__device__ __forceinline__ int depth_of(int D) {
    return (D + Tile::kStep - 1) / Tile::kStep * Tile::kStep;
}

// Asks for count floats, a whole number of fours, of an array aligned to 16 bytes.
__device__ __forceinline__ void load_run(float* shared, const float* from, int count) {
    for (int index = 4 * static_cast<int>(threadIdx.x); index < count; index += 4 * static_cast<int>(blockDim.x))
        copy_async_16(shared + index, from + index);
}

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
    return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(kAllLanes, x, 1);
    return x + __shfl_xor_sync(kAllLanes, x, 2);
}

// ---------------------------------------------------------------------------------------------------------------
// Forward

template <typename Tile>
struct ForwardShared {
    static constexpr int kStage = 2 * Tile::kN * Tile::kRowFloats + Tile::kRun;  // keys, values, lags
    static constexpr int kQuery = Tile::kM * Tile::kRowFloats;
    static constexpr int kWeights = Tile::kTensor ? 0 : Tile::kM * Tile::kWeightStride;
    static constexpr size_t kBytes = sizeof(float) * (kQuery + kWeights + 2 * kStage);
    static_assert(kBytes <= kMostShared);
};

// Statistics come from the same stream: with e = exp(s - max), entropy = ln(sum e) - sum e (s - max) / sum e, and the
// mean lag is sum e d / sum e. Both sums are rescaled with the running maximum like the others; a step from max to max'
// also shifts every (s - max), which adds (max - max') sum e to the first. Each lane sums over its own columns; the
// four lanes of a row come together at the end.
template <int Dim, bool WithStats>
__global__ void __launch_bounds__(ForwardTile<Dim>::kThreads, kForwardBlocks<Dim, WithStats>)
    attention_forward_kernel(Call call, real* out, float* lse, float* entropy, float* mean_lag) {
    using Tile = ForwardTile<Dim>;
    using Shared = ForwardShared<Tile>;
    using Element = typename Tile::Element;
    constexpr int kM = Tile::kM, kN = Tile::kN, kRows = Tile::kRows, kColumns = Tile::kColumns;
    const int T = call.T, channels = depth_of<Tile>(call.D);
    const int head = static_cast<int>(blockIdx.x) % call.heads;
    // The longest rows first, so that the blocks end together.
    const int row_tile = (T + kM - 1) / kM - 1 - static_cast<int>(blockIdx.x) / call.heads, i0 = row_tile * kM;
    const float* lag_table =
        call.lags + static_cast<int64_t>(call.has_lag_bias ? head % call.H : 0) * call.lag_stride + kLagPad;
    const bool skips = may_skip(call, head);
    const Lane<Tile> lane;
    const int warp_row = i0 + lane.warp * Tile::kWarpRows;

    expect_dynamic_shared<Shared::kBytes>();
    Element* query = dynamic_shared<Element>();
    float* weights = dynamic_shared<float>() + Shared::kQuery;
    float* stages = weights + Shared::kWeights;
    SHARED_ARRAY(float, warp_query, Tile::kWarps);        // norms
    SHARED_ARRAY(float, warp_largest, 2 * Tile::kWarps);  // the least of the running maxima, of even and odd turns

    const auto load_tile = [&](int tile, int stage) {
        float* at = stages + stage * Shared::kStage;
        Element* rows = reinterpret_cast<Element*>(at);
        load_rows<Tile>(rows, rows_of<Tile>(call.key, head, T), tile * kN, kN, T);
        load_rows<Tile>(rows + kN * Tile::kStride, rows_of<Tile>(call.value, head, T), tile * kN, kN, T);
        load_run(at + 2 * kN * Tile::kRowFloats, lag_table + (i0 - tile * kN - kN), Tile::kRun);
    };
    int tile = (min(T, i0 + kM) - 1) / kN;
    load_rows<Tile>(query, rows_of<Tile>(call.query, head, T), i0, kM, T);
    load_tile(tile, 0);
    copy_async_commit();
    if (skips) {
        float norm = 0;
        for (int i = 0; i < kRows; i++)
            if (warp_row + lane.g + 8 * i < T)
                norm = fmaxf(norm, call.query_norm[static_cast<int64_t>(head) * T + warp_row + lane.g + 8 * i]);
        norm = warp_max(norm);
        if (threadIdx.x % kWarp == 0) {
            warp_query[lane.warp] = norm;
            warp_largest[Tile::kWarps + lane.warp] = -INFINITY;
        }
    }

    float sums[kRows][Tile::kChannels] = {};
    float largest[kRows], sum[kRows] = {}, sum_es[kRows] = {}, sum_ed[kRows] = {};
    for (int i = 0; i < kRows; i++) largest[i] = -INFINITY;
    unsigned tiles_done = 0;
    for (int turn = 0; tile >= 0; turn++) {
        copy_async_wait<0>();
        __syncthreads();
        const float* known = warp_largest + (turn + 1) % 2 * Tile::kWarps;
        const auto bounds = [&]() -> RowTest {
            const int w = static_cast<int>(threadIdx.x) % Tile::kWarps;
            return {warp_query[w], known[w], -call.head_bounds[head].log_quietest_value};
        };
        // The tile that has come was chosen before the last one had raised the maxima.
        Visit visit = {tile, kAllLanes};
        if (turn > 0) visit = next_key_tile<Tile>(call, head, skips, tile + 1, i0, bounds);
        const bool has_come = visit.tile == tile;
        const int next = has_come ? next_key_tile<Tile>(call, head, skips, tile, i0, bounds).tile : visit.tile;
        if (next >= 0) load_tile(next, (turn + 1) % 2);
        copy_async_commit();

        const int j0 = tile * kN;
        // Rows that are all older than the keys have nothing to do.
        if (has_come && (visit.warps >> lane.warp & 1) != 0 && warp_row < T && j0 < warp_row + Tile::kWarpRows) {
            tiles_done++;
            const float* stage = stages + turn % 2 * Shared::kStage;
            const Element* keys = reinterpret_cast<const Element*>(stage);
            const Element* values = keys + kN * Tile::kStride;
            const float* lags = stage + 2 * kN * Tile::kRowFloats + kN + lane.row - lane.column;
            float scores[kRows][kColumns];
            for_each<kRows, kColumns>([&](int i, int j) { scores[i][j] = lags[8 * i - Tile::column(j)]; });
            multiply_rows<Tile>(scores, query, keys, channels, lane);
            [[maybe_unused]] float* row_weights = weights + lane.row * Tile::kWeightStride;
            UNROLL for (int i = 0; i < kRows; i++) {
                float tile_largest = largest[i];
                UNROLL for (int j = 0; j < kColumns; j++) tile_largest = fmaxf(tile_largest, scores[i][j]);
                tile_largest = quad_max(tile_largest);
                // Until a row has met a key its maximum is -infinity; exponents are then taken against 0.
                const float reference = tile_largest == -INFINITY ? 0 : tile_largest;
                const float rescale = expf(largest[i] - reference);
                float tile_sum = 0, tile_es = 0, tile_ed = 0;
                UNROLL for (int j = 0; j < kColumns; j++) {
                    const float shifted = scores[i][j] - reference, e = expf(shifted);
                    if constexpr (Tile::kTensor)
                        scores[i][j] = e;
                    else
                        row_weights[8 * i * Tile::kWeightStride + lane.q + 4 * j] = e;
                    tile_sum += e;
                    if constexpr (WithStats) {
                        // e is 0 where the score is -infinity, and 0 * -infinity must not be formed.
                        tile_es = fmaf(e, e == 0 ? 0 : shifted, tile_es);
                        tile_ed = fmaf(
                            e, static_cast<float>(i0 + lane.row + 8 * i - j0 - lane.column - Tile::column(j)), tile_ed);
                    }
                }
                if constexpr (WithStats) {
                    const float step = largest[i] == -INFINITY ? 0 : largest[i] - reference;
                    sum_es[i] = fmaf(fmaf(step, sum[i], sum_es[i]), rescale, tile_es);
                    sum_ed[i] = fmaf(sum_ed[i], rescale, tile_ed);
                }
                sum[i] = fmaf(sum[i], rescale, tile_sum);
                largest[i] = tile_largest;
                UNROLL for (int n = 0; n < Tile::kChannels; n++) sums[i][n] *= rescale;
            }
            if constexpr (Tile::kTensor) {
                multiply_weights<Tile>(sums, scores, values, lane);
            } else {
                __syncwarp();
                multiply_columns<Tile>(sums, row_weights, values + Tile::kGroup * lane.q);
            }
        }
        if (skips) {
            float least = INFINITY;
            for (int i = 0; i < kRows; i++)
                if (warp_row + lane.g + 8 * i < T) least = fminf(least, largest[i]);
            least = -warp_max(-least);
            if (threadIdx.x % kWarp == 0) warp_largest[turn % 2 * Tile::kWarps + lane.warp] = least;
        }
        tile = next;
    }

    UNROLL for (int i = 0; i < kRows; i++) {
        const int t = warp_row + lane.g + 8 * i;
        const float total = quad_sum(sum[i]);
        const float inverse = total == 0 ? 0 : 1 / total;  // 0: a row without a key
        float total_es = 0, total_ed = 0;
        if constexpr (WithStats) {
            total_es = quad_sum(sum_es[i]);
            total_ed = quad_sum(sum_ed[i]);
        }
        if (t >= T) continue;
        const int64_t row = static_cast<int64_t>(head) * T + t;
        real* to = out + ((static_cast<int64_t>(head / call.H) * T + t) * call.H + head % call.H) * call.D;
        UNROLL for (int n = 0; n < Tile::kChannels; n++) {
            if (lane.channel(n) < call.D) store(to + lane.channel(n), sums[i][n] * inverse);
        }
        if (lane.q > 0) continue;
        lse[row] = total == 0 ? -INFINITY : largest[i] + logf(total);
        if constexpr (WithStats) {
            const float row_entropy = logf(total) - total_es * inverse;
            entropy[row] = total == 0 || row_entropy < 0 ? 0 : row_entropy;  // a NaN stays one
            mean_lag[row] = total_ed * inverse;
        }
    }
    count_tiles(call, tiles_done);
}

// ---------------------------------------------------------------------------------------------------------------
// Backward

template <typename Tile>
struct BackwardShared {
    static constexpr int kOwn = Tile::kM * Tile::kRowFloats;  // each of two
    static constexpr int kWeights = Tile::kM * Tile::kWeightStride;
    // dq: keys, values, lags, and sums along diagonals. dkdv: queries, dO, lags, log-sum-exp, delta.
    static constexpr int kDiagonals = Tile::kWarps * (Tile::kWarpRows + Tile::kN);
    static constexpr int kStage = 2 * Tile::kN * Tile::kRowFloats + Tile::kRun + std::max(kDiagonals, 2 * Tile::kN);
    static constexpr size_t kBytes = sizeof(float) * (2 * kOwn + kWeights + 2 * kStage);
    static_assert(kBytes <= kMostShared);
};

// Writes four channels of a token's dq, dk or dv, rotated back.
__device__ __forceinline__ void store_rotated(const Call& call, real* dqkv, int head, int part, int t, int group,
                                              float (&x)[4]) {
    if (part < 2) rotate_channels_backward(x, call.rotary, t, group, part == 1);
    real* to = dqkv + (((static_cast<int64_t>(head / call.H) * call.T + t) * 3 + part) * call.H + head % call.H) *
                          static_cast<int64_t>(call.D);
    for (int e = 0; e < 4; e++)
        if (4 * group + e < call.D) store(to + 4 * group + e, x[e]);
}

// Writes a warp's rows first + g + 8 i of dq, dk or dv, scaled and rotated back, by way of `shared`, the lane's first
// row in the block's own tiles, which nobody else reads any more: rows of kStride floats, which one tile of floats is,
// or two of bf16.
template <typename Tile>
__device__ __forceinline__ void store_rotated(const Call& call, real* dqkv, int head, int part, int first,
                                              float* shared, const Lane<Tile>& lane,
                                              const float (&sums)[Tile::kRows][Tile::kChannels], float scale) {
    __syncwarp();
    for_each<Tile::kRows, Tile::kChannels>(
        [&](int i, int n) { shared[8 * i * Tile::kStride + lane.channel(n)] = sums[i][n] * scale; });
    __syncwarp();
    const float* rows = shared - lane.g * Tile::kStride;
    const int groups = (call.D + 3) / 4;
    for (int index = 4 * lane.g + lane.q; index < Tile::kWarpRows * groups; index += kWarp) {
        const int row = index / groups, group = index % groups, t = first + row;
        if (t >= call.T) break;
        float x[4];
        for (int e = 0; e < 4; e++) x[e] = rows[row * Tile::kStride + 4 * group + e];
        store_rotated(call, dqkv, head, part, t, group, x);
    }
}

// Number n of the tiles of a stream: streams take turns from the longest rows on, in an order that turns around each
// time, so that all of them have about the same work.
__device__ __forceinline__ int tile_of_stream(int tiles, int streams, int stream, int n) {
    return tiles - 1 - n * streams - (n % 2 == 0 ? stream : streams - 1 - stream);
}

// runs[diagonal + N] = the sums of a warp's rows of `weights` along row - column = diagonal, rows counted from the
// warp's first. At each row, lane u takes the column (row - u) mod N: the diagonal u, or, where that wraps, u - N. So
// all lanes read one row, in different banks.
template <typename Tile>
__device__ __forceinline__ void sum_diagonals(float* runs, const float* weights, int lane) {
    constexpr int kN = Tile::kN, kWarpRows = Tile::kWarpRows;
    static_assert(kWarpRows <= kN && kN <= kWarp && (kN & (kN - 1)) == 0);
    if (lane >= kN) return;
    float straight = 0, wrapped = 0;
    for (int row = 0; row < kWarpRows; row++) {
        const float weight = weights[row * Tile::kWeightStride + ((row - lane) & (kN - 1))];
        straight += row >= lane ? weight : 0;
        wrapped += row >= lane ? 0 : weight;
    }
    runs[lane] = wrapped;
    if (lane < kWarpRows) runs[kN + lane] = straight;
}

// dQ, and the sums of dS along diagonals. A block works on one stream of tiles of rows, one after the other, and has
// sums of its own for every lag, to which each tile of scores adds its M + N - 1: first every warp for its own rows, in
// shared memory, and in the next turn all threads the sum of the warps'.
template <int Dim>
__global__ void __launch_bounds__(BackwardTile<Dim>::kThreads, kDqBlocks<Dim>)
    attention_dq_kernel(Call call, real* dqkv) {
    using Tile = BackwardTile<Dim>;
    using Shared = BackwardShared<Tile>;
    using Element = typename Tile::Element;
    constexpr int kM = Tile::kM, kN = Tile::kN, kRows = Tile::kRows, kColumns = Tile::kColumns;
    constexpr int kWarpRun = Tile::kWarpRows + kN;
    const int T = call.T, channels = depth_of<Tile>(call.D), tiles = (T + kM - 1) / kM;
    const int head = static_cast<int>(blockIdx.x) % call.heads, stream = static_cast<int>(blockIdx.x) / call.heads;
    const float* lag_table =
        call.lags + static_cast<int64_t>(call.has_lag_bias ? head % call.H : 0) * call.lag_stride + kLagPad;
    float* lag_sums = call.lag_sums + (static_cast<int64_t>(head) * call.streams + stream) * T;
    const bool skips = may_skip(call, head);
    const Lane<Tile> lane;
    const int thread = static_cast<int>(threadIdx.x);

    expect_dynamic_shared<Shared::kBytes>();
    Element* query = dynamic_shared<Element>();
    Element* dout = query + kM * Tile::kStride;
    float* weights = dynamic_shared<float>() + 2 * Shared::kOwn;
    float* stages = weights + Shared::kWeights;
    SHARED_ARRAY(float, row_lse, kM);
    SHARED_ARRAY(float, row_delta, kM);
    const auto diagonals_of = [&](int turn) {
        return stages + turn % 2 * Shared::kStage + 2 * kN * Tile::kRowFloats + Tile::kRun;
    };
    unsigned tiles_done = 0;
    if (call.has_lag_bias)
        for (int d = thread; d < min(T, (tiles - stream) * kM); d += Tile::kThreads) lag_sums[d] = 0;

    for (int n = 0; n * call.streams < tiles; n++) {
        const int row_tile = tile_of_stream(tiles, call.streams, stream, n), i0 = row_tile * kM;
        if (row_tile < 0) continue;
        const int warp_row = i0 + lane.warp * Tile::kWarpRows;
        const auto load_tile = [&](int tile, int stage) {
            float* at = stages + stage * Shared::kStage;
            Element* rows = reinterpret_cast<Element*>(at);
            load_rows<Tile>(rows, rows_of<Tile>(call.key, head, T), tile * kN, kN, T);
            load_rows<Tile>(rows + kN * Tile::kStride, rows_of<Tile>(call.value, head, T), tile * kN, kN, T);
            load_run(at + 2 * kN * Tile::kRowFloats, lag_table + (i0 - tile * kN - kN), Tile::kRun);
        };
        // Adds the sums of the warps for the tile of keys of a turn that all threads are through with.
        const auto add_diagonals = [&](int turn, int tile) {
            const float* runs = diagonals_of(turn);
            for (int u = thread; u < Tile::kRun; u += Tile::kThreads) {
                const int lag = i0 - tile * kN - kN + u;
                if (lag < 0 || lag >= T) continue;  // masked
                float sum = 0;
                for (int w = 0; w < Tile::kWarps; w++) {
                    const int at = u - w * Tile::kWarpRows;
                    if (at >= 0 && at < kWarpRun) sum += runs[w * kWarpRun + at];
                }
                lag_sums[lag] += sum;
            }
        };
        const auto bounds = [&]() -> RowTest {
            const int row = i0 + thread % Tile::kWarps * Tile::kWarpRows;
            const RowBound bound =
                call.row_bounds[static_cast<int64_t>(head) * call.blocks + min(row, T - 1) / kPackRows];
            const HeadBound quietest = call.head_bounds[head];
            return {bound.query, bound.lse, bound.log_dout - quietest.log_quietest_value - quietest.log_quietest_dout};
        };

        __syncthreads();  // all are through with the tile of rows before
        // The first tile is tested as well: in backward all bounds are known.
        Visit visit = next_key_tile<Tile>(call, head, skips, (min(T, i0 + kM) - 1) / kN + 1, i0, bounds);
        load_rows<Tile>(query, rows_of<Tile>(call.query, head, T), i0, kM, T);
        load_rows<Tile>(dout, rows_of<Tile>(call.dout, head, T), i0, kM, T);
        if (visit.tile >= 0) load_tile(visit.tile, 0);
        copy_async_commit();
        float sums[kRows][Tile::kChannels] = {};
        for (int row = thread; row < kM; row += Tile::kThreads) {
            const int t = i0 + row;
            const int64_t at = static_cast<int64_t>(head) * call.padded_T + t;
            row_lse[row] = t < T ? call.lse[at] : INFINITY;
            row_delta[row] = t < T ? call.delta[at] : 0;
        }

        int turn = 0, before = -1;
        for (; visit.tile >= 0; turn++) {
            copy_async_wait<0>();
            __syncthreads();
            if (call.has_lag_bias && before >= 0) add_diagonals(turn - 1, before);
            const Visit next = next_key_tile<Tile>(call, head, skips, visit.tile, i0, bounds);
            if (next.tile >= 0) load_tile(next.tile, (turn + 1) % 2);
            copy_async_commit();

            const int j0 = visit.tile * kN;
            const float* stage = stages + turn % 2 * Shared::kStage;
            const Element* keys = reinterpret_cast<const Element*>(stage);
            const Element* values = keys + kN * Tile::kStride;
            float* runs = diagonals_of(turn) + lane.warp * kWarpRun;
            // Rows that are all older than the keys have nothing to do.
            if ((visit.warps >> lane.warp & 1) != 0 && warp_row < T && j0 < warp_row + Tile::kWarpRows) {
                tiles_done++;
                const float* lags = stage + 2 * kN * Tile::kRowFloats + kN + lane.row - lane.column;
                float* row_weights = weights + lane.row * Tile::kWeightStride;
                float scores[kRows][kColumns], dscores[kRows][kColumns] = {};
                for_each<kRows, kColumns>([&](int i, int j) { scores[i][j] = lags[8 * i - Tile::column(j)]; });
                multiply_rows<Tile>(scores, query, keys, channels, lane);
                multiply_rows<Tile>(dscores, dout, values, channels, lane);
                for_each<kRows, kColumns>([&](int i, int j) {
                    const float weight =
                        expf(scores[i][j] - row_lse[lane.row + 8 * i]) * (dscores[i][j] - row_delta[lane.row + 8 * i]);
                    if constexpr (Tile::kTensor) scores[i][j] = weight;
                    // Also what sums along diagonals read.
                    if (!Tile::kTensor || call.has_lag_bias)
                        row_weights[8 * i * Tile::kWeightStride + lane.column + Tile::column(j)] = weight;
                });
                __syncwarp();
                if constexpr (Tile::kTensor)
                    multiply_weights<Tile>(sums, scores, keys, lane);
                else
                    multiply_columns<Tile>(sums, row_weights, keys + Tile::kGroup * lane.q);
                if (call.has_lag_bias)
                    sum_diagonals<Tile>(runs, weights + lane.warp * Tile::kWarpRows * Tile::kWeightStride,
                                        thread % kWarp);
            } else if (call.has_lag_bias) {
                for (int u = thread % kWarp; u < kWarpRun; u += kWarp) runs[u] = 0;
            }
            before = visit.tile;
            visit = next;
        }
        copy_async_wait<0>();  // the rows, where all keys are skipped
        __syncthreads();
        if (call.has_lag_bias && before >= 0) add_diagonals(turn - 1, before);
        store_rotated<Tile>(call, dqkv, head, 0, warp_row, dynamic_shared<float>() + lane.row * Tile::kStride, lane,
                            sums, call.scale);
    }
    count_tiles(call, tiles_done);
}

// dlag_bias (H, T) = the sums of all sequences and streams, in order. 32 lags and 8 parts of the order for each block.
constexpr int kReduceLags = 32, kReduceParts = 8;
__global__ void __launch_bounds__(kReduceLags* kReduceParts)
    attention_dlag_kernel(float* dlag_bias, Call call, int rows_of_tile) {
    SHARED_ARRAY(double, sums, kReduceLags* kReduceParts);
    const int tiles = (call.T + rows_of_tile - 1) / rows_of_tile, batch = call.heads / call.H;
    const int column = static_cast<int>(threadIdx.x) % kReduceLags, part = static_cast<int>(threadIdx.x) / kReduceLags;
    const int d = static_cast<int>(blockIdx.x) * kReduceLags + column, h = static_cast<int>(blockIdx.y);
    // Streams whose longest rows reach the lag.
    const int reaching = min(call.streams, tiles - d / rows_of_tile);
    double sum = 0;
    if (d < call.T)
        for (int n = part; n < batch * reaching; n += kReduceParts) {
            const int64_t head = static_cast<int64_t>(n / reaching) * call.H + h;
            sum += call.lag_sums[(head * call.streams + n % reaching) * call.T + d];
        }
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (part > 0 || d >= call.T) return;
    for (int other = 1; other < kReduceParts; other++) sum += sums[other * kReduceLags + column];
    dlag_bias[static_cast<int64_t>(h) * call.T + d] = static_cast<float>(sum);
}

// dK and dV. Keys are the rows of the tiles here, queries the columns: scores are S^T.
template <int Dim>
__global__ void __launch_bounds__(BackwardTile<Dim>::kThreads) attention_dkdv_kernel(Call call, real* dqkv) {
    using Tile = BackwardTile<Dim>;
    using Shared = BackwardShared<Tile>;
    using Element = typename Tile::Element;
    constexpr int kM = Tile::kM, kN = Tile::kN, kRows = Tile::kRows, kColumns = Tile::kColumns;
    const int T = call.T, channels = depth_of<Tile>(call.D), tiles = (T + kN - 1) / kN;
    // Keys with the most rows first.
    const int head = static_cast<int>(blockIdx.x) % call.heads, j0 = static_cast<int>(blockIdx.x) / call.heads * kM;
    const float* lag_table =
        call.lags + static_cast<int64_t>(call.has_lag_bias ? head % call.H : 0) * call.lag_stride + kLagPad;
    const bool skips = may_skip(call, head);
    const Lane<Tile> lane;
    const int warp_key = j0 + lane.warp * Tile::kWarpRows;

    expect_dynamic_shared<Shared::kBytes>();
    Element* key = dynamic_shared<Element>();
    Element* value = key + kM * Tile::kStride;
    [[maybe_unused]] float* weights = dynamic_shared<float>() + 2 * Shared::kOwn;
    float* stages = weights + Shared::kWeights;
    const auto load_tile = [&](int tile, int stage) {
        float* at = stages + stage * Shared::kStage;
        const int64_t row = static_cast<int64_t>(head) * call.padded_T + tile * kN;
        Element* rows = reinterpret_cast<Element*>(at);
        load_rows<Tile>(rows, rows_of<Tile>(call.query, head, T), tile * kN, kN, T);
        load_rows<Tile>(rows + kN * Tile::kStride, rows_of<Tile>(call.dout, head, T), tile * kN, kN, T);
        at += 2 * kN * Tile::kRowFloats;
        load_run(at, lag_table + (tile * kN - j0 - kM), Tile::kRun);
        load_run(at + Tile::kRun, call.lse + row, kN);
        load_run(at + Tile::kRun + kN, call.delta + row, kN);
    };
    unsigned tiles_done = 0;
    Visit visit = next_row_tile<Tile>(call, head, skips, j0 / kN - 1, tiles, j0);
    load_rows<Tile>(key, rows_of<Tile>(call.key, head, T), j0, kM, T);
    load_rows<Tile>(value, rows_of<Tile>(call.value, head, T), j0, kM, T);
    if (visit.tile < tiles) load_tile(visit.tile, 0);
    copy_async_commit();

    float key_sums[kRows][Tile::kChannels] = {}, value_sums[kRows][Tile::kChannels] = {};
    for (int turn = 0; visit.tile < tiles; turn++) {
        copy_async_wait<0>();
        __syncthreads();
        const Visit next = next_row_tile<Tile>(call, head, skips, visit.tile, tiles, j0);
        if (next.tile < tiles) load_tile(next.tile, (turn + 1) % 2);
        copy_async_commit();

        // Keys that are all newer than the rows have nothing to do.
        if ((visit.warps >> lane.warp & 1) != 0 && warp_key < T && warp_key < (visit.tile + 1) * kN) {
            tiles_done++;
            const float* stage = stages + turn % 2 * Shared::kStage;
            const Element* queries = reinterpret_cast<const Element*>(stage);
            const Element* douts = queries + kN * Tile::kStride;
            const float* lags = stage + 2 * kN * Tile::kRowFloats;
            const float* lse = lags + Tile::kRun + lane.column;
            const float* delta = lse + kN;
            [[maybe_unused]] float* row_weights = weights + lane.row * Tile::kWeightStride;
            lags += kM - lane.row + lane.column;
            float scores[kRows][kColumns], dscores[kRows][kColumns] = {};
            for_each<kRows, kColumns>([&](int i, int j) { scores[i][j] = lags[Tile::column(j) - 8 * i]; });
            multiply_rows<Tile>(scores, key, queries, channels, lane);
            for_each<kRows, kColumns>([&](int i, int j) {
                scores[i][j] = expf(scores[i][j] - lse[Tile::column(j)]);
                if constexpr (!Tile::kTensor) row_weights[8 * i * Tile::kWeightStride + lane.q + 4 * j] = scores[i][j];
            });
            if constexpr (Tile::kTensor) {
                multiply_weights<Tile>(value_sums, scores, douts, lane);
                multiply_rows<Tile>(dscores, value, douts, channels, lane);
                for_each<kRows, kColumns>(
                    [&](int i, int j) { scores[i][j] *= dscores[i][j] - delta[Tile::column(j)]; });
                multiply_weights<Tile>(key_sums, scores, queries, lane);
            } else {
                __syncwarp();
                multiply_columns<Tile>(value_sums, row_weights, douts + Tile::kGroup * lane.q);
                multiply_rows<Tile>(dscores, value, douts, channels, lane);
                __syncwarp();
                for_each<kRows, kColumns>([&](int i, int j) {
                    row_weights[8 * i * Tile::kWeightStride + lane.q + 4 * j] =
                        scores[i][j] * (dscores[i][j] - delta[4 * j]);
                });
                __syncwarp();
                multiply_columns<Tile>(key_sums, row_weights, queries + Tile::kGroup * lane.q);
            }
        }
        visit = next;
    }
    copy_async_wait<0>();  // the keys, where all rows are skipped
    __syncthreads();
    float* shared = dynamic_shared<float>() + lane.row * Tile::kStride;
    store_rotated<Tile>(call, dqkv, head, 1, warp_key, shared, lane, key_sums, 1.0f);
    store_rotated<Tile>(call, dqkv, head, 2, warp_key, shared, lane, value_sums, 1.0f);
    count_tiles(call, tiles_done);
}

// ---------------------------------------------------------------------------------------------------------------
// The rows of q and k for another implementation (attention_rows.h)

__global__ void __launch_bounds__(kPackThreads) attention_rows_kernel(Call call) {
    const int head = static_cast<int>(blockIdx.x) % call.heads, block = static_cast<int>(blockIdx.x) / call.heads;
    pack_rows(call, nullptr, 2, head, block * kPackRows);
}

// The gradients of the packed rows are in their place.
__global__ void __launch_bounds__(kPackThreads) attention_rows_backward_kernel(Call call, real* dqkv) {
    const int head = static_cast<int>(blockIdx.x) % call.heads, block = static_cast<int>(blockIdx.x) / call.heads;
    const int groups = call.width / 4;
    for (int index = static_cast<int>(threadIdx.x); index < 2 * kPackRows * groups; index += kPackThreads) {
        const int group = index % groups, t = block * kPackRows + index / groups % kPackRows;
        const int part = index / groups / kPackRows;
        if (t >= call.T) continue;
        const real* from = static_cast<const real*>(part == 0 ? call.query : call.key) +
                           (static_cast<int64_t>(head) * call.T + t) * call.width + 4 * group;
        float x[4];
        for (int e = 0; e < 4; e++) x[e] = load(from + e) * (part == 0 ? call.scale : 1.0f);
        store_rotated(call, dqkv, head, part, t, group, x);
    }
}

// ---------------------------------------------------------------------------------------------------------------
// The ops

// Calls body<Dim>() with the least number of channels that a kernel is made for.
template <typename Body>
void with_width(int64_t D, Body body) {
    if (D <= 8) return body.template operator()<8>();
    if (D <= 16) return body.template operator()<16>();
    if (D <= 24) return body.template operator()<24>();
    if (D <= 32) return body.template operator()<32>();
    if (D <= 64) return body.template operator()<64>();
    if (D <= 128) return body.template operator()<128>();
    body.template operator()<static_cast<int>(kMaxHeadDim)>();
}

int64_t round_up(int64_t n, int64_t unit) {
    return (n + unit - 1) / unit * unit;
}
int64_t blocks_of(int64_t n, int64_t size) {
    return (n + size - 1) / size;
}

// Arrays from a workspace, each aligned for any vector; with a null workspace only counted.
struct Workspace {
    float* base;
    int64_t used = 0;
    template <typename T>
    T* take(int64_t count) {
        const int64_t floats = round_up(count * static_cast<int64_t>(sizeof(T)), 128) / sizeof(float);
        const int64_t at = std::exchange(used, used + floats);
        return base != nullptr ? reinterpret_cast<T*>(base + at) : nullptr;
    }
};

// The shape of a call, and its arrays in the order of the workspace.
Call make_call(Workspace& space, int64_t B, int64_t T, int64_t H, int64_t D, bool has_lag_bias, bool skips,
               bool backward) {
    Call call = {};
    call.T = static_cast<int>(T);
    call.H = static_cast<int>(H);
    call.D = static_cast<int>(D);
    call.heads = static_cast<int>(B * H);
    int rows_of_tile = 0;
    with_width(D, [&]<int Dim>() {
        call.width = BackwardTile<Dim>::kDepth;
        call.in_bf16 = kHalfPrecision && BackwardTile<Dim>::kTensor;
        call.in_tf32 = kTf32 && BackwardTile<Dim>::kTensor;
        rows_of_tile = BackwardTile<Dim>::kM;
    });
    call.blocks = static_cast<int>(blocks_of(T, kPackRows));
    call.padded_T = call.blocks * kPackRows;
    call.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(D)));
    const int64_t packed = B * H * T * call.width, lag_heads = has_lag_bias ? H : 1;
    const int64_t packed_floats = call.in_bf16 ? packed / 2 : packed;
    call.query = space.take<float>(packed_floats);
    call.key = space.take<float>(packed_floats);
    call.value = space.take<float>(packed_floats);
    call.has_lag_bias = has_lag_bias;
    call.lag_stride = static_cast<int>(round_up(T + 2 * kLagPad, 4));
    call.lags = space.take<float>(lag_heads * call.lag_stride);
    if (backward) {
        const int64_t tiles = blocks_of(T, rows_of_tile);
        call.dout = space.take<float>(packed_floats);
        call.lse = space.take<float>(B * H * call.padded_T);
        call.delta = space.take<float>(B * H * call.padded_T);
        call.streams = static_cast<int>(has_lag_bias ? std::clamp<int64_t>(kStreamsWanted / (B * H), 1, tiles) : tiles);
        if (has_lag_bias) call.lag_sums = space.take<float>(B * H * call.streams * T);
    }
    call.skips = has_lag_bias && skips;
    if (!call.skips) return call;
    call.query_norm = space.take<float>(B * H * T);
    call.key_bounds = space.take<KeyBound>(B * H * call.blocks);
    call.row_bounds = space.take<RowBound>(B * H * call.blocks);
    call.head_bounds = space.take<HeadBound>(B * H);
    call.lag_block_count = static_cast<int>(blocks_of(T, kLagBlock));
    call.lag_blocks = space.take<float>(H * call.lag_block_count);
    call.lag_blocks_from = space.take<float>(H * call.lag_block_count);
    call.bias_skips = space.take<int>(H);
    call.tiles_done = space.take<unsigned>(1);
    call.margin = std::log(0x1p24f) + std::log(static_cast<float>(T));
    return call;
}

// A call that only packs rows, of D channels and as `real`.
Call make_rows_call(void* query, void* key, const RotaryTable& rotary, int64_t B, int64_t T, int64_t H, int64_t D) {
    Call call = {};
    call.T = static_cast<int>(T);
    call.H = static_cast<int>(H);
    call.D = call.width = static_cast<int>(D);
    call.heads = static_cast<int>(B * H);
    call.in_bf16 = kHalfPrecision;
    call.blocks = static_cast<int>(blocks_of(T, kPackRows));
    call.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(D)));
    call.rotary = rotary;
    call.query = query;
    call.key = key;
    return call;
}

// What both passes do first.
void pack(const Call& call, const real* dout, const real* out, const float* lse, const float* lag_bias) {
    const cudaStream_t stream = device_stream();
    const int64_t lags = static_cast<int64_t>(call.has_lag_bias ? call.H : 1) * call.lag_stride;
    launch(attention_pack_kernel, static_cast<unsigned>(call.heads) * call.blocks, kPackThreads, 0, stream, call, dout,
           out, lse);
    launch(attention_lags_kernel, static_cast<unsigned>(blocks_of(lags, 256)), 256, 0, stream, call, lag_bias);
    if (!call.skips) return;
    launch(attention_lag_bounds_kernel, static_cast<unsigned>(call.H), kScanThreads, 0, stream, call);
    launch(attention_bounds_kernel, static_cast<unsigned>(call.heads), kScanThreads, 0, stream, call, dout != nullptr);
}

__global__ void attention_count_kernel(AttentionSkipping* skipping, Call call, int64_t tiles) {
    skipping->tiles += tiles;
    if (call.skips) skipping->skipped += tiles - *call.tiles_done;
}

// Adds the call's tiles, of one warp's rows each, to the counts.
template <typename Tile>
void count(AttentionSkipping* skipping, const Call& call, bool backward) {
    const int64_t R = Tile::kWarpRows, N = Tile::kN;
    int64_t tiles = 0;
    for (int64_t first = 0; first < call.T; first += R) {
        tiles += blocks_of(std::min<int64_t>(first + R, call.T), N);
        if (backward) tiles += blocks_of(call.T, N) - first / N;
    }
    launch(attention_count_kernel, 1, 1, 0, device_stream(), skipping, call, tiles * call.heads);
}

}  // namespace

void attention_rows(real* query, real* key, const real* qkv, const RotaryTable& rotary, int64_t B, int64_t T, int64_t H,
                    int64_t D) {
    Call call = make_rows_call(query, key, rotary, B, T, H, D);
    call.qkv = qkv;
    launch(attention_rows_kernel, static_cast<unsigned>(call.heads) * call.blocks, kPackThreads, 0, device_stream(),
           call);
}

void attention_rows_backward(real* dqkv, real* dquery, real* dkey, const RotaryTable& rotary, int64_t B, int64_t T,
                             int64_t H, int64_t D) {
    const Call call = make_rows_call(dquery, dkey, rotary, B, T, H, D);
    launch(attention_rows_backward_kernel, static_cast<unsigned>(call.heads) * call.blocks, kPackThreads, 0,
           device_stream(), call, dqkv);
}

int64_t attention_workspace_floats(int64_t B, int64_t T, int64_t H, int64_t D, bool forward_only) {
    Workspace forward = {nullptr}, backward = {nullptr};
    make_call(forward, B, T, H, D, true, true, false);
    if (!forward_only) make_call(backward, B, T, H, D, true, true, true);
    return std::max(forward.used, backward.used);
}

void attention_forward(real* out, float* lse, const AttentionRowStats* stats, const real* qkv,
                       const RotaryTable& rotary, const float* lag_bias, float* workspace, int64_t B, int64_t T,
                       int64_t H, int64_t D, AttentionSkipping* skipping, const AttentionScope&) {
    Workspace space = {workspace};
    Call call = make_call(space, B, T, H, D, lag_bias != nullptr, skipping != nullptr, false);
    call.rotary = rotary;
    call.qkv = qkv;
    // Leaving out a lag of T may change the mean lag by T times its weight.
    if (stats != nullptr) call.margin += std::log(static_cast<float>(T));
    pack(call, nullptr, nullptr, nullptr, lag_bias);
    float* entropy = stats != nullptr ? stats->entropy : nullptr;
    float* mean_lag = stats != nullptr ? stats->mean_lag : nullptr;
    with_width(D, [&]<int Dim>() {
        using Tile = ForwardTile<Dim>;
        const int64_t tiles = blocks_of(T, Tile::kM);
        const unsigned grid = static_cast<unsigned>(B * H * tiles);
        constexpr size_t kBytes = ForwardShared<Tile>::kBytes;
        if (stats != nullptr)
            launch(attention_forward_kernel<Dim, true>, grid, Tile::kThreads, kBytes, device_stream(), call, out, lse,
                   entropy, mean_lag);
        else
            launch(attention_forward_kernel<Dim, false>, grid, Tile::kThreads, kBytes, device_stream(), call, out, lse,
                   entropy, mean_lag);
        if (skipping != nullptr) count<Tile>(skipping, call, false);
    });
}

void attention_backward(real* dqkv, float* dlag_bias, const real* dout, const real* qkv, const real* out,
                        const float* lse, const RotaryTable& rotary, const float* lag_bias, float* workspace, int64_t B,
                        int64_t T, int64_t H, int64_t D, AttentionSkipping* skipping, const AttentionScope&) {
    Workspace space = {workspace};
    Call call = make_call(space, B, T, H, D, lag_bias != nullptr, skipping != nullptr, true);
    call.rotary = rotary;
    call.qkv = qkv;
    // The gradient of a slope multiplies the sum of a lag by the lag, up to T.
    call.margin += std::log(static_cast<float>(T));
    pack(call, dout, out, lse, lag_bias);
    with_width(D, [&]<int Dim>() {
        using Tile = BackwardTile<Dim>;
        constexpr size_t kBytes = BackwardShared<Tile>::kBytes;
        const int64_t tiles = blocks_of(T, Tile::kM);
        launch(attention_dq_kernel<Dim>, static_cast<unsigned>(B * H * call.streams), Tile::kThreads, kBytes,
               device_stream(), call, dqkv);
        launch(attention_dkdv_kernel<Dim>, static_cast<unsigned>(B * H * tiles), Tile::kThreads, kBytes,
               device_stream(), call, dqkv);
        if (dlag_bias != nullptr)
            launch(attention_dlag_kernel, dim3(static_cast<unsigned>(blocks_of(T, kReduceLags)), call.H),
                   kReduceLags * kReduceParts, 0, device_stream(), dlag_bias, call, Tile::kM);
        if (skipping != nullptr) count<Tile>(skipping, call, true);
    });
}

}  // namespace jetlag
