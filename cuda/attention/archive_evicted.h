// What the cache evicts goes to the archive, in the host's memory.
#pragma once

#include "cuda/runtime/device.h"
#include "cuda/runtime/device_batch.h"
#include "kv/view.h"

namespace h2o::cuda {

// Of the segments of one row: the tokens in their next slots, if they were evicted.
void archive_evicted(const Stream& stream, const KvView& cache, const DeviceBatch& batch,
                     int32_t n_segments);

// Of a longer segment, when it is known who stays, and before anything takes their slots.
void archive_evicted(const Stream& stream, const KvView& cache, const Segment& segment);

}  // namespace h2o::cuda
