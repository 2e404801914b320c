// The position methods by name.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "kernels/position/alibi.h"
#include "kernels/position/jordan.h"
#include "kernels/position/ntk.h"
#include "kernels/position/pi.h"
#include "kernels/position/pj.h"
#include "kernels/position/rope.h"
#include "kernels/position/yarn.h"

namespace jetlag {

// A position method: what `model.position: NAME` means.
struct Method {
    const char* name;
    const RotaryModule* rotary;     // nullptr: none
    const LagBiasModule* lag_bias;  // nullptr: none
    const char* sectors[3];         // for a lag bias with an option of that name; the rest nullptr
};

// Known to the compiler: a device cannot call what a host's function pointer points to, so its code for a module is
// made from this table.
inline constexpr Method kMethods[] = {
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

std::span<const Method> methods();

// nullptr if there is none of that name.
const Method* find_method(const std::string& name);

// The modules that the methods use, each once, in the order of the table; the kinds of a composed `model.position`.
std::vector<const RotaryModule*> rotary_modules();
std::vector<const LagBiasModule*> lag_bias_modules();

}  // namespace jetlag
