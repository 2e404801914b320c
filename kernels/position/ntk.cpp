#include "kernels/position/ntk.h"

namespace jetlag {

std::vector<Option> ntk_options() {
    return {rope_base_option()};
}

}  // namespace jetlag
