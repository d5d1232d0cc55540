// Copies by all threads of a block, or by those of a warp.
#pragma once

#include <cstddef>
#include <cstdint>

namespace h2o::cuda {

template <int kThreads = 0>  // of a warp; 0: of the block
__device__ inline void copy_bytes(std::byte* to, const std::byte* from, int64_t bytes) {
  const unsigned n = kThreads > 0 ? kThreads : blockDim.x;
  const unsigned first = kThreads > 0 ? threadIdx.x % kThreads : threadIdx.x;
  if ((bytes | reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % 16 == 0) {
    for (int64_t i = first; i < bytes / 16; i += n) {
      reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
    }
  } else {
    for (int64_t i = first; i < bytes; i += n) to[i] = from[i];
  }
}

}  // namespace h2o::cuda
