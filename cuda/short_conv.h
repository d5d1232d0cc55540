// Gated short convolutions; see ShortConv in backend/backend.h.
#pragma once

#include "backend/backend.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/device_batch.h"
#include "kv/view.h"

namespace h2o::cuda {

void short_conv(const Stream& stream, const ShortConv& layer, const KvView& cache,
                const DeviceBatch& batch, int32_t n_segments);

}  // namespace h2o::cuda
