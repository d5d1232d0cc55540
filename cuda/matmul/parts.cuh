// Several products in one launch, each with its own blocks.
#pragma once

#include <climits>

#include "cuda/matmul/matvec.h"

namespace h2o::cuda {

// One of the products.
struct Part {
  float* y = nullptr;               // first row
  const float* bias = nullptr;      // [rows] or nullptr
  const std::byte* data = nullptr;  // weights
  int64_t rows = 0;                 // of the weights; columns of y
  unsigned first_block = UINT_MAX;  // of the grid
};

// The part that a block belongs to.
template <class SomePart>
__device__ SomePart part_of(const SomePart (&parts)[kMaxProducts], unsigned block) {
  SomePart part = parts[0];
#pragma unroll
  for (int i = 1; i < kMaxProducts; ++i) {
    if (block >= parts[i].first_block) part = parts[i];
  }
  return part;
}

}  // namespace h2o::cuda
