// What the K-quants have in common. Their blocks of 256 have one or two f16 units; each group of a
// block multiplies them by small integers, and its weights are levels in steps of the product.
//
// The search is over what is stored. Given the units, a group tries every integer that could be
// best and keeps the least squared error; given the integers and the levels, the best units are a
// least-squares fit. The two alternate. Many near-equal steps are importance trying because each
// lays its levels differently over the same few weights.
#pragma once

#include <array>
#include <limits>

#include "quantize/blocks.h"

namespace h2o {

constexpr int kSuperBlock = 256;
constexpr int kRefits = 2;  // of the units; a third gains less than one part in a thousand
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct LevelRange {
  float lowest = 0.0f, highest = 0.0f;
};

// The level nearest to x, halves to even.
inline float nearest_level(float x, LevelRange range) {
  x = x < range.lowest ? range.lowest : x;
  x = x > range.highest ? range.highest : x;
  return (x + 0x1.8p23f) - 0x1.8p23f;  // std::nearbyint would not be vectorised
}

// What the error of a group depends on, besides its weights: sums of level, level^2, level * x,
// each times how much the error counts.
struct LevelSums {
  float q = 0.0f, qq = 0.0f, qx = 0.0f;
};

// Sums in lanes, so that the loop can be vectorised without reordering a sum.
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

// A unit for a quantity of which there is some: never 0, however small it is.
inline Half unit_of(float x) {
  constexpr Half kSmallest{1, 0x1p-24f};
  const Half half = to_half(x);
  return x > 0.0f && half.bits == 0 ? kSmallest : half;
}

}  // namespace h2o
