// How warps find experts, and tiles of their rows.
#pragma once

#include "cuda/matmul/expert_rows.h"
#include "cuda/runtime/reduce.cuh"

namespace h2o::cuda {

// The expert of a row: as many as there are end at this row or before it.
__device__ inline int expert_of(const ExpertRows& experts, int row) {
  int n = 0;
  for (int first = 0; first < experts.n_experts; first += kWarp) {
    const int e = first + static_cast<int>(threadIdx.x) % kWarp;
    const bool ends = e < experts.n_experts && experts.offsets[e + 1] <= row;
    n += __popc(__ballot_sync(kAllLanes, ends));
  }
  return n;
}

// Rows [first, first + n) of one expert.
struct ExpertTile {
  int expert, first, n;
};

// The rows [begin, begin + n_rows) are cut at multiples of kRows from `begin` on, and where experts
// begin. These are the tiles, in that order; n is 0 where experts begin together, or at such a
// multiple, or elsewhere.
template <int kRows>
__device__ ExpertTile expert_tile(const ExpertRows& experts, int begin, int n_rows, int index) {
  const int n_multiples = (n_rows + kRows - 1) / kRows;
  int first = index * kRows;  // from `begin` on
  int e = index - n_multiples;
  if (e < 0) {
    e = expert_of(experts, begin + first);
  } else {
    first = experts.offsets[e] - begin;
    if (first < 0 || first >= n_rows || first % kRows == 0) return {e, 0, 0};
  }
  const int end = min(min(experts.offsets[e + 1] - begin, n_rows), first / kRows * kRows + kRows);
  return {e, begin + first, end - first};
}

// Of so many rows.
template <int kRows>
unsigned n_expert_tiles(const ExpertRows& experts, int n_rows) {
  return static_cast<unsigned>((n_rows + kRows - 1) / kRows + experts.n_experts);
}

}  // namespace h2o::cuda
