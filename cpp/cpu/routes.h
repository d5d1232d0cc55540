// Which experts the rows of a batch go to.
#pragma once

#include "backend/backend.h"

namespace h2o {

// The weights of row i, from the probabilities of its experts, and in `places` the experts.
void choose_experts(const Routes& routes, const float* probabilities, int64_t i);

// Offsets, and places from the experts that are there.
void place_rows(const Routes& routes, int64_t n_rows);

}  // namespace h2o
