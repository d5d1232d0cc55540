// A causal convolution along the rows of a segment.
#pragma once

#include "backend/recurrent_limits.h"

namespace h2o::cuda {

constexpr int kChannels = 128;  // of a block, one per thread

inline unsigned parts(int64_t n, int64_t size) {
  return static_cast<unsigned>((n + size - 1) / size);
}

// One channel of n rows: store(i, the sum over the taps of row i and the rows before it, as
// load(i) returns them). before [n_taps - 1] and weights [n_taps] are `stride` apart; before
// becomes the last rows.
template <class Load, class Store>
__device__ void convolve(float* before, const float* weights, int stride, int n_taps, int n,
                         const Load& load, const Store& store) {
  float taps[kMaxTaps], rows[kMaxTaps];
#pragma unroll
  for (int t = 0; t < kMaxTaps; ++t) {
    taps[t] = t < n_taps ? weights[t * stride] : 0;
    rows[t] = t + 1 < n_taps ? before[t * stride] : 0;
  }
  for (int i = 0; i < n; ++i) {
    const float x = load(i);
    float sum = 0;
#pragma unroll
    for (int t = 0; t < kMaxTaps; ++t) {
      if (t + 1 == n_taps) rows[t] = x;
      sum = fmaf(rows[t], taps[t], sum);
    }
    store(i, sum);
#pragma unroll
    for (int t = 0; t + 1 < kMaxTaps; ++t) rows[t] = rows[t + 1];
  }
#pragma unroll
  for (int t = 0; t < kMaxTaps; ++t) {
    if (t + 1 < n_taps) before[t * stride] = rows[t];
  }
}

}  // namespace h2o::cuda
