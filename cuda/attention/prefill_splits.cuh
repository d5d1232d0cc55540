// Splits of the keys of a prefill segment over blocks, for short chunks over long caches.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kv/view.h"

namespace h2o::cuda {

// Two on each of 132 multiprocessors. The same number on every device, and splits depend only on
// the segment and the size of the cache: so do results, bit for bit.
constexpr int64_t kEnoughBlocks = 264;
constexpr int32_t kMinSplit = 128;      // keys
constexpr int32_t kSplitMultiple = 64;  // keys: a multiple of every kernel's tiles

struct KeySplits {
  // Divides for this many blocks without splits, which read at most n_keys keys each.
  void divide(int64_t n_blocks, int32_t n_keys) {
    const int64_t most = (int64_t{n_keys} + kMinSplit - 1) / kMinSplit;
    const int64_t parts = std::max(std::min(kEnoughBlocks / n_blocks, most), int64_t{1});
    length = static_cast<int32_t>((n_keys + parts * kSplitMultiple - 1) / (parts * kSplitMultiple) *
                                  kSplitMultiple);
    n = (n_keys + length - 1) / length;
  }

  // Upper bound for queries of all kv_heads times splits, if a block has up to `tile` queries.
  static int64_t most_partials(const KvView& cache, int32_t tile) {
    const int64_t keys = int64_t{cache.slots} + cache.max_rows;
    if (keys <= kMinSplit) return 0;
    return std::min(kEnoughBlocks * tile,
                    (keys + kMinSplit - 1) / kMinSplit * cache.n_heads * cache.max_rows);
  }

  int32_t length = 0;  // keys
  int32_t n = 1;       // 1: the kernel writes the final result

  // Results of each split with its own softmax; [n_kv_heads, n_queries, n, ...]
  float* out;    // [head_dim] weighted by 2^(logit - shift)
  float* shift;  // near the largest logit, in base 2
  float* total;  // sum of the weights
};

}  // namespace h2o::cuda
