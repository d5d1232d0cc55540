// Eviction after prefill of a long segment: data shared by its kernels.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/attention/block_select.cuh"
#include "kv/view.h"

namespace h2o::cuda {

// The workspace of one kv_head. "All" are the slots followed by the rows of the segment.
struct Admission {
  __device__ Admission(const KvView& cache, int kv_head)
      : n(cache.slots + cache.max_rows), orders(nullptr) {
    std::byte* base = cache.workspace + kv_head * bytes(cache);
    orders = reinterpret_cast<uint64_t*>(base);
    to = reinterpret_cast<int32_t*>(orders + n);
    pooled = reinterpret_cast<float*>(to);
    evicted = to + cache.max_rows;
    closed = evicted + cache.max_rows;
  }

  static __host__ __device__ size_t bytes(const KvView& cache) {
    const size_t slots = (cache.slots + 1) / 2 * 2, rows = (cache.max_rows + 1) / 2 * 2;
    return (slots + rows) * sizeof(uint64_t) + (2 * rows + slots) * sizeof(int32_t);
  }

  int32_t n;
  uint64_t* orders;  // [all] eviction order; kLastOrder for tokens that must be kept
  float* pooled;     // [all] pooled scores, before the others are written
  int32_t* to;       // [rows] the destination slot of a row that is kept, or -1
  int32_t* evicted;  // [rows] slots of evicted tokens, in order, then slots + row of evicted rows
  int32_t* closed;   // [slots] by rank: how many tokens of lower rank are evicted
};

}  // namespace h2o::cuda
