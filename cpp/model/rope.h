// The angles of rotary position embedding, and the slopes of ALiBi.
#pragma once

#include <vector>

#include "core/tensor.h"
#include "model/config.h"

namespace h2o {

// Radians per position [n_rot / 2], scaled as the model says. `divisors` are those of a Llama 3
// file (tensor rope_freqs.weight), or of one with LongRoPE (rope_factors_*.weight), or empty.
std::vector<float> rope_frequencies(const RopeConfig& rope, const Tensor& divisors);

// By how much the logits of each head fall with a token of distance (ALiBi, arXiv 2108.12409),
// [n_heads]. The slopes run from 2^-(max_bias / n_heads) to 2^-max_bias.
std::vector<float> alibi_slopes(int32_t n_heads, float max_bias);

}  // namespace h2o
