// Rounding to 8 bits by whole warps, for kernels whose output is multiplied with quantized weights.
// All give the same bits.
#pragma once

#include "cuda/matmul/quantize_activations.h"
#include "cuda/runtime/reduce.cuh"

namespace h2o::cuda {

static_assert(QuantizedRows::kGroup == kWarp);

// Rounds as quantize_rows of cpu/matmul/int8_matmul-inl.h does: x ~ d * q.
struct Rounding {
  // For denormal d, 1 / d may overflow: such values are rounded to zero.
  __device__ explicit Rounding(float d) : d(d), inverse(d >= 0x1p-126f ? 1 / d : 0) {}

  __device__ int operator()(float x) const {
    return static_cast<int>(fminf(fmaxf(rintf(x * inverse), -127.0f), 127.0f));
  }

  float d, inverse;
};

// Group g of a row; x: the element of this lane.
__device__ inline void round_group(const QuantizedRows& to, int row, int g, float x) {
  const int lane = threadIdx.x % kWarp;
  // NaN if any of them is not finite.
  const Rounding rounding(warp_max(fabsf(x)) / 127 + warp_sum(x * 0));
  const int q = rounding(x);

  uint32_t word = static_cast<uint32_t>(q & 255) << lane % 4 * 8;  // of four lanes
  word |= __shfl_xor_sync(kAllLanes, word, 1);
  word |= __shfl_xor_sync(kAllLanes, word, 2);
  int sum = q;  // of sixteen
#pragma unroll
  for (int apart = 1; apart < 16; apart *= 2) sum += __shfl_xor_sync(kAllLanes, sum, apart);
  const int second = __shfl_xor_sync(kAllLanes, sum, 16);
  const int chunk = g / QuantizedRows::kChunk;
  const int in_chunk = g % QuantizedRows::kChunk;
  if (lane % 4 == 0) {
    int8_t* const half = to.half(row, chunk, in_chunk, lane / 16);
    reinterpret_cast<uint32_t*>(half)[lane % 16 / 4] = word;
  }
  if (lane == 0) {
    *to.group(row, chunk, in_chunk) = {rounding.d,
                                       {static_cast<int16_t>(sum), static_cast<int16_t>(second)}};
  }
}

// Elements 4 i to 4 i + 3 of a row; consecutive lanes have consecutive i, the first a multiple of
// eight. The same bits as round_group(), with fewer shuffles.
__device__ inline void round_fours(const QuantizedRows& to, int row, int i, const float4& x) {
  // Absolute values have, as integers, the order of floats, then infinity, then NaN.
  const auto magnitude = [](float v) { return __float_as_uint(v) & 0x7fffffffu; };
  uint32_t most = max(max(magnitude(x.x), magnitude(x.y)), max(magnitude(x.z), magnitude(x.w)));
#pragma unroll
  for (int apart = 4; apart > 0; apart /= 2) {
    most = max(most, __shfl_xor_sync(kAllLanes, most, apart));
  }
  const float largest = __uint_as_float(most);
  // NaN if any of them is not finite.
  const Rounding q(largest / 127 + largest * 0);
  const int four[4] = {q(x.x), q(x.y), q(x.z), q(x.w)};
  int sum = four[0] + four[1] + four[2] + four[3];  // of sixteen
  sum += __shfl_xor_sync(kAllLanes, sum, 1);
  sum += __shfl_xor_sync(kAllLanes, sum, 2);
  const int second = __shfl_xor_sync(kAllLanes, sum, 4);
  const int g = i / 8, in_group = i % 8;
  const int chunk = g / QuantizedRows::kChunk, in_chunk = g % QuantizedRows::kChunk;
  const auto half = reinterpret_cast<uint32_t*>(to.half(row, chunk, in_chunk, in_group / 4));
  half[in_group % 4] = (four[0] & 255) | (four[1] & 255) << 8 | (four[2] & 255) << 16 |
                       static_cast<uint32_t>(four[3]) << 24;
  if (in_group == 0) {
    *to.group(row, chunk, in_chunk) = {q.d,
                                       {static_cast<int16_t>(sum), static_cast<int16_t>(second)}};
  }
}

// Writes the zeros after the n groups of a row, by one of n_warps warps.
__device__ inline void round_padding(const QuantizedRows& to, int row, int n, int warp,
                                     int n_warps) {
  for (int g = n + warp; g < to.n_chunks * QuantizedRows::kChunk; g += n_warps) {
    round_group(to, row, g, 0);
  }
}

}  // namespace h2o::cuda
