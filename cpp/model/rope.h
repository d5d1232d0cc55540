// The angles of rotary position embedding, and the slopes of ALiBi.
#pragma once

#include <vector>

#include "core/tensor.h"
#include "model/config.h"

namespace h2o {

// Radians per position [n_rot / 2], with the model's scaling. `divisors`: from a Llama 3 file
// (tensor rope_freqs.weight), from LongRoPE (rope_factors_*.weight), or empty.
std::vector<float> rope_frequencies(const RopeConfig& rope, const Tensor& divisors);

// ALiBi slopes (arXiv 2108.12409) [n_heads]: how much a head's logits fall per token of distance,
// from 2^-(max_bias / n_heads) to 2^-max_bias.
std::vector<float> alibi_slopes(int32_t n_heads, float max_bias);

}  // namespace h2o
