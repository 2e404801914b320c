// YaRN (Peng et al. 2023, sections 3.2 to 3.4): beyond the training length the slow pairs are interpolated, the
// fast ones kept, with a ramp over the number r of turns that a pair makes in L; q and k gain 1 + 0.1 ln s.
#pragma once

#include "kernels/position/rope.h"

namespace jetlag {

JETLAG_DEVICE inline Rotation yarn_rotation(const RotarySpec& spec, int64_t T, int64_t position, int64_t pair) {
    const double slow_turns = spec.options[1], fast_turns = spec.options[2], gain_slope = spec.options[3];
    const double two_pi = 6.283185307179586476925286766559;
    double frequency = rope_frequency(spec.options[0], spec.head_dim, pair);
    double gain = 1;
    if (T > spec.train_len) {
        const double L = static_cast<double>(spec.train_len);
        const double s = static_cast<double>(T) / L;
        const double turns = L * frequency / two_pi;
        const double ramp = (turns - slow_turns) / (fast_turns - slow_turns);
        const double keep = ramp < 0 ? 0 : (ramp > 1 ? 1 : ramp);
        frequency = frequency / s * (1 - keep) + frequency * keep;
        gain = 1 + gain_slope * log(s);
    }
    return {static_cast<double>(position) * frequency, gain, gain};
}

std::vector<Option> yarn_options();

inline constexpr RotaryModule yarn_module = {
    .name = "yarn",
    .formula = "rope; if T > L: slow pairs interpolated by T/L, fast ones kept; gain 1 + 0.1 ln(T/L)",
    .options = yarn_options,
    .head_dim_multiple = 2,
    .rotation = yarn_rotation,
    .shear = nullptr,
};

}  // namespace jetlag
