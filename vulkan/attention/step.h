// The arguments that all shaders of one attention operation read.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/backend.h"
#include "kv/view.h"
#include "vulkan/runtime/device_batch.h"

namespace h2o::vulkan {

// Mirrors Step in shaders/kv.glsl, which says what its members are: device addresses, then numbers.
struct Step {
  uint64_t k, v, positions, scores, value_norms, ranks, next_slot, policies, output_gram;
  uint64_t staged_k, staged_v, staged_scores, staged_value_norms, rope_table;
  uint64_t q, new_k, new_v, out, frequencies, sinks, slopes, segments, segment_of;
  uint64_t lse, logits, partial_out, partial_shift, partial_total, admission;
  int64_t k_row_bytes, v_row_bytes;
  int32_t n_heads, n_kv_heads, head_dim, slots, max_rows, first_head;
  int32_t n_half, pairs, window, reads, evicts;
  float scale, softcap, magnitude;
};

// How the keys of queries are split: the attention of each split is computed on its own.
class Splits {
 public:
  explicit Splits(const KvView& cache);

  int32_t of_decode() const { return n_; }

  // Splits of a chunk of n_rows rows: a few rows alone would not keep a GPU busy.
  static int32_t of_chunk(int32_t n_rows);

  int64_t n_partials() const { return n_partials_; }

 private:
  int32_t n_;
  int64_t n_partials_;
};

// Bytes of the workspace of attend(), whose arrays place_workspace() sets.
size_t workspace_bytes(const KvView& shape);
void place_workspace(Step& step, const KvView& cache);

// The part of a Step that describes the cache.
Step describe(const KvView& cache, const Rope& rope);

}  // namespace h2o::vulkan
