// How threads divide a causal convolution along the rows of a batch's segments.
#pragma once

#include <algorithm>

#include "backend/batch.h"
#include "cpu/thread_pool.h"

namespace h2o {

inline int64_t parts(int64_t n, int64_t size) { return (n + size - 1) / size; }

// Calls body(segment, first, n) for all rows of each segment and some of its channels at a time:
// few, so that many threads have some.
template <class Body>
void for_channels(ThreadPool& pool, const Batch& batch, int64_t n_channels, const Body& body) {
  constexpr int64_t kChannels = 256;
  constexpr int64_t kCost = 64;  // of a channel of a row, in multiply-adds
  const int64_t n_parts = parts(n_channels, kChannels);
  const auto n_segments = static_cast<int64_t>(batch.segments.size());
  pool.parallel_for(n_segments * n_parts, kCost * batch.n_rows() * n_channels,
                    [&](int, int64_t begin, int64_t end) {
                      for (int64_t i = begin; i < end; ++i) {
                        const int64_t first = i % n_parts * kChannels;
                        body(batch.segments[i / n_parts], first,
                             std::min(kChannels, n_channels - first));
                      }
                    });
}

}  // namespace h2o
