#include "kernels/position/jordan.h"

namespace jetlag {

std::vector<Option> jordan_options() {
    return {rope_base_option(), {"eta", Option::real, 1, -1000, 1000, {}, "jordan: shear at the training length"}};
}

}  // namespace jetlag
