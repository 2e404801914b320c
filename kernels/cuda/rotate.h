// Shearing and rotating four channels of a row of q or k by its position, forward and back: what attention does to its
// rows before it multiplies them. Four channels are two pairs, and one group (z0, z1) of the shear.
#pragma once

#include "kernels/cuda/device.h"
#include "kernels/ops.h"

namespace jetlag {

// Turns the pair (x, y) by an angle, with the gain that its cosine and sine hold.
__device__ __forceinline__ void turn_pair(float& x, float& y, float cosine, float sine) {
    const float turned = fmaf(-y, sine, x * cosine);
    y = fmaf(x, sine, y * cosine);
    x = turned;
}

// z[to] += c z[1 - to]
__device__ __forceinline__ void add_shear(float (&x)[4], float c, int to) {
    for (int part = 0; part < 2; part++) x[2 * to + part] = fmaf(c, x[2 * (1 - to) + part], x[2 * to + part]);
}

// Pairs from table.pairs on are left alone, and the shear is of whole groups.
template <typename Turn>
__device__ __forceinline__ void turn_pairs(float (&x)[4], int64_t pairs, int64_t pair, Turn turn) {
    if (pair < pairs) turn(x[0], x[1], pair);
    if (pair + 1 < pairs) turn(x[2], x[3], pair + 1);
}

// x: the channels 4 group .. 4 group + 3 of position t.
__device__ __forceinline__ void rotate_channels(float (&x)[4], const RotaryTable& table, int64_t t, int64_t group,
                                                bool is_key) {
    if (table.shear != nullptr && group < table.pairs / 2)
        add_shear(x, is_key ? -table.shear[t] : table.shear[t], is_key ? 1 : 0);
    const float* cosines = (is_key ? table.key_cos : table.query_cos) + t * table.pairs;
    const float* sines = (is_key ? table.key_sin : table.query_sin) + t * table.pairs;
    turn_pairs(x, table.pairs, 2 * group,
               [&](float& a, float& b, int64_t pair) { turn_pair(a, b, cosines[pair], sines[pair]); });
}

// The transpose, for gradients.
__device__ __forceinline__ void rotate_channels_backward(float (&x)[4], const RotaryTable& table, int64_t t,
                                                         int64_t group, bool is_key) {
    const float* cosines = (is_key ? table.key_cos : table.query_cos) + t * table.pairs;
    const float* sines = (is_key ? table.key_sin : table.query_sin) + t * table.pairs;
    turn_pairs(x, table.pairs, 2 * group,
               [&](float& a, float& b, int64_t pair) { turn_pair(a, b, cosines[pair], -sines[pair]); });
    if (table.shear != nullptr && group < table.pairs / 2)
        add_shear(x, is_key ? -table.shear[t] : table.shear[t], is_key ? 0 : 1);
}

}  // namespace jetlag
