#include "kernels/position/alibi.h"

namespace jetlag {

std::vector<Option> alibi_options() {
    return {};
}
std::vector<BiasParameter> alibi_parameters(const LagBiasSpec&) {
    return {};
}
int64_t alibi_coefficient_count(const LagBiasSpec&) {
    return 1;
}

std::vector<std::pair<std::string, double>> alibi_summary(const LagBiasSpec&, const float*) {
    return {};
}

}  // namespace jetlag
