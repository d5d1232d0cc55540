// How a query estimates which pages of the archive matter to it. Host and device code share this
// file.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "kv/policy.h"

namespace h2o {

// How far from the middle of a page's keys one of them is taken to be, of as far as it may. At 1 an
// estimate is a bound, which no key comes near: it would be at the limit in every dimension.
inline constexpr float kReach = 0.5f;

// An estimate of the largest q.k, the sum of q (largest + smallest) / 2 and of
// kReach |q| (largest - smallest) / 2, is a product with both of them, whose factors these are.
H2O_HD inline float weight_of_largest(float q) { return (q + kReach * std::abs(q)) / 2; }
H2O_HD inline float weight_of_smallest(float q) { return (q - kReach * std::abs(q)) / 2; }

// The largest of the estimates of query heads that share a kv_head, from kLeastEstimate on; never
// NaN.
inline constexpr float kLeastEstimate = -FLT_MAX;
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
