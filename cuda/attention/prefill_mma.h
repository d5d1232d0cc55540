// Prefill attention on tensor cores: f16 products, f32 sums.
#pragma once

#include <cstdint>

#include "cuda/runtime/device.h"

namespace h2o::cuda {

struct PrefillStep;

constexpr int32_t kMostTileQueries = 128;  // per block

bool tiles_support(int head_dim);

// Keys and values are f16 in the cache, or in step.k_halves and step.v_halves.
void prefill_mma(const Stream& stream, const PrefillStep& step);

// Adds the probabilities of the segment's rows to the scores. Call after prefill_mma(), which
// stores their log-sum-exp and step.q_halves.
void score_tiles(const Stream& stream, const PrefillStep& step);

}  // namespace h2o::cuda
