#include "kernels/position/jordan.h"

namespace jetlag {

static std::vector<Option> jordan_options() {
    return {rope_base_option(), {"eta", Option::real, 1, -1000, 1000, {}, "jordan: shear at the training length"}};
}

const RotaryModule jordan_module = {
    .name = "jordan",
    .formula = "blocks (z0, z1), c = eta pos/L: query z0 += c z1, key z1 -= c z0; then angle = pos * base^(-b/(D/4))",
    .options = jordan_options,
    .head_dim_multiple = 4,
    .rotation = jordan_rotation,
    .shear = jordan_shear,
};

}  // namespace jetlag
