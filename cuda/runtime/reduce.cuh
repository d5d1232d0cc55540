// Deterministic sums and maxima over a warp and a block.
#pragma once

#include <cstdint>

namespace h2o::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// The sum over groups of `width` lanes (a power of two), in every lane.
template <int width = kWarp>
__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int apart = width / 2; apart > 0; apart /= 2) x += __shfl_xor_sync(kAllLanes, x, apart);
  return x;
}

template <int width = kWarp>
__device__ inline float warp_max(float x) {
#pragma unroll
  for (int apart = width / 2; apart > 0; apart /= 2) {
    x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, apart));
  }
  return x;
}

// The sum over a block of whole warps, in every thread. `scratch`: shared, [n_warps]; can be reused
// immediately.
__device__ inline float block_sum(float x, float* scratch) {
  x = warp_sum(x);
  const int n_warps = blockDim.x / kWarp;
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = x;
  __syncthreads();
  const int lane = threadIdx.x % kWarp;
  const float total = warp_sum(lane < n_warps ? scratch[lane] : 0);
  __syncthreads();
  return total;
}

// e^x for x <= 0, clamped at e^-70 and never NaN: scores must be ordered.
__device__ inline float exp_negative(float x) { return __expf(fminf(fmaxf(x, -70.0f), 0.0f)); }

}  // namespace h2o::cuda
