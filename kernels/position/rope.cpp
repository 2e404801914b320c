#include "kernels/position/rope.h"

namespace jetlag {

Option rope_base_option() {
    return {"base", Option::real, 10000, 1.0001, 1e12, {}, "base of the geometric series of rotary frequencies"};
}

static std::vector<Option> rope_options() {
    return {rope_base_option()};
}

const RotaryModule rope_module = {
    .name = "rope",
    .formula = "angle = pos * base^(-p/(D/2))",
    .options = rope_options,
    .head_dim_multiple = 2,
    .rotation = rope_rotation,
    .shear = nullptr,
};

}  // namespace jetlag
