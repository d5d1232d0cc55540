// The angles of rotary position embedding.
#pragma once

#include <vector>

#include "core/tensor.h"
#include "model/config.h"

namespace h2o {

// Radians per position [n_rot / 2], scaled as the model says. `divisors` are those of a Llama 3
// file (tensor rope_freqs.weight) or empty.
std::vector<float> rope_frequencies(const RopeConfig& rope, const Tensor& divisors);

}  // namespace h2o
