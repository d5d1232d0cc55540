// The feed-forward block of a mixture of experts.
#pragma once

#include "backend/backend.h"
#include "model/activations.h"
#include "model/config.h"
#include "model/weights.h"

namespace h2o {

// a.x += what the experts of each row of a.h make of it, and the shared one.
void add_mixture(Backend& b, const Config& c, const Weights& w, int32_t layer,
                 const Activations& a);

}  // namespace h2o
