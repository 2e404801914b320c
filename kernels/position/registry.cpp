#include "kernels/position/registry.h"

#include <algorithm>

namespace jetlag {

std::span<const Method> methods() {
    return kMethods;
}

const Method* find_method(const std::string& name) {
    for (const Method& method : methods())
        if (name == method.name) return &method;
    return nullptr;
}

std::vector<const RotaryModule*> rotary_modules() {
    std::vector<const RotaryModule*> list;
    for (const Method& method : methods())
        if (method.rotary && std::find(list.begin(), list.end(), method.rotary) == list.end())
            list.push_back(method.rotary);
    return list;
}

std::vector<const LagBiasModule*> lag_bias_modules() {
    std::vector<const LagBiasModule*> list;
    for (const Method& method : methods())
        if (method.lag_bias && std::find(list.begin(), list.end(), method.lag_bias) == list.end())
            list.push_back(method.lag_bias);
    return list;
}

int64_t bias_parameter_count(const LagBiasSpec& spec) {
    int64_t count = 0;
    if (spec.module == nullptr) return 0;
    for (const BiasParameter& parameter : spec.module->parameters(spec)) {
        int64_t size = 1;
        for (int64_t n : parameter.shape) size *= n;
        count += size;
    }
    return count;
}

}  // namespace jetlag
