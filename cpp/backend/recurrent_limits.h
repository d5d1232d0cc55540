// Limits of layers with a recurrent state, and of a state's layout: see DeltaNet, ShortConv and
// StateSpace.
#pragma once

#include <cstdint>

namespace h2o {

inline constexpr int32_t kDeltaColumns = 16;
inline constexpr int32_t kMaxDeltaHead = 256;
inline constexpr int32_t kMaxStateSize = 1024;  // StateSpace::d_state
inline constexpr int32_t kMaxTaps = 8;          // of all

}  // namespace h2o
