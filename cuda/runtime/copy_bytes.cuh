// Copies by all threads of a block.
#pragma once

#include <cstddef>
#include <cstdint>

namespace h2o::cuda {

__device__ inline void copy_bytes(std::byte* to, const std::byte* from, int64_t bytes) {
  if ((bytes | reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % 16 == 0) {
    for (int64_t i = threadIdx.x; i < bytes / 16; i += blockDim.x) {
      reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
    }
  } else {
    for (int64_t i = threadIdx.x; i < bytes; i += blockDim.x) to[i] = from[i];
  }
}

}  // namespace h2o::cuda
