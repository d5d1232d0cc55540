// Element-wise access to the keys and values of a segment.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/attention/kv_types.cuh"
#include "cuda/attention/prefill_step.cuh"

namespace h2o::cuda {

// A key and a value of a segment; the key of a rolling segment is rotated by its rank.
class StoredRow {
 public:
  __device__ StoredRow(const PrefillStep& step, const SegmentKeys& keys, int32_t i)
      : step_(step),
        row_(keys.row(step.cache, i)),
        rope_table_(step.n_rot > 0 ? step.cache.rope_table + int64_t{keys.rank(i)} * step.n_rot
                                   : nullptr) {}

  __device__ float value(int32_t i) const { return element(step_.cache.v_dtype, row_.v, i); }

  __device__ float key(int32_t i) const {
    const float x = stored(i);
    if (i >= step_.n_rot) return x;
    const int32_t half = step_.n_rot / 2;
    const bool pairs = step_.rope == RopeLayout::pairs;
    const bool is_first = pairs ? i % 2 == 0 : i < half;
    const int32_t other = pairs ? i ^ 1 : (is_first ? i + half : i - half);
    const int32_t pair = pairs ? i / 2 : (is_first ? i : other);
    const float across = stored(other) * rope_table_[half + pair];
    return x * rope_table_[pair] + (is_first ? -across : across);
  }

 private:
  __device__ float stored(int32_t i) const { return element(step_.cache.k_dtype, row_.k, i); }

  const PrefillStep& step_;
  KvRow row_;
  const float* rope_table_;
};

}  // namespace h2o::cuda
