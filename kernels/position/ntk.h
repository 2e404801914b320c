// NTK-aware scaling (bloc97 2023): beyond the training length the base grows so that the slowest pair is
// interpolated by T/L and the fastest is left alone.
#pragma once

#include "kernels/position/rope.h"

namespace jetlag {

JETLAG_DEVICE inline Rotation ntk_rotation(const RotarySpec& spec, int64_t T, int64_t position, int64_t pair) {
    const double D = static_cast<double>(spec.head_dim);
    double base = spec.options[0];
    // With one pair only (D = 2) its frequency is 1 whatever the base, and D/(D-2) does not exist.
    if (T > spec.train_len && spec.head_dim > 2)
        base *= pow(static_cast<double>(T) / static_cast<double>(spec.train_len), D / (D - 2));
    return {static_cast<double>(position) * rope_frequency(base, spec.head_dim, pair), 1, 1};
}

std::vector<Option> ntk_options();

inline constexpr RotaryModule ntk_module = {
    .name = "ntk",
    .formula = "rope; if T > L: base <- base * (T/L)^(D/(D-2))",
    .options = ntk_options,
    .head_dim_multiple = 2,
    .rotation = ntk_rotation,
    .shear = nullptr,
};

}  // namespace jetlag
