// How a query estimates which pages of the archive matter to it. Host and device code share this
// file.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "kv/policy.h"

namespace h2o {

// How far from the mean of a page's keys one of them is taken to be, in halves of their range. At 1
// an estimate is about a bound, which no key comes near: it would be at the limit in every
// dimension.
inline constexpr float kReach = 0.375f;

// An estimate of the largest q.k, the sum of q mean + kReach |q| half_range, is a product with the
// bounds mean + half_range and mean - half_range, whose factors these are.
H2O_HD inline float weight_of_upper(float q) { return (q + kReach * std::abs(q)) / 2; }
H2O_HD inline float weight_of_lower(float q) { return (q - kReach * std::abs(q)) / 2; }

// The largest of the estimates of query heads that share a kv_head, from kLeastEstimate on; never
// NaN.
inline constexpr float kLeastEstimate = std::numeric_limits<float>::lowest();
H2O_HD inline float larger_estimate(float a, float b) { return b > a ? b : a; }

// A page that a row may recall.
struct EstimatedPage {
  float estimate;  // of its largest q.k
  int32_t page;

  // Of equals the older is recalled.
  H2O_HD bool before(const EstimatedPage& other) const {
    return estimate > other.estimate || (estimate == other.estimate && page < other.page);
  }
};

}  // namespace h2o
