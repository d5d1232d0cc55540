// The kernels of prefill_attention(): on tensor cores, with f16 products and f32 sums; and in f32,
// for all head sizes and types, but slow.
#pragma once

#include <cstdint>

#include "cuda/runtime/device.h"

namespace h2o::cuda {

struct PrefillStep;

constexpr int32_t kMostTileQueries = 128;  // per block of prefill_mma()
constexpr int32_t kRowTileQueries = 16;    // per block of prefill_f32()

// The size of rows in tiles for heads of this size; 0: tensor cores cannot be used.
int tile_dim(int head_dim);

// Fills step.k_halves and step.v_halves.
void dequantize_rows(const Stream& stream, const PrefillStep& step);

// Keys and values are f16 in the cache, or in step.k_halves and step.v_halves.
void prefill_mma(const Stream& stream, const PrefillStep& step);
void prefill_f32(const Stream& stream, PrefillStep step);

// Adds the probabilities of the segment's rows to the scores. Call after prefill_mma(), which
// stores their log-sum-exp and step.q_halves.
void score_tiles(const Stream& stream, const PrefillStep& step);

// The same after prefill_f32(), which stores the log-sum-exp. Scores of Scoring::question are
// updated by score_questions() only, also after prefill_mma().
void score_rows(const Stream& stream, const PrefillStep& step);
void score_questions(const Stream& stream, const PrefillStep& step);

}  // namespace h2o::cuda
