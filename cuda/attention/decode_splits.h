// The first launch of decode(): each block attends to a part of the slots.
#pragma once

#include "cuda/runtime/device.h"
#include "cuda/runtime/device_batch.h"
#include "kv/view.h"

namespace h2o::cuda {

struct Decode;

// With Whole rows: segments that are not rolling, with Rolled those that are, if head_dim is a
// multiple of 8 and at most 256. With Single: the segments that no other kernel handles.
template <class Rows>
void decode_splits(const Stream& stream, const Decode& decode, const KvView& cache,
                   const DeviceBatch& batch);

}  // namespace h2o::cuda
