// Rotary position embedding on the CPU (RoFormer, arXiv 2104.09864).
#pragma once

#include <cstdint>

#include "core/backend.h"
#include "cpu/kernels.h"
#include "kv/view.h"

namespace h2o {

// turns [n_rot]: the cosines of the angles of `position`, times the magnitude, and then the sines.
void fill_turns(float* turns, const Rope& rope, int32_t position);

// Rotates the head x [head_dim] in place.
inline void turn(const CpuKernels& kernels, float* x, const float* turns, const Rope& rope) {
  kernels.turn(x, turns, rope.n_rot(), rope.layout == RopeLayout::pairs);
}

// The keys of `head`, of a sequence of `length` tokens, become unrotated and get their ranks.
void roll_head(const CpuKernels& kernels, const KvView& cache, const Rope& rope, const KvHead& head,
               int32_t length);

}  // namespace h2o
