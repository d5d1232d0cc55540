// Attention to archived pages with the largest estimated logits. Keys and values are read directly
// from host memory; the bounds of all pages are on the device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/backend.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/device_batch.h"
#include "kv/view.h"

namespace h2o::cuda {

struct PrefillStep;

// Does this kv_head of a sequence of this length have archived tokens?
H2O_HD inline bool has_archived(const KvView& cache, const KvPolicy& policy, int32_t length,
                                int32_t kv_head) {
  return policy.kept(length) < length && cache.archive_heads[kv_head] >= 0;
}

// Partial results over recalled pages, each with its own softmax: those of query head h of row i
// start at (i * n_heads + h) * n.
struct RecalledSums {
  float* out = nullptr;      // [rows, n_heads, n, head_dim] weighted by e^(logit - largest)
  float* largest = nullptr;  // [rows, n_heads, n] largest logit
  float* total = nullptr;    // [rows, n_heads, n] sum of the weights
  int32_t n = 0;             // 0: nothing is recalled
};

// Workspace size of recall(), a multiple of 256; 0 without an archive.
size_t recall_workspace(const KvView& shape);

// Attends, for segments of one row, to archived tokens; rows are indexed by sequence.
RecalledSums recall(const Stream& stream, const Attention& attention, const KvView& cache,
                    const DeviceBatch& batch, std::byte* workspace);

// Adds a longer segment's to its output and to step.lse.
void add_recalled(const Stream& stream, const Attention& attention, const PrefillStep& step,
                  std::byte* workspace);

}  // namespace h2o::cuda
