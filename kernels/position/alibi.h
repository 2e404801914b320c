// ALiBi (Press et al. 2022): a fixed bias -m_h d. For H a power of two m_h = 2^(-8(h+1)/H); for another H the slopes
// of the power of two below come first, then every second slope of the power of two above.
#pragma once

#include <cmath>

#include "kernels/position/module.h"

namespace jetlag {

JETLAG_DEVICE inline double alibi_slope(int64_t heads, int64_t head) {
    int64_t power = 1;
    while (2 * power <= heads) power *= 2;
    if (head < power) return exp2(-8.0 * static_cast<double>(head + 1) / static_cast<double>(power));
    const int64_t odd = 2 * (head - power) + 1;
    return exp2(-8.0 * static_cast<double>(odd) / static_cast<double>(2 * power));
}

extern const LagBiasModule alibi_module;

}  // namespace jetlag
