// Prefill attention of one segment.
#pragma once

#include <cstddef>

#include "backend/backend.h"
#include "cuda/runtime/device.h"
#include "kv/view.h"

namespace h2o::cuda {

// Bytes of cache.workspace that prefill_attention() uses, from its start.
size_t prefill_workspace(const KvView& shape);

// The rows of `segment` attend to the cached tokens and to the rows up to themselves. q is rotated;
// keys and values are located by SegmentKeys. Adds their probabilities to the scores, if the policy
// uses scores. `recalls`: the workspace of recall() if they also attend to the archive; else
// nullptr.
void prefill_attention(const Stream& stream, const Attention& attention, const KvView& cache,
                       const Segment& segment, std::byte* recalls);

}  // namespace h2o::cuda
