// PJ-rotary, exact: D/4 Jordan blocks of two complex channels that share a frequency. A shear by c = eta pos / L
// precedes the rotation (query z0 += c z1, key z1 -= c z0), so that the product of a query at i and a key at j
// holds the jet (i - j) z1 z0' and depends on i - j only.
#pragma once

#include "kernels/position/rope.h"

namespace jetlag {

JETLAG_DEVICE inline Rotation jordan_rotation(const RotarySpec& spec, int64_t, int64_t position, int64_t pair) {
    // Block b holds the pairs 2b and 2b+1, and its frequency is base^(-b / (D/4)).
    return {static_cast<double>(position) * rope_frequency(spec.options[0], spec.head_dim / 2, pair / 2), 1, 1};
}

JETLAG_DEVICE inline double jordan_shear(const RotarySpec& spec, int64_t, int64_t position) {
    return spec.options[1] * static_cast<double>(position) / static_cast<double>(spec.train_len);
}

std::vector<Option> jordan_options();

inline constexpr RotaryModule jordan_module = {
    .name = "jordan",
    .formula = "blocks (z0, z1), c = eta pos/L: query z0 += c z1, key z1 -= c z0; then angle = pos * base^(-b/(D/4))",
    .options = jordan_options,
    .head_dim_multiple = 4,
    .rotation = jordan_rotation,
    .shear = jordan_shear,
};

}  // namespace jetlag
