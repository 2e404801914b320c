#include "kernels/position/registry.h"

#include <algorithm>

#include "kernels/position/alibi.h"
#include "kernels/position/jordan.h"
#include "kernels/position/ntk.h"
#include "kernels/position/pi.h"
#include "kernels/position/pj.h"
#include "kernels/position/rope.h"
#include "kernels/position/yarn.h"

namespace jetlag {

const std::vector<Method>& methods() {
    static const std::vector<Method> table = {
        {"none", nullptr, nullptr, {}},
        {"rope", &rope_module, nullptr, {}},
        {"rope_pi", &pi_module, nullptr, {}},
        {"rope_ntk", &ntk_module, nullptr, {}},
        {"rope_yarn", &yarn_module, nullptr, {}},
        {"pj_rotary", &jordan_module, nullptr, {}},
        {"affine", nullptr, &pj_module, {"affine"}},
        {"rope_affine", &rope_module, &pj_module, {"affine"}},
        {"rope_ntk_affine", &ntk_module, &pj_module, {"affine"}},
        {"rope_yarn_affine", &yarn_module, &pj_module, {"affine"}},
        {"fj_affine", nullptr, &pj_module, {"fj", "affine"}},
        {"fj_lc", nullptr, &pj_module, {"fj", "lc"}},
        {"lc_affine", nullptr, &pj_module, {"affine", "lc"}},
        {"full", nullptr, &pj_module, {"fj", "affine", "lc"}},
        {"grape_m_rope", &rope_module, nullptr, {}},
        {"grape_a_alibi", nullptr, &pj_module, {"affine"}},
        {"grape_ma_rope_alibi", &rope_module, &pj_module, {"affine"}},
        {"alibi", nullptr, &alibi_module, {}},
    };
    return table;
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
