// Rows grouped by expert, as a kernel argument: the grouping is only known on the device.
#pragma once

#include <cstdint>

namespace h2o::cuda {

// Expert e has rows [offsets[e], offsets[e + 1]). The weights and biases of all experts are
// contiguous.
struct ExpertRows {
  const int32_t* offsets;  // [n_experts + 1] on the device
  int n_experts;
};

}  // namespace h2o::cuda
