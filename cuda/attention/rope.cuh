// Rotary position embedding (RoFormer, arXiv 2104.09864) on the device.
#pragma once

#include <cstdint>

#include "backend/backend.h"

namespace h2o::cuda {

// Rope as a kernel argument.
struct Rotation {
  explicit Rotation(const Rope& rope)
      : frequencies(rope.frequencies.floats()),
        half(static_cast<int32_t>(rope.frequencies.cols)),
        magnitude(rope.magnitude),
        pairs(rope.layout == RopeLayout::pairs) {}

  // The cosine (x) and sine (y) of the rotation of pair i at a position. The angle is computed in
  // f32, as in transformers and llama.cpp.
  __device__ float2 angle(int32_t position, int i) const {
    const float angle = __fmul_rn(static_cast<float>(position), frequencies[i]);
    float sine, cosine;
    sincosf(angle, &sine, &cosine);
    return {cosine * magnitude, sine * magnitude};
  }

  // The two elements of pair i.
  __device__ int first(int i) const { return pairs ? 2 * i : i; }
  __device__ int second(int i) const { return pairs ? 2 * i + 1 : i + half; }

  // Pair i of x, which is (a, b), rotated.
  __device__ void put(float* x, int i, float2 angle, float a, float b) const {
    x[first(i)] = a * angle.x - b * angle.y;
    x[second(i)] = a * angle.y + b * angle.x;
  }
  __device__ void apply(float* x, int i, float2 angle) const {
    put(x, i, angle, x[first(i)], x[second(i)]);
  }

  // Heads x [n_heads, head_dim], by all kThreads threads of a block; angles [half]. Several loads
  // are in flight.
  template <int kThreads>
  __device__ void apply_all(float* x, int n_heads, int head_dim, const float2* angles) const {
    constexpr int kAtOnce = 4;
    const int n = n_heads * half;
    for (int start = threadIdx.x; start < n; start += kAtOnce * kThreads) {
      float a[kAtOnce] = {}, b[kAtOnce] = {};
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int i = start + j * kThreads;
        if (i >= n) break;
        const float* const head = x + i / half * head_dim;
        a[j] = head[first(i % half)];
        b[j] = head[second(i % half)];
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int i = start + j * kThreads;
        if (i >= n) break;
        float* const head = x + i / half * head_dim;
        put(head, i % half, angles[i % half], a[j], b[j]);
      }
    }
  }

  const float* frequencies;  // [half]
  int32_t half;              // n_rot / 2; 0: no rotation
  float magnitude;
  bool pairs;
};

}  // namespace h2o::cuda
