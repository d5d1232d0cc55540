// Limits of a layer of Gated DeltaNet, and of its state's layout: see DeltaNet.
#pragma once

#include <cstdint>

namespace h2o {

inline constexpr int32_t kDeltaColumns = 16;
inline constexpr int32_t kMaxDeltaHead = 256;
inline constexpr int32_t kMaxTaps = 8;

}  // namespace h2o
