// Rotary position embedding on the CPU (RoFormer, arXiv 2104.09864).
#pragma once

#include <cstdint>
#include <span>

#include "backend/backend.h"
#include "cpu/kernels.h"
#include "kv/view.h"

namespace h2o {

// rope_table [n_rot]: the cosines of the angles of `position`, times the magnitude, followed by the
// sines.
void compute_rope_table(float* rope_table, const Rope& rope, int32_t position);

// Rotates the head x [head_dim] in place.
inline void rotate(const CpuKernels& kernels, float* x, const float* rope_table, const Rope& rope) {
  kernels.rotate(x, rope_table, rope.n_rot(), rope.layout == RopeLayout::pairs);
}

// Rotates the heads of both rows, of a token at `position`.
void rotate_heads(std::span<const std::span<float>> rows, int64_t head_dim, const Rope& rope,
                  int32_t position);

// Un-rotates the keys of `head`, of a sequence of `length` tokens, and computes their ranks.
void roll_head(const CpuKernels& kernels, const KvView& cache, const Rope& rope, const KvHead& head,
               int32_t length);

}  // namespace h2o
