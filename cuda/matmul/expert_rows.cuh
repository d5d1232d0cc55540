// Mapping of rows to experts and tiles on the device.
#pragma once

#include "cuda/matmul/weights.h"
#include "cuda/runtime/reduce.cuh"

namespace h2o::cuda {

// The expert of a row: the number of experts that end at or before it.
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

// The rows [begin, begin + n_rows) are divided at multiples of kRows from `begin` on, and where
// experts start. These are the tiles, in order; n is 0 if two boundaries coincide or for an index
// past the end.
template <int kRows>
__device__ ExpertTile expert_tile(const ExpertRows& experts, int begin, int n_rows, int index) {
  const int n_multiples = (n_rows + kRows - 1) / kRows;
  int first = index * kRows;  // relative to `begin`
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

// Tiles for n_rows rows.
template <int kRows>
unsigned n_expert_tiles(const ExpertRows& experts, int n_rows) {
  return static_cast<unsigned>((n_rows + kRows - 1) / kRows + experts.n_experts);
}

}  // namespace h2o::cuda
