// Rows of an archive, which may also have keys in q3 and values in q2 (see core/blocks.h). Bits are
// those of the CPU.
#pragma once

#include "core/e5m3.h"
#include "cuda/attention/kv_types.cuh"
#include "kv/archive_layout.h"

namespace h2o::cuda {

// ---- Reading ----

__device__ inline float q2_element(const std::byte* row, int i) {
  const BlockQ2& block = reinterpret_cast<const BlockQ2*>(row)[i / 64];
  const int q = block.qs[i / 32 % 2][i % 32 / 4] >> i % 4 * 2 & 3;
  return h2o::to_float(block.d) * (static_cast<float>(q) - static_cast<float>(block.zero) / 64);
}

// A code.
__device__ inline float q3_element(const std::byte* row, int i) {
  const BlockQ3& block = reinterpret_cast<const BlockQ3*>(row)[i / 32];
  const int low = block.qs[i % 32 / 4] >> i % 4 * 2 & 3;
  const int high = block.qh[i % 32 / 8] >> i % 8 & 1;
  return static_cast<float>(low | high << 2);
}

__device__ inline float archived_value(const ArchiveLayout& archive, const std::byte* row, int i) {
  return archive.v_dtype == DType::q2 ? q2_element(row, i) : element(archive.v_dtype, row, i);
}

// A key of a page with this grid, if keys are in q3.
__device__ inline float archived_key(const ArchiveLayout& archive, const KeyGrid& grid,
                                     const std::byte* row, int i) {
  if (!archive.has_grids()) return element(archive.k_dtype, row, i);
  return fmaf(grid.step(i), q3_element(row, i), grid.lowest(i));
}

// ---- Writing by a block of one warp: a row of n elements x in shared memory, overwritten ----

// Codes 0 to `largest`; NaN: 0.
__device__ inline float limited(float code, float largest) {
  return floorf(code > 0 ? (code < largest ? code : largest) : 0);
}

// The low two bits of codes [4 i, 4 i + 4).
__device__ inline uint8_t packed_pairs(const float* codes, int i) {
  uint32_t bits = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) bits |= (static_cast<uint32_t>(codes[4 * i + j]) & 3) << 2 * j;
  return static_cast<uint8_t>(bits);
}

__device__ inline void write_q2(BlockQ2* to, float* x, int n) {
  const int lane = threadIdx.x;
  for (; n > 0; n -= 64, x += 64, ++to) {
    float* const mine[] = {x + lane, x + lane + 32};
    const float largest = warp_max(fmaxf(fmaxf(*mine[0], *mine[1]), 0));
    const float smallest = -warp_max(fmaxf(fmaxf(-*mine[0], -*mine[1]), 0));
    const E5M3 step = rounded_up((largest - smallest) / 3);
    const float d = h2o::to_float(step);
    const float zero = -64 * smallest / d + 0.5f;
    const auto stored_zero = static_cast<uint8_t>(zero < 255 ? zero : 255);
    const float shift = static_cast<float>(stored_zero) / 64 + 0.5f;
    for (float* code : mine) *code = limited(*code / d + shift, 3);
    __syncthreads();
    if (lane < 16) to->qs[lane / 8][lane % 8] = packed_pairs(x, lane);
    if (lane == 0) {
      to->d = step;
      to->zero = stored_zero;
    }
  }
}

// x: codes, not rounded.
__device__ inline void write_q3(BlockQ3* to, float* x, int n) {
  const int lane = threadIdx.x;
  for (; n > 0; n -= 32, x += 32, ++to) {
    x[lane] = limited(x[lane] + 0.5f, 7);
    __syncthreads();
    if (lane < 8) to->qs[lane] = packed_pairs(x, lane);
    if (lane < 4) {
      uint32_t bits = 0;
#pragma unroll
      for (int j = 0; j < 8; ++j) bits |= (static_cast<uint32_t>(x[8 * lane + j]) >> 2) << j;
      to->qh[lane] = static_cast<uint8_t>(bits);
    }
  }
}

__device__ inline void write_archived(DType dtype, std::byte* to, float* x, int n) {
  if (dtype == DType::q2) {
    write_q2(reinterpret_cast<BlockQ2*>(to), x, n);
  } else if (dtype == DType::q3) {
    write_q3(reinterpret_cast<BlockQ3*>(to), x, n);
  } else {
    write_row(dtype, to, x, n);
  }
}

}  // namespace h2o::cuda
