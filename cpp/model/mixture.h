// The feed-forward block of a mixture of experts.
#pragma once

#include "backend/backend.h"
#include "model/activations.h"
#include "model/config.h"
#include "model/weights.h"

namespace h2o {

// a.x += output of the experts chosen for each row of a.h, and of the shared expert.
void add_mixture(Backend& b, const Config& c, const Weights& w, int32_t layer,
                 const Activations& a);

}  // namespace h2o
