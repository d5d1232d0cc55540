// Shared by the K-quants. Their blocks of 256 have one or two f16 units; each group multiplies them
// by small integers, and its weights are levels in steps of the product.
//
// The search minimizes the error of the stored values. Given the units, each group tries every
// plausible integer and keeps the smallest squared error; given the integers and the levels, the
// units are fitted by least squares. The two steps alternate. Many nearly equal step sizes need to
// be tried, because each assigns the few weights differently to levels.
#pragma once

#include <array>
#include <limits>

#include "quantize/blocks.h"

namespace h2o {

constexpr int kSuperBlock = 256;
constexpr int kRefits = 2;  // of the units; a third improves by less than 0.1 %
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct LevelRange {
  float lowest = 0.0f, highest = 0.0f;
};

// The nearest level, ties to even.
inline float nearest_level(float x, LevelRange range) {
  x = x < range.lowest ? range.lowest : x;
  x = x > range.highest ? range.highest : x;
  return (x + 0x1.8p23f) - 0x1.8p23f;  // std::nearbyint would not be vectorized
}

// The statistics that determine a group's error, besides its weights: sums of level, level^2, level
// * x, each weighted by importance.
struct LevelSums {
  float q = 0.0f, qq = 0.0f, qx = 0.0f;
};

// Sums per lane, so that the loop can be vectorized without reordering.
template <int n, class Level>
LevelSums sum_levels(const float* x, const float* importance, const Level& level_of) {
  constexpr int kLanes = n / 4;
  std::array<float, kLanes> q{}, qq{}, qx{};
  for (int i = 0; i < n; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const float level = level_of(x[i + lane]);
      const float counted = importance[i + lane] * level;
      q[lane] += counted;
      qq[lane] += counted * level;
      qx[lane] += counted * x[i + lane];
    }
  }
  LevelSums sums;
  for (int lane = 0; lane < kLanes; ++lane) {
    sums.q += q[lane];
    sums.qq += qq[lane];
    sums.qx += qx[lane];
  }
  return sums;
}

// The unit for a nonzero quantity: never 0, even if it underflows.
inline Half unit_of(float x) {
  constexpr Half kSmallest{1, 0x1p-24f};
  const Half half = to_half(x);
  return x > 0.0f && half.bits == 0 ? kSmallest : half;
}

}  // namespace h2o
