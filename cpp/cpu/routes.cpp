#include "cpu/routes.h"

#include <algorithm>

namespace h2o {

void choose_experts(const Routes& routes, const float* probabilities, int64_t i) {
  float* weights = routes.weights + i * routes.n_used;
  int32_t* chosen = routes.copy_rows + i * routes.n_used;
  float sum = 0;
  for (int32_t j = 0; j < routes.n_used; ++j) {
    int32_t best = -1;
    for (int32_t e = 0; e < routes.n_experts; ++e) {
      const bool larger = best < 0 || probabilities[e] > probabilities[best];
      if (larger && std::find(chosen, chosen + j, e) == chosen + j) best = e;
    }
    chosen[j] = best;
    weights[j] = probabilities[best];
    sum += weights[j];
  }
  const float factor = routes.normalized ? routes.scale / sum : routes.scale;
  for (int32_t j = 0; j < routes.n_used; ++j) weights[j] *= factor;
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
