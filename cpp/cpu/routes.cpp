#include "cpu/routes.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace h2o {
namespace {

// The selected groups, as bits.
template <class Biased>
uint32_t select_groups(const Routes& routes, const Biased& biased) {
  if (routes.n_groups == 1) return 1;
  const int32_t size = routes.n_experts / routes.n_groups;
  float sums[Routes::kMaxGroups];  // of the two largest scores of each group
  for (int32_t g = 0; g < routes.n_groups; ++g) {
    float first = -std::numeric_limits<float>::infinity(), second = first;
    for (int32_t e = g * size; e < (g + 1) * size; ++e) {
      second = std::max(second, std::min(first, biased(e)));
      first = std::max(first, biased(e));
    }
    sums[g] = size > 1 ? first + second : first;
  }
  uint32_t selected = 0;
  for (int32_t j = 0; j < routes.n_groups_used; ++j) {
    int32_t best = -1;
    for (int32_t g = 0; g < routes.n_groups; ++g) {
      if ((selected >> g & 1) == 0 && (best < 0 || sums[g] > sums[best])) best = g;
    }
    selected |= uint32_t{1} << best;
  }
  return selected;
}

// The score of the j-th selected expert, by SparseMixer.
float mixer_score(const Routes& routes, const float* logits, const int32_t* selected, int32_t j) {
  const float largest = logits[selected[j]];
  float total = 0;
  for (int32_t e = 0; e < routes.n_experts; ++e) {
    const float below = (largest - logits[e]) / std::max(std::abs(logits[e]), largest);
    if (below > routes.spread || std::find(selected, selected + j, e) != selected + j) continue;
    total += std::exp(logits[e] - largest);
  }
  return 1 / total;
}

}  // namespace

void select_experts(const Routes& routes, const float* scores, const float* bias, int64_t i) {
  float* weights = routes.weights + i * routes.n_used;
  int32_t* selected = routes.copy_rows + i * routes.n_used;
  const auto biased = [&](int32_t e) { return bias != nullptr ? scores[e] + bias[e] : scores[e]; };
  const uint32_t groups = select_groups(routes, biased);
  const int32_t size = routes.n_experts / routes.n_groups;
  float sum = 1e-20f;  // sigmoids may all be 0
  for (int32_t j = 0; j < routes.n_used; ++j) {
    int32_t best = -1;
    for (int32_t g = 0; g < routes.n_groups; ++g) {
      if ((groups >> g & 1) == 0) continue;
      for (int32_t e = g * size; e < (g + 1) * size; ++e) {
        const bool larger = best < 0 || biased(e) > biased(best);
        if (larger && std::find(selected, selected + j, e) == selected + j) best = e;
      }
    }
    selected[j] = best;
    weights[j] = routes.spread > 0 ? mixer_score(routes, scores, selected, j) : scores[best];
    sum += weights[j];
  }
  const float factor = routes.normalized ? routes.scale / sum : routes.scale;
  for (int32_t j = 0; j < routes.n_used; ++j) {
    weights[j] *= factor;
    if (routes.expert_scales != nullptr) weights[j] *= routes.expert_scales[selected[j]];
  }
}

void place_rows(const Routes& routes, int64_t n_rows) {
  int32_t* const offsets = routes.offsets;
  int32_t* const copy_rows = routes.copy_rows;
  const int64_t n = n_rows * routes.n_used;
  std::fill_n(offsets, routes.n_experts + 1, 0);
  for (int64_t i = 0; i < n; ++i) ++offsets[copy_rows[i] + 1];
  for (int32_t e = 0; e < routes.n_experts; ++e) offsets[e + 1] += offsets[e];
  // Each offset advances to the end of its expert, where the next one begins.
  for (int64_t i = 0; i < n; ++i) copy_rows[i] = offsets[copy_rows[i]]++;
  std::copy_backward(offsets, offsets + routes.n_experts, offsets + routes.n_experts + 1);
  offsets[0] = 0;
}

}  // namespace h2o
