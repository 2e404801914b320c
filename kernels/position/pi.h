// Position interpolation (Chen et al. 2023): beyond the training length L the positions are squeezed into [0, L-1].
#pragma once

#include "kernels/position/rope.h"

namespace jetlag {

JETLAG_DEVICE inline Rotation pi_rotation(const RotarySpec& spec, int64_t T, int64_t position, int64_t pair) {
    const double squeeze =
        T > spec.train_len ? static_cast<double>(spec.train_len - 1) / static_cast<double>(T - 1) : 1;
    const double frequency = rope_frequency(spec.options[0], spec.head_dim, pair);
    return {static_cast<double>(position) * squeeze * frequency, 1, 1};
}

std::vector<Option> pi_options();

inline constexpr RotaryModule pi_module = {
    .name = "pi",
    .formula = "rope; if T > L: pos <- pos * (L-1)/(T-1)",
    .options = pi_options,
    .head_dim_multiple = 2,
    .rotation = pi_rotation,
    .shear = nullptr,
};

}  // namespace jetlag
