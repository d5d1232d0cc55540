// Elements of keys and values, out of whatever type the cache stores.
#pragma once

#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>

#include "core/blocks.h"
#include "core/dtype.h"
#include "cuda/prefill_step.cuh"

namespace h2o::cuda {

__device__ inline float to_float(F16 x) { return __half2float(__ushort_as_half(x.bits)); }

__device__ inline float to_float(BF16 x) { return __uint_as_float(uint32_t{x.bits} << 16); }

__device__ inline float stored_value(DType dtype, const std::byte* row, int32_t i) {
  switch (dtype) {
    case DType::f32:
      return reinterpret_cast<const float*>(row)[i];
    case DType::f16:
      return to_float(reinterpret_cast<const F16*>(row)[i]);
    case DType::bf16:
      return to_float(reinterpret_cast<const BF16*>(row)[i]);
    case DType::q8_0: {
      const BlockQ8_0& block = reinterpret_cast<const BlockQ8_0*>(row)[i / 32];
      return to_float(block.d) * block.qs[i % 32];
    }
    default: {  // q4_0: the cache has no other type
      const BlockQ4_0& block = reinterpret_cast<const BlockQ4_0*>(row)[i / 32];
      const int q = block.qs[i % 16] >> (i % 32 < 16 ? 0 : 4) & 15;
      return to_float(block.d) * (q - 8);
    }
  }
}

// A key and a value of a segment, as its rows read them: a rolling segment's key is rotated by its
// rank.
class StoredRow {
 public:
  __device__ StoredRow(const PrefillStep& step, const SegmentKeys& keys, int32_t i)
      : step_(step),
        row_(keys.row(step.cache, i)),
        turns_(step.n_rot > 0 ? step.cache.turns + int64_t{keys.rank(i)} * step.n_rot : nullptr) {}

  __device__ float value(int32_t i) const { return stored_value(step_.cache.v_dtype, row_.v, i); }

  __device__ float key(int32_t i) const {
    const float x = stored(i);
    if (i >= step_.n_rot) return x;
    const int32_t half = step_.n_rot / 2;
    const bool pairs = step_.rope == RopeLayout::pairs;
    const bool is_first = pairs ? i % 2 == 0 : i < half;
    const int32_t other = pairs ? i ^ 1 : (is_first ? i + half : i - half);
    const int32_t turn = pairs ? i / 2 : (is_first ? i : other);
    const float across = stored(other) * turns_[half + turn];
    return x * turns_[turn] + (is_first ? -across : across);
  }

 private:
  __device__ float stored(int32_t i) const { return stored_value(step_.cache.k_dtype, row_.k, i); }

  const PrefillStep& step_;
  KvRow row_;
  const float* turns_;
};

}  // namespace h2o::cuda
