#include "kernels/position/pi.h"

namespace jetlag {

static std::vector<Option> pi_options() {
    return {rope_base_option()};
}

const RotaryModule pi_module = {
    .name = "pi",
    .formula = "rope; if T > L: pos <- pos * (L-1)/(T-1)",
    .options = pi_options,
    .head_dim_multiple = 2,
    .rotation = pi_rotation,
    .shear = nullptr,
};

}  // namespace jetlag
