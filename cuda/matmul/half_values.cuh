// Quantized weights as floats, and as f16.
#pragma once

#include "cuda/matmul/formats.cuh"
#include "cuda/matmul/operands.cuh"

namespace h2o::cuda {

// Elements 4 j to 4 j + 3 of a group.
template <class Format>
__device__ inline float4 values(const Group<typename Format::Scales>& group, int j) {
  constexpr int kPerScale = 8 / Format::Scales::kScales;
  const float scale = group.scale[j / kPerScale];
  const auto value = [&](int i) {
    const int q = static_cast<int8_t>(group.q[j] >> 8 * i) - Format::kOffset;
    if constexpr (Format::Scales::kMins) return scale * q + group.min[j / kPerScale];
    return scale * q;
  };
  return {value(0), value(1), value(2), value(3)};
}

// Elements 8 j to 8 j + 7 of a group, as f16.
template <class Format>
__device__ inline uint4 half_values(const Group<typename Format::Scales>& group, int j) {
  const uint2 a = operand(false, values<Format>(group, 2 * j));
  const uint2 b = operand(false, values<Format>(group, 2 * j + 1));
  return {a.x, a.y, b.x, b.y};
}

}  // namespace h2o::cuda
