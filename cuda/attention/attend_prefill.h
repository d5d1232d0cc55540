// Attention of the rows of one segment, many at a time.
#pragma once

#include <cstddef>

#include "backend/backend.h"
#include "cuda/runtime/device.h"
#include "kv/view.h"

namespace h2o::cuda {

// Bytes of cache.workspace that prefill_attention() needs, from its start.
size_t prefill_workspace(const KvView& shape);

// The rows of `segment` attend to what the cache kept and to the rows up to themselves. q is
// rotated; keys and values are where SegmentKeys says. Their probabilities are added to the scores,
// if the policy keeps any. `recalls`: the workspace of recall(), where they attend to the archive
// too; else nullptr.
void prefill_attention(const Stream& stream, const Attention& attention, const KvView& cache,
                       const Segment& segment, std::byte* recalls);

}  // namespace h2o::cuda
