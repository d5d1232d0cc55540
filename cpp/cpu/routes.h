// Routing of rows to experts.
#pragma once

#include "backend/backend.h"

namespace h2o {

// Selects the experts of row i, written to `copy_rows`, and computes their weights from its scores
// (SparseMixer: its logits). `bias` may be null.
void select_experts(const Routes& routes, const float* scores, const float* bias, int64_t i);

// Computes offsets, and replaces the experts in `copy_rows` by row indices.
void place_rows(const Routes& routes, int64_t n_rows);

}  // namespace h2o
