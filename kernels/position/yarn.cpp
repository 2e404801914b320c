#include "kernels/position/yarn.h"

namespace jetlag {

std::vector<Option> yarn_options() {
    return {rope_base_option(),
            {"slow_turns", Option::real, 1, 0, 15.9, {}, "yarn: pairs with fewer turns in L are interpolated in full"},
            {"fast_turns", Option::real, 32, 16, 1e6, {}, "yarn: pairs with more turns in L are kept"},
            {"gain_slope", Option::real, 0.1, 0, 10, {}, "yarn: q and k are multiplied by 1 + gain_slope ln(T/L)"}};
}

}  // namespace jetlag
