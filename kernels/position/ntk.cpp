#include "kernels/position/ntk.h"

namespace jetlag {

static std::vector<Option> ntk_options() {
    return {rope_base_option()};
}

const RotaryModule ntk_module = {
    .name = "ntk",
    .formula = "rope; if T > L: base <- base * (T/L)^(D/(D-2))",
    .options = ntk_options,
    .head_dim_multiple = 2,
    .rotation = ntk_rotation,
    .shear = nullptr,
};

}  // namespace jetlag
