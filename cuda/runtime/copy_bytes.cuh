// Copies by all threads of a block, or by those of a warp.
#pragma once

#include <cstddef>
#include <cstdint>

namespace h2o::cuda {

template <int kThreads = 0>  // of a warp; 0: of the block
__device__ inline void copy_bytes(std::byte* to, const std::byte* from, int64_t bytes) {
  const unsigned n = kThreads > 0 ? kThreads : blockDim.x;
  const unsigned first = kThreads > 0 ? threadIdx.x % kThreads : threadIdx.x;
  const auto copy = [&]<class T>(const T*) {
    for (int64_t i = first; i < bytes / int64_t{sizeof(T)}; i += n) {
      reinterpret_cast<T*>(to)[i] = reinterpret_cast<const T*>(from)[i];
    }
  };
  const auto all = bytes | reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from);
  if (all % 16 == 0) {
    copy(static_cast<const uint4*>(nullptr));
  } else if (all % 4 == 0) {
    copy(static_cast<const uint32_t*>(nullptr));
  } else {
    copy(from);
  }
}

}  // namespace h2o::cuda
