// Routing of rows to experts.
#pragma once

#include "backend/backend.h"

namespace h2o {

// Selects the experts of row i, written to `copy_rows`, and their weights from its probabilities.
void choose_experts(const Routes& routes, const float* probabilities, int64_t i);

// Computes offsets, and replaces the experts in `copy_rows` by row indices.
void place_rows(const Routes& routes, int64_t n_rows);

}  // namespace h2o
