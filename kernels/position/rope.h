// RoPE (Su et al. 2021, RoFormer, eq. 15): pair p turns by pos * base^(-p / (D/2)).
#pragma once

#include <cmath>

#include "kernels/position/module.h"

namespace jetlag {

JETLAG_DEVICE inline double rope_frequency(double base, int64_t head_dim, int64_t pair) {
    return pow(base, -static_cast<double>(pair) / (static_cast<double>(head_dim) / 2));
}

JETLAG_DEVICE inline Rotation rope_rotation(const RotarySpec& spec, int64_t, int64_t position, int64_t pair) {
    return {static_cast<double>(position) * rope_frequency(spec.options[0], spec.head_dim, pair), 1, 1};
}

// The option `base`, which every rotary module has first.
Option rope_base_option();

std::vector<Option> rope_options();

inline constexpr RotaryModule rope_module = {
    .name = "rope",
    .formula = "angle = pos * base^(-p/(D/2))",
    .options = rope_options,
    .head_dim_multiple = 2,
    .rotation = rope_rotation,
    .shear = nullptr,
};

}  // namespace jetlag
