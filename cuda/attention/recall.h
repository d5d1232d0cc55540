// What queries attend to in the archive: the pages whose keys may matter most to them. Their keys
// and values are read where they are, in the host's memory; the bounds of all pages are on the
// device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/backend.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/device_batch.h"
#include "kv/view.h"

namespace h2o::cuda {

struct PrefillStep;

// Has a sequence of this length an archive that it reads?
H2O_HD inline bool has_archived(const KvPolicy& policy, int32_t length) {
  return policy.kept(length) < length;
}

// What a query recalls, in parts with a softmax each: those of query head h of row i begin at
// (i * n_heads + h) * n.
struct RecalledSums {
  float* out = nullptr;      // [rows, n_heads, n, head_dim] weighed by e^(logit - largest)
  float* largest = nullptr;  // [rows, n_heads, n] of the logits
  float* total = nullptr;    // [rows, n_heads, n] of the weights
  int32_t n = 0;             // 0: nothing is recalled
};

// Bytes of memory that recall() needs, a multiple of 256: 0 without an archive.
size_t recall_workspace(const KvView& shape);

// Of the segments of one row that have archived something: rows are sequences.
RecalledSums recall(const Stream& stream, const Attention& attention, const KvView& cache,
                    const DeviceBatch& batch, int32_t n_segments, std::byte* workspace);

// Of a longer segment, added to its output and to step.lse.
void add_recalled(const Stream& stream, const Attention& attention, const PrefillStep& step,
                  std::byte* workspace);

}  // namespace h2o::cuda
