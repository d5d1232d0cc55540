// Activations as operands in 16 bits, for kernels whose output is multiplied with weights.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/matmul/quantize_activations.h"

namespace h2o::cuda {

// Clamped to f16's range; NaN stays NaN.
__device__ inline __half saturated(float x) {
  constexpr float kMax = 65504;
  return __float2half_rn(fabsf(x) > kMax ? copysignf(kMax, x) : x);
}

// The bits of an operand of a product.
__device__ inline uint16_t operand(bool bf16, float x) {
  return bf16 ? __bfloat16_as_ushort(__float2bfloat16_rn(x)) : __half_as_ushort(saturated(x));
}
__device__ inline uint32_t operand(bool bf16, float2 x) {
  return operand(bf16, x.x) | uint32_t{operand(bf16, x.y)} << 16;
}
__device__ inline uint2 operand(bool bf16, float4 x) {
  return {operand(bf16, float2{x.x, x.y}), operand(bf16, float2{x.z, x.w})};
}

// Writes elements `at` to at + 1, 2 or 4, a multiple of their number, if there are halves.
template <class T>
__device__ void write_halves(const Operands& to, int64_t at, T x) {
  using Bits = decltype(operand(to.bf16, x));
  if (to.halves != nullptr) *reinterpret_cast<Bits*>(to.halves + at) = operand(to.bf16, x);
}

}  // namespace h2o::cuda
