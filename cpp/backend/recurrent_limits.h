// Limits of layers with a recurrent state, and of a state's layout: see DeltaNet and ShortConv.
#pragma once

#include <cstdint>

namespace h2o {

inline constexpr int32_t kDeltaColumns = 16;
inline constexpr int32_t kMaxDeltaHead = 256;
inline constexpr int32_t kMaxTaps = 8;  // of both

}  // namespace h2o
