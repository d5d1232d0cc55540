// Gated DeltaNet; see backend/backend.h.
#pragma once

#include "backend/backend.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/device_batch.h"
#include "kv/view.h"

namespace h2o::cuda {

void delta_net(const Stream& stream, const DeltaNet& layer, const KvView& cache,
               const DeviceBatch& batch, int32_t n_segments);

void split_blocks(const Stream& stream, const Tensor& a, const Tensor& b, const Tensor& x,
                  int64_t width);

}  // namespace h2o::cuda
