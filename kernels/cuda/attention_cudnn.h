// What tests ask of attention_cudnn.cpp beside its ops.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace jetlag {

inline constexpr size_t kOldestCudnn = 91600;

// How many engines cuDNN proposes for attention on a device that cuDNN's JSON describes; it need not be there.
int64_t cudnn_engine_count(const std::string& device_json, int64_t B, int64_t T, int64_t H, int64_t D, bool backward);

}  // namespace jetlag
