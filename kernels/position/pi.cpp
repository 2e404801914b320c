#include "kernels/position/pi.h"

namespace jetlag {

std::vector<Option> pi_options() {
    return {rope_base_option()};
}

}  // namespace jetlag
