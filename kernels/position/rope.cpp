#include "kernels/position/rope.h"

namespace jetlag {

Option rope_base_option() {
    return {"base", Option::real, 10000, 1.0001, 1e12, {}, "base of the geometric series of rotary frequencies"};
}

std::vector<Option> rope_options() {
    return {rope_base_option()};
}

}  // namespace jetlag
