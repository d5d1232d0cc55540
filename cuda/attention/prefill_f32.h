// Prefill attention for all head sizes and types, in f32.
#pragma once

#include <cstdint>

#include "cuda/runtime/device.h"

namespace h2o::cuda {

struct PrefillStep;

constexpr int32_t kRowTileQueries = 16;  // per block

void prefill_f32(const Stream& stream, PrefillStep step);

// Adds the probabilities of the segment's rows to the scores. Call after prefill_f32(), which
// stores their log-sum-exp. Scores of Scoring::question are updated by score_questions() only, also
// after prefill_mma().
void score_rows(const Stream& stream, const PrefillStep& step);
void score_questions(const Stream& stream, const PrefillStep& step);

}  // namespace h2o::cuda
