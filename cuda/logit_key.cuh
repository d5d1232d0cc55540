// A total order of logits.
#pragma once

#include <cstdint>

namespace h2o::cuda {

// A logit and its token as one positive integer; more likely is larger, ties: the lower token. Both
// zeros are equal.
__device__ inline uint64_t key_of(float logit, int token) {
  const uint32_t bits = __float_as_uint(logit + 0.0f);
  const uint32_t order = bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
  return uint64_t{order} << 32 | ~static_cast<uint32_t>(token);
}

__device__ inline int token_of(uint64_t key) {
  return static_cast<int>(~static_cast<uint32_t>(key));
}

__device__ inline float logit_of(uint64_t key) {
  const auto order = static_cast<uint32_t>(key >> 32);
  return __uint_as_float(order >> 31 != 0 ? order & 0x7fffffffu : ~order);
}

}  // namespace h2o::cuda
