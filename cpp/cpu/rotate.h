// Rotary position embedding on the CPU (RoFormer, arXiv 2104.09864).
#pragma once

#include <cstdint>

#include "core/backend.h"

namespace h2o {

// Rotates each head of x [n_heads, head_dim] in place by the angles of `position`.
void rotate_heads(float* x, int64_t n_heads, int64_t head_dim, const Rope& rope, int32_t position);

}  // namespace h2o
