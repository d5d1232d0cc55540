// Rows that lie by expert, as a kernel finds them: nobody on the host knows which are whose.
#pragma once

#include <cstdint>

namespace h2o::cuda {

// Rows [offsets[e], offsets[e + 1]) are those of expert e. The weights and biases of all experts
// lie one after another.
struct ExpertRows {
  const int32_t* offsets;  // [n_experts + 1] on the device
  int n_experts;
};

}  // namespace h2o::cuda
