// How a query estimates the relevance of archived pages. Shared by host and device code.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "kv/policy.h"

namespace h2o {

// How far a key is assumed to lie from the mean of its page's keys, in units of half their range. A
// reach of 1 would give about an upper bound, which no key comes close to: it would have to be at
// the limit in every dimension.
inline constexpr float kReach = 0.375f;

// The estimate of the largest q.k, sum of (q mean + kReach |q| half_range), is a product of these
// weights with the bounds mean + half_range and mean - half_range.
H2O_HD inline float weight_of_upper(float q) { return (q + kReach * std::abs(q)) / 2; }
H2O_HD inline float weight_of_lower(float q) { return (q - kReach * std::abs(q)) / 2; }

// The initial value when maximizing over the query heads that share a kv_head; estimates are never
// NaN.
inline constexpr float kMinEstimate = std::numeric_limits<float>::lowest();
H2O_HD inline float larger_estimate(float a, float b) { return b > a ? b : a; }

// A candidate page for recall by a row.
struct EstimatedPage {
  float estimate;  // of its largest q.k
  int32_t page;

  // Larger estimates first; ties: the older page.
  H2O_HD bool before(const EstimatedPage& other) const {
    return estimate > other.estimate || (estimate == other.estimate && page < other.page);
  }
};

}  // namespace h2o
