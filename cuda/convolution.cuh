// A causal convolution along the rows of a segment.
#pragma once

#include "backend/recurrent_limits.h"

namespace h2o::cuda {

constexpr int kChannels = 128;  // of a block, one per thread

inline unsigned parts(int64_t n, int64_t size) {
  return static_cast<unsigned>((n + size - 1) / size);
}

constexpr int kRowsAtOnce = 8;  // loaded before the first is used

// One channel of n rows: store(i, y, the sum over the taps of x in row i and the rows before it),
// where load(i) returns x and y of a row. before [n_taps - 1] and weights [n_taps] are `stride`
// apart; before becomes the last rows.
template <class Load, class Store>
__device__ void convolve(float* before, const float* weights, int stride, int n_taps, int n,
                         const Load& load, const Store& store) {
  float taps[kMaxTaps], rows[kMaxTaps];
#pragma unroll
  for (int t = 0; t < kMaxTaps; ++t) {
    taps[t] = t < n_taps ? weights[t * stride] : 0;
    rows[t] = t + 1 < n_taps ? before[t * stride] : 0;
  }
  for (int begin = 0; begin < n; begin += kRowsAtOnce) {
    float2 loaded[kRowsAtOnce];
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) loaded[i] = load(min(begin + i, n - 1));
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      if (begin + i >= n) break;
      float sum = 0;
#pragma unroll
      for (int t = 0; t < kMaxTaps; ++t) {
        if (t + 1 == n_taps) rows[t] = loaded[i].x;
        sum = fmaf(rows[t], taps[t], sum);
      }
      store(begin + i, loaded[i].y, sum);
#pragma unroll
      for (int t = 0; t + 1 < kMaxTaps; ++t) rows[t] = rows[t + 1];
    }
  }
#pragma unroll
  for (int t = 0; t < kMaxTaps; ++t) {
    if (t + 1 < n_taps) before[t * stride] = rows[t];
  }
}

}  // namespace h2o::cuda
