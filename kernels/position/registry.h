// The position methods by name.
#pragma once

#include <string>
#include <vector>

#include "kernels/position/module.h"

namespace jetlag {

// A position method: what `model.position: NAME` means.
struct Method {
    const char* name;
    const RotaryModule* rotary;        // nullptr: none
    const LagBiasModule* lag_bias;     // nullptr: none
    std::vector<std::string> sectors;  // for a lag bias with an option of that name
};

const std::vector<Method>& methods();

// nullptr if there is none of that name.
const Method* find_method(const std::string& name);

// The modules that the methods use, each once, in the order of the table; the kinds of a composed `model.position`.
std::vector<const RotaryModule*> rotary_modules();
std::vector<const LagBiasModule*> lag_bias_modules();

}  // namespace jetlag
