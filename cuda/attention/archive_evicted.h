// Archives evicted tokens in host memory.
#pragma once

#include "cuda/runtime/device.h"
#include "cuda/runtime/device_batch.h"
#include "kv/view.h"

namespace h2o::cuda {

// For segments of one row: archives the tokens in their next slots, if they were evicted.
void archive_evicted(const Stream& stream, const KvView& cache, const DeviceBatch& batch,
                     int32_t n_segments);

// For a longer segment, after eviction has been decided and before slots are overwritten.
void archive_evicted(const Stream& stream, const KvView& cache, const Segment& segment);

}  // namespace h2o::cuda
